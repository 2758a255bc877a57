"""A Lanczos run -> a `KrylovBasis`: orthonormal rows, their tridiagonal, and what comes next.

Two drivers give the same result. The compiled driver is one XLA loop, best for cheap products. The
host driver is a Python loop around one jitted step: on CPU, XLA runs a convolutional product
several times slower inside a loop than alone; only the host can show progress, be interrupted,
keep to a time limit and write checkpoints.
"""

import dataclasses
import os
import time
import warnings
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, PyTree
from tqdm import tqdm

from pnkrylov._loops import check_loop
from pnkrylov._outside import multiplied
from pnkrylov.basis import (
    KrylovBasis,
    begin_run,
    is_concrete,
    is_large,
    laid_out,
    pad,
    row_layout,
    safe_norm,
    segments,
    step,
)
from pnkrylov.checkpoints import Checkpoint, open_checkpoint
from pnkrylov.interruption import Interruptible, check_seconds, time_limit
from pnkrylov.operators import (
    DenseOperator,
    SparseOperator,
    SPDOperator,
    as_operator,
    check_vector,
)

__all__ = [
    "Driver",
    "Interruptible",
    "KrylovBasis",
    "advance",
    "begin_run",
    "check_num_steps",
    "continue_run",
    "first_rows",
    "host_step",
    "is_concrete",
    "is_large",
    "lanczos",
    "pad",
    "row_layout",
    "safe_norm",
    "segments",
    "step",
]

Driver = Literal["auto", "compiled", "host"]

# A product slower than this runs in the host loop, whose cost is about 0.2 ms per step.
_HOST_SECONDS_PER_STEP = 4e-3


def lanczos(
    A: Any,
    start: PyTree,
    num_steps: int,
    *,
    driver: Driver = "auto",
    progress: bool = False,
    max_seconds: float | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_seconds: float = 60.0,
) -> KrylovBasis:
    """Runs Lanczos with full re-orthogonalisation.

    A breakdown (an invariant Krylov space) is not an error: the remaining rows stay zero.

    Args:
        A: anything `as_operator` takes; symmetric.
        start: start vector, an array `(d,)` or the operator's pytree. If it is one sharded array,
            so are the rows of the basis.
        num_steps: number of products to spend, from 1 to d.
        driver: `"compiled"` (one XLA loop), `"host"` (a Python loop around a jitted step), or
            `"auto"`: compiled under `jit` and for stored matrices, host for NumPy operators and
            with several processes, else by timing the first steps. What follows implies the host
            driver.
        progress: show a progress bar.
        max_seconds: stop after the step in progress when so much time has passed; the basis then
            has fewer rows, at least one.
        checkpoint: folder in which to keep the run. A call that was killed goes on from there
            when it is made again, and gives the same answer; a finished one returns at once. One
            product is spent on checking that the checkpoint is of this operator.
        checkpoint_seconds: least time between two writes to it.

    Returns:
        A `KrylovBasis` with `num_steps` rows.

    Raises:
        TypeError, ValueError: A or `start` is not as `as_operator` takes it; `num_steps` is no int
            from 1 to d, a limit no number of seconds, `driver` unknown, or the checkpoint of
            another run or damaged.

    Source:
        Lanczos 1950; two passes, the first of which is the recurrence, are enough: Giraud, Langou,
        Rozloznik and van den Eshof 2005.
    """
    operator = as_operator(A, like=start)
    flat = check_vector(operator, start, "start")
    return continue_run(
        begin_run(flat),
        operator,
        num_steps,
        driver=driver,
        progress=progress,
        max_seconds=max_seconds,
        checkpoint=checkpoint,
        checkpoint_seconds=checkpoint_seconds,
    )


def continue_run(
    basis: KrylovBasis,
    A: Any,
    num_steps: int,
    *,
    driver: Driver = "auto",
    progress: bool = False,
    max_seconds: float | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_seconds: float = 60.0,
) -> KrylovBasis:
    """Adds `num_steps` steps to a run; the result is that of one longer run, to rounding.

    Args:
        basis: the run so far. Every row must be filled, or the Krylov space exhausted
            (`basis.trim()` removes the unfilled rows of an adaptive run).
        A: the operator of the run so far; for a callable on pytrees, `as_operator(A, like=v)`.
        num_steps: further steps, at least 1; at most d rows in total.
        driver: as in `lanczos`.
        progress: as in `lanczos`.
        max_seconds: as in `lanczos`.
        checkpoint: as in `lanczos`; it may hold more or fewer steps than `basis`.
        checkpoint_seconds: as in `lanczos`.

    Returns:
        A `KrylovBasis` with `basis.num_rows + num_steps` rows; fewer only if a host run was
        interrupted from the keyboard or by `max_seconds`, after at least one step.

    Raises:
        TypeError, ValueError: `basis` is none, or A of another size or dtype; the total number of
            steps is no int from 1 to d, a limit no number of seconds, `driver` unknown, or the
            checkpoint of another run or damaged.

    Source:
        As `lanczos`.
    """
    if not isinstance(basis, KrylovBasis):
        raise TypeError(
            f"basis is of type {type(basis).__name__}: pass what pnkrylov.lanczos returned."
        )
    operator = A if isinstance(A, SPDOperator) else as_operator(A, like=basis.next_vector)
    check_seconds("max_seconds", max_seconds)
    with time_limit(max_seconds):
        basis, done = advance(
            basis,
            operator,
            num_steps,
            driver=driver,
            progress=progress,
            limited=max_seconds is not None,
            keeper=open_checkpoint(checkpoint, checkpoint_seconds),
        )
    return first_rows(basis, done)


def advance(
    basis: KrylovBasis,
    operator: SPDOperator,
    num_steps: int,
    *,
    driver: Driver,
    progress: bool,
    limited: bool = False,
    keeper: Checkpoint | None = None,
    spare: int = 0,
) -> tuple[KrylovBasis, int]:
    """`continue_run`, for those who go on with the run.

    Args:
        basis: the run so far, without unfilled rows.
        operator: its operator.
        num_steps: further steps.
        driver: as in `lanczos`.
        progress: as in `lanczos`.
        limited: whether a time limit is in force.
        keeper: the checkpoint, or None.
        spare: steps that may follow. A large basis gets room for them at once, because making it
            longer later takes the memory of two.

    Returns:
        The run and how many steps it has; a run that was interrupted, or has spare room, has
        unfilled rows.
    """
    if operator.size != basis.size:
        raise ValueError(
            f"A has {operator.size} rows but the basis has vectors of length {basis.size}: "
            "continue a run with the operator that started it."
        )
    check_num_steps(num_steps, operator.size, taken=basis.num_rows)
    total = basis.num_rows + num_steps
    room = total + spare if is_large(total + spare, _row_bytes(basis)) else total
    on_host = progress or limited or keeper is not None
    concrete = is_concrete((operator, basis))
    alone = not concrete or basis.next_vector.is_fully_addressable
    check_loop(
        driver,
        concrete=concrete,
        local=alone,
        progress=progress,
        limited=limited,
        kept=keeper is not None,
    )
    if on_host or (not alone and driver == "auto"):
        # Processes that time their products might decide differently, and wait for each other.
        driver = "host"
    elif not concrete or (
        driver == "auto" and isinstance(operator, DenseOperator | SparseOperator)
    ):
        driver = "compiled"
    elif driver == "auto" and operator.runs_on_host():
        # Nothing is gained by calling NumPy from inside an XLA loop, and JAX has known deadlocks
        # of callbacks on CPU.
        driver = "host"
    if driver == "compiled":
        layout = row_layout(basis.next_vector)
        return _compiled_run(operator, basis, total, room, layout), total
    run = _HostRun(operator, basis, total, room, keeper)
    return run.take(progress=progress, may_switch=driver == "auto")


def check_num_steps(num_steps: int, size: int, *, name: str = "num_steps", taken: int = 0) -> None:
    """Refuses a number of steps outside 1..d, counting the `taken` rows already there."""
    if isinstance(num_steps, bool) or not isinstance(num_steps, int | np.integer):
        raise TypeError(f"{name}={num_steps!r} must be an int, not {type(num_steps).__name__}.")
    if num_steps < 1:
        raise ValueError(f"{name}={num_steps} must be at least 1.")
    if taken + num_steps > size:
        already = f" after the {taken} already taken" if taken else ""
        raise ValueError(
            f"{name}={num_steps}{already} exceeds the dimension d={size}: a Krylov space has at "
            f"most d dimensions. Use at most {size - taken}."
        )


def _row_bytes(basis: KrylovBasis) -> int:
    return basis.size * basis.dtype.itemsize


def first_rows(basis: KrylovBasis, count: int) -> KrylovBasis:
    """The basis without the room behind its first `count` rows."""
    # Not even a full slice where there is nothing to cut: it may be a copy.
    if basis.num_rows == count:
        return basis
    return dataclasses.replace(
        basis, vectors=basis.vectors[:count], alpha=basis.alpha[:count], beta=basis.beta[:count]
    )


@eqx.filter_jit
def _compiled_run(
    operator: SPDOperator, basis: KrylovBasis, total: int, room: int, layout: NamedSharding | None
) -> KrylovBasis:
    first = basis.num_rows

    def body(index, state):
        return laid_out(step(operator, state, index), layout)

    for end in segments(first, total, _row_bytes(basis)):
        # The last segment has room to spare.
        padded = laid_out(pad(basis, room if end == total else end), layout)
        basis = jax.lax.fori_loop(first, end, body, padded)
        first = end
    return basis


def host_step(
    operator: SPDOperator,
    basis: KrylovBasis,
    index: Int[Array, ""],
    layout: NamedSharding | None = None,
) -> KrylovBasis:
    """One step as a program of its own; `basis` is used up."""
    return _host_step(multiplied(operator, basis.next_vector), basis, index, layout)


# Everything but the operator is donated: the basis is updated in place.
@eqx.filter_jit(donate="all-except-first")
def _host_step(
    operator: SPDOperator, basis: KrylovBasis, index: Int[Array, ""], layout: NamedSharding | None
) -> KrylovBasis:
    return laid_out(step(operator, basis, index), layout)


class _HostRun:
    """A Python loop around one jitted step."""

    def __init__(
        self,
        operator: SPDOperator,
        basis: KrylovBasis,
        total: int,
        room: int,
        keeper: Checkpoint | None,
    ) -> None:
        self._operator, self._keeper, self._total = operator, keeper, total
        self._begin = self._done = basis.num_rows
        self._layout = row_layout(basis.next_vector)
        ends = segments(self._begin, total, _row_bytes(basis))
        self._ends = [*ends[:-1], room]
        saved = 0 if keeper is None else min(keeper.steps(), total)
        while self._ends[0] < saved:
            self._ends.pop(0)
        # A copy, because the steps update the basis in place and the caller keeps theirs.
        self._basis = pad(dataclasses.replace(basis, driver="host"), self._ends[0])
        if keeper is not None:
            self._basis, self._done = keeper.restore(self._basis, self._done, total, self._step)

    def take(self, *, progress: bool, may_switch: bool) -> tuple[KrylovBasis, int]:
        """Takes the steps; a quick product moves on to the compiled driver if it may."""
        first, total, switch = self._done, self._total, False
        with (
            Interruptible() as interrupt,
            tqdm(
                total=total, initial=first, desc="Lanczos", unit="step", disable=not progress
            ) as bar,
        ):
            while self._done < total and not switch:
                if interrupt.requested and self._done > self._begin:
                    break
                seconds = self._take_one()
                bar.update()
                # The third step is the first one that neither compiles nor warms up.
                switch = may_switch and self._done == first + 3 and seconds < _HOST_SECONDS_PER_STEP
        if self._keeper is not None:
            self._keeper.save(self._basis, self._done)
        if interrupt.from_keyboard and self._done < total:
            warnings.warn(
                f"The Lanczos run was interrupted from the keyboard after {self._done} of {total} "
                "steps; the result describes the steps that were taken.",
                RuntimeWarning,
                stacklevel=4,
            )
        if switch and self._done < total:
            basis = dataclasses.replace(first_rows(self._basis, self._done), driver="compiled")
            room = self._ends[-1]
            return _compiled_run(self._operator, basis, total, room, self._layout), total
        return self._basis, self._done

    def _take_one(self) -> float:
        """One step, its checkpoint if that is due, and the seconds that the step took."""
        if self._done == self._basis.num_rows:
            self._ends.pop(0)
            self._basis = pad(self._basis, self._ends[0])
        started = time.perf_counter()
        # The index is an array, so that a new value does not recompile.
        index = jnp.asarray(self._done, jnp.int32)
        self._basis = jax.block_until_ready(self._step(self._basis, index))
        seconds = time.perf_counter() - started
        self._done += 1
        if self._keeper is not None and self._keeper.due():
            self._keeper.save(self._basis, self._done)
        return seconds

    def _step(self, basis: KrylovBasis, index: Int[Array, ""]) -> KrylovBasis:
        return host_step(self._operator, basis, index, self._layout)
