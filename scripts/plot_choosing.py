"""Draws docs/assets/choosing.png from results/choosing.json: `python scripts/plot_choosing.py`.

One panel per question and situation, one bar per method; the fastest one whose error is small
enough for the question is named above the panel.
"""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch
from tables_choosing import QUESTIONS, answers, load, reason, seconds_text, winner

ASSETS = pathlib.Path(__file__).parents[1] / "docs" / "assets"
# Okabe-Ito; methods are also named at their bars.
COLOURS = {
    "exact": "#000000",
    "plain CG": "#999999",
    "Krylov belief": "#0072B2",
    "CIQ": "#D55E00",
    "Lanczos-FA": "#E69F00",
    "SLQ": "#009E73",
}
HEADINGS = {
    "solve": "One solve, $A^{-1}v$",
    "solve with error bar": "A rough solve, with an error bar",
    "draws": "16 draws from $N(0, A^{-1})$",
    "log-determinant": "$\\log\\det A$",
}


def colour(method):
    return COLOURS[method.split(" (")[0]]


def situation(case):
    fits = case["rows"] < case["size"]
    size = f"N·O = {case['rows']:,} {'<' if fits else '>'} d = {case['size']:,}"
    condition = f"condition number {case['kappa']:.0e}".replace("e+0", "e")
    return f"{'Jacobian fits' if fits else 'Jacobian does not fit'}\n{size}\n{condition}"


def panel(axis, question, records):
    """Bars, shortest above; hatched where the error is too large for the question."""
    records = sorted(records, key=lambda record: -record["seconds"])
    best = winner(question, records)
    for place, record in enumerate(records):
        why = reason(question, record)
        method = record["method"]
        axis.barh(
            place, record["seconds"], left=1e-4, height=0.62, color=colour(method),
            alpha=0.25 if why else 0.85, hatch="////" if why else None, edgecolor=colour(method),
        )  # fmt: skip
        text = seconds_text(record["seconds"]) + (f", {why}" if why else "")
        inside = record["seconds"] > 1.5
        axis.text(
            record["seconds"] * (0.75 if inside else 1.25), place, text, fontsize=8.5,
            ha="right" if inside else "left", va="center",
            color="white" if inside and not why else "black",
            bbox={"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 1} if why else None,
        )  # fmt: skip
    names = [record["method"] for record in records]
    axis.set_yticks(range(len(records)), names, fontsize=8.5)
    axis.set(xscale="log", xlim=(1e-3, 300), ylim=(len(records) - 6.6, len(records) - 0.4))
    axis.set_xticks([1e-3, 1e-2, 1e-1, 1, 10, 100])
    axis.spines[["top", "right"]].set_visible(False)
    if best is not None:
        name = best["method"]
        axis.set_title(name, color=colour(name), weight="bold", fontsize=12, loc="left")
        for label in axis.get_yticklabels():
            label.set_fontweight("bold" if label.get_text() == name else "normal")


# Height, condition, method, its record and name: the leaves of the tree from the top down.
LEAVES = (
    (5.0, "", "solve", "plain CG", "plain CG"),
    (4.1, "", "solve with error bar", "Krylov belief", "pk.solve"),
    (3.2, "a few, exact", "draws", "CIQ", "CIQ, or CG with\na root of A"),
    (2.3, "many, well conditioned", "draws", "Krylov belief (400)", "pk.inverse"),
    (1.4, "many, ill conditioned,\nand the Jacobian fits", "draws", "exact", "exact Gram"),
    (0.5, "", "log-determinant", "Krylov belief (400)", "trace.logdet"),
)
BRANCHES = {
    "solve": (5.0, "one solution"),
    "solve with error bar": (4.1, "a solution\nand its error"),
    "draws": (2.3, "draws,\nvariances"),
    "log-determinant": (0.5, "log-determinant,\ntrace, evidence"),
}


def tree(result):
    """Questions to ask oneself, and at every leaf a method with what it cost in each situation."""
    figure, axis = plt.subplots(figsize=(13.5, 6), layout="constrained")
    axis.set(xlim=(0.2, 13.7), ylim=(0, 6))
    axis.set_axis_off()
    box(axis, 1.0, 2.75, "What do\nyou need?", "white")
    for height, text in BRANCHES.values():
        join(axis, (1.0, 2.75), (3.0, height))
        box(axis, 3.0, height, text, "white")
    places = [9.9 + 1.1 * column for column in range(len(result["cases"]))]
    for height, condition, question, method, name in LEAVES:
        join(axis, (3.0, BRANCHES[question][0]), (5.6, height))
        join(axis, (5.6, height), (8.2, height))
        if condition:
            box(axis, 5.6, height, condition, "white")
        box(axis, 8.2, height, name, colour(method), dark=True)
        for case, place in zip(result["cases"], places, strict=True):
            found = answers(result, case["case"], question)
            record = next((record for record in found if record["method"] == method), None)
            if record is None:
                continue
            bad = reason(question, record)
            axis.text(
                place, height, seconds_text(record["seconds"]) + ("\n" + bad if bad else ""),
                ha="center", va="center", fontsize=8 if bad else 11,
                color="#AAAAAA" if bad else "black",
            )  # fmt: skip
    for case, place in zip(result["cases"], places, strict=True):
        axis.text(place, 5.65, heading(case), ha="center", va="center", fontsize=8.5)
    figure.savefig(ASSETS / "choosing_tree.png", dpi=100)
    plt.close(figure)


def heading(case):
    fits = "fits" if case["rows"] < case["size"] else "does not fit"
    kappa = f"{case['kappa']:.0e}".replace("e+0", "e")
    return f"Jacobian\n{fits},\ncondition\nnumber {kappa}"


def box(axis, x, y, text, face, dark=False):
    axis.text(
        x, y, text, ha="center", va="center", fontsize=10.5, color="white" if dark else "black",
        bbox={"facecolor": face, "edgecolor": "#555555", "boxstyle": "round,pad=0.45"}, zorder=3,
    )  # fmt: skip


def join(axis, start, end):
    axis.plot(*zip(start, end, strict=True), color="#555555", linewidth=1.2, zorder=1)


def main():
    result = load()
    cases = result["cases"]
    figure, axes = plt.subplots(
        len(cases), len(QUESTIONS), figsize=(17, 12), sharex=True, layout="constrained"
    )
    for row, case in zip(axes, cases, strict=True):
        for axis, question in zip(row, QUESTIONS, strict=True):
            panel(axis, question, answers(result, case["case"], question))
        row[0].annotate(
            situation(case), (-0.52, 0.5), xycoords="axes fraction", ha="center", va="center",
            rotation=90, fontsize=11,
        )  # fmt: skip
    for axis, question in zip(axes[0], QUESTIONS, strict=True):
        heading = HEADINGS[question]
        axis.annotate(
            heading, (0.4, 1.17), xycoords="axes fraction", ha="center", fontsize=14, weight="bold"
        )
    for axis in axes[-1]:
        axis.set_xlabel("CPU seconds, one core")
    bad = Patch(facecolor="#99999940", edgecolor="#999999", hatch="////", label="not good enough")
    figure.legend(handles=[bad], loc="outside lower right", frameon=False)
    figure.savefig(ASSETS / "choosing.png", dpi=95)
    plt.close(figure)
    tree(result)


if __name__ == "__main__":
    main()
