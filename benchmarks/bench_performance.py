"""Time against peers, side by side in one process on one core; and how time grows.

    taskset -c 1 python benchmarks/bench_performance.py --peers PYTHON   # everything
    taskset -c 1 python benchmarks/bench_performance.py lanczos          # one part

The rows of a problem are timed in turn, round after round; a ratio is the median of the ratios
within a round, so that a slow moment of the machine hits all rows. Compilation is not timed. Every
part replaces its own records in results/performance.json and keeps those of the others.

`lanczos`, `ggn`: against matfree's full re-orthogonalisation, NumPy, and the bare products.
`solve`: a belief about A^-1 v against probnum's, at a residual that is no larger, and against
conjugate gradients without a belief.
`trace`: P-SLQ against the peers of results/trace.json, each where it is as accurate.
`eigen`: leading eigenpairs against scipy's eigsh.
`gp`, `ciq`: against linear_operator, and `laplace`: against laplace-torch and curvlinops. They run
under PYTHON, an environment with these packages and torch; without it, these parts are left out.
`growth`: exponents of time against d, m and N.
"""

import argparse
import functools
import sys
import time
import warnings

# First, because it sets the number of threads, which NumPy reads when it is imported.
from side_by_side import against, in_turns, store  # isort: skip

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
from performance_ciq import ciq_part
from performance_gp import eigen_part, gp_part, residual, steps_for
from performance_laplace import laplace_part
from performance_trace import trace_part

import pnkrylov as pk
from pnkrylov.interop.probnum import import_probnum
from pnkrylov.laplace import curvature
from pnkrylov.laplace.likelihoods import Categorical
from pnkrylov.probes import run_probes

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
    """The same arithmetic as ours, BLAS: the recurrence and one Gram-Schmidt pass."""
    rows = np.zeros((count, len(start)), start.dtype)
    vector, beta = start / np.linalg.norm(start), 0.0
    for index in range(count):
        rows[index] = vector
        vector = matvec(vector) - beta * rows[index - 1]
        vector = vector - (rows[index] @ vector) * rows[index]
        vector = vector - (rows[: index + 1] @ vector) @ rows[: index + 1]
        beta = np.linalg.norm(vector)
        vector = vector / beta
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
    """The GGN of a small CNN (11,126 parameters), float32, damped."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = bench_ggn.cnn_parameters(keys[0], 28, (6, 16), jnp.float32)
    data = jax.random.normal(keys[1], (images, 28, 28, 1), jnp.float32)
    labels = jax.random.randint(keys[2], (images,), 0, 10)
    return curvature.ggn(bench_ggn.cnn, params, (data, labels), Categorical())


def lanczos_row(name, operator, start, steps, rounds, rows, ready=()):
    """Ours and matfree's beside the rows that a problem adds."""
    v, like = jnp.asarray(start), operator.unravel(jnp.asarray(start))
    rows = {
        "pnkrylov": lambda: pk.lanczos(operator, like, steps),
        "matfree": lambda: matfree_lanczos(operator, v, steps),
    } | rows
    return {
        "problem": name, "size": operator.size, "steps": steps, "dtype": operator.dtype.name,
        "rounds": rounds, "rows": against(in_turns(rows, rounds, ready), "pnkrylov"),
    }  # fmt: skip


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
    """matfree takes a minute and a half here: it is compiled ahead instead of run once more."""
    operator, steps = cnn_ggn(), 300
    start = np.random.default_rng(0).standard_normal(operator.size).astype(np.float32)
    v = jnp.asarray(start)
    compiled = matfree_lanczos.lower(operator, v, steps).compile()
    rows = {
        "matfree": lambda: compiled(operator, v, steps),
        "bare products": functools.partial(bare_on_host, operator, v, steps),
    }
    rounds = max(rounds // 10, 1)
    yield lanczos_row("GGN of a CNN", operator, start, steps, rounds, rows, ready=("matfree",))


# --- solve -------------------------------------------------------------------------------------


def probnum_solve(matrix, rhs, steps):
    import_probnum()
    from probnum.linalg import problinsolve

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution, _, _, info = problinsolve(matrix, rhs, maxiter=steps)
    return np.asarray(solution.mean).reshape(-1), int(info["iter"])


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

        @eqx.filter_jit
        def jitted(A, v, options=options):
            belief = pk.solve(A, v, key=key, throw=False, **options)
            return belief.mean, belief.covariance, belief.result

        rows = {
            "pnkrylov": lambda A=A, v=v, o=options: pk.solve(A, v, key=key, **o).covariance,
            "under jit": lambda A=A, v=v, f=jitted: f(A, v),
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
            "rows": against(in_turns(rows, rounds), "pnkrylov"),
        }  # fmt: skip
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
        seconds = in_turns(rows, rounds)
        medians = {size: float(np.median(values[1:])) for size, values in seconds.items()}
        record = {"sweep": name, "seconds": medians,
                  "exponent": exponent(list(medians), list(medians.values()))}  # fmt: skip
        if name.endswith("against m") and name.startswith("dense"):
            # time = a m + b m^2: products and orthogonalisation take the same time at m = a / b.
            steps = np.array(list(medians), float)
            scaled = np.array(list(medians.values())) / steps
            slope, offset = np.polyfit(steps, scaled, 1)
            record["crossover"] = float(offset / slope)
        yield record


# Part -> how to make its records from the number of rounds and the Python of the peers.
PARTS = {
    "lanczos": lambda rounds, _: lanczos_part(rounds),
    "ggn": lambda rounds, _: ggn_part(rounds),
    "solve": lambda rounds, _: solve_part(max(rounds // 3, 3)),
    "trace": lambda rounds, _: trace_part(max(rounds // 3, 3)),
    "eigen": lambda rounds, _: eigen_part(max(rounds // 3, 3)),
    "gp": lambda rounds, python: gp_part(max(rounds // 3, 3), python),
    "ciq": lambda rounds, python: ciq_part(max(rounds // 3, 3), python),
    "laplace": lambda rounds, python: laplace_part(max(rounds // 3, 3), python),
    "growth": lambda rounds, _: growth_part(max(rounds // 3, 3)),
}
WITH_TORCH = ("gp", "ciq", "laplace")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter that has torch's peers")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    for part in arguments.parts or PARTS:
        if part in WITH_TORCH and not arguments.peers:
            print(f"{part}: left out, because it needs --peers PYTHON (see docs/performance.md)")
            continue
        started, records = time.perf_counter(), []
        for record in PARTS[part](arguments.rounds, arguments.peers):
            print(record, flush=True)
            records.append(record)
            store(part, records)
        print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
