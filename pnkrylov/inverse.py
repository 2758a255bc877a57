"""The front door `inverse`: a belief about `A^-1` itself."""

import dataclasses
import os
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._doors import check_compatible, require_key, without_probes
from pnkrylov.basis import KrylovBasis, begin_run, is_concrete
from pnkrylov.beliefs import InverseBelief, inverse_belief
from pnkrylov.block.inverse import BlockInverseBelief, inverse_block
from pnkrylov.block.solve import refuse_for_blocks
from pnkrylov.budgets import check_positive_counts, main_steps, split_budget
from pnkrylov.checkpoints import open_checkpoint
from pnkrylov.interruption import check_seconds, time_limit
from pnkrylov.krylov import Driver, advance, first_rows
from pnkrylov.operators import as_operator, check_vector
from pnkrylov.preconditioners import Preconditioner, precondition
from pnkrylov.probes import probe_tolerance, run_probes
from pnkrylov.runs import Run, finish, probe_symmetry, scalar, with_trace_probes


def inverse(
    A: Any,
    *,
    key: PRNGKeyArray | None = None,
    like: PyTree | None = None,
    mean: PyTree | None = None,
    num_steps: int | None = None,
    budget: int | None = None,
    lookahead: int = 20,
    num_probes: int = 8,
    probe_depth: int = 20,
    block_size: int = 1,
    layout: Literal["resolve-all", "paper"] = "resolve-all",
    shift: float | Float[Array, ""] = 0.0,
    start: PyTree | None = None,
    preconditioner: Preconditioner | None = None,
    check_symmetric: bool = True,
    driver: Driver = "auto",
    progress: bool = False,
    max_seconds: float | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_seconds: float = 60.0,
    throw: bool = True,
) -> InverseBelief | BlockInverseBelief:
    """A Gaussian with covariance close to `(A + shift I)^-1`, from one Lanczos run and probes.

    Args:
        A: symmetric positive definite (positive semi-definite if `shift` makes up for it); see
            `as_operator`.
        key: random key, for the start vector, the symmetry check and the probes.
        like: example of a vector, needed for callables only (`mean` and `start` serve as well).
        mean: centre of the draws, zero by default.
        num_steps: m, steps of the main run, 1 to d; `min(d, 100)` by default.
        budget: all products to spend, instead of the sizes: about a quarter at most goes to the
            probes (less if the complement is well conditioned), the rest to the run. Not under
            `jit`.
        lookahead: l, further steps that show the coupling at level m. With the default layout
            their vectors are resolved as well.
        num_probes: N, random probes for the trace of the complement.
        probe_depth: most steps of each probe; they stop when their quadrature has converged.
        block_size: k above 1 runs blocks of k random start vectors instead of one, for operators
            whose product with k vectors costs little more than with one; steps and look-ahead are
            then counted in blocks. See `inverse_block` for what it does not take.
        layout: `"resolve-all"` resolves all m + l vectors and spreads the rest isotropically;
            `"paper"` resolves m and keeps the exact coupling at level m.
        shift: alpha such that `A + alpha I` is positive definite; costs nothing.
        start: start vector, random normal by default; k of them as rows for blocks.
        preconditioner: P, close to A: the run is on `P^-1/2 A P^-1/2` and everything is mapped
            back exactly; the bulk has the shape of P^-1. N more probes measure the trace of the
            original operator. Not together with `shift` (build A and P with it).
        check_symmetric: spend two products on checking that A is symmetric.
        driver: `"auto"`, `"compiled"` or `"host"` (see `lanczos`).
        progress: show progress bars (host driver). With the host driver, Ctrl-C ends the phase in
            progress (main run, then probes) and the belief describes what was computed.
        max_seconds: time limit of the whole call (host driver): main run and probes end like after
            a Ctrl-C, without a warning; `belief.stats` tells how far they came. A quarter is kept
            for the probes.
        checkpoint: folder in which to keep the main run (host driver): the same call, made again
            after it was killed, goes on from there (see `lanczos`). Probes are run again.
        checkpoint_seconds: least time between two writes to it.
        throw: raise on failure; with False the belief carries `result` and NaN instead.

    Returns:
        An `InverseBelief`; a `BlockInverseBelief` for blocks.

    Raises:
        TypeError, ValueError: wrong shapes, dtypes or sizes; a missing key.
        PnkrylovError: NaN or infinity, a non-symmetric or indefinite operator.

    Source:
        pslq.md, sections 4 and 5; METHOD.md sections 3 and 4.
    """
    if block_size != 1:
        refuse_for_blocks(
            "runs of single vectors: leave it out, or use block_size=1",
            preconditioner=preconditioner,
        )
        return inverse_block(
            A,
            block_size=block_size,
            key=key,
            like=like,
            mean=mean,
            num_steps=num_steps,
            budget=budget,
            lookahead=lookahead,
            num_probes=num_probes,
            probe_depth=probe_depth,
            layout=layout,
            shift=shift,
            start=start,
            check_symmetric=check_symmetric,
            driver=driver,
            progress=progress,
            max_seconds=max_seconds,
            checkpoint=checkpoint,
            checkpoint_seconds=checkpoint_seconds,
            throw=throw,
        )
    example = next((tree for tree in (like, mean, start) if tree is not None), None)
    operator = as_operator(A, like=example)
    key = require_key(key)
    size, dtype = operator.size, operator.dtype
    if layout not in ("resolve-all", "paper"):
        raise ValueError(f"layout={layout!r} is unknown: use 'resolve-all' or 'paper'.")
    check_positive_counts(lookahead=lookahead, num_probes=num_probes, probe_depth=probe_depth)
    check_compatible(preconditioner, shift=shift)
    shift = scalar(shift, "shift", dtype)
    drawn, symmetry_key, probe_key = _draw_start(key, size, np.dtype(dtype))
    origin = drawn if start is None else check_vector(operator, start, "start")
    centre = jnp.zeros((size,), dtype) if mean is None else check_vector(operator, mean, "mean")
    num_probes = min(num_probes, size)
    check_seconds("max_seconds", max_seconds)
    keeper = open_checkpoint(checkpoint, checkpoint_seconds)

    def longer(basis: KrylovBasis, count: int, driver: Driver) -> tuple[KrylovBasis, int]:
        return advance(
            basis,
            operator,
            count,
            driver=driver,
            progress=progress,
            limited=max_seconds is not None,
            keeper=keeper,
        )

    def measured(basis: KrylovBasis, done: int, level: int) -> Run:
        probes = run_probes(
            operator,
            basis,
            jnp.asarray(level, jnp.int32),
            probe_key,
            num_probes,
            probe_depth,
            tolerance=probe_tolerance(num_probes, basis),
            shift=shift,
            driver=basis.driver,
            progress=progress,
        )
        run = Run(
            basis=basis,
            level=jnp.asarray(level, jnp.int32),
            probes=probes,
            asymmetry=asymmetry,
            num_matvecs=done + checked + num_probes * probes.steps,
            structure=operator.structure,
            preconditioner=preconditioner,
        )
        return with_trace_probes(operator, run, jax.random.fold_in(probe_key, 1), shift, progress)

    with time_limit(max_seconds):
        with time_limit(without_probes(max_seconds, num_probes)):
            asymmetry, checked = probe_symmetry(operator, symmetry_key, wanted=check_symmetric)
            operator = precondition(operator, preconditioner)
            checked = checked + (0 if preconditioner is None else preconditioner.num_products)
            if budget is None:
                steps = main_steps(num_steps, None, 0, default=100, size=size)
                ahead = min(lookahead, size - steps)
            else:
                total = main_steps(num_steps, budget, checked, default=100, size=None)
                if not is_concrete((operator, key)):
                    raise ValueError(
                        "budget= chooses shapes from what it sees: not under jit/vmap/grad."
                    )
                kinds = 1 if preconditioner is None else 2
                steps, num_probes, probe_depth = split_budget(
                    total, num_probes, probe_depth, size, kinds
                )
                ahead = 0
            basis, done = longer(begin_run(origin), steps + ahead, driver)
        # After an interruption a fifth of the steps still looks ahead.
        run = measured(basis, done, min(steps, done - min(ahead, done // 5)))
        # What the probes did not need goes to the run.
        left = 0 if budget is None else min(budget - int(run.num_matvecs), size - done)
        if left > 0:
            again: Driver = "host" if basis.driver == "host" else "compiled"
            basis, more = longer(first_rows(basis, done), left, again)
            run = dataclasses.replace(run, basis=basis, num_matvecs=run.num_matvecs + more - done)
    return finish(inverse_belief(run, centre, shift, layout), throw=throw)


@eqx.filter_jit
def _draw_start(
    key: PRNGKeyArray, size: int, dtype: np.dtype
) -> tuple[Float[Array, " d"], PRNGKeyArray, PRNGKeyArray]:
    start_key, symmetry_key, probe_key = jax.random.split(key, 3)
    return jax.random.normal(start_key, (size,), dtype), symmetry_key, probe_key
