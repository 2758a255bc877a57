"""Files that are whole or not there, whatever happens while they are written."""

import os
import pathlib
import secrets
import zipfile
from collections.abc import Mapping

import numpy as np


def write_atomically(path: str | os.PathLike, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an .npz file without pickle; an older file at `path` stays whole until the end.

    Args:
        path: file to write, used as it is (no suffix is added).
        arrays: what to write, by name.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    # A link keeps pointing where it points: its target is what gets replaced.
    target = pathlib.Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"The folder {target.parent} of path={path} does not exist.")
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with open(draft, "xb") as file:
            # Not np.savez: before NumPy 2.1 it cannot be told to refuse pickles.
            with zipfile.ZipFile(file, "w") as archive:
                for name, array in arrays.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    _sync_folder(target.parent)


def _sync_folder(folder: pathlib.Path) -> None:
    """Makes the new name survive a power cut, where the system lets a folder be opened."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
