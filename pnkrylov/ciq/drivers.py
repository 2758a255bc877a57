"""How a square-root product is computed: Lanczos-FA or msMINRES, from flat rows to a solution."""

import dataclasses
import math
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from pnkrylov._arguments import check_counts, check_fractions, check_positive_counts
from pnkrylov.ciq import lanczos_function
from pnkrylov.ciq.combined import QUADRATURE_SHARE, SOLVER_SHARE
from pnkrylov.ciq.lanczos_function import FunctionPlan, FunctionRun
from pnkrylov.ciq.msminres import msminres
from pnkrylov.ciq.quadrature import num_quadrature_points, quadrature
from pnkrylov.ciq.results import SquareRootSolution, attainable, judge
from pnkrylov.ciq.spectrum import (
    FAILURE_PROBABILITY,
    SpectralBounds,
    extreme_ritz_values,
    smallest_share,
    spectral_bounds,
)
from pnkrylov.krylov import is_concrete
from pnkrylov.operators import SPDOperator

Method = Literal["auto", "lanczos", "ciq"]

# Up to this dimension the stored bases are kept orthogonal: then d products always suffice.
ORTHOGONAL_SIZE = 1024
# The first basis buffer is at most this large, so that nothing big is allocated in vain.
_FIRST_BASIS_BYTES = 2**27


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `inv_sqrt_matvec`, documented there."""

    forward: bool
    rtol: float = 1e-4
    method: Method = "auto"
    preconditioner: Any = None
    bounds: SpectralBounds | None = None
    random_rhs: bool = False
    num_points: int | None = None
    max_steps: int | None = None
    max_basis_bytes: int = 2**30

    def __post_init__(self) -> None:
        check_fractions(rtol=self.rtol)
        if self.method not in ("auto", "lanczos", "ciq"):
            raise ValueError(f"method must be 'auto', 'lanczos' or 'ciq', got {self.method!r}.")
        for name in ("max_steps", "num_points"):
            value = getattr(self, name)
            if value is not None:
                check_positive_counts(**{name: value})
        check_counts(max_basis_bytes=self.max_basis_bytes)
        if self.bounds is not None and not isinstance(self.bounds, SpectralBounds):
            raise TypeError(
                f"bounds is of type {type(self.bounds).__name__}: pass SpectralBounds.known(lower, "
                "upper) or what spectral_bounds returns."
            )

    def points_for(self, bounds: SpectralBounds | None, dtype: Any) -> int:
        """Number of quadrature points; without concrete bounds, for the worst condition number."""
        if self.num_points is not None:
            return self.num_points
        condition = 1 / float(jnp.finfo(dtype).eps)
        if bounds is not None and is_concrete(bounds):
            condition = float(bounds.condition)
        return num_quadrature_points(condition, QUADRATURE_SHARE * self.rtol)


def by_lanczos(
    operator: SPDOperator, rows: Float[Array, "k d"], key: PRNGKeyArray, options: Options
) -> SquareRootSolution | None:
    """Lanczos-FA; None when `method="auto"` has to give up because the basis would not fit."""
    num_rhs, dtype, bounds = rows.shape[0], operator.dtype, options.bounds
    traced = not is_concrete((operator, rows, bounds, key))
    rows, num_probes = _with_probes(rows, key, options)
    largest, gives_up = _capacity(operator, rows, options, traced)
    if gives_up:
        return None
    plan = FunctionPlan(
        num_points=options.points_for(bounds, dtype),
        num_probes=num_probes,
        share=smallest_share(max(num_probes, 1), operator.size, FAILURE_PROBABILITY),
        orthogonal=operator.size <= ORTHOGONAL_SIZE,
        known_bounds=bounds is not None,
        forward=options.forward,
    )
    tolerance = jnp.asarray(options.rtol, dtype)
    if traced:
        run = lanczos_function.begin(rows, largest, bounds)
        run = lanczos_function.extend(operator, run, plan, tolerance)
    else:
        run = _on_host(operator, rows, largest, plan, options)
    return None if run is None else _lanczos_solution(run, plan, num_rhs, tolerance)


def _with_probes(rows: Array, key: PRNGKeyArray, options: Options) -> tuple[Array, int]:
    """Appends the random rows that certify the bounds; returns how many probes there are."""
    num_rhs, size = rows.shape
    if options.bounds is not None:
        return rows, 0
    if options.random_rhs:
        return rows, num_rhs
    # More probes certify sooner; next to many right-hand sides they cost little.
    num_probes = 1 + (num_rhs >= 4) + 2 * (num_rhs >= 16)
    probes = jax.random.normal(key, (num_probes, size), rows.dtype)
    return jnp.concatenate([rows, probes]), num_probes


def _capacity(
    operator: SPDOperator, rows: Array, options: Options, traced: bool
) -> tuple[int, bool]:
    """Most steps that the basis may store, and whether `method="auto"` gives up beforehand."""
    orthogonal = operator.size <= ORTHOGONAL_SIZE
    wanted = operator.size if options.max_steps is None else options.max_steps
    affordable = options.max_basis_bytes // (rows.size * rows.dtype.itemsize)
    largest = affordable
    if options.max_steps is not None:
        largest = min(largest, options.max_steps)
    if orthogonal:
        largest = min(largest, operator.size)
    gives_up = largest < 8 and affordable < wanted
    if traced:
        # Nothing is known about the condition number, so the whole basis must fit.
        known_length = orthogonal or options.max_steps is not None
        gives_up = gives_up or affordable < wanted or not known_length
    return max(largest, 1), gives_up and options.method == "auto"


def _on_host(
    operator: SPDOperator, rows: Array, largest: int, plan: FunctionPlan, options: Options
) -> FunctionRun | None:
    """Doubles the basis until the run is over; None when `method="auto"` has to give up."""
    # The run is updated in place, and the caller keeps their bounds.
    bounds = None if options.bounds is None else jax.tree.map(jnp.copy, options.bounds)
    capacity = 256
    while capacity > 32 and capacity * rows.size * rows.dtype.itemsize > _FIRST_BASIS_BYTES:
        capacity //= 2
    capacity = min(capacity, largest)
    run = _begin(rows, capacity, bounds)
    memory_bound = options.method == "auto" and options.max_steps is None
    while True:
        run = _extend((operator, jnp.asarray(options.rtol, rows.dtype)), run, plan)
        if _is_over(run):
            return run
        if capacity >= largest:
            return None if memory_bound and largest < operator.size else run
        if memory_bound and _predicted_steps(run, plan, options.rtol) > largest:
            return None
        capacity = min(2 * capacity, largest)
        run = lanczos_function.grow(run, capacity)


@eqx.filter_jit
def _lanczos_solution(
    run: FunctionRun, plan: FunctionPlan, num_rhs: int, rtol: Float[Array, ""]
) -> SquareRootSolution:
    values, bounds = lanczos_function.combine(run, plan)
    error = run.error_bound[:num_rhs] + QUADRATURE_SHARE * rtol
    converged = (error <= rtol) & run.bracketed & ~run.failed
    finite = jnp.all(jnp.isfinite(run.alpha))
    rounding = attainable(bounds)
    precise = rtol >= rounding
    return SquareRootSolution(
        value=values[:num_rhs],
        error_bound=error,
        rounding=rounding,
        converged=converged & precise,
        iterations=run.iterations[:num_rhs],
        num_matvecs=run.steps * run.alpha.shape[1],
        num_passes=run.steps,
        bounds=bounds,
        result=judge(
            finite=finite,
            positive_definite=~run.failed | ~finite,
            bracketed=run.bracketed,
            precise=precise,
            certified=run.bounds.certified,
            converged=jnp.all(converged),
        ),
        method="lanczos",
    )


_begin = eqx.filter_jit(lanczos_function.begin)


# The run is donated: its basis is updated in place.
@eqx.filter_jit(donate="all-except-first")
def _extend(kept: tuple[SPDOperator, Array], run: FunctionRun, plan: FunctionPlan) -> FunctionRun:
    operator, rtol = kept
    return lanczos_function.extend(operator, run, plan, rtol)


def _is_over(run: FunctionRun) -> bool:
    return bool(run.finished | run.failed | ~jnp.any(run.state.alive))


def _predicted_steps(run: FunctionRun, plan: FunctionPlan, rtol: float) -> float:
    """Steps that the condition number seen so far demands, by the bound for MINRES."""
    if plan.orthogonal:
        return run.basis.shape[2]
    if bool(run.bounds.certified):
        condition = float(run.bounds.condition)
    else:
        ritz_min, ritz_max = _ritz_values(run.alpha, run.beta, run.steps)
        condition = float(ritz_max) / max(float(ritz_min), 1e-16 * float(ritz_max))
    return _steps_for(condition, rtol)


_ritz_values = jax.jit(extreme_ritz_values)


def _steps_for(condition: float, rtol: float) -> float:
    root = math.sqrt(condition)
    return root / 2 * math.log(2 * root / rtol)


def by_ciq(
    operator: SPDOperator, rows: Float[Array, "k d"], key: PRNGKeyArray, options: Options
) -> SquareRootSolution:
    """msMINRES on the quadrature's shifts, after a run that bounds the spectrum if need be."""
    bounds, spent = options.bounds, jnp.zeros((), jnp.int32)
    if bounds is None:
        bounds = spectral_bounds(operator, key=key, max_steps=options.max_steps)
        spent = bounds.num_matvecs
    concrete = is_concrete(bounds)
    if concrete and not bool(bounds.certified):
        # Nothing that follows could be trusted, so no product is spent on it.
        return _unsolved(rows, bounds, spent)
    max_steps = options.max_steps
    if max_steps is None:
        max_steps = 10 * operator.size + 100
        if concrete:
            # Twice the bound for exact arithmetic; rounded up, so that few lengths are compiled.
            steps = 2 * _steps_for(float(bounds.condition), options.rtol) + 64
            max_steps = 2 ** math.ceil(math.log2(steps))
    tolerance = jnp.asarray(options.rtol, rows.dtype)
    num_points = options.points_for(bounds, rows.dtype)
    solution = _ciq_solution(
        operator, rows, bounds, tolerance, num_points, max_steps, options.forward
    )
    return eqx.tree_at(
        lambda s: (s.num_matvecs, s.num_passes),
        solution,
        (solution.num_matvecs + spent, solution.num_passes + spent),
    )


@eqx.filter_jit
def _ciq_solution(
    operator: SPDOperator,
    rows: Float[Array, "k d"],
    bounds: SpectralBounds,
    rtol: Float[Array, ""],
    num_points: int,
    max_steps: int,
    forward: bool,
) -> SquareRootSolution:
    rule = quadrature(bounds.lower, bounds.upper, num_points=num_points)
    solved = msminres(
        operator,
        rows,
        rule.shifts,
        weights=rule.weights,
        lower=bounds.lower,
        upper=bounds.upper,
        rtol=SOLVER_SHARE * rtol,
        max_steps=max_steps,
        forward=forward,
    )
    ritz_min, ritz_max = extreme_ritz_values(
        solved.ritz_diagonal, solved.ritz_coupling, solved.num_steps
    )
    bounds = eqx.tree_at(
        lambda b: (b.ritz_min, b.ritz_max),
        bounds,
        (jnp.minimum(bounds.ritz_min, ritz_min), jnp.maximum(bounds.ritz_max, ritz_max)),
    )
    finite = jnp.all(jnp.isfinite(solved.ritz_diagonal))
    rounding = attainable(bounds)
    precise = rtol >= rounding
    certified = bounds.certified
    converged = solved.converged & solved.bracketed & certified & solved.positive_definite
    return SquareRootSolution(
        value=solved.value,
        error_bound=jnp.where(certified, solved.error_bound + QUADRATURE_SHARE * rtol, jnp.inf),
        rounding=rounding,
        converged=converged & precise,
        iterations=solved.iterations,
        num_matvecs=solved.num_steps * rows.shape[0],
        num_passes=solved.num_steps,
        bounds=bounds,
        result=judge(
            finite=finite,
            positive_definite=(solved.positive_definite & (bounds.ritz_min > 0)) | ~finite,
            bracketed=solved.bracketed,
            precise=precise,
            certified=certified,
            converged=jnp.all(converged),
        ),
        method="ciq",
    )


def _unsolved(rows: Array, bounds: SpectralBounds, spent: Array) -> SquareRootSolution:
    num_rhs, yes = rows.shape[0], jnp.asarray(True)
    finite = jnp.isfinite(bounds.ritz_max) & jnp.isfinite(bounds.ritz_min)
    # What comes is an error of our own, or a result code: not one of jax_debug_nans.
    with jax.debug_nans(False):
        nothing = jnp.full_like(rows, jnp.nan)
    return SquareRootSolution(
        value=nothing,
        error_bound=jnp.full((num_rhs,), jnp.inf, rows.dtype),
        rounding=attainable(bounds),
        converged=jnp.zeros((num_rhs,), bool),
        iterations=jnp.zeros((num_rhs,), jnp.int32),
        num_matvecs=spent,
        num_passes=spent,
        bounds=bounds,
        result=judge(
            finite=finite,
            positive_definite=(bounds.ritz_min > 0) | ~finite,
            bracketed=yes,
            precise=yes,
            certified=jnp.asarray(False),
            converged=jnp.asarray(False),
        ),
        method="ciq",
    )
