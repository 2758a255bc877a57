"""Numbers of products: checked, and split between the main run and the probes."""

from pnkrylov._arguments import check_counts as check_counts
from pnkrylov._arguments import check_positive_counts as check_positive_counts
from pnkrylov.krylov import check_num_steps


def main_steps(
    num_steps: int | None, budget: int | None, overhead: int, *, default: int, size: int | None
) -> int:
    """Steps of the run: given, by default, or what the budget leaves after the overhead."""
    if num_steps is not None and budget is not None:
        raise ValueError("Pass num_steps or budget, not both.")
    if budget is not None:
        check_counts(budget=budget)
        smallest = overhead + 4
        if budget < smallest:
            raise ValueError(
                f"budget={budget} is too small: checks and probes take {overhead} products and a "
                f"belief takes at least 4 more. Pass at least {smallest}."
            )
        left = budget - overhead
        return left if size is None else min(left, size)
    assert size is not None
    if num_steps is None:
        return min(default, size)
    check_num_steps(num_steps, size)
    return num_steps


def split_budget(
    total: int, num_probes: int, probe_depth: int, size: int, kinds: int
) -> tuple[int, int, int]:
    """Main steps, probes and their depth: at most a quarter for probes, a fifth of the rest ahead.

    A scalar (the bulk) is not worth more; what converged probes leave over goes to the run. With
    two kinds of probes the quarter is for both.
    """
    quarter = max(total // (4 * kinds), 2)
    num_probes = min(num_probes, max(2, quarter // 4))
    probe_depth = min(probe_depth, max(1, quarter // num_probes))
    rest = max(total - kinds * num_probes * probe_depth, 2)
    steps = rest - max(1, rest // 5)
    return min(steps, size), num_probes, probe_depth
