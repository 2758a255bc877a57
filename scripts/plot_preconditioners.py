"""Draws docs/assets/preconditioners.png and writes docs/tables/preconditioners.md.

`python scripts/plot_preconditioners.py` after benchmarks/bench_preconditioners.py.
"""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from tables import made_by, markdown

ROOT = pathlib.Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "preconditioners.json"


def summary(records):
    """{(problem, family): mean over the seeds, geometric for what spans decades}."""
    rows = {}
    for problem, family in dict.fromkeys((r["problem"], r["family"]) for r in records):
        own = [r for r in records if (r["problem"], r["family"]) == (problem, family)]
        row = {key: np.mean([r[key] for r in own]) for key in ("setup_products", "floats")}
        for key in ("kl_exact_to_belief", "kl_with_exact_trace", "kappa"):
            row[key] = np.exp(np.mean(np.log([r[key] for r in own])))
        done = all(r["ciq_converged"] for r in own)
        row["iterations"] = np.mean([r["msminres_iterations"] for r in own]) if done else None
        row["products"] = np.mean([r["ciq_products"] for r in own]) if done else None
        row["seeds"] = len(own)
        rows[problem, family] = row
    return rows


def table(result):
    """All families on both problems, losers included."""
    rows, header = [], ["problem", "preconditioner", "seeds", "set-up, products"]
    header += ["numbers stored / d"]
    header += ["KL per dimension", "over none", "with exact trace", "over none"]
    header += ["condition number", "msMINRES iterations", "CIQ products"]
    found, sizes = summary(result["records"]), {"e": 1000, "G": 1210}
    for (problem, family), row in found.items():
        none = found[problem, "none"]
        cells = [problem, family, str(row["seeds"]), f"{row['setup_products']:.3g}"]
        cells.append(f"{row['floats'] / sizes[problem[0]]:.0f}")
        for key in ("kl_exact_to_belief", "kl_with_exact_trace"):
            ratio = row[key] / none[key]
            mark = "**" if ratio <= 0.1 else ""
            cells += [f"{row[key]:.2g}", f"{mark}{ratio:.2g}{mark}"]
        cells.append(f"{row['kappa']:.2g}")
        for key in ("iterations", "products"):
            cells.append("not within 1000" if row[key] is None else f"{row[key]:.0f}")
        rows.append(cells)
    commands = "; ".join(f"`{command}`" for command in result["commands"])
    return f"{markdown(header, rows)}\n\n{made_by(result)} All commands: {commands}."


def picture(result):
    """KL per dimension with and without the error of the trace, one panel for each problem."""
    found = summary(result["records"])
    problems = list(dict.fromkeys(problem for problem, _ in found))
    figure, panels = plt.subplots(1, len(problems), figsize=(12, 5), layout="constrained")
    for axes, problem in zip(panels, problems, strict=True):
        own = {family: row for (name, family), row in found.items() if name == problem}
        order = sorted(own, key=lambda family: -own[family]["kl_with_exact_trace"])
        y = np.arange(len(order))
        for key, colour, marker, label in (
            ("kl_exact_to_belief", "#D55E00", "s", "belief"),
            ("kl_with_exact_trace", "#0072B2", "o", "its trace made exact"),
        ):
            axes.plot([own[f][key] for f in order], y, marker, color=colour, label=label)
        none = own["none"]["kl_with_exact_trace"]
        axes.axvline(none / 10, color="0.6", linestyle=":", label="a tenth of none (exact trace)")
        axes.set(xscale="log", title=problem, xlabel="KL per dimension", yticks=y)
        axes.set_yticklabels(order, fontsize=8)
        axes.legend(fontsize=8, loc="best")
    figure.savefig(ROOT / "docs" / "assets" / "preconditioners.png", dpi=120)


def main():
    """Writes both."""
    result = json.loads(RESULT.read_text())
    (ROOT / "docs" / "tables" / "preconditioners.md").write_text(table(result) + "\n")
    picture(result)


if __name__ == "__main__":
    main()
