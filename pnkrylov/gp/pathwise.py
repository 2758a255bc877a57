"""Joint draws of predictions: draws of the prior, corrected by what the data say.

A draw of the prior at inputs and new points, with noise added at the inputs, is a data set y' of
its own. `f' - k*^T C y'` has exactly the combined covariance, whatever the run resolves, because y'
is independent of it; `f' - k*^T Khat^-1 y'` has the mathematical one. In between,
`f' - k*^T (C + (1 - sqrt(nu)) D) y'` with `Khat^-1 = C + D` has both parts, the computational one
scaled by nu.

Source: Wilson et al. (2021) for pathwise conditioning; that C makes the combined variance is
IterGP's argument (Wenger et al. 2022); the mixture is ours.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray

from pnkrylov._structure import VectorStructure
from pnkrylov.ciq import sqrt_matvec
from pnkrylov.gp.data import Observations, ShiftedOperator, run_operator, shifted_by, stored
from pnkrylov.gp.deflation import deflated_solves
from pnkrylov.gp.measured import Measured
from pnkrylov.gp.operator import KernelOperator
from pnkrylov.gp.prediction import Calibrated
from pnkrylov.gp.remainder import edge, next_vector

_HIGHEST = jax.lax.Precision.HIGHEST
# Added to the prior at equal points, relative to its variance, so that its root exists.
_JITTER = 1e-6


@eqx.filter_jit
def joint_covariance(measured: Measured, points: Float[Array, " s *p"]) -> lx.MatrixLinearOperator:
    """Covariance of f at points, for the first output; its diagonal is that of the prediction.

    The combined covariance is exact. In the remainder, correlations are taken to be those of the
    residuals of the kernel rows; what is then not positive semi-definite is cut off, and the
    diagonal is restored by scaling.
    """
    calibrated, data = Calibrated.of(measured, points), measured.data
    tridiagonal, level, basis = calibrated.tridiagonal, measured.level(), measured.run.basis
    coordinates = calibrated.rows.coordinates
    half = tridiagonal.head(level).factor_transpose_mv(coordinates.T)
    explained = jnp.matmul(half.T, half, precision=_HIGHEST) / tridiagonal.unit
    combined = data.operator.kernel.matrix(points, points) - explained
    residuals = measured.into(data.operator.cross(points))
    residuals = residuals - jnp.matmul(coordinates, basis.vectors, precision=_HIGHEST)
    edges = jnp.matmul(coordinates, edge(tridiagonal, level), precision=_HIGHEST)
    residuals = residuals - edges[:, None] * next_vector(basis, level)[None, :]
    norms = jnp.linalg.norm(residuals, axis=1)
    deviations = jnp.sqrt(calibrated.remainder) / jnp.where(norms > 0, norms, 1)
    residuals = deviations[:, None] * residuals
    remainder = jnp.matmul(residuals, residuals.T, precision=_HIGHEST)
    matrix = combined - (1 - calibrated.scale[0]) * remainder
    values, vectors = jnp.linalg.eigh((matrix + matrix.T) / 2)
    matrix = jnp.matmul(vectors * jnp.maximum(values, 0)[None, :], vectors.T, precision=_HIGHEST)
    variances = calibrated.rows.combined - (1 - calibrated.scale[0]) * calibrated.remainder
    found = jnp.diagonal(matrix)
    scale = jnp.sqrt(jnp.where(found > 0, variances / jnp.where(found > 0, found, 1), 0))
    matrix = scale[:, None] * matrix * scale[None, :]
    return lx.MatrixLinearOperator((matrix + matrix.T) / 2, lx.positive_semidefinite_tag)


def sample(
    measured: Measured,
    key: PRNGKeyArray,
    points: Float[Array, " s *p"],
    mean: Float[Array, "k s"],
    num_samples: int,
    rtol: float = 1e-2,
) -> Float[Array, "N k s"]:
    """Draws of f at points.

    The prior is drawn by CIQ, which takes any kernel: random features would need its spectral
    density. Draws of one call are draws of the same functions at all points.

    Args:
        measured: the run.
        key: random key.
        points: new points.
        mean: the predicted mean there.
        num_samples: number of draws N.
        rtol: relative error of the draws of the prior.

    Returns:
        The draws.

    Raises:
        ToleranceNotMetError: the prior could not be drawn to `rtol`.
    """
    data = measured.data
    count, outputs = num_samples * data.num_outputs, data.num_outputs
    prior_key, noise_key, probe_key = jax.random.split(key, 3)
    joint = _joint_prior(data, points)
    white = jax.random.normal(prior_key, (count, joint.size), joint.dtype)
    prior = sqrt_matvec(joint, white, key=probe_key, rtol=rtol, random_rhs=True).value
    noise = jax.random.normal(noise_key, (count, data.size), joint.dtype)
    draws = _conditioned(measured, points, prior, noise).reshape(num_samples, outputs, -1)
    return mean[None] + draws


def _joint_prior(data: Observations, points: Array) -> ShiftedOperator:
    """The kernel matrix of inputs and points, with jitter."""
    operator = data.operator
    inputs = jnp.concatenate([operator.inputs, points])
    joint = KernelOperator(
        kernel=operator.kernel,
        inputs=inputs,
        block_rows=operator.block_rows,
        structure=VectorStructure.flat(len(inputs), operator.dtype),
    )
    jitter = max(_JITTER, 1e3 * float(jnp.finfo(operator.dtype).eps))
    jitter = jitter * jnp.mean(joint.diagonal())
    return shifted_by(stored(joint), jitter)


@eqx.filter_jit
def _conditioned(
    measured: Measured, points: Array, prior: Float[Array, "M j"], noise: Float[Array, "M n"]
) -> Float[Array, "M s"]:
    """Draws of the prior at all points, less what the run says of them given their own data."""
    data, basis, level = measured.data, measured.run.basis, measured.level()
    outputs = data.num_outputs
    calibrated = Calibrated.of(measured, points)
    tridiagonal, scale = calibrated.tridiagonal, calibrated.scale
    deviation = jnp.sqrt(data.noise)
    deviation = deviation if deviation.ndim == 0 else deviation[None, :]
    targets = measured.into(prior[:, : data.size] + deviation * noise)
    resolved = measured.solution(targets, tridiagonal, level)
    weights = jnp.matmul(resolved, basis.vectors, precision=_HIGHEST)
    if measured.start == "data":
        operator = run_operator(data, data.kernel_matrix(), measured.run.preconditioner)
        left, _ = deflated_solves(operator, measured.shift(), basis, tridiagonal, targets)
        ahead = measured.solution(targets, tridiagonal, basis.filled) - resolved
        left = left + jnp.matmul(ahead, basis.vectors, precision=_HIGHEST)
        share = jnp.tile(1 - jnp.sqrt(scale), len(targets) // outputs)
        weights = weights + share[:, None] * left
    weights = measured.out_of(weights)
    return prior[:, data.size :] - data.operator.cross_mv(points, weights)
