"""Simulation-based calibration: over many problems, do beliefs err as much as they say?"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree
from scipy.special import ndtr
from scipy.stats import beta as beta_distribution
from tqdm import tqdm

from pnkrylov._arguments import check_reals
from pnkrylov.gaussian import GaussianBelief
from pnkrylov.krylov import Interruptible

Problem = tuple[GaussianBelief, PyTree]

# Simulated data sets of a calibrated belief; their spread is then known to sqrt(1/800) = 3.5 %.
_REPLICATES = 400


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How often central intervals of one nominal level held the truth.

    Attributes:
        level: nominal probability.
        observed: share that was covered; NaN if there was nothing to judge.
        lower, upper: 95 % binomial interval (Clopper and Pearson 1934) for the true coverage. The
            number of trials is the effective one: as many independent trials as would scatter
            like these dependent ones (Korn and Graubard 1998).
    """

    level: float
    observed: float
    lower: float
    upper: float


@dataclasses.dataclass(frozen=True)
class Uniformity:
    """Probability integral transforms `Phi(c.(x - mean) / sqrt(c.Sigma c))` and their judgement.

    Attributes:
        values: `(n,)`, the transforms; uniform on [0, 1] if the belief is calibrated.
        num_exact: functionals left out because belief and truth agree to rounding.
        coverage: one entry for each nominal level.
        distance: largest distance of the empirical distribution from the uniform one
            (Kolmogorov and Smirnov).
        distance_range: central 95 % of that distance over simulated calibrated beliefs.
        p_value: share of simulated calibrated beliefs with at least this distance.
    """

    values: Float[np.ndarray, " n"]
    num_exact: int
    coverage: tuple[Coverage, ...]
    distance: float
    distance_range: tuple[float, float]
    p_value: float

    def __str__(self) -> str:
        covered = ", ".join(
            f"{100 * each.level:g} %: {100 * each.observed:.1f} "
            f"[{100 * each.lower:.1f}, {100 * each.upper:.1f}]"
            for each in self.coverage
        )
        low, high = self.distance_range
        exact = f", {self.num_exact} exact" if self.num_exact else ""
        return (
            f"{len(self.values)} values{exact}; covered at {covered}; distance from uniform "
            f"{self.distance:.3f} (calibrated: {low:.3f} to {high:.3f}, p = {self.p_value:.3f})"
        )


@dataclasses.dataclass(frozen=True)
class CalibrationReport:
    """What `simulation_based_calibration` found; `print` it.

    Attributes:
        num_problems: problems that were judged.
        functionals: for random functionals, c from N(0, I).
        coordinates: for single entries of the answer.
    """

    num_problems: int
    functionals: Uniformity
    coordinates: Uniformity

    def __str__(self) -> str:
        return (
            f"Calibration over {self.num_problems} problems\n"
            f"  random functionals  {self.functionals}\n"
            f"  coordinates         {self.coordinates}"
        )


def simulation_based_calibration(
    problems: Iterable[Problem] | Callable[[PRNGKeyArray], Problem],
    *,
    key: PRNGKeyArray,
    num_problems: int | None = None,
    num_functionals: int = 20,
    num_coordinates: int = 20,
    levels: Sequence[float] = (0.5, 0.9, 0.95),
    progress: bool = False,
) -> CalibrationReport:
    """Judges beliefs by truths: intervals must cover as often as they say, at every level.

    Functionals of one problem share its error, so they are not independent. The sampling intervals
    allow for it: calibrated data are simulated from the beliefs' own joint covariances.

    Args:
        problems: pairs (belief, truth), the truth in the user's structure; or a function that
            makes one from a random key.
        key: random key, for the functionals and for `problems` if it is a function.
        num_problems: how many problems to make; needed for a function, at most that many of pairs.
        num_functionals: random functionals for each problem.
        num_coordinates: random entries for each problem (all of them if there are no more).
        levels: nominal probabilities of the intervals.
        progress: show a progress bar. Ctrl-C then reports on the problems so far.

    Returns:
        A `CalibrationReport`.

    Raises:
        ValueError: no problems, a belief is a batch, a truth has another structure, a size below 1
            or a level outside (0, 1).
        TypeError: `num_problems` is missing, or `problems` or `levels` is of another type.

    Source:
        METHOD.md section 5; the idea: Talts, Betancourt, Simpson, Vehtari and Gelman 2018.
    """
    _check_sizes(num_functionals=num_functionals, num_coordinates=num_coordinates)
    if not isinstance(levels, Sequence) or not levels:
        raise TypeError(f"levels={levels!r} must be a list or tuple of numbers between 0 and 1.")
    for level in levels:
        check_reals(levels=level)
        if not 0 < level < 1:
            raise ValueError(f"levels has {level}; each must lie strictly between 0 and 1.")
    problem_key, functional_key, simulation_key = jax.random.split(key, 3)
    pairs, total = _pairs(problems, num_problems, problem_key)
    groups: tuple[list[_Group], list[_Group]] = ([], [])
    with Interruptible() as interrupt:
        for index, pair in enumerate(
            tqdm(pairs, total=total, desc="Calibration", unit="problem", disable=not progress)
        ):
            belief, truth = _checked_pair(pair, index)
            error = flat_error(belief, truth)
            found = _standardise(
                belief,
                error,
                jax.random.fold_in(functional_key, index),
                num_functionals,
                min(num_coordinates, belief.structure.size),
            )
            for group, one in zip(groups, found, strict=True):
                group.append(_Group(*(np.asarray(part, np.float64) for part in one)))
            if interrupt.requested:
                break
    if not groups[0]:
        raise ValueError("problems is empty: there is nothing to judge.")
    seed = np.asarray(jax.random.key_data(simulation_key)).tolist()
    reports = [_judge(group, levels, np.random.default_rng(seed)) for group in groups]
    return CalibrationReport(len(groups[0]), *reports)


def _checked_pair(pair: Any, index: int) -> tuple[GaussianBelief, PyTree]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"problems: number {index} is no pair (belief, truth), but {pair!r}.")
    check_belief(pair[0], f"problems: the belief of number {index}")
    return pair[0], pair[1]


def check_belief(belief: Any, name: str = "belief") -> None:
    """Refuses what is no belief about one vector."""
    if not isinstance(belief, GaussianBelief):
        raise TypeError(
            f"{name} is of type {type(belief).__name__}: pass what pnkrylov.solve or "
            "pnkrylov.inverse returned."
        )


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} must be an int of at least 1.")


def _pairs(
    problems: Any, num_problems: int | None, key: PRNGKeyArray
) -> tuple[Iterator[Any], int | None]:
    if num_problems is not None:
        _check_sizes(num_problems=num_problems)
    if callable(problems):
        if num_problems is None:
            raise TypeError("num_problems is missing: a function can make any number of problems.")
        keys = jax.random.split(key, num_problems)
        return (problems(keys[index]) for index in range(num_problems)), num_problems
    if not isinstance(problems, Iterable):
        raise TypeError(
            f"problems is of type {type(problems).__name__}: pass pairs (belief, truth), or a "
            "function of a key that returns one."
        )
    total = len(problems) if isinstance(problems, Sized) else num_problems
    return itertools.islice(problems, num_problems), total


def flat_error(
    belief: GaussianBelief, truth: PyTree, name: str = "The truth"
) -> Float[Array, " d"]:
    """`x - mean`, flat, after checking that x has the belief's structure.

    Raises:
        TypeError, ValueError: it has not, or `belief` is a batch.
    """
    check_belief(belief)
    if belief.mean_flat.ndim != 1:
        raise ValueError(
            f"The belief is a batch of shape {list(belief.mean_flat.shape[:-1])}: pass its members "
            "one by one, jax.tree.map(lambda leaf: leaf[i], belief)."
        )
    belief.structure.check(truth, name, expected_by="its belief")
    return belief.structure.ravel(truth) - belief.mean_flat


@dataclasses.dataclass(frozen=True)
class _Group:
    """Standardised errors of one problem, whether they count, and their correlations."""

    errors: np.ndarray
    counts: np.ndarray
    correlations: np.ndarray


@eqx.filter_jit
def _standardise(
    belief: GaussianBelief,
    error: Float[Array, " d"],
    key: PRNGKeyArray,
    num_functionals: int,
    num_coordinates: int,
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    size, dtype = belief.structure.size, error.dtype
    normal_key, choice_key = jax.random.split(key)
    entries = jax.random.choice(choice_key, size, (num_coordinates,), replace=False)
    rows = jnp.concatenate(
        [
            jax.random.normal(normal_key, (num_functionals, size), dtype),
            jax.nn.one_hot(entries, size, dtype=dtype),
        ]
    )
    covariance = belief.covariance.push(rows)
    deviations = jnp.sqrt(jnp.diagonal(covariance))
    errors = jnp.matmul(rows, error, precision=jax.lax.Precision.HIGHEST)
    # Below the rounding of c.x neither the belief nor the truth can be held to anything.
    largest = jnp.linalg.norm(belief.mean_flat) + jnp.linalg.norm(error)
    rounding = jnp.finfo(dtype).eps * jnp.linalg.norm(rows, axis=1) * largest
    counts = (deviations > rounding) | (jnp.abs(errors) > 100 * rounding)
    scale = jnp.where(deviations > 0, deviations, jnp.finfo(dtype).tiny)
    correlations = covariance / scale[:, None] / scale[None, :]
    split = num_functionals
    return (
        (errors[:split] / scale[:split], counts[:split], correlations[:split, :split]),
        (errors[split:] / scale[split:], counts[split:], correlations[split:, split:]),
    )


def _judge(
    groups: Sequence[_Group], levels: Sequence[float], rng: np.random.Generator
) -> Uniformity:
    errors = np.stack([group.errors for group in groups])
    counts = np.stack([group.counts for group in groups]) > 0
    values = ndtr(errors[counts])
    simulated = _simulate(groups, counts, rng) if len(values) else np.empty((_REPLICATES, 0))
    coverage = tuple(_coverage(level, values, simulated) for level in levels)
    exact = int(counts.size - counts.sum())
    if not len(values):
        return Uniformity(values, exact, coverage, np.nan, (np.nan, np.nan), np.nan)
    distance = uniform_distance(values[None, :])[0]
    distances = uniform_distance(simulated)
    low, high = np.quantile(distances, [0.025, 0.975])
    # The data count as one more replicate, so that no p-value is zero.
    p_value = (1 + np.sum(distances >= distance)) / (1 + len(distances))
    return Uniformity(
        values, exact, coverage, float(distance), (float(low), float(high)), float(p_value)
    )


def _simulate(
    groups: Sequence[_Group], counts: Bool[np.ndarray, "K k"], rng: np.random.Generator
) -> Float[np.ndarray, "R n"]:
    """Transforms of calibrated beliefs with the same correlations, `_REPLICATES` data sets."""
    variances, axes = np.linalg.eigh(np.stack([group.correlations for group in groups]))
    factors = axes * np.sqrt(np.maximum(variances, 0))[:, None, :]
    shape = counts.shape
    data = np.empty((_REPLICATES, int(counts.sum())))
    for row in data:
        noise = np.matmul(factors, rng.standard_normal(shape)[:, :, None])[:, :, 0]
        row[:] = ndtr(noise[counts])
    return data


def uniform_distance(values: Float[np.ndarray, "R n"]) -> Float[np.ndarray, " R"]:
    """Kolmogorov-Smirnov distance of each row from the uniform distribution."""
    ordered, number = np.sort(values, axis=1), values.shape[1]
    above = np.arange(1, number + 1)[None, :] / number - ordered
    below = ordered - np.arange(number)[None, :] / number
    return np.maximum(above, below).max(axis=1)


def _coverage(level: float, values: np.ndarray, simulated: np.ndarray) -> Coverage:
    number = len(values)
    if not number:
        return Coverage(level, np.nan, 0.0, 1.0)
    observed = float(np.mean(np.abs(2 * values - 1) <= level))
    variance = np.var(np.mean(np.abs(2 * simulated - 1) <= level, axis=1))
    trials = min(number, level * (1 - level) / variance) if variance > 0 else number
    hits = observed * trials
    lower = beta_distribution.ppf(0.025, hits, trials - hits + 1) if observed > 0 else 0.0
    upper = beta_distribution.ppf(0.975, hits + 1, trials - hits) if observed < 1 else 1.0
    return Coverage(level, observed, float(lower), float(upper))
