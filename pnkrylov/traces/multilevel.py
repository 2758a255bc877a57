"""The mean of `e_1^T f(Theta) e_1` over random probes, from many shallow and few deep ones.

`E[Y_L] = E[Y_1] + E[Y_2 - Y_1] + ..`: shallow forms carry most of the variance and cost one
product each; the corrections vary little, so few deep probes suffice for them.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from pnkrylov.traces.probes import NestedProbes
from pnkrylov.traces.quadrature import (
    INVERSE,
    SpectralFunction,
    gauss,
    largest_estimate,
    radau,
    ritz_range,
    smallest_radau_node,
)

# Below this many probes a sample variance says too little: the spectral measure stands in.
_FEW = 5
# The Radau node must lie outside the Ritz values.
_MARGIN = 1.02
# Changes over a quarter of the steps that shrink less than this are not called converging.
_CONVERGING = 0.9
# Relative changes below this are rounding.
_ROUNDING = 1e-14


@dataclasses.dataclass(frozen=True)
class Convergence:
    """How far Gauss forms still are from their limit, by how fast they approach it.

    Attributes:
        change: the geometric tail of the changes over the last two quarters of the steps; with
            sign, infinite where they do not shrink, or before the third step.
        bound: a larger one, which also looks back over both halves: single probes converge in
            jumps, and a pause is not yet an end.
        ratio: of the last two changes.
    """

    change: float
    bound: float
    ratio: float


@dataclasses.dataclass(frozen=True)
class ProbeMean:
    """Mean of the forms over the unit sphere of the space the probes were drawn from.

    Attributes:
        value: the mean, at the deepest level; quadrature bias is left in it.
        variance: of `value`, over the probes.
        convergence: of the Gauss forms: the estimated bias of the deepest rule.
        gauss: mean over the deepest probes of what Gauss quadrature falls short of `value`'s rule.
        opposite: the same mean with a Radau node at a given bound of the spectrum, or None.
    """

    value: float
    variance: float
    convergence: Convergence
    gauss: float
    opposite: float | None


def multilevel_mean(
    f: SpectralFunction,
    probes: NestedProbes,
    largest: float,
    *,
    lower_bound: float | None,
) -> ProbeMean:
    """The telescoping mean, its variance, and how far quadrature may still be off.

    Args:
        f: the function.
        probes: nested probes, each with at least one step.
        largest: largest Ritz value known of the space.
        lower_bound: below the spectrum, or None.

    Source:
        Multilevel Monte Carlo, Giles 2008, with depth for level [beyond the paper].
    """
    # Probes are deepest first within a block, but blocks follow each other.
    levels = sorted(set(probes.depths.tolist()))
    node = radau_node(f, probes, largest)

    def forms(which, depth):
        alpha, beta = probes.tridiagonals(which, depth)
        if node is None:
            return probes.weights[which] * gauss(f, alpha, beta)
        return probes.weights[which] * radau(f, alpha, beta, node)

    increments, members = [], []
    for position, depth in enumerate(levels):
        which = probes.reached(depth)
        change = forms(which, depth)
        if position:
            change = change - forms(which, levels[position - 1])
        column = np.full(probes.num_probes, np.nan)
        column[which] = change
        increments.append(column)
        members.append(which)

    value = float(sum(np.nanmean(column) for column in increments))
    deepest = np.flatnonzero(probes.reached(levels[-1]))
    alpha, beta = probes.tridiagonals(deepest, levels[-1])
    weights = probes.weights[deepest]
    short = float(np.mean(weights * gauss(f, alpha, beta) - forms(deepest, levels[-1])))
    opposite = None
    if lower_bound is not None and f.gauss_side:
        at_bound = radau(f, alpha, beta, lower_bound)
        opposite = value + float(np.mean(weights * at_bound - forms(deepest, levels[-1])))
    return ProbeMean(
        value=value,
        variance=_variance(f, probes, increments, members, value),
        convergence=GaussForms(f, probes).convergence(levels[-1]),
        gauss=value + short,
        opposite=opposite,
    )


class GaussForms:
    """Weighted Gauss forms of f at every depth, each computed once.

    Valid while the probes only go deeper: a new block of probes needs a new object.
    """

    def __init__(self, f: SpectralFunction, probes: NestedProbes):
        self.f, self._probes = f, probes
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # Gauss quadrature of log x converges at the rate of 1/x in the end, since both are singular
        # at 0, but starts faster: the changes of 1/x tell when that end is reached.
        self._inverse = GaussForms(INVERSE, probes) if f.kind == "log" else None

    def at(self, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the probes that reached `depth`, and their forms there."""
        if depth not in self._known:
            which = np.flatnonzero(self._probes.reached(depth))
            values = gauss(self.f, *self._probes.tridiagonals(which, depth))
            self._known[depth] = which, self._probes.weights[which] * values
        return self._known[depth]

    def convergence(self, depth: int) -> Convergence:
        """How far the forms at `depth` are from their limit."""
        least = 0.0 if self._inverse is None else self._inverse.convergence(depth).ratio
        return convergence(depth, self.at, least)


def convergence(
    depth: int,
    forms_at: Callable[[int], tuple[np.ndarray, np.ndarray]],
    least_ratio: float = 0.0,
) -> Convergence:
    """Extrapolates from Gauss forms at a few depths up to `depth`.

    Args:
        depth: the deepest level.
        forms_at: depth to the indices of the probes that reached it and their forms there.
        least_ratio: of the last two changes, known from elsewhere.
    """
    width = max(depth // 4, 1)
    late = forms_at(depth)
    later = _mean_change(forms_at(max(depth - width, 1)), late) if depth > 1 else np.inf
    if abs(later) <= _ROUNDING * abs(float(np.mean(late[1]))):
        return Convergence(0.0, 0.0, 0.0)
    if depth < 3:
        return Convergence(np.inf, np.inf, np.inf)
    earlier = _mean_change(forms_at(depth - 2 * width), forms_at(depth - width))
    ratio = max(abs(later / earlier) if earlier else np.inf, least_ratio)
    change = bound = _geometric_tail(later, ratio, _CONVERGING)
    if depth > 3:
        half = forms_at(depth // 2)
        first, second = _mean_change(forms_at(1), half), _mean_change(half, late)
        over_halves = _geometric_tail(second, abs(second / first) if first else np.inf, 1.0)
        bound = change if abs(change) > abs(over_halves) else over_halves
    return Convergence(change, bound, ratio)


def _mean_change(
    before: tuple[np.ndarray, np.ndarray], after: tuple[np.ndarray, np.ndarray]
) -> float:
    return float(np.mean(after[1] - before[1][np.isin(before[0], after[0])]))


def _geometric_tail(change: float, ratio: float, limit: float) -> float:
    if change == 0:
        return 0.0
    if not ratio < limit:
        return float(np.copysign(np.inf, change))
    return change * ratio / (1 - ratio)


def plug_in_variance(mean: float, mean_square: float, dimension: int) -> float:
    """Variance of `v^T f v` for v uniform on the sphere, from the spectral moments of f.

    Source:
        Moments of a quadratic form on the sphere: `2 (mean f^2 - (mean f)^2) / (D + 2)`.
    """
    return 2 * max(mean_square - mean**2, 0.0) / (dimension + 2)


def radau_node(f: SpectralFunction, probes: NestedProbes, largest: float) -> float | None:
    """A node above the spectrum, as far as it is known; None where f may not be defined there.

    Too large a node only brings Radau closer to Gauss; one inside the spectrum may push another
    node below it, so the node moves out until no rule has one at or below zero.
    """
    if not f.gauss_side or not (np.isfinite(probes.alpha).all() and np.isfinite(probes.beta).all()):
        return None
    groups = [
        probes.tridiagonals(probes.depths == depth, depth)
        for depth in sorted(set(probes.depths.tolist()) - {0})
    ]
    largest = max([largest, largest_estimate(*groups[-1])] + [ritz_range(*g)[1] for g in groups])
    node = _MARGIN * largest
    cuts = [
        (alpha[:, :depth], beta[:, :depth])
        for alpha, beta in groups
        for depth in (1, 2, 3, alpha.shape[1])
        if depth <= alpha.shape[1]
    ]
    while any(smallest_radau_node(*cut, node) <= 0 for cut in cuts):
        node *= 2
        if not np.isfinite(node):
            return None
    return node


def _variance(
    f: SpectralFunction,
    probes: NestedProbes,
    increments: list[np.ndarray],
    members: list[np.ndarray],
    value: float,
) -> float:
    """Variance of the telescoping mean.

    A probe enters every level that it reached, so level l contributes
    `(var_l + 2 sum_{k > l} cov_lk) / N_l`. For levels with too few probes to measure it, the
    variance comes from the level before them and from the spectral measure of the deepest probes.
    """
    dimension = probes.dimension if probes.kind == "sphere" else np.inf
    counts = [int(which.sum()) for which in members]
    measured = sum(count >= _FEW for count in counts)
    total, covered, scatter = 0.0, 0.0, 0.0
    for level in range(measured):
        own = increments[level][members[level]]
        spread = np.var(own, ddof=1)
        scatter = float(spread / np.mean(own) ** 2) if np.any(own) else 0.0
        for deeper in range(level + 1, measured):
            both = members[deeper]
            pair = np.cov(increments[level][both], increments[deeper][both])
            spread += 2 * pair[0, 1]
        # A variance measured with n - 1 degrees of freedom makes the error Student's, not normal.
        student = (counts[level] - 1) / (counts[level] - 3)
        total += max(float(spread), 0.0) * student * (1 / counts[level] - 1 / dimension)
        covered += float(np.mean(own))
    if measured == len(counts):
        return total
    # What the other levels add scatters at least like the last measured level, relative to its
    # mean, and like the whole form; not more than all of the form.
    rest, whole = value - covered, _predicted_variance(f, probes)
    lower_level = scatter * rest**2
    like_whole = 2 * whole * (rest / value) ** 2 if value else whole
    # No probes are left out where they span the whole space.
    left = max(1 / counts[measured] - 1 / dimension, 0.0)
    return total + min(max(lower_level, like_whole), whole) * left


def _predicted_variance(f: SpectralFunction, probes: NestedProbes) -> float:
    depth = int(probes.depths.max())
    which = np.flatnonzero(probes.reached(depth))[:_FEW]
    alpha, beta = probes.tridiagonals(which, depth)
    square = dataclasses.replace(f, evaluate=lambda x: f(x) ** 2)
    forms, squares = gauss(f, alpha, beta), gauss(square, alpha, beta)
    if probes.kind == "sphere":
        return plug_in_variance(float(np.mean(forms)), float(np.mean(squares)), probes.dimension)
    weights = probes.weights[which]
    mean_square = float(np.average(squares, weights=weights))
    return 2 * mean_square * float(np.mean(weights)) ** 2 / probes.effective_dimension
