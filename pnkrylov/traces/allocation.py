"""How the products of one round of probes are split: a pilot first, then many shallow probes."""

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from tqdm import tqdm

from pnkrylov.traces.multilevel import Convergence, GaussForms, radau_node
from pnkrylov.traces.probes import NestedProbes, block_sizes
from pnkrylov.traces.quadrature import SpectralFunction, radau

_PILOT = 8
# Deeper steps are worth it while the bias they remove exceeds this share of the standard error.
_BIAS_SHARE = 0.25


def spend_on(
    f: SpectralFunction,
    probes: NestedProbes,
    key: PRNGKeyArray,
    left: int,
    largest: float,
    bar: tqdm,
) -> None:
    """Spends `left` products on probes so that the mean of f is known best.

    Args:
        f: the function.
        probes: an empty set of probes.
        key: random key.
        left: products to spend, at least 1.
        largest: largest Ritz value known of the space.
        bar: progress bar, in products.
    """
    pilot_key, key = jax.random.split(key)
    counts, spreads = _pilot(f, probes, pilot_key, left, bar)
    _fill(f, probes, key, left - probes.num_matvecs, counts, spreads, largest, bar)


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
    forms = GaussForms(f, probes)
    while (count := min(count, budget - probes.num_matvecs)) >= 1:
        probes.advance(count)
        bar.update(count)
        counts.append(count)
        depth = len(counts)
        added = forms.at(depth)[1]
        if depth > 1:
            added = added - forms.at(depth - 1)[1][: len(added)]
        last = spreads[-1] if spreads else 0.0
        spreads.append(float(np.std(added, ddof=1)) if count > 1 else last)
        if depth < 3:
            continue
        limit = forms.convergence(depth)
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
    return max(_rounded(min(count, max(noisy, 2), affordable)), 1)


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
    shallow = min(left - sum(deeper), room)
    sizes = block_sizes(shallow)
    if shallow < room:
        # Small blocks cost more time than their products are worth.
        sizes = [size for size in sizes if size >= shallow / 8]
    if not sizes:
        return
    probes.add(key, *sizes)
    # Only the probes of the first block, the largest, go deeper.
    for block, size in enumerate(sizes, start=-len(sizes)):
        for count in [size, *deeper]:
            count = min(count, size)
            if count == 0:
                break
            probes.advance(count, block)
            bar.update(count)
        deeper = []


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
    """Down to a size that a block may have."""
    return block_sizes(count)[0] if count > 0 else 0
