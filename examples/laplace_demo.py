"""Laplace posteriors of a small network on real images: part of `make demo`.

scikit-learn's digits (1,797 images of 8 x 8 pixels), a network of two layers, trained to the
maximum of its posterior. The prior precision is tuned on validation images, from one curvature;
then exact, Krylov and CIQ posteriors of all parameters, and cheaper ones, are compared on test
images. Validation and test images are noisy, training images are not. Writes a reliability diagram
to build/demo/.
"""

import argparse
import itertools
import pathlib
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from sklearn.datasets import load_digits

from pnkrylov import laplace, plotting
from pnkrylov.laplace import metrics

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HIDDEN, CLASSES = 16, 10
NUM_TRAIN, NUM_VALIDATION = 500, 300
PRIOR_PRECISION = 0.1
METHODS = ("exact", "krylov", "ciq", "diagonal")
LIKELIHOOD = laplace.Categorical()


def problem(seed=0):
    """Training, validation and test images, pixel values scaled to [0, 1]."""
    digits = load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits.data))
    images, labels = digits.data[order] / 16, digits.target[order]
    noisy = images + 0.35 * rng.standard_normal(images.shape)
    ends = (0, NUM_TRAIN, NUM_TRAIN + NUM_VALIDATION, len(images))
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]
    return [
        (jnp.asarray(source[part], jnp.float32), jnp.asarray(labels[part]))
        for source, part in zip((images, noisy, noisy), parts, strict=True)
    ]


def network(params, x):
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"][None, :])
    return hidden @ params["output"]["w"] + params["output"]["b"][None, :]


def initial(key, num_pixels=64):
    keys = jax.random.split(key)
    return {
        "hidden": {
            "w": jax.random.normal(keys[0], (num_pixels, HIDDEN), jnp.float32) / num_pixels**0.5,
            "b": jnp.zeros(HIDDEN, jnp.float32),
        },
        "output": {
            "w": jax.random.normal(keys[1], (HIDDEN, CLASSES), jnp.float32) / HIDDEN**0.5,
            "b": jnp.zeros(CLASSES, jnp.float32),
        },
    }


@jax.jit
def train(params, data, num_steps=2000, rate=0.05):
    """Adam, written out, on the negative log posterior."""
    x, y = data

    def loss(params):
        fit = jnp.sum(LIKELIHOOD.negative_log_density(network(params, x), y))
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return (fit + 0.5 * PRIOR_PRECISION * squares) / x.shape[0]

    def step(index, state):
        params, first, second = state
        gradient = jax.grad(loss)(params)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, gradient)
        now = rate * (1 - index / num_steps)
        # Both moments start at zero, which is divided out.
        scale = now / (1 - 0.9 ** (index + 1))
        spread = jax.tree.map(lambda v: jnp.sqrt(v / (1 - 0.999 ** (index + 1))), second)
        params = jax.tree.map(lambda p, m, s: p - scale * m / (s + 1e-8), params, first, spread)
        return params, first, second

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.fori_loop(0, num_steps, step, (params, zeros, zeros))[0]


def compare(params, data, test, prior_precision, key):
    """Fits every method; one row of the table each, and the probabilities for the picture."""
    inputs, labels = test
    few = inputs[:100]
    reference, rows, probabilities = None, [], {}
    for method in METHODS:
        started = time.perf_counter()
        posterior = laplace.fit(
            network, params, data, likelihood=LIKELIHOOD, prior_precision=prior_precision,
            method=method, key=key, num_steps=80, num_draws=64,
        )  # fmt: skip
        predicted = posterior.predictive(inputs).probabilities().block_until_ready()
        seconds = time.perf_counter() - started
        _, covariance = posterior.functional(few)
        reference = covariance if reference is None else reference
        probabilities[method] = predicted
        evidence = posterior.log_evidence() if method in ("exact", "krylov") else None
        rows.append(
            scores(predicted, labels)
            | {
                "method": method,
                "kl": float(jnp.mean(metrics.gaussian_kl(reference, covariance))),
                "products": posterior.num_matvecs,
                "seconds": seconds,
                "evidence": evidence,
            }
        )
    plain = jax.nn.softmax(network(params, inputs), axis=1)
    rows.append(scores(plain, labels) | {"method": "no posterior"})
    probabilities["no posterior"] = plain
    return rows, probabilities


def scores(probabilities, labels):
    return {
        "accuracy": float(jnp.mean(jnp.argmax(probabilities, axis=1) == labels)),
        "nll": float(metrics.negative_log_likelihood(probabilities, labels)),
        "ece": float(metrics.expected_calibration_error(probabilities, labels)),
    }


def show(rows):
    print(
        f"{'method':13} {'accuracy':>8} {'NLL':>7} {'ECE':>7} {'KL to exact':>12} "
        f"{'log evidence':>18} {'products':>9} {'seconds':>8}"
    )
    for row in rows:
        line = (
            f"{row['method']:13} {100 * row['accuracy']:6.1f} % {row['nll']:7.3f} {row['ece']:7.3f}"
        )
        if "kl" in row:
            evidence = ""
            if row["evidence"] is not None:
                evidence = f"{row['evidence'].value:.1f} +- {row['evidence'].standard_error:.1f}"
            line += f" {row['kl']:12.2g} {evidence:>18} {row['products']:9d} {row['seconds']:8.2f}"
        print(line)


def picture(path, probabilities, labels):
    """Reliability diagrams, and how confidence is distributed."""
    shown = {"no posterior": "#555555", "exact": "#0072B2", "krylov": "#D55E00", "ciq": "#009E73"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    for method, color in shown.items():
        diagram = metrics.reliability(probabilities[method], labels)
        label = f"{method} (ECE {float(diagram.expected_error()):.3f})"
        plotting.reliability(diagram, label=label, axes=left, color=color, ms=3, lw=1.2)
        right.hist(
            np.max(probabilities[method], axis=1), bins=diagram.edges, color=color, lw=1.3,
            histtype="step", label=method,
        )  # fmt: skip
    left.legend(frameon=False, fontsize=8)
    left.set_title("reliability on noisy test digits", fontsize=11)
    right.set_xlabel("confidence")
    right.set_ylabel("test images")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(output=pathlib.Path("build/demo")):
    data, validation, test = problem()
    params = train(initial(jax.random.key(0)), data)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"digits: a network of {size} parameters, trained on {NUM_TRAIN} images")
    posterior = laplace.fit(
        network, params, data, likelihood=LIKELIHOOD, prior_precision=PRIOR_PRECISION
    )
    print(posterior)
    tuned = laplace.tune_by_validation(posterior, validation).posterior
    precision = float(tuned.prior_precision)
    print(f"prior precision tuned on {NUM_VALIDATION} validation images: {precision:.3g}\n")
    rows, probabilities = compare(params, data, test, precision, jax.random.key(1))
    show(rows)
    path = output / "reliability.png"
    picture(path, probabilities, test[1])
    print(f"\npicture: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/demo"))
    main(parser.parse_args().output)
