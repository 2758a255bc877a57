"""Run notebooks/*.ipynb in the order of their names; the executed copies go to build/notebooks/.

The committed notebooks are left alone; `--write` replaces their outputs instead, at full size.
"""

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_PER_CELL = 600  # seconds


def main(write: bool) -> int:
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    if not notebooks:
        print("notebooks/: THERE ARE NO NOTEBOOKS, so none was run")
        return 0
    if not write:
        os.environ.setdefault("PNKRYLOV_NOTEBOOK_SIZE", "small")
        # As tests/conftest.py does: they compile for minutes what runs for moments.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    target = ROOT / ("notebooks" if write else "build/notebooks")
    target.mkdir(parents=True, exist_ok=True)
    for path in notebooks:
        start = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        resources = {"metadata": {"path": str(path.parent)}}
        NotebookClient(notebook, timeout=TIMEOUT_PER_CELL, resources=resources).execute()
        nbformat.write(notebook, target / path.name)
        print(f"{path.name}: ran in {time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(write="--write" in sys.argv[1:]))
