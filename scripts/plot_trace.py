"""Draws docs/assets/trace_*.png and writes docs/tables/trace_*.md, from results/trace.json.

`python scripts/plot_trace.py` after a part of benchmarks/bench_trace.py.
"""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
PARTS = json.loads((ROOT / "benchmarks" / "results" / "trace.json").read_text())["parts"]
MATRICES = ("bulk+outliers", "power-law-1", "exponential", "kernel-5d")
BUDGETS = (200, 400, 800, 1600)
NAMES = {
    "pslq": "P-SLQ (default)",
    "krylov-aware": "Krylov-aware",
    "slq": "SLQ",
    "hutchinson": "Hutchinson + CG",
    "hutch++": "Hutch++",
    "xtrace": "XTrace",
    "ulisse": "ULISSE",
}
# Okabe-Ito: told apart without red-green vision, and by marker without colour.
STYLES = {
    "pslq": ("#000000", "o"),
    "krylov-aware": ("#0072B2", "s"),
    "slq": ("#D55E00", "^"),
    "hutchinson": ("#999999", "v"),
    "hutch++": ("#CC79A7", "D"),
    "xtrace": ("#009E73", "P"),
    "ulisse": ("#E69F00", "X"),
}
FIVE = ("hutchinson", "slq", "hutch++", "xtrace", "ulisse")
EXACT = 1e-10


def records(part):
    """{(matrix, budget, method): record} of one comparison."""
    return {
        (r["matrix"], r["budget"], r["method"]): r
        for name, content in PARTS.items()
        if name.startswith(part + " ")
        for r in content["records"]
    }


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def made_by(prefix):
    parts = [content for name, content in PARTS.items() if name.startswith(prefix)]
    made = [part["provenance"] for part in parts]
    commits = sorted(
        {m["commit"][:7] + ("+changes" * m["commit"].endswith("+changes")) for m in made}
    )
    command = f"python benchmarks/bench_trace.py {prefix.strip()}"
    return (
        f"Made by `{command}` (results/trace.json has the full command of every part) at commit "
        f"{', '.join(commits)} on {max(m['date'] for m in made)}, {made[0]['machine']}, "
        f"jax {made[0]['versions']['jax']}, traceax {made[0]['versions']['traceax']}."
    )


def error(record):
    if record is None:
        return "-"
    if record["rmse"] < EXACT:
        return "exact"
    return f"{record['rmse']:.2g} ± {record['rmse_standard_error']:.1g}"


def comparison_table(part, methods):
    found, rows = records(part), []
    for matrix in MATRICES:
        for budget in BUDGETS:
            own = found.get((matrix, budget, "pslq"))
            if own is None:
                continue
            cells = [error(found.get((matrix, budget, method))) for method in methods]
            best = [found[matrix, budget, m]["rmse"] for m in FIVE if (matrix, budget, m) in found]
            ratio = f"{own['rmse'] / min(best):.2f}" if best else "-"
            row = [matrix, str(budget), *cells]
            if part == "compare":
                row.append(ratio)
            rows.append([*row, f"{100 * own['coverage']:.0f} %"])
    header = ["matrix", "products", *(NAMES[m] for m in methods)]
    header += (["P-SLQ / best of the other five"] if part == "compare" else []) + ["covered"]
    return markdown(header, rows) + "\n\n" + made_by(part + " ")


def plot_comparison(found):
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.8), sharex=True, layout="constrained")
    for axis, matrix in zip(axes, MATRICES, strict=True):
        for method, (colour, marker) in STYLES.items():
            points = [
                found[matrix, budget, method]
                for budget in BUDGETS
                if (matrix, budget, method) in found
                and found[matrix, budget, method]["rmse"] > EXACT
            ]
            if not points:
                continue
            axis.errorbar(
                [p["budget"] for p in points],
                [p["rmse"] for p in points],
                yerr=[2 * p["rmse_standard_error"] for p in points],
                color=colour, marker=marker, markersize=5, capsize=2,
                linewidth=2.2 if method == "pslq" else 1.1, label=NAMES[method],
                zorder=3 if method == "pslq" else 2,
            )  # fmt: skip
        axis.axvline(1000, color="0.7", linestyle=":", linewidth=1)
        axis.set(xscale="log", yscale="log", title=matrix, xlabel="products with A")
        axis.set_xticks(BUDGETS, [str(b) for b in BUDGETS])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0].set_ylabel(r"relative RMSE of tr $A^{-1}$")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False)
    save(figure, "trace_comparison")


def plot_consistency(found):
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    colours = ("#000000", "#0072B2", "#D55E00", "#009E73")
    for record, colour in zip(found, colours, strict=True):
        bias = np.abs(record["reprojected"]["bias"])
        depth = np.arange(1, len(bias) + 1)
        seen = bias > 1e-13
        axes[0].plot(depth[seen], bias[seen], color=colour, label=record["matrix"])
        bound = bias[0] * record["rate_bound"] ** (depth - 1)
        axes[0].plot(depth[bound > 1e-13], bound[bound > 1e-13], color=colour, linestyle=":")
        counts = np.array(sorted(int(n) for n in record["variance"]))
        variance = np.array([record["variance"][str(n)] for n in counts])
        axes[1].plot(counts, variance, "o", color=colour, label=record["matrix"])
        axes[1].plot(counts, variance[0] / counts, color=colour, linewidth=0.8)
        off = np.abs(record["not_reprojected"]["bias"])
        axes[2].plot(depth, np.maximum(bias, 1e-16), color=colour, label=record["matrix"])
        axes[2].plot(depth, np.maximum(off, 1e-16), color=colour, linestyle="--")
    axes[0].set(yscale="log", xlabel="depth l", title="bias (dotted: the bound's rate)")
    axes[0].set_ylabel("relative bias")
    axes[1].set(xscale="log", yscale="log", xlabel="probes N", title="variance (lines: 1/N)")
    axes[1].set_ylabel("relative variance")
    axes[2].set(yscale="log", xlabel="depth l", title="re-projection on (solid), off (dashed)")
    axes[2].set_ylabel("relative bias")
    for axis in axes:
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False)
    save(figure, "trace_consistency")


def consistency_row(record):
    on, off = record["reprojected"]["bias"], record["not_reprojected"]["bias"]
    rates = [f"{record['rate_fitted']:.3f}", f"{record['rate_bound']:.3f}"]
    return [
        record["matrix"],
        f"{record['kappa']:.3g}",
        *rates,
        *(f"{abs(bias[depth - 1]):.1e}" for depth in (10, 30) for bias in (on, off)),
    ]


def save(figure, name):
    figure.savefig(ROOT / "docs" / "assets" / f"{name}.png", dpi=130)
    plt.close(figure)


def write(name, text):
    (ROOT / "docs" / "tables" / f"{name}.md").write_text(text + "\n")


def main():
    write("trace_comparison", comparison_table("compare", tuple(NAMES)))
    plot_comparison(records("compare"))
    if records("logdet"):
        write("trace_logdet", comparison_table("logdet", ("pslq", "slq", "krylov-aware")))
    if "consistency" in PARTS:
        found = PARTS["consistency"]["records"]
        plot_consistency(found)
        rows = [consistency_row(record) for record in found]
        header = ["matrix", "condition of T_perp", "fitted rate per step", "rate of the bound"]
        header += ["bias at depth 10", "not re-projected", "at depth 30", "not re-projected"]
        write("trace_consistency", markdown(header, rows) + "\n\n" + made_by("consistency"))
    if "wall" in PARTS:
        rows = [
            [
                str(r["size"]), str(r["level"]), f"{r['probes']} x {r['depth']}",
                f"{1e3 * r['products_seconds']:.0f} ms", f"{1e3 * r['probes_seconds']:.0f} ms",
                f"{r['ratio']:.2f}",
            ]
            for r in PARTS["wall"]["records"]
        ]  # fmt: skip
        header = ["d", "m", "probes x depth", "block products", "probes", "ratio"]
        write("trace_wall", markdown(header, rows) + "\n\n" + made_by("wall"))


if __name__ == "__main__":
    main()
