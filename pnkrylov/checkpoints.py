"""A Lanczos run on disk: killed at any moment, it goes on from its last checkpoint.

A checkpoint is a folder. `rows.bin` holds the Lanczos vectors, each written once and never again;
`state.npz` holds the coefficients, how many rows count, and their checksums. It is replaced
atomically after the rows are on the disk: what a killed writer leaves beyond them does not count.

Run again, the same call reads the rows, takes the last step once more to see that the operator is
the one that made them, and goes on. The steps are those that an uninterrupted run takes, by the
same compiled code on the same numbers, so that the answer is the same to the bit.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pnkrylov._files import write_atomically
from pnkrylov.basis import KrylovBasis, laid_out, row_layout
from pnkrylov.interruption import check_seconds

FORMAT = "pnkrylov checkpoint"
VERSION = 1

_STATE, _ROWS = "state.npz", "rows.bin"
_ARRAYS = ("alpha", "beta", "start_norm", "filled")
# What reading a file that is not whole, or not ours, can raise.
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
)
# A start or a step made again may differ in rounding if another machine or layout made the first.
_TOLERANCE = 1e4

Step = Callable[[KrylovBasis, Int[Array, ""]], KrylovBasis]


class Checkpoint:
    """The folder of one run, and what has been written to it.

    Args:
        path: the folder; made if it does not exist, but the folder above it must.
        seconds: least time between two writes; a write costs the rows since the last one.

    Raises:
        FileNotFoundError: the folder above does not exist.
        NotADirectoryError: `path` is a file.
        TypeError, ValueError: `seconds` is no number or negative.
    """

    def __init__(self, path: str | os.PathLike, seconds: float) -> None:
        check_seconds("checkpoint_seconds", seconds, zero=True)
        self.folder = pathlib.Path(path)
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(
                f"checkpoint={path} is a file. A checkpoint is a folder: pass another path."
            )
        if not self.folder.parent.is_dir():
            raise FileNotFoundError(
                f"The folder {self.folder.parent} of checkpoint={path} does not exist."
            )
        self._seconds = seconds
        self._next = time.monotonic() + seconds
        self._saved = 0
        self._checksums: list[int] = []

    def steps(self) -> int:
        """Steps of the run on disk, zero if there is none; checks no more than that."""
        return self._read_state()["count"] if (self.folder / _STATE).exists() else 0

    def due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() >= self._next

    def save(self, basis: KrylovBasis, done: int) -> None:
        """Writes what was added to a run of `done` steps since the last time.

        Args:
            basis: the run; rows from `done` on are room.
            done: steps that were taken.
        """
        if done > self._saved:
            self.folder.mkdir(exist_ok=True)
            self._append(basis, done)
            self._write_state(basis, done)
            self._saved = done
        self._next = time.monotonic() + self._seconds

    def restore(
        self, basis: KrylovBasis, done: int, limit: int, step: Step
    ) -> tuple[KrylovBasis, int]:
        """Fills a run with the steps that are on disk, at most up to `limit` steps.

        Args:
            basis: the run so far, with room for `limit` rows. It may be used up.
            done: steps that were taken.
            limit: steps that may be taken.
            step: takes the step of an index; it may use up its argument.

        Returns:
            The run and its steps; what was given where nothing more is on disk.

        Raises:
            ValueError: the checkpoint is of another run, of a newer format, or damaged.
        """
        if not (self.folder / _STATE).exists():
            return basis, done
        saved = self._read_state()
        if saved["vectors"] != f"{basis.dtype.name}[{basis.size}]":
            raise self._foreign(
                f"its vectors are {saved['vectors']}, those of this run are "
                f"{basis.dtype.name}[{basis.size}]"
            )
        self._checksums, self._saved = saved["checksums"], saved["count"]
        self._check_beginning(basis, done, saved)
        last = min(self._saved, limit)
        if last <= done:
            return basis, done
        sharding, layout = basis.next_vector.sharding, row_layout(basis.next_vector)
        with self._open_rows() as file:
            for index in range(done, last - 1):
                row = self._read_row(file, index, basis)
                basis = _put_row((row, jnp.asarray(index, jnp.int32)), basis, layout)
            current, following = (self._read_row(file, i, basis) for i in (last - 1, last))
        current, following = (jax.device_put(row, sharding) for row in (current, following))
        basis = _with_state(basis, saved, last - 1, current)
        again = step(basis, jnp.asarray(last - 1, jnp.int32))
        self._check_step(again, last - 1, saved, following)
        # The numbers of the run that was saved, where this one rounds otherwise.
        return _with_state(again, saved, last, following), last

    def _append(self, basis: KrylovBasis, done: int) -> None:
        (self.folder / _ROWS).touch()
        with open(self.folder / _ROWS, "r+b") as file:
            # The last row of the file is the vector that comes next: the first of the next write.
            for index in range(len(self._checksums), done + 1):
                vector = basis.next_vector if index == done else _row(basis.vectors, index)
                row = np.ascontiguousarray(vector)
                file.seek(index * row.nbytes)
                file.write(row.data)
                self._checksums.append(zlib.crc32(row.data))
            file.flush()
            os.fsync(file.fileno())

    def _write_state(self, basis: KrylovBasis, done: int) -> None:
        header = {
            "format": FORMAT,
            "version": VERSION,
            # The package is loaded by now, but its __init__ imports this module.
            "library": sys.modules["pnkrylov"].__version__,
            "size": basis.size,
            "dtype": basis.dtype.name,
            "checksums": self._checksums[: done + 1],
        }
        arrays = {
            "alpha": np.asarray(basis.alpha)[:done],
            "beta": np.asarray(basis.beta)[:done],
            "filled": np.asarray(basis.filled),
            "start_norm": np.asarray(basis.start_norm),
        }
        write_atomically(self.folder / _STATE, {"header": np.array(json.dumps(header))} | arrays)

    def _read_state(self) -> dict[str, Any]:
        try:
            with (
                open(self.folder / _STATE, "rb") as opened,
                np.load(opened, allow_pickle=False) as file,
            ):
                header = json.loads(file["header"].item())
                saved = {name: file[name] for name in _ARRAYS}
            ours, version = header["format"] == FORMAT, int(header["version"])
            size, dtype = int(header["size"]), str(header["dtype"])
            checksums = [int(number) for number in header["checksums"]]
        except _UNREADABLE as error:
            raise self._damaged(f"{_STATE} cannot be read ({error!r})") from error
        if not ours:
            raise self._damaged(f"{_STATE} is no state of a run")
        if version > VERSION:
            raise ValueError(
                f"The checkpoint {self.folder} has format version {version}, written by pnkrylov "
                f"{header.get('library')}; this installation reads version {VERSION}. Upgrade "
                "pnkrylov."
            )
        count = len(checksums) - 1
        shapes = [saved[name].shape for name in _ARRAYS]
        names = [saved[name].dtype.name for name in _ARRAYS]
        if (
            count < 1
            or shapes != [(count,), (count,), (), ()]
            or names != [dtype, dtype, dtype, "int32"]
        ):
            raise self._damaged(f"{_STATE} holds other arrays than its header says")
        return saved | {"count": count, "checksums": checksums, "vectors": f"{dtype}[{size}]"}

    def _check_beginning(self, basis: KrylovBasis, done: int, saved: dict[str, Any]) -> None:
        """The start vector and the coefficients so far must be those on disk."""
        start = _row(basis.vectors, 0) if done else basis.next_vector
        with self._open_rows() as file:
            first = self._read_row(file, 0, basis)
        tolerance = _TOLERANCE * float(jnp.finfo(basis.dtype).eps)
        norms = float(saved["start_norm"]), float(basis.start_norm)
        if not (
            float(jnp.max(jnp.abs(start - first))) <= tolerance * float(jnp.max(jnp.abs(first)))
            and abs(norms[0] - norms[1]) <= tolerance * abs(norms[0])
        ):
            raise self._foreign("it was started from another vector")
        common = min(done, len(saved["alpha"]))
        for name in ("alpha", "beta"):
            given, stored = np.asarray(getattr(basis, name))[:common], saved[name][:common]
            if not np.array_equal(given, stored, equal_nan=True):
                raise self._foreign("the steps that were given are not those on disk")

    def _check_step(
        self, again: KrylovBasis, index: int, saved: dict[str, Any], following: Array
    ) -> None:
        """The last step, taken again, must give what is on disk: then the operator is the same."""
        largest = float(np.max(np.abs(saved["alpha"]) + saved["beta"]))
        tolerance = _TOLERANCE * float(jnp.finfo(again.dtype).eps) * largest
        alpha, beta = saved["alpha"][index], saved["beta"][index]
        residual = again.beta[index] * again.next_vector - jnp.asarray(beta) * following
        errors = [jnp.abs(again.alpha[index] - alpha), jnp.linalg.norm(residual)]
        finite = np.isfinite(alpha) and np.isfinite(beta)
        if finite and not all(float(error) <= tolerance for error in errors):
            raise self._foreign(
                f"the product of its operator with the last vector differs from that of A "
                f"({float(max(errors)):.3g} apart, rounding explains at most {tolerance:.3g})"
            )

    def _open_rows(self) -> BinaryIO:
        try:
            return open(self.folder / _ROWS, "rb")
        except OSError as error:
            raise self._damaged(f"{_ROWS} cannot be read ({error})") from error

    def _read_row(self, file: BinaryIO, index: int, basis: KrylovBasis) -> np.ndarray:
        num_bytes = basis.size * basis.dtype.itemsize
        file.seek(index * num_bytes)
        data = file.read(num_bytes)
        if len(data) != num_bytes or zlib.crc32(data) != self._checksums[index]:
            raise self._damaged(f"row {index} of {_ROWS} was cut short or changed")
        # A copy: what JAX may use up must not be the memory of Python's bytes.
        return np.frombuffer(data, basis.dtype).copy()

    def _damaged(self, what: str) -> ValueError:
        return ValueError(
            f"The checkpoint {self.folder} is damaged: {what}. Delete the folder to start the run "
            "anew, or restore a copy of it."
        )

    def _foreign(self, what: str) -> ValueError:
        return ValueError(
            f"The checkpoint {self.folder} is of another run: {what}. Pass another folder as "
            "checkpoint=, or delete this one to start the run anew."
        )


def open_checkpoint(path: str | os.PathLike | None, seconds: float) -> Checkpoint | None:
    """The checkpoint at `path`, or None."""
    check_seconds("checkpoint_seconds", seconds, zero=True)
    return None if path is None else Checkpoint(path, seconds)


@jax.jit
def _take_row(vectors: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(vectors, index, keepdims=False)


def _row(vectors: Array, index: int) -> Array:
    return _take_row(vectors, jnp.asarray(index, jnp.int32))


@eqx.filter_jit(donate="all-except-first")
def _put_row(row_and_index: tuple[Any, Array], basis: KrylovBasis, layout: Any) -> KrylovBasis:
    row, index = row_and_index
    vectors = jax.lax.dynamic_update_index_in_dim(basis.vectors, row, index, axis=0)
    return laid_out(dataclasses.replace(basis, vectors=vectors), layout)


def _with_state(
    basis: KrylovBasis, saved: dict[str, Any], done: int, following: Array
) -> KrylovBasis:
    """The run after `done` of the saved steps; `following` is the vector that comes next."""
    room = basis.num_rows - done
    return dataclasses.replace(
        basis,
        alpha=jnp.array(np.pad(saved["alpha"][:done], (0, room))),
        beta=jnp.array(np.pad(saved["beta"][:done], (0, room))),
        next_vector=following,
        filled=jnp.array(min(int(saved["filled"]), done), jnp.int32),
        start_norm=jnp.array(saved["start_norm"]),
    )
