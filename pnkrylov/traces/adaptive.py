"""P-SLQ with a budget: how it is split between the main run, probes and their depth.

One main run, then rounds of nested probes, each round orthogonal to what was resolved when it
started. A larger budget continues the run and adds a round; nothing is thrown away.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray
from tqdm import tqdm

from pnkrylov.krylov import Driver, KrylovBasis, continue_run, lanczos
from pnkrylov.operators import SPDOperator
from pnkrylov.traces.multilevel import (
    Convergence,
    gauss_at,
    multilevel_mean,
    probe_convergence,
    radau_node,
)
from pnkrylov.traces.probes import NestedProbes, ProbeKind
from pnkrylov.traces.quadrature import SpectralFunction, radau, ritz_range
from pnkrylov.traces.resolved import Tridiagonal, deflated_rows, resolved_trace, start_probe

# Of a budget far below d, half goes to the run; of one near d, nine tenths: what the probes then
# see is little. Measured flat around these shares on the four spectra of docs/trace.md.
_SMALL_SHARE, _EXTRA_SHARE = 0.5, 0.4
_FIRST_STEPS = 32
_PILOT = 8
# Deeper steps are worth it while the bias they remove exceeds this share of the standard error.
_BIAS_SHARE = 0.25
# The extrapolated tail overshoots while convergence still speeds up: measured, four fifths of it
# is nearest to the truth and 1.2 of it bounds it.
_TAIL_TAKEN, _TAIL_BOUND = 0.8, 1.2


@dataclasses.dataclass(frozen=True)
class Bracketed:
    """A value, the variance of its probes, and what exact quadrature could change it to."""

    value: float
    variance: float
    lower: float
    upper: float

    @property
    def mean_square_error(self) -> float:
        """Variance and the squared half-width of the bracket."""
        return self.variance + ((self.upper - self.lower) / 2) ** 2

    @classmethod
    def mixed(cls, parts: list["Bracketed"]) -> "Bracketed":
        """Independent estimates of one number, weighted by their mean square errors."""
        errors = np.array([part.mean_square_error for part in parts])
        best = errors.min()
        if not np.isfinite(best) or best == 0:
            return parts[int(np.argmin(errors))]
        weights = best / errors / np.sum(best / errors)
        used = [(w, part) for w, part in zip(weights, parts, strict=True) if w > 0]
        return cls(
            value=float(sum(w * part.value for w, part in used)),
            variance=float(sum(w**2 * part.variance for w, part in used)),
            lower=float(sum(w * part.lower for w, part in used)),
            upper=float(sum(w * part.upper for w, part in used)),
        )


class AdaptiveTrace:
    """A growing P-SLQ estimate of `tr f(A)`."""

    def __init__(
        self,
        operator: SPDOperator,
        f: SpectralFunction,
        key: PRNGKeyArray,
        *,
        probes: ProbeKind,
        lower_bound: float | None,
        driver: Driver,
        progress: bool,
    ):
        """Spends nothing yet."""
        self.num_matvecs = 0
        self._operator, self._f, self._key = operator, f, key
        self._kind: ProbeKind = probes
        self._lower_bound = lower_bound
        self._driver: Driver = driver
        self._progress = progress
        self._basis: KrylovBasis | None = None
        self._rounds: list[tuple[int, NestedProbes]] = []

    def spend(self, total: int) -> None:
        """Continues until `total` products are spent, or the trace is known exactly."""
        size = self._operator.size
        rows = 0 if self._basis is None else self._basis.num_rows
        available = total - self.num_matvecs
        if available >= size - rows:
            self._extend(size)  # d steps know every eigenvalue
        else:
            share = _SMALL_SHARE + _EXTRA_SHARE * (total / size) ** 2
            # An earlier round may have spent more on probes: the new one still gets its share.
            most = available - max(available // 4, 1) if rows else available - 1
            self._extend(max(min(int(share * total), rows + most), rows, 2))
        run = self._tridiagonal()
        level = run.level()
        left = total - self.num_matvecs
        if level == size or left < 1:
            return
        assert self._basis is not None
        projected, deflated = deflated_rows(self._basis, level)
        probes = NestedProbes(
            self._operator,
            deflated,
            None if self._f.kind == "general" else projected,
            kind=self._kind,
        )
        self._key, pilot_key, key = jax.random.split(self._key, 3)
        with tqdm(total=left, desc="Probes", unit="product", disable=not self._progress) as bar:
            counts, spreads = _pilot(self._f, probes, pilot_key, left, bar)
            left -= probes.num_matvecs
            _fill(self._f, probes, key, left, counts, spreads, run.largest_after(level), bar)
        self.num_matvecs += probes.num_matvecs
        self._rounds.append((level, probes))

    def estimate(self) -> Bracketed:
        """The estimate so far."""
        run = self._tridiagonal()
        f, size = self._f, self._operator.size
        if run.size == size:
            return _exact(resolved_trace(f, run, size), self._operator.dtype, size)
        parts = [self._round_estimate(run, level, probes) for level, probes in self._rounds]
        start = start_probe(f, run, size)
        own = _bracketed(f, start.value, start.value, start.convergence, size, start.variance, None)
        if not parts:
            return own
        result = Bracketed.mixed(parts)
        # The run's own start counts where it is worth a tenth; below, its error bar is too rough.
        if result.mean_square_error > 0.1 * own.mean_square_error:
            result = Bracketed.mixed([result, own])
        return result

    def exact_at(self) -> int:
        """A number of products that is enough to know the trace exactly."""
        rows = 0 if self._basis is None else self._basis.num_rows
        return self.num_matvecs + self._operator.size - rows

    def is_exact(self) -> bool:
        """Whether more products would change nothing."""
        return self._basis is not None and self._tridiagonal().size == self._operator.size

    def proved(self) -> bool:
        """Whether both ends of the bracket are bounds."""
        return self.is_exact() or (self._lower_bound is not None and self._f.gauss_side != 0)

    def smallest(self) -> float:
        """The smallest Ritz value of the main run and of the probes' runs."""
        run = self._tridiagonal()
        smallest = ritz_range(run.alpha[None, :], run.beta[None, :])[0]
        for _, probes in self._rounds:
            depth = int(probes.depths.max())
            alpha, beta = probes.tridiagonals(probes.reached(depth), depth)
            smallest = min(smallest, ritz_range(alpha, beta)[0])
        return smallest

    def _round_estimate(self, run: Tridiagonal, level: int, probes: NestedProbes) -> Bracketed:
        largest = run.largest_after(level)
        mean = multilevel_mean(self._f, probes, largest, lower_bound=self._lower_bound)
        base, dimension = resolved_trace(self._f, run, level), probes.dimension
        opposite = None if mean.opposite is None else base + dimension * mean.opposite
        return _bracketed(
            self._f,
            base + dimension * mean.value,
            base + dimension * mean.gauss,
            mean.convergence,
            dimension,
            dimension**2 * mean.variance,
            opposite,
        )

    def _extend(self, rows: int) -> None:
        """Continues the main run to `rows` steps, or to its breakdown."""
        if self._basis is None:
            self._key, key = jax.random.split(self._key)
            start = jax.random.normal(key, (self._operator.size,), self._operator.dtype)
            # A short first part, so that an early breakdown does not cost the whole run.
            self._basis = lanczos(
                self._operator,
                self._operator.unravel(start),
                min(rows, _FIRST_STEPS),
                driver=self._driver,
                progress=self._progress,
            )
            self.num_matvecs += self._basis.num_rows
        more = rows - self._basis.num_rows
        if more > 0 and bool(self._basis.residual_norm() > 0):
            self._basis = continue_run(
                self._basis, self._operator, more, driver=self._driver, progress=self._progress
            )
            self.num_matvecs += more

    def _tridiagonal(self) -> Tridiagonal:
        assert self._basis is not None
        return Tridiagonal.of(self._basis)


def _exact(value: float, dtype: np.dtype, size: int) -> Bracketed:
    """Nothing is left but rounding, which adds up like a random walk at best, linearly at worst."""
    rounding = size * float(jnp.finfo(dtype).eps) * abs(value)
    return Bracketed(value, 0.0, value - rounding, value + rounding)


def _bracketed(
    f: SpectralFunction,
    value: float,
    gauss: float,
    convergence: Convergence,
    dimension: int,
    variance: float,
    opposite: float | None,
) -> Bracketed:
    """Corrects a value by the extrapolated tail and says what exact quadrature could give."""
    missing = gauss + dimension * convergence.change - value
    if f.gauss_side and missing * f.gauss_side < 0:
        missing = 0.0
    corrected = value + _TAIL_TAKEN * missing if np.isfinite(missing) else value
    if not f.gauss_side:
        width = _TAIL_BOUND * dimension * abs(convergence.bound)
        return Bracketed(corrected, variance, corrected - width, corrected + width)
    if opposite is None:
        opposite = value + _TAIL_BOUND * missing
        at_most = gauss + dimension * convergence.bound
        opposite = max(opposite, at_most) if f.gauss_side > 0 else min(opposite, at_most)
    lower, upper = min(gauss, opposite), max(gauss, opposite)
    return Bracketed(float(np.clip(corrected, lower, upper)), variance, lower, upper)


def _pilot(
    f: SpectralFunction, probes: NestedProbes, key: PRNGKeyArray, budget: int, bar: tqdm
) -> tuple[list[int], list[float]]:
    """A few probes, deeper and deeper, fewer and fewer, until bias is below the noise to come.

    Returns:
        How many probes took each step, and the standard deviation of what that step added.
    """
    count = first = min(max(budget // _PILOT, 1), _PILOT, probes.dimension)
    probes.add(key, first)
    counts: list[int] = []
    spreads: list[float] = []
    forms = [(np.arange(first), np.zeros(first))]
    while (count := min(count, budget - probes.num_matvecs)) >= 1:
        probes.advance(count)
        bar.update(count)
        counts.append(count)
        depth = len(counts)
        forms.append(gauss_at(f, probes, depth))
        added = forms[-1][1] - forms[-2][1][: len(forms[-1][1])]
        last = spreads[-1] if spreads else 0.0
        spreads.append(float(np.std(added, ddof=1)) if count > 1 else last)
        if depth < 3:
            continue
        limit = probe_convergence(f, probes, depth)
        if abs(limit.change) <= _BIAS_SHARE * _error_to_come(spreads, budget, probes):
            break
        count = _fewer(first, count, spreads, limit, budget, probes, depth)
    return counts, spreads


def _error_to_come(spreads: list[float], budget: int, probes: NestedProbes) -> float:
    """Standard error of the mean after the best use of `budget`, by the pilot's spreads."""
    total = sum(spreads)
    if total == 0:
        return 0.0
    reached = min(budget * spreads[0] / total, probes.dimension)
    unseen = max(1 - reached / probes.dimension, 0.01) if probes.kind == "sphere" else 1.0
    return total / np.sqrt(budget) * np.sqrt(unseen)


def _fewer(
    first: int,
    count: int,
    spreads: list[float],
    limit: Convergence,
    budget: int,
    probes: NestedProbes,
    depth: int,
) -> int:
    """How many pilot probes go one step deeper: what the noise there asks for and time allows."""
    width = max(depth // 4, 1)
    left = budget - probes.num_matvecs
    goal = _BIAS_SHARE * _error_to_come(spreads, budget, probes)
    affordable = 1
    if np.isfinite(limit.change) and goal > 0:
        steps = width * np.log(abs(limit.change) / goal) / -np.log(limit.ratio)
        affordable = max(int(left / max(steps, 1.0)), 1)
    noisy = int(np.ceil(1.5 * first * spreads[-1] / spreads[0])) if spreads[0] else 1
    return max(min(count, max(noisy, 2), affordable), 1)


def _fill(
    f: SpectralFunction,
    probes: NestedProbes,
    key: PRNGKeyArray,
    left: int,
    counts: list[int],
    spreads: list[float],
    largest: float,
    bar: tqdm,
) -> None:
    """Spends what the pilot left on new probes, most of them shallow.

    The variance of a telescoping mean is least where every level has probes in proportion to the
    spread of what it adds (each level costs one product per probe).
    """
    if left < 1:
        return
    spreads = _final_spreads(f, probes, counts, spreads, largest)
    wanted = _allocate(np.array(counts), np.array(spreads), left, probes.dimension)
    deeper: list[int] = []
    for level in range(1, len(counts)):
        more = _rounded(int(wanted[level]) - counts[level])
        deeper.append(min(more, deeper[-1]) if deeper else more)
    room = probes.dimension - probes.num_probes if probes.kind == "sphere" else left
    shallow = min(_rounded(left - sum(deeper)), room)
    if shallow == 0:
        return
    probes.add(key, shallow)
    for count in [shallow, *deeper]:
        count = min(count, shallow)
        if count == 0:
            break
        probes.advance(count)
        bar.update(count)


def _final_spreads(
    f: SpectralFunction,
    probes: NestedProbes,
    counts: list[int],
    spreads: list[float],
    largest: float,
) -> list[float]:
    """The pilot's spreads for the rule that the mean uses: Radau where it applies."""
    if not f.gauss_side:
        return spreads
    node = radau_node(f, probes, largest)
    if node is None:
        return spreads
    result, before = [], np.zeros(probes.num_probes)
    for depth, count in enumerate(counts, start=1):
        forms = radau(f, *probes.tridiagonals(np.arange(count), depth), node)
        forms = forms * probes.weights[:count]
        added = forms - before[:count]
        before = forms
        result.append(float(np.std(added, ddof=1)) if count > 1 else result[-1] if result else 0.0)
    return result


def _allocate(counts: np.ndarray, spreads: np.ndarray, left: int, dimension: int) -> np.ndarray:
    """Probes per level, nested, at least `counts`, in proportion to `spreads`, for the budget."""
    shape = np.maximum.accumulate(spreads[::-1])[::-1]
    if shape[0] <= 0:
        return counts
    shape = shape / shape[0]

    def wanted(scale):
        return np.minimum(np.maximum(counts, np.floor(scale * shape)), dimension).astype(int)

    low, high = 0.0, float(left + counts.sum())
    for _ in range(60):
        middle = (low + high) / 2
        if wanted(middle).sum() <= left + counts.sum():
            low = middle
        else:
            high = middle
    return wanted(low)


def _rounded(count: int) -> int:
    """Down to few distinct block sizes: every size is compiled once."""
    if count <= 8:
        return max(int(count), 0)
    unit = 2 if count <= 32 else 4 if count <= 64 else 8
    return int(count) // unit * unit
