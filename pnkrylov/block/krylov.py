"""A block Lanczos run from k vectors at once -> a `BlockKrylovBasis`, by one of two loops.

As for single vectors (`pnkrylov.krylov`), the compiled loop and the one on the host give the same.
"""

import dataclasses
import os
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from pnkrylov._arguments import check_array
from pnkrylov._loops import check_loop
from pnkrylov._outside import multiplied
from pnkrylov.block.basis import BlockKrylovBasis as BlockKrylovBasis
from pnkrylov.block.basis import begin_block_run as begin_block_run
from pnkrylov.block.basis import block_step as block_step
from pnkrylov.block.basis import first_blocks
from pnkrylov.block.basis import pad_blocks as pad_blocks
from pnkrylov.checkpoints import BLOCKS, Checkpoint, open_checkpoint
from pnkrylov.interruption import Interruptible, check_seconds, time_limit
from pnkrylov.krylov import Driver, check_num_steps, is_concrete
from pnkrylov.operators import DenseOperator, SparseOperator, SPDOperator, as_operator

# Gram-Schmidt reads only the rows filled so far, up to the end of a segment; segments double.
_FIRST_SEGMENT = 32


def block_lanczos(
    A: Any,
    starts: Float[Array, "k d"],
    num_steps: int,
    *,
    driver: Driver = "auto",
    progress: bool = False,
    max_seconds: float | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_seconds: float = 60.0,
) -> BlockKrylovBasis:
    """Runs block Lanczos with full re-orthogonalisation.

    Args:
        A: anything `as_operator` takes without `like`; symmetric.
        starts: `(k, d)`, the start vectors as rows; dependent or zero ones are fine.
        num_steps: block steps n, from 1 to d; each spends k products. Independent vectors fill the
            space after `ceil(d / k)` steps, what comes then is zero.
        driver: as for `lanczos`; `"auto"` runs on the host whatever is not a stored matrix. What
            follows implies the host driver.
        progress: show a progress bar.
        max_seconds: stop after the step in progress when so much time has passed; the basis then
            has fewer blocks, at least one.
        checkpoint: folder in which to keep the run, as for `lanczos`; one block step is spent on
            checking that it is of this operator.
        checkpoint_seconds: least time between two writes to it.

    Returns:
        A `BlockKrylovBasis` with n blocks.

    Raises:
        TypeError: A or `starts` is of another kind or dtype, `num_steps` no int, or a limit no
            number of seconds.
        ValueError: `num_steps` is out of range, `starts` does not have d columns, `driver` is
            unknown, or the checkpoint of another run or damaged.

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
    check_seconds("max_seconds", max_seconds)
    keeper = open_checkpoint(checkpoint, checkpoint_seconds, BLOCKS)
    with time_limit(max_seconds):
        return continue_block_run(
            begin_block_run(starts),
            operator,
            num_steps,
            driver=driver,
            progress=progress,
            limited=max_seconds is not None,
            keeper=keeper,
        )


def continue_block_run(
    basis: BlockKrylovBasis,
    operator: SPDOperator,
    num_steps: int,
    *,
    driver: Driver = "auto",
    progress: bool = False,
    limited: bool = False,
    keeper: Checkpoint | None = None,
) -> BlockKrylovBasis:
    """Adds `num_steps` block steps to a run without room; fewer if it is interrupted.

    Args:
        basis: the run so far.
        operator: its operator.
        num_steps: further block steps.
        driver: as in `block_lanczos`.
        progress: as in `block_lanczos`.
        limited: whether a time limit is in force.
        keeper: the checkpoint, or None.

    Raises:
        ValueError: there would be more than d blocks, or `driver` is unknown or cannot run here.
    """
    check_num_steps(num_steps, operator.size, taken=basis.num_blocks)
    concrete = is_concrete((operator, basis))
    check_loop(
        driver,
        concrete=concrete,
        local=not concrete or basis.next_block.is_fully_addressable,
        progress=progress,
        limited=limited,
        kept=keeper is not None,
    )
    total = basis.num_blocks + num_steps
    if progress or limited or keeper is not None:
        driver = "host"
    elif not concrete:
        driver = "compiled"
    elif driver == "auto":
        # k products outweigh the 0.2 ms that the host loop costs, unless the matrix is stored.
        stored = isinstance(operator, DenseOperator | SparseOperator)
        driver = "compiled" if stored else "host"
    if driver == "compiled":
        return _compiled_run(operator, basis, total)
    return _host_run(operator, basis, total, progress, keeper)


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
def _host_step(
    operator: SPDOperator, basis: BlockKrylovBasis, index: Int[Array, ""]
) -> BlockKrylovBasis:
    return block_step(operator, basis, index)


class HostBlockRun:
    """A Python loop around one jitted step, with its checkpoint.

    Args:
        operator: A.
        basis: the run so far, with room; it is copied, because steps update it in place.
        done: steps that were taken.
        limit: steps to take in all; those on disk are taken at once.
        keeper: the checkpoint, or None.

    Attributes:
        basis: the run.
        done: steps that were taken.
    """

    def __init__(
        self,
        operator: SPDOperator,
        basis: BlockKrylovBasis,
        done: int,
        limit: int,
        keeper: Checkpoint | None,
    ) -> None:
        self._operator, self._keeper = operator, keeper
        self.basis = dataclasses.replace(jax.tree.map(jnp.copy, basis), driver="host")
        self.done = done
        if keeper is not None:
            self.basis, self.done = keeper.restore(self.basis, done, limit, self._step)

    def take(self) -> None:
        """One step, and its checkpoint if that is due."""
        # The index is an array, so that a new value does not recompile.
        index = jnp.asarray(self.done, jnp.int32)
        self.basis = jax.block_until_ready(self._step(self.basis, index))
        self.done += 1
        if self._keeper is not None and self._keeper.due():
            self.save()

    def save(self) -> None:
        """Writes what the checkpoint lacks, if there is one."""
        if self._keeper is not None:
            self._keeper.save(self.basis, self.done)

    def _step(self, basis: BlockKrylovBasis, index: Int[Array, ""]) -> BlockKrylovBasis:
        operator = multiplied(self._operator, basis.next_block)
        return _host_step(operator, basis, index)


def _host_run(
    operator: SPDOperator,
    basis: BlockKrylovBasis,
    total: int,
    progress: bool,
    keeper: Checkpoint | None,
) -> BlockKrylovBasis:
    begin = basis.num_blocks
    ends = _segments(begin, total, basis.block_size)
    saved = 0 if keeper is None else min(keeper.steps(), total)
    while ends[0] < saved:
        ends.pop(0)
    run = HostBlockRun(operator, pad_blocks(basis, ends[0]), begin, total, keeper)
    with (
        Interruptible() as interrupt,
        tqdm(total=total, initial=run.done, desc="Block", unit="step", disable=not progress) as bar,
    ):
        while run.done < total and not (interrupt.requested and run.done > begin):
            if run.done == run.basis.num_blocks:
                ends.pop(0)
                run.basis = pad_blocks(run.basis, ends[0])
            run.take()
            bar.update()
    run.save()
    return first_blocks(run.basis, run.done)
