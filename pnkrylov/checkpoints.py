"""A Lanczos run on disk: killed at any moment, it goes on from its last checkpoint.

A checkpoint is a folder. `rows.bin` holds the Lanczos vectors, each written once and never again;
`state.npz` holds the coefficients, how many steps count, and their checksums. It is replaced
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
from typing import BinaryIO, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pnkrylov._files import write_atomically
from pnkrylov._run_kinds import BLOCKS as BLOCKS
from pnkrylov._run_kinds import SINGLE, Recorded, RunKind
from pnkrylov.interruption import check_seconds

FORMAT = "pnkrylov checkpoint"
VERSION = 1

_STATE, _ROWS = "state.npz", "rows.bin"
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
    RuntimeError,  # encrypted, or a compression that Python does not know
)
# A start or a step made again may differ in rounding if another machine or layout made the first.
_TOLERANCE = 1e4

Basis = TypeVar("Basis", bound=Recorded)


@dataclasses.dataclass(frozen=True)
class _Saved:
    """What `state.npz` holds: so many steps of a run, and the checksums of their rows."""

    count: int
    vectors: str
    checksums: list[int]
    arrays: dict[str, np.ndarray]


class Checkpoint:
    """The folder of one run, and what has been written to it.

    Args:
        path: the folder; made if it does not exist, but the folder above it must.
        seconds: least time between two writes; a write costs the rows since the last one.
        kind: whether the run is of single vectors or of blocks.

    Raises:
        FileNotFoundError: the folder above does not exist.
        NotADirectoryError: `path` is a file.
        TypeError, ValueError: `seconds` is no number or negative.
    """

    def __init__(self, path: str | os.PathLike, seconds: float, kind: RunKind = SINGLE) -> None:
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
        self._seconds, self._kind = seconds, kind
        self._next = time.monotonic() + seconds
        self._saved = 0
        self._verified = False
        self._checksums: list[int] = []

    def steps(self) -> int:
        """Steps of the run on disk, zero if there is none; checks no more than that."""
        return self._read_state().count if (self.folder / _STATE).exists() else 0

    def due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() >= self._next

    def save(self, basis: Recorded, done: int) -> None:
        """Writes what was added to a run of `done` steps since the last time.

        Args:
            basis: the run; what it has beyond these steps is room.
            done: steps that were taken.
        """
        if done > self._saved:
            self.folder.mkdir(exist_ok=True)
            self._append(basis, done)
            self._write_state(basis, done)
            self._saved = done
        self._next = time.monotonic() + self._seconds

    def restore(
        self, basis: Basis, done: int, limit: int, step: Callable[[Basis, Int[Array, ""]], Basis]
    ) -> tuple[Basis, int]:
        """Fills a run with the steps that are on disk, at most up to `limit` steps.

        Args:
            basis: the run so far, with room for `limit` steps. It may be used up.
            done: steps that were taken.
            limit: steps that may be taken.
            step: takes the step of an index; it may use up its argument. Once it has shown that
                the operator is the same, it is not called again.

        Returns:
            The run and its steps; what was given where nothing more is on disk.

        Raises:
            ValueError: the checkpoint is of another run, of a newer format, or damaged.
        """
        if not (self.folder / _STATE).exists():
            return basis, done
        kind, saved = self._kind, self._read_state()
        following = kind.next_rows(basis)
        vectors = _describe(basis.dtype.name, following.shape)
        if saved.vectors != vectors:
            raise self._foreign(f"its vectors are {saved.vectors}, those of this run are {vectors}")
        self._check_arrays(basis, saved)
        self._checksums, self._saved = saved.checksums, saved.count
        self._check_beginning(basis, done, saved)
        last = min(self._saved, limit)
        if last <= done:
            return basis, done
        # What was put nowhere stays so: tied to a place, it would compile every program anew.
        place = following.sharding if following.committed else None
        with self._open_rows() as file:
            for index in range(done, last):
                basis = kind.with_rows(basis, index, self._read_rows(file, index, following))
            current, coming = (
                jax.device_put(self._read_rows(file, index, following), place)
                for index in (last - 1, last)
            )
        if not self._verified:
            basis = kind.with_arrays(basis, saved.arrays, last - 1, current)
            basis = step(basis, jnp.asarray(last - 1, jnp.int32))
            self._check_step(basis, last - 1, saved, coming)
            self._verified = True
        # The numbers of the run that was saved, where this one rounds otherwise.
        return kind.with_arrays(basis, saved.arrays, last, coming), last

    def _append(self, basis: Recorded, done: int) -> None:
        (self.folder / _ROWS).touch()
        with open(self.folder / _ROWS, "r+b") as file:
            # The last rows of the file are those that come next: the first of the next write.
            for index in range(len(self._checksums), done + 1):
                there = index < done
                rows = self._kind.rows(basis, index) if there else self._kind.next_rows(basis)
                rows = np.ascontiguousarray(rows)
                file.seek(index * rows.nbytes)
                file.write(rows.data)
                self._checksums.append(zlib.crc32(rows.data))
            file.flush()
            os.fsync(file.fileno())

    def _write_state(self, basis: Recorded, done: int) -> None:
        following = self._kind.next_rows(basis)
        header = {
            "format": FORMAT,
            "version": VERSION,
            # The package is loaded by now, but its __init__ imports this module.
            "library": sys.modules["pnkrylov"].__version__,
            "size": basis.size,
            "dtype": basis.dtype.name,
            # Vectors of a step: a single one, or the k of a block.
            "block": following.shape[0] if following.ndim == 2 else None,
            "checksums": self._checksums[: done + 1],
        }
        arrays = self._kind.arrays(basis, done)
        write_atomically(self.folder / _STATE, {"header": np.array(json.dumps(header))} | arrays)

    def _read_state(self) -> _Saved:
        try:
            with (
                open(self.folder / _STATE, "rb") as opened,
                np.load(opened, allow_pickle=False) as file,
            ):
                header = json.loads(file["header"].item())
                arrays = {name: file[name] for name in file.files if name != "header"}
            ours, version = header["format"] == FORMAT, int(header["version"])
            size, dtype, block = int(header["size"]), str(header["dtype"]), header.get("block")
            shape = (size,) if block is None else (int(block), size)
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
        if len(checksums) < 2:
            raise self._damaged(f"{_STATE} holds no step")
        return _Saved(len(checksums) - 1, _describe(dtype, shape), checksums, arrays)

    def _check_arrays(self, basis: Recorded, saved: _Saved) -> None:
        expected = self._kind.arrays(basis, 0)
        every_step = (self._kind.diagonal, self._kind.coupling)
        fits = set(expected) == set(saved.arrays) and all(
            saved.arrays[name].dtype == array.dtype
            and saved.arrays[name].shape
            == ((saved.count, *array.shape[1:]) if name in every_step else array.shape)
            for name, array in expected.items()
        )
        if not fits:
            raise self._damaged(f"{_STATE} holds other arrays than its header says")

    def _check_beginning(self, basis: Recorded, done: int, saved: _Saved) -> None:
        """The start vectors and the coefficients so far must be those on disk."""
        kind = self._kind
        start = kind.rows(basis, 0) if done else kind.next_rows(basis)
        with self._open_rows() as file:
            first = self._read_rows(file, 0, start)
        arrays = kind.arrays(basis, done)
        tolerance = _TOLERANCE * float(jnp.finfo(basis.dtype).eps)
        if not kind.same_start(arrays, start, saved.arrays, first, tolerance):
            raise self._foreign("it was started from another vector")
        if not kind.same_steps(arrays, saved.arrays):
            raise self._foreign("the steps that were given are not those on disk")

    def _check_step(self, again: Recorded, index: int, saved: _Saved, coming: Array) -> None:
        """The last step, taken again, must give what is on disk: then the operator is the same."""
        error, norm = self._kind.apart(again, index, saved.arrays, coming)
        tolerance = _TOLERANCE * float(jnp.finfo(again.dtype).eps) * norm
        if not error <= tolerance:
            raise self._foreign(
                f"the product of its operator with the last vector differs from that of A "
                f"({error:.3g} apart, rounding explains at most {tolerance:.3g})"
            )

    def _open_rows(self) -> BinaryIO:
        try:
            return open(self.folder / _ROWS, "rb")
        except OSError as error:
            raise self._damaged(f"{_ROWS} cannot be read ({error})") from error

    def _read_rows(self, file: BinaryIO, index: int, like: Array) -> np.ndarray:
        file.seek(index * like.nbytes)
        data = file.read(like.nbytes)
        if len(data) != like.nbytes or zlib.crc32(data) != self._checksums[index]:
            raise self._damaged(f"row {index} of {_ROWS} was cut short or changed")
        # A copy: what JAX may use up must not be the memory of Python's bytes.
        return np.frombuffer(data, like.dtype).reshape(like.shape).copy()

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


def open_checkpoint(
    path: str | os.PathLike | None, seconds: float, kind: RunKind = SINGLE
) -> Checkpoint | None:
    """The checkpoint at `path`, or None."""
    check_seconds("checkpoint_seconds", seconds, zero=True)
    return None if path is None else Checkpoint(path, seconds, kind)


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
