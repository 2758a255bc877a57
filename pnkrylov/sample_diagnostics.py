"""Were these samples drawn from the Gaussian they claim? Answers that need no covariance.

If x ~ N(mean, A^-1) in d dimensions, the squared Mahalanobis distance (x - mean)^T A (x - mean) is
chi-squared with d degrees of freedom. It needs one product with A per sample and nothing else.

That alone is not enough. A Lanczos-FA sample `||b|| Q T^{-1/2} e_1` has the squared distance
`||b||^2` after *any* number of steps, exactly, because `Q^T A Q = T`: the distances of wholly
unconverged samples are perfectly chi-squared. What is wrong then is their direction. So the check
also looks at the angles between samples, `cos^2 = (x^T A y)^2 / (x^T A x) (y^T A y)`, whose mean is
1/d if and only if the whitened samples have no preferred direction. It needs no further product.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._arguments import check_fractions, check_positive_counts, check_reals
from pnkrylov.ciq.drivers import Options
from pnkrylov.ciq.results import raise_unless_successful
from pnkrylov.ciq.square_root import square_root_rows
from pnkrylov.operators import as_operator

Verdict = Literal["agrees", "differs", "undecided"]

# All pairs among this many samples are compared.
_PAIRED = 2000


@dataclasses.dataclass(frozen=True)
class SampleCheck:
    """Squared Mahalanobis distances of n samples against chi-squared with d degrees of freedom.

    A p-value answers whether there are enough samples to see a difference, and with enough samples
    there always are. So the answer is an effect size with its interval: `statistic`, the largest
    distance between the two distribution functions, and `variance_ratio`, the mean distance
    divided by d (1 when the variances are right on average).

    Attributes:
        distances: `(n,)`, the squared Mahalanobis distances, ascending.
        dimension: d.
        statistic: The Kolmogorov-Smirnov distance between the samples and chi-squared.
        interval: Contains, with probability `level` or more, the Kolmogorov-Smirnov distance
            between the *distribution* behind the samples and chi-squared (Dvoretzky, Kiefer and
            Wolfowitz, with the constant of Massart 1990: no assumption, no asymptotics).
        p_value: Of the usual test; small for n large enough unless the samples are perfect.
        variance_ratio: Mean distance divided by d.
        variance_interval: Its normal interval of probability `level`.
        isotropy: d times the mean squared cosine between samples; NaN when only distances are
            known. Its excess over 1 is the squared coefficient of variation of the whitened
            variances over the directions: 1 when every direction has its share.
        isotropy_interval: Its normal interval of probability `level`.
        level: Probability of the intervals.
    """

    distances: np.ndarray
    dimension: int
    statistic: float
    interval: tuple[float, float]
    p_value: float
    variance_ratio: float
    variance_interval: tuple[float, float]
    isotropy: float
    isotropy_interval: tuple[float, float]
    level: float

    def verdict(self, tolerance: float = 0.05) -> Verdict:
        """Whether the distributions agree up to an error that does not matter.

        Args:
            tolerance: Largest Kolmogorov-Smirnov distance, and largest excess of the isotropy,
                that do not matter. A wrong variance by the factor `1 + s` in all directions is a
                distance of about `0.28 s sqrt(d)`; by `1 + s` or `1 - s`, an excess of `s^2`.

        Returns:
            `"agrees"` if both intervals end below the tolerance, `"differs"` if one begins above,
            else `"undecided"`: draw more samples (`samples_needed`).
        """
        low, high = self.interval
        iso_low, iso_high = self.isotropy_interval
        if low > tolerance or iso_low - 1 > tolerance:
            return "differs"
        # Unknown isotropy (NaN) is not held against the distances.
        return "agrees" if high <= tolerance and not iso_high - 1 > tolerance else "undecided"

    def samples_needed(self, tolerance: float = 0.05) -> int:
        """Number of samples with which perfect ones are expected to be told `"agrees"`."""
        # The statistic of perfect samples is below 0.87 / sqrt(n) on average, the radius is known.
        root = (0.87 + math.sqrt(math.log(2 / (1 - self.level)) / 2)) / tolerance
        return math.ceil(root**2)

    def histogram(self, bins: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Histogram of the distances and what chi-squared expects.

        Returns:
            `(edges, density, expected)` of shapes `(bins + 1,)`, `(bins,)`, `(bins,)`; both are
            densities averaged over the bins.
        """
        density, edges = np.histogram(self.distances, bins=bins, density=True)
        cdf = scipy.stats.chi2.cdf(edges, self.dimension)
        inside = max(np.mean(np.isfinite(self.distances)), 1e-300)
        return edges, density * inside, np.diff(cdf) / np.diff(edges)

    def quantiles(self) -> tuple[np.ndarray, np.ndarray]:
        """`(expected, observed)` quantiles, both `(n,)`, for a quantile-quantile plot."""
        count = len(self.distances)
        levels = (np.arange(count) + 0.5) / count
        return scipy.stats.chi2.ppf(levels, self.dimension), self.distances

    def __str__(self) -> str:
        low, high = self.interval
        ratio_low, ratio_high = self.variance_interval
        return (
            f"{len(self.distances)} samples in {self.dimension} dimensions: {self.verdict()}\n"
            f"  distance to chi2  {self.statistic:.4f}, true one in [{low:.4f}, {high:.4f}] "
            f"({100 * self.level:g} %)\n"
            f"  variance ratio    {self.variance_ratio:.4f} in [{ratio_low:.4f}, {ratio_high:.4f}]"
            f"\n  isotropy          {self.isotropy:.4f} in "
            f"[{self.isotropy_interval[0]:.4f}, {self.isotropy_interval[1]:.4f}]"
            f"\n  p-value           {self.p_value:.3g}"
        )


def mahalanobis(
    A: Any,
    samples: PyTree,
    mean: PyTree = None,
    *,
    role: str = "precision",
    key: PRNGKeyArray | None = None,
    rtol: float = 1e-4,
) -> Float[Array, " n"]:
    """Squared Mahalanobis distances of samples from their mean.

    Args:
        A: The precision (or covariance) matrix: anything that `as_operator` takes.
        samples: The user's structure with a leading axis of n on every leaf.
        mean: The mean, structured like one sample; zero when None.
        role: Whether A is the precision or the covariance. The distance in terms of a covariance
            is `||A^{-1/2} (x - mean)||^2`, by `inv_sqrt_matvec`.
        key: Random key for the spectral bounds; needed for a covariance.
        rtol: Tolerance of that product.

    Returns:
        Distances `(n,)`.

    Raises:
        TypeError, ValueError: Shapes or dtypes do not agree, `role` is unknown, or `rtol` is not
            between 0 and 1; and as `as_operator`.
    """
    left, right = _dual_rows(A, samples, mean, role, key, rtol)
    return jnp.sum(left * right, axis=1)


def _dual_rows(
    A: Any, samples: PyTree, mean: PyTree, role: str, key: PRNGKeyArray | None, rtol: float
) -> tuple[Array, Array]:
    """Rows whose inner products are those of the whitened samples."""
    if role not in ("precision", "covariance"):
        raise ValueError(f"role must be 'precision' or 'covariance', got {role!r}.")
    check_fractions(rtol=rtol)
    leaves = jax.tree.leaves(samples)
    if not leaves or any(jnp.ndim(leaf) == 0 or len(leaf) == 0 for leaf in leaves):
        raise ValueError("samples is empty: every leaf needs a leading axis of samples.")
    first = jax.tree.map(lambda leaf: leaf[0], samples)
    operator = as_operator(A, like=first)
    rows = jax.vmap(operator.ravel)(samples)
    if mean is not None:
        rows = rows - operator.ravel(mean)[None, :]
    if role == "precision":
        return rows, operator.block_mv(rows)
    solution = square_root_rows(operator, rows, key, Options(forward=False, rtol=rtol))
    white = raise_unless_successful(solution, rtol).value
    return white, white


def _isotropy(left: Array, right: Array, level: float) -> tuple[float, tuple[float, float]]:
    """d times the mean squared cosine over all pairs, and its interval."""
    first, second = np.asarray(left[:_PAIRED], np.float64), np.asarray(right[:_PAIRED], np.float64)
    count, dimension = first.shape
    inner = first @ second.T
    lengths = np.diagonal(inner)
    squares = dimension * inner**2 / np.outer(lengths, lengths)
    np.fill_diagonal(squares, 0)
    per_sample = squares.sum(axis=1) / (count - 1)
    # A U-statistic of order two: its variance is four times that of the projections, over n. They
    # are estimated with noise, which only widens the interval.
    half = 2 * float(np.std(per_sample, ddof=1)) / math.sqrt(count)
    half *= float(scipy.stats.norm.ppf((1 + level) / 2))
    value = float(per_sample.mean())
    return value, (value - half, value + half)


def check_distances(
    distances: Float[Array, " n"] | np.ndarray, dimension: int, *, level: float = 0.95
) -> SampleCheck:
    """Compares squared Mahalanobis distances with chi-squared.

    Args:
        distances: Squared distances `(n,)`, at least two; those that are not finite count as
            infinitely far.
        dimension: Degrees of freedom d.
        level: Probability of the intervals.

    Returns:
        A `SampleCheck`.

    Raises:
        TypeError: An argument is of another type.
        ValueError: Fewer than two distances, a negative one, `dimension < 1`, or `level` not in
            (0, 1).

    Source:
        papers/thesis_sampling_ciq.tex, section "Sampling Evaluation"; Massart (1990), Annals of
        Probability 18. Beyond the thesis: intervals instead of a bare p-value.
    """
    check_reals(distances=distances)
    check_positive_counts(dimension=dimension)
    check_fractions(level=level)
    values = np.asarray(distances, np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"distances must be a vector of two or more, got shape {values.shape}.")
    values = np.sort(values)
    # Rounding may push the distance of a sample that is its mean below zero.
    if values[0] < -1e-6 * np.abs(values).max():
        raise ValueError(
            f"distances has {values[0]:.6g}: squared distances are not negative. Check that A is "
            "positive definite."
        )
    count = len(values)
    # Distances that are not finite count as infinitely far: they sort last.
    comparable = np.where(np.isfinite(values), values, np.inf)
    test = scipy.stats.kstest(comparable, scipy.stats.chi2(dimension).cdf)
    statistic = float(test.statistic)
    radius = math.sqrt(math.log(2 / (1 - level)) / (2 * count))
    ratio = float(np.mean(values)) / dimension
    spread = float(np.std(values, ddof=1)) if np.all(np.isfinite(values)) else math.inf
    half = float(scipy.stats.norm.ppf((1 + level) / 2)) * spread / dimension / math.sqrt(count)
    return SampleCheck(
        distances=values,
        dimension=dimension,
        statistic=statistic,
        interval=(max(0.0, statistic - radius), min(1.0, statistic + radius)),
        p_value=float(test.pvalue),
        variance_ratio=ratio,
        variance_interval=(ratio - half, ratio + half),
        isotropy=math.nan,
        isotropy_interval=(math.nan, math.nan),
        level=level,
    )


def check_samples(
    A: Any,
    samples: PyTree,
    mean: PyTree = None,
    *,
    role: str = "precision",
    key: PRNGKeyArray | None = None,
    level: float = 0.95,
) -> SampleCheck:
    """Checks samples of N(mean, A^-1) (or N(mean, A)): their distances and their angles.

    Args:
        A: As in `mahalanobis`.
        samples: As in `mahalanobis`.
        mean: As in `mahalanobis`.
        role: As in `mahalanobis`.
        key: As in `mahalanobis`.
        level: Probability of the intervals.

    Returns:
        A `SampleCheck`; print it.

    Raises:
        TypeError, ValueError: As the two functions.
    """
    left, right = _dual_rows(A, samples, mean, role, key, 1e-4)
    check = check_distances(jnp.sum(left * right, axis=1), left.shape[1], level=level)
    isotropy, interval = _isotropy(left, right, level)
    return dataclasses.replace(check, isotropy=isotropy, isotropy_interval=interval)


__all__ = [
    "SampleCheck",
    "check_distances",
    "check_samples",
    "mahalanobis",
]
