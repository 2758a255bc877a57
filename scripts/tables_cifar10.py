"""Writes docs/tables/cifar10_*.md from benchmarks/results/cifar10*.json (see scripts/tables.py)."""

import json

from tables import RESULTS, made_by, markdown, write
from tables_experiments import (
    FULL_RANK,
    KRYLOV,
    OPTIMA,
    SUBSPACES,
    ablation,
    about,
    costs,
    fixed,
    kl_rows,
    number,
    select,
    sizes,
)

SHIFTED = {
    "lowrank-diagonal + 1/lambda": "lowrank-Diagonal + 1/λ",
    "lowrank-KFAC + 1/lambda": "lowrank-KFAC + 1/λ",
    "lowrankopt + 1/lambda": "lowrankopt + 1/λ",
}
# pslq.md, section 6.2.5 and tables 2 and 3.
PAPER_KL = {
    "paper: Sigma_m, λ ≈ 2,900": ("0.1520", "0.0903", "0.0413", "0.0087", "< 1e-4"),
    "paper: lowrank-KFAC + 1/λ": ("0.0698", "0.0501", "0.0377", "0.0310", "-"),
}
PAPER_FULL_RANK = {
    "diagonal": ("0.3684 / 0.0428 / 0.1836", "0.3609 / 7.5088"),
    "KFAC": ("0.3715 / 0.0471 / 0.1846", "0.3907 / 7.5902"),
    "exact": ("-", "0 / 7.1270"),
    "map": ("0.3762 / 0.0434 / 0.1796", "-"),
}
PAPER_SCORES = {
    ("sigma_m", 20): "0.3639 / 0.0363 / 0.1818",
    ("sigma_m", 100): "0.3601 / 0.0337 / 0.1803",
    ("sigma_m", 500): "0.3573 / 0.0317 / 0.1792",
    ("lowrank-KFAC + 1/lambda", 20): "0.3614 / 0.0371 / 0.1811",
    ("lowrank-KFAC + 1/lambda", 100): "0.3599 / 0.0329 / 0.1805",
    ("lowrank-KFAC + 1/lambda", 500): "0.3595 / 0.0333 / 0.1803",
}


def divergence(result, factor):
    """KL by method and s at one prior precision, and the paper's."""
    records = result["records"]
    names = KRYLOV | OPTIMA | SHIFTED | {n: s for n, s in SUBSPACES.items() if "1/" not in n}
    rows = kl_rows(records, factor, names)
    if factor != 1:
        rows += [[name, *cells] for name, cells in PAPER_KL.items()]
    return markdown(["KL", *(f"s = {size}" for size in sizes(records))], rows)


def predictions(result):
    """Scores at the fitted prior, beside the paper's."""
    records, rows = result["records"], []
    for name, shown in (KRYLOV | SHIFTED | FULL_RANK).items():
        if name in KRYLOV and name not in ("sigma_m", "ours", "krylov + 1/lambda"):
            continue
        own = select(records, method=name, factor=1.0)
        for size in dict.fromkeys(r["s"] for r in own):
            if size not in (None, 20, 100, 500):
                continue
            group = select(own, s=size)
            cells = [fixed([r[key] for r in group]) for key in ("nll", "ece", "brier")]
            kl = {"map": "-", "exact": "0"}.get(name, number([r["kl"] for r in group]))
            trace = "-" if name == "map" else fixed([r["log_trace"] for r in group], 3)
            theirs = PAPER_FULL_RANK.get(name, (PAPER_SCORES.get((name, size), "-"), "-"))
            rows.append([shown, str(size or "-"), *cells, kl, trace, *theirs])
    header = ["method", "s", "NLL", "ECE", "Brier", "KL", "log-trace"]
    return markdown([*header, "paper: NLL / ECE / Brier", "paper: KL / log-trace"], rows)


def real(result, reduced):
    """The runs with the network's own products, beside those of the same key in coordinates."""
    rows = []
    for r in result["records"]:
        own = select(reduced["records"], method="ours, same run", factor=1.0, s=r["s"])
        spread = [x["kl"] for x in own]
        rows.append(
            [
                str(r["s"]),
                f"{r['kl']:.4g}",
                f"{min(spread):.4g} to {max(spread):.4g}",
                str(r["products"]),
                f"{r['seconds']:.0f}",
            ]
        )
    header = [
        "s",
        "KL, the network's products",
        "KL, five seeds in coordinates",
        "products",
        "seconds",
    ]
    return markdown(header, rows)


def tables():
    """Name -> text of every table whose result is committed."""
    path = RESULTS / "cifar10.json"
    if not path.exists():
        return {}
    result = json.loads(path.read_text())
    made = {
        "kl_1": divergence(result, 1.0),
        "kl_20": divergence(result, 20.0),
        "costs": costs(result),
        "ablation": ablation(result),
        "predictions": predictions(result),
    }
    made = {f"cifar10_{name}": f"{text}\n\n{about(result)}" for name, text in made.items()}
    path = RESULTS / "cifar10_real.json"
    if path.exists():
        other = json.loads(path.read_text())
        made["cifar10_real"] = f"{real(other, result)}\n\n{made_by(other)}"
    return made


if __name__ == "__main__":
    write(tables())
