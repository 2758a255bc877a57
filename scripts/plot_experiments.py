"""Draws KL and log-trace against s (pslq.md, figure 4), of both experiments, into docs/assets.

`python scripts/plot_experiments.py` after the experiments.
"""

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tables import RESULTS, ROOT
from tables_experiments import mean_and_error, select

# Method -> label, colour, marker, line style.
STYLE = {
    "ours, from Jacobians": ("ours, started at Jacobians", "#000000", "o", "-"),
    "ours, along": ("ours, bulk along Jacobians", "#0072B2", "o", "-"),
    "ours": ("ours, one probe", "#0072B2", "o", ":"),
    "sigma_m": (r"$\Sigma_m$, the papers' layout", "#D55E00", "s", "-"),
    "krylov + 1/lambda": ("Krylov + 1/λ, equal products", "#009E73", "^", "--"),
    "eigen + 1/lambda, all": ("eigenvectors + 1/λ, as many", "0.35", "x", ":"),
    "lowrank-KFAC + 1/lambda": ("lowrank-KFAC + 1/λ", "#CC79A7", "D", "--"),
    "lowrank-diagonal + 1/lambda": ("lowrank-Diagonal + 1/λ", "#56B4E9", "P", "--"),
    "lowrankopt + 1/lambda": ("lowrankopt + 1/λ", "#E69F00", "v", "--"),
    "lowrankopt-GGN": ("lowrankopt-GGN", "#E69F00", "v", "-"),
    "lowrank-KFAC": ("lowrank-KFAC", "#CC79A7", "D", "-"),
    "lowrank-diagonal": ("lowrank-Diagonal", "#56B4E9", "P", "-"),
    "subset-magnitude": ("subset-Magnitude", "0.65", "*", "-"),
}
FULL_RANK = {"KFAC": "#CC79A7", "diagonal": "#56B4E9", "ELLA": "#8B4513"}


def curve(records, method, key, sizes, factor):
    """Sizes, means over seeds and standard errors."""
    found = []
    for size in sizes:
        own = [r[key] for r in select(records, method=method, factor=factor, s=size)]
        if own:
            mean, error = mean_and_error(own)
            found.append((size, mean, error or 0.0))
    return zip(*found, strict=True) if found else None


def draw(axes, result, key, factor):
    """One panel: a quantity against s, full-rank methods as lines across."""
    records = result["records"]
    sizes = sorted({r["s"] for r in records if r["s"] is not None})
    for method, (label, colour, marker, line) in STYLE.items():
        found = curve(records, method, key, sizes, factor)
        if found:
            axes.errorbar(
                *found, label=label, color=colour, marker=marker, linestyle=line,
                markersize=5, linewidth=1.4, capsize=2,
            )  # fmt: skip
    for method, colour in FULL_RANK.items():
        own = select(records, method=method, factor=factor)
        if own:
            axes.axhline(own[0][key], color=colour, linewidth=1, linestyle="-.", label=method)
    axes.set(xlabel="s", xticks=sizes)
    axes.grid(alpha=0.25)


def figure(name, panels):
    """One row of panels for each (result, title, multiple of the prior precision)."""
    rows = [
        (json.loads((RESULTS / f"{result}.json").read_text()), title, factor)
        for result, title, factor in panels
        if (RESULTS / f"{result}.json").exists()
    ]
    size = (11, 4.3 * len(rows))
    drawn, axes = plt.subplots(len(rows), 2, figsize=size, layout="constrained", squeeze=False)
    for (result, title, factor), (left, right) in zip(rows, axes, strict=True):
        draw(left, result, "kl", factor)
        left.set(yscale="log", ylabel="predictive KL to the exact posterior", title=title)
        draw(right, result, "log_trace", factor)
        exact = select(result["records"], method="exact", factor=factor)[0]["log_trace"]
        right.axhline(exact, color="black", linewidth=1.2, label="exact")
        right.set(ylabel="log-trace of the predictive covariance", title=title)
    handles, labels = axes[0, 1].get_legend_handles_labels()
    # matplotlib lists the lines across first; ours belong there.
    order = sorted(range(len(labels)), key=lambda i: labels[i] in (*FULL_RANK, "exact"))
    handles, labels = ([part[i] for i in order] for part in (handles, labels))
    drawn.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    path = ROOT / "docs" / "assets" / f"{name}.png"
    drawn.savefig(path, dpi=120)
    print(path)


def main():
    figure(
        "fashion_fidelity",
        [
            ("fashion_mnist", "GGN of 200 training points", 1.0),
            ("fashion_mnist_full", "GGN of all 60,000 training points", 1.0),
        ],
    )
    figure(
        "cifar10_fidelity",
        [("cifar10", "λ = 141", 1.0), ("cifar10", "λ = 2,828", 20.0)],
    )


if __name__ == "__main__":
    main()
