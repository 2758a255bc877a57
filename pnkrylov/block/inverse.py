"""The front door for block starts: `inverse_block`, which `inverse(block_size=k)` calls."""

import os
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._doors import require_key, without_probes
from pnkrylov._structure import describe
from pnkrylov.block.basis import BlockKrylovBasis
from pnkrylov.block.inverse_belief import BlockInverseBelief as BlockInverseBelief
from pnkrylov.block.inverse_belief import Layout
from pnkrylov.block.inverse_belief import block_inverse_belief as block_inverse_belief
from pnkrylov.block.krylov import begin_block_run, continue_block_run
from pnkrylov.block.runs import BlockRun
from pnkrylov.budgets import check_positive_counts, main_steps, split_budget
from pnkrylov.checkpoints import BLOCKS, open_checkpoint
from pnkrylov.errors import NotFiniteError
from pnkrylov.interruption import check_seconds, time_limit
from pnkrylov.krylov import Driver, is_concrete
from pnkrylov.operators import SPDOperator, as_operator, check_vector
from pnkrylov.probes import probe_tolerance, run_probes
from pnkrylov.runs import finish, probe_symmetry, scalar


def inverse_block(
    A: Any,
    *,
    block_size: int,
    key: PRNGKeyArray | None = None,
    like: PyTree | None = None,
    mean: PyTree | None = None,
    num_steps: int | None = None,
    budget: int | None = None,
    lookahead: int = 20,
    num_probes: int = 8,
    probe_depth: int = 20,
    layout: Layout = "resolve-all",
    shift: float | Float[Array, ""] = 0.0,
    start: PyTree | None = None,
    check_symmetric: bool = True,
    driver: Driver = "auto",
    progress: bool = False,
    max_seconds: float | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_seconds: float = 60.0,
    throw: bool = True,
) -> BlockInverseBelief:
    """A Gaussian with covariance close to `(A + shift I)^-1`, from a block run and probes.

    For operators whose product with k vectors costs little more than with one. At equal products a
    single run knows the ends of the spectrum better; a block run takes less time for them.

    Args:
        A: symmetric positive definite (positive semi-definite if `shift` makes up for it).
        block_size: k, start vectors, 1 to d.
        key: random key, for random start vectors, the symmetry check and the probes.
        like: example of a vector, needed for callables only (`mean` serves as well).
        mean: centre of the draws, zero by default.
        num_steps: m, block steps of the main run, each k products; by default as many as make 100
            vectors, or fill the space.
        budget: all products to spend, instead of the sizes; not under `jit`.
        lookahead: l, further block steps that show the coupling at level m.
        num_probes: N, random probes for the trace of the complement.
        probe_depth: most steps of each probe; they stop when their quadrature has converged.
        layout: `"resolve-all"` resolves all m + l blocks and spreads the rest isotropically;
            `"paper"` resolves m and keeps the exact coupling at level m.
        shift: alpha such that `A + alpha I` is positive definite; costs nothing.
        start: start vectors as rows, `(k, d)` or a vector's pytree with a leading axis of length
            k; random normal by default. Directions in which A^-1 is wanted make the belief close
            there first (for predictions: principal directions of Jacobian rows).
        check_symmetric: spend two products on checking that A is symmetric.
        driver: `"auto"`, `"compiled"` or `"host"` (see `block_lanczos`).
        progress: show progress bars (host driver).
        max_seconds: time limit of the whole call (host driver), as for `inverse`.
        checkpoint: folder in which to keep the main run (host driver), as for `inverse`.
        checkpoint_seconds: least time between two writes to it.
        throw: raise on failure; with False the belief carries `result` and NaN instead.

    Returns:
        A `BlockInverseBelief`.

    Raises:
        TypeError, ValueError: wrong shapes, dtypes or sizes; a missing key.
        PnkrylovError: NaN or infinity, a non-symmetric or indefinite operator.

    Source:
        METHOD.md sections 3, 4 and 14.
    """
    operator = as_operator(A, like=like if like is not None else mean)
    key = require_key(key)
    size, dtype = operator.size, operator.dtype
    if layout not in ("resolve-all", "paper"):
        raise ValueError(f"layout={layout!r} is unknown: use 'resolve-all' or 'paper'.")
    check_positive_counts(
        block_size=block_size, lookahead=lookahead, num_probes=num_probes, probe_depth=probe_depth
    )
    if block_size > size:
        raise ValueError(f"block_size={block_size} exceeds the size of A, {size}.")
    shift = scalar(shift, "shift", dtype)
    centre = jnp.zeros((size,), dtype) if mean is None else check_vector(operator, mean, "mean")
    num_probes, most = min(num_probes, size), -(-size // block_size)
    start_key, symmetry_key, probe_key = jax.random.split(key, 3)
    if start is None:
        starts = jax.random.normal(start_key, (block_size, size), dtype)
    else:
        starts = _start_rows(operator, start, block_size)
    check_seconds("max_seconds", max_seconds)
    keeper = open_checkpoint(checkpoint, checkpoint_seconds, BLOCKS)

    def longer(basis: BlockKrylovBasis, count: int) -> BlockKrylovBasis:
        return continue_block_run(
            basis,
            operator,
            count,
            driver=driver,
            progress=progress,
            limited=max_seconds is not None,
            keeper=keeper,
        )

    with time_limit(max_seconds):
        with time_limit(without_probes(max_seconds, num_probes)):
            asymmetry, checked = probe_symmetry(operator, symmetry_key, wanted=check_symmetric)
            if budget is None:
                default = min(-(-100 // block_size), most)
                steps = main_steps(num_steps, None, 0, default=default, size=size)
                ahead = min(lookahead, size - steps)
            else:
                total = main_steps(num_steps, budget, checked, default=most, size=None)
                if not is_concrete((operator, key)):
                    raise ValueError(
                        "budget= chooses shapes from what it sees: not under jit/vmap/grad."
                    )
                steps, num_probes, probe_depth = split_budget(
                    total, num_probes, probe_depth, size, 1
                )
                if steps < block_size:
                    raise ValueError(
                        f"budget={budget} is too small: one block step takes {block_size} "
                        f"products, and probes and checks take {budget - steps}. Pass more, or a "
                        "smaller block_size."
                    )
                steps, ahead = steps // block_size, 0
            basis = longer(begin_block_run(starts), steps + ahead)
        done = basis.num_blocks
        # After an interruption a fifth of the steps still looks ahead.
        level = jnp.asarray(min(steps, done - min(ahead, done // 5)), jnp.int32)
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
        spent = block_size * done + checked + num_probes * probes.steps
        # What the probes did not need goes to the run.
        left = 0 if budget is None else min((budget - int(spent)) // block_size, most - done)
        if left > 0:
            basis = longer(basis, left)
            spent = spent + block_size * (basis.num_blocks - done)
    run = BlockRun(
        basis=basis,
        level=level,
        asymmetry=asymmetry,
        num_matvecs=spent,
        structure=operator.structure,
        probes=probes,
    )
    return finish(block_inverse_belief(run, centre, shift, layout), throw=throw)


def _start_rows(operator: SPDOperator, start: PyTree, block_size: int) -> Float[Array, "k d"]:
    """Start vectors of the user as flat rows."""
    for leaf in jax.tree.leaves(start):
        if jnp.shape(leaf)[:1] != (block_size,):
            raise ValueError(
                f"start is {describe(start)}: start vectors are rows, so every array needs a "
                f"leading axis of length block_size={block_size}."
            )
    one = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf)[1:], jnp.asarray(leaf).dtype), start
    )
    operator.structure.check(one, "start[0]", expected_by="the operator A")
    rows = jax.vmap(operator.structure.ravel)(jax.tree.map(jnp.asarray, start))
    if is_concrete(rows) and not bool(jnp.all(jnp.isfinite(rows))):
        raise NotFiniteError(NotFiniteError.message("start"))
    return rows
