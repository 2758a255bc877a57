"""Draws docs/assets/gp_contracts.png: more computation, less computational variance."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from pnkrylov import gp

jax.config.update("jax_enable_x64", True)
ASSETS = pathlib.Path(__file__).parents[1] / "docs" / "assets"
ORANGE, BLUE = "#E69F00", "#0072B2"


def data():
    """A wiggly function on a line with a gap, noisily observed."""
    rng = np.random.default_rng(4)
    x = np.sort(np.concatenate([rng.uniform(0, 4, 300), rng.uniform(5, 10, 380)]))
    f = np.sin(2 * x) + 0.5 * np.sin(5.1 * x)
    return jnp.asarray(x), jnp.asarray(f + 0.2 * rng.standard_normal(len(x)))


def panel(axes, belief, grid, x, y):
    """Mean, mathematical band, and what the computation adds to it."""
    prediction = belief.predict(grid)
    mean, grid = np.asarray(prediction.mean), np.asarray(grid)
    inner = 1.96 * np.sqrt(np.asarray(prediction.mathematical))
    outer = 1.96 * np.asarray(prediction.std())
    axes.plot(x, y, ".", color="0.7", markersize=2, zorder=0)
    axes.fill_between(grid, mean - outer, mean + outer, color=ORANGE, label="computational")
    axes.fill_between(grid, mean - inner, mean + inner, color=BLUE, label="mathematical")
    axes.plot(grid, mean, color="black", linewidth=0.8)
    axes.set(title=f"{int(belief.run.level)} steps", ylim=(-4, 4))


def main():
    """Draws it."""
    x, y = data()
    grid = jnp.linspace(-0.5, 10.5, 400)
    kernel = gp.Matern52(lengthscale=0.5)
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.4), sharey=True, layout="constrained")
    for axes, steps in zip(panels, (12, 20, 30), strict=True):
        options = {"num_steps": steps, "lookahead": 5, "start": "independent"}
        belief = gp.condition(kernel, x, y, 0.04, key=jax.random.key(0), **options)
        panel(axes, belief, grid, x, y)
    panels[0].legend(loc="lower right", fontsize=8)
    figure.savefig(ASSETS / "gp_contracts.png", dpi=120)


if __name__ == "__main__":
    main()
