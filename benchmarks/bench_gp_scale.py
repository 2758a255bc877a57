"""50,000 points in bounded memory: conditioned, interrupted, killed, and continued.

Eight inputs, float32, targets drawn from the prior (by random Fourier features). One process
conditions the process and gets a Ctrl-C in the middle of its run; a second one loads what the first
one saved, continues, and is killed; a third one does the same and finishes. Peaks of resident
memory are those that the system reports for each process.

    python benchmarks/bench_gp_scale.py
"""

import argparse
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from record import save

from pnkrylov import gp

DIMENSIONS, LENGTHSCALE, NOISE, NUM_TEST = 8, 2.5, 0.1, 500


def problem(size, seed=0, num_features=4096):
    """Inputs, targets, test inputs and what the function is there; a draw from the prior."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((size + NUM_TEST, DIMENSIONS))
    frequencies = rng.standard_normal((DIMENSIONS, num_features)) / LENGTHSCALE
    phases, weights = rng.uniform(0, 2 * np.pi, num_features), rng.standard_normal(num_features)
    f = np.concatenate(
        [
            np.cos(part @ frequencies + phases) @ weights * (2 / num_features) ** 0.5
            for part in np.array_split(X, 50)
        ]
    )
    y = f[:size] + NOISE**0.5 * rng.standard_normal(size)
    return tuple(jnp.asarray(a, jnp.float32) for a in (X[:size], y, X[size:], f[size:]))


def kernel():
    """The kernel of the prior that the targets are drawn from."""
    return gp.RBF(lengthscale=LENGTHSCALE)


def seconds_per_product(operator):
    """One product with one vector, without compilation."""
    product = eqx.filter_jit(lambda operator, v: operator.mv(v))
    vector = jnp.ones((operator.size,), operator.dtype)
    jax.block_until_ready(product(operator, vector))
    start = time.perf_counter()
    jax.block_until_ready(product(operator, vector))
    return time.perf_counter() - start


def stage(name, folder, size, num_steps, lookahead):
    """What one process does; writes what it knows next to the belief."""
    X, y, Xs, truth = problem(size)
    known, start = {}, time.perf_counter()
    path, key = folder / "belief.npz", jax.random.key(0)
    if name == "start":
        known["product_s"] = seconds_per_product(gp.kernel_operator(kernel(), X))
        (folder / "product.json").write_text(json.dumps(known))
        belief = gp.condition(
            kernel(),
            X,
            y,
            NOISE,
            key=key,
            num_steps=num_steps,
            lookahead=lookahead,
            num_probes=2,
            probe_depth=8,
            num_calibration=6,
            progress=True,
        )
    else:
        belief = gp.load(path, kernel())
        left = num_steps - int(belief.run.level)
        belief = belief.refine(left, key=jax.random.fold_in(key, left), progress=True)
    gp.save(belief, path)
    prediction = belief.predict(Xs)
    error = truth - prediction.mean
    known |= {
        "seconds": time.perf_counter() - start,
        "resolved": int(belief.run.level),
        "products": int(belief.num_products),
        "rmse": float(jnp.sqrt(jnp.mean(error**2))),
        "coverage": float(jnp.mean(jnp.abs(error) <= 1.96 * prediction.std())),
        "mathematical": float(jnp.mean(prediction.mathematical)),
        "computational": float(jnp.mean(prediction.computational)),
    }
    (folder / "known.json").write_text(json.dumps(known))


def observed(name, folder, arguments, end=None):
    """Runs a stage, ends it by a signal if told, and reports what the system says about it."""
    log = folder / f"{name}.log"
    for stale in ("known.json", "product.json"):
        (folder / stale).unlink(missing_ok=True)
    command = [sys.executable, __file__, "--stage", name, "--folder", str(folder), *arguments]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream)
        if end is not None:
            after, number = end
            while process.poll() is None and _steps_shown(log) < after:
                time.sleep(0.1)
            process.send_signal(number)
        _, status, usage = os.wait4(process.pid, 0)
    known = folder / "known.json"
    return {
        "stage": name,
        "signal": None if end is None else end[1].name,
        "exit": os.waitstatus_to_exitcode(status),
        "peak_bytes": 1024 * usage.ru_maxrss,
        "progress_bar": log.read_text().replace("\r", "\n").strip().splitlines()[-1][:100],
        **(json.loads(known.read_text()) if known.exists() else {}),
    }


def _steps_shown(log):
    """How many steps the progress bar of the main run has counted in this process."""
    shown = [line for line in log.read_text().replace("\r", "\n").splitlines() if "Lanczos" in line]
    counts = [int(line.split("/")[0].split("|")[-1]) for line in shown if "/" in line]
    return counts[-1] - counts[0] if counts else 0


def main():
    """Parses arguments; without --stage runs all stages and saves the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=50_000)
    parser.add_argument("--num-steps", type=int, default=30)
    parser.add_argument("--lookahead", type=int, default=5)
    parser.add_argument("--stage", choices=("start", "continue"))
    parser.add_argument("--folder", type=pathlib.Path)
    options = parser.parse_args()
    if options.stage:
        sizes = (options.size, options.num_steps, options.lookahead)
        return stage(options.stage, options.folder, *sizes)
    arguments = ["--size", str(options.size), "--num-steps", str(options.num_steps)]
    arguments += ["--lookahead", str(options.lookahead)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        records = [observed("start", folder, arguments, (options.num_steps // 2, signal.SIGINT))]
        print(records[-1], flush=True)
        saved = hashlib.sha256((folder / "belief.npz").read_bytes()).hexdigest()
        records.append(observed("continue", folder, arguments, (3, signal.SIGKILL)))
        print(records[-1], flush=True)
        kept = hashlib.sha256((folder / "belief.npz").read_bytes()).hexdigest() == saved
        records.append(observed("continue", folder, arguments))
        print(records[-1], flush=True)
    content = {"size": options.size, "records": records, "file_survived_the_kill": kept}
    print(save("gp_scale", content))


if __name__ == "__main__":
    main()
