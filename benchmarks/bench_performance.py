"""Time against peers, side by side in one process on one core; and how time grows.

    taskset -c 1 python benchmarks/bench_performance.py             # everything
    taskset -c 1 python benchmarks/bench_performance.py lanczos     # one part

The rows of a problem are timed in turn, round after round; a ratio is the median of the ratios
within a round, so that a slow moment of the machine hits all rows. Compilation is not timed. Every
part replaces its own records in results/performance.json and keeps those of the others.

`lanczos`, `ggn`: against matfree's full re-orthogonalisation, NumPy, and the bare products.
`solve`: a belief about A^-1 v against probnum's, at a residual that is no larger, and against
conjugate gradients without a belief.
`trace`: P-SLQ against the peers of results/trace.json that are as accurate, at their best settings.
`growth`: exponents of time against d, m and N.
"""

import argparse
import functools
import json
import os
import sys
import time
import warnings

# One thread for everybody; before the first import that reads it.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import bench_ggn
import bench_trace
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse
import scipy.sparse.linalg as spla
from bench_cost import problem
from matfree import decomp
from record import RESULTS, provenance

import pnkrylov as pk
from pnkrylov.interop.probnum import import_probnum
from pnkrylov.laplace import curvature
from pnkrylov.laplace.likelihoods import Categorical
from pnkrylov.probes import run_probes
from pnkrylov.trace import trace_inverse
from pnkrylov.traces.quadrature import INVERSE

PACKAGES = ("matfree", "probnum", "lineax", "traceax")


def timed(function):
    started = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - started


def in_turns(rows, rounds):
    """Name -> seconds of every round, after one that compiles."""
    for function in rows.values():
        timed(function)
    seconds = {name: [] for name in rows}
    for _ in range(rounds):
        for name, function in rows.items():
            seconds[name].append(timed(function))
    return seconds


def against(seconds, ours):
    """Name -> median seconds, and the median of the ratios to ours within a round."""
    own = np.array(seconds[ours])
    return {
        name: {
            "seconds": float(np.median(values)),
            "ratio": float(np.median(np.array(values) / own)),
        }
        for name, values in seconds.items()
    }


# --- lanczos -----------------------------------------------------------------------------------


@eqx.filter_jit
def bare(operator, start, count):
    """`count` products, each needing the last."""

    def product(_, v):
        v = operator.mv(v)
        return v / jnp.linalg.norm(v)

    return jax.lax.fori_loop(0, count, product, start)


_product = eqx.filter_jit(lambda operator, v: operator.mv(v))


def bare_on_host(operator, start, count):
    """The same, one call after the other."""
    for _ in range(count):
        start = _product(operator, start)
        start = start / jnp.linalg.norm(start)
    return start


@eqx.filter_jit
def matfree_lanczos(operator, start, count):
    """matfree's Lanczos with full re-orthogonalisation."""
    return decomp.tridiag_sym(count, reortho="full")(operator.mv, start)


def numpy_lanczos(matvec, start, count):
    """Two Gram-Schmidt passes, BLAS."""
    rows = np.zeros((count, len(start)), start.dtype)
    vector = start / np.linalg.norm(start)
    for index in range(count):
        rows[index] = vector
        vector = matvec(vector)
        for _ in range(2):
            vector = vector - (rows[: index + 1] @ vector) @ rows[: index + 1]
        vector = vector / np.linalg.norm(vector)
    return rows


def laplacian(width, height):
    """Five-point Laplacian plus the identity."""
    one = [scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
           for n in (width, height)]  # fmt: skip
    return scipy.sparse.csr_array(
        scipy.sparse.kron(one[0], scipy.sparse.eye_array(height))
        + scipy.sparse.kron(scipy.sparse.eye_array(width), one[1])
        + scipy.sparse.eye_array(width * height)
    )


def cnn_ggn(images=200):
    """The GGN of a small CNN (11,878 parameters), float32, damped."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = bench_ggn.cnn_parameters(keys[0], 28, (6, 16), jnp.float32)
    data = jax.random.normal(keys[1], (images, 28, 28, 1), jnp.float32)
    labels = jax.random.randint(keys[2], (images,), 0, 10)
    return curvature.ggn(bench_ggn.cnn, params, (data, labels), Categorical())


def lanczos_row(name, operator, start, steps, rounds, rows):
    """Ours and matfree's beside the rows that a problem adds."""
    v, like = jnp.asarray(start), operator.unravel(jnp.asarray(start))
    rows = {
        "pnkrylov": lambda: pk.lanczos(operator, like, steps),
        "matfree": lambda: matfree_lanczos(operator, v, steps),
    } | rows
    record = {
        "problem": name, "size": operator.size, "steps": steps, "dtype": operator.dtype.name,
        "rounds": rounds, "rows": against(in_turns(rows, rounds), "pnkrylov"),
    }  # fmt: skip
    print(record, flush=True)
    return record


def lanczos_part(rounds):
    problems = ("dense", problem(2000)[0], 100), ("sparse", laplacian(125, 160), 200)
    for name, matrix, steps in problems:
        operator = pk.as_operator(matrix)
        start = np.random.default_rng(0).standard_normal(operator.size)
        v = jnp.asarray(start)
        rows = {
            "bare products": functools.partial(bare, operator, v, steps),
            "NumPy": functools.partial(numpy_lanczos, matrix.__matmul__, start, steps),
        }
        yield lanczos_row(name, operator, start, steps, rounds, rows)


def ggn_part(rounds):
    operator = cnn_ggn()
    start = np.random.default_rng(0).standard_normal(operator.size).astype(np.float32)
    rows = {"bare products": functools.partial(bare_on_host, operator, jnp.asarray(start), 300)}
    yield lanczos_row("GGN of a CNN", operator, start, 300, max(rounds // 5, 1), rows)


# --- solve -------------------------------------------------------------------------------------


def residual(matrix, rhs, solution):
    return float(np.linalg.norm(rhs - matrix @ np.asarray(solution)) / np.linalg.norm(rhs))


def probnum_solve(matrix, rhs, steps):
    import_probnum()
    from probnum.linalg import problinsolve

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution, _, _, info = problinsolve(matrix, rhs, maxiter=steps)
    return np.asarray(solution.mean).reshape(-1), int(info["iter"])


def steps_for(A, matrix, v, target):
    """The least number of steps whose mean has a residual of at most `target`."""
    basis = pk.lanczos(A, v, min(len(v), 300))
    rows, T = np.asarray(basis.vectors), np.asarray(basis.tridiagonal())
    for steps in range(1, len(T) + 1):
        first = np.eye(1, steps)[0] * float(basis.start_norm)
        mean = np.linalg.solve(T[:steps, :steps], first) @ rows[:steps]
        if residual(matrix, np.asarray(v), mean) <= target:
            return steps
    return len(T)


def solve_part(rounds):
    key = jax.random.key(0)
    spectra = bench_trace.oracles.SPECTRA
    for name, size, most in (("bulk+outliers", 500, 100), ("power-law-1", 500, 150),
                             ("bulk+outliers", 2000, 60)):  # fmt: skip
        matrix = spectra[name](size)[0]
        matrix = (matrix + matrix.T) / 2
        rhs = np.random.default_rng(1).standard_normal(size)
        A, v = pk.as_operator(jnp.asarray(matrix)), jnp.asarray(rhs)
        peer, iterations = probnum_solve(matrix, rhs, most)
        target = residual(matrix, rhs, peer)
        steps = steps_for(A, matrix, v, target)
        lineax_matrix = lx.MatrixLinearOperator(A.matrix, lx.positive_semidefinite_tag)
        solver = lx.CG(rtol=0.0, atol=0.0, max_steps=steps)

        @jax.jit
        def lineax_cg(v, operator=lineax_matrix, solver=solver):
            return lx.linear_solve(operator, v, solver, throw=False).value

        options = {"num_steps": steps, "check_symmetric": False}
        rows = {
            "pnkrylov": lambda A=A, v=v, o=options: pk.solve(A, v, key=key, **o).covariance,
            "probnum": lambda A=matrix, b=rhs, m=most: probnum_solve(A, b, m)[0],
            "scipy cg": lambda A=matrix, b=rhs, m=steps: spla.cg(A, b, rtol=0, maxiter=m)[0],
            "lineax CG": functools.partial(lineax_cg, v),
            "bare products": lambda A=A, v=v, m=steps: bare(A, v, m),
        }
        belief = pk.solve(A, v, key=key, **options)
        record = {
            "problem": name, "size": size, "residual": residual(matrix, rhs, belief.mean),
            "peer residual": target, "steps": steps, "peer iterations": iterations,
            "matvecs": int(belief.stats.num_matvecs),
            "rows": against(in_turns(rows, max(rounds // 3, 3)), "pnkrylov"),
        }  # fmt: skip
        print(record, flush=True)
        yield record


# --- trace -------------------------------------------------------------------------------------


def as_accurate(name, error):
    """For every peer, its cheapest record in results/trace.json whose error is at most `error`."""
    parts = json.loads((RESULTS / "trace.json").read_text())["parts"]
    found = {}
    for budget in (200, 400, 800):
        for record in parts[f"compare {name} {budget} peers"]["records"]:
            if record["rmse"] <= error:
                found.setdefault(record["method"], record)
    return found, parts


def trace_part(rounds, budget=400):
    """Where no peer is as accurate at 800 products, the best one there stands in: a lower bound."""
    for name in bench_trace.MATRICES:
        found, parts = as_accurate(name, 0.0)
        (own,) = parts[f"compare {name} {budget} pslq"]["records"]
        found, _ = as_accurate(name, own["rmse"])
        reached = bool(found)
        if not reached:
            last = parts[f"compare {name} 800 peers"]["records"]
            best = min(last, key=lambda record: record["rmse"])
            found = {best["method"]: best}
        dense = bench_trace.matrix(name)[0]
        A = pk.as_operator(jnp.asarray((dense + dense.T) / 2))
        rows = {
            "pnkrylov": lambda A=A: trace_inverse(A, key=jax.random.key(0), budget=budget).value
        }
        for method, record in found.items():
            setting = record["depth"], record.get("share")
            rows[method] = functools.partial(
                bench_trace.run_peer, method, INVERSE, A, record["budget"], setting, 0
            )
        table = against(in_turns(rows, max(rounds // 3, 3)), "pnkrylov")
        for method, record in found.items():
            table[method] |= {"rmse": record["rmse"], "products": record["budget"]}
        table["pnkrylov"] |= {"rmse": own["rmse"], "products": budget}
        record = {"matrix": name, "as accurate": reached, "rows": table}
        print(record, flush=True)
        yield record


# --- growth ------------------------------------------------------------------------------------


def exponent(sizes, seconds):
    """Slope of log time against log size."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def growth_part(rounds):
    rng = np.random.default_rng(0)

    def run(operator, steps):
        v = jnp.asarray(rng.standard_normal(operator.size))
        return lambda: pk.lanczos(operator, v, steps, driver="compiled")

    def dense(size):
        matrix = rng.standard_normal((size, size))
        return pk.as_operator(jnp.asarray(matrix @ matrix.T / size + np.eye(size)))

    def diagonal(size):
        values = jnp.asarray(rng.uniform(1, 100, size))
        return pk.as_operator(lambda v: values * v, like=values)

    def probes(operator, basis, count):
        level, key = jnp.asarray(20, jnp.int32), jax.random.key(0)
        return lambda: run_probes(operator, basis, level, key, count, 10)

    two_thousand, cheap = dense(2000), diagonal(50_000)
    basis = pk.lanczos(two_thousand, jnp.asarray(rng.standard_normal(2000)), 21)
    sweeps = {
        "dense products, m = 50, against d": {
            d: run(dense(d), 50) for d in (500, 1000, 2000, 4000)
        },
        "dense products, d = 2000, against m": {
            m: run(two_thousand, m) for m in (25, 50, 100, 200, 400)
        },
        "diagonal products, m = 100, against d": {
            d: run(diagonal(d), 100) for d in (12_500, 25_000, 50_000, 100_000)
        },
        "diagonal products, d = 50000, against m": {m: run(cheap, m) for m in (50, 100, 200)},
        "probes of 10 steps, d = 2000, against N": {
            n: probes(two_thousand, basis, n) for n in (4, 8, 16, 32)
        },
    }
    for name, rows in sweeps.items():
        seconds = in_turns(rows, max(rounds // 3, 3))
        medians = {size: float(np.median(values)) for size, values in seconds.items()}
        record = {"sweep": name, "seconds": medians,
                  "exponent": exponent(list(medians), list(medians.values()))}  # fmt: skip
        if name.endswith("against m") and name.startswith("dense"):
            # time = a m + b m^2: products and orthogonalisation take the same time at m = a / b.
            steps = np.array(list(medians), float)
            scaled = np.array(list(medians.values())) / steps
            slope, offset = np.polyfit(steps, scaled, 1)
            record["crossover"] = float(offset / slope)
        print(record, flush=True)
        yield record


PARTS = {
    "lanczos": lanczos_part,
    "ggn": ggn_part,
    "solve": solve_part,
    "trace": trace_part,
    "growth": growth_part,
}


def store(part, records):
    path = RESULTS / "performance.json"
    content = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    content["parts"][part] = {"provenance": provenance(PACKAGES), "records": records}
    path.write_text(json.dumps(content, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    for part in arguments.parts or PARTS:
        records = []
        for record in PARTS[part](arguments.rounds):
            records.append(record)
            store(part, records)


if __name__ == "__main__":
    sys.exit(main())
