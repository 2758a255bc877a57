"""Trace and log-determinant estimators at equal numbers of counted products; pslq.md section 6.1.

One part at a time, each of them a few minutes on one core:

    python benchmarks/bench_trace.py compare --matrix power-law-1 --budgets 200 400
    python benchmarks/bench_trace.py logdet --matrix power-law-1
    python benchmarks/bench_trace.py consistency
    python benchmarks/bench_trace.py wall

Every part replaces its own records in results/trace.json and keeps those of the others.
docs/trace.md shows them; scripts/plot_trace.py draws them.
"""

import argparse
import fcntl
import json
import pathlib
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from record import RESULTS, provenance
from tqdm import tqdm

import pnkrylov as pk
from pnkrylov.operators import SPDOperator
from pnkrylov.trace import logdet, trace_inverse
from pnkrylov.traces import peers
from pnkrylov.traces.probes import Boundary, NestedProbes
from pnkrylov.traces.quadrature import INVERSE, LOG, gauss

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import oracles

SIZE = 1000
MATRICES = ("bulk+outliers", "power-law-1", "exponential", "kernel-5d")
BUDGETS = (200, 400, 800, 1600)
PEERS = ("hutchinson", "slq", "hutch++", "xtrace", "ulisse", "krylov-aware")
TUNING_SEEDS = 10


def matrix(name, size=SIZE):
    """The matrix and its eigenvalues, the same for every seed of the estimators."""
    return oracles.SPECTRA[name](size)


class Counter:
    """Counts rows that were multiplied."""

    def __init__(self):
        self.rows = 0

    def add(self, rows):
        self.rows += int(rows)

    def read(self):
        jax.effects_barrier()
        rows, self.rows = self.rows, 0
        return rows


class CountingOperator(SPDOperator):
    """A dense matrix that reports every product to a counter."""

    dense: pk.SPDOperator
    structure: object = eqx.field(static=True)
    counter: Counter = eqx.field(static=True)

    def mv(self, vector):
        jax.debug.callback(self.counter.add, 1)
        return self.dense.mv(vector)

    def block_mv(self, block):
        jax.debug.callback(self.counter.add, block.shape[0])
        return self.dense.block_mv(block)


def counting(dense):
    operator = pk.as_operator(jnp.asarray((dense + dense.T) / 2))
    return CountingOperator(operator, operator.structure, Counter())


def settings(method, budget):
    """Depths (and shares of the run) that a peer is tuned over, in its favour."""
    needed = {"hutch++": 3, "xtrace": 4, "ulisse": 1}.get(method, 1)
    depths = {d for d in (5, 10, 20, 40, 80, 160, 200) if d * needed <= budget}
    depths = sorted(d for d in depths if d <= SIZE)
    if method == "krylov-aware":
        # A probe needs what the run leaves.
        return [(d, s) for d in depths for s in (0.5, 0.75) if d <= (1 - s) * budget]
    return [(d, None) for d in depths]


def run_peer(method, f, operator, budget, setting, seed):
    depth, share = setting
    arguments = (operator, f, jax.random.key(seed), budget, depth)
    if share is not None:
        return peers.krylov_aware(*arguments, share=share)
    return peers.estimator(method, f)(*arguments)


def summary(name, budget, method, errors, counted, **more):
    errors = np.array(errors)
    rmse = float(np.sqrt(np.mean(errors**2)))
    # Delta method: the standard error of the mean square, carried over to its root.
    spread = float(np.std(errors**2, ddof=1) / np.sqrt(len(errors)) / (2 * rmse)) if rmse else 0.0
    return {
        "matrix": name,
        "budget": budget,
        "method": method,
        "seeds": len(errors),
        "rmse": rmse,
        "rmse_standard_error": spread,
        "bias": float(np.mean(errors)),
        "largest_count": int(max(counted)),
        **more,
    }


def compare_ours(name, budget, f, seeds):
    """Relative errors of the default at one budget (log-determinant: divided by d)."""
    dense, eigenvalues = matrix(name)
    operator = counting(dense)
    truth = float(np.sum(f(eigenvalues)))
    scale = truth if f is INVERSE else SIZE
    errors, counted, covered, deviations = [], [], [], []
    for seed in range(seeds):
        function = trace_inverse if f is INVERSE else logdet
        key = jax.random.key(seed)
        estimate = function(operator, key=key, budget=budget, driver="compiled")
        counted.append(operator.counter.read())
        assert counted[-1] == int(estimate.num_matvecs) <= budget
        errors.append((float(estimate.value) - truth) / scale)
        covered.append(bool(estimate.lower <= truth <= estimate.upper))
        deviations.append(float(estimate.standard_error) / scale)
    more = {"coverage": float(np.mean(covered)), "standard_error": float(np.mean(deviations))}
    return [summary(name, budget, "pslq", errors, counted, **more)]


def compare_peers(name, budget, f, seeds):
    """The same for every peer, at the depth that is best for it (by other seeds)."""
    dense, eigenvalues = matrix(name)
    operator = counting(dense)
    truth = float(np.sum(f(eigenvalues)))
    scale = truth if f is INVERSE else SIZE
    records = []
    for method in PEERS if f is INVERSE else ("slq", "krylov-aware"):
        tried = {}
        for setting in settings(method, budget):
            seeds_apart = range(1000, 1000 + TUNING_SEEDS)
            runs = [run_peer(method, f, operator, budget, setting, s) for s in seeds_apart]
            tried[setting] = np.sqrt(np.mean([(run[0] - truth) ** 2 for run in runs]))
        best = min(tried, key=tried.get)
        operator.counter.read()
        errors, counted = [], []
        for seed in range(seeds):
            value, _, spent = run_peer(method, f, operator, budget, best, seed)
            counted.append(operator.counter.read())
            assert counted[-1] == spent <= budget, (method, counted[-1], spent)
            errors.append((value - truth) / scale)
        more = {"depth": best[0]} | ({"share": best[1]} if best[1] else {})
        records.append(summary(name, budget, method, errors, counted, **more))
    return records


def consistency(name, size=500, level=100, probes=64, depth=60):
    """Bias against depth, variance against probes, with and without re-projection."""
    dense, _ = matrix(name, size)
    operator = pk.as_operator(jnp.asarray((dense + dense.T) / 2))
    start = jax.random.normal(jax.random.key(0), (size,))
    basis = pk.lanczos(operator, start, level + 1)
    rows = np.asarray(basis.vectors)
    complement = np.linalg.svd(rows[:level])[2][level:]
    compressed = complement @ dense @ complement.T
    eigenvalues, vectors = np.linalg.eigh(compressed)
    kappa = float(eigenvalues[-1] / eigenvalues[0])
    record = {
        "matrix": name, "size": size, "level": level, "probes": probes, "kappa": kappa,
        "rate_bound": ((np.sqrt(kappa) - 1) / (np.sqrt(kappa) + 1)) ** 2,
    }  # fmt: skip
    for label, projected in (("reprojected", basis.vectors[:level]), ("not_reprojected", None)):
        runs = NestedProbes(operator, basis.vectors, projected, kind="sphere")
        runs.add(jax.random.key(1), probes)
        starts = np.asarray(runs._starts)
        for _ in range(depth):
            runs.advance(probes)
        inside = starts @ complement.T @ vectors
        exact = np.sum(inside**2 / eigenvalues, axis=1)
        forms = [
            gauss(INVERSE, *runs.tridiagonals(np.arange(probes), steps))
            for steps in range(1, depth + 1)
        ]
        bias = [float(np.mean(form - exact) / np.mean(exact)) for form in forms]
        record[label] = {"bias": bias}
        if projected is not None:
            record["rate_fitted"] = fitted_rate(np.abs(bias))
    groups = {}
    repeats = 400
    for count in (1, 2, 4, 8, 16, 32):
        means = []
        for seed in range(repeats):
            block = np.random.default_rng(seed).standard_normal((count, size - level))
            block = np.linalg.qr(block.T)[0].T if count > 1 else block / np.linalg.norm(block)
            means.append(np.mean(np.sum((block @ vectors) ** 2 / eigenvalues, axis=1)))
        groups[count] = float(np.var(means, ddof=1) / np.mean(means) ** 2)
    record["variance"] = groups
    return record


def fitted_rate(bias):
    """Geometric rate per step, over the part that is above rounding."""
    steps = np.flatnonzero(bias > 1e-11)[1:]
    if len(steps) < 3:
        return None
    return float(np.exp(np.polyfit(steps, np.log(bias[steps]), 1)[0]))


def probe_runs(operator, basis, level, probes, depth):
    boundary = Boundary.of(basis, level)
    projected = basis.vectors[:level]
    runs = NestedProbes(operator, basis.vectors, projected, kind="sphere", boundary=boundary)
    runs.add(jax.random.key(1), probes)
    for _ in range(depth):
        runs.advance(probes)


@eqx.filter_jit
def multiply(operator, block):
    return operator.block_mv(block)


def bare_products(operator, block, depth):
    for _ in range(depth):
        block = multiply(operator, block)
    block.block_until_ready()


def wall(repeats=7):
    """Time of N probes of l steps over that of the l block products alone."""
    records = []
    for size, level, probes, depth in (
        (1000, 100, 50, 5), (2000, 100, 50, 5), (4000, 100, 50, 5), (4000, 100, 50, 10),
        (4000, 400, 50, 10),
    ):  # fmt: skip
        rng = np.random.default_rng(0)
        dense = rng.standard_normal((size, size))
        operator = pk.as_operator(jnp.asarray(dense @ dense.T / size + np.eye(size)))
        basis = pk.lanczos(operator, jnp.asarray(rng.standard_normal(size)), level + 1)
        block = jnp.asarray(rng.standard_normal((probes, size)))
        times = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            bare_products(operator, block, depth)
            middle = time.perf_counter()
            probe_runs(operator, basis, level, probes, depth)
            times.append((middle - begin, time.perf_counter() - middle))
        products, whole = np.median(np.array(times[1:]), axis=0)  # the first one compiles
        records.append({
            "size": size, "level": level, "probes": probes, "depth": depth,
            "products_seconds": float(products), "probes_seconds": float(whole),
            "ratio": float(whole / products),
        })  # fmt: skip
        print(records[-1], flush=True)
    return records


def store(part, records):
    path = RESULTS / "trace.json"
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / ".trace.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # parts may run side by side
        content = json.loads(path.read_text()) if path.exists() else {"parts": {}}
        content["parts"][part] = {
            "provenance": provenance(("traceax", "lineax")),
            "records": records,
        }
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    (RESULTS / ".trace.lock").unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("compare", "logdet", "consistency", "wall"))
    parser.add_argument("--matrix", choices=MATRICES, nargs="+", default=MATRICES)
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--who", choices=("pslq", "peers"), nargs="+", default=("pslq", "peers"))
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if arguments.part == "consistency":
        store("consistency", [consistency(name) for name in tqdm(MATRICES)])
        return
    if arguments.part == "wall":
        store("wall", wall())
        return
    f = INVERSE if arguments.part == "compare" else LOG
    run = {"pslq": compare_ours, "peers": compare_peers}
    for name in arguments.matrix:
        for budget in arguments.budgets:
            for who in arguments.who:
                records = run[who](name, budget, f, arguments.seeds)
                store(f"{arguments.part} {name} {budget} {who}", records)
                for record in records:
                    print(
                        {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()},
                        flush=True,
                    )


if __name__ == "__main__":
    main()
