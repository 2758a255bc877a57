"""A Gaussian process on real images, solved with beliefs: `make demo`.

scikit-learn's digits (1,797 images of 8 x 8 pixels). Classification by regression: one score per
class, `x = (K + noise I)^-1 y`. The exact answer is affordable here, so that one can see whether
the belief knows how wrong it is. Writes a picture to build/demo/.
"""

import argparse
import pathlib
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from sklearn.datasets import load_digits

import pnkrylov as pk

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS = (2, 5, 10, 20, 40, 80)
NOISE = 0.1
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"


def kernel(a, b, lengthscale=2.0):
    """RBF kernel between two sets of images, pixel values scaled to [0, 1]."""
    squared = np.sum(a**2, 1)[:, None] + np.sum(b**2, 1)[None, :] - 2 * a @ b.T
    return np.exp(-np.maximum(squared, 0) / (2 * lengthscale**2))


def problem(num_test=297, seed=0):
    """Kernel matrix of the training images, one-against-rest targets, and the test images."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.data))
    images, labels = digits.data[order] / 16, digits.target[order]
    test, train = slice(0, num_test), slice(num_test, None)
    matrix = kernel(images[train], images[train]) + NOISE * np.eye(len(images) - num_test)
    targets = np.where(labels[train, None] == np.arange(10)[None, :], 1.0, -1.0)
    cross = kernel(images[test], images[train])
    return matrix, targets, cross, images[test], labels[test]


@eqx.filter_jit
def beliefs_of(A, targets, keys, num_steps):
    """Ten beliefs, one per class, from ten runs side by side."""

    def solve(target, key):
        return pk.solve(A, target, key=key, num_steps=num_steps, lower_bound=NOISE)

    return eqx.filter_vmap(solve)(targets, keys)


def row(beliefs, exact, matrix, cross, labels, num_steps, seconds):
    """One line of the table, averaged over the ten classes."""
    mean = np.asarray(beliefs.mean)
    deviation = np.asarray(eqx.filter_vmap(lambda belief: belief.std())(beliefs))
    actual = np.linalg.norm(exact - mean, axis=1)
    predicted = np.asarray(beliefs.error.error_norm)
    covered = np.abs(exact - mean) <= 1.959964 * deviation
    accuracy = np.mean(np.argmax(cross @ mean.T, axis=1) == labels)
    return {
        "steps": num_steps,
        "products": float(np.mean(np.asarray(beliefs.stats.num_matvecs))),
        "relative error": np.mean(actual / np.linalg.norm(exact, axis=1)),
        "predicted/actual": np.mean(predicted / actual),
        "coverage": np.mean(covered),
        "accuracy": accuracy,
        "seconds": seconds,
    }


def show(rows, exact_accuracy):
    """Prints the table."""
    print(f"{'steps':>5} {'products':>9} {'rel. error':>11} {'predicted/actual':>17} "
          f"{'95 % covers':>12} {'test accuracy':>14} {'seconds':>8}")  # fmt: skip
    for r in rows:
        print(f"{r['steps']:5d} {r['products']:9.0f} {r['relative error']:11.1e} "
              f"{r['predicted/actual']:17.2f} {100 * r['coverage']:10.1f} % "
              f"{100 * r['accuracy']:12.1f} % {r['seconds']:8.2f}")  # fmt: skip
    print(f"{'exact':>5} {'':9} {'':11} {'':17} {'':12} {100 * exact_accuracy:12.1f} %")


def picture(path, history, exact, cross, images, rows, shown, label):
    """Beliefs about test scores contracting onto the exact ones, and the forecast of the error."""
    figure = plt.figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.45, 1])
    axes = left.subplots(2, 4, sharex=True)
    left.suptitle(f"score \u201cis it a {label}?\u201d of eight test images", fontsize=11)
    positions = np.arange(len(STEPS))
    for axis, index in zip(axes.flat, shown, strict=True):
        truth = float(cross[index] @ exact[label])
        pushed = [belief.push(jnp.asarray(cross[index])) for belief in history]
        means = np.array([float(p.mean[0]) for p in pushed])
        widths = 1.959964 * np.array([float(p.std()[0]) for p in pushed])
        axis.fill_between(positions, means - widths, means + widths, color=BLUE, alpha=0.25, lw=0)
        axis.plot(positions, means, "o-", color=BLUE, ms=3, lw=1)
        axis.axhline(truth, color=ORANGE, lw=1.2, ls="--")
        axis.set_xticks(positions, [str(s) for s in STEPS], fontsize=7)
        axis.tick_params(axis="y", labelsize=7)
        inset = axis.inset_axes([0.72, 0.03, 0.26, 0.36])
        inset.imshow(images[index].reshape(8, 8), cmap="gray_r")
        inset.set_xticks([])
        inset.set_yticks([])
    for axis in axes[1]:
        axis.set_xlabel("steps", fontsize=8)
    axis = right.subplots()
    axis.set_title("does the belief know its error?", fontsize=11)
    steps = [r["steps"] for r in rows]
    actual = np.array([[a for a in r["actual"]] for r in rows])
    predicted = np.array([[p for p in r["predicted"]] for r in rows])
    axis.plot(steps, actual, color=ORANGE, lw=0.8, alpha=0.6)
    axis.plot(steps, predicted, color=BLUE, lw=0.8, alpha=0.6, ls=":")
    axis.plot(steps, actual.mean(1), "o-", color=ORANGE, label="actual error, ten classes")
    axis.plot(steps, predicted.mean(1), "s:", color=BLUE, label="predicted error")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(steps, [str(s) for s in steps])
    axis.minorticks_off()
    axis.set_xlabel("Lanczos steps")
    axis.set_ylabel(r"$\Vert A^{-1}y - \mathrm{mean}\Vert_2$")
    axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/demo"))
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)

    matrix, targets, cross, images, labels = problem()
    print(f"digits: kernel system of {len(matrix)} training images, 10 classes, noise {NOISE}")
    exact = np.linalg.solve(matrix, targets).T
    A, right_hand_sides = jnp.asarray(matrix), jnp.asarray(targets.T)
    keys = jax.random.split(jax.random.key(0), 10)
    label, rows, history = 8, [], []
    for num_steps in STEPS:
        started = time.perf_counter()
        beliefs = jax.block_until_ready(beliefs_of(A, right_hand_sides, keys, num_steps))
        seconds = time.perf_counter() - started
        result = row(beliefs, exact, matrix, cross, labels, num_steps, seconds)
        result["actual"] = np.linalg.norm(exact - np.asarray(beliefs.mean), axis=1)
        result["predicted"] = np.asarray(beliefs.error.error_norm)
        rows.append(result)
        history.append(jax.tree.map(lambda x: x[label] if eqx.is_array(x) else x, beliefs))
    show(rows, np.mean(np.argmax(cross @ exact.T, axis=1) == labels))
    print()
    print(history[STEPS.index(20)])

    others = [np.flatnonzero(labels == digit)[0] for digit in (8, 3, 1, 9, 5, 2, 6)]
    shown = [np.flatnonzero(labels == 8)[1], *others]
    path = arguments.output / "belief_contracts.png"
    picture(path, history, exact, cross, images, rows, shown, label)
    print(f"\npicture: {path}")


if __name__ == "__main__":
    main()
