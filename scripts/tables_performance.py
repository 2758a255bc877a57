"""Writes the tables of docs/performance.md and docs/scaling.md from benchmarks/results/*.json.

`python scripts/tables_performance.py` after bench_performance.py, bench_scale.py or
bench_storage_precision.py.
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
    """Time of each solver over that of our belief; probnum's also over two lower times."""
    names = ("probnum", "scipy cg", "lineax CG", "bare products")
    rows = [
        [
            f"{record['problem']}, {record['size']}",
            f"{record['residual']:.1e} / {record['peer residual']:.1e}",
            f"{record['steps']} / {record['peer iterations']}",
            *(_times(record["rows"][name]["ratio"]) for name in names),
            *(
                _times(record["rows"]["probnum"]["ratio"] / record["rows"][name]["ratio"])
                for name in ("under jit", "bare products")
            ),
            _seconds(record["rows"]["pnkrylov"]["seconds"]),
        ]
        for record in part["records"]
    ]
    header = ["spectrum, d", "residual, ours / probnum's", "steps, ours / probnum's"]
    probnum = ["probnum over ours under jit", "probnum over bare products"]
    return markdown([*header, *names, *probnum, "pnkrylov, absolute"], rows)


def trace(part):
    """Time of the fastest peer that is as accurate, over ours."""
    rows = []
    for record in part["records"]:
        own, name = record["rows"]["pnkrylov"], record["fastest"]
        best = record["rows"][name]
        sign = "" if record["as accurate"] else "> "
        rows.append(
            [
                record["matrix"],
                f"{own['products']} / {best['products']}",
                f"{own['rmse']:.2g} / {best['rmse']:.2g}",
                name,
                sign + _times(best["ratio"]),
                _seconds(own["seconds"]),
            ]
        )
    header = ["matrix", "products, ours / theirs", "error, ours / theirs", "fastest peer", "time"]
    return markdown([*header, "pnkrylov, absolute"], rows)


def eigen(part):
    """Time of scipy's eigsh over that of a Lanczos run and its Ritz pairs."""
    rows = [
        [
            record["what"],
            f"{record['ours']['residual']:.1e} / {record['theirs']['residual']:.1e}",
            f"{record['ours']['products']} / {record['theirs']['products']}",
            _times(record["rows"]["eigsh"]["ratio"]),
            _seconds(record["rows"]["pnkrylov"]["seconds"]),
        ]
        for record in part["records"]
    ]
    header = ["pairs", "residual, ours / theirs", "products, ours / theirs", "eigsh"]
    return markdown([*header, "pnkrylov, absolute"], rows)


# What the two sides give, in the words of the table: measure -> (label, format).
_GIVES = {
    "residual": ("residual", ".1e"),
    "orthogonality": ("loss of orthogonality", ".0e"),
    "error": ("error", ".2g"),
    "trace": ("trace over the exact one", ".2f"),
    "variance": ("total variance over the exact one", ".2f"),
}


def _gives(record):
    """Every measure that both sides have, ours first."""
    ours, theirs = record.get("ours", {}), record.get("theirs", {})
    return "; ".join(
        f"{label} {ours[name]:{form}} / {theirs[name]:{form}}"
        for name, (label, form) in _GIVES.items()
        if name in ours and name in theirs
    )


def gp(part):
    """Time of linear_operator over ours."""
    rows = [
        [
            record["what"],
            _gives(record),
            ("" if record.get("reached", True) else "< ")
            + _times(record["rows"]["linear_operator"]["ratio"]),
            _seconds(record["rows"]["pnkrylov"]["seconds"]),
        ]
        for record in part["records"]
    ]
    header = ["what", "gives, ours / theirs", "linear_operator", "pnkrylov, absolute"]
    return markdown(header, rows)


def ciq(part):
    """Time of linear_operator's quadrature over ours; "-" where it is nowhere as exact."""
    rows = []
    for record in part["records"]:
        ours, theirs = record["ours"], record.get("theirs")
        compared = ["-", "-", "-", "-"]
        if theirs:
            compared = [
                f"{ours['error']:.1e} / {theirs['error']:.1e}",
                f"{ours['products']} / {theirs['products']}",
                _times(record["rows"]["linear_operator"]["ratio"]),
                _seconds(record["rows"]["pnkrylov"]["seconds"]),
            ]
        rows.append([record["what"], str(record["rows of b"]), *compared])
    header = ["right-hand sides", "how many", "error, ours / theirs", "products, ours / theirs"]
    return markdown([*header, "linear_operator", "pnkrylov, absolute"], rows)


def laplace(part):
    """Time of curvlinops and laplace-torch over ours."""
    rows = []
    for record in part["records"]:
        if "rows" not in record:
            continue
        (peer,) = record["rows"].keys() - {"pnkrylov"}
        what, kinds = record["what"], ""
        if "kind" in record.get("ours", {}):
            kinds = f"{record['ours']['kind']} / {record['theirs']['kind']}"
            peer += f" ({record['theirs']['backend']})"
        (ratio,) = (row["ratio"] for name, row in record["rows"].items() if name != "pnkrylov")
        rows.append(
            [
                record["network"],
                what,
                kinds or "-",
                _gives(record) or "the same product",
                peer,
                _times(ratio),
                _seconds(record["rows"]["pnkrylov"]["seconds"]),
            ]
        )
    header = ["network", "what", "kind, ours / theirs", "gives, ours / theirs", "peer", "time"]
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


def storage_precision(result):
    """Memory, time and accuracy of 16-bit Krylov vectors, against float32."""
    rows, plain = [], None
    for record in result["records"]:
        if (record["stored"], record["kind"]) == ("float32", "plain"):
            plain = record
        rows.append(
            [
                f"{record['operator']}, {record['size']:,}",
                f"{record['stored']}, {record['kind']}",
                f"{record['basis'] / 2**20:.0f} MB",
                f"{record['memory'] / plain['memory']:.2f} x",
                f"{record['seconds'] / plain['seconds']:.2f} x",
                f"{record['off-diagonal']:.0e}",
                f"{record['mean error']:.2g}",
                f"{record['divergence'] - plain['divergence']:+.2g} of {plain['divergence']:.4g}",
            ]
        )
    header = ["operator, d", "stored, re-orthogonalised", "basis", "memory", "time"]
    header += ["loss of orthogonality", "error of the mean", "divergence of the inverse"]
    return markdown(header, rows) + "\n\n" + made_by(result)


def tables():
    """Name -> text of every table whose result is committed."""
    made = {}
    path = RESULTS / "performance.json"
    if path.exists():
        parts = json.loads(path.read_text())["parts"]
        if "ggn" in parts:
            parts["lanczos"]["records"] += parts["ggn"]["records"]
        for maker in (lanczos, solve, trace, eigen, gp, ciq, laplace, growth):
            if maker.__name__ in parts:
                part = parts[maker.__name__]
                text = maker(part) + "\n\n" + made_by(part)
                made[f"performance_{maker.__name__}"] = text
    for maker in (scale, storage_precision):
        path = RESULTS / f"{maker.__name__}.json"
        if path.exists():
            made[maker.__name__] = maker(json.loads(path.read_text()))
    return made


if __name__ == "__main__":
    write(tables())
