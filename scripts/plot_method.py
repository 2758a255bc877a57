"""Draws docs/assets/method_*.png, the figures of docs/method.md: `python scripts/plot_method.py`.

Small dense problems with fixed seeds, so that every number in a picture can be computed exactly.
"""

import pathlib

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm

import pnkrylov as pk
from pnkrylov.plotting import BLACK, BLUE, GREEN, GREY, ORANGE

ASSETS = pathlib.Path(__file__).parents[1] / "docs" / "assets"
KEY = jax.random.key(0)


def with_eigenvalues(values, seed=0):
    """A dense SPD matrix with random orthogonal eigenvectors."""
    vectors, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(values),) * 2))
    matrix = (vectors * values) @ vectors.T
    return (matrix + matrix.T) / 2


def krylov_basis(matrix, start, steps):
    """`steps` Lanczos vectors, and an orthonormal basis of the rest that begins with the next."""
    rows = np.asarray(pk.lanczos(jnp.asarray(matrix), jnp.asarray(start), steps + 1).vectors)
    rest = np.random.default_rng(2).standard_normal((len(matrix), len(matrix) - steps - 1))
    whole, triangle = np.linalg.qr(np.concatenate([rows.T, rest], axis=1))
    return whole * np.sign(np.diag(triangle))


def plot_run(size=40, steps=10):
    """The matrix in the basis of a run, its exact inverse there, and two approximations."""
    values = np.concatenate([np.geomspace(300, 20, 6), np.linspace(0.5, 2, size - 6)])
    matrix = with_eigenvalues(values)
    start = np.random.default_rng(1).standard_normal(size)
    basis = krylov_basis(matrix, start, steps)
    belief = pk.inverse(
        jnp.asarray(matrix), key=KEY, start=jnp.asarray(start), num_steps=steps,
        lookahead=size - steps, num_probes=20, layout="paper",
    )  # fmt: skip
    inside = basis.T @ matrix @ basis
    inverse = np.linalg.inv(inside)
    resolved = np.zeros_like(inverse)
    resolved[:steps, :steps] = np.linalg.inv(inside[:steps, :steps])
    sigma = basis.T @ np.asarray(belief.covariance.as_matrix()) @ basis
    shown = {
        "A in the basis of a run": inside,
        "its inverse": inverse,
        "what the run resolved": resolved,
        "the belief's covariance": sigma,
    }
    figure, axes = plt.subplots(1, 4, figsize=(12.5, 3.5), layout="constrained")
    for axis, (title, image) in zip(axes, shown.items(), strict=True):
        limits = (1e-2, 1e2) if axis is axes[0] else (1e-3, 1)
        drawn = axis.imshow(np.abs(image) + 1e-12, cmap="Blues", norm=LogNorm(*limits))
        axis.axhline(steps - 0.5, color=ORANGE, linewidth=1)
        axis.axvline(steps - 0.5, color=ORANGE, linewidth=1)
        axis.set(title=title, xticks=[], yticks=[])
        if axis in (axes[0], axes[-1]):
            figure.colorbar(drawn, ax=axis, orientation="horizontal", shrink=0.8, label="|entry|")
    mark(axes[0], r"$T_m$", (2, 7))
    mark(axes[0], r"$\beta_m$", (steps + 4, steps - 2.5))
    mark(axes[0], r"$T_\perp$", (33, 20))
    mark(axes[1], "coupling", (28, 4))
    mark(axes[1], r"$S^{-1}$", (33, 20))
    mark(axes[2], r"$T_m^{-1}$", (14, 4))
    mark(axes[2], "nothing", (25, 25))
    mark(axes[3], "coupling", (28, 4))
    mark(axes[3], r"$\omega I$", (33, 20))
    error = [np.linalg.norm(each - inverse, 2) for each in (resolved, sigma)]
    print(f"run: error of the resolved part {error[0]:.2f}, of the covariance {error[1]:.2f}")
    stats = belief.stats
    print(f"     ||c|| {float(stats.coupling_norm):.3f}, kappa_S {float(stats.kappa_s):.2f}")
    save(figure, "method_run")


def mark(axis, text, place):
    axis.text(
        *place, text, ha="center", va="center", fontsize=11, color=ORANGE, weight="bold",
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip


def plot_bulk(size=200, levels=(5, 15, 40)):
    """Eigenvalues of S^-1 at three levels against the one number that stands for all."""
    spectra = {
        "bulk + outliers": np.concatenate(
            [np.geomspace(1e4, 1e2, 10), np.linspace(0.5, 2, size - 10)]
        ),
        "exponential": 100 * np.exp(-10 * np.arange(1, size + 1) / size),
    }
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for axis, (name, values) in zip(axes, spectra.items(), strict=True):
        matrix = with_eigenvalues(values)
        start = np.random.default_rng(1).standard_normal(size)
        basis = krylov_basis(matrix, start, max(levels))
        for steps, colour, style in zip(
            levels, (BLACK, BLUE, GREEN), ("-", "--", ":"), strict=True
        ):
            inside = np.linalg.inv(basis.T @ matrix @ basis)
            variances = np.linalg.eigvalsh(inside[steps:, steps:])[::-1]
            kappa = variances[0] / variances[-1]
            label = rf"$m = {steps}$, $\kappa_S = {kappa:.3g}$"
            axis.semilogy(variances, color=colour, linestyle=style, label=label)
            axis.axhline(variances.mean(), color=colour, linestyle=style, linewidth=0.8, alpha=0.6)
        axis.set(title=name, xlabel="direction of the rest", ylabel=r"eigenvalue of $S^{-1}$")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
    save(figure, "method_bulk")


def plot_lookahead(size=300, level=20, ahead=20):
    """Contributions of later steps to the squared error, seen and extrapolated; all levels."""
    values = 100 / np.arange(1, size + 1) ** 2
    matrix = with_eigenvalues(values)
    v = np.random.default_rng(1).standard_normal(size)
    exact = np.linalg.solve(matrix, v)
    A = jnp.asarray(matrix)
    basis = pk.lanczos(A, jnp.asarray(v), size - 1)
    T, rows = np.asarray(basis.tridiagonal()), np.asarray(basis.vectors)
    errors = []
    for steps in range(1, 100):
        first = np.eye(1, steps)[0] * np.linalg.norm(v)
        errors.append(
            np.linalg.norm(exact - np.linalg.solve(T[:steps, :steps], first) @ rows[:steps])
        )
    squares = np.array(errors) ** 2
    parts = squares[:-1] - squares[1:]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    steps = np.arange(1, len(parts) + 1)
    seen = (steps >= level) & (steps < level + ahead)
    later = steps >= level + ahead
    left.bar(steps[steps < level], parts[steps < level], color=GREY, width=1.0, label="resolved")
    left.bar(steps[seen], parts[seen], color=BLUE, width=1.0, label="look-ahead: seen exactly")
    left.bar(steps[later], parts[later], color=ORANGE, width=1.0, label="the rest: extrapolated")
    left.set(
        yscale="log",
        xlabel="step",
        ylabel=r"decrease of $\|x - x_m\|_2^2$",
        xlim=(0, 80),
        ylim=(1e-6, 1e9),
    )
    left.set_title(f"the error at level m = {level} is the sum of what follows")
    left.legend(frameon=False, loc="upper right", fontsize=8)
    share = parts[seen].sum() / squares[level - 1]
    print(f"look-ahead: {100 * share:.0f} % of the squared error seen by {ahead} steps")
    levels = (2, 5, 10, 20, 40, 70)
    beliefs = [
        pk.solve(A, jnp.asarray(v), key=KEY, num_steps=m, max_lookahead=ahead) for m in levels
    ]
    right.semilogy(range(1, 100), errors, color=ORANGE, label="actual error")
    predicted = [float(b.error.error_norm) for b in beliefs]
    part = [float(b.error.error_norm * jnp.sqrt(b.error.seen)) for b in beliefs]
    right.semilogy(levels, predicted, "o", color=BLUE, label="predicted")
    right.semilogy(levels, part, "_", color=BLUE, markersize=10, label="its part that was seen")
    right.set(xlabel="m", title=f"prediction from at most {ahead} more steps")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.grid(alpha=0.25)
    save(figure, "method_lookahead")


def plot_contraction(size=300, levels=(2, 4, 7, 11, 20)):
    """Draws of a belief along two random functionals, and six numbers with their bands."""
    values = 100 / np.arange(1, size + 1)
    matrix = with_eigenvalues(values)
    rng = np.random.default_rng(3)
    v = rng.standard_normal(size)
    exact = np.linalg.solve(matrix, v)
    beliefs = [pk.solve(jnp.asarray(matrix), jnp.asarray(v), key=KEY, num_steps=m) for m in levels]
    directions = rng.standard_normal((2, size)) / size**0.5
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colours = plt.get_cmap("viridis")(np.linspace(0.9, 0.1, len(levels)))
    for belief, steps, colour in zip(beliefs, levels, colours, strict=True):
        draws = np.asarray(belief.sample(KEY, 300)) @ directions.T
        left.plot(*draws.T, ".", color=colour, markersize=2.5, alpha=0.7)
        left.plot([], [], "o", color=colour, label=f"m = {steps}")
    left.plot(*(directions @ exact), "*", color=ORANGE, markersize=15, label="exact", zorder=5)
    left.set(xlabel=r"$c_1^\top x$", ylabel=r"$c_2^\top x$", title="300 draws of each belief")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    places = np.arange(len(levels))
    entries = np.argsort(-np.abs(exact))[:: size // 6][:6]
    for colour, entry in zip((BLACK, BLUE, ORANGE, GREEN, GREY, "#CC79A7"), entries, strict=True):
        means = np.array([float(b.mean[entry]) for b in beliefs])
        widths = 1.96 * np.array([float(b.std()[entry]) for b in beliefs])
        right.fill_between(places, means - widths, means + widths, color=colour, alpha=0.2, lw=0)
        right.plot(places, means, "o-", color=colour, markersize=3)
        right.axhline(exact[entry], color=colour, linestyle="--", linewidth=0.8)
    right.set_xticks(places, [str(m) for m in levels])
    right.set(xlabel="m", ylabel="entry of x", title="95 % bands of six entries; dashed: exact")
    save(figure, "method_contraction")


def save(figure, name):
    figure.savefig(ASSETS / f"{name}.png", dpi=110)
    plt.close(figure)


def main():
    jax.config.update("jax_enable_x64", True)
    plot_run()
    plot_bulk()
    plot_lookahead()
    plot_contraction()


if __name__ == "__main__":
    main()
