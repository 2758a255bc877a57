"""Is a belief right?

With one known answer: `z_statistic`, `s_statistic`. With many: `simulation_based_calibration`.
With none: `regime`, which asks whether what was modelled can be trusted.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.stats import chi2
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from pnkrylov.beliefs import InverseBelief, SolveBelief
from pnkrylov.covariance import KrylovCovariance
from pnkrylov.estimate import Estimate
from pnkrylov.gaussian import GaussianBelief
from pnkrylov.krylov import KrylovBasis
from pnkrylov.operators import SPDOperator, as_operator
from pnkrylov.preconditioned import inner_view
from pnkrylov.preconditioners import precondition
from pnkrylov.probes import Probes
from pnkrylov.regime import RegimeReport, regime
from pnkrylov.simulation import (
    CalibrationReport,
    Coverage,
    Uniformity,
    flat_error,
    simulation_based_calibration,
)
from pnkrylov.stats import number
from pnkrylov.tridiagonal import Tridiagonal

__all__ = [
    "CalibrationReport",
    "Coverage",
    "RegimeReport",
    "SStatistic",
    "Uniformity",
    "ZStatistic",
    "regime",
    "s_statistic",
    "simulation_based_calibration",
    "z_statistic",
]

_HIGHEST = jax.lax.Precision.HIGHEST


class ZStatistic(eqx.Module):
    """`(x - mean)^T Sigma^+ (x - mean)`, to be compared with chi2.

    Attributes:
        value: the statistic.
        degrees_of_freedom: the rank of Sigma; the mean of `value` if x is a draw of the belief.
        tail_probability: of a chi2 variable to exceed `value`. Near 0: overconfident; near 1:
            underconfident.
        outside: share of `||x - mean||^2` outside the range of Sigma, where the belief says that
            there is no error; of the order of rounding for a right belief.
    """

    value: Float[Array, "..."]
    degrees_of_freedom: Int[Array, "..."]
    tail_probability: Float[Array, "..."]
    outside: Float[Array, "..."]

    def __str__(self) -> str:
        return (
            f"Z = {number(self.value)} against chi2({number(self.degrees_of_freedom)}), tail "
            f"probability {number(self.tail_probability)}, outside the range "
            f"{number(self.outside)}"
        )


def z_statistic(belief: GaussianBelief, x: PyTree) -> ZStatistic:
    """The error of a belief in units of what the belief expects, and its chi2 tail.

    For a SolveBelief at level m the rank is d - m + 1: the bulk has d - m - 1 directions and the
    coupling plane two. (The exact remainder `A^-1 - Q T^-1 Q^T` has rank d - m; its compression to
    the plane is that of the belief, so its expected statistic is d - m + 1 as well.) The rank is
    one less where the plane is degenerate: a look-ahead of one step, or an isotropic complement.

    Args:
        belief: a belief about `A^-1 v`, or about `A^-1`.
        x: the exact answer `A^-1 v`; for an InverseBelief a draw from `N(mean, A^-1)`. In the
            user's structure.

    Returns:
        The statistic. Under `jit` and `vmap` as well.

    Raises:
        TypeError, ValueError: `x` has another structure, or `belief` is a batch or no belief.

    Source:
        METHOD.md section 5 (the Z-statistic of Cockayne, Ipsen, Oates and Reid 2021).
    """
    error = flat_error(belief, x, "x")
    covariance, error = inner_view(belief.covariance, error)
    return _z_statistic(covariance, error)


@eqx.filter_jit
def _z_statistic(covariance: KrylovCovariance, error: Float[Array, " d"]) -> ZStatistic:
    dtype = error.dtype
    coordinates = jnp.matmul(covariance.vectors, error, precision=_HIGHEST)
    explored = jnp.where(covariance.explored, coordinates, 0)
    along_u = jnp.where(covariance.has_u, jnp.sum(covariance.directions[1] * coordinates), 0)
    if covariance.resolved is None:
        block, rank, outside = _singular_block(covariance, explored, along_u)
    else:
        block, rank = _regular_block(covariance, covariance.resolved, explored, along_u)
        outside = jnp.zeros((), dtype)
    bulk = covariance.unexplored(error)
    dimension = covariance.bulk_dimension()
    varied = (covariance.bulk_deviation > 0) & (dimension > 0)
    scaled = bulk / jnp.where(varied, covariance.bulk_deviation, 1)
    value = block + jnp.where(varied, jnp.sum(scaled**2), 0)
    outside = outside + jnp.where(varied, 0, jnp.sum(bulk**2))
    rank = rank + jnp.where(varied, dimension, 0)
    total = jnp.sum(error**2)
    tail = chi2.sf(value, jnp.maximum(rank, 1).astype(dtype))
    return ZStatistic(
        value=value,
        degrees_of_freedom=rank,
        # A belief without any variance has nothing to say about errors inside its range.
        tail_probability=jnp.where(rank > 0, tail, jnp.where(jnp.isnan(value), value, 1)),
        outside=outside / jnp.where(total > 0, total, 1),
    )


def _singular_block(
    covariance: KrylovCovariance, explored: Array, along_u: Array
) -> tuple[Array, Array, Array]:
    """Statistic, rank and squared error outside, in the explored rows and u: `[q u] C [q u]^T`."""
    direction = covariance.directions[0]
    along_q = jnp.sum(direction * explored)
    beside = jnp.sum((explored - along_q * direction) ** 2)
    # C = F F^T with F lower triangular; F_22 comes from a difference that may be all rounding.
    (first, _), (lower, second) = covariance.coupling_factor
    variance = lower**2 + second**2
    exists = (first > 0) | (variance > 0)
    full = (first > 0) & (second**2 > 100 * jnp.finfo(first.dtype).eps * variance)
    step = along_q / jnp.where(full, first, 1)
    both = step**2 + ((along_u - lower * step) / jnp.where(full, second, 1)) ** 2
    # Rank one: the range is along (F_11, F_21), or u if F_11 vanishes.
    slope = jnp.where(lower < 0, -1, 1) * jnp.sqrt(variance)
    length = jnp.where(exists, jnp.hypot(first, slope), 1)
    inside = (along_q * first + along_u * slope) / length
    across = jnp.where(exists, (along_q * slope - along_u * first) / length, 0)
    across = jnp.where(exists, across**2, along_q**2 + along_u**2)
    single = jnp.where(exists, (inside / length) ** 2, 0)
    rank = jnp.where(full, 2, jnp.where(exists, 1, 0)).astype(jnp.int32)
    return jnp.where(full, both, single), rank, beside + jnp.where(full, 0, across)


def _regular_block(
    covariance: KrylovCovariance, resolved: Tridiagonal, explored: Array, along_u: Array
) -> tuple[Array, Array]:
    """Statistic and rank in the resolved rows and u, by `T = L D L^T` and Sherman-Morrison."""
    coupling = jnp.matmul(
        covariance.coupling_factor, covariance.coupling_factor.T, precision=_HIGHEST
    )
    variance = jnp.where(coupling[1, 1] > 0, coupling[1, 1], 1)
    direction = covariance.directions[0]
    # Given u, the resolved block is T^-1 + left q q^T around a shifted mean.
    left = coupling[0, 0] - coupling[0, 1] ** 2 / variance
    white = _whiten(resolved, explored - coupling[0, 1] / variance * along_u * direction)
    white_q = _whiten(resolved, direction)
    correction = left * jnp.sum(white_q * white) ** 2 / (1 + left * jnp.sum(white_q**2))
    value = along_u**2 / variance + jnp.sum(white**2) - correction
    rank = jnp.sum(covariance.explored, dtype=jnp.int32) + covariance.has_u.astype(jnp.int32)
    return value, rank


def _whiten(tridiagonal: Tridiagonal, vector: Float[Array, " n"]) -> Float[Array, " n"]:
    """`D^{1/2} L^T vector`, unscaled: its squared norm is `vector^T T vector`."""
    inside = jnp.where(tridiagonal.rows() < tridiagonal.filled, vector, 0)
    shifted = inside.at[:-1].add(tridiagonal.ratios * inside[1:])
    return jnp.sqrt(tridiagonal.pivots * tridiagonal.unit) * shifted


class SStatistic(eqx.Module):
    """`||x - mean||_A^2`, to be compared with `tr(A Sigma)`.

    Attributes:
        value: the squared energy norm of the error.
        expected: `tr(A Sigma)`, what the belief expects `value` to be, and its standard error.
        spread: standard deviation of `value` if x is a draw of the belief.
        num_matvecs: products that were spent here.
    """

    value: Float[Array, "..."]
    expected: Estimate
    spread: Float[Array, "..."]
    num_matvecs: Int[Array, "..."]

    @property
    def ratio(self) -> Float[Array, "..."]:
        """`value / expected`: below 1 the belief is underconfident in the energy norm."""
        return self.value / self.expected.value

    def __str__(self) -> str:
        return (
            f"S = {number(self.value)} against {number(self.expected.value)} "
            f"+- {number(self.expected.standard_error)}, spread {number(self.spread)}"
        )


def s_statistic(
    A: Any, belief: GaussianBelief, x: PyTree, *, key: PRNGKeyArray, num_probes: int = 16
) -> SStatistic:
    """The error of a belief in the energy norm of `A + alpha I`, against its expectation.

    Between the Lanczos vectors A is known (it is T), and there Sigma is a small matrix. Outside,
    Sigma is `omega I`, and only the trace of A is unknown: orthonormal random probes give it,
    exactly if there are as many as directions.

    An isotropic bulk puts energy into stiff directions, so `value / expected` falls far below 1
    on steep spectra although Z is right (METHOD.md section 5).

    Args:
        A: the operator of the belief, unshifted.
        belief: a belief about `A^-1 v`, or about `A^-1`.
        x: the exact answer, as for `z_statistic`.
        key: random key of the probes.
        num_probes: probes, one product each, in one block with that of the error.

    Returns:
        The statistic. Under `jit` and `vmap` as well.

    Raises:
        TypeError, ValueError: `x` has another structure, `belief` is a batch, or `num_probes` is
            not a positive integer.

    Source:
        METHOD.md section 5 (the S-statistic of Bartels, Cockayne, Ipsen and Hennig 2019).
    """
    if isinstance(num_probes, bool) or not isinstance(num_probes, int) or num_probes < 1:
        raise ValueError(f"num_probes={num_probes!r} must be an int of at least 1.")
    if not isinstance(belief, SolveBelief | InverseBelief):
        raise TypeError(f"belief is of type {type(belief).__name__}: it must hold its run.")
    error = flat_error(belief, x, "x")
    operator = as_operator(A, like=belief.structure.tree)
    operator = precondition(operator, belief.run.preconditioner)
    return _s_statistic(operator, belief, error, key, min(num_probes, belief.structure.size))


@eqx.filter_jit
def _s_statistic(
    operator: SPDOperator,
    belief: SolveBelief | InverseBelief,
    error: Float[Array, " d"],
    key: PRNGKeyArray,
    num_probes: int,
) -> SStatistic:
    covariance, error = inner_view(belief.covariance, error)
    basis, alpha = belief.run.basis, belief.alpha
    probes, valid = _complement_probes(basis, key, num_probes)
    block = jnp.concatenate([error[None, :], probes])
    products = operator.block_mv(block) + alpha * block
    forms = jnp.sum(block * products, axis=1)
    small = covariance.push(basis.vectors)
    stiffness = basis.tridiagonal() + jnp.diag(jnp.where(basis.mask(), alpha, 0))
    product = jnp.matmul(stiffness, small, precision=_HIGHEST)

    # tr(A Sigma) and tr((A Sigma)^2), block by block: basis, coupling beta, complement.
    dimension = basis.size - basis.filled
    outside, outside_error = _sphere_mean(forms[1:], valid, dimension)
    images = _remove(basis, products[1:])
    outside_square, _ = _sphere_mean(jnp.sum(images**2, axis=1), valid, dimension)
    bulk = covariance.bulk_deviation**2
    last = jnp.maximum(basis.filled - 1, 0)
    square = (
        jnp.sum(product * product.T)
        + 2 * bulk * basis.residual_norm() ** 2 * small[last, last]
        + bulk**2 * outside_square
    )
    spent = jnp.asarray(1 + num_probes, jnp.int32)
    expected = Estimate(
        jnp.trace(product) + bulk * outside, jnp.where(bulk > 0, bulk * outside_error, 0), spent
    )
    return SStatistic(forms[0], expected, jnp.sqrt(2 * square), spent)


def _complement_probes(
    basis: KrylovBasis, key: PRNGKeyArray, num_probes: int
) -> tuple[Float[Array, "k d"], Array]:
    """Orthonormal random rows orthogonal to the basis, and which of them exist."""
    noise = jax.random.normal(key, (num_probes, basis.size), basis.dtype)
    columns, _ = jnp.linalg.qr(_remove(basis, _remove(basis, noise)).T)
    # Orthogonalised again: QR may leave a few eps along the basis.
    columns, _ = jnp.linalg.qr(_remove(basis, columns.T).T)
    valid = jnp.arange(num_probes, dtype=jnp.int32) < basis.size - basis.filled
    return jnp.where(valid[:, None], columns.T, 0), valid


def _remove(basis: KrylovBasis, block: Float[Array, "k d"]) -> Float[Array, "k d"]:
    coordinates = jnp.matmul(block, basis.vectors.T, precision=_HIGHEST)
    return block - jnp.matmul(coordinates, basis.vectors, precision=_HIGHEST)


def _sphere_mean(forms: Array, valid: Array, dimension: Array) -> tuple[Array, Array]:
    """A trace from quadratic forms of orthonormal probes, and its standard error."""
    alpha = forms[:, None]
    level, steps = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
    return Probes(alpha, jnp.zeros_like(alpha), valid, level, dimension, steps).mean(forms)
