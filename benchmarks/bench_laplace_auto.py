"""`method="auto"` of a Laplace fit against every manual choice: CPU seconds, compilation included.

Networks trained on scikit-learn's digits; every fit runs in a process of its own, from `fit` to
four draws. Writes results/laplace_auto.json and docs/tables/laplace_auto.md.
"""

import json
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import record
from sklearn.datasets import load_digits

from pnkrylov import laplace

CASES = {  # name -> (hidden units, examples)
    "narrow": (16, 200),
    "wide": (150, 300),
    "many data": (60, 1500),
}
METHODS = ("auto", "exact", "krylov")
REPEATS = 3
TABLE = pathlib.Path(__file__).parent.parent / "docs" / "tables" / "laplace_auto.md"


def apply(params, x):
    """One hidden layer."""
    (w, b), (v, c) = params
    return jnp.tanh(x @ w + b[None, :]) @ v + c[None, :]


def trained(hidden, count):
    """Parameters after 300 steps of gradient descent, and the data."""
    x, y = load_digits(return_X_y=True)
    x = jnp.asarray(x[:count] / 16, jnp.float32)
    y = jnp.asarray(y[:count])
    rng = np.random.default_rng(0)

    def layer(a, b):
        return jnp.asarray(rng.normal(size=(a, b)) / a**0.5, jnp.float32), jnp.zeros(b)

    params = [layer(64, hidden), layer(hidden, 10)]

    def loss(params):
        logits = jax.nn.log_softmax(apply(params, x))
        return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))

    @jax.jit
    def step(params):
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, jax.grad(loss)(params))

    for _ in range(300):
        params = step(params)
    return jax.block_until_ready(params), (x, y)


def one(case, method):
    """Fits once and prints what it took."""
    params, data = trained(*CASES[case])
    start = time.process_time()
    posterior = laplace.fit(
        apply,
        params,
        data,
        likelihood=laplace.Categorical(),
        prior_precision=10.0,
        method=method,
        key=jax.random.key(0),
    )
    jax.block_until_ready(posterior.draws(jax.random.key(1), 4))
    seconds = time.process_time() - start
    print(json.dumps({"seconds": seconds, "method": posterior.method, "size": posterior.size}))


def main():
    """Runs every case and method, interleaved, and writes the medians."""
    runs = {(case, method): [] for case in CASES for method in METHODS}
    for _ in range(REPEATS):
        for case, method in runs:
            command = [sys.executable, __file__, case, method]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            runs[case, method].append(json.loads(output.strip().splitlines()[-1]))
    results = []
    for case, (hidden, count) in CASES.items():
        medians = {
            method: float(np.median([run["seconds"] for run in runs[case, method]]))
            for method in METHODS
        }
        auto = runs[case, "auto"][0]
        best = min(medians["exact"], medians["krylov"])
        results.append(
            {
                "case": case,
                "hidden": hidden,
                "examples": count,
                "parameters": auto["size"],
                "chosen": sorted({run["method"] for run in runs[case, "auto"]}),
                "cpu_seconds": medians,
                "auto_over_best": medians["auto"] / best,
            }
        )
    record.save("laplace_auto", {"repeats": REPEATS, "results": results}, ("scikit-learn",))
    write_table()


def write_table():
    """The committed JSON as a table."""
    content = json.loads((record.RESULTS / "laplace_auto.json").read_text())
    lines = [
        "| parameters | rows of the square root | auto takes | auto, s | exact, s | krylov, s "
        "| auto / best |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in content["results"]:
        seconds = row["cpu_seconds"]
        lines.append(
            f"| {row['parameters']} | {9 * row['examples']} | {', '.join(row['chosen'])} "
            f"| {seconds['auto']:.1f} | {seconds['exact']:.1f} | {seconds['krylov']:.1f} "
            f"| {row['auto_over_best']:.2f} |"
        )
    made = content["provenance"]
    lines += [
        "",
        f"CPU seconds, compilation included, medians of {content['repeats']}. Made by "
        f"`{made['command']}` at commit `{made['commit'][:12]}` on {made['date']}, "
        f"{made['machine']}, jax {made['versions']['jax']}.",
    ]
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        one(*sys.argv[1:])
    else:
        main()
