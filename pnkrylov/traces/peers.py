"""The estimators that P-SLQ is compared with: all take products in blocks, all count them.

Each returns the estimate, the variance of the estimate over its probes (NaN where the method has
none), and the products that it spent. None of them says anything of its quadrature bias.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from pnkrylov.krylov import lanczos
from pnkrylov.operators import SPDOperator
from pnkrylov.traces.probes import NestedProbes
from pnkrylov.traces.quadrature import SpectralFunction, function_diagonal, gauss
from pnkrylov.traces.resolved import Tridiagonal

Result = tuple[float, float, int]
Peer = Callable[[SPDOperator, SpectralFunction, PRNGKeyArray, int, int], Result]

_DEFAULT_DEPTH = 20
# ULISSE: the chance to go on after `depth` steps falls by this factor at every further step.
_SURVIVAL = 0.8


def checked_depth(depth: int | None, budget: int, size: int) -> int:
    """Steps per probe: given or by default, within the budget and d."""
    if depth is None:
        return min(_DEFAULT_DEPTH, max(budget // 6, 1), size)
    if isinstance(depth, bool) or not isinstance(depth, int | np.integer):
        raise TypeError(f"depth={depth!r} must be an int, not {type(depth).__name__}.")
    if not 1 <= depth <= min(budget, size):
        raise ValueError(
            f"depth={depth} must lie between 1 and {min(budget, size)}, the smaller of the budget "
            "and d: one probe takes depth products."
        )
    return int(depth)


def estimator(method: str, f: SpectralFunction) -> Peer:
    """The peer of that name.

    Raises:
        ValueError: it estimates `tr A^-1` only.
    """
    if method in ("slq", "krylov-aware"):
        return {"slq": slq, "krylov-aware": krylov_aware}[method]
    if f.kind != "inverse":
        raise ValueError(
            f"method={method!r} estimates tr A^-1 only: for {f.name} use 'pslq', 'krylov-aware' "
            "or 'slq'."
        )
    return {"hutchinson": hutchinson, "ulisse": ulisse, "hutch++": hutch_plus_plus}.get(
        method, xtrace
    )


def slq(
    operator: SPDOperator, f: SpectralFunction, key: PRNGKeyArray, budget: int, depth: int
) -> Result:
    """Stochastic Lanczos quadrature, normalised independent probes.

    Source:
        Ubaru, Chen and Saad 2017.
    """
    count = min(budget // depth, operator.size)
    nothing = jnp.zeros((0, operator.size), operator.dtype)
    probes = NestedProbes(operator, nothing, None, kind="gaussian")
    probes.add(key, count)
    for _ in range(depth):
        probes.advance(count)
    forms = operator.size * gauss(f, *probes.tridiagonals(np.arange(count), depth))
    return float(np.mean(forms)), _variance_of_mean(forms), probes.num_matvecs


def krylov_aware(
    operator: SPDOperator,
    f: SpectralFunction,
    key: PRNGKeyArray,
    budget: int,
    depth: int,
    share: float = 0.5,
) -> Result:
    """Krylov-aware estimator with a block of one: deflates with the run it already has.

    `share` of the budget goes to the run, of which `depth` steps only look ahead; the probes are
    sphere-weighted.

    Source:
        Chen and Hallman 2023.
    """
    size = operator.size
    steps = min(max(int(share * budget), 2), size)
    start_key, key = jax.random.split(key)
    start = jax.random.normal(start_key, (size,), operator.dtype)
    basis = lanczos(operator, operator.unravel(start), steps)
    run = Tridiagonal.of(basis)
    level = run.size if run.exhausted else max(run.size - depth, run.size // 2, 1)
    resolved = float(np.sum(function_diagonal(f, *run.part(0, run.size))[:level]))
    count = min((budget - steps) // depth, size - level)
    if count < 1:
        return resolved, float("nan") if level < size else 0.0, basis.num_rows
    probes = NestedProbes(operator, basis.vectors[:level], None, kind="gaussian")
    probes.add(key, count)
    for _ in range(depth):
        probes.advance(count)
    forms = (size - level) * gauss(f, *probes.tridiagonals(np.arange(count), depth))
    return resolved + float(np.mean(forms)), _variance_of_mean(forms), steps + probes.num_matvecs


def hutchinson(
    operator: SPDOperator, f: SpectralFunction, key: PRNGKeyArray, budget: int, depth: int
) -> Result:
    """Girard-Hutchinson with Rademacher probes; each solve is `depth` conjugate-gradient steps.

    Source:
        Hutchinson 1990.
    """
    count = budget // depth
    block = jax.random.rademacher(key, (count, operator.size), operator.dtype)
    solutions = _conjugate_gradients(operator, block, depth)
    forms = np.asarray(jnp.sum(block * solutions, axis=1), np.float64)
    return float(np.mean(forms)), _variance_of_mean(forms), count * depth


def ulisse(
    operator: SPDOperator, f: SpectralFunction, key: PRNGKeyArray, budget: int, depth: int
) -> Result:
    """Russian-roulette conjugate gradients: unbiased solves inside Hutchinson's estimator.

    After `depth` steps, every further step of a solve happens with probability 0.8 given the one
    before it, and its increment is divided by the probability of having come that far. A probe
    that the budget cuts off counts as it stands, which the expected length makes rare.

    Source:
        Filippone and Engler 2015, as pslq.md section 2.4 describes it; the constant survival
        probability is a choice made here.
    """
    expected = depth + _SURVIVAL / (1 - _SURVIVAL)
    count = max(int(budget / expected), 1)
    probe_key, length_key = jax.random.split(key)
    block = jax.random.rademacher(probe_key, (count, operator.size), operator.dtype)
    uniform = np.asarray(jax.random.uniform(length_key, (count,)), np.float64)
    lengths = depth + np.floor(np.log1p(-uniform) / np.log(_SURVIVAL)).astype(int)
    lengths = np.minimum(lengths, operator.size)
    # Longest first: the block shrinks from its end. The budget cuts the longest ones.
    lengths = np.sort(lengths)[::-1]
    while lengths.sum() > budget:
        lengths[lengths == lengths.max()] -= 1
    state = _CGState.start(block)
    forms = np.zeros(count)
    for step in range(int(lengths.max())):
        active = int(np.sum(lengths > step))
        state, gains = _cg_step(operator, state.head(active))
        chance = _SURVIVAL ** max(step + 1 - depth, 0)
        forms[:active] += np.asarray(gains, np.float64) / chance
    return float(np.mean(forms)), _variance_of_mean(forms), int(lengths.sum())


def hutch_plus_plus(
    operator: SPDOperator, f: SpectralFunction, key: PRNGKeyArray, budget: int, depth: int
) -> Result:
    """Hutch++ on `A^-1`, through traceax; each solve is `depth` conjugate-gradient steps.

    Source:
        Meyer, Musco, Musco and Woodruff 2021.
    """
    traceax = _traceax("hutch++")
    solves = 3 * (budget // depth // 3)
    _check_solves(solves, 3, budget, depth)
    estimate, _ = _through_traceax(
        traceax.HutchPlusPlusEstimator(traceax.RademacherSampler(operator.dtype)),
        operator,
        key,
        solves,
        depth,
    )
    return float(estimate), float("nan"), solves * depth


def xtrace(
    operator: SPDOperator, f: SpectralFunction, key: PRNGKeyArray, budget: int, depth: int
) -> Result:
    """XTrace on `A^-1`, through traceax; each solve is `depth` conjugate-gradient steps.

    Source:
        Epperly, Tropp and Webber 2024.
    """
    traceax = _traceax("xtrace")
    solves = 2 * (budget // depth // 2)
    _check_solves(solves, 4, budget, depth)
    estimate, info = _through_traceax(
        traceax.XTraceEstimator(traceax.SphereSampler(operator.dtype)), operator, key, solves, depth
    )
    return float(estimate), float(info["std.err"]) ** 2, solves * depth


def _traceax(method: str):
    try:
        import traceax
    except ImportError as error:
        raise ImportError(
            f"method={method!r} needs traceax: install pnkrylov with the extra [bench]."
        ) from error
    return traceax


def _check_solves(solves: int, least: int, budget: int, depth: int) -> None:
    if solves < least:
        raise ValueError(
            f"budget={budget} gives {budget // depth} solves of depth={depth}, but at least "
            f"{least} are needed: pass a budget of at least {least * depth}."
        )


def _through_traceax(traces, operator: SPDOperator, key: PRNGKeyArray, solves: int, depth: int):
    if solves // 2 > operator.size:
        solves = 2 * operator.size

    @jax.custom_batching.custom_vmap
    def solve(vector):
        return _conjugate_gradients(operator, vector[None, :], depth)[0]

    @solve.def_vmap
    def _(axis_size, in_batched, block):
        return _conjugate_gradients(operator, block, depth), True

    inverse = lx.FunctionLinearOperator(
        solve, operator.in_structure(), lx.positive_semidefinite_tag
    )
    # traceax relies on implicit promotion, which a caller may have forbidden.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return traces.estimate(key, inverse, solves)


def _variance_of_mean(forms: Float[np.ndarray, " N"]) -> float:
    if len(forms) < 2:
        return float("nan")
    return float(np.var(forms, ddof=1) / len(forms))


class _CGState(eqx.Module):
    """Conjugate gradients of several systems `A x = b` side by side, started at zero."""

    residual: Array
    direction: Array
    square: Array

    @classmethod
    def start(cls, block: Float[Array, "k d"]) -> "_CGState":
        return cls(block, block, jnp.sum(block**2, axis=1))

    def head(self, count: int) -> "_CGState":
        return _CGState(self.residual[:count], self.direction[:count], self.square[:count])


@eqx.filter_jit
def _cg_step(operator: SPDOperator, state: _CGState) -> tuple[_CGState, Float[Array, " k"]]:
    """One step, and by how much it raises `b^T x`: `||r||^4 / p^T A p` (Hestenes-Stiefel)."""
    _, length, following = _cg_update(operator, state)
    return following, length * state.square


def _cg_update(operator: SPDOperator, state: _CGState) -> tuple[Array, Array, _CGState]:
    image = operator.block_mv(state.direction)
    curvature = jnp.sum(state.direction * image, axis=1)
    # A residual of exactly zero has converged: it stays where it is.
    length = jnp.where(state.square > 0, state.square / jnp.where(curvature == 0, 1, curvature), 0)
    residual = state.residual - length[:, None] * image
    square = jnp.sum(residual**2, axis=1)
    ratio = jnp.where(state.square > 0, square / jnp.where(state.square > 0, state.square, 1), 0)
    direction = residual + ratio[:, None] * state.direction
    return length[:, None] * state.direction, length, _CGState(residual, direction, square)


@eqx.filter_jit
def _conjugate_gradients(
    operator: SPDOperator, block: Float[Array, "k d"], depth: int
) -> Float[Array, "k d"]:
    def advance(_, carry):
        solution, state = carry
        added, _, state = _cg_update(operator, state)
        return solution + added, state

    start = (jnp.zeros_like(block), _CGState.start(block))
    return jax.lax.fori_loop(0, depth, advance, start)[0]
