"""CIFAR-10: approximations of a Laplace posterior of a ResNet-9 against the exact one.

    python benchmarks/experiments/cifar10.py subset --data CIFAR --cache ~/.cache/pnkrylov
    python benchmarks/experiments/cifar10.py real --data CIFAR --cache ~/.cache/pnkrylov

The papers' setting (pslq.md section 6.2): the GGN of 200 training points, scaled to 50,000; the
weights are those of train_cifar10.py. Their reference was conjugate gradients to a residual of
1e-6; ours is the exact Gram form. `subset` makes every run in coordinates in which products are
free (see cifar10_problem.py), with vectors of full length; `real` makes one with the network.
Whatever is done is kept in the cache: run the same command again after an interruption.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from functools import partial

import baselines
import cifar10_peers
import cifar10_problem
import jax
import jax.numpy as jnp
import methods
import numpy as np
from comparison import Judge, krylov_jobs

from pnkrylov.operators import as_operator

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from record import save

SIZES = (20, 50, 100, 200, 500)
# Steps of a run beyond the largest size: the look-ahead, and as many products as probes take.
EXTRA = 100
# Multiples of the fitted prior precision; twenty times of it is the papers' 2,900.
FACTORS = (1.0, 20.0)


class SpectralForm:
    """Exact inverse and eigenvectors, in the coordinates of the problem."""

    def __init__(self, problem):
        self.values, self.size = problem.values, problem.size
        self.index = np.arange(len(self.values))

    def exact(self, shift):
        return self._leading("exact", len(self.values), shift, 1 / shift)

    def eigen_shift(self, count, shift):
        return self._leading("eigen_shift", count, shift, 1 / shift)

    def eigen_matched(self, count, shift):
        others = np.sum(1 / (self.values[count:] + shift))
        others += (self.size - len(self.values)) / shift
        return self._leading("eigen_matched", count, shift, others / (self.size - count))

    def _leading(self, name, count, shift, rest):
        inner = np.diag(1 / (self.values[:count] + shift) - rest)
        return methods.Approximation(name, self.index[:count], inner, rest, np.nan, count)

    def optimum_rows(self, problem, shift, count):
        """The directions of the best projection (lowrankopt-GGN), padded, and G between them."""
        spanning = problem.train[: cifar10_problem.SPANNING * cifar10_problem.CLASSES]
        images = spanning / (self.values + shift)
        rows = baselines.projection_directions(images, spanning, count)
        return rows, (rows * self.values) @ rows.T


@jax.jit
def _rotated_product(values, vector):
    return jnp.pad(values, (0, vector.shape[0] - values.shape[0])) * vector


def rotated_operator(problem):
    """G in the coordinates of the problem, float32."""
    product = jax.tree_util.Partial(_rotated_product, jnp.asarray(problem.values, jnp.float32))
    return as_operator(product, like=jnp.zeros(problem.size, jnp.float32))


def from_jacobians(problem, judge, options):
    """Block runs that start in principal directions of the first 1,000 training rows."""
    rows = problem.train[: cifar10_problem.SPANNING * cifar10_problem.CLASSES]
    directions = methods.principal_directions(rows, len(rows) // 2).astype(np.float32)
    padding = ((0, 0), (0, problem.size - rows.shape[1]))
    length = problem.test.shape[2] + problem.beyond.shape[2]
    operator, jobs = rotated_operator(problem), {}
    for factor in FACTORS:
        for size in options.sizes:
            own = [
                r["products"]
                for r in judge.records()
                if (r["method"], r["factor"], r["s"]) == ("sigma_m", factor, size)
            ]
            total, shift = int(np.mean(own)), problem.prior_precision * factor

            def make(total=total, shift=shift):
                starts = np.pad(directions[: total // 4], padding)
                key = jax.random.key(2000)
                made = methods.ours_from(operator, key, starts, total, shift)
                rows = np.ascontiguousarray(made.rows[:, :length])
                return dataclasses.replace(made, rows=rows)

            jobs["ours, from Jacobians", factor, size, None] = make
    judge.judge(jobs, "from Jacobians")


def krylov(problem, judge, options):
    """All Krylov methods, one seed after the other."""
    operator = rotated_operator(problem)
    steps, seconds = max(options.sizes) + EXTRA, {}
    for seed in range(options.seeds):
        done = [
            r for r in judge.records() if (r["method"], r["seed"]) == ("krylov + 1/lambda", seed)
        ]
        if len(done) == len(FACTORS) * len(options.sizes):
            continue
        started = time.process_time()
        key = jax.random.key(1000 + seed)
        run = methods.KrylovRun(operator, key, steps, driver="compiled")
        seconds[seed] = time.process_time() - started
        # Test Jacobians have so many coordinates; the rest of every vector meets nothing.
        length = problem.test.shape[2] + problem.beyond.shape[2]
        run.rows = np.ascontiguousarray(run.rows[:, :length])
        along = cifar10_problem.directions(problem, options.cache, options.data, seed)
        for factor in FACTORS:
            shift = problem.prior_precision * factor
            jobs = krylov_jobs(run, seed, factor, shift, options.sizes, along)
            judge.judge(jobs, f"seed {seed}, {factor:g} lambda")
        del run, jobs
    return {"run_seconds": seconds, "run_steps": steps}


def eigenvectors(problem, judge, options):
    """Leading eigenvectors, and the best projection with and without 1/lambda outside."""
    form = SpectralForm(problem)
    jobs = {}
    for factor in FACTORS:
        shift = problem.prior_precision * factor
        rows, projected = form.optimum_rows(problem, shift, max(options.sizes))
        rows = np.pad(rows, ((0, 0), (0, problem.beyond.shape[2])))
        for size in options.sizes:
            jobs["eigen + 1/lambda", factor, size, None] = partial(form.eigen_shift, size, shift)
            jobs["eigen + trace", factor, size, None] = partial(form.eigen_matched, size, shift)
            make = partial(baselines.subspace, "lowrankopt", rows, projected, size, shift)
            jobs["lowrankopt-GGN", factor, size, None] = make
            jobs["lowrankopt + 1/lambda", factor, size, None] = partial(make, rest=1 / shift)
    judge.judge(jobs, "eigenvectors")


def subset(options):
    """Every method at every size."""
    problem = cifar10_problem.prepare(options.cache, options.data, options.points)
    judge = Judge(
        problem,
        lambda factor: SpectralForm(problem).exact(problem.prior_precision * factor),
        options.points,
        FACTORS,
        options.cache / "cifar10_scores.json",
    )
    eigenvectors(problem, judge, options)
    cifar10_peers.diagonal(problem, judge, options, FACTORS)
    about = krylov(problem, judge, options)
    from_jacobians(problem, judge, options)
    cifar10_peers.kfac(problem, judge, options, FACTORS)
    content = {
        "problem": {
            "parameters": problem.size,
            "rank": int(np.sum(problem.values > 1e-6 * problem.values[0])),
            "accuracy": problem.accuracy,
            "prior_precision": problem.prior_precision,
            "largest": float(problem.values[0]),
            "points": options.points,
            "examples": cifar10_problem.SUBSET,
            "data": str(problem.stored["source"]),
            "training": {"log": problem.about["log"][-1:], **problem.about["arguments"]},
            **about,
        },
        "records": judge.records(),
    }
    return save("cifar10", content, packages=())


def real(options):
    """One run with the network's own products, at the sizes given."""
    problem = cifar10_problem.prepare(options.cache, options.data, options.points)
    return save("cifar10_real", cifar10_peers.real(problem, options))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["subset", "real"])
    parser.add_argument("--data", required=True, help="folder of batches, or npz of JPEG bytes")
    parser.add_argument("--cache", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, default=5, help="start vectors and probes")
    parser.add_argument("--points", type=int, default=300, help="test points")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--peers", default="", help="a Python that has laplace-torch")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print({"subset": subset, "real": real}[options.part](options))


if __name__ == "__main__":
    main()
