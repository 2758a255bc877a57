"""FashionMNIST: approximations of a Laplace posterior against the exact one (pslq.md section 6.2).

    python benchmarks/experiments/fashion_mnist.py subset --cache ~/.cache/pnkrylov
    python benchmarks/experiments/fashion_mnist.py full --cache ~/.cache/pnkrylov

`subset`: the GGN of 200 training points, scaled to 50,000, as in the paper. `full`: the GGN of all
60,000 (`full_ggn.py`, accumulated once, is its reference and its operator). Whatever is done
(weights, curvature, runs, scores) is kept in the cache: run the same command again after an
interruption. Results go to benchmarks/results.
"""

import argparse
import pathlib
import sys
from functools import partial

import baselines
import full_ggn
import jax
import methods
import numpy as np
import peers
from comparison import Judge, eigen_jobs, krylov_jobs, runs
from fashion_problem import SUBSET, prepare
from images import FASHION

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from record import save

SIZES = (120, 230, 450, 670, 1000)
FACTORS = (1.0, 0.1, 10.0)
# Training points whose Jacobian rows give start vectors.
SPANNING = 100
# Products that random probes may take at most, beyond s + 20: it bounds the length of a run.
MOST_PROBES = methods.LOOKAHEAD + methods.NUM_PROBES * methods.PROBE_DEPTH


def subspace_jobs(problem, form, factors, sizes, flat_diagonal, kfac_images):
    """The projections of Faller and Martin 2025, their optimum with 1/lambda outside; diagonal."""
    jobs = {}
    training = problem.train_jacobians(min(SUBSET, -(-2 * max(sizes) // 10)))
    index = baselines.largest_parameters(problem.flat, max(sizes))
    magnitude = form.entries(index)
    for factor in factors:
        shift = problem.prior_precision * factor
        jobs["diagonal", factor, None, None] = partial(baselines.diagonal, flat_diagonal, shift)
        images = {
            "lowrank-diagonal": training / (flat_diagonal + shift),
            "lowrankopt-GGN": form.solve(training, shift),
        }
        if factor in kfac_images:
            images["lowrank-KFAC"] = kfac_images[factor][: len(training)]
        for size in sizes:
            jobs["subset-magnitude", factor, size, None] = partial(
                baselines.subspace, "magnitude", index[:size], magnitude, size, shift
            )
        for name, block in images.items():
            rows = baselines.projection_directions(block, training, max(sizes))
            projected = baselines.projected_curvature(rows, form.mv)
            for size in sizes:
                make = partial(baselines.subspace, name, rows, projected, size, shift)
                jobs[name, factor, size, None] = make
                if name == "lowrankopt-GGN":
                    shifted = partial(make, rest=1 / shift)
                    jobs["lowrankopt + 1/lambda", factor, size, None] = shifted
    return jobs


class Comparison:
    """Runs, exact forms and the judge of one curvature."""

    def __init__(self, problem, form, operator, options, name, *, dtype, factors):
        self.problem, self.form, self.options = problem, form, options
        self.judge = Judge(
            problem,
            lambda factor: form.exact(problem.prior_precision * factor),
            options.points,
            factors,
            options.cache / f"{name}_scores.json",
        )
        keys = [jax.random.key(1000 + seed) for seed in range(options.seeds)]
        self.steps = min(max(options.sizes) + MOST_PROBES // 2, operator.size)
        path = options.cache / f"{name}_runs.npz"
        bases, self.seconds = runs(operator, keys, self.steps, dtype, path)
        self.runs = [
            methods.KrylovRun(operator, key, self.steps, basis=basis)
            for key, basis in zip(keys, bases, strict=True)
        ]
        self.directions = [problem.directions(2, seed) for seed in range(options.seeds)]

    def krylov(self, factors):
        """Judges Krylov methods and eigenvectors at these multiples of the prior precision."""
        sizes = self.options.sizes
        for seed, run in enumerate(self.runs):
            jobs, others = {}, {}
            for factor in factors:
                shift = self.problem.prior_precision * factor
                own = krylov_jobs(run, seed, factor, shift, sizes, self.directions[seed])
                jobs |= own
                if seed == 0:
                    totals = {s: own["krylov + 1/lambda", factor, s, 0]().stored for s in sizes}
                    others |= eigen_jobs(self.form, factor, shift, totals)
            self.judge.judge(jobs, f"seed {seed}")
            self.judge.judge(others, "eigenvectors")

    def from_jacobians(self, factors):
        """Judges block runs that start in principal directions of training Jacobians."""
        rows = self.problem.train_jacobians(SPANNING)
        directions = methods.principal_directions(rows, len(rows) // 2)
        jobs, operator = {}, self.runs[0].operator
        for factor in factors:
            shift = self.problem.prior_precision * factor
            for size in self.options.sizes:
                totals = [
                    r["products"]
                    for r in self.judge.records()
                    if (r["method"], r["factor"], r["s"]) == ("sigma_m", factor, size)
                ]
                jobs["ours, from Jacobians", factor, size, None] = partial(
                    methods.ours_from,
                    operator,
                    jax.random.key(2000),
                    directions,
                    int(np.mean(totals)),
                    shift,
                )
        self.judge.judge(jobs, "from Jacobians")

    def subspaces(self, factors, flat_diagonal, kfac_images):
        """Judges the subspace methods and the diagonal."""
        jobs = subspace_jobs(
            self.problem, self.form, factors, self.options.sizes, flat_diagonal, kfac_images
        )
        self.judge.judge(jobs, "subspaces")

    def save(self, name, **more):
        """Writes what has been judged so far."""
        problem = {
            "parameters": int(self.problem.rows.shape[1]),
            "accuracy": self.problem.accuracy,
            "prior_precision": self.problem.prior_precision,
            "points": self.options.points,
            "lookahead": methods.LOOKAHEAD,
            "probes": methods.NUM_PROBES,
            "run_seconds": self.seconds,
            "run_steps": self.steps,
            **more,
        }
        content = {"problem": problem, "records": self.judge.records()}
        return save(name, content, packages=("optax",))


def subset(options):
    """Part 1: the papers' setting."""
    problem = prepare(options.cache, data=options.data)
    form = baselines.GramForm(problem.rows)
    operator = methods.rows_operator(problem.rows)
    comparison = Comparison(
        problem, form, operator, options, "fashion_subset", dtype=np.float64, factors=FACTORS
    )
    flat_diagonal = np.sum(problem.rows**2, axis=0)
    judge = comparison.judge
    for factors in ([1.0], [0.1, 10.0]):
        # Other people's posteriors, at the fitted prior only.
        kfac_images = peers.compare(problem, judge, options, factors) if 1.0 in factors else {}
        comparison.subspaces(factors, flat_diagonal, kfac_images)
        comparison.save("fashion_mnist", examples=SUBSET)
        comparison.krylov(factors)
        comparison.from_jacobians(factors)
        comparison.save("fashion_mnist", examples=SUBSET)
        if 1.0 in factors:
            swag = partial(baselines.swag, peers.snapshots(problem, options))
            judge.judge({("swag", 1.0, None, None): swag}, "SWAG")
    return comparison.save("fashion_mnist", examples=SUBSET)


def full(options):
    """Part 2: the GGN of all 60,000 training points, at the same prior precision."""
    problem = prepare(options.cache, data=options.data)
    matrix = np.load(options.cache / "fashion_ggn.npy")
    operator = methods.matrix_operator(matrix.astype(np.float32))
    form = baselines.DenseForm(matrix, max(options.sizes) + MOST_PROBES)
    comparison = Comparison(
        problem, form, operator, options, "fashion_full", dtype=np.float32, factors=(1.0,)
    )
    comparison.krylov([1.0])
    comparison.from_jacobians([1.0])
    comparison.save("fashion_mnist_full", examples=60_000)
    comparison.subspaces([1.0], np.diag(matrix), {})
    checked = full_ggn.check_products(matrix, options)
    return comparison.save("fashion_mnist_full", examples=60_000, **checked)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["subset", "full"])
    parser.add_argument("--data", type=pathlib.Path, default=FASHION)
    parser.add_argument("--cache", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, default=5, help="start vectors and probes")
    parser.add_argument("--points", type=int, default=500, help="test points")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--peers", default="", help="a Python that has laplace-torch")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    options.cache.mkdir(parents=True, exist_ok=True)
    print({"subset": subset, "full": full}[options.part](options))


if __name__ == "__main__":
    main()
