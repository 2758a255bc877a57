"""Gaussian processes: how well both variances are told apart, and peers side by side.

    taskset -c 1 python benchmarks/bench_gp.py calibration
    taskset -c 1 python benchmarks/bench_gp.py peers --peer-python /path/to/python-with-gpytorch

`calibration`: data sets of 2000 observations drawn from the prior, three kernels, three run
lengths; against the dense answer. `peers`: one data set of 2000 observations (and scikit-learn's
diabetes data), the same hyperparameters for all; the exact posterior by Cholesky (tinygp), gpytorch
with conjugate gradients and LOVE, IterGP's combined variance from the same basis as ours.
"""

import argparse
import functools
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import tinygp
from record import save

from pnkrylov import gp

jax.config.update("jax_enable_x64", True)
HERE = pathlib.Path(__file__).parent
STEPS, PEER_STEPS = (20, 50, 100), (20, 50)
CASES = [
    ("Matern32", 3, 0.02, 0.5),
    ("RBF", 4, 0.05, 0.6),
    ("RBF", 8, 0.01, 1.0),
    ("Matern12", 4, 0.05, 1.0),
]


def drawn(kernel, p, noise, num_data, num_points, outputs, seed):
    """Inputs, new points, targets and the function at the new points, from the prior."""
    rng = np.random.default_rng(seed)
    points = rng.uniform(size=(num_data + num_points, p))
    matrix = np.asarray(kernel.matrix(jnp.asarray(points), jnp.asarray(points)))
    values, vectors = np.linalg.eigh(matrix)
    f = (vectors * np.sqrt(np.maximum(values, 0))) @ rng.standard_normal((len(points), outputs))
    y = f[:num_data] + noise**0.5 * rng.standard_normal((num_data, outputs))
    return points[:num_data], points[num_data:], y, f[num_data:]


def within_two(estimate, truth):
    ratio = np.asarray(estimate) / truth
    return float(np.mean((ratio > 0.5) & (ratio < 2)))


def covered(mean, variance, f):
    return float(np.mean(np.abs(np.asarray(mean) - f) < 1.959964 * np.sqrt(np.asarray(variance))))


def calibration(data_sets, num_cases, num_data=2000, num_points=300):
    """Per kernel and run length: both parts against the truth, and coverage."""
    records = []
    for name, p, noise, lengthscale in CASES[:num_cases]:
        kernel = getattr(gp, name)(lengthscale=lengthscale)
        X, Xs, y, f = drawn(kernel, p, noise, num_data, num_points, data_sets, seed=7)
        matrix = np.asarray(kernel.matrix(jnp.asarray(X), jnp.asarray(X)))
        cross = np.asarray(kernel.matrix(jnp.asarray(Xs), jnp.asarray(X)))
        solved = np.linalg.solve(matrix + noise * np.eye(num_data), np.column_stack([y, cross.T]))
        means = cross @ solved[:, :data_sets]
        exact = 1 - np.sum(cross * solved[:, data_sets:].T, axis=1)
        for steps in STEPS:
            rows = []
            for output in range(data_sets):
                options = {"key": jax.random.key(output), "num_steps": steps}
                inputs = (kernel, jnp.asarray(X), jnp.asarray(y[:, output]), noise)
                ours = gp.condition(*inputs, **options).predict(jnp.asarray(Xs))
                other = gp.condition(*inputs, start="independent", **options)
                other = other.predict(jnp.asarray(Xs))
                truth = np.asarray(ours.combined) - exact
                error = np.asarray(ours.mean) - means[:, output]
                rows.append(
                    {
                        "remainder_within_two": within_two(ours.remainder, truth),
                        "mathematical_within_two": within_two(ours.mathematical, exact),
                        "remainder_over_exact": float(np.median(truth / exact)),
                        "mean_error": float(np.sqrt(np.mean(error**2))),
                        "predicted_error": float(np.sqrt(np.mean(ours.computational))),
                        "independent_error": float(
                            np.sqrt(np.mean((np.asarray(other.mean) - means[:, output]) ** 2))
                        ),
                        "covered": covered(ours.mean, ours.variance, f[:, output]),
                        "iterative": covered(ours.mean, ours.combined, f[:, output]),
                        "independent": covered(other.mean, other.variance, f[:, output]),
                        "exact": covered(means[:, output], exact, f[:, output]),
                    }
                )
            mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
            for key in ("covered", "independent"):
                spread = np.std([row[key] for row in rows], ddof=1) / data_sets**0.5
                mean[f"{key}_spread"] = float(spread)
            record = {"kernel": name, "p": p, "noise": noise, "lengthscale": lengthscale}
            records.append({**record, "steps": steps, "data_sets": data_sets, **mean})
            print(name, p, steps, {k: round(v, 4) for k, v in mean.items()}, flush=True)
    return {"num_data": num_data, "records": records}


def scores(mean, variance, targets, noise, seconds):
    """Of predictions of noisy targets."""
    mean, variance = np.asarray(mean), np.asarray(variance)
    negative = int(np.sum(variance < 0))
    total = np.maximum(variance, 0) + noise
    squares = (targets - mean) ** 2
    return {
        "rmse": float(np.sqrt(np.mean(squares))),
        "nll": float(np.mean(0.5 * np.log(2 * np.pi * total) + squares / (2 * total))),
        "covered": float(np.mean(squares < 1.959964**2 * total)),
        "negative": negative,
        "seconds": seconds,
    }


def timed(function):
    """The result, the faster of two warm runs, and the first run."""
    started = time.perf_counter()
    jax.block_until_ready(function())
    first, times = time.perf_counter() - started, []
    for _ in range(2):
        started = time.perf_counter()
        result = jax.block_until_ready(function())
        times.append(time.perf_counter() - started)
    return result, min(times), first


def data_sets():
    """Name -> inputs, targets, new inputs, new targets, hyperparameters."""
    from sklearn.datasets import load_diabetes

    kernel = gp.Matern32(lengthscale=0.5)
    X, Xs, y, f = drawn(kernel, 3, 0.02, 2000, 500, 1, seed=11)
    new = f[:, 0] + 0.02**0.5 * np.random.default_rng(12).standard_normal(500)
    yield "prior draw, n = 2000", X, y[:, 0], Xs, new, 0.5, 1.0, 0.02
    inputs, targets = load_diabetes(return_X_y=True)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    targets = (targets - targets.mean()) / targets.std()
    order = np.random.default_rng(0).permutation(len(inputs))
    train, test = order[:350], order[350:]
    # Near the maximum of the evidence, found with pnkrylov.gp.fit.
    yield (
        "diabetes, n = 350",
        inputs[train],
        targets[train],
        inputs[test],
        targets[test],
        8.0,
        1.0,
        0.5,
    )


def exact(kernel, X, y, Xs, noise):
    def run(X, y, Xs):
        process = tinygp.GaussianProcess(kernel, X, diag=noise)
        posterior = process.condition(y, Xs).gp
        return posterior.mean, posterior.variance

    return jax.jit(run)(X, y, Xs)


def on_one_data_set(peer_python, name, X, y, Xs, new, lengthscale, variance, noise):
    """Rows of all methods, and gpytorch's version."""
    arrays, records, version = tuple(jnp.asarray(values) for values in (X, y, Xs)), [], None

    def add(method, steps, mean, var, seconds, first=None):
        row = scores(mean, var, new, noise, seconds)
        records.append({"data": name, "method": method, "steps": steps, "first": first, **row})
        print(records[-1], flush=True)

    distance = tinygp.kernels.distance.L2Distance()
    theirs = variance * tinygp.kernels.Matern32(lengthscale, distance=distance)
    (mean, var), seconds, first = timed(lambda: exact(theirs, *arrays, noise))
    add("exact (tinygp)", None, mean, var, seconds, first)
    kernel, key = gp.Matern32(lengthscale=lengthscale, variance=variance), jax.random.key(0)

    def ours(steps, start):
        options = {"key": key, "num_steps": steps, "start": start}
        return gp.condition(kernel, *arrays[:2], noise, **options).predict(arrays[2])

    for steps in PEER_STEPS:
        for start in ("data", "independent"):
            made, seconds, first = timed(functools.partial(ours, steps, start))
            add(f"pnkrylov, start {start}", steps, made.mean, made.variance, seconds, first)
            if start == "data":
                add("IterGP's variance, same basis", steps, made.mean, made.combined, seconds)
    if peer_python is not None:
        with tempfile.TemporaryDirectory() as folder:
            source, target = f"{folder}/in.npz", f"{folder}/out.npz"
            numbers = {"lengthscale": lengthscale, "variance": variance, "noise": noise}
            np.savez(source, X=X, y=y, Xs=Xs, steps=np.array(PEER_STEPS), **numbers)
            script = str(HERE / "gp_gpytorch.py")
            subprocess.run([peer_python, script, source, target], check=True)
            found = dict(np.load(target))
        version = str(found["version"])
        for steps in PEER_STEPS:
            mean, var = found[f"mean{steps}"], found[f"variance{steps}"]
            add("gpytorch, CG and LOVE", steps, mean, var, float(found[f"seconds{steps}"]))
    return records, version


def peers(peer_python):
    """All methods on the same data, scored on noisy targets."""
    records, version = [], None
    for data in data_sets():
        rows, version = on_one_data_set(peer_python, *data)
        records += rows
    return {"records": records, "gpytorch": version}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["calibration", "peers"])
    parser.add_argument("--data-sets", type=int, default=10)
    parser.add_argument("--cases", type=int, default=len(CASES))
    parser.add_argument("--peer-python")
    arguments = parser.parse_args()
    if arguments.part == "calibration":
        content = calibration(arguments.data_sets, arguments.cases)
    else:
        content = peers(arguments.peer_python)
    print(save(f"gp_{arguments.part}", content, ("tinygp",)))


if __name__ == "__main__":
    sys.exit(main())
