"""What a run leaves unknown about predictions, measured where predictions are made.

For a kernel row k* the exact remainder is `k*^T (Khat^-1 - C) k* = r^T S^-1 r`, with the residual r
of k* and the Schur complement S of the run (METHOD.md section 2). Kernel rows are not random
directions: they lie where Khat is large, so an isotropic bulk is far too large for them. Probes
whose starts are kernel rows, in the complement of the run, measure `r^T S^-1 r` for a few of them,
at every noise level.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pnkrylov._operator_types import SPDOperator
from pnkrylov.gp.data import Observations, into
from pnkrylov.krylov import KrylovBasis
from pnkrylov.preconditioners import Preconditioner
from pnkrylov.probes import Probes
from pnkrylov.pslq import Boundary
from pnkrylov.tridiagonal import Tridiagonal

_HIGHEST = jax.lax.Precision.HIGHEST


class RowProbes(eqx.Module):
    """Lanczos runs in the complement of level m, started from kernel rows; without noise.

    The first rows are those of calibration points, the others `K z` for random signs z: as the
    rows of all inputs, mixed.

    Attributes:
        probes: their tridiagonals.
        norms: `(N,)`, lengths of the projected rows.
        along: `(N, l)`, components of their Lanczos vectors along q_{m+1}.
        coordinates: `(N, n)`, coordinates of the unprojected rows in the basis.
        points: `(N_c, *p)`, the calibration points.
    """

    probes: Probes
    norms: Float[Array, " N"]
    along: Float[Array, "N l"]
    coordinates: Float[Array, "N n"]
    points: Float[Array, " N_c *p"]

    @property
    def num_points(self) -> int:
        """How many of the rows belong to calibration points."""
        return self.points.shape[0]

    def forms(
        self, tridiagonal: Tridiagonal, level: Int[Array, ""], shift: Float[Array, ""]
    ) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
        """The remainders `r^T S^-1 r`, and `||r||^2`, of all rows at one noise level."""
        boundary = Boundary.of(tridiagonal, level)
        unit = tridiagonal.unit
        matrices = self.probes.tridiagonals(shift, unit)
        first = jnp.zeros((*matrices.shape[:2], 1), unit.dtype).at[:, 0].set(1)
        inverse = jnp.linalg.solve(matrices, first)[:, :, 0]
        own = self.norms**2 * inverse[:, 0]
        cross = self.norms * jnp.sum(inverse * self.along, axis=1)
        c = jnp.matmul(self.coordinates, edge(tridiagonal, level), precision=_HIGHEST)
        squares = self.norms**2 - 2 * c * self.norms * self.along[:, 0] + c**2
        # T_perp^-1 along r and e_1, and from it S^-1 = T_perp^-1 plus a rank-one term.
        corner = boundary.inverse_form()
        across = cross - c * corner
        form = own - 2 * c * cross + c**2 * corner
        form = form + boundary.gamma * (1 + boundary.gamma * boundary.p1) * across**2
        squares = jnp.maximum(squares, 0)
        # Gauss quadrature with one node: a bound that truncated forms must not fall below.
        largest = self.probes.ritz_range(shift, unit)[1]
        form = jnp.maximum(form, squares / largest)
        return jnp.where(self.probes.valid, form, 0) / unit, squares


def edge(tridiagonal: Tridiagonal, level: Int[Array, ""]) -> Float[Array, " n"]:
    """`beta_m T_m^-1 e_m`, whose product with coordinates takes a projected row to its residual.

    Unlike the coupling of `Boundary` it needs no step beyond level m.
    """
    head = tridiagonal.head(level)
    last = (tridiagonal.rows() == level - 1).astype(tridiagonal.alpha.dtype)
    return head.residual * head.solve(last)


def next_vector(basis: KrylovBasis, level: Int[Array, ""]) -> Float[Array, " n"]:
    """q_{m+1}: a row of the basis where the run went on, else its `next_vector`; or zero."""
    row = basis.vectors[jnp.minimum(level, basis.num_rows - 1)]
    return jnp.where(level < basis.filled, row, basis.next_vector)


@eqx.filter_jit
def calibration_points(
    data: Observations, key: PRNGKeyArray, count: int
) -> Float[Array, " N_c *p"]:
    """Points that lie among the inputs as new points do: next to one, as far as its neighbour.

    For a random input and the input that is most correlated with it, every coordinate moves by
    their difference times an independent standard normal number.
    """
    size, inputs = data.size, data.operator.inputs
    choice_key, move_key = jax.random.split(key)
    numbers = jnp.arange(size, dtype=jnp.int32)
    chosen = jax.random.choice(choice_key, numbers, (min(count, size),), replace=False)
    rows = jnp.abs(data.operator.columns(chosen))
    itself = numbers[None, :] == chosen[:, None]
    neighbour = jnp.argmax(jnp.where(itself, -jnp.inf, rows), axis=1)
    centre = inputs[chosen]
    moves = jax.random.normal(move_key, centre.shape, inputs.dtype)
    return centre + moves * (inputs[neighbour] - centre)


@eqx.filter_jit
def run_row_probes(
    data: Observations,
    kernel_matrix: SPDOperator,
    operator: SPDOperator,
    preconditioner: Preconditioner | None,
    basis: KrylovBasis,
    level: Int[Array, ""],
    points: Float[Array, " N_c *p"],
    key: PRNGKeyArray,
    num_mixed: int,
    depth: int,
) -> RowProbes:
    """Runs probes from the kernel rows of `points` and from `num_mixed` mixtures of all rows.

    Args:
        data: the observations.
        kernel_matrix: `W K W`.
        operator: what the run is on: `W K W`, or the preconditioned operator, noise included.
        preconditioner: P of that, or None.
        basis: the main run.
        level: m.
        points: calibration points.
        key: random key of the mixtures.
        num_mixed: number of mixtures, at least 1.
        depth: steps of each probe.

    Returns:
        The probes; they took `num_mixed + (N_c + num_mixed) depth` products.
    """
    signs = jax.random.rademacher(key, (num_mixed, data.size), operator.dtype)
    mixed = kernel_matrix.block_mv(signs)
    mixed = mixed if preconditioner is None else preconditioner.inv_sqrt_mv(mixed)
    rows = into(data, preconditioner, data.operator.cross(points))
    rows = jnp.concatenate([rows, mixed])
    coordinates = jnp.matmul(rows, basis.vectors.T, precision=_HIGHEST)
    inside = jnp.arange(basis.num_rows, dtype=jnp.int32) < level

    def project(block):
        along = jnp.matmul(block, basis.vectors.T, precision=_HIGHEST)
        along = jnp.where(inside[None, :], along, 0)
        return block - jnp.matmul(along, basis.vectors, precision=_HIGHEST)

    starts = project(project(rows))
    norms, eps = jnp.linalg.norm(starts, axis=1), jnp.finfo(starts.dtype).eps
    # What is left of a row at rounding level is no start.
    valid = norms > 10 * eps * jnp.linalg.norm(rows, axis=1)
    starts = jnp.where(valid[:, None], starts / jnp.where(valid, norms, 1)[:, None], 0)
    alpha, beta, along = _projected_lanczos(
        operator, project, starts, next_vector(basis, level), depth
    )
    probes = Probes(
        alpha=alpha,
        beta=beta,
        valid=valid,
        level=level,
        dimension=data.size - level,
        steps=jnp.asarray(depth, jnp.int32),
    )
    return RowProbes(probes, jnp.where(valid, norms, 0), along, coordinates, points)


def _projected_lanczos(
    operator: SPDOperator, project, starts: Array, marked: Array, depth: int
) -> tuple[Array, Array, Array]:
    """Coefficients of block-wise Lanczos runs, re-projected at every step.

    Returns:
        alpha and beta, `(N, l)`, and the components of the Lanczos vectors along `marked`.
    """

    def advance(state, _):
        current, previous, before = state
        product = operator.block_mv(current)
        scale = jnp.linalg.norm(product, axis=1)
        alpha = jnp.sum(product * current, axis=1)
        product = product - alpha[:, None] * current - before[:, None] * previous
        product = project(project(product))
        beta = jnp.linalg.norm(product, axis=1)
        going = beta > 10 * jnp.finfo(beta.dtype).eps * scale
        beta = jnp.where(going, beta, 0)
        following = product / jnp.where(going, beta, 1)[:, None]
        following = jnp.where(going[:, None], following, 0)
        along = jnp.matmul(current, marked, precision=_HIGHEST)
        return (following, current, beta), (alpha, beta, along)

    state = (starts, jnp.zeros_like(starts), jnp.zeros(len(starts), starts.dtype))
    _, coefficients = jax.lax.scan(advance, state, length=depth)
    alpha, beta, along = (values.T for values in coefficients)
    return alpha, beta.at[:, -1].set(0), along
