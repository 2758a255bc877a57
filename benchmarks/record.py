"""Writes a benchmark's result with what made it: command, commit, machine, versions and date."""

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
from importlib import metadata

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("pnkrylov", "jax", "jaxlib", "equinox", "numpy", "scipy")


def provenance(packages=()):
    """Everything a reader needs to make the numbers again."""
    versions = {}
    for name in (*PACKAGES, *packages):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "source tree"
    return {
        "command": " ".join([pathlib.Path(sys.executable).name, *sys.argv]),
        "commit": _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain") else ""),
        "date": datetime.date.today().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {len(os.sched_getaffinity(0))} used",
        "python": platform.python_version(),
        "versions": versions,
    }


def save(name, content, packages=()):
    """Writes `results/<name>.json` and returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    text = json.dumps({"provenance": provenance(packages), **content}, indent=1, allow_nan=True)
    path.write_text(text + "\n")
    return path


def _git(*arguments):
    run = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS.parent)
    return run.stdout.strip() or ("unknown" if arguments[0] == "rev-parse" else "")


def _processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
