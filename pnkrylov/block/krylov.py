"""A block Lanczos run from k vectors at once -> a `BlockKrylovBasis`; every step is k products.

Directions that the block has lost (dependent right-hand sides, columns that converged first) become
zero rows, so that shapes stay what they are under `jit`.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from pnkrylov._arguments import check_array
from pnkrylov.basis import Frame
from pnkrylov.block.orthonormal import orthonormal_rows
from pnkrylov.krylov import (
    Driver,
    Interruptible,
    check_num_steps,
    is_concrete,
    safe_norm,
)
from pnkrylov.operators import DenseOperator, SparseOperator, SPDOperator, as_operator

_HIGHEST = jax.lax.Precision.HIGHEST
# Gram-Schmidt reads only the rows filled so far, up to the end of a segment; segments double.
_FIRST_SEGMENT = 32


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
        return _cut(self, max(int(self.filled), 1))


def block_lanczos(
    A: Any,
    starts: Float[Array, "k d"],
    num_steps: int,
    *,
    driver: Driver = "auto",
    progress: bool = False,
) -> BlockKrylovBasis:
    """Runs block Lanczos with full re-orthogonalisation.

    Args:
        A: anything `as_operator` takes without `like`; symmetric.
        starts: `(k, d)`, the start vectors as rows; dependent or zero ones are fine.
        num_steps: block steps n, from 1 to d; each spends k products. Independent vectors fill the
            space after `ceil(d / k)` steps, what comes then is zero.
        driver: as for `lanczos`; `"auto"` runs on the host whatever is not a stored matrix.
        progress: show a progress bar; implies the host driver.

    Returns:
        A `BlockKrylovBasis` with n blocks.

    Raises:
        TypeError: A or `starts` is of another kind or dtype, or `num_steps` no int.
        ValueError: `num_steps` is out of range, `starts` does not have d columns, or `driver` is
            unknown.

    Source:
        Golub and Underwood 1977; METHOD.md section 14. Gram-Schmidt by the recurrence, within the
        block, against the basis and within the block once more: Barlow and Smoktunowicz 2013.
    """
    operator = as_operator(A)
    check_array(starts, "starts", "k", "d")
    if starts.dtype != operator.dtype:
        raise TypeError(
            f"starts has dtype {starts.dtype}, but A has dtype {operator.dtype}; cast one of the "
            "two with .astype."
        )
    if starts.shape[1] != operator.size:
        raise ValueError(
            f"starts has shape {starts.shape}, but A has size {operator.size}: start vectors are "
            f"rows, so pass an array of shape (k, {operator.size})."
        )
    basis = begin_block_run(starts)
    return continue_block_run(basis, operator, num_steps, driver=driver, progress=progress)


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


def continue_block_run(
    basis: BlockKrylovBasis,
    operator: SPDOperator,
    num_steps: int,
    *,
    driver: Driver = "auto",
    progress: bool = False,
) -> BlockKrylovBasis:
    """Adds `num_steps` block steps to a run whose blocks are all filled.

    Raises:
        ValueError: there would be more than d blocks, or `driver` is unknown or cannot run here.
    """
    check_num_steps(num_steps, operator.size, taken=basis.num_blocks)
    driver = _choose(driver, operator, basis, progress)
    total = basis.num_blocks + num_steps
    if driver == "compiled":
        return _compiled_run(operator, basis, total)
    return _host_run(operator, basis, total, progress=progress)


def _choose(
    driver: Driver, operator: SPDOperator, basis: BlockKrylovBasis, progress: bool
) -> Driver:
    if driver not in ("auto", "compiled", "host"):
        raise ValueError(f"driver={driver!r} is unknown: use 'auto', 'compiled' or 'host'.")
    if not is_concrete((operator, basis)):
        if driver == "host" or progress:
            raise ValueError(
                "driver='host' and progress=True need concrete values: call the run outside "
                "jit/vmap/grad, or use driver='compiled' there."
            )
        return "compiled"
    if progress:
        return "host"
    if driver != "auto":
        return driver
    # k products outweigh the 0.2 ms that the host loop costs, unless the matrix is stored.
    return "compiled" if isinstance(operator, DenseOperator | SparseOperator) else "host"


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


def _cut(basis: BlockKrylovBasis, num_blocks: int) -> BlockKrylovBasis:
    rows = num_blocks * basis.block_size
    return dataclasses.replace(
        basis,
        vectors=basis.vectors[:rows],
        present=basis.present[:rows],
        diagonal=basis.diagonal[:num_blocks],
        coupling=basis.coupling[:num_blocks],
    )


def _segments(first: int, last: int, size: int) -> list[int]:
    """Ends of the segments that cover the blocks `first..last-1`, doubling from 32 rows on."""
    ends, end = [], -(-_FIRST_SEGMENT // size)
    while end < last:
        if end > first:
            ends.append(end)
        end *= 2
    return [*ends, last]


@eqx.filter_jit
def _compiled_run(operator: SPDOperator, basis: BlockKrylovBasis, total: int) -> BlockKrylovBasis:
    first = basis.num_blocks
    for end in _segments(first, total, basis.block_size):
        basis = jax.lax.fori_loop(
            first,
            end,
            lambda index, state: block_step(operator, state, index),
            pad_blocks(basis, end),
        )
        first = end
    return basis


# Everything but the operator is donated: the basis is updated in place.
@eqx.filter_jit(donate="all-except-first")
def host_block_step(
    operator: SPDOperator, basis: BlockKrylovBasis, index: Int[Array, ""]
) -> BlockKrylovBasis:
    """One step for loops in Python; the basis that is passed is used up."""
    return block_step(operator, basis, index)


def _host_run(
    operator: SPDOperator, basis: BlockKrylovBasis, total: int, *, progress: bool
) -> BlockKrylovBasis:
    begin = done = basis.num_blocks
    # A copy, because the steps update the basis in place and the caller keeps theirs.
    basis = dataclasses.replace(jax.tree.map(jnp.copy, basis), driver="host")
    with (
        Interruptible() as interrupt,
        tqdm(total=total, initial=begin, desc="Block", unit="step", disable=not progress) as bar,
    ):
        for end in _segments(begin, total, basis.block_size):
            basis = pad_blocks(basis, end)
            while done < end and not (interrupt.requested and done > begin):
                index = jnp.asarray(done, jnp.int32)
                basis = jax.block_until_ready(host_block_step(operator, basis, index))
                done += 1
                bar.update()
    return _cut(basis, done)
