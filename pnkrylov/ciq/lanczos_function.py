"""Lanczos-FA: `K^{-1/2} b ~ ||b|| Q f(T) e_1` from a stored basis.

`f` is the same rational function as in msMINRES. Because the Krylov basis does not depend on the
shifts, nothing about the spectrum has to be known when the run starts: bounds, quadrature and the
error are evaluated from the tridiagonals, now and then, while the run goes on.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pnkrylov.ciq import recurrence
from pnkrylov.ciq.combined import SOLVER_SHARE, galerkin_coefficients, replay
from pnkrylov.ciq.quadrature import Quadrature, quadrature
from pnkrylov.ciq.spectrum import SpectralBounds, certified_interval, extreme_ritz_values
from pnkrylov.operators import SPDOperator


class FunctionRun(eqx.Module):
    """`k` Lanczos runs side by side with their bases, and what is known about their result.

    The last `num_probes` rows have random starts and certify the spectral bounds; when the
    right-hand sides are random themselves they are their own probes.
    """

    basis: Float[Array, "m k d"]
    alpha: Float[Array, "m k"]
    beta: Float[Array, "m k"]
    state: recurrence.ThreeTerm
    norms: Float[Array, " k"]
    scale: Float[Array, ""]
    steps: Int[Array, ""]
    next_check: Int[Array, ""]
    bounds: SpectralBounds
    error_bound: Float[Array, " k"]
    iterations: Int[Array, " k"]
    finished: Bool[Array, ""]
    failed: Bool[Array, ""]
    bracketed: Bool[Array, ""]


class FunctionPlan(eqx.Module):
    """What is fixed about a run before it starts (static)."""

    num_points: int = eqx.field(static=True)
    num_probes: int = eqx.field(static=True)
    share: float = eqx.field(static=True)
    orthogonal: bool = eqx.field(static=True)
    known_bounds: bool = eqx.field(static=True)
    forward: bool = eqx.field(static=True)


def begin(rows: Float[Array, "k d"], capacity: int, bounds: SpectralBounds | None) -> FunctionRun:
    """The state before the first product, with room for `capacity` basis vectors per row."""
    state, norms = recurrence.start(rows)
    num_rows, dtype = rows.shape[0], rows.dtype
    zero, none, no = jnp.zeros((), dtype), jnp.zeros((), jnp.int32), jnp.asarray(False)
    if bounds is None:
        bounds = SpectralBounds(zero, zero, zero, zero, no, none)
    return FunctionRun(
        basis=jnp.zeros((capacity, *rows.shape), dtype),
        alpha=jnp.zeros((capacity, num_rows), dtype),
        beta=jnp.zeros((capacity, num_rows), dtype),
        state=state,
        norms=norms,
        scale=zero,
        steps=none,
        next_check=jnp.asarray(min(8, capacity), jnp.int32),
        bounds=bounds,
        error_bound=jnp.full((num_rows,), jnp.inf, dtype),
        iterations=jnp.zeros((num_rows,), jnp.int32),
        finished=no,
        failed=no,
        bracketed=jnp.asarray(True),
    )


def grow(run: FunctionRun, capacity: int) -> FunctionRun:
    """The same run with a larger basis (outside `jit`: shapes change)."""
    extra = capacity - run.alpha.shape[0]
    return eqx.tree_at(
        lambda r: (r.basis, r.alpha, r.beta),
        run,
        (
            jnp.pad(run.basis, ((0, extra), (0, 0), (0, 0))),
            jnp.pad(run.alpha, ((0, extra), (0, 0))),
            jnp.pad(run.beta, ((0, extra), (0, 0))),
        ),
    )


def extend(
    operator: SPDOperator, run: FunctionRun, plan: FunctionPlan, rtol: Float[Array, ""]
) -> FunctionRun:
    """Runs until the tolerance is met, a failure is found, or the basis is full."""
    capacity = run.alpha.shape[0]

    def step(run: FunctionRun) -> FunctionRun:
        basis = recurrence.store(run.basis, run.steps, run.state.current)
        state, alpha = recurrence.advance(
            operator, run.state, run.scale, basis if plan.orthogonal else None, run.steps + 1
        )
        # A dead row gets a decoupled diagonal entry inside its spectrum, which changes nothing.
        inert = jnp.where(run.steps > 0, run.alpha[0], jnp.ones_like(alpha))
        alpha = jnp.where(run.state.alive, alpha, inert)
        scale = jnp.max(jnp.where(run.state.alive, jnp.abs(alpha) + state.beta, 0))
        return eqx.tree_at(
            lambda r: (r.basis, r.state, r.alpha, r.beta, r.scale, r.steps),
            run,
            (
                basis,
                state,
                run.alpha.at[run.steps].set(alpha),
                run.beta.at[run.steps].set(state.beta),
                jnp.maximum(run.scale, scale),
                run.steps + 1,
            ),
        )

    def advance_to_check(run: FunctionRun) -> FunctionRun:
        run = jax.lax.while_loop(
            lambda r: (r.steps < r.next_check) & jnp.any(r.state.alive), step, run
        )
        following = jnp.minimum(run.steps + jnp.maximum(run.steps // 16, 4), capacity)
        return eqx.tree_at(lambda r: r.next_check, check(run, plan, rtol), following)

    def unfinished(run: FunctionRun) -> Array:
        exhausted = (run.steps > 0) & ~jnp.any(run.state.alive)
        return ~run.finished & ~run.failed & ~exhausted & (run.steps < capacity)

    # A run that was full before may have room now, and its check is due.
    due = jnp.minimum(jnp.maximum(run.next_check, run.steps + 4), capacity)
    run = eqx.tree_at(lambda r: r.next_check, run, jnp.where(run.steps > 0, due, run.next_check))
    return jax.lax.while_loop(unfinished, advance_to_check, run)


def check(run: FunctionRun, plan: FunctionPlan, rtol: Float[Array, ""]) -> FunctionRun:
    """Evaluates bounds, quadrature and error bound from the tridiagonals so far."""
    bounds = run.bounds
    if not plan.known_bounds:
        probes = slice(run.alpha.shape[1] - plan.num_probes, None)
        lower, upper, certified = certified_interval(
            run.alpha[:, probes], run.beta[:, probes], run.steps, plan.share
        )
        bounds = SpectralBounds(lower, upper, lower, upper, certified, run.steps)
    alive = run.norms > 0
    rule = _rule(bounds, plan)
    progress = replay(rule, bounds.lower, bounds.upper, run.alpha, run.beta, run.steps, alive)
    if plan.forward:
        error = progress.forward_error_bound(rule, bounds.upper, run.alpha[0])
    else:
        error = progress.error_bound(rule, bounds.lower)
    error = jnp.where(bounds.certified, error, jnp.inf)
    if not plan.known_bounds and plan.num_probes < run.alpha.shape[1]:
        # The probe that is not a right-hand side needs no solution.
        error = error.at[-plan.num_probes :].set(0)
    accurate = error <= SOLVER_SHARE * rtol
    newly = accurate & (run.iterations == 0)
    finite = jnp.all(jnp.isfinite(run.alpha[run.steps - 1]))
    return eqx.tree_at(
        lambda r: (r.bounds, r.error_bound, r.iterations, r.finished, r.failed, r.bracketed),
        run,
        (
            bounds,
            error,
            jnp.where(newly, run.steps, run.iterations),
            jnp.all(accurate),
            ~finite | ~progress.positive_definite(),
            progress.bracketed() | ~bounds.certified,
        ),
    )


def combine(run: FunctionRun, plan: FunctionPlan) -> tuple[Float[Array, "k d"], SpectralBounds]:
    """The approximations of `K^{-1/2} b`, one per row, and the bounds with their Ritz values."""
    rule = _rule(run.bounds, plan)
    coefficients = galerkin_coefficients(rule, run.alpha, run.beta, run.steps, run.norms > 0)
    coefficients = coefficients * run.norms[None, :]
    if run.basis.shape[1] == 1:
        values = jnp.matmul(
            coefficients[:, 0], run.basis[:, 0], precision=jax.lax.Precision.HIGHEST
        )[None, :]
    else:
        values = jnp.einsum(
            "mk,mkd->kd", coefficients, run.basis, precision=jax.lax.Precision.HIGHEST
        )
    ritz_min, ritz_max = extreme_ritz_values(run.alpha, run.beta, run.steps)
    bounds = eqx.tree_at(lambda b: (b.ritz_min, b.ritz_max), run.bounds, (ritz_min, ritz_max))
    return values, bounds


def _rule(bounds: SpectralBounds, plan: FunctionPlan) -> Quadrature:
    # Before the bounds are certified any positive interval will do: the result is not used.
    upper = jnp.where(bounds.certified, bounds.upper, jnp.ones_like(bounds.upper))
    lower = jnp.where(bounds.certified, bounds.lower, jnp.ones_like(bounds.lower))
    return quadrature(lower, upper, num_points=plan.num_points)
