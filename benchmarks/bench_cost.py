"""What a run costs beside its bare matvecs, and beside peers, in one process on one core.

d = 2000 dense float64, m = 100. The rows are timed in turn, round after round; a ratio is the
median of the ratios within a round, so that a slow moment of the machine hits both sides.
Run it pinned: `taskset -c 0 python benchmarks/bench_cost.py` (`make bench` does).
"""

import argparse
import functools
import os
import time
import warnings

# One thread for everybody; before the first import that reads it.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np
from matfree import decomp
from record import save

import pnkrylov as pk
from pnkrylov.interop.probnum import import_probnum


def normalised(product):
    return product / jnp.linalg.norm(product)


@functools.partial(jax.jit, static_argnums=2)
def products(A, start, count):
    """`count` bare products one after the other, each needing the last."""
    return jax.lax.fori_loop(0, count, lambda _, v: normalised(A @ v), start)


@functools.partial(jax.jit, static_argnums=2)
def block_products(A, block, count):
    """The same for blocks of rows."""
    return jax.lax.fori_loop(0, count, lambda _, rows: normalised(rows @ A), block)


@functools.partial(jax.jit, static_argnums=2)
def matfree_lanczos(A, start, count):
    """matfree's Lanczos with full re-orthogonalisation."""
    return decomp.tridiag_sym(count, reortho="full")(lambda v: A @ v, start)


def problem(size, seed=0):
    """Bulk and outliers with random orthogonal eigenvectors."""
    rng = np.random.default_rng(seed)
    eigenvalues = np.concatenate([np.geomspace(1e4, 1e2, 10), rng.uniform(0.5, 2, size - 10)])
    vectors, _ = np.linalg.qr(rng.standard_normal((size, size)))
    matrix = (vectors * eigenvalues) @ vectors.T
    return (matrix + matrix.T) / 2, rng.standard_normal(size)


def rows_of(matrix, start, num_steps):
    """Name -> (function, name of the bare work that it is compared with)."""
    A, v, key = jnp.asarray(matrix), jnp.asarray(start), jax.random.key(0)
    inverse = pk.inverse(A, key=key, num_steps=num_steps)
    solve = pk.solve(A, v, key=key, num_steps=num_steps)
    probes = jnp.asarray(np.random.default_rng(1).standard_normal((8, len(start))))
    inverse_steps = int(inverse.stats.num_steps + inverse.stats.lookahead)
    solve_steps = int(solve.stats.num_steps + solve.stats.lookahead)
    depth = int(inverse.stats.probe_depth)
    spent = {"inverse": str(inverse), "solve": str(solve)}

    def bare_inverse():
        checks = block_products(A, probes[:2], 1)
        return products(A, v, inverse_steps), block_products(A, probes, depth), checks

    def bare_solve():
        return products(A, v, solve_steps), block_products(A, probes[:2], 1)

    rows = {
        "bare": (lambda: products(A, v, num_steps), "bare"),
        "pnkrylov.lanczos": (lambda: pk.lanczos(A, v, num_steps), "bare"),
        "matfree tridiag_sym(reortho=full)": (lambda: matfree_lanczos(A, v, num_steps), "bare"),
        "bare of inverse": (bare_inverse, "bare of inverse"),
        "pnkrylov.inverse": (
            lambda: pk.inverse(A, key=key, num_steps=num_steps),
            "bare of inverse",
        ),
        "bare of solve": (bare_solve, "bare of solve"),
        "pnkrylov.solve": (lambda: pk.solve(A, v, key=key, num_steps=num_steps), "bare of solve"),
    }
    return rows, spent


def timed(function):
    started = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - started


def probnum_solve(matrix, start, num_steps):
    """probnum's probabilistic solver, as many iterations as fit in `num_steps` products."""
    import_probnum()
    from probnum.linalg import problinsolve

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = time.perf_counter()
        solution, _, _, info = problinsolve(matrix, start, maxiter=num_steps)
        seconds = time.perf_counter() - started
    mean = np.asarray(solution.mean).reshape(-1)
    residual = np.linalg.norm(start - matrix @ mean) / np.linalg.norm(start)
    return {"seconds": seconds, "iterations": int(info["iter"]), "relative residual": residual}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)

    matrix, start = problem(arguments.size)
    rows, spent = rows_of(matrix, start, arguments.steps)
    for function, _ in rows.values():
        timed(function)
    seconds = {name: [] for name in rows}
    for _ in range(arguments.rounds):
        for name, (function, _) in rows.items():
            seconds[name].append(timed(function))
    table = {}
    for name, (_, floor) in rows.items():
        ratio = float(np.median(np.array(seconds[name]) / np.array(seconds[floor])))
        table[name] = {"seconds": float(np.median(seconds[name])), "floor": floor, "ratio": ratio}
        print(f"{name:36s} {1e3 * table[name]['seconds']:8.1f} ms   {ratio:6.3f} x {floor}")
    peer = probnum_solve(matrix, start, arguments.steps)
    bare = table["bare"]["seconds"]
    name = f"probnum problinsolve, {peer['iterations']} iterations"
    print(f"{name:36s} {1e3 * peer['seconds']:8.1f} ms   {peer['seconds'] / bare:6.1f} x bare")
    print(f"  its relative residual: {peer['relative residual']:.1e}")
    content = {
        "size": arguments.size,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "rows": table,
        "probnum": peer,
        "spent": spent,
    }
    print(save("cost", content, packages=("matfree", "probnum")))


if __name__ == "__main__":
    main()
