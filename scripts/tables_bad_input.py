"""Writes docs/tables/bad_input.md: every call of the bad-input suite and what it answered.

`python scripts/tables_bad_input.py` after a change; tests/test_fuzz.py checks every row.
"""

import functools
import pathlib
import re
import sys

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "docs" / "tables" / "bad_input.md"
DTYPE = np.dtype("float64")
HEADER = ["| argument | error |", "|---|---|"]


def row(case, outcome):
    """One line of the table."""
    return f"| `{case.argument}` {case.bad.what} | {_clean(outcome.sentence())} |"


def _clean(text):
    """Without what differs from run to run or between versions, and safe inside a table."""
    kind, _, message = text.partition(": ")
    if "JAX" in message or "jax_" in message:
        return f"{kind}, by JAX"
    text = text if len(text) < 160 else text[:160].rsplit(" ", 1)[0] + " ..."
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    text = re.sub(r"/\S*/", "", text)
    # Digits beyond the third are the machine's.
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")


def tables(targets, run):
    """The table as text: a heading and the rows of every callable."""
    lines = []
    for name in dict.fromkeys(target.name for target in targets):
        lines += ["", f"### `{name}`", "", *HEADER]
        for target in targets:
            cases = target.cases() if target.name == name else []
            lines += [row(case, run(case, DTYPE)) for case in cases]
    return "\n".join(lines[1:])


@functools.cache
def _sections():
    sections, name = {}, None
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            name = line[5:-1]
            sections[name] = []
        elif line.startswith("| ") and line != HEADER[0]:
            sections[name].append(line)
    return sections


def committed(name):
    """The rows of one callable in the committed table."""
    return _sections().get(name, [])


def main():
    sys.path.insert(0, str(ROOT / "tests"))
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    import fuzz_cases
    import test_fuzz

    text = tables(test_fuzz.TARGETS, fuzz_cases.run)
    TABLE.write_text(text + "\n", encoding="utf-8")
    print(f"{TABLE.relative_to(ROOT)}: {text.count(chr(10))} lines")


if __name__ == "__main__":
    main()
