"""The recurrences that msMINRES, Lanczos-FA and the spectral bounds share.

`k` Lanczos runs advance together, one row each: the vectors are `(k, d)`, one block product
serves all of them, and nothing but the last two vectors is kept. Everything about the shifted
systems `T + t I` is scalar, `(q, k)` for `q` shifts.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pnkrylov.operators import SPDOperator

_EXACT = jax.lax.Precision.HIGHEST


class ThreeTerm(eqx.Module):
    """Where `k` Lanczos runs stand: the last two vectors and the coupling between them.

    A run whose Krylov space is exhausted (or whose right-hand side is zero) is not alive. Its
    vectors are zero and stay zero, so that it cannot disturb the other rows.
    """

    current: Float[Array, "k d"]
    previous: Float[Array, "k d"]
    beta: Float[Array, " k"]
    alive: Bool[Array, " k"]


def start(rows: Float[Array, "k d"]) -> tuple[ThreeTerm, Float[Array, " k"]]:
    """Normalises the right-hand sides; returns the state before the first product and the norms."""
    # Scaled twice, so that neither tiny nor huge entries under- or overflow when squared.
    scale = jnp.max(jnp.abs(rows), axis=1)
    alive = scale > 0
    scale = jnp.where(alive, scale, jnp.ones_like(scale))
    rows = rows / scale[:, None]
    norms = jnp.linalg.norm(rows, axis=1)
    rows = rows / jnp.where(alive, norms, jnp.ones_like(norms))[:, None]
    state = ThreeTerm(
        current=rows, previous=jnp.zeros_like(rows), beta=jnp.zeros_like(norms), alive=alive
    )
    return state, norms * scale


def advance(
    operator: SPDOperator,
    state: ThreeTerm,
    scale: Float[Array, ""],
    basis: Float[Array, "m k d"] | None = None,
    filled: Int[Array, ""] | None = None,
) -> tuple[ThreeTerm, Float[Array, " k"]]:
    """One Lanczos step of all rows by one block product; returns the diagonal entries alpha.

    `scale` is the size of `||A||` as far as it is known: a residual of a few roundings of it
    (or of the entries of this step) is none, and ends its row. With a `basis`, whose first
    `filled` entries are the vectors so far, the new vectors are kept orthogonal to all of them.
    """
    product = block_product(operator, state.current)
    product = product - state.beta[:, None] * state.previous
    alpha = jnp.sum(product * state.current, axis=1)
    residual = product - alpha[:, None] * state.current
    if basis is not None and filled is not None:
        residual = orthogonalise(basis, filled, residual)
    return finish(state, residual, jnp.maximum(scale, jnp.abs(alpha) + state.beta)), alpha


def store(
    basis: Float[Array, "m k d"], index: Int[Array, ""], rows: Float[Array, "k d"]
) -> Float[Array, "m k d"]:
    """Writes the current vectors of all runs into the basis."""
    return jax.lax.dynamic_update_slice_in_dim(basis, rows[None], index, axis=0)


# Rows of the basis that one Gram-Schmidt product reads: the work follows the rows filled so far.
_CHUNK = 32


def orthogonalise(
    basis: Float[Array, "m k d"], filled: Int[Array, ""], rows: Float[Array, "k d"]
) -> Float[Array, "k d"]:
    """Two Gram-Schmidt passes of every row against its own basis; unfilled entries are zero.

    Source:
        Giraud, Langou, Rozloznik and van den Eshof (2005): two passes are enough.
    """
    size = min(_CHUNK, basis.shape[0])

    def project(index: Array, rows: Array) -> Array:
        # The last chunk is shifted to end inside the buffer; projecting twice is harmless.
        part = jax.lax.dynamic_slice_in_dim(basis, index * size, size, axis=0)
        if basis.shape[1] == 1:
            part, row = part[:, 0], rows[0]
            return (
                rows
                - jnp.matmul(jnp.matmul(part, row, precision=_EXACT), part, precision=_EXACT)[None]
            )
        inner = jnp.einsum("mkd,kd->mk", part, rows, precision=_EXACT)
        return rows - jnp.einsum("mk,mkd->kd", inner, part, precision=_EXACT)

    chunks = (filled + size - 1) // size
    for _ in range(2):
        rows = jax.lax.fori_loop(0, chunks, project, rows)
    return rows


def finish(state: ThreeTerm, residual: Float[Array, "k d"], scale: Float[Array, " k"]) -> ThreeTerm:
    """Normalises the residuals of a step, and ends the rows that have none."""
    beta = jnp.linalg.norm(residual, axis=1)
    # Written so that a NaN stays visible: it is not a breakdown.
    alive = state.alive & ~(beta <= 10 * jnp.finfo(beta.dtype).eps * scale)
    beta = jnp.where(alive, beta, jnp.zeros_like(beta))
    inverse = jnp.where(alive, 1 / jnp.where(alive, beta, jnp.ones_like(beta)), 0)
    return ThreeTerm(
        current=residual * inverse[:, None], previous=state.current, beta=beta, alive=alive
    )


def block_product(operator: SPDOperator, rows: Float[Array, "k d"]) -> Float[Array, "k d"]:
    """`A v` for every row; a single row takes the cheaper single product."""
    if rows.shape[0] == 1:
        return operator.mv(rows[0])[None, :]
    return operator.block_mv(rows)


class Rotations(eqx.Module):
    """QR factorisation of the shifted tridiagonals `[T + t_q I; beta e^T]`, one Givens per step.

    `residual` is the norm of the MINRES residual of each shifted system, relative to its
    right-hand side, with its sign in the recurrence. All fields are `(q, k)`.
    """

    cosine: Float[Array, "q k"]
    sine: Float[Array, "q k"]
    cosine_before: Float[Array, "q k"]
    sine_before: Float[Array, "q k"]
    residual: Float[Array, "q k"]

    @staticmethod
    def initial(shifts: Float[Array, " q"], alive: Bool[Array, " k"]) -> "Rotations":
        """Before the first step: the residual is the right-hand side, zero for dead rows."""
        shape = (shifts.shape[0], alive.shape[0])
        ones, zeros = jnp.ones(shape, shifts.dtype), jnp.zeros(shape, shifts.dtype)
        residual = jnp.where(alive[None, :], ones, zeros)
        return Rotations(ones, zeros, ones, zeros, residual)


class RotatedColumn(eqx.Module):
    """The newest column of the triangular factor, and the weight of its search direction."""

    diagonal: Float[Array, "q k"]
    above: Float[Array, "q k"]
    two_above: Float[Array, "q k"]
    weight: Float[Array, "q k"]


def rotate(
    rotations: Rotations,
    shifts: Float[Array, " q"],
    alpha: Float[Array, " k"],
    beta_before: Float[Array, " k"],
    beta: Float[Array, " k"],
) -> tuple[Rotations, RotatedColumn]:
    """Extends the factorisation by one Lanczos step.

    Source:
        Paige and Saunders (1975), SIAM J. Numer. Anal. 12, section 6, for each shift.
    """
    shifted = alpha[None, :] + shifts[:, None]
    two_above = rotations.sine_before * beta_before[None, :]
    above = rotations.cosine_before * beta_before[None, :]
    diagonal = rotations.cosine * shifted - rotations.sine * above
    above = rotations.cosine * above + rotations.sine * shifted
    radius = jnp.sqrt(diagonal**2 + (beta**2)[None, :])
    cosine, sine = diagonal / radius, beta[None, :] / radius
    column = RotatedColumn(radius, above, two_above, cosine * rotations.residual)
    rotations = Rotations(
        cosine=cosine,
        sine=sine,
        cosine_before=rotations.cosine,
        sine_before=rotations.sine,
        residual=-sine * rotations.residual,
    )
    return rotations, column


class Pivots(eqx.Module):
    """Pivots of `T - x I` for a set of points `x`: their signs count eigenvalues below `x`.

    `gauss` is the Gauss quadrature of the inverse, `e_1^T (T - x I)^-1 e_1`, a lower bound of
    `b^T (A - x I)^-1 b / ||b||^2` where all pivots are positive. Fields are `(n, k)`.
    """

    pivot: Float[Array, "n k"]
    entry: Float[Array, "n k"]
    gauss: Float[Array, "n k"]
    positive: Bool[Array, "n k"]

    @staticmethod
    def initial(points: Float[Array, " n"], alive: Bool[Array, " k"]) -> "Pivots":
        """Before the first step."""
        ones = jnp.ones((points.shape[0], alive.shape[0]), points.dtype)
        entry = jnp.where(alive[None, :], ones, jnp.zeros_like(ones))
        return Pivots(ones, entry, jnp.zeros_like(ones), jnp.ones_like(ones, dtype=bool))

    def extend(
        self,
        points: Float[Array, " n"],
        alpha: Float[Array, " k"],
        beta_before: Float[Array, " k"],
        beta: Float[Array, " k"],
    ) -> "Pivots":
        """Adds one row of T, with the couplings before and after it."""
        pivot = alpha[None, :] - points[:, None] - (beta_before**2)[None, :] / self.pivot
        positive = pivot > 0
        # Beyond the first sign change only the sign matters: 1 keeps what follows finite.
        pivot = jnp.where(positive, pivot, jnp.ones_like(pivot))
        return Pivots(
            pivot=pivot,
            entry=-beta[None, :] / pivot * self.entry,
            gauss=self.gauss + self.entry**2 / pivot,
            positive=self.positive & positive,
        )
