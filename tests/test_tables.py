"""The tables in the docs are those of the committed results."""

import pathlib
import runpy

ROOT = pathlib.Path(__file__).parents[1]


def test_tables_are_made_from_the_committed_results():
    made = runpy.run_path(str(ROOT / "scripts" / "tables.py"))["tables"]()
    committed = {path.stem: path.read_text() for path in (ROOT / "docs" / "tables").glob("*.md")}
    assert committed == {name: text + "\n" for name, text in made.items()}
    assert {"calibration", "cost", "layout"} <= set(made)
