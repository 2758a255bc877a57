"""Writes the tables of docs/experiments.md from benchmarks/results/fashion_mnist*.json.

`python scripts/tables_experiments.py` after benchmarks/experiments/fashion_mnist.py.
"""

import json
import math

from tables import RESULTS, made_by, markdown, write

# Our names -> those that a reader sees.
KRYLOV = {
    "sigma_m": "Sigma_m, the papers' layout",
    "sigma_m, 1 probe": "Sigma_m, one probe instead of eight",
    "ours, same run": "ours, `num_steps=s`",
    "ours, 8 probes": "ours, `budget=`",
    "ours": "ours, `budget=, num_probes=1`",
    "ours, no probes": "ours, bulk from the run itself",
    "ours, along": "ours, bulk along Jacobians",
    "ours, from Jacobians": "ours, started at Jacobians",
    "krylov + 1/lambda, s + 20": "Krylov + 1/λ, s + 20 products",
    "krylov + 1/lambda": "Krylov + 1/λ, all products",
}
OPTIMA = {
    "eigen + 1/lambda": "eigenvectors + 1/λ, s of them",
    "eigen + trace": "eigenvectors + exact mean variance, s of them",
    "eigen + 1/lambda, all": "eigenvectors + 1/λ, one per product",
}
SUBSPACES = {
    "subset-magnitude": "subset-Magnitude",
    "lowrank-diagonal": "lowrank-Diagonal",
    "lowrank-KFAC": "lowrank-KFAC",
    "lowrankopt-GGN": "lowrankopt-GGN",
    "lowrankopt + 1/lambda": "lowrankopt + 1/λ",
}
FULL_RANK = {
    "diagonal": "diagonal",
    "KFAC": "KFAC",
    "ELLA": "ELLA",
    "swag": "SWAG",
    "exact": "exact",
    "map": "MAP",
}
ABLATION = {
    "ours, same run": "look-ahead resolved, measured bulk (ours)",
    "krylov + 1/lambda, s + 20": "look-ahead resolved, 1/λ in the bulk",
    "sigma_m": "coupling, measured bulk (Sigma_m)",
    "sigma_m, 1/lambda bulk": "coupling, 1/λ in the bulk",
    "sigma_m, no coupling": "no coupling, measured bulk",
    "krylov + 1/lambda, s": "no coupling, 1/λ in the bulk",
    "krylov alone, s + 20": "look-ahead resolved, nothing in the bulk",
}
# The Krylov methods in the table of predictions.
SHOWN = ("sigma_m", "ours", "ours, along", "krylov + 1/lambda")
# pslq.md, tables 1 and 3: (NLL, ECE, Brier) by method and s, and (KL, log-trace).
PAPER_SCORES = {
    ("subset-magnitude", 120): ("0.2609", "0.0273", "0.1331"),
    ("subset-magnitude", 1000): ("0.2584", "0.0254", "0.1328"),
    ("lowrank-diagonal", 120): ("0.2600", "0.0274", "0.1330"),
    ("lowrank-diagonal", 1000): ("0.2559", "0.0237", "0.1324"),
    ("lowrank-KFAC", 120): ("0.2562", "0.0226", "0.1323"),
    ("lowrank-KFAC", 1000): ("0.2528", "0.0190", "0.1317"),
    ("lowrankopt-GGN", 120): ("0.2541", "0.0189", "0.1319"),
    ("lowrankopt-GGN", 1000): ("0.2518", "0.0163", "0.1315"),
    ("lowrankopt + 1/lambda", 120): ("0.3519", "0.1155", "0.1655"),
    ("lowrankopt + 1/lambda", 1000): ("0.3509", "0.1142", "0.1652"),
    ("sigma_m", 120): ("0.2543", "0.0224", "0.1323"),
    ("sigma_m", 230): ("0.2520", "0.0187", "0.1317"),
    ("sigma_m", 450): ("0.2507", "0.0165", "0.1314"),
    ("sigma_m", 670): ("0.2502", "0.0151", "0.1313"),
    ("sigma_m", 1000): ("0.2499", "0.0168", "0.1313"),
    ("diagonal", None): ("0.2536", "0.0152", "0.1331"),
    ("KFAC", None): ("0.2604", "0.0260", "0.1344"),
    ("ELLA", None): ("0.2543", "0.0191", "0.1320"),
    ("swag", None): ("0.2655", "0.0184", "0.1391"),
    ("exact", None): ("0.2498", "0.0154", "0.1312"),
    ("map", None): ("0.2613", "0.0275", "0.1332"),
}
PAPER_KL = {
    ("sigma_m", 230): ("0.5521", "-"),
    ("sigma_m", 1000): ("0.0160", "8.2429"),
    ("lowrankopt-GGN", 1000): ("1.44", "-"),
    ("lowrankopt + 1/lambda", 1000): ("4.55", "-"),
    ("diagonal", None): ("5.2486", "7.9667"),
    ("KFAC", None): ("0.9755", "8.5422"),
    ("ELLA", None): ("7.8998", "7.2130"),
    ("exact", None): ("0", "8.1751"),
}


def select(records, **wanted):
    """The records whose fields have these values."""
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def mean_and_error(values):
    """Mean over seeds and its standard error, None for a single value."""
    mean = sum(values) / len(values)
    if len(values) == 1 or not math.isfinite(mean):
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, (variance / len(values)) ** 0.5


def number(values, digits=3):
    """`mean ± error`."""
    mean, error = mean_and_error(values)
    if not math.isfinite(mean):
        return "∞" if mean > 0 else "-"
    text = f"{mean:.{digits}g}"
    return text if error is None else f"{text} ± {error:.1g}"


def fixed(values, digits=4):
    """The same with a fixed number of decimals."""
    mean, error = mean_and_error(values)
    text = f"{mean:.{digits}f}" if math.isfinite(mean) else "-"
    return text if error is None else f"{text} ± {error:.{digits}f}"


def sizes(records):
    return sorted({r["s"] for r in records if r["s"] is not None})


def _factors(records):
    """Prior precisions, relative to the fitted one, at which Krylov methods were judged."""
    return sorted({r["factor"] for r in select(records, method="ours")})


def kl_rows(records, factor, names):
    rows = []
    for name, shown in names.items():
        own = select(records, method=name, factor=factor)
        if own:
            by_size = [[r["kl"] for r in select(own, s=size)] for size in sizes(records)]
            rows.append([shown, *(number(values) if values else "-" for values in by_size)])
    return rows


def divergence(result, factor):
    """Predictive KL by method and s."""
    records = result["records"]
    rows = kl_rows(records, factor, KRYLOV | OPTIMA | SUBSPACES)
    return markdown(["KL", *(f"s = {size}" for size in sizes(records))], rows)


def costs(result):
    """Products and stored vectors of the Krylov methods at the fitted prior."""
    records = result["records"]
    rows = []
    for name, shown in KRYLOV.items():
        cells = []
        for size in sizes(records):
            own = select(records, method=name, factor=1.0, s=size)
            if not own:
                continue
            products, stored = (
                mean_and_error([r[k] for r in own])[0] for k in ("products", "stored")
            )
            cells.append(f"{products:.0f} / {stored:.0f}")
        if cells:
            rows.append([shown, *cells])
    return markdown(["products / stored vectors", *(f"s = {x}" for x in sizes(records))], rows)


def ratios(result):
    """Ours over the papers' layout, over Krylov + 1/lambda and over the optimum."""
    records = result["records"]
    columns = {
        "`num_steps=s` / Sigma_m": ("ours, same run", "sigma_m"),
        "one probe / Sigma_m": ("ours", "sigma_m"),
        "one probe / Sigma_m, one probe": ("ours", "sigma_m, 1 probe"),
        "one probe / Krylov + 1/λ": ("ours", "krylov + 1/lambda"),
        "from the run / Krylov + 1/λ": ("ours, no probes", "krylov + 1/lambda"),
        "along / Sigma_m": ("ours, along", "sigma_m"),
        "along / Krylov + 1/λ": ("ours, along", "krylov + 1/lambda"),
        "along / eigenvectors + 1/λ": ("ours, along", "eigen + 1/lambda, all"),
    }
    rows = []
    for factor in _factors(records):
        for size in sizes(records):

            def mean(name, key="kl", factor=factor, size=size):
                own = select(records, method=name, factor=factor, s=size)
                return mean_and_error([r[key] for r in own])[0] if own else math.nan

            shift = factor * result["problem"]["prior_precision"]
            cells = [mean(above) / mean(below) for above, below in columns.values()]
            cells = ["-" if math.isnan(x) else f"{x:.3f}" for x in cells]
            bulks = [mean(name, "rest") * shift for name in ("ours", "ours, along")]
            rows.append([f"{factor:g}", str(size), *(f"{x:.3f}" for x in bulks), *cells])
    return markdown(["λ / fitted", "s", "λω", "λω along", *columns], rows)


def ablation(result):
    """KL with the coupling, the bulk and the look-ahead removed."""
    rows = kl_rows(result["records"], 1.0, ABLATION)
    header = ["KL at equal runs", *(f"s = {size}" for size in sizes(result["records"]))]
    return markdown(header, rows)


def predictions(result, *, paper):
    """Scores at the fitted prior, beside the paper's."""
    records = result["records"]
    rows = []
    names = KRYLOV | SUBSPACES | FULL_RANK
    for name, shown in names.items():
        own = select(records, method=name, factor=1.0)
        for size in dict.fromkeys(r["s"] for r in own):
            if name in KRYLOV and name not in SHOWN:
                continue
            if size not in (None, 120, 230, 1000) or (name in SUBSPACES and size == 230):
                continue
            group = select(own, s=size)
            cells = [fixed([r[key] for r in group]) for key in ("nll", "ece", "brier")]
            cells += [number([r["kl"] for r in group]), fixed([r["log_trace"] for r in group], 3)]
            theirs = [" / ".join(PAPER_SCORES.get((name, size), ["-"]))]
            theirs += [" / ".join(PAPER_KL.get((name, size), ["-"]))]
            cells[3] = {"map": "-", "exact": "0"}.get(name, cells[3])
            rows.append([shown, str(size or "-"), *cells, *(theirs if paper else [])])
    header = ["method", "s", "NLL", "ECE", "Brier", "KL", "log-trace"]
    header += ["paper: NLL / ECE / Brier", "paper: KL / log-trace"] if paper else []
    return markdown(header, rows)


def about(result):
    """What the tables were made from."""
    problem = result["problem"]
    return (
        f"{problem['parameters']:,} parameters, test accuracy {100 * problem['accuracy']:.1f} %, "
        f"λ = {problem['prior_precision']:.0f}, GGN of {problem['examples']:,} training points, "
        f"{problem['points']} test points. "
    ) + made_by(result)


def tables():
    """Name -> text of every table whose result is committed."""
    made = {}
    for name, short in (("fashion_mnist", "fashion"), ("fashion_mnist_full", "fashion_full")):
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        parts = {"ratios": ratios(result), "costs": costs(result), "ablation": ablation(result)}
        parts["predictions"] = predictions(result, paper=short == "fashion")
        for factor in _factors(result["records"]):
            parts[f"kl_{factor:g}".replace(".", "")] = divergence(result, factor)
        for part, text in parts.items():
            made[f"{short}_{part}"] = f"{text}\n\n{about(result)}"
    return made


if __name__ == "__main__":
    write(tables())
