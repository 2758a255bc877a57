"""Run every Python block that a reader sees in README.md and docs/, page by page."""

import contextlib
import os
import pathlib
import re
import textwrap
import warnings

import jax
import matplotlib.pyplot as plt
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [
    path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```python" in path.read_text(encoding="utf-8")
]

# The options after the language (title="...", hl_lines="...") are MkDocs', and allowed.
_OPENING = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,})python\b[^`]*$")
# A comment before a block that uses a package which does not keep to strict JAX, and why.
_PROMOTES = re.compile(r"^\s*<!--\s*promotes:(?P<reason>.*?)-->\s*$")


def python_blocks(text: str) -> list[tuple[int, str, bool]]:
    """Return (line number of the first line, code, whether it may promote) of each block.

    Raises:
        ValueError: a block is not closed, or promotes dtypes without a reason.
    """
    lines = text.splitlines()
    blocks, at = [], 0
    while at < len(lines):
        opening = _OPENING.match(lines[at])
        if opening is None:
            at += 1
            continue
        promotes = _PROMOTES.match(lines[at - 1]) if at else None
        if promotes and not promotes["reason"].strip():
            raise ValueError(f"line {at}: say why, <!-- promotes: reason -->")
        start = at + 1
        for at in range(start, len(lines)):
            if lines[at].strip() == opening["fence"]:
                break
        else:
            raise ValueError(f"line {start}: this python block is not closed")
        code = textwrap.dedent("\n".join(lines[start:at]))
        blocks.append((start + 1, code, promotes is not None))
        at += 1
    return blocks


@contextlib.contextmanager
def lenient():
    """JAX as most people run it; other packages warn."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_snippets_of_page(page, tmp_path, monkeypatch):
    if os.environ.get("PNKRYLOV_TEST_X64") == "0":
        pytest.skip("the pages are written for a session with 64-bit floats")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "snippet"}
    with plt.rc_context():
        for line, code, promotes in python_blocks(page.read_text(encoding="utf-8")):
            with lenient() if promotes else contextlib.nullcontext():
                # Empty lines in front make a traceback name the line of the page.
                exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
    plt.close("all")


def test_blocks_are_found_in_order_with_their_lines():
    text = 'a\n\n```python\nx = 1\n```\n\n  ```python title="t"\n  if x:\n      y = 2\n  ```\n'
    assert python_blocks(text) == [(4, "x = 1", False), (8, "if x:\n    y = 2", False)]


def test_only_the_marked_block_may_promote():
    text = "<!-- promotes: p -->\n```python\nx\n```\n```python\ny\n```\n```sh\nz\n```\n"
    assert python_blocks(text) == [(3, "x", True), (6, "y", False)]


def test_a_mark_without_reason_or_an_open_block_is_refused():
    with pytest.raises(ValueError, match="say why"):
        python_blocks("<!-- promotes: -->\n```python\nx\n```\n")
    with pytest.raises(ValueError, match="not closed"):
        python_blocks("```python\nx\n")
