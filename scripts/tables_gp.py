"""Writes docs/tables/gp_*.md from benchmarks/results/gp_*.json.

`python scripts/tables_gp.py` after benchmarks/bench_gp.py or bench_gp_scale.py.
"""

import json

from tables import RESULTS, made_by, markdown, write


def calibration(result):
    """Both parts against the truth, and coverage, per kernel and run length."""
    rows = []
    for r in result["records"]:
        rows.append(
            [
                f"{r['kernel']}, p = {r['p']}",
                str(r["steps"]),
                f"{r['remainder_over_exact']:.2g}",
                f"{100 * r['remainder_within_two']:.0f} %",
                f"{100 * r['mathematical_within_two']:.0f} %",
                f"{r['mean_error']:.2g} ({r['predicted_error']:.2g})",
                f"{r['independent_error']:.2g}",
                f"{100 * r['covered']:.1f} %",
                f"{100 * r['iterative']:.1f} %",
                f"{100 * r['independent']:.1f} %",
                f"{100 * r['exact']:.1f} %",
            ]
        )
    header = ["kernel", "m", "remainder / mathematical", "remainder within 2"]
    header += ["mathematical within 2", "error of the mean (predicted)", "independent start"]
    header += ["covered", "IterGP", "independent start", "exact posterior"]
    count = result["records"][0]["data_sets"]
    note = f"n = {result['num_data']}, {count} data sets per kernel. "
    return markdown(header, rows) + "\n\n" + note + made_by(result)


def peers(result):
    """Scores and times of all methods."""
    rows = [
        [
            r["data"],
            r["method"],
            "" if r["steps"] is None else str(r["steps"]),
            f"{r['rmse']:.4f}",
            f"{r['nll']:.3f}",
            f"{100 * r['covered']:.1f} %",
            str(r["negative"]),
            f"{r['seconds']:.2f}",
        ]
        for r in result["records"]
    ]
    header = ["data", "method", "steps", "RMSE", "NLL", "covered", "negative", "seconds"]
    peer = f" gpytorch {result['gpytorch']}." if result["gpytorch"] else ""
    return markdown(header, rows) + "\n\n" + made_by(result) + peer


def scale(result):
    """n = 50,000: one row per process."""
    rows = []
    for record in result["records"]:
        finished = "rmse" in record
        rows.append(
            [
                record["stage"],
                record["signal"] or "-",
                str(record["resolved"]) if finished else "-",
                str(record["products"]) if finished else "-",
                f"{record['peak_bytes'] / 2**30:.2f} GiB",
                f"{record['seconds']:.0f} s" if finished else "-",
                f"{record['rmse']:.2f}" if finished else "-",
                f"{record['computational'] ** 0.5:.2f}" if finished else "-",
                f"{100 * record['coverage']:.0f} %" if finished else "-",
            ]
        )
    header = ["process", "ended by", "steps", "products", "peak memory", "time", "RMSE"]
    header += ["computational std", "covered at 95 %"]
    return markdown(header, rows) + "\n\n" + made_by(result)


MAKERS = {"gp_calibration": calibration, "gp_peers": peers, "gp_scale": scale}


def tables():
    """Name -> text of every table whose result is committed."""
    found = {name: RESULTS / f"{name}.json" for name in MAKERS}
    return {
        name: MAKERS[name](json.loads(path.read_text()))
        for name, path in found.items()
        if path.exists()
    }


if __name__ == "__main__":
    write(tables())
