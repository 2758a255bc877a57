"""The front door `solve`: a belief about `A^-1 v`."""

import os
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._doors import check_compatible, require_key, without_probes
from pnkrylov.basis import begin_run, is_concrete
from pnkrylov.beliefs import SolveBelief, solve_belief
from pnkrylov.block.beliefs import BlockSolveBelief
from pnkrylov.block.solve import is_block, refuse_for_blocks, solve_block
from pnkrylov.budgets import check_counts, check_positive_counts, main_steps
from pnkrylov.checkpoints import open_checkpoint
from pnkrylov.interruption import check_seconds, time_limit
from pnkrylov.krylov import Driver, advance
from pnkrylov.looking_ahead import look_ahead_or_choose
from pnkrylov.operators import as_operator, check_vector
from pnkrylov.preconditioners import Preconditioner, precondition
from pnkrylov.probes import probe_tolerance, run_probes
from pnkrylov.runs import (
    Run,
    finish,
    probe_symmetry,
    scalar,
)


def solve(
    A: Any,
    v: PyTree,
    *,
    key: PRNGKeyArray | None = None,
    num_steps: int | None = None,
    budget: int | None = None,
    max_lookahead: int = 60,
    num_probes: int | None = None,
    probe_depth: int = 20,
    scale: Literal["lookahead", "prior"] | float | Float[Array, ""] = "lookahead",
    lower_bound: float | Float[Array, ""] | None = None,
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
) -> SolveBelief | BlockSolveBelief:
    """A Gaussian belief about `x = (A + shift I)^-1 v` from one Lanczos run.

    Args:
        A: symmetric positive definite: a 2-D array, a callable `v -> A v` on arrays or pytrees, a
            lineax, scipy or probnum operator (see `as_operator`).
        v: right-hand side, an array `(d,)` or the operator's pytree. Zero is fine: the answer is
            exactly zero. Several right-hand sides are rows: an array `(k, d)`, or the pytree with
            a leading axis on every leaf, for an operator that knows its own structure (not for a
            bare callable). They are solved in one block run: see `solve_block`.
        key: random key, for the symmetry check and the probes.
        num_steps: m, the steps that the mean resolves, 1 to d; `min(d, 50)` by default.
        budget: all products to spend, instead of `num_steps`; the mean is then that of the last
            level whose error the remaining steps have seen.
        max_lookahead: most steps spent after level m on seeing its error; 10 at a time, only as
            many as are needed.
        num_probes: random probes for the bulk. By default none when the look-ahead sets the
            scale (it makes up for what they would tell), else 8.
        probe_depth: most steps of each probe.
        scale: `"lookahead"` sets the scale of the covariance by the 2-norm error that the
            look-ahead sees; `"prior"` is the papers' scale 1, calibrated when v was drawn from
            N(0, A) independently of the start vector; a number is used as it is.
        lower_bound: a known lower bound of the spectrum of A (noise variance, damping), which
            turns the predicted error into a proven bracket (Gauss-Radau).
        shift: alpha >= 0 or at least such that `A + alpha I` is positive definite; costs nothing.
        start: start vector of the run, v by default. Another one needs `scale` other than
            `"lookahead"`.
        preconditioner: P, close to A: the run is on `P^-1/2 A P^-1/2` and everything is mapped
            back exactly; the bulk has the shape of P^-1. Not together with `shift` (build A and P
            with it) or `lower_bound`.
        check_symmetric: spend two products on checking that A is symmetric.
        driver: `"auto"`, `"compiled"` or `"host"` (see `lanczos`).
        progress: show progress bars (host driver). With the host driver, Ctrl-C returns the belief
            that the steps so far support.
        max_seconds: time limit of the whole call (host driver): it ends like a Ctrl-C, after the
            product in progress and without a warning; `belief.stats.num_steps` tells how far it
            came. A quarter is kept for the probes, if there are any.
        checkpoint: folder in which to keep the run (host driver): the same call, made again after
            it was killed, goes on from there (see `lanczos`). Probes are run again.
        checkpoint_seconds: least time between two writes to it.
        throw: raise on failure; with False the belief carries `result` and NaN instead.

    Returns:
        A `SolveBelief`; a `BlockSolveBelief` for several right-hand sides.

    Raises:
        TypeError, ValueError: wrong shapes, dtypes or sizes; a missing key.
        PnkrylovError: NaN or infinity, a non-symmetric or indefinite operator, a wrong
            `lower_bound`.

    Source:
        pslq.md, section 4.4; METHOD.md section 5.
    """
    if is_block(A, v):
        refuse_for_blocks(
            "one right-hand side, but v holds several right-hand sides as rows: leave it out, or "
            "solve for one row at a time",
            num_probes=num_probes or None,
            scale=scale,
            start=start,
            preconditioner=preconditioner,
        )
        return solve_block(
            A,
            v,
            key=key,
            num_steps=num_steps,
            budget=budget,
            max_lookahead=max_lookahead,
            lower_bound=lower_bound,
            shift=shift,
            check_symmetric=check_symmetric,
            driver=driver,
            progress=progress,
            max_seconds=max_seconds,
            checkpoint=checkpoint,
            checkpoint_seconds=checkpoint_seconds,
            throw=throw,
        )
    operator = as_operator(A, like=v)
    rhs = check_vector(operator, v, "v")
    key = require_key(key)
    size, dtype = operator.size, operator.dtype
    from_rhs = start is None
    fixed_scale = _fixed_scale(scale, from_rhs, dtype)
    check_compatible(preconditioner, shift=shift, lower_bound=lower_bound)
    shift = scalar(shift, "shift", dtype)
    bound = None if lower_bound is None else scalar(lower_bound, "lower_bound", dtype)
    if num_probes is None:
        num_probes = 0 if scale == "lookahead" else min(8, size)
    check_counts(max_lookahead=max_lookahead, num_probes=num_probes)
    if num_probes:
        check_positive_counts(probe_depth=probe_depth)
    elif not from_rhs:
        raise ValueError(
            "num_probes=0 needs a run that starts at v, whose error measures the bulk: pass at "
            "least one probe (8 by default), or leave start=None."
        )
    check_seconds("max_seconds", max_seconds)
    keeper = open_checkpoint(checkpoint, checkpoint_seconds)
    symmetry_key, probe_key = jax.random.split(key)

    with time_limit(max_seconds):
        with time_limit(without_probes(max_seconds, num_probes)):
            asymmetry, checked = probe_symmetry(operator, symmetry_key, wanted=check_symmetric)
            operator = precondition(operator, preconditioner)
            checked = checked + (0 if preconditioner is None else preconditioner.num_products)
            overhead = checked + num_probes * probe_depth
            steps = main_steps(num_steps, budget, overhead, default=50, size=size)
            origin = rhs if from_rhs else check_vector(operator, start, "start")
            origin = origin if preconditioner is None else preconditioner.inv_sqrt_mv(origin)
            limit = min(max_lookahead, size - steps) if budget is None else None
            basis, done = advance(
                begin_run(origin),
                operator,
                steps,
                driver=driver,
                progress=progress,
                limited=max_seconds is not None,
                keeper=keeper,
                spare=limit or 0,
            )
            # After an interruption, as with a budget, what was run is all there is.
            limit = limit if done == steps else None
            basis, level, spent = look_ahead_or_choose(
                operator, basis, done, limit, shift, bound, keeper
            )
        probes = None
        if num_probes:
            probes = run_probes(
                operator,
                basis,
                level,
                probe_key,
                num_probes,
                probe_depth,
                tolerance=probe_tolerance(num_probes, basis),
                shift=shift,
                driver=basis.driver,
                progress=progress,
            )
            spent = spent + num_probes * probes.steps
    run = Run(
        basis=basis,
        level=level,
        probes=probes,
        asymmetry=asymmetry,
        num_matvecs=jnp.asarray(spent + checked, jnp.int32),
        structure=operator.structure,
        preconditioner=preconditioner,
    )
    belief = solve_belief(run, rhs, shift, fixed_scale, bound, from_rhs)
    return finish(belief, throw=throw)


def _fixed_scale(scale: Any, from_rhs: bool, dtype: Any) -> Float[Array, ""]:
    if isinstance(scale, str):
        if scale == "prior":
            return jnp.ones((), dtype)
        if scale != "lookahead":
            raise ValueError(f"scale={scale!r} is unknown: use 'lookahead', 'prior' or a number.")
        if not from_rhs:
            raise ValueError(
                "scale='lookahead' needs a run that starts at v: leave start=None, or use "
                "scale='prior' (calibrated for a start independent of v) or a number."
            )
        return jnp.asarray(-1, dtype)
    fixed = scalar(scale, "scale", dtype)
    if is_concrete(fixed) and not float(fixed) >= 0:
        raise ValueError(f"scale={float(fixed)} must not be negative or NaN.")
    return fixed
