"""Checkpoints of runs that were killed: nothing is lost, nothing is different."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pnkrylov as pk
from anytime_cases import (
    MATRIX,
    SIZE,
    START,
    STEPS,
    Killed,
    assert_same,
    inverse,
    inverse_of_budget,
    killed_at,
    lanczos,
    operator,
    solve,
)
from harness import CountingOperator
from pnkrylov import _files, checkpoints


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """A process that dies leaves its writes to the system: only a power cut needs `fsync`."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.one_precision
@pytest.mark.parametrize(
    "run",
    [
        lanczos,
        solve,
        pytest.param(inverse, marks=pytest.mark.slow),
        pytest.param(inverse_of_budget, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_goes_on_and_gives_the_same_answer(run, dtype, tmp_path):
    reference = run(dtype)
    for product in (4, 12, 17, 31):
        folder = tmp_path / str(product)
        options = {"checkpoint": folder, "checkpoint_seconds": 0.0}
        try:
            run(dtype, killed_at(product), **options)
        except Killed:
            assert_same(run(dtype, **options), reference)
        assert_same(run(dtype, **options), reference)


def test_nothing_is_computed_twice_but_the_last_step(dtype, tmp_path):
    options = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0.0}
    with pytest.raises(Killed):
        lanczos(dtype, killed_at(7), **options)
    counts = []
    lanczos(dtype, counts.append, **options)
    # Six steps were on the disk, of which one is checked.
    assert counts[-1] == 1 + STEPS - 6
    counts.clear()
    lanczos(dtype, counts.append, **options)
    assert counts[-1] == 1
    # With an hour between checkpoints the only one is that of the end.
    options["checkpoint"] = tmp_path / "slow"
    with pytest.raises(Killed):
        lanczos(dtype, killed_at(7), checkpoint=options["checkpoint"], checkpoint_seconds=3600.0)
    assert not options["checkpoint"].exists()
    lanczos(dtype, checkpoint=options["checkpoint"], checkpoint_seconds=3600.0)
    counts.clear()
    lanczos(dtype, counts.append, **options)
    assert counts[-1] == 1


def test_a_kill_at_any_write_loses_nothing(monkeypatch, tmp_path):
    """The writer dies before every single system call that it makes, one after the other."""
    reference = lanczos("float32")
    calls, fatal = [0], [0]

    def dying(function):
        def wrapped(*arguments):
            calls[0] += 1
            if calls[0] == fatal[0]:
                raise Killed
            return function(*arguments)

        return wrapped

    fake = types.SimpleNamespace(
        **{name: getattr(os, name) for name in dir(os) if not name.startswith("__")}
    )
    for name in ("open", "fsync", "replace", "close"):
        setattr(fake, name, dying(getattr(os, name)))
    monkeypatch.setattr(checkpoints, "os", fake)
    monkeypatch.setattr(_files, "os", fake)
    for number in range(1, 3 * 6 + 1):
        # Six calls for each of the first three checkpoints.
        calls[0], fatal[0] = 0, number
        folder = tmp_path / str(number)
        with pytest.raises(Killed):
            lanczos("float32", checkpoint=folder, checkpoint_seconds=0.0)
        if (folder / "rows.bin").exists():
            with open(folder / "rows.bin", "ab") as file:
                file.write(b"half a row")
        calls[0] = fatal[0] = 0
        assert_same(lanczos("float32", checkpoint=folder), reference)
    assert calls[0] == 6  # the last run wrote one checkpoint, at its end


def test_a_longer_and_a_shorter_call_use_the_same_checkpoint(dtype, tmp_path):
    options = {"driver": "host", "checkpoint": tmp_path / "run", "checkpoint_seconds": 0.0}
    start = jnp.asarray(START, dtype)
    first = pk.lanczos(operator(dtype), start, 5, **options)
    longer = pk.lanczos(operator(dtype), start, 12, **options)
    shorter = pk.lanczos(operator(dtype), start, 3, **options)
    reference = pk.lanczos(operator(dtype), start, 12, driver="host")
    tolerance = {"float32": 1e-4, "float64": 1e-11}[dtype.name]
    for basis, rows in ((first, 5), (longer, 12), (shorter, 3)):
        assert basis.num_rows == int(basis.filled) == rows
        np.testing.assert_allclose(basis.vectors, reference.vectors[:rows], atol=tolerance)
        np.testing.assert_allclose(basis.alpha, reference.alpha[:rows], rtol=tolerance)
    np.testing.assert_array_equal(shorter.next_vector, longer.vectors[3])
    # A run that was continued from memory writes what the disk lacks.
    counts = []
    counting = operator(dtype, counts.append)
    continued = pk.continue_run(first, counting, 10, **options)
    assert counts[-1] == 1 + 3 and continued.num_rows == 15
    assert pk.lanczos(operator(dtype), start, 15, **options).num_rows == 15


def test_a_breakdown_is_kept(dtype, tmp_path):
    options = {"driver": "host", "checkpoint": tmp_path / "run"}
    identity = CountingOperator(np.eye(6, dtype=dtype))
    first, again = (pk.lanczos(identity, jnp.ones((6,), dtype), 4, **options) for _ in range(2))
    assert_same(again, first)
    assert int(again.filled) == 1


def test_the_checkpoint_of_another_run_is_refused(dtype, tmp_path):
    options = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0.0}
    first = lanczos(dtype, **options)
    start, foreign = jnp.asarray(START, dtype), r"The checkpoint .*run is of another run: "
    with pytest.raises(ValueError, match=foreign + "it was started from another vector"):
        pk.lanczos(operator(dtype), start[::-1], STEPS, **options)
    with pytest.raises(ValueError, match=foreign + "it was started from another vector"):
        pk.lanczos(operator(dtype), 2 * start, STEPS, **options)
    with pytest.raises(ValueError, match=foreign + rf"its vectors are {dtype.name}\[40\]"):
        pk.lanczos(np.eye(3, dtype=dtype), jnp.ones((3,), dtype), 2, **options)
    other = CountingOperator(1.01 * MATRIX.astype(dtype))
    with pytest.raises(ValueError, match=foreign + "the product of its operator with the last"):
        pk.lanczos(other, start, STEPS, **options)
    changed = dataclasses.replace(first, alpha=first.alpha + 1)
    with pytest.raises(ValueError, match=foreign + "the steps that were given are not those"):
        pk.continue_run(changed, operator(dtype), 1, **options)
    if dtype == jnp.float64:
        with pytest.raises(ValueError, match=foreign + r"its vectors are float64\[40\]"):
            lanczos("float32", **options)
    assert_same(lanczos(dtype, **options), first)


def test_a_damaged_checkpoint_is_refused_or_gives_the_same_answer(tmp_path):
    """Every file cut short at some places, and bytes flipped at others: never another answer."""
    options = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0.0}
    reference = lanczos("float32", **options)
    rng, refused = np.random.default_rng(0), 0
    for name in ("rows.bin", "state.npz"):
        path = tmp_path / "run" / name
        whole = path.read_bytes()
        cuts = [whole[:size] for size in (0, 1, len(whole) // 2, len(whole) - 1)]
        flips = []
        for at in rng.integers(0, len(whole), 60):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << int(rng.integers(8))
            flips.append(bytes(flipped))
        for data in cuts + flips:
            path.write_bytes(data)
            try:
                basis = lanczos("float32", **options)
            except ValueError as error:
                refused += 1
                assert "Delete the folder" in str(error) or "Upgrade" in str(error), error
            else:
                assert_same(basis, reference)
        path.write_bytes(whole)
    assert refused > 64
    (tmp_path / "run" / "rows.bin").unlink()
    with pytest.raises(ValueError, match=r"is damaged: rows.bin cannot be read"):
        lanczos("float32", **options)


def test_newer_and_foreign_files_and_folders(monkeypatch, tmp_path):
    options = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0.0}
    monkeypatch.setattr(checkpoints, "VERSION", 2)
    lanczos("float32", **options)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"has format version 2, .* reads version 1. Upgrade"):
        lanczos("float32", **options)
    header = json.dumps({"format": "something else", "version": 1, "size": 1, "dtype": "float32"})
    names = ("alpha", "beta", "start_norm", "filled")
    arrays = {name: np.zeros(1, np.float32) for name in names}
    np.savez(tmp_path / "run" / "state.npz", header=np.array(header), **arrays)
    with pytest.raises(ValueError, match=r"is damaged: state.npz cannot be read"):
        lanczos("float32", **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file is a file. A checkpoint is a folder"):
        lanczos("float32", checkpoint=tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=r"The folder .*none of checkpoint=.* not exist"):
        lanczos("float32", checkpoint=tmp_path / "none" / "run")
    with pytest.raises(ValueError, match=r"checkpoint_seconds=-1.0 must be at least 0"):
        lanczos("float32", checkpoint=tmp_path / "run", checkpoint_seconds=-1.0)


def test_rows_are_written_once(tmp_path, dtype):
    """What is on the disk does not change when the run goes on: rows are appended."""
    options = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0.0}
    start = jnp.asarray(START, dtype)
    basis = pk.lanczos(operator(dtype), start, 4, driver="host", **options)
    rows = (tmp_path / "run" / "rows.bin").read_bytes()
    assert len(rows) == 5 * SIZE * dtype.itemsize
    vectors = np.frombuffer(rows, dtype).reshape(5, SIZE)
    np.testing.assert_array_equal(vectors[:4], basis.vectors)
    np.testing.assert_array_equal(vectors[4], basis.next_vector)
    pk.lanczos(operator(dtype), start, 6, driver="host", **options)
    more = (tmp_path / "run" / "rows.bin").read_bytes()
    assert len(more) == 7 * SIZE * dtype.itemsize and zlib.crc32(more[: len(rows)]) == zlib.crc32(
        rows
    )


PROGRAM = """
    import os, sys, time
    import jax, numpy as np, scipy.sparse.linalg as spla
    import pnkrylov as pk

    size, (folder, result, what, sync) = 300, sys.argv[1:]
    if sync == "no":
        os.fsync = lambda descriptor: None
    rng = np.random.default_rng(0)
    diagonal = np.geomspace(1, 1e4, size).astype(np.float32)
    columns = rng.standard_normal((size, 5)).astype(np.float32)

    class Slow(spla.LinearOperator):
        def __init__(self):
            super().__init__(np.float32, (size, size))

        def _matmat(self, X):
            time.sleep(0.01)
            return diagonal[:, None] * X + columns @ (columns.T @ X)

        def _matvec(self, x):
            return self._matmat(np.reshape(x, (-1, 1)))[:, 0]

    options = {"checkpoint": folder, "checkpoint_seconds": 0.0} if folder else {}
    start = np.ones(size, np.float32)
    if what == "lanczos":
        basis = pk.lanczos(Slow(), start, 100, driver="host", **options)
        np.savez(result, *jax.tree.leaves(basis))
    else:
        belief = pk.solve(Slow(), start, key=jax.random.key(0), num_steps=80, **options)
        belief.save(result)
"""


def run_program(folder, result, what, sync, seconds=None):
    """Runs it; kills it after `seconds`. Returns whether it was killed."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), str(result)]
    command += [what, sync]
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(pk.__file__).parents[1])}
    cache = jax.config.jax_compilation_cache_dir
    if cache:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    process = subprocess.Popen(command, env=environment)
    try:
        if seconds is not None and process.poll() is None:
            wait_for_rows(folder, process, seconds)
            process.send_signal(signal.SIGKILL)
        return process.wait(timeout=300) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def wait_for_rows(folder, process, seconds):
    """Waits until the run writes, and then for so many seconds."""
    before = rows_of(folder)
    while process.poll() is None and rows_of(folder) == before:
        time.sleep(0.002)
    time.sleep(seconds)


def rows_of(folder):
    path = pathlib.Path(folder) / "rows.bin"
    return path.stat().st_size if path.exists() else 0


def kill_and_resume(tmp_path, what, sync, kills):
    """Random kills until there were enough, then to the end; the number of kills that hit."""
    rng = np.random.default_rng(1)
    run_program("", tmp_path / "reference.npz", what, sync)
    hits, runs = 0, 0
    while hits < kills:
        # A new run whenever the last one is finished.
        runs += 1
        folder, result = tmp_path / f"run{runs}", tmp_path / f"result{runs}.npz"
        while hits < kills and run_program(folder, result, what, sync, rng.uniform(0, 0.6)):
            hits += 1
            assert not result.exists()
        if not result.exists():
            run_program(folder, result, what, sync)
        with np.load(tmp_path / "reference.npz") as a, np.load(result) as b:
            assert a.files == b.files
            for name in a.files:
                np.testing.assert_array_equal(a[name], b[name])
    return hits


def test_a_killed_process_resumes(tmp_path):
    assert kill_and_resume(tmp_path, "lanczos", "no", 2) == 2


@pytest.mark.slow
def test_twenty_kills_at_random_moments(tmp_path):
    assert kill_and_resume(tmp_path, "solve", "yes", 20) == 20
