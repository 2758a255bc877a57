"""Draws docs/assets/fashion_fidelity.png: KL and log-trace against s (pslq.md, figure 4).

`python scripts/plot_experiments.py` after benchmarks/experiments/fashion_mnist.py.
"""

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tables import RESULTS, ROOT
from tables_experiments import mean_and_error, select

# Method -> label, colour, marker, line style.
STYLE = {
    "ours, along": ("ours, bulk along Jacobians", "#0072B2", "o", "-"),
    "ours": ("ours, one probe", "#0072B2", "o", ":"),
    "sigma_m": (r"$\Sigma_m$, the papers' layout", "#D55E00", "s", "-"),
    "krylov + 1/lambda": ("Krylov + 1/λ, equal products", "#009E73", "^", "--"),
    "eigen + 1/lambda, all": ("eigenvectors + 1/λ, as many", "0.35", "x", ":"),
    "lowrankopt + 1/lambda": ("lowrankopt + 1/λ", "#E69F00", "v", "--"),
    "lowrankopt-GGN": ("lowrankopt-GGN", "#E69F00", "v", "-"),
    "lowrank-KFAC": ("lowrank-KFAC", "#CC79A7", "D", "-"),
    "lowrank-diagonal": ("lowrank-Diagonal", "#56B4E9", "P", "-"),
    "subset-magnitude": ("subset-Magnitude", "0.65", "*", "-"),
}
FULL_RANK = {"KFAC": "#CC79A7", "diagonal": "#56B4E9", "ELLA": "#8B4513"}


def curve(records, method, key, sizes):
    """Sizes, means over seeds and standard errors."""
    found = []
    for size in sizes:
        own = [r[key] for r in select(records, method=method, factor=1.0, s=size)]
        if own:
            mean, error = mean_and_error(own)
            found.append((size, mean, error or 0.0))
    return zip(*found, strict=True) if found else None


def draw(axes, result, key):
    """One panel: a quantity against s, full-rank methods as lines across."""
    records = result["records"]
    sizes = sorted({r["s"] for r in records if r["s"] is not None})
    for method, (label, colour, marker, line) in STYLE.items():
        found = curve(records, method, key, sizes)
        if found:
            axes.errorbar(
                *found, label=label, color=colour, marker=marker, linestyle=line,
                markersize=5, linewidth=1.4, capsize=2,
            )  # fmt: skip
    for method, colour in FULL_RANK.items():
        own = select(records, method=method, factor=1.0)
        if own:
            axes.axhline(own[0][key], color=colour, linewidth=1, linestyle="-.", label=method)
    axes.set(xlabel="s", xticks=sizes)
    axes.grid(alpha=0.25)


def main():
    """One row of panels per result."""
    names = {
        "fashion_mnist": "GGN of 200 training points",
        "fashion_mnist_full": "GGN of all 60,000 training points",
    }
    results = {
        title: json.loads((RESULTS / f"{name}.json").read_text())
        for name, title in names.items()
        if (RESULTS / f"{name}.json").exists()
    }
    figure, panels = plt.subplots(
        len(results), 2, figsize=(11, 4.3 * len(results)), layout="constrained", squeeze=False
    )
    for (title, result), (left, right) in zip(results.items(), panels, strict=True):
        draw(left, result, "kl")
        left.set(yscale="log", ylabel="predictive KL to the exact posterior", title=title)
        draw(right, result, "log_trace")
        exact = select(result["records"], method="exact", factor=1.0)[0]["log_trace"]
        right.axhline(exact, color="black", linewidth=1.2, label="exact")
        right.set(ylabel="log-trace of the predictive covariance", title=title)
    handles, labels = panels[0, 1].get_legend_handles_labels()
    # matplotlib lists the lines across first; ours belong there.
    order = sorted(range(len(labels)), key=lambda i: labels[i] in (*FULL_RANK, "exact"))
    handles, labels = ([part[i] for i in order] for part in (handles, labels))
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    path = ROOT / "docs" / "assets" / "fashion_fidelity.png"
    figure.savefig(path, dpi=120)
    print(path)


if __name__ == "__main__":
    main()
