"""The spectrum of the GGN of small CNNs, by filter size and number of observations.

`python scripts/plot_ggn_spectrum.py --run` trains the networks on the digits of scikit-learn and
writes benchmarks/results/ggn_spectrum.json. Without `--run`, docs/assets/ggn_spectrum.png
and docs/tables/ggn_spectrum.md are made from that file, and docs/tables/ggn_cost.md from ggn.json
(benchmarks/bench_ggn.py).
"""

import argparse
import json
import pathlib
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = ROOT / "docs" / "tables"
FILTERS = (3, 5)
OBSERVATIONS = (20, 100, 500, 1500)
STEPS = 120
PROBES, DEPTH = 4, 40
# Okabe-Ito, light to dark with the number of observations.
COLOURS = {20: "#E69F00", 100: "#009E73", 500: "#0072B2", 1500: "#000000"}


def parameters(key, side, dtype):
    """Two convolutions with square filters of this side, and a linear layer."""
    import jax

    keys = jax.random.split(key, 3)
    shapes = {"conv1": (side, side, 1, 8), "conv2": (side, side, 8, 16), "last": (64, 10)}
    return {
        name: jax.random.normal(k, shape, dtype) * (2 / np.prod(shape[:-1])) ** 0.5
        for (name, shape), k in zip(shapes.items(), keys, strict=True)
    }


def cnn(params, images):
    import jax
    import jax.numpy as jnp

    h = images
    for name in ("conv1", "conv2"):
        layout = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(h, params[name], (1, 1), "SAME", dimension_numbers=layout)
        n, height, width, c = h.shape
        h = jax.nn.relu(jnp.max(h.reshape(n, height // 2, 2, width // 2, 2, c), axis=(2, 4)))
    return h.reshape(h.shape[0], -1) @ params["last"]


def digits():
    """1500 images for training, 297 for testing, in random order."""
    import jax.numpy as jnp
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = jnp.asarray(images[order].reshape(-1, 8, 8, 1) / 16, jnp.float32)
    labels = jnp.asarray(labels[order], jnp.int32)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def train(params, data, num_steps=400):
    """Adam on the negative log posterior with prior precision 1, all images at once."""
    import jax
    import jax.numpy as jnp
    import optax

    from pnkrylov.laplace.likelihoods import Categorical

    optimiser = optax.adam(1e-2)

    def loss(params):
        nll = jnp.sum(Categorical().negative_log_density(cnn(params, data[0]), data[1]))
        return nll + 0.5 * optax.tree_utils.tree_norm(params, squared=True)

    @jax.jit
    def step(params, state):
        updates, state = optimiser.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimiser.init(params)
    for _ in range(num_steps):
        params, state = step(params, state)
    return params


def spectrum(operator, key):
    """Converged Ritz values of one run, and the distribution that a few short runs show."""
    import jax

    from pnkrylov.krylov import lanczos

    def ritz(start, num_steps):
        basis = lanczos(operator, operator.unravel(start), num_steps, driver="host").trim()
        alpha, beta = np.asarray(basis.alpha, np.float64), np.asarray(basis.beta, np.float64)
        values, vectors = np.linalg.eigh(
            np.diag(alpha) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1)
        )
        return values, vectors[0] ** 2, beta[-1] * np.abs(vectors[-1])

    starts = jax.random.normal(key, (1 + PROBES, operator.size), operator.dtype)
    values, _, residuals = ritz(starts[0], min(STEPS, operator.size))
    converged = residuals < 0.01 * np.abs(values)
    nodes, weights = [], []
    for start in starts[1:]:
        probe_values, probe_weights, _ = ritz(start, DEPTH)
        nodes.extend(probe_values)
        weights.extend(operator.size * probe_weights / PROBES)
    return {
        "ritz": sorted(values[converged], reverse=True),
        "nodes": nodes,
        "weights": weights,
    }


def run():
    """Trains, measures, and writes the result."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import jax
    import jax.numpy as jnp
    import record

    from pnkrylov.laplace.curvature import ggn
    from pnkrylov.laplace.likelihoods import Categorical

    training, test = digits()
    results = []
    for side in FILTERS:
        params = train(parameters(jax.random.key(side), side, jnp.float32), training)
        accuracy = float(jnp.mean(jnp.argmax(cnn(params, test[0]), axis=1) == test[1]))
        for n in OBSERVATIONS:
            subset = (training[0][:n], training[1][:n])
            operator = ggn(cnn, params, subset, Categorical())
            begin = time.perf_counter()
            # Products from stored rows: the rows cost as much as some 20 products, 560 follow.
            stored = operator.stored()
            found = spectrum(stored, jax.random.key(n))
            seconds = time.perf_counter() - begin
            exact = exact_spectrum(stored)
            results.append(
                {
                    "filter": side, "observations": n, "parameters": operator.size,
                    "rows": operator.num_rows, "test_accuracy": accuracy, "seconds": seconds,
                    "exact": [float(x) for x in exact],
                    **{name: [float(x) for x in found[name]] for name in found},
                }
            )  # fmt: skip
            print(side, n, operator.size, f"accuracy {accuracy:.3f}, {seconds:.1f} s", flush=True)
    print(record.save("ggn_spectrum", {"results": results}, packages=("scikit-learn", "optax")))


def exact_spectrum(operator):
    """All non-zero eigenvalues, from the smaller of the dense and the Gram form, in float64."""
    rows = np.asarray(operator.square_root_rows(), np.float64)
    small = rows @ rows.T if rows.shape[0] < rows.shape[1] else rows.T @ rows
    return np.maximum(np.linalg.eigvalsh(small)[::-1], 0)


def effective_dimension(eigenvalues, precision=1.0):
    return float(np.sum(np.asarray(eigenvalues) / (np.asarray(eigenvalues) + precision)))


def slq_counts(result):
    """Number of eigenvalues above a level, by the weights of the short runs."""
    order = np.argsort(result["nodes"])[::-1]
    return np.asarray(result["nodes"])[order], np.cumsum(np.asarray(result["weights"])[order])


def draw(results):
    """Writes the figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(FILTERS), figsize=(10, 4), sharey=True, layout="constrained")
    for axis, side in zip(axes, FILTERS, strict=True):
        found = [r for r in results if r["filter"] == side]
        for r in found:
            colour = COLOURS[r["observations"]]
            exact = np.asarray(r["exact"])
            exact = exact[exact > 1e-6 * exact[0]]
            label = f"N = {r['observations']}"
            axis.plot(np.arange(1, len(exact) + 1), exact, color=colour, linewidth=1, label=label)
            axis.plot(
                np.arange(1, len(r["ritz"]) + 1), r["ritz"], "o", color=colour, markersize=3.5,
                markerfacecolor="white", label="_",
            )  # fmt: skip
            nodes, counts = slq_counts(r)
            keep = (counts > 1) & (nodes > 1e-4)
            axis.plot(counts[keep], nodes[keep], ":", color=colour, linewidth=1.4, label="_")
        title = f"{side} x {side} filters, {found[0]['parameters']} parameters"
        axis.set(xscale="log", yscale="log", title=title, xlabel="index", ylim=(1e-4, None))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("eigenvalue of the GGN")
    axes[0].plot([], [], "o", color="0.4", markerfacecolor="white", markersize=3.5, label="Lanczos")
    axes[0].plot([], [], ":", color="0.4", label="SLQ")
    axes[0].legend(loc="lower left", fontsize=8)
    figure.savefig(ROOT / "docs" / "assets" / "ggn_spectrum.png", dpi=130)


def markdown(header, rows, made):
    """A table with a line that says what made it."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    commit = made["commit"][:7] + "+changes" * made["commit"].endswith("+changes")
    lines += ["", f"Made by `{made['command']}` at commit {commit} on {made['date']}, "
              f"{made['machine']}, jax {made['versions']['jax']}."]  # fmt: skip
    return "\n".join(lines) + "\n"


def spectrum_table(content):
    header = [
        "filters", "N", "rows N (K-1)", "largest", "10th", "50th", "above 1 (exact)",
        "above 1 (SLQ)", "effective dimension",
    ]  # fmt: skip
    rows = []
    for r in content["results"]:
        exact, nodes = np.asarray(r["exact"]), np.asarray(r["nodes"])
        rows.append([
            f"{r['filter']} x {r['filter']}", str(r["observations"]), str(r["rows"]),
            *(f"{exact[i]:.3g}" for i in (0, 9, 49)),
            str(int(np.sum(exact > 1))), f"{np.asarray(r['weights'])[nodes > 1].sum():.0f}",
            f"{effective_dimension(exact):.1f}",
        ])  # fmt: skip
    return markdown(header, rows, content["provenance"])


def cost_table(content):
    header = ["model", "product", "one, ms", "16 at once, ms", "16 at once / 16 alone"]
    rows = []
    for r in content["results"]:
        model = f"{r['model']}, p = {r['parameters']}, n = {r['examples']}"
        for name, seconds in r["one"].items():
            block = r["sixteen"].get(name)
            ratio = r["sixteen_against_sixteen_alone"].get(name)
            cells = ["-", "-"] if block is None else [f"{1e3 * block:.1f}", f"{ratio:.2f}"]
            if name == "stored rows":
                name += f" ({r['row_megabytes']:.0f} MB, made in {1e3 * r['seconds_rows']:.0f} ms)"
            rows.append([model, name, f"{1e3 * seconds:.2f}", *cells])
    return markdown(header, rows, content["provenance"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", action="store_true", help="train and measure first")
    if parser.parse_args().run:
        run()
    spectra = json.loads((RESULTS / "ggn_spectrum.json").read_text())
    draw(spectra["results"])
    (TABLES / "ggn_spectrum.md").write_text(spectrum_table(spectra))
    costs = json.loads((RESULTS / "ggn.json").read_text())
    (TABLES / "ggn_cost.md").write_text(cost_table(costs))


if __name__ == "__main__":
    main()
