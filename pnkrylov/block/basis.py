"""What a block run leaves behind, and the one step that makes it grow; every step is k products.

Directions that the block has lost (dependent right-hand sides, columns that converged first) become
zero rows, so that shapes stay what they are under `jit`.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pnkrylov.basis import Frame, is_concrete, safe_norm
from pnkrylov.block.orthonormal import orthonormal_rows
from pnkrylov.operators import SPDOperator

_HIGHEST = jax.lax.Precision.HIGHEST


class BlockKrylovBasis(eqx.Module):
    """What n block steps leave behind: `A Q = Q T + Q_{n+1} B_n E_n^T`, with k x k blocks in T.

    A row of `vectors` is a basis vector where `present` says so, else zero. Rows and columns of T
    that belong to absent vectors are zero as well.

    Attributes:
        vectors: `(n k, d)`, the orthonormal vectors as rows, k rows for each block.
        present: `(n k,)`, which rows are vectors.
        diagonal: `(n, k, k)`, the diagonal blocks of T.
        coupling: `(n, k, k)`, the blocks B below the diagonal; the last filled one leads to
            `next_block`.
        next_block: `(k, d)`, the block that comes next.
        next_present: `(k,)`, which of its rows are vectors.
        filled: how many blocks hold a vector.
        start_coordinates: `(k, k)`: row j holds the coordinates of `v_j / ||v_j||` in the first
            block; zero for a zero vector.
        start_norms: `(k,)`, `||v_j||_2`.
        driver: which loop ran, `"compiled"` or `"host"`.
    """

    vectors: Float[Array, "rows d"]
    present: Bool[Array, " rows"]
    diagonal: Float[Array, "n k k"]
    coupling: Float[Array, "n k k"]
    next_block: Float[Array, "k d"]
    next_present: Bool[Array, " k"]
    filled: Int[Array, ""]
    start_coordinates: Float[Array, "k k"]
    start_norms: Float[Array, " k"]
    driver: str = eqx.field(static=True, default="compiled")

    @property
    def block_size(self) -> int:
        """Vectors in a block, k."""
        return self.next_block.shape[-2]

    @property
    def num_blocks(self) -> int:
        """Blocks of storage n, filled or not."""
        return self.diagonal.shape[-3]

    @property
    def size(self) -> int:
        """Dimension d of the operator."""
        return self.vectors.shape[-1]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the basis."""
        return self.vectors.dtype

    def num_vectors(self, level: Int[Array, ""] | None = None) -> Int[Array, ""]:
        """How many basis vectors there are, or how many in the first `level` blocks."""
        inside = self.present
        if level is not None:
            rows = jnp.arange(inside.shape[0], dtype=jnp.int32)
            inside = inside & (rows < level * self.block_size)
        return jnp.sum(inside, dtype=jnp.int32)

    def exhausted(self) -> Bool[Array, ""]:
        """Whether the Krylov space is invariant: nothing comes next."""
        return ~jnp.any(self.next_present)

    def residual_norm(self) -> Float[Array, ""]:
        """The 2-norm of the coupling between the filled blocks and `next_block`."""
        last = jnp.maximum(self.filled - 1, 0)
        coupling = jax.lax.dynamic_index_in_dim(self.coupling, last, keepdims=False)
        return jnp.linalg.norm(coupling, ord=2)

    def frame(self, level: Int[Array, ""]) -> Frame:
        """What probes at level m, in blocks, stay out of; without a copy of the basis."""
        # As for `KrylovBasis.frame`.
        parts = _compiled_frame if is_concrete((self, level)) else _frame
        return Frame(self.vectors, *parts(self, level))

    def trim(self) -> "BlockKrylovBasis":
        """The same basis without its unfilled blocks (outside `jit` only: shapes change)."""
        return first_blocks(self, max(int(self.filled), 1))


def _frame(basis: BlockKrylovBasis, level: Array) -> tuple[Array, ...]:
    size, level = basis.block_size, jnp.minimum(level, basis.filled)
    inside = jnp.arange(basis.present.shape[0], dtype=jnp.int32) < level * size
    # The next block is one of the basis if the run went on.
    first = jnp.minimum(level, basis.num_blocks - 1) * size
    following = jax.lax.dynamic_slice_in_dim(basis.vectors, first, size, axis=0)
    boundary = jnp.where(level < basis.filled, following, basis.next_block)
    unit = jnp.max(jnp.abs(jnp.diagonal(basis.diagonal, axis1=1, axis2=2)))
    unit = jnp.where(unit > 0, unit, 1)
    return inside, boundary, level, basis.num_vectors(level), _norm_bound(basis), unit


_compiled_frame = eqx.filter_jit(_frame)


@eqx.filter_jit
def begin_block_run(starts: Float[Array, "k d"]) -> BlockKrylovBasis:
    """A run before its first step."""
    count, size = starts.shape
    norms = jax.vmap(safe_norm)(starts)
    units = starts / jnp.where(norms > 0, norms, 1)[:, None]
    eps = jnp.finfo(starts.dtype).eps
    tolerance = jnp.where(norms > 0, 10 * eps, 1).astype(starts.dtype)
    first, coordinates, present = orthonormal_rows(units, tolerance, jnp.asarray(size, jnp.int32))
    return BlockKrylovBasis(
        vectors=jnp.zeros((0, size), starts.dtype),
        present=jnp.zeros((0,), bool),
        diagonal=jnp.zeros((0, count, count), starts.dtype),
        coupling=jnp.zeros((0, count, count), starts.dtype),
        next_block=first,
        next_present=present,
        filled=jnp.zeros((), jnp.int32),
        start_coordinates=coordinates,
        start_norms=norms,
    )


def block_step(
    operator: SPDOperator, basis: BlockKrylovBasis, index: Int[Array, ""]
) -> BlockKrylovBasis:
    """One block step: stores block `index`, multiplies it, orthogonalises what comes next.

    A block of zeros (after a breakdown) is a fixed point: it adds zero rows.
    """
    current, size = basis.next_block, basis.block_size
    vectors = jax.lax.dynamic_update_slice_in_dim(basis.vectors, current, index * size, axis=0)
    present = jax.lax.dynamic_update_slice_in_dim(
        basis.present, basis.next_present, index * size, axis=0
    )
    product = operator.block_mv(current)
    # As in `basis.step`: the recurrence takes out what is large, one pass what rounding leaves.
    before = jax.lax.dynamic_index_in_dim(basis.coupling, jnp.maximum(index - 1, 0), keepdims=False)
    before = jnp.where(index > 0, before, 0)
    last = jax.lax.dynamic_slice_in_dim(vectors, jnp.maximum(index - 1, 0) * size, size, axis=0)
    product = product - jnp.matmul(before, last, precision=_HIGHEST)
    diagonal = jnp.matmul(product, current.T, precision=_HIGHEST)
    product = product - jnp.matmul(diagonal, current, precision=_HIGHEST)
    row_sums = jnp.sum(jnp.abs(diagonal), axis=1) + jnp.sum(jnp.abs(before), axis=1)
    operator_norm = jnp.maximum(_norm_bound(basis), jnp.max(row_sums))
    room = operator.size - jnp.sum(present, dtype=jnp.int32)
    # What is left below a few eps ||T|| is rounding.
    tolerance = 10 * jnp.finfo(product.dtype).eps * operator_norm
    rows, factor, _ = orthonormal_rows(product, jnp.full((size,), tolerance), room)
    # A small row of the product carries, once it is normalised, much rounding along the basis: the
    # pass is over the normalised rows.
    rest = jnp.matmul(rows, vectors.T, precision=_HIGHEST)
    rows = rows - jnp.matmul(rest, vectors, precision=_HIGHEST)
    kept = jnp.abs(jnp.diagonal(factor))
    tolerance = jnp.where(kept > 0, tolerance / jnp.where(kept > 0, kept, 1), 1)
    rows, again, kept = orthonormal_rows(rows, tolerance, room)
    rest = jax.lax.dynamic_slice_in_dim(rest, index * size, size, axis=1)
    diagonal = diagonal + jnp.matmul(factor, rest, precision=_HIGHEST)
    diagonal = (diagonal + diagonal.T) / 2
    coupling = jnp.matmul(factor, again, precision=_HIGHEST).T
    return BlockKrylovBasis(
        vectors=vectors,
        present=present,
        diagonal=jax.lax.dynamic_update_index_in_dim(basis.diagonal, diagonal, index, axis=0),
        coupling=jax.lax.dynamic_update_index_in_dim(basis.coupling, coupling, index, axis=0),
        next_block=rows,
        next_present=kept,
        filled=basis.filled + jnp.any(basis.next_present).astype(jnp.int32),
        start_coordinates=basis.start_coordinates,
        start_norms=basis.start_norms,
        driver=basis.driver,
    )


def _norm_bound(basis: BlockKrylovBasis) -> Array:
    """The largest absolute row sum of T so far: its norm, within a factor of a few sqrt(k)."""
    sums = jnp.sum(jnp.abs(basis.diagonal), axis=2) + jnp.sum(jnp.abs(basis.coupling), axis=1)
    return jnp.max(sums)


def pad_blocks(basis: BlockKrylovBasis, num_blocks: int) -> BlockKrylovBasis:
    """The same basis with room for `num_blocks` blocks."""
    extra = num_blocks - basis.num_blocks
    rows = extra * basis.block_size
    return dataclasses.replace(
        basis,
        vectors=jnp.pad(basis.vectors, ((0, rows), (0, 0))),
        present=jnp.pad(basis.present, (0, rows)),
        diagonal=jnp.pad(basis.diagonal, ((0, extra), (0, 0), (0, 0))),
        coupling=jnp.pad(basis.coupling, ((0, extra), (0, 0), (0, 0))),
    )


def first_blocks(basis: BlockKrylovBasis, num_blocks: int) -> BlockKrylovBasis:
    """The run without what lies behind its first blocks."""
    rows = num_blocks * basis.block_size
    return dataclasses.replace(
        basis,
        vectors=basis.vectors[:rows],
        present=basis.present[:rows],
        diagonal=basis.diagonal[:num_blocks],
        coupling=basis.coupling[:num_blocks],
    )
