"""`tr A^-1`, `log det A` and `tr f(A)` with an error bar, from a number of products or a tolerance.

The default estimator is P-SLQ with an adaptive split of the products. The others are its peers:
for comparison, and for users who know that one of them fits their problem.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._arguments import check_positive_numbers
from pnkrylov.errors import NotPositiveDefiniteError
from pnkrylov.estimate import Bracket, Estimate
from pnkrylov.krylov import Driver, is_concrete
from pnkrylov.operators import SPDOperator, as_operator
from pnkrylov.preconditioners import Preconditioner, precondition
from pnkrylov.traces import peers
from pnkrylov.traces.adaptive import AdaptiveTrace, Bracketed
from pnkrylov.traces.probes import ProbeKind
from pnkrylov.traces.quadrature import INVERSE, LOG, SpectralFunction, general

Method = Literal["pslq", "krylov-aware", "slq", "hutchinson", "hutch++", "xtrace", "ulisse"]
METHODS = ("pslq", "krylov-aware", "slq", "hutchinson", "hutch++", "xtrace", "ulisse")

# The smallest budget that leaves a main run with look-ahead and a probe of three steps.
_SMALLEST_BUDGET = 8
_FIRST_BUDGET = 64
_DEFAULT_BUDGET = 200


def trace_inverse(
    A: Any,
    *,
    key: PRNGKeyArray | None = None,
    budget: int | None = None,
    rtol: float | None = None,
    method: Method = "pslq",
    probes: ProbeKind = "sphere",
    depth: int | None = None,
    lower_bound: float | None = None,
    preconditioner: Preconditioner | None = None,
    like: PyTree | None = None,
    driver: Driver = "auto",
    progress: bool = False,
) -> Estimate:
    """Estimates `tr A^-1`.

    Args:
        A: anything `as_operator` takes; symmetric positive definite, d x d.
        key: random key.
        budget: products to spend, at most; 200 by default, without `rtol`. A budget of d or more
            gives the trace to rounding (P-SLQ only).
        rtol: spend products until the total error (standard error and quadrature bias) is below
            `rtol |value|`, or `budget` is reached. P-SLQ only.
        method: `"pslq"`, or a peer: `"krylov-aware"`, `"slq"`, `"hutchinson"` (with conjugate
            gradients), `"hutch++"`, `"xtrace"` (both through traceax) or `"ulisse"`.
        probes: starts of the random probes (P-SLQ): `"sphere"` (mutually orthonormal, the
            default), `"gaussian"` or `"rademacher"`.
        depth: Lanczos or conjugate-gradient steps per probe, for the peers; 20 by default. P-SLQ
            chooses its own.
        lower_bound: a number in (0, lambda_min], for example a noise variance: makes the upper
            end of the quadrature bracket a proved one (Gauss-Radau) instead of an estimated one.
        preconditioner: P, close to A: everything runs on `P^-1/2 A P^-1/2`, and the trace is still
            that of `A^-1` (P-SLQ only; not together with `lower_bound`; `probes` is not used).
            The products of its set-up count.
        like: example right-hand side, for a callable A.
        driver: `"auto"`, `"compiled"` or `"host"`, for the main run (see `lanczos`).
        progress: show progress bars.

    Returns:
        An `Estimate` in the dtype of A. Gauss quadrature bounds this trace from below.

    Raises:
        TypeError, ValueError: wrong arguments, a budget too small for one probe; called under
            `jit` or `vmap` (shapes depend on values).
        PnkrylovError: products that are not finite, or a Ritz value <= 0.

    Source:
        pslq.md, section 5; METHOD.md sections 2 and 4; docs/trace.md for what is added.
    """
    operator, key = _checked(A, like, key, method, rtol, depth, lower_bound, preconditioner)
    return _estimate(
        operator,
        INVERSE,
        key,
        budget,
        rtol,
        method,
        probes,
        depth,
        lower_bound,
        driver,
        progress,
        preconditioner,
    )


def logdet(
    A: Any,
    *,
    key: PRNGKeyArray | None = None,
    budget: int | None = None,
    rtol: float | None = None,
    method: Literal["pslq", "krylov-aware", "slq"] = "pslq",
    probes: ProbeKind = "sphere",
    depth: int | None = None,
    lower_bound: float | None = None,
    preconditioner: Preconditioner | None = None,
    like: PyTree | None = None,
    driver: Driver = "auto",
    progress: bool = False,
) -> Estimate:
    """Estimates `log det A`.

    Gauss quadrature bounds the logarithm from above.

    Args:
        A: as in `trace_inverse`.
        key: as in `trace_inverse`.
        budget: as in `trace_inverse`.
        rtol: as in `trace_inverse`, relative to `|log det A|`.
        method: as in `trace_inverse`; only `"pslq"`, `"krylov-aware"` and `"slq"`.
        probes: as in `trace_inverse`.
        depth: as in `trace_inverse`.
        lower_bound: as in `trace_inverse`.
        preconditioner: as in `trace_inverse`.
        like: as in `trace_inverse`.
        driver: as in `trace_inverse`.
        progress: as in `trace_inverse`.

    Returns:
        An `Estimate`, as `trace_inverse`.

    Raises:
        TypeError, ValueError, PnkrylovError: as `trace_inverse`.

    Source:
        METHOD.md section 2: `log det T + tr log T_perp + log(1 - gamma (T_perp^-1)_11)`.
    """
    operator, key = _checked(A, like, key, method, rtol, depth, lower_bound, preconditioner)
    return _estimate(
        operator,
        LOG,
        key,
        budget,
        rtol,
        method,
        probes,
        depth,
        lower_bound,
        driver,
        progress,
        preconditioner,
    )


def trace_function(
    A: Any,
    f: Callable[[Float[Array, " n"]], Float[Array, " n"]],
    *,
    key: PRNGKeyArray | None = None,
    budget: int | None = None,
    rtol: float | None = None,
    method: Literal["pslq", "krylov-aware", "slq"] = "pslq",
    probes: ProbeKind = "sphere",
    depth: int | None = None,
    like: PyTree | None = None,
    driver: Driver = "auto",
    progress: bool = False,
) -> Estimate:
    """Estimates `tr f(A)` for a function of the eigenvalues; A need only be symmetric.

    Only `1/x` and `log x` decouple over a Krylov space and its complement. For any other f the
    probes are orthogonal to the resolved vectors, but their runs are not re-projected, and the
    quadrature bracket is an estimate on both sides.

    Args:
        A: anything `as_operator` takes; symmetric, d x d.
        f: elementwise, from an array of eigenvalues to an array of the same shape. It is called
            at Ritz values, which lie inside the range of the spectrum.
        key: as in `trace_inverse`.
        budget: as in `trace_inverse`.
        rtol: as in `trace_inverse`.
        method: as in `trace_inverse`.
        probes: as in `trace_inverse`.
        depth: as in `trace_inverse`.
        like: as in `trace_inverse`.
        driver: as in `trace_inverse`.
        progress: as in `trace_inverse`.

    Raises:
        TypeError, ValueError: as `trace_inverse`; f is no function, not finite at a Ritz value, or
            does not act elementwise.
        PnkrylovError: as `trace_inverse`, but Ritz values may be negative.

    Source:
        Chen and Hallman 2023, for a general f.
    """
    if not callable(f):
        raise TypeError(f"f must be a function of an array of eigenvalues, got {f!r}.")
    operator, key = _checked(A, like, key, method, rtol, depth, None)
    function = general(f, operator.dtype)
    return _estimate(
        operator, function, key, budget, rtol, method, probes, depth, None, driver, progress
    )


def _checked(
    A: Any,
    like: PyTree | None,
    key: PRNGKeyArray | None,
    method: str,
    rtol: float | None,
    depth: int | None,
    lower_bound: float | None,
    preconditioner: Preconditioner | None = None,
) -> tuple[SPDOperator, PRNGKeyArray]:
    if key is None:
        raise TypeError("key is missing: pass a random key, for example key=jax.random.key(0).")
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown: use one of {', '.join(METHODS)}.")
    if method == "pslq" and depth is not None:
        raise ValueError(f"depth={depth} is for the peers: method='pslq' chooses its own depths.")
    if method != "pslq" and rtol is not None:
        raise ValueError(f"rtol={rtol} needs method='pslq'; {method!r} takes a budget.")
    if rtol is not None:
        check_positive_numbers(rtol=rtol)
    if lower_bound is not None:
        check_positive_numbers(lower_bound=lower_bound)
        if not np.isfinite(lower_bound):
            raise ValueError(f"lower_bound={lower_bound} must be at most the smallest eigenvalue.")
    if preconditioner is not None and (method != "pslq" or lower_bound is not None):
        raise ValueError(
            "preconditioner= needs method='pslq' and no lower_bound: it changes the spectrum that "
            "a bound is about, and the peers do not know it."
        )
    operator = as_operator(A, like=like)
    precondition(operator, preconditioner)  # for its checks
    if not is_concrete((operator, key, preconditioner)):
        raise ValueError(
            "Trace estimators choose shapes from what they see, so they cannot be traced: call "
            "them outside jit/vmap/grad, or use pnkrylov.inverse(...).trace() there."
        )
    return operator, key


def _checked_budget(budget: int | None, size: int, spent: int = 0) -> int:
    if budget is None:
        return _DEFAULT_BUDGET
    if isinstance(budget, bool) or not isinstance(budget, int | np.integer):
        raise TypeError(f"budget={budget!r} must be an int, not {type(budget).__name__}.")
    smallest = spent + min(_SMALLEST_BUDGET, size)
    if budget < smallest:
        paid = f", after {spent} products for the preconditioner" if spent else ""
        raise ValueError(
            f"budget={budget} is too small for a run and one probe{paid}: pass at least {smallest}."
        )
    return int(budget)


def _estimate(
    operator: SPDOperator,
    f: SpectralFunction,
    key: PRNGKeyArray,
    budget: int | None,
    rtol: float | None,
    method: str,
    probes: ProbeKind,
    depth: int | None,
    lower_bound: float | None,
    driver: Driver,
    progress: bool,
    preconditioner: Preconditioner | None = None,
) -> Estimate:
    if probes not in ("sphere", "gaussian", "rademacher"):
        raise ValueError(f"probes={probes!r} is unknown: use 'sphere', 'gaussian' or 'rademacher'.")
    size = operator.size
    if method != "pslq":
        total = _checked_budget(budget, size)
        depth = peers.checked_depth(depth, total, size)
        run = peers.estimator(method, f)
        value, variance, spent = run(operator, f, key, total, depth)
        plain = Bracketed(value, variance, value, value)
        return _packed(plain, operator, spent, "none")
    trace = AdaptiveTrace(
        operator,
        f,
        key,
        probes=probes,
        lower_bound=lower_bound,
        driver=driver,
        progress=progress,
        preconditioner=preconditioner,
    )
    limit = None
    if budget is not None or rtol is None:
        limit = _checked_budget(budget, size, trace.num_matvecs)
    if rtol is None:
        assert limit is not None
        trace.spend(limit)
        result = trace.estimate()
    else:
        result = _spend_until(trace, rtol, limit)
    _check_bound(lower_bound, trace.smallest())
    bracket: Bracket = "proved" if trace.proved() else "estimated"
    return _packed(result, operator, trace.num_matvecs, bracket)


def _spend_until(trace: AdaptiveTrace, rtol: float, limit: int | None) -> Bracketed:
    """Grows the estimate until its total error is below `rtol |value|`, or the limit is spent."""
    target, before = trace.num_matvecs + _FIRST_BUDGET, 0
    while True:
        trace.spend(target if limit is None else min(target, limit))
        result = trace.estimate()
        missing = np.sqrt(result.mean_square_error) / (rtol * abs(result.value))
        stuck = trace.num_matvecs == before
        if missing <= 1 or trace.is_exact() or stuck or trace.num_matvecs == limit:
            return result
        before = trace.num_matvecs
        # The error falls at least like one over the square root of the products.
        growth = float(np.clip(1.1 * missing**2, 1.5, 3.0))
        target = min(int(np.ceil(growth * before)), trace.exact_at())


def _check_bound(lower_bound: float | None, smallest: float) -> None:
    if lower_bound is not None and lower_bound > smallest:
        raise NotPositiveDefiniteError(
            f"lower_bound={lower_bound:.6g} is not one: the Ritz value {smallest:.6g} shows a "
            "smaller eigenvalue. Pass a smaller lower_bound, or none."
        )


def _packed(result: Bracketed, operator: SPDOperator, spent: int, bracket: Bracket) -> Estimate:
    number = functools.partial(jnp.asarray, dtype=operator.dtype)
    has_bracket = bracket != "none"
    return Estimate(
        value=number(result.value),
        standard_error=number(np.sqrt(result.variance)),
        num_matvecs=jnp.asarray(spent, jnp.int32),
        quadrature_lower=number(result.lower) if has_bracket else None,
        quadrature_upper=number(result.upper) if has_bracket else None,
        bracket=bracket,
    )
