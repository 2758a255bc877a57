"""msMINRES: many right-hand sides, all shifts, one block product per iteration, no basis."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pnkrylov._arguments import check_array, check_positive_counts
from pnkrylov.ciq import recurrence
from pnkrylov.ciq.combined import Progress
from pnkrylov.ciq.quadrature import Quadrature
from pnkrylov.operators import SPDOperator, as_operator
from pnkrylov.preconditioners import Preconditioner, precondition


class ShiftedSolution(eqx.Module):
    """Solutions of the shifted systems, and how good they are.

    Attributes:
        value: `(q, k, d)`, all solutions; with weights `(k, d)`, their weighted sum.
        residuals: `(q, k)`, residual norms relative to the right-hand sides.
        error_bound: `(k,)`: with weights, the bound of the relative error of the weighted sum as
            an approximation of `K^{-1/2} b` (quadrature error apart); else the largest residual.
        converged: `(k,)`, whether `error_bound <= rtol`.
        iterations: `(k,)`, products after which each right-hand side had converged.
        num_steps: products per right-hand side in all.
        positive_definite: whether every tridiagonal was positive definite.
        bracketed: whether all Ritz values lie in the interval given as `lower` and `upper`.
        ritz_diagonal, ritz_coupling: `(n, k)`, the Lanczos tridiagonals, for error messages.
    """

    value: Float[Array, "..."]
    residuals: Float[Array, "q k"]
    error_bound: Float[Array, " k"]
    converged: Bool[Array, " k"]
    iterations: Int[Array, " k"]
    num_steps: Int[Array, ""]
    positive_definite: Bool[Array, ""]
    bracketed: Bool[Array, ""]
    ritz_diagonal: Float[Array, "n k"]
    ritz_coupling: Float[Array, "n k"]


class _State(eqx.Module):
    lanczos: recurrence.ThreeTerm
    progress: Progress
    search: Float[Array, "q k d"]
    search_before: Float[Array, "q k d"]
    value: Float[Array, "..."]
    alpha: Float[Array, "n k"]
    beta: Float[Array, "n k"]
    scale: Float[Array, ""]
    error_bound: Float[Array, " k"]
    iterations: Int[Array, " k"]
    steps: Int[Array, ""]


def msminres(
    A: Any,
    B: Float[Array, "k d"],
    shifts: Float[Array, " q"],
    *,
    weights: Float[Array, " q"] | None = None,
    lower: Float[Array, ""] | float = 0.0,
    upper: Float[Array, ""] | float = jnp.inf,
    rtol: Float[Array, ""] | float = 1e-4,
    max_steps: int | None = None,
    preconditioner: Preconditioner | None = None,
    forward: bool = False,
) -> ShiftedSolution:
    """Solves `(K + t_q I) c_q = b` for every shift and every right-hand side by MINRES.

    One Krylov space serves all shifts; the search directions of each are two vectors, so memory is
    `(2 q + 4) k d` numbers with weights, `(3 q + 3) k d` without. The iteration ends when every
    right-hand side has met the tolerance; a zero right-hand side, or one whose Krylov space is
    exhausted, is exact and leaves the others alone.

    Args:
        A: Anything that `as_operator` takes; symmetric, positive definite after every shift.
        B: Right-hand sides as rows, `(k, d)`, in the operator's dtype.
        shifts: Shifts `t_q >= 0`, `(q,)`.
        weights: When given, only `sum_q w_q c_q` is formed, and the tolerance is on the bound of
            its relative error; else the tolerance is on the largest relative residual.
        lower: Lower bound of the spectrum, for the bound of the weighted sum.
        upper: Upper bound of the spectrum, only to check that the Ritz values keep to it.
        rtol: Tolerance.
        max_steps: Largest number of iterations; default `10 d + 100`.
        preconditioner: A `pnkrylov.preconditioners.Preconditioner` P; with `L = P^{1/2}` the
            systems are then `(L^-1 K L^-1 + t_q I) c_q = b`.
        forward: With weights, bound the error of `K sum_q w_q c_q` relative to `K^{1/2} b`
            instead; the product itself is left to the caller.

    Returns:
        A `ShiftedSolution`; nothing is raised when the tolerance is not met.

    Raises:
        ValueError: If shapes do not agree or `max_steps < 1`.
        TypeError: If dtypes do not agree, or an argument is of another type.

    Source:
        Pleiss et al. (2020), appendix C; Paige and Saunders (1975).
    """
    check_array(B, "B", "k", "d")
    check_array(shifts, "shifts", "q")
    operator = precondition(as_operator(A, like=B[0]), preconditioner)
    if B.ndim != 2 or B.shape[1] != operator.size:
        raise ValueError(
            f"B holds right-hand sides as rows, shape (k, {operator.size}); got {B.shape}."
        )
    if B.dtype != operator.dtype or shifts.dtype != operator.dtype:
        raise TypeError(
            f"A, B and shifts must share a dtype, got {operator.dtype}, {B.dtype} and "
            f"{shifts.dtype}; cast them with .astype."
        )
    if weights is not None and np.shape(weights) != shifts.shape:
        raise ValueError(f"weights has shape {np.shape(weights)}, but shifts has {shifts.shape}.")
    max_steps = 10 * operator.size + 100 if max_steps is None else max_steps
    check_positive_counts(max_steps=max_steps)
    lower, upper = jnp.asarray(lower, B.dtype), jnp.asarray(upper, B.dtype)
    rtol = jnp.asarray(rtol, B.dtype)
    return _run(operator, B, shifts, weights, lower, upper, rtol, max_steps, forward)


@eqx.filter_jit
def _run(
    operator: SPDOperator,
    rows: Array,
    shifts: Array,
    weights: Array | None,
    lower: Array,
    upper: Array,
    rtol: Array,
    max_steps: int,
    forward: bool,
) -> ShiftedSolution:
    rule = Quadrature(shifts, jnp.ones_like(shifts) if weights is None else weights)
    lanczos, norms = recurrence.start(rows)
    num_rows, dtype = rows.shape[0], rows.dtype
    searches = jnp.zeros((shifts.shape[0], *rows.shape), dtype)
    start = _State(
        lanczos=lanczos,
        progress=Progress.initial(rule, lanczos.alive),
        search=searches,
        search_before=searches,
        value=jnp.zeros_like(searches if weights is None else rows),
        alpha=jnp.zeros((max_steps, num_rows), dtype),
        beta=jnp.zeros((max_steps, num_rows), dtype),
        scale=jnp.zeros((), dtype),
        error_bound=jnp.where(lanczos.alive, jnp.inf, jnp.zeros((), dtype)),
        iterations=jnp.zeros((num_rows,), jnp.int32),
        steps=jnp.zeros((), jnp.int32),
    )

    def step(state: _State) -> _State:
        before, vector = state.lanczos.beta, state.lanczos.current
        lanczos, alpha = recurrence.advance(operator, state.lanczos, state.scale)
        first = state.steps == 0
        # A dead row gets a decoupled diagonal entry inside its spectrum, which changes nothing.
        inert = jnp.where(first, jnp.ones_like(alpha), state.alpha[0])
        alpha = jnp.where(state.lanczos.alive, alpha, inert)
        scale = jnp.max(jnp.where(state.lanczos.alive, jnp.abs(alpha) + lanczos.beta, 0))
        progress, column = state.progress.extend(rule, lower, upper, alpha, before, lanczos.beta)
        search = (
            vector[None]
            - column.above[:, :, None] * state.search
            - column.two_above[:, :, None] * state.search_before
        ) / column.diagonal[:, :, None]
        if weights is None:
            update = column.weight[:, :, None] * search
        else:
            update = jnp.sum((weights[:, None] * column.weight)[:, :, None] * search, axis=0)
        if weights is None:
            error = jnp.max(jnp.abs(progress.rotations.residual), axis=0)
        elif forward:
            error = progress.forward_error_bound(
                rule, upper, jnp.where(first, alpha, state.alpha[0])
            )
        else:
            error = progress.error_bound(rule, lower)
        newly = (error <= rtol) & (state.iterations == 0)
        return _State(
            lanczos=lanczos,
            progress=progress,
            search=search,
            search_before=state.search,
            value=state.value + update,
            alpha=state.alpha.at[state.steps].set(alpha),
            beta=state.beta.at[state.steps].set(lanczos.beta),
            scale=jnp.maximum(state.scale, scale),
            error_bound=error,
            iterations=jnp.where(newly, state.steps + 1, state.iterations),
            steps=state.steps + 1,
        )

    def unfinished(state: _State) -> Array:
        going = (state.steps < max_steps) & jnp.any(state.lanczos.alive)
        # With weights, an indefinite operator ends the run; a single system may go on without.
        sound = state.progress.positive_definite() | (weights is None)
        sound = sound & ~jnp.any(jnp.isnan(state.error_bound))
        return going & sound & ~jnp.all(state.error_bound <= rtol)

    state = jax.lax.while_loop(unfinished, step, start)
    scales = norms[:, None] if weights is not None else norms[None, :, None]
    return ShiftedSolution(
        value=state.value * scales,
        residuals=jnp.abs(state.progress.rotations.residual),
        error_bound=state.error_bound,
        converged=state.error_bound <= rtol,
        iterations=state.iterations,
        num_steps=state.steps,
        positive_definite=state.progress.positive_definite(),
        bracketed=state.progress.bracketed(),
        ritz_diagonal=state.alpha,
        ritz_coupling=state.beta,
    )
