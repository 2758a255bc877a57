"""The front door for several right-hand sides: `solve_block`, which `solve` calls for a matrix."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._doors import require_key
from pnkrylov._structure import VectorStructure, describe
from pnkrylov.block.beliefs import BlockSolveBelief, block_solve_belief
from pnkrylov.block.krylov import begin_block_run, continue_block_run
from pnkrylov.block.runs import BlockRun, block_look_ahead_or_choose
from pnkrylov.budgets import check_counts, main_steps
from pnkrylov.checkpoints import BLOCKS, open_checkpoint
from pnkrylov.interruption import check_seconds, time_limit
from pnkrylov.krylov import Driver
from pnkrylov.operators import SPDOperator, as_operator
from pnkrylov.runs import finish, probe_symmetry, scalar


def solve_block(
    A: Any,
    V: PyTree,
    *,
    key: PRNGKeyArray | None = None,
    num_steps: int | None = None,
    budget: int | None = None,
    max_lookahead: int = 60,
    lower_bound: float | Float[Array, ""] | None = None,
    shift: float | Float[Array, ""] = 0.0,
    check_symmetric: bool = True,
    driver: Driver = "auto",
    progress: bool = False,
    max_seconds: float | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_seconds: float = 60.0,
    throw: bool = True,
) -> BlockSolveBelief:
    """A joint Gaussian belief about `X = (A + shift I)^-1 V` from one block Krylov basis.

    Args:
        A: symmetric positive definite, as for `solve`.
        V: the right-hand sides as rows: an array `(k, d)`, or the operator's pytree with a leading
            axis of length k on every leaf. Dependent and zero right-hand sides are fine.
        key: random key for the symmetry check.
        num_steps: m, block steps that the means resolve, each k products; 1 to d, by default
            `min(50, ceil(d / k))`, where independent right-hand sides are solved exactly.
        budget: all products to spend, instead of `num_steps`; the means are then those of the last
            level whose errors the remaining steps have seen.
        max_lookahead: most block steps spent after level m on seeing the errors.
        lower_bound: a known lower bound of the spectrum of A, which brackets the predicted errors.
        shift: alpha such that `A + alpha I` is positive definite; costs nothing.
        check_symmetric: spend two products on checking that A is symmetric.
        driver: `"auto"`, `"compiled"` or `"host"` (see `block_lanczos`).
        progress: show progress bars (host driver). With the host driver, Ctrl-C returns the belief
            that the steps so far support.
        max_seconds: time limit of the whole call (host driver), as for `solve`.
        checkpoint: folder in which to keep the run (host driver), as for `solve`.
        checkpoint_seconds: least time between two writes to it.
        throw: raise on failure; with False the belief carries `result` and NaN instead.

    Returns:
        A `BlockSolveBelief`.

    Raises:
        TypeError, ValueError: wrong shapes, dtypes or sizes; a missing key.
        PnkrylovError: NaN or infinity, a non-symmetric or indefinite operator, a wrong
            `lower_bound`.

    Source:
        METHOD.md sections 5 and 14.
    """
    operator, rows = _operator_and_rows(A, V)
    key = require_key(key)
    check_counts(max_lookahead=max_lookahead)
    shift = scalar(shift, "shift", operator.dtype)
    bound = None if lower_bound is None else scalar(lower_bound, "lower_bound", operator.dtype)
    check_seconds("max_seconds", max_seconds)
    keeper = open_checkpoint(checkpoint, checkpoint_seconds, BLOCKS)
    count, size = rows.shape
    most = -(-size // count)
    with time_limit(max_seconds):
        asymmetry, checked = probe_symmetry(operator, key, wanted=check_symmetric)
        if budget is None:
            steps = main_steps(num_steps, None, 0, default=min(50, most), size=size)
        else:
            left = main_steps(num_steps, budget, checked, default=most, size=None)
            if left < count:
                raise ValueError(
                    f"budget={budget} is too small: one block step takes {count} products, one "
                    f"for each right-hand side, and checks take {checked}. Pass at least "
                    f"{count + checked}."
                )
            steps = min(left // count, most)
        basis = continue_block_run(
            begin_block_run(rows),
            operator,
            steps,
            driver=driver,
            progress=progress,
            limited=max_seconds is not None,
            keeper=keeper,
        )
        # After an interruption, as with a budget, what was run is all there is.
        whole = budget is None and basis.num_blocks == steps
        limit = min(max_lookahead, size - steps) if whole else None
        basis, level, spent = block_look_ahead_or_choose(
            operator, basis, limit, shift, bound, keeper
        )
    run = BlockRun(
        basis=basis,
        level=level,
        asymmetry=asymmetry,
        num_matvecs=jnp.asarray(count * spent + checked, jnp.int32),
        structure=operator.structure,
    )
    return finish(block_solve_belief(run, shift, bound), throw=throw)


def is_block(A: Any, v: PyTree) -> bool:
    """Whether `v` holds several right-hand sides for an operator that knows its own structure.

    A bare callable does not: its vectors are whatever `v` is, so wrap it with `as_operator(A,
    like=...)` or call `solve_block`. A matrix takes a single row `(1, d)` as one vector.
    """
    if isinstance(A, SPDOperator):
        one = A.structure.tree
    elif isinstance(A, lx.AbstractLinearOperator):
        one = A.in_structure()
    elif len(shape := getattr(A, "shape", ())) == 2 and jnp.shape(v)[:1] != (1,):
        one = jax.ShapeDtypeStruct(shape[1:], jnp.float32)
    else:
        return False
    if jtu.tree_structure(v) != jtu.tree_structure(one):
        return False
    pairs = zip(jtu.tree_leaves(v), jtu.tree_leaves(one), strict=True)
    return all(jnp.ndim(rows) > 0 and jnp.shape(rows)[1:] == leaf.shape for rows, leaf in pairs)


def refuse_for_blocks(remedy: str, **options: Any) -> None:
    """Refuses what only runs of single vectors offer, unless it is the default."""
    for name, value in options.items():
        if value is not None and not (isinstance(value, str) and value == "lookahead"):
            raise ValueError(f"{name}={value!r} is for {remedy}.")


def _operator_and_rows(A: Any, V: PyTree) -> tuple[SPDOperator, Float[Array, "k d"]]:
    """The operator on one right-hand side, and all of them as flat rows."""
    counts = {jnp.shape(leaf)[:1] for leaf in jtu.tree_leaves(V)}
    if len(counts) != 1 or counts == {()} or counts == {(0,)}:
        raise ValueError(
            f"V is {describe(V)}: right-hand sides are rows, so every array needs a leading axis "
            "of the same length, at least 1. Pass v[None] for a single right-hand side."
        )
    one = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf)[1:], jnp.asarray(leaf).dtype), V
    )
    structure = VectorStructure.of(one, "V[0]")
    operator = as_operator(A) if isinstance(A, SPDOperator) else as_operator(A, like=one)
    operator.structure.check(one, "V[0]", expected_by="the operator A")
    return operator, jax.vmap(structure.ravel)(jax.tree.map(jnp.asarray, V))
