"""Rows timed in turns on one core, and peers that live in a process of their own.

A ratio is the median of the ratios within a round, so that a slow moment of the machine hits all
rows alike. The first call of every row, which compiles, is kept apart.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import ClassVar

# One thread for everybody; before the first import that reads it. An old OpenBLAS kernel, which
# some machines force by these variables, would favour us.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from record import RESULTS, provenance  # noqa: E402

HERE = pathlib.Path(__file__).parent
PACKAGES = ("matfree", "probnum", "lineax", "traceax")


def timed(row):
    """Seconds of one call; a row of another process says itself how long it took."""
    if isinstance(row, PeerRow):
        return row.seconds()
    started = time.perf_counter()
    jax.block_until_ready(row())
    return time.perf_counter() - started


def in_turns(rows, rounds, ready=()):
    """Name -> seconds of the first call, and of every round after it.

    Rows in `ready` were compiled ahead and have no first call (None).
    """
    seconds = {name: [None if name in ready else timed(row)] for name, row in rows.items()}
    for _ in range(rounds):
        for name, row in rows.items():
            seconds[name].append(timed(row))
    return seconds


def against(seconds, ours):
    """Name -> median seconds, the median of the ratios to ours within a round, the first call."""
    own = np.array(seconds[ours][1:])
    return {
        name: {
            "seconds": float(np.median(values[1:])),
            "ratio": float(np.median(np.array(values[1:]) / own)),
            "first": values[0],
        }
        for name, values in seconds.items()
    }


class Peer:
    """A script of rows that runs under another Python: npz in, then one call per line of JSON.

    See peers_serve.py for its side. Use it as a context manager; the process ends with the block.
    """

    # Of every peer that was started, for the record.
    versions: ClassVar[dict] = {}

    def __init__(self, python, script, arrays):
        self._folder = tempfile.TemporaryDirectory()
        source = pathlib.Path(self._folder.name) / "given.npz"
        np.savez(source, **arrays)
        self._process = subprocess.Popen(
            [python, str(HERE / script), str(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Libraries warn about each other, and that conjugate gradients were cut short.
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
        )
        self.versions.update(self._answer())

    def call(self, row, *arguments):
        """Calls a row there: `{"seconds": ..., "value": what it returned, as numbers}`."""
        self._send({"row": row, "arguments": arguments})
        return self._answer()

    def array(self, row, *arguments):
        """Calls a row there and brings the arrays that it returned, by name."""
        path = pathlib.Path(self._folder.name) / "made.npz"
        self._send({"row": row, "arguments": arguments, "into": str(path)})
        self._answer()
        with np.load(path) as made:
            return dict(made)

    def row(self, row, *arguments):
        """A row for `in_turns`."""
        return PeerRow(self, row, arguments)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()

    def _send(self, message):
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"The peer {self._process.args[1]} ended: its error stands above.")
        return json.loads(line)


class PeerRow:
    """One row of a peer with its arguments."""

    def __init__(self, peer, row, arguments):
        self._peer, self._row, self._arguments = peer, row, arguments

    def seconds(self):
        return self._peer.call(self._row, *self._arguments)["seconds"]


def store(part, records):
    """Replaces one part of results/performance.json."""
    path = RESULTS / "performance.json"
    content = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    made = provenance(PACKAGES)
    made["versions"] |= Peer.versions
    content["parts"][part] = {"provenance": made, "records": records}
    path.write_text(json.dumps(content, indent=1) + "\n")
