"""The condition number of Hamiltonian Monte Carlo: `kappa = (sum_n (sigma_1 / sigma_n)^4)^{1/4}`.

`kappa = sigma_1 nu` with `nu^4 = tr Lambda^2`: the largest standard deviation sets how far a
trajectory must go, the stiffness nu how small its steps must be. Matrix-free, both come from one
Lanczos run on the precision: with Q its basis,
`tr Lambda^2 = ||Lambda Q||_F^2 + tr P Lambda^2 P` where `P = I - Q Q^T`, the first term is
`||T||_F^2 + beta_m^2` without a further product, and a unit vector w of the complement costs one
product, `w^T Lambda^2 w = ||Lambda w||^2`, without any quadrature.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.stats
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from pnkrylov._arguments import check_array, check_positive_counts, check_square
from pnkrylov.ciq.spectrum import FAILURE_PROBABILITY, certified_interval, smallest_share
from pnkrylov.errors import NotFiniteError, NotPositiveDefiniteError
from pnkrylov.hmc._scalars import check_positive
from pnkrylov.krylov import KrylovBasis, begin_run, continue_run, is_concrete
from pnkrylov.operators import SPDOperator, as_operator
from pnkrylov.trace import trace_function

_HIGHEST = jax.lax.Precision.HIGHEST
_FIRST_STEPS = 32
_GROWTH = 1.6
_DEFAULT_STEPS = 1000
# Probability of the interval of the trace.
_LEVEL = 0.99


class ConditionNumber(eqx.Module):
    """A condition number and how well it is known.

    Attributes:
        value: kappa, with the best guesses of its two factors.
        lower: lower end of an interval that holds it (99 % for the trace; the Ritz value is a
            bound by itself).
        upper: upper end: 99 % for the trace, and but for a probability of 1e-3 for the extreme
            eigenvalue; infinite where the run was too short to exclude a more extreme one.
        stiffness: nu, `(sum_n sigma_n^-4)^{1/4}`.
        sigma_max: the largest standard deviation.
        num_matvecs: products that were spent.
    """

    value: Float[Array, ""]
    lower: Float[Array, ""]
    upper: Float[Array, ""]
    stiffness: Float[Array, ""]
    sigma_max: Float[Array, ""]
    num_matvecs: Int[Array, ""]


def condition_number(
    *,
    standard_deviations: Float[Array, " N"] | None = None,
    covariance: Any = None,
    precision: Any = None,
    key: PRNGKeyArray | None = None,
    like: PyTree | None = None,
    rtol: float = 0.1,
    max_steps: int | None = None,
    num_probes: int = 16,
) -> ConditionNumber:
    """The condition number of a Gaussian target, from exactly one description of it.

    Args:
        standard_deviations: `(N,)`, those along the principal directions (not the marginal ones).
        covariance: a dense array `(N, N)` (exact, by its eigenvalues), or an operator.
        precision: the same for the inverse of the covariance.
        key: random key, for operators.
        like: example of a vector, for a callable.
        rtol: for operators: how far `upper` may be above `value` through the extreme eigenvalue,
            and for a covariance also through the trace.
        max_steps: for operators: largest number of Lanczos steps, `min(N, 1000)` by default.
        num_probes: for a precision operator: probes for what the run has not resolved.

    Returns:
        A `ConditionNumber`. From arrays it is exact, `lower` and `upper` are the value, and
        `standard_deviations` may be traced. From operators the shapes follow the data.

    Raises:
        TypeError: not exactly one of the three, or of another type; no key for an operator.
        ValueError: a standard deviation is not positive; sizes out of range; operators under `jit`.
        NotPositiveDefiniteError: by an eigenvalue or Ritz value.
        NotFiniteError: a product is not finite.

    Source:
        hmc_condition_number.md, section 3; METHOD.md section 10.
    """
    given = {
        "standard_deviations": standard_deviations,
        "covariance": covariance,
        "precision": precision,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise TypeError(
            "condition_number needs exactly one of standard_deviations=, covariance= and "
            f"precision=, got {', '.join(names) or 'none'}."
        )
    if standard_deviations is not None:
        check_array(standard_deviations, "standard_deviations", "N")
        check_positive(standard_deviations=standard_deviations)
        return _exact(standard_deviations)
    matrix = covariance if precision is None else precision
    if isinstance(matrix, jax.Array | np.ndarray):
        check_square(matrix, names[0], "N")
        return _exact(_deviations(jnp.asarray(matrix), names[0]))
    operator = as_operator(matrix, like=like)
    if key is None:
        raise TypeError("key is missing: pass a random key, for example key=jax.random.key(0).")
    if not is_concrete((operator, key)):
        raise ValueError("condition_number of an operator cannot be traced: call it outside jit.")
    check_positive(rtol=rtol)
    check_positive_counts(num_probes=num_probes)
    if max_steps is not None:
        check_positive_counts(max_steps=max_steps)
    limit = operator.size if max_steps is None else max_steps
    limit = min(limit, operator.size, _DEFAULT_STEPS if max_steps is None else limit)
    if precision is None:
        return _of_covariance(operator, key, rtol, limit)
    return _of_precision(operator, key, rtol, limit, num_probes)


def _exact(deviations: Float[Array, " N"]) -> ConditionNumber:
    largest = jnp.max(deviations)
    # Ratios first: fourth powers of small deviations overflow in float32.
    kappa = jnp.sum((largest / deviations) ** 4) ** 0.25
    none = jnp.zeros((), jnp.int32)
    return ConditionNumber(kappa, kappa, kappa, kappa / largest, largest, none)


def _deviations(matrix: Array, name: str) -> Float[Array, " N"]:
    eigenvalues = jnp.linalg.eigvalsh(matrix)
    if is_concrete(eigenvalues):
        _check_definite(float(eigenvalues[0]), name)
    return jnp.sqrt(eigenvalues if name == "covariance" else 1 / eigenvalues)


def _check_definite(smallest: float, name: str | None = None) -> None:
    if not np.isfinite(smallest):
        raise NotFiniteError(NotFiniteError.message(name or "A product of the operator"))
    if smallest <= 0 and name:
        raise NotPositiveDefiniteError(
            f"{name} must be positive definite, but has the eigenvalue {smallest:.6g}."
        )
    if smallest <= 0:
        raise NotPositiveDefiniteError(NotPositiveDefiniteError.message(f"{smallest:.6g}"))


class _Extreme(eqx.Module):
    """One end of a spectrum: the Ritz value, and the bound that excludes what lies beyond."""

    ritz: float
    bound: float
    basis: KrylovBasis


def _extreme(operator: SPDOperator, key: Array, end: str, rtol: float, limit: int) -> _Extreme:
    """Lanczos from a random start until the bound is within `(1 + rtol)^2` of the Ritz value."""
    size, dtype = operator.size, operator.dtype
    share = smallest_share(1, size, FAILURE_PROBABILITY)
    basis = begin_run(jax.random.normal(key, (size,), dtype))
    target = min(_FIRST_STEPS, limit)
    while True:
        basis = continue_run(basis, operator, target - basis.num_rows)
        filled = int(basis.filled)
        smallest, largest = _ritz_ends(basis, filled)
        _check_definite(smallest)
        lower, upper, certified = _interval(
            _padded(basis.alpha, limit), _padded(basis.beta, limit), basis.filled, share
        )
        if filled < basis.num_rows or filled == size:
            # A random start sees every eigenvalue: its invariant space holds the extreme ones.
            slack = 10 * filled * float(jnp.finfo(dtype).eps) * largest
            lower, upper, certified = smallest - slack, largest + slack, True
        if end == "smallest":
            bound = float(lower) if certified and lower > 0 else 0.0
            sharp = bound * (1 + rtol) ** 2 >= smallest
        else:
            bound = float(upper) if certified else np.inf
            sharp = bound <= largest * (1 + rtol) ** 2
        exhausted = filled < basis.num_rows or basis.num_rows == limit
        if sharp or exhausted:
            return _Extreme(smallest if end == "smallest" else largest, bound, basis)
        target = min(int(_GROWTH * target), limit)


# The buffers have one length for all steps of the run: one compilation.
_interval = eqx.filter_jit(functools.partial(certified_interval))


def _padded(values: Array, length: int) -> Float[Array, "n 1"]:
    return jnp.pad(values, (0, length - values.shape[0]))[:, None]


def _ritz_ends(basis: KrylovBasis, filled: int) -> tuple[float, float]:
    alpha = np.asarray(basis.alpha, np.float64)[:filled]
    beta = np.asarray(basis.beta, np.float64)[: max(filled - 1, 0)]
    if not (np.all(np.isfinite(alpha)) and np.all(np.isfinite(beta))):
        return np.nan, np.nan
    values = scipy.linalg.eigh_tridiagonal(alpha, beta, eigvals_only=True)
    return float(values[0]), float(values[-1])


def _of_precision(
    operator: SPDOperator, key: Array, rtol: float, limit: int, num_probes: int
) -> ConditionNumber:
    run_key, probe_key = jax.random.split(key)
    extreme = _extreme(operator, run_key, "smallest", rtol, limit)
    basis = extreme.basis
    resolved, rest, error, spent = _trace_of_square(operator, basis, probe_key, num_probes)
    total = resolved + rest
    # What is resolved is certain: chance cannot bring the trace below it.
    width = float(scipy.stats.t.ppf(0.5 + _LEVEL / 2, max(num_probes - 1, 1))) * error
    ends = max(total - width, resolved), total + width
    return _packed(
        operator,
        stiffness=[x**0.25 for x in (total, *ends)],
        sigma=[_inverse_root(extreme.ritz), _inverse_root(extreme.bound)],
        num_matvecs=basis.num_rows + spent,
    )


def _inverse_root(eigenvalue: float) -> float:
    return eigenvalue**-0.5 if eigenvalue > 0 else np.inf


def _trace_of_square(
    operator: SPDOperator, basis: KrylovBasis, key: Array, num_probes: int
) -> tuple[float, float, float, int]:
    """`||Lambda Q||_F^2`, the estimate of what remains, its standard error, and its products."""
    filled = int(basis.filled)
    left = operator.size - filled
    alpha = np.asarray(basis.alpha, np.float64)
    beta = np.asarray(basis.beta, np.float64)
    coupled = np.sum(beta[: filled - 1] ** 2) if filled else 0.0
    resolved = float(np.sum(alpha**2) + 2 * coupled + float(basis.residual_norm()) ** 2)
    count = min(num_probes, left)
    if count == 0:
        return resolved, 0.0, 0.0, 0
    forms = np.asarray(_probe_forms(operator, basis.vectors, key, count), np.float64)
    # Orthonormal probes are drawn without replacement, as it were: none is left to chance at last.
    spread = np.std(forms, ddof=1) if count > 1 else np.inf
    share = np.sqrt((1 - count / left) / count)
    error = 0.0 if count == left else float(left * spread * share)
    return resolved, float(left * np.mean(forms)), error, count


@eqx.filter_jit
def _probe_forms(
    operator: SPDOperator, vectors: Float[Array, "n d"], key: Array, count: int
) -> Float[Array, " N"]:
    """`||Lambda w||^2` for orthonormal random w in the complement of the basis."""
    block = jax.random.normal(key, (count, operator.size), operator.dtype)
    for _ in range(2):
        inside = jnp.matmul(block, vectors.T, precision=_HIGHEST)
        block = block - jnp.matmul(inside, vectors, precision=_HIGHEST)
        block = jnp.linalg.qr(block.T)[0].T
    return jnp.sum(operator.block_mv(block) ** 2, axis=1)


def _of_covariance(operator: SPDOperator, key: Array, rtol: float, limit: int) -> ConditionNumber:
    run_key, trace_key = jax.random.split(key)
    extreme = _extreme(operator, run_key, "largest", rtol, limit)
    # kappa has the fourth root of the trace.
    trace = trace_function(operator, lambda x: 1 / x**2, key=trace_key, rtol=4 * rtol, budget=limit)
    total = float(trace.value)
    ends = max(float(trace.lower), 0.0), float(trace.upper)
    return _packed(
        operator,
        stiffness=[x**0.25 for x in (total, *ends)],
        sigma=[extreme.ritz**0.5, extreme.bound**0.5],
        num_matvecs=extreme.basis.num_rows + int(trace.num_matvecs),
    )


def _packed(
    operator: SPDOperator, *, stiffness: list[float], sigma: list[float], num_matvecs: int
) -> ConditionNumber:
    # Rounding moves eigenvalues by a few eps of the norm; the ends leave room for that.
    number = functools.partial(jnp.asarray, dtype=operator.dtype)
    return ConditionNumber(
        value=number(stiffness[0] * sigma[0]),
        lower=number(stiffness[1] * sigma[0]),
        upper=number(stiffness[2] * sigma[1]),
        stiffness=number(stiffness[0]),
        sigma_max=number(sigma[0]),
        num_matvecs=jnp.asarray(num_matvecs, jnp.int32),
    )
