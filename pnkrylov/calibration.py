"""From a run to the numbers of a belief: mean, covariance, scale, and what they cost.

Pure functions of a run and a shift. No product with the operator is spent here.
"""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pnkrylov.covariance import KrylovCovariance, coupling_square_root
from pnkrylov.krylov import safe_norm
from pnkrylov.lookahead import LookaheadError, lookahead_error
from pnkrylov.preconditioned import Covariance, mapped_back
from pnkrylov.pslq import Boundary, Complement, log_trace, original_trace
from pnkrylov.results import RESULTS
from pnkrylov.runs import Run
from pnkrylov.stats import SolveStats, Stats
from pnkrylov.tridiagonal import Tridiagonal

_HIGHEST = jax.lax.Precision.HIGHEST


class Calibrated(eqx.Module):
    """What `calibrate_solve` and `calibrate_inverse` return, without the user's structure."""

    covariance: Covariance
    result: RESULTS
    stats: Stats


def calibrate_solve(
    run: Run,
    rhs: Float[Array, " d"],
    shift: Float[Array, ""],
    fixed_scale: Float[Array, ""],
    lower_bound: Float[Array, ""] | None,
    from_rhs: bool,
) -> tuple[Float[Array, " d"], Calibrated, SolveStats]:
    """Mean, covariance `nu Sigma_perp` and predicted error of a solve belief.

    Args:
        run: the run; `run.level` is the level whose mean is reported.
        rhs: v.
        shift: alpha.
        fixed_scale: nu, or -1 to let the look-ahead choose it (needs a run started at v).
        lower_bound: a lower bound of the spectrum, without shift, or None.
        from_rhs: whether the run was started at v.

    Source:
        METHOD.md section 5.
    """
    mean, calibrated, stats = _calibrate_solve(run, rhs, shift, fixed_scale, lower_bound, from_rhs)
    return mean, _with_vectors(calibrated, run), stats


@eqx.filter_jit
def _calibrate_solve(
    run: Run,
    rhs: Array,
    shift: Array,
    fixed_scale: Array,
    lower_bound: Array | None,
    from_rhs: bool,
) -> tuple[Array, Calibrated, SolveStats]:
    tridiagonal = run.tridiagonal(shift)
    ritz_range = tridiagonal.ritz_range()
    level = jnp.minimum(run.level, run.basis.filled)
    head = tridiagonal.head(level)
    inside = tridiagonal.rows() < level
    rhs = run.map(rhs)
    if from_rhs:
        coordinates = run.basis.start_norm * (tridiagonal.rows() == 0).astype(rhs.dtype)
    else:
        coordinates = jnp.matmul(run.basis.vectors, rhs, precision=_HIGHEST)
    solution = head.solve(jnp.where(inside, coordinates, 0)) / tridiagonal.unit
    solution = jnp.where(inside, solution, 0)
    mean = run.map(jnp.matmul(solution, run.basis.vectors, precision=_HIGHEST))

    boundary = Boundary.of(tridiagonal, level)
    bound = None if lower_bound is None else lower_bound + shift
    error = lookahead_error(tridiagonal, level, bound, ritz_range)
    bulk = _solve_bulk(run, tridiagonal, boundary, level, shift, error, ritz_range)
    remainder = _covariance(run, tridiagonal, boundary, None, inside, boundary.exists, bulk.value)
    error = error.stretched(_stretch(run, tridiagonal, head, level))
    dimension = (run.basis.size - level).astype(rhs.dtype)
    rounding = _rounding_error(mean, ritz_range)
    deviation, stats = _solve_scale(
        run, tridiagonal, error, rounding, remainder.trace(), dimension, fixed_scale, from_rhs
    )
    calibrated = _without_vectors(
        covariance=remainder.scaled(deviation),
        result=run.result(rhs, shift, lower_bound, widened(ritz_range, bulk, tridiagonal.unit)),
        stats=_stats(run, tridiagonal.unit, ritz_range, boundary, bulk, level),
    )
    return mean, calibrated, stats


def calibrate_inverse(
    run: Run,
    mean: Float[Array, " d"],
    shift: Float[Array, ""],
    layout: Literal["resolve-all", "paper"],
) -> Calibrated:
    """Covariance Sigma of an inverse belief.

    The traces are those of level m, whose look-ahead is known. `"paper"` resolves the first m
    vectors and keeps the coupling to the rest; `"resolve-all"` resolves the look-ahead vectors too
    and spreads what is left of the trace isotropically.

    Source:
        pslq.md, section 4; METHOD.md sections 3 and 4.
    """
    return _with_vectors(_calibrate_inverse(run, mean, shift, layout), run)


@eqx.filter_jit
def _calibrate_inverse(
    run: Run, mean: Array, shift: Array, layout: Literal["resolve-all", "paper"]
) -> Calibrated:
    tridiagonal = run.tridiagonal(shift)
    ritz_range = tridiagonal.ritz_range()
    assert run.probes is not None
    level = jnp.minimum(run.level, run.basis.filled)
    head = tridiagonal.head(level)
    boundary = Boundary.of(tridiagonal, level)
    rank = run.basis.size - level
    complement = Complement.of(tridiagonal, boundary, run.probes, shift, rank)
    if layout == "paper":
        resolved, explored = head, tridiagonal.rows() < level
        has_u = boundary.exists
        left = complement.trace - boundary.direction_variance()
    else:
        resolved, explored = tridiagonal, run.basis.mask()
        has_u = jnp.zeros((), bool)
        coupling = boundary.p1 * boundary.parallel_square()
        left = jnp.sum(head.inverse_diagonal()) + coupling + complement.trace
        left = left - jnp.sum(tridiagonal.inverse_diagonal())
    dimension = run.basis.size - jnp.sum(explored, dtype=jnp.int32) - has_u.astype(jnp.int32)
    bulk = Bulk.measured(left, complement, dimension)
    covariance = _covariance(run, tridiagonal, boundary, resolved, explored, has_u, bulk.value)
    given = jnp.concatenate([mean, run.basis.start_norm[None]])
    return _without_vectors(
        covariance=covariance,
        result=run.result(given, shift, None, widened(ritz_range, bulk, tridiagonal.unit)),
        stats=_stats(
            run, tridiagonal.unit, ritz_range, boundary, bulk, jnp.sum(explored, dtype=jnp.int32)
        ),
    )


@eqx.filter_jit
def calibrate_logdet(
    run: Run, shift: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`log det (A + shift I)` and its standard error (METHOD.md section 2)."""
    tridiagonal = run.tridiagonal(shift)
    assert run.probes is not None
    level = jnp.minimum(run.level, run.basis.filled)
    boundary = Boundary.of(tridiagonal, level)
    # The boundary probe's own Theta, its first row first; what is not in it decouples as 1.
    inside = (tridiagonal.rows() >= level) & (tridiagonal.rows() < tridiagonal.filled)
    off_diagonal = jnp.where(inside[:-1], tridiagonal.off_diagonal, 0)
    theta = jnp.diag(jnp.where(inside, tridiagonal.alpha, 1))
    theta = theta + jnp.diag(off_diagonal, 1) + jnp.diag(off_diagonal, -1)
    theta = jnp.roll(jnp.roll(theta, -level, axis=0), -level, axis=1)
    trace, error = log_trace(theta, boundary.exists, run.probes, shift, tridiagonal.unit)
    dimension = (run.basis.size - level).astype(trace.dtype)
    value = tridiagonal.head(level).logdet() + trace + dimension * jnp.log(tridiagonal.unit)
    if run.preconditioner is not None:
        value = value + run.preconditioner.logdet()
    return value - jnp.log1p(boundary.gamma * boundary.p1), error


@eqx.filter_jit
def calibrate_trace(run: Run, shift: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`tr A^-1` of the original operator of a preconditioned run, and its standard error."""
    assert run.preconditioner is not None
    assert run.probes is not None and run.trace_probes is not None
    tridiagonal = run.tridiagonal(shift)
    level = jnp.minimum(run.level, run.basis.filled)
    value, error = original_trace(
        tridiagonal,
        Boundary.of(tridiagonal, level),
        level,
        run.map(run.basis.vectors),
        jnp.sum(run.preconditioner.inv_diagonal()),
        run.probes,
        run.trace_probes,
        shift,
    )
    return value / tridiagonal.unit, error / tridiagonal.unit


def _vectors_of(calibrated: Calibrated) -> Any:
    covariance = calibrated.covariance
    plain = covariance if isinstance(covariance, KrylovCovariance) else covariance.inner
    return plain.vectors


def _without_vectors(**parts: Any) -> Calibrated:
    # What a compiled function returns is a new array: the basis would be in memory twice.
    return eqx.tree_at(_vectors_of, Calibrated(**parts), None)


def _with_vectors(calibrated: Calibrated, run: Run) -> Calibrated:
    vectors = run.basis.vectors
    return eqx.tree_at(_vectors_of, calibrated, vectors, is_leaf=lambda leaf: leaf is None)


class Bulk(eqx.Module):
    """omega in units of 1/unit, how well it is known, and what the complement's Ritz values say."""

    value: Float[Array, ""]
    standard_error: Float[Array, ""]
    at_floor: Array
    kappa: Float[Array, ""]
    smallest: Float[Array, ""]

    @classmethod
    def measured(
        cls, left: Float[Array, ""], complement: Complement, dimension: Int[Array, ""]
    ) -> "Bulk":
        """`left` shared out over `dimension` directions, not below the provable 1/mu_1."""
        count = jnp.maximum(dimension, 1).astype(left.dtype)
        smallest, largest = complement.ritz_range
        floor = 1 / largest
        value = left / count
        exists = dimension > 0
        at_floor = exists & (value < floor)
        return cls(
            value=jnp.where(exists, jnp.maximum(value, floor), 0),
            standard_error=jnp.where(exists, complement.standard_error / count, 0),
            at_floor=at_floor,
            kappa=jnp.where(jnp.isfinite(largest), largest / smallest, 1),
            smallest=smallest,
        )


def widened(ritz_range: Array, bulk: Bulk, unit: Array) -> Array:
    """The Ritz range with what the complement shows: a negative value there is proof as well."""
    return ritz_range.at[0].min(bulk.smallest * unit)


def _solve_bulk(
    run: Run,
    tridiagonal: Tridiagonal,
    boundary: Boundary,
    level: Array,
    shift: Array,
    error: LookaheadError,
    ritz_range: Array,
) -> Bulk:
    dimension = run.basis.size - level - boundary.exists.astype(jnp.int32)
    if run.probes is not None:
        rank = run.basis.size - level
        complement = Complement.of(tridiagonal, boundary, run.probes, shift, rank)
        left = complement.trace - boundary.direction_variance()
        return Bulk.measured(left, complement, dimension)
    # Without random probes the error itself measures the complement: the exact remainder has
    # ||e||_2^2 / tr Sigma_perp = ||e||_A^2 / (d - m), which gives its trace. An average over the
    # look-ahead vectors instead is far too small on fast decaying spectra (they lie among the
    # large eigenvalues), and leaves the belief to the two coupling directions.
    count = jnp.maximum(dimension, 1).astype(shift.dtype)
    rank = (run.basis.size - level).astype(shift.dtype)
    per_direction = error.norm / jnp.where(error.energy_norm > 0, error.energy_norm, 1)
    coupling = boundary.p1 * boundary.parallel_square() + boundary.direction_variance()
    value = (rank * per_direction**2 - coupling) / count
    floor = tridiagonal.unit / ritz_range[1]
    ends = boundary.ritz_range(tridiagonal, level)
    return Bulk(
        value=jnp.where(dimension > 0, jnp.maximum(value, floor), 0),
        standard_error=jnp.asarray(jnp.inf, shift.dtype),
        at_floor=jnp.zeros((), bool),
        kappa=jnp.where(boundary.exists, ends[1] / ends[0], 1),
        smallest=ends[0],
    )


def _covariance(
    run: Run,
    tridiagonal: Tridiagonal,
    boundary: Boundary,
    resolved: Tridiagonal | None,
    explored: Array,
    has_u: Array,
    bulk: Array,
) -> Covariance:
    parallel_norm = jnp.sqrt(boundary.parallel_square())
    root = coupling_square_root(parallel_norm, boundary.p1, boundary.p2, boundary.p3)
    parallel = boundary.parallel / jnp.where(parallel_norm > 0, parallel_norm, 1)
    perpendicular = boundary.perpendicular / jnp.where(boundary.p2 > 0, jnp.sqrt(boundary.p2), 1)
    unit = jnp.sqrt(tridiagonal.unit)
    covariance = KrylovCovariance(
        vectors=run.basis.vectors,
        resolved=resolved,
        directions=jnp.stack([parallel, perpendicular]),
        coupling_factor=jnp.where(has_u, root, 0) / unit,
        explored=explored,
        has_u=has_u,
        bulk_deviation=jnp.sqrt(bulk) / unit,
        structure=run.structure,
    )
    return mapped_back(covariance, run.preconditioner)


def _stretch(
    run: Run, tridiagonal: Tridiagonal, head: Tridiagonal, level: Array
) -> Float[Array, ""] | None:
    """By how much `P^-1/2` stretches the part of the error that the look-ahead shows; or None.

    That part is the difference of the last mean and that of level m.
    """
    if run.preconditioner is None:
        return None
    first = (tridiagonal.rows() == 0).astype(tridiagonal.alpha.dtype)
    early = jnp.where(tridiagonal.rows() < level, head.solve(first), 0)
    late = jnp.where(tridiagonal.rows() < tridiagonal.filled, tridiagonal.solve(first), 0)
    seen = jnp.matmul(late - early, run.basis.vectors, precision=_HIGHEST)
    length = safe_norm(seen)
    return jnp.where(length > 0, safe_norm(run.map(seen)) / jnp.where(length > 0, length, 1), 1)


def _rounding_error(mean: Array, ritz_range: Array) -> Array:
    """What rounding leaves of the error of a converged mean, about: `eps kappa ||mean|| / 10`.

    Measured on the calibration grid: 0.02 to 0.1 eps kappa. Without it a converged belief would be
    certain of digits that are not there.
    """
    condition = ritz_range[1] / jnp.maximum(ritz_range[0], jnp.finfo(mean.dtype).tiny)
    return 0.1 * jnp.finfo(mean.dtype).eps * condition * safe_norm(mean)


def _solve_scale(
    run: Run,
    tridiagonal: Tridiagonal,
    error: LookaheadError,
    rounding: Array,
    trace: Array,
    dimension: Array,
    fixed_scale: Array,
    from_rhs: bool,
) -> tuple[Array, SolveStats]:
    """sqrt(nu) and the predicted errors."""
    norm, unit = run.basis.start_norm, tridiagonal.unit
    free = fixed_scale < 0
    deviation = jnp.sqrt(jnp.where(free, 0, fixed_scale))
    predicted = deviation * jnp.sqrt(trace)
    upper = energy = jnp.full_like(norm, jnp.inf)
    seen = jnp.zeros_like(norm)
    sufficient = jnp.ones((), bool)
    if from_rhs:
        error_norm = jnp.hypot(norm * error.norm / unit, rounding)
        energy = norm * error.energy_norm / jnp.sqrt(unit)
        upper, seen, sufficient = norm * error.norm_upper / unit, error.seen(), error.sufficient()
        chosen = jnp.where(trace > 0, error_norm / jnp.sqrt(jnp.where(trace > 0, trace, 1)), 0)
        deviation = jnp.where(free, chosen, deviation)
        predicted = jnp.where(free, error_norm, predicted)
    stats = SolveStats(
        error_norm=predicted,
        energy_norm=energy,
        error_norm_upper=upper,
        seen=seen,
        sufficient=sufficient,
        scale=deviation**2,
        energy_scale=energy**2 / jnp.maximum(dimension, 1),
    )
    return deviation, stats


def _stats(
    run: Run, unit: Array, ritz_range: Array, boundary: Boundary, bulk: Bulk, resolved: Array
) -> Stats:
    smallest, largest = ritz_range
    zero = jnp.zeros((), jnp.int32)
    probes = run.probes
    return Stats(
        num_matvecs=run.num_matvecs,
        num_steps=resolved,
        lookahead=run.basis.filled - resolved,
        num_probes=zero if probes is None else jnp.sum(probes.valid, dtype=jnp.int32),
        probe_depth=zero if probes is None else probes.steps,
        ritz_min=smallest,
        ritz_max=largest,
        residual_norm=run.basis.residual_norm(),
        kappa_s=bulk.kappa,
        coupling_norm=jnp.where(boundary.exists, boundary.coupling_norm() / unit, 0),
        bulk_variance=bulk.value / unit,
        bulk_standard_error=bulk.standard_error / unit,
        bulk_at_floor=bulk.at_floor,
        asymmetry=run.asymmetry,
        driver=run.basis.driver,
    )
