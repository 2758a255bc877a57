"""Writes the tables of docs/performance.md and docs/scaling.md from benchmarks/results/*.json.

`python scripts/tables_performance.py` after bench_performance.py or bench_scale.py.
"""

import json

from tables import RESULTS, made_by, markdown, write


def _times(value):
    return f"{value:.2f} x" if value < 10 else f"{value:.0f} x"


def _seconds(value):
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def lanczos(part):
    """Time of each peer over ours."""
    names = ("bare products", "matfree", "NumPy")
    rows = [
        [
            record["problem"],
            str(record["size"]),
            str(record["steps"]),
            record["dtype"],
            *(
                _times(record["rows"][name]["ratio"]) if name in record["rows"] else "-"
                for name in names
            ),
            _seconds(record["rows"]["pnkrylov"]["seconds"]),
        ]
        for record in part["records"]
    ]
    return markdown(["problem", "d", "m", "dtype", *names, "pnkrylov, absolute"], rows)


def solve(part):
    """Time of each solver over that of our belief."""
    names = ("probnum", "scipy cg", "lineax CG", "bare products")
    rows = [
        [
            f"{record['problem']}, {record['size']}",
            f"{record['residual']:.1e} / {record['peer residual']:.1e}",
            f"{record['steps']} / {record['peer iterations']}",
            *(_times(record["rows"][name]["ratio"]) for name in names),
            _seconds(record["rows"]["pnkrylov"]["seconds"]),
        ]
        for record in part["records"]
    ]
    header = ["spectrum, d", "residual, ours / probnum's", "steps, ours / probnum's"]
    return markdown([*header, *names, "pnkrylov, absolute"], rows)


def trace(part):
    """Time of the fastest peer that is as accurate, over ours."""
    rows = []
    for record in part["records"]:
        own = record["rows"]["pnkrylov"]
        peers = {name: row for name, row in record["rows"].items() if name != "pnkrylov"}
        name, best = min(peers.items(), key=lambda item: item[1]["ratio"])
        sign = "" if record["as accurate"] else "> "
        rows.append(
            [
                record["matrix"],
                f"{own['rmse']:.2g} / {best['rmse']:.2g}",
                f"{own['products']} / {best['products']}",
                name,
                sign + _times(best["ratio"]),
                _seconds(own["seconds"]),
            ]
        )
    header = ["matrix", "error, ours / theirs", "products, ours / theirs", "fastest peer", "time"]
    return markdown([*header, "pnkrylov, absolute"], rows)


def growth(part):
    """Fitted exponents, and the number of steps at which orthogonalisation takes over."""
    rows = []
    for record in part["records"]:
        sizes = list(record["seconds"])
        crossover = f"m = {record['crossover']:.0f}" if "crossover" in record else "-"
        rows.append(
            [
                record["sweep"],
                f"{sizes[0]} to {sizes[-1]}",
                f"{record['exponent']:.2f}",
                crossover,
            ]
        )
    return markdown(["sweep", "range", "exponent of time", "crossover"], rows)


def scale(result):
    """Memory, time and accuracy at eleven million parameters."""
    rows = []
    for record in result["records"]:
        if record["what"] == "solve":
            found = f"relative error {record['relative error']:.1e}"
            found += f", predicted {record['predicted']:.1e}"
        else:
            found = f"trace {record['trace']:.4f} of the exact one, standard error "
            found += f"{record['standard error']:.1e}"
            found += f", bracket up to {record['upper']:.4f}" if "upper" in record else ""
        rows.append(
            [
                f"`{record['what']}`",
                f"{record['size']:,}",
                str(record["rows"]),
                f"{record['peak'] / 2**30:.2f} GiB, {_times(record['peak over needed'])}",
                _seconds(record["seconds"]),
                found,
            ]
        )
    header = ["belief", "d", "rows of the basis", "memory", "time", "against the closed form"]
    return markdown(header, rows) + "\n\n" + made_by(result)


def tables():
    """Name -> text of every table whose result is committed."""
    made = {}
    path = RESULTS / "performance.json"
    if path.exists():
        parts = json.loads(path.read_text())["parts"]
        if "ggn" in parts:
            parts["lanczos"]["records"] += parts["ggn"]["records"]
        for maker in (lanczos, solve, trace, growth):
            if maker.__name__ in parts:
                part = parts[maker.__name__]
                text = maker(part) + "\n\n" + made_by(part)
                made[f"performance_{maker.__name__}"] = text
    path = RESULTS / "scale.json"
    if path.exists():
        made["scale"] = scale(json.loads(path.read_text()))
    return made


if __name__ == "__main__":
    write(tables())
