"""Writes docs/tables/*.md from benchmarks/results/*.json: no number in the docs is typed by hand.

`python scripts/tables.py` after a benchmark; tests/test_tables.py checks that they agree.
"""

import json
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = ROOT / "docs" / "tables"


def markdown(header, rows):
    """A table; numbers are formatted by the caller."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def commit_name(commit):
    """A short name that still says whether the tree had other changes."""
    return commit[:12] + "+changes" * commit.endswith("+changes")


def made_by(result):
    """The line under every table: what made it."""
    made = result["provenance"]
    return (
        f"Made by `{made['command']}` at commit `{commit_name(made['commit'])}` on {made['date']}, "
        f"{made['machine']}, Python {made['python']}, jax {made['versions']['jax']}."
    )


def calibration(result):
    """Two tables: a summary per spectrum and size, and every case."""
    records = result["records"]
    summary, full = [], []
    for scale in ("lookahead", "prior"):
        for spectrum in dict.fromkeys(r["spectrum"] for r in records):
            for size in dict.fromkeys(r["size"] for r in records):
                own = _matching(records, scale=scale, spectrum=spectrum, size=size)
                own = [r for r in own if r["relative_error"] > 1e-8]
                summary.append([f'`"{scale}"`', spectrum, str(size), *_calibration_row(own)])
    keys = ("size", "spectrum", "rhs", "steps")
    cases = dict.fromkeys(tuple(r[key] for key in keys) for r in records)
    for case in cases:
        row = [str(x) for x in case]
        for scale in ("lookahead", "prior"):
            own = _matching(records, scale=scale, **dict(zip(keys, case, strict=True)))
            if scale == "lookahead":
                row += [f"{_mean(own, 'relative_error'):.0e}", f"{_mean(own, 'lookahead'):.0f}"]
                row += [f"{_mean(own, 'energy_ratio'):.2f}"]
            row += [
                f"{_mean(own, 'norm_ratio'):.2g}",
                f"{_mean(own, 'z_per_degree'):.2g}",
                f"{100 * _mean(own, 'functional_coverage'):.0f}",
                f"{100 * _mean(own, 'coordinate_coverage'):.0f}",
            ]
        full.append(row)
    header = ["scale", "spectrum", "d", "cases", "2-norm ratio, range", "within [0.5, 2]"]
    header += ["functionals covered", "coordinates covered", "look-ahead"]
    every = ["d", "spectrum", "v", "m", "relative error", "look-ahead", "A-norm ratio"]
    for name in ("look-ahead", "prior"):
        every += [f"{name}: ratio", "Z / (d - m)", "functionals %", "coordinates %"]
    return {
        "calibration": markdown(header, summary) + "\n\n" + made_by(result),
        "calibration_all": markdown(every, full),
    }


def _calibration_row(own):
    ratios = [r["norm_ratio"] for r in own]
    good = sum(0.5 <= ratio <= 2 for ratio in ratios)
    return [
        str(len(own)),
        f"{min(ratios):.2g} to {max(ratios):.2g}",
        f"{100 * good / len(own):.0f} %",
        f"{100 * _mean(own, 'functional_coverage'):.1f} %",
        f"{100 * _mean(own, 'coordinate_coverage'):.1f} %",
        f"{_mean(own, 'lookahead'):.0f}",
    ]


def _matching(records, **wanted):
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def _mean(records, key):
    return sum(r[key] for r in records) / len(records)


def cost(result):
    """Time of a run as a multiple of its bare products."""
    rows = [
        [name, f"{row['ratio']:.2f} x", row["floor"], f"{1e3 * row['seconds']:.1f} ms"]
        for name, row in result["rows"].items()
    ]
    bare, peer = result["rows"]["bare"]["seconds"], result["probnum"]
    name = f"probnum problinsolve ({peer['iterations']} iterations, its own stopping rule)"
    rows.append(
        [name, f"{peer['seconds'] / bare:.1f} x", "bare", f"{1e3 * peer['seconds']:.0f} ms"]
    )
    header = ["d = 2000, m = 100, float64", "time", "relative to", "median"]
    return {"cost": markdown(header, rows) + "\n\n" + made_by(result)}


def layout(result):
    """Mean predictive KL of the layouts, averaged over seeds."""
    names = ("paper", "resolve-all", "krylov + 1/damping", "eigen + 1/damping")
    rows = []
    for damping, steps in dict.fromkeys((r["damping"], r["steps"]) for r in result["records"]):
        own = _matching(result["records"], damping=damping, steps=steps)
        means = [_mean(own, name) for name in names]
        saved = f"{100 * (1 - means[1] / means[0]):.0f} %"
        rows.append([f"{damping:g}", str(steps), *(f"{x:.3g}" for x in means), saved])
    header = ["damping", "s", *names, "resolve-all saves"]
    return {"layout": markdown(header, rows) + "\n\n" + made_by(result)}


def ciq_vs_linear_operator(result):
    """Our time and products over those of linear_operator, at an error that is no larger."""
    rows = [
        [
            row["setting"].removesuffix(", ciq"),
            row["method"],
            str(row["num_rhs"]),
            f"{row['error']:.1e} / {row['peer_error']:.1e}",
            f"{row['time_ratio']:.2f} x",
            f"{row['products']} / {row['peer_products']}",
        ]
        for row in result["rows"]
    ]
    header = ["setting", "method", "right-hand sides", "error, ours / theirs", "time"]
    made = (
        f"Made by `{result['command']}` at commit `{commit_name(result['commit'])}` "
        f"on {result['date']}, "
        f"{result['cpu']}, {result['cores_used']} core used, jax {result['versions']['jax']}, "
        f"linear_operator {result['versions']['linear_operator']}, "
        f"torch {result['versions']['torch']}."
    )
    table = markdown([*header, "products, ours / theirs"], rows)
    return {"ciq_vs_linear_operator": table + "\n\n" + made}


def trace_preconditioned(result):
    """Root-mean-square relative errors with and without a preconditioner."""
    rows = [
        [
            row["function"],
            str(row["budget"]),
            *(f"{100 * row[who]['error']:.2g} %" for who in ("plain", "preconditioned")),
            *(f"{100 * row[who]['coverage']:.0f} %" for who in ("plain", "preconditioned")),
        ]
        for row in result["records"]
    ]
    header = ["estimate", "products", "error", "error, with P", "covered", "covered, with P"]
    return {"trace_preconditioned": markdown(header, rows) + "\n\n" + made_by(result)}


MAKERS = {
    "calibration": calibration,
    "ciq_vs_linear_operator": ciq_vs_linear_operator,
    "cost": cost,
    "layout": layout,
    "trace_preconditioned": trace_preconditioned,
}


def tables():
    """Name -> text of every table whose result is committed."""
    made = {}
    for name, maker in MAKERS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            made |= maker(json.loads(path.read_text()))
    return made


def write(made):
    """Writes tables into docs/tables."""
    TABLES.mkdir(exist_ok=True)
    for name, text in made.items():
        (TABLES / f"{name}.md").write_text(text + "\n")
        print(TABLES / f"{name}.md")


if __name__ == "__main__":
    write(tables())
