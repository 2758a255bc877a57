"""Bounds that bracket the spectrum of an operator, from Lanczos runs with random starts.

Ritz values lie inside the spectrum, so they cannot bracket it. What brackets it is the random
start: it has a component along the extreme eigenvectors, of a size that is known except with a
small probability, and after enough steps the run would have noticed it.

Let `p_0, p_1, ...` be the orthonormal polynomials of a run. An eigenvalue at `x` whose eigenvector
carries the share `c` of the squared (unit) start vector obeys `c sum_j p_j(x)^2 <= 1`. For `r`
starts that are uniform on the sphere, the mean share is below
`2 (delta Gamma(r/2 + 1))^(2/r) / (r d)` with probability at most `delta`. So every `x` below all
Ritz values at which the mean over the runs of `1 / sum_j p_j(x)^2` is smaller than that is no
eigenvalue, however unlucky the starts, except with probability `delta`.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from pnkrylov._arguments import check_fractions, check_positive_counts, check_reals
from pnkrylov.ciq import recurrence
from pnkrylov.krylov import is_concrete
from pnkrylov.operators import SPDOperator, as_operator

FAILURE_PROBABILITY = 1e-3

# Points per round of a multi-section search.
_SECTION = 63
# The certified lower bound is sharpened until it is at most this factor below the Ritz value.
_SHARPNESS = 8.0
# Below this, the basis of the bounding run is stored and kept orthogonal.
_BASIS_BYTES = 2**26


class SpectralBounds(eqx.Module):
    """An interval `[lower, upper]` that contains the spectrum, and how well it is known.

    `certified` is False where the run ended (step limit, indefinite operator) before it could
    exclude smaller eigenvalues; `lower` is then only a guess below the smallest Ritz value.

    Attributes:
        lower: lower end, a scalar.
        upper: upper end.
        ritz_min: smallest Ritz value of the run; `lower` where the bounds were given.
        ritz_max: largest Ritz value of the run; `upper` where the bounds were given.
        certified: whether both ends are bounds, up to the failure probability.
        num_matvecs: products that were spent.
    """

    lower: Float[Array, ""]
    upper: Float[Array, ""]
    ritz_min: Float[Array, ""]
    ritz_max: Float[Array, ""]
    certified: Bool[Array, ""]
    num_matvecs: Int[Array, ""]

    @staticmethod
    def known(lower: Any, upper: Any, dtype: Any = None) -> "SpectralBounds":
        """Bounds that the caller knows, for example a noise variance from below.

        Raises:
            TypeError: If they are no real numbers.
            ValueError: If concrete numbers are not `0 < lower <= upper < inf`.
        """
        check_reals(lower=lower, upper=upper)
        lower, upper = jnp.asarray(lower, dtype), jnp.asarray(upper, dtype)
        traced = not is_concrete((lower, upper))
        if not traced and not 0 < float(lower) <= float(upper) < math.inf:
            raise ValueError(
                f"bounds must obey 0 < lower <= upper < inf, got {float(lower)}, {float(upper)}."
            )
        certified, none = jnp.asarray(True), jnp.zeros((), jnp.int32)
        return SpectralBounds(lower, upper, lower, upper, certified, none)

    @property
    def condition(self) -> Float[Array, ""]:
        """Upper bound of the condition number."""
        return self.upper / self.lower


def spectral_bounds(
    A: Any,
    *,
    key: PRNGKeyArray,
    like: PyTree = None,
    failure_probability: float = FAILURE_PROBABILITY,
    max_steps: int | None = None,
) -> SpectralBounds:
    """Brackets the spectrum of a symmetric operator by Lanczos from a random start.

    The run ends when the certified lower bound (see the module) is within a factor of eight of the
    smallest Ritz value. That takes about as many products as solving a system to three digits:
    fewer cannot tell a small eigenvalue from none. Reuse the result for further right-hand sides.

    Where `d` vectors fit in 64 MiB the basis is stored and kept orthogonal, so that at most `d`
    products are needed at any condition number. Otherwise only two vectors are kept; copies of
    converged Ritz values ("ghosts") are harmless for the extremes but cost products.

    Args:
        A: Anything that `as_operator` takes.
        key: Random key of the start vector.
        like: Example of the user's vectors, where `A` does not determine it.
        failure_probability: Largest probability that an eigenvalue lies outside the bracket.
        max_steps: Largest number of products; default `max(1000, 10 d)`, at most 50,000.

    Returns:
        `SpectralBounds`. No error is raised for an indefinite operator: `ritz_min` is not
        positive then and `certified` is False.

    Raises:
        TypeError, ValueError: If `failure_probability` is not in (0, 1) or `max_steps < 1`; and as
            `as_operator`.

    Source:
        Kuczynski and Wozniakowski (1992), SIAM J. Matrix Anal. Appl. 13, bound the same
        probability before the run, for the worst spectrum; this is the bound after the run, by
        the Christoffel function (Szego, Orthogonal Polynomials, section 3.4) of its measure.
    """
    operator = as_operator(A, like=like)
    if max_steps is None:
        max_steps = min(max(1000, 10 * operator.size), 50_000)
    check_positive_counts(max_steps=max_steps)
    stored = operator.size**2 * operator.dtype.itemsize <= _BASIS_BYTES
    if stored:
        max_steps = min(max_steps, operator.size)
    share = smallest_share(1, operator.size, failure_probability)
    return _run(operator, key, share, max_steps, stored)


def smallest_share(num_starts: int, size: int, failure_probability: float) -> float:
    """What each extreme eigenvector has at least of the mean squared start, but for bad luck.

    Raises:
        ValueError: If `failure_probability` is not in (0, 1).
    """
    check_fractions(failure_probability=failure_probability)
    # Half of the probability for either end of the spectrum.
    log_power = math.log(failure_probability / 2) + math.lgamma(num_starts / 2 + 1)
    return 2 * math.exp(2 * log_power / num_starts) / (num_starts * size)


class _Run(eqx.Module):
    """The tridiagonal so far, on fixed-size buffers, and the state that extends it."""

    state: recurrence.ThreeTerm
    basis: Float[Array, "m k d"] | None
    alpha: Float[Array, "n k"]
    beta: Float[Array, "n k"]
    scale: Float[Array, ""]
    steps: Int[Array, ""]
    next_check: Int[Array, ""]
    bounds: SpectralBounds


@eqx.filter_jit
def _run(
    operator: SPDOperator, key: Array, share: float, max_steps: int, stored: bool
) -> SpectralBounds:
    dtype = operator.dtype
    state, _ = recurrence.start(jax.random.normal(key, (1, operator.size), dtype))
    zero, one, none = jnp.zeros((), dtype), jnp.ones((), dtype), jnp.zeros((), jnp.int32)
    run = _Run(
        state=state,
        basis=jnp.zeros((max_steps, 1, operator.size), dtype) if stored else None,
        alpha=jnp.zeros((max_steps, 1), dtype),
        beta=jnp.zeros((max_steps, 1), dtype),
        scale=zero,
        steps=none,
        next_check=jnp.asarray(min(16, max_steps), jnp.int32),
        bounds=SpectralBounds(zero, one, zero, one, jnp.asarray(False), none),
    )

    def step(run: _Run) -> _Run:
        basis = run.basis
        if basis is not None:
            basis = recurrence.store(basis, run.steps, run.state.current)
        state, alpha = recurrence.advance(operator, run.state, run.scale, basis, run.steps + 1)
        return _Run(
            state=state,
            basis=basis,
            alpha=run.alpha.at[run.steps].set(alpha),
            beta=run.beta.at[run.steps].set(state.beta),
            scale=jnp.maximum(run.scale, jnp.abs(alpha[0]) + state.beta[0]),
            steps=run.steps + 1,
            next_check=run.next_check,
            bounds=run.bounds,
        )

    def advance_to_check(run: _Run) -> _Run:
        run = jax.lax.while_loop(lambda r: (r.steps < r.next_check) & r.state.alive[0], step, run)
        following = jnp.minimum(run.steps + jnp.maximum(run.steps // 8, 4), max_steps)
        bounds = _bracket(run, share)
        return eqx.tree_at(lambda r: (r.bounds, r.next_check), run, (bounds, following))

    def unfinished(run: _Run) -> Array:
        bounds = run.bounds
        sharp = bounds.certified & (bounds.lower * _SHARPNESS >= bounds.ritz_min)
        hopeless = (run.steps > 0) & ~(bounds.ritz_min > 0)
        return (run.steps < max_steps) & run.state.alive[0] & ~sharp & ~hopeless

    return jax.lax.while_loop(unfinished, advance_to_check, run).bounds


def _bracket(run: _Run, share: float) -> SpectralBounds:
    lower, upper, certified = certified_interval(run.alpha, run.beta, run.steps, share)
    ritz_min, ritz_max = extreme_ritz_values(run.alpha, run.beta, run.steps)
    guess = jnp.maximum(ritz_min, 0) / 100
    return SpectralBounds(
        lower=jnp.where(certified, lower, guess),
        upper=upper,
        ritz_min=ritz_min,
        ritz_max=ritz_max,
        certified=certified,
        num_matvecs=run.steps,
    )


def certified_interval(
    alpha: Float[Array, "n k"], beta: Float[Array, "n k"], steps: Int[Array, ""], share: float
) -> tuple[Float[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """Bounds of the spectrum from `k` tridiagonals with random starts, by exclusion.

    Args:
        alpha: Diagonals of the `k` tridiagonals, `(n, k)`, of which the first `steps` rows count.
        beta: Couplings to the next row; that of the last row is the residual norm.
        steps: Number of rows so far, at least 1.
        share: From `smallest_share`.

    Returns:
        `(lower, upper, certified)`, scalars.
    """
    smallest, largest, gershgorin = _diagonal_range(alpha, beta, steps)
    eps = jnp.finfo(alpha.dtype).eps

    def no_eigenvalue_below(points: Array) -> Array:
        return _excluded(alpha, beta, steps, points, share)

    def no_eigenvalue_above(points: Array) -> Array:
        return _excluded(-alpha, beta, steps, -points, share)

    # The smallest eigenvalue is sought on a logarithmic grid down to where rounding hides it.
    low, high = 8 * eps * gershgorin, jnp.maximum(smallest, 16 * eps * gershgorin)
    found_lower, lower = _last_true(no_eigenvalue_below, low, high)
    found_upper, upper = _last_true(no_eigenvalue_above, 2 * gershgorin, largest)
    # A product rounds at eps ||A||, and so does everything that is known about it.
    certified = found_lower & found_upper
    return lower - 4 * eps * upper, upper * (1 + 4 * eps), certified


def extreme_ritz_values(
    alpha: Float[Array, "n k"], beta: Float[Array, "n k"], steps: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Smallest and largest eigenvalue of the leading `steps` rows of `k` tridiagonals.

    By multi-section on the signs of the pivots, so that only the first `steps` rows of the buffers
    are read.
    """
    smallest, largest, gershgorin = _diagonal_range(alpha, beta, steps)
    rounds = {2: 3, 4: 6, 8: 10}[alpha.dtype.itemsize]

    def search(alpha: Array, low: Array, high: Array) -> Array:
        def below(points: Array) -> Array:
            return _polynomial_sums(alpha, beta, steps, points)[0]

        def narrow(_: Array, interval: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = interval
            edges = low + (high - low) * jnp.arange(_SECTION + 2, dtype=low.dtype) / (_SECTION + 1)
            count = jnp.sum(below(edges[1:-1]), dtype=jnp.int32)
            return edges[count], edges[count + 1]

        low, high = jax.lax.fori_loop(0, rounds, narrow, (low, high))
        return (low + high) / 2

    ritz_min = search(alpha, -1.01 * gershgorin, smallest)
    ritz_max = -search(-alpha, -1.01 * gershgorin, -largest)
    return ritz_min, ritz_max


def _diagonal_range(alpha: Array, beta: Array, steps: Array) -> tuple[Array, Array, Array]:
    """Smallest and largest diagonal entry, and Gershgorin's bound of the norm."""
    inside = (jnp.arange(alpha.shape[0], dtype=jnp.int32) < steps)[:, None]
    before = jnp.concatenate([jnp.zeros_like(beta[:1]), beta[:-1]])
    radius = jnp.where(inside, jnp.abs(alpha) + before + beta, 0)
    smallest = jnp.min(jnp.where(inside, alpha, jnp.inf))
    largest = jnp.max(jnp.where(inside, alpha, -jnp.inf))
    return smallest, largest, jnp.max(radius)


def _last_true(predicate: Any, first: Array, last: Array) -> tuple[Array, Array]:
    """Where a predicate turns false on the way from `first` to `last`, both positive.

    Two rounds on geometric grids: the result is true and within a few percent of the turn.
    Returns whether the predicate is true at `first`, and the point.
    """
    fractions = jnp.arange(_SECTION + 1, dtype=first.dtype) / (_SECTION + 1)

    def narrow(first: Array, last: Array) -> tuple[Array, Array, Array]:
        points = first * (last / first) ** fractions
        edges = jnp.concatenate([points, last[None]])
        # The first false, not the number of trues: rounding may blur the turn.
        holds = jnp.cumprod(predicate(points).astype(jnp.int32), dtype=jnp.int32)
        count = jnp.maximum(jnp.sum(holds, dtype=jnp.int32), 1)
        return holds[0] == 1, edges[count - 1], edges[count]

    found, first, last = narrow(first, last)
    _, first, _ = narrow(first, last)
    return found, first


def _excluded(alpha: Array, beta: Array, steps: Array, points: Array, share: float) -> Array:
    """Whether no eigenvalue lies at or below each point, given the smallest share of the starts."""
    below, total = _polynomial_sums(alpha, beta, steps, points)
    return below & (jnp.mean(1 / total, axis=1) < share)


def _polynomial_sums(alpha: Array, beta: Array, steps: Array, points: Array) -> tuple[Array, Array]:
    """Whether all Ritz values exceed each point, `(n,)`, and `sum_j p_j(point)^2`, `(n, k)`."""
    shape = (points.shape[0], alpha.shape[1])
    ones = jnp.ones(shape, points.dtype)
    # Far below the overflow of float32, far above every threshold.
    ceiling = jnp.asarray(1e30, points.dtype)

    def extend(j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        pivot, below, square, total = carry
        before = jnp.where(j > 0, beta[jnp.maximum(j - 1, 0)], 0)
        pivot = alpha[j][None, :] - points[:, None] - (before**2)[None, :] / pivot
        below = below & (pivot > 0)
        pivot = jnp.where(pivot > 0, pivot, ones)
        # beta_j = 0: the space is invariant, and everything else is excluded.
        ends = (beta[j] == 0)[None, :]
        growth = pivot / jnp.where(beta[j] == 0, 1, beta[j])[None, :]
        square = jnp.where(ends, ceiling, square * jnp.minimum(growth, 1e4) ** 2)
        square = jnp.minimum(square, ceiling)
        return pivot, below, square, jnp.minimum(total + square, ceiling)

    carry = (ones, jnp.ones(shape, bool), ones, ones)
    _, below, _, total = jax.lax.fori_loop(0, steps, extend, carry)
    return jnp.all(below, axis=1), total
