"""Gram-Schmidt within a block, row by row; what is lost becomes a zero row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pnkrylov.basis import safe_norm

_HIGHEST = jax.lax.Precision.HIGHEST


def orthonormal_rows(
    block: Float[Array, "k d"], tolerance: Float[Array, " k"], room: Int[Array, ""]
) -> tuple[Float[Array, "k d"], Float[Array, "k k"], Bool[Array, " k"]]:
    """`block = F Q` with orthonormal rows in Q, row by row; F is lower triangular.

    A row of which no more than its tolerance is left beside the rows before it becomes a zero row
    of Q: that changes the block by no more than the tolerance. Householder's QR would keep an
    arbitrary direction instead, which later rows lean on, and Cholesky's fails.

    Args:
        block: the rows.
        tolerance: for each row, what counts as nothing.
        room: at most so many rows are kept.

    Returns:
        Q, F, and which rows of Q are not zero.
    """
    count = block.shape[0]

    def orthogonalise(index, state):
        rows, factor, present = state
        row = jax.lax.dynamic_index_in_dim(block, index, keepdims=False)
        first = jnp.matmul(rows, row, precision=_HIGHEST)
        row = row - jnp.matmul(first, rows, precision=_HIGHEST)
        second = jnp.matmul(rows, row, precision=_HIGHEST)
        row = row - jnp.matmul(second, rows, precision=_HIGHEST)
        norm = safe_norm(row)
        # NaN must not look like nothing.
        drop = (norm <= tolerance[index]) | (jnp.sum(present, dtype=jnp.int32) >= room)
        norm = jnp.where(drop, 0, norm)
        unit = jnp.where(drop, 0, row / jnp.where(norm == 0, 1, norm))
        here = jnp.arange(count, dtype=jnp.int32) == index
        return (
            jax.lax.dynamic_update_index_in_dim(rows, unit, index, axis=0),
            jnp.where(here[:, None], jnp.where(here, norm, first + second)[None, :], factor),
            present | (here & ~drop),
        )

    nothing = jnp.zeros((count,), bool)
    start = (jnp.zeros_like(block), jnp.zeros((count, count), block.dtype), nothing)
    return jax.lax.fori_loop(0, count, orthogonalise, start)
