"""The tables in the docs are those of the committed results."""

import pathlib
import runpy

ROOT = pathlib.Path(__file__).parents[1]


def test_tables_are_made_from_the_committed_results():
    made = runpy.run_path(str(ROOT / "scripts" / "tables.py"))["tables"]()
    tables = ROOT / "docs" / "tables"
    for name, text in made.items():
        assert (tables / f"{name}.md").read_text() == text + "\n", f"run scripts/tables.py: {name}"
    assert {"calibration", "cost", "layout"} <= set(made)
