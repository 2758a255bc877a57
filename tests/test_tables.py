"""The tables in the docs are those of the committed results."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import tables  # noqa: E402
import tables_block  # noqa: E402
import tables_choosing  # noqa: E402
import tables_cifar10  # noqa: E402
import tables_experiments  # noqa: E402
import tables_gp  # noqa: E402
import tables_performance  # noqa: E402

MODULES = [
    tables,
    tables_block,
    tables_choosing,
    tables_cifar10,
    tables_experiments,
    tables_gp,
    tables_performance,
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_tables_are_made_from_the_committed_results(module):
    made = module.tables()
    assert made
    for name, text in made.items():
        committed = (ROOT / "docs" / "tables" / f"{name}.md").read_text()
        assert committed == text + "\n", f"run scripts/{module.__name__}.py: {name}"
