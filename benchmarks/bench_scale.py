"""Eleven million parameters: memory, time and accuracy of a solve and of an inverse belief.

The vectors are pytrees with the shapes of ResNet-18 (d = 11,689,512, float32); the operator is a
diagonal plus a matrix of low rank, whose inverse is known in closed form (Woodbury). Each belief
is made in a process of its own, whose largest resident memory is compared with what has to be
there: basis, probes, operator and right-hand side.

    taskset -c 1 python benchmarks/bench_scale.py
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from record import RESULTS, save

import pnkrylov as pk

RANK = 8


def resnet18_shapes():
    """Leaf shapes of ResNet-18 for ImageNet: convolutions, their batch norms, the last layer."""
    shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            first = channels if block == 0 else width
            shapes += [(width, first, 3, 3), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            if block == 0 and width != 64:
                shapes += [(width, first, 1, 1), (width,), (width,)]
        channels = width
    return [*shapes, (1000, 512), (1000,)]


def problem(shapes, seed=0):
    """Diagonal, low-rank rows and right-hand side, as lists of leaves."""
    rng = np.random.default_rng(seed)
    size = sum(math.prod(shape) for shape in shapes)

    def leaf(shape):
        values = np.exp(rng.uniform(np.log(1e-2), 0, shape)).astype(np.float32)
        rows = rng.standard_normal((RANK, *shape), np.float32) * np.float32(10 / size**0.5)
        rhs = rng.standard_normal(shape, np.float32)
        return jnp.asarray(values), jnp.asarray(rows), jnp.asarray(rhs)

    return [list(part) for part in zip(*map(leaf, shapes), strict=True)]


def product(diagonal, rows, v):
    """`A v` on lists of leaves, `A = diag + rows^T rows`."""
    along = sum(jnp.tensordot(u, x, axes=x.ndim) for u, x in zip(rows, v, strict=True))
    parts = zip(diagonal, rows, v, strict=True)
    return [d * x + jnp.tensordot(along, u, axes=1) for d, u, x in parts]


def closed_form(diagonal, rows, rhs):
    """`A^-1 rhs` and `tr A^-1` in float64 NumPy, by Woodbury, leaf by leaf."""
    small, along, trace = np.eye(RANK), np.zeros(RANK), 0.0
    correction = np.zeros((RANK, RANK))
    for d, u, x in zip(diagonal, rows, rhs, strict=True):
        d, x = np.asarray(d, np.float64).ravel(), np.asarray(x, np.float64).ravel()
        u = np.asarray(u, np.float64).reshape(RANK, -1)
        small += (u / d) @ u.T
        along += (u / d) @ x
        correction += (u / d**2) @ u.T
        trace += np.sum(1 / d)
    weights = np.linalg.solve(small, along)
    solution = [
        (np.asarray(x, np.float64) - np.tensordot(weights, np.asarray(u, np.float64), 1))
        / np.asarray(d, np.float64)
        for d, u, x in zip(diagonal, rows, rhs, strict=True)
    ]
    return solution, trace - np.trace(np.linalg.solve(small, correction))


def peak():
    """Largest resident memory of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def norm(leaves):
    return math.sqrt(sum(float(np.sum(np.asarray(x, np.float64) ** 2)) for x in leaves))


def measure(what, steps, ahead, shrink):
    """Runs one belief in this process and prints what it took as JSON."""
    shapes = [shape if len(shape) == 1 else (max(shape[0] // shrink, 1), *shape[1:])
              for shape in resnet18_shapes()]  # fmt: skip
    jnp.zeros(1).block_until_ready()
    before = peak()
    diagonal, rows, rhs = problem(shapes)
    size = sum(math.prod(shape) for shape in shapes)
    needed = {"operator": 4 * size * (1 + RANK), "right-hand side": 4 * size,
              "basis": 4 * size * (steps + ahead)}  # fmt: skip
    A = jax.tree_util.Partial(product, diagonal, rows)
    started, key = time.perf_counter(), jax.random.key(0)
    found = {"what": what, "size": size, "rows": steps + ahead}
    if what == "solve":
        belief = pk.solve(A, rhs, key=key, num_steps=steps, max_lookahead=ahead, driver="host")
        jax.block_until_ready(belief.mean_flat)
    else:
        probes = {"num_probes": 4, "probe_depth": 20}
        # Each probe is two vectors, and its next product.
        needed["probes"] = 4 * size * 4 * 3
        belief = pk.inverse(A, key=key, like=rhs, num_steps=steps, lookahead=ahead, driver="host",
                            **probes)  # fmt: skip
        trace = belief.trace()
    found["seconds"] = time.perf_counter() - started
    found["peak"], found["needed"] = peak() - before, needed
    found["peak over needed"] = found["peak"] / sum(needed.values())
    found["driver"] = belief.stats.driver
    solution, exact_trace = closed_form(diagonal, rows, rhs)
    if what == "solve":
        pairs = zip(solution, belief.mean, strict=True)
        found["relative error"] = norm([x - np.asarray(m) for x, m in pairs]) / norm(solution)
        found["predicted"] = float(belief.error.error_norm) / norm(solution)
    else:
        found["trace"] = float(trace.value) / exact_trace
        found["standard error"] = float(trace.standard_error) / exact_trace
        found["upper"] = float(trace.upper) / exact_trace
    print(json.dumps(found))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("solve", "inverse"), help="keep the other record")
    parser.add_argument("--here", choices=("solve", "inverse"), help="measure in this process")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--ahead", type=int, default=20)
    parser.add_argument("--shrink", type=int, default=1)
    arguments = parser.parse_args()
    sizes = arguments.steps, arguments.ahead, arguments.shrink
    if arguments.here:
        measure(arguments.here, *sizes)
        return
    path = RESULTS / "scale.json"
    records = json.loads(path.read_text())["records"] if path.exists() else []
    for what in [arguments.only] if arguments.only else ["solve", "inverse"]:
        options = zip(("--steps", "--ahead", "--shrink"), map(str, sizes), strict=True)
        command = [sys.executable, __file__, "--here", what]
        command += [word for pair in options for word in pair]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        record = json.loads(output.splitlines()[-1])
        print(record, flush=True)
        records = [*(old for old in records if old["what"] != what), record]
        save("scale", {"records": records})


if __name__ == "__main__":
    main()
