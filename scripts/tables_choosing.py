"""Writes docs/tables/choosing.md from results/choosing.json: `python scripts/tables_choosing.py`.

Also what counts as good enough for a question, which the picture of docs/choosing.md uses too.
"""

import json

from tables import RESULTS, made_by, markdown, write

QUESTIONS = ("solve", "solve with error bar", "draws", "log-determinant")
# Largest error with which a question counts as answered: relative error of the solution; relative
# error of a draw or of a variance; error of log det A per dimension.
LARGEST_ERROR = {"solve": 1e-5, "draws": 0.05, "log-determinant": 0.01}


def load():
    """The committed result, its parts put together."""
    content = json.loads((RESULTS / "choosing.json").read_text())
    parts = list(content["parts"].values())
    joined = {name: [x for part in parts for x in part[name]] for name in ("cases", "records")}
    return joined | {"settings": content["settings"], "made": [made_by(part) for part in parts]}


def answers(result, case, question):
    """Records of one case and question."""
    return [
        record
        for record in result["records"]
        if record["case"] == case and record["question"] == question
    ]


def reason(question, record):
    """Why a record does not answer its question; empty if it does."""
    # The error of a solution is known, whether or not its residual got as small as was asked.
    if question != "solve" and not record.get("reached", True):
        return "not reached"
    if question == "solve with error bar":
        return ""
    error = record["error"]
    return f"error {error:.1g}" if error > LARGEST_ERROR[question] else ""


def winner(question, records):
    """The fastest record that answers the question."""
    good = [record for record in records if not reason(question, record)]
    return min(good, key=lambda record: record["seconds"], default=None)


def seconds_text(seconds):
    """Two digits with a unit."""
    if seconds < 0.995:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


def cell(question, record, best):
    """Time, products and error of one method."""
    text = seconds_text(record["seconds"])
    text = f"**{text}**" if record is best else text
    if "products" in record:
        text += f", {record['products']} products"
    if record["error"] > 0:
        text += f", {record['error']:.0e}"
    if question == "solve with error bar" and "predicted" in record:
        text += f" (predicted {record['predicted']:.0e})"
    return text + (" (not reached)" if reason(question, record) == "not reached" else "")


def tables():
    """Name -> text."""
    if not (RESULTS / "choosing.json").exists():
        return {}
    result = load()
    rows = []
    for question in QUESTIONS:
        found = {case["case"]: answers(result, case["case"], question) for case in result["cases"]}
        names = dict.fromkeys(r["method"] for records in found.values() for r in records)
        for name in names:
            row = [question, name]
            for records in found.values():
                own = [r for r in records if r["method"] == name]
                best = winner(question, records)
                row.append(cell(question, own[0], best) if own else "-")
            rows.append(row)
    header = ["question", "method", *(heading(case) for case in result["cases"])]
    return {"choosing": markdown(header, rows) + "\n\n" + " ".join(result["made"])}


def heading(case):
    """Size and condition number of a case."""
    fits = "fits" if case["rows"] < case["size"] else "does not fit"
    kappa = f"{case['kappa']:.0e}".replace("e+0", "e")
    return f"{fits}, condition {kappa}"


if __name__ == "__main__":
    write(tables())
