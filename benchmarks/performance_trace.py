"""The part of bench_performance.py about traces: P-SLQ against its peers at equal error.

results/trace.json (bench_trace.py) has every peer's error at 200, 400 and 800 products, at its
best depth. The number of products at which a peer is as accurate as we are is interpolated on that
curve, log against log. There it is tuned once more, its error is measured with new seeds, and if
that is larger than ours it gets more products.
"""

import functools
import json

import bench_trace
import jax
import jax.numpy as jnp
import numpy as np
from record import RESULTS
from side_by_side import against, in_turns

import pnkrylov as pk
from pnkrylov.trace import trace_inverse
from pnkrylov.traces.quadrature import INVERSE

MEASURED = (200, 400, 800)
BUDGETS = (400,)
SEEDS = 20
TUNING_SEEDS = 10
# How far beyond the last measured budget a curve is trusted.
BEYOND = 1.25


def needed(errors, target):
    """Products at which an error curve over `MEASURED` falls to `target`; None if far beyond."""
    budgets, errors = np.log(MEASURED), np.log(np.minimum.accumulate(errors))
    if errors[0] <= np.log(target):
        return MEASURED[0]
    for left in range(len(budgets) - 1):
        if errors[left] == errors[left + 1]:
            continue
        slope = (errors[left + 1] - errors[left]) / (budgets[left + 1] - budgets[left])
        found = float(np.exp(budgets[left] + (np.log(target) - errors[left]) / slope))
        is_last = left == len(budgets) - 2
        if found <= MEASURED[left + 1] * (BEYOND if is_last else 1):
            return max(round(found), MEASURED[left])
    return None


def curves(name):
    """Method -> its records at the measured budgets; and ours, budget -> record."""
    parts = json.loads((RESULTS / "trace.json").read_text())["parts"]
    peers = {}
    for budget in MEASURED:
        for record in parts[f"compare {name} {budget} peers"]["records"]:
            peers.setdefault(record["method"], []).append(record)
    own = {b: parts[f"compare {name} {b} pslq"]["records"][0] for b in BUDGETS}
    return peers, own


def setting(record):
    return record["depth"], record.get("share")


def rmse(A, truth, method, budget, choice, seeds):
    """Relative root mean square error of a peer over seeds."""
    values = [bench_trace.run_peer(method, INVERSE, A, budget, choice, seed)[0] for seed in seeds]
    return float(np.sqrt(np.mean((np.array(values) / truth - 1) ** 2)))


def tuned(A, truth, method, budget, records):
    """The best setting at that budget, out of those that were best at the budgets around it."""
    possible = bench_trace.settings(method, budget)
    near = {setting(r) for r in records if 0.45 * budget <= r["budget"] <= 2.2 * budget}
    choices = [choice for choice in possible if choice in near] or possible[-1:]
    if len(choices) == 1:
        return choices[0]
    seeds = range(2000, 2000 + TUNING_SEEDS)
    return min(choices, key=lambda choice: rmse(A, truth, method, budget, choice, seeds))


def as_accurate(A, truth, peers, error):
    """Method -> products, setting and measured error, of every peer that can be as accurate.

    From the interpolated number of products upwards, in steps of 20 %, until the measured error is
    within 5 % of ours.
    """
    found = {}
    for method, records in peers.items():
        budget = needed([record["rmse"] for record in records], error)
        while budget is not None and budget <= BEYOND * MEASURED[-1]:
            choice = tuned(A, truth, method, budget, records)
            reached = rmse(A, truth, method, budget, choice, range(3000, 3000 + SEEDS))
            if reached <= 1.05 * error:
                found[method] = {"products": budget, "setting": choice, "rmse": reached}
                break
            budget = round(1.2 * budget)
    return found


def trace_part(rounds):
    """Where no peer is as accurate, the best one at 800 products stands in: a lower bound."""
    for name in bench_trace.MATRICES:
        dense, eigenvalues = bench_trace.matrix(name)
        truth = float(np.sum(1 / eigenvalues))
        A = pk.as_operator(jnp.asarray((dense + dense.T) / 2))
        peers, own = curves(name)
        for budget in BUDGETS:
            error = own[budget]["rmse"]
            found = as_accurate(A, truth, peers, error)
            reached = bool(found)
            if not reached:
                best = min((records[-1] for records in peers.values()), key=lambda r: r["rmse"])
                found[best["method"]] = {
                    "products": MEASURED[-1], "setting": setting(best), "rmse": best["rmse"]
                }  # fmt: skip

            def ours(A=A, budget=budget):
                return trace_inverse(A, key=jax.random.key(0), budget=budget).value

            rows = {"pnkrylov": ours} | {
                method: functools.partial(
                    bench_trace.run_peer, method, INVERSE, A, run["products"], run["setting"], 0
                )
                for method, run in found.items()
            }
            table = against(in_turns(rows, rounds), "pnkrylov")
            fastest = min(found, key=lambda method: table[method]["ratio"])
            table["pnkrylov"] |= {"rmse": error, "products": budget}
            for method, run in found.items():
                table[method] |= run
            yield {
                "matrix": name, "budget": budget, "as accurate": reached, "fastest": fastest,
                "rows": table,
            }  # fmt: skip
