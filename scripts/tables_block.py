"""Writes docs/tables/block_*.md from benchmarks/results/block.json (see scripts/tables.py)."""

import json

import numpy as np
from tables import RESULTS, made_by, markdown, write


def calibration(records):
    """One row for each spectrum, k and number of steps; means over seeds."""
    rows = []
    for case in dict.fromkeys((r["spectrum"], r["k"], r["steps"]) for r in records):
        own = [r for r in records if (r["spectrum"], r["k"], r["steps"]) == case]
        separate = [r["separate"] for r in own]
        ratios = [ratio for r in own for ratio in r["ratios"]]
        rows.append(
            [
                *map(str, case),
                f"{np.mean([r['relative_error'] for r in own]):.0e}",
                f"{np.mean([r['relative_error'] for r in separate]):.0e}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                *(_percent(own, name) for name in ("functionals", "coordinates", "mixed")),
                *(_percent(separate, name) for name in ("functionals", "coordinates")),
                f"{np.mean([r['matvecs'] for r in own]):.0f}",
                f"{np.mean([r['matvecs'] for r in separate]):.0f}",
            ]
        )
    header = ["spectrum", "k", "m", "error, block", "error, separate", "predicted / actual"]
    header += ["functionals %", "coordinates %", "mixed %"]
    header += ["separate: functionals %", "coordinates %", "products, block", "separate"]
    return markdown(header, rows)


def _percent(records, name):
    return f"{100 * np.mean([r[name] for r in records]):.1f}"


def timing(records):
    """One row for each problem and k; ratios are separate over block, measured in turns."""
    rows = []
    for r in records:
        reached = r["equal_error_seconds"] is not None
        rows.append(
            [
                f"{r['problem']}, d = {r['d']}",
                str(r["k"]),
                f"{1e3 * r['block_seconds']:.0f}",
                f"{r['separate_seconds'] / r['block_seconds']:.2f}",
                f"{r['block_error']:.1e}",
                f"{r['separate_error']:.1e}",
                str(r["equal_error_steps"]) if reached else "over 400",
                f"{r['equal_error_seconds'] / r['block_seconds']:.2f}" if reached else "",
            ]
        )
    header = ["operator", "k", "block solve (ms)", "time ratio, 50 steps each", "error, block"]
    header += ["error, separate", "single steps for the block's error", "time ratio, equal error"]
    return markdown(header, rows)


def inverse(records):
    """One row for each spectrum and block size; time ratios are those of single vectors over k."""
    rows = []
    single = {r["spectrum"]: r for r in records if r["k"] == 1}
    for r in records:
        one = single[r["spectrum"]]
        times = [one[f"{kind}_seconds"] / r[f"{kind}_seconds"] for kind in ("dense", "diagonal")]
        rows.append(
            [
                r["spectrum"],
                str(r["k"]),
                f"{np.mean(r['kl']):.2g}",
                f"{100 * r['trace_error']:.2g} %",
                f"{r['matvecs']:.0f}",
                f"{1e3 * r['dense_seconds']:.0f}",
                *(f"{ratio:.2f}" for ratio in times),
            ]
        )
    header = ["spectrum", "k", "KL per dimension", "error of the trace", "products"]
    header += ["dense (ms)", "faster than k = 1, dense", "diagonal"]
    return markdown(header, rows)


def tables():
    """Name -> text of every table whose result is committed."""
    made = {}
    path = RESULTS / "block.json"
    if path.exists():
        result = json.loads(path.read_text())
        made["block_calibration"] = calibration(result["calibration"]) + "\n\n" + made_by(result)
        made["block_time"] = timing(result["timing"]) + "\n\n" + made_by(result)
    path = RESULTS / "block_inverse.json"
    if path.exists():
        result = json.loads(path.read_text())
        made["block_inverse"] = inverse(result["records"]) + "\n\n" + made_by(result)
    return made


if __name__ == "__main__":
    write(tables())
