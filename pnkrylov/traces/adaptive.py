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
from pnkrylov.preconditioners import Preconditioner, precondition
from pnkrylov.traces.allocation import spend_on
from pnkrylov.traces.multilevel import Convergence, multilevel_mean
from pnkrylov.traces.original import centred, exact_part, less
from pnkrylov.traces.probes import Boundary, NestedProbes, ProbeKind
from pnkrylov.traces.quadrature import (
    SpectralFunction,
    first_entry_moments,
    ritz_range,
)
from pnkrylov.traces.resolved import Tridiagonal, deflated_rows, resolved_trace, start_probe

# Of a budget far below d, half goes to the run; of one near d, nine tenths: what the probes then
# see is little. Measured flat around these shares on the four spectra of docs/trace.md.
_SMALL_SHARE, _EXTRA_SHARE = 0.5, 0.4
_FIRST_STEPS = 32
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
        preconditioner: Preconditioner | None = None,
    ):
        """Spends nothing yet; a preconditioner has been paid for.

        With one, f must be 1/x or the logarithm, and the trace is that of the original operator.
        """
        self.num_matvecs = 0
        self._offset = 0.0
        self._weighting = preconditioner if f.kind == "inverse" else None
        if preconditioner is not None:
            self.num_matvecs = preconditioner.num_products
            operator = precondition(operator, preconditioner)
            if f.kind == "log":
                self._offset = float(preconditioner.logdet())
            probes = "shaped" if f.kind == "inverse" else probes
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
        f = self._f
        if self._weighting is not None:
            # Starts keep their share of q_{m+1}: weighted, it does not decouple from the rest.
            deflated = projected
            f = less(first_entry_moments(f, *run.part(level, run.size))[0])
        probes = NestedProbes(
            self._operator,
            deflated,
            None if f.kind == "general" else projected,
            kind=self._kind,
            preconditioner=self._weighting,
            boundary=None if f.kind == "general" else Boundary.of(self._basis, level),
        )
        self._key, key = jax.random.split(self._key)
        with tqdm(total=left, desc="Probes", unit="product", disable=not self._progress) as bar:
            spend_on(f, probes, key, left, run.largest_after(level), bar)
        self.num_matvecs += probes.num_matvecs
        self._rounds.append((level, probes))

    def estimate(self) -> Bracketed:
        """The estimate so far."""
        inside = self._estimate()
        return dataclasses.replace(
            inside,
            value=inside.value + self._offset,
            lower=inside.lower + self._offset,
            upper=inside.upper + self._offset,
        )

    def _estimate(self) -> Bracketed:
        run = self._tridiagonal()
        f, size = self._f, self._operator.size
        if run.size == size:
            return _exact(self._resolved(run, size)[0], self._operator.dtype, size)
        parts = [self._round_estimate(run, level, probes) for level, probes in self._rounds]
        if self._weighting is not None and parts:
            return Bracketed.mixed(parts)
        start = start_probe(f, run, size)
        own = _bracketed(f, start.value, start.value, start.convergence, size, start.variance, None)
        if self._weighting is not None:
            # An exhausted run whose start was not weighted knows the inside only.
            return Bracketed(own.value, np.inf, -np.inf, np.inf)
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
        # Products are right to a few eps ||A||: a probe that got no further than that is over.
        rounding = 10 * float(jnp.finfo(self._operator.dtype).eps) * np.max(np.abs(run.alpha))
        for _, probes in self._rounds:
            depth = int(probes.depths.max())
            alpha, beta = probes.tridiagonals(probes.reached(depth), depth)
            smallest = min(smallest, ritz_range(alpha, np.where(beta > rounding, beta, 0.0))[0])
        return smallest

    def _round_estimate(self, run: Tridiagonal, level: int, probes: NestedProbes) -> Bracketed:
        largest, f = run.largest_after(level), self._f
        base, known = self._resolved(run, level)
        if self._weighting is not None:
            f, centre = centred(probes)
            base += centre * known
        mean = multilevel_mean(f, probes, largest, lower_bound=self._lower_bound)
        dimension = probes.dimension
        opposite = None if mean.opposite is None else base + dimension * mean.opposite
        return _bracketed(
            f,
            base + dimension * mean.value,
            base + dimension * mean.gauss,
            mean.convergence,
            dimension,
            dimension**2 * mean.variance,
            opposite,
        )

    def _resolved(self, run: Tridiagonal, level: int) -> tuple[float, float]:
        """What the run knows, and with weights the trace of the covariance of the starts."""
        if self._weighting is None:
            return resolved_trace(self._f, run, level), 0.0
        assert self._basis is not None
        return exact_part(self._weighting, self._basis, level)

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
