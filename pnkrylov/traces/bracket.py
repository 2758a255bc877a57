"""The quadrature bracket of an inverse belief, whose probes all have one depth; traceable."""

from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pnkrylov.probes import Probes, TraceProbes
from pnkrylov.runs import Run

# As for the adaptive estimator: 1.2 of the extrapolated tail bounds it.
_TAIL_BOUND = 1.2
_CONVERGING = 0.9


@eqx.filter_jit
def quadrature_change(
    run: Run, shift: Float[Array, ""], function: Literal["inverse", "log"]
) -> Float[Array, ""]:
    """Bound of what deeper probes would add to `tr (A + shift I)^-1`, or to `log det`.

    Extrapolates how fast the probes' Gauss forms converge over their last half; infinite, with
    the sign of the change, where they do not converge yet.
    """
    assert run.probes is not None
    unit = run.tridiagonal(shift).unit
    if function == "inverse" and run.trace_probes is not None:
        average = _weighted_by(run.trace_probes.squares)
        return change_of_mean(run.trace_probes.probes, shift, unit, function, average)
    return change_of_mean(run.probes, shift, unit, function)


def change_of_mean(
    probes: Probes,
    shift: Float[Array, ""],
    unit: Float[Array, ""],
    function: Literal["inverse", "log"],
    average: Callable = Probes.mean,
) -> Float[Array, ""]:
    """The same for a given set of probes and the average that their forms enter."""
    width = jnp.maximum(probes.steps // 4, 1)

    def changes(kind: str) -> tuple[Array, ...]:
        means = []
        steps = probes.steps
        for depth in (1, steps // 2, steps - 2 * width, steps - width, steps):
            cut = _cut(probes, depth)
            if kind == "inverse":
                forms = cut.inverse_forms(shift, unit)
            else:
                forms = jax.vmap(_log_form)(cut.tridiagonals(shift, unit))
            means.append(average(cut, forms)[0])
        first, half, early, middle, late = means
        return half - first, late - half, middle - early, late - middle

    first_half, second_half, earlier, later = changes(function)
    ratio = _ratio(later, earlier)
    if function == "log":
        # log x converges at the rate of 1/x in the end, but starts faster.
        ratio = jnp.maximum(ratio, _ratio(*changes("inverse")[:1:-1]))
    recent = _TAIL_BOUND * _geometric_tail(later, ratio, _CONVERGING)
    over_halves = _geometric_tail(second_half, _ratio(second_half, first_half), 1.0)
    larger = (probes.steps > 3) & (jnp.abs(over_halves) > jnp.abs(recent))
    bound = jnp.where(larger, over_halves, recent)
    # Two steps say nothing of convergence, unless the probes ended: those have nothing to add.
    bound = jnp.where(probes.steps < 3, jnp.copysign(jnp.inf, later), bound)
    ended = (probes.steps > 1) & (later == 0)
    return jnp.where(ended, 0, bound) / (unit if function == "inverse" else 1)


def _weighted_by(squares: Float[Array, " N"]):
    return lambda probes, forms: TraceProbes(probes, squares).mean(forms)


def _ratio(later: Array, earlier: Array) -> Float[Array, ""]:
    nothing = earlier == 0
    return jnp.where(nothing, jnp.inf, jnp.abs(later) / jnp.where(nothing, 1, jnp.abs(earlier)))


def _geometric_tail(later: Array, ratio: Array, limit: float) -> Float[Array, ""]:
    safe = jnp.minimum(ratio, limit - 1e-3)
    tail = later * safe / (1 - safe)
    endless = jnp.where(later == 0, 0, jnp.copysign(jnp.inf, later))
    return jnp.where(ratio < limit, tail, endless)


def _cut(probes: Probes, depth: Int[Array, ""] | int) -> Probes:
    """The same probes after their first `depth` steps."""
    column = jnp.arange(probes.depth, dtype=jnp.int32)
    beta = jnp.where(column[None, :] < depth - 1, probes.beta, 0)
    return eqx.tree_at(lambda p: p.beta, probes, beta)


def _log_form(matrix: Float[Array, "l l"]) -> Float[Array, ""]:
    values, vectors = jnp.linalg.eigh(matrix)
    return jnp.sum(vectors[0] ** 2 * jnp.log(values))
