"""The file of a saved belief: named arrays and a JSON header in one .npz, without pickle.

This module knows runs and structures but no belief, so that beliefs can save themselves.
"""

import contextlib
import dataclasses
import json
import os
import sys
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from pnkrylov._files import write_atomically as _write_atomically
from pnkrylov._structure import VectorStructure, check_dtype
from pnkrylov.basis import KrylovBasis, is_concrete
from pnkrylov.probes import Probes
from pnkrylov.runs import Run

FORMAT = "pnkrylov belief"
VERSION = 1

_HEADER = "header"
# The fields of a basis by the name of its class, which the header tells.
_BASES = {
    "KrylovBasis": ("vectors", "alpha", "beta", "next_vector", "filled", "start_norm"),
    "BlockKrylovBasis": (
        "vectors",
        "present",
        "diagonal",
        "coupling",
        "next_block",
        "next_present",
        "filled",
        "start_coordinates",
        "start_norms",
    ),
}
_PROBES = ("alpha", "beta", "valid", "level", "dimension", "steps")
_RUN = ("level", "asymmetry", "num_matvecs")


@runtime_checkable
class SavedRun(Protocol):
    """A run, of single vectors or of blocks, as far as files know it."""

    @property
    def basis(self) -> Any:
        """Its basis."""
        ...

    @property
    def probes(self) -> Probes | None:
        """Its probes."""
        ...

    @property
    def structure(self) -> VectorStructure:
        """The user's vectors."""
        ...


@dataclasses.dataclass(frozen=True)
class Archive:
    """What a file holds, checked.

    Attributes:
        class_name: name of the belief's class.
        arrays: all arrays by name, `basis.vectors`, `run.level`, `field.alpha` and so on.
        static: the belief's own strings and booleans.
        driver: which loop made the basis.
        structure: the user's vectors.
    """

    class_name: str
    arrays: dict[str, Array]
    static: dict[str, Any]
    driver: str
    structure: VectorStructure

    @property
    def num_batch_axes(self) -> int:
        """Leading axes that every array has (a batch made by `vmap`)."""
        return self.arrays["basis.vectors"].ndim - 2

    def run(self, arrays: Mapping[str, Array]) -> Run:
        """The run of one belief; `arrays` are those of the file, without batch axes."""
        return Run(**self.parts(arrays, KrylovBasis))

    def parts(self, arrays: Mapping[str, Array], basis: type) -> dict[str, Any]:
        """What a run is made of, its basis of the given class."""

        def group(prefix: str, names: tuple[str, ...]) -> dict[str, Any]:
            return {name: arrays[f"{prefix}.{name}"] for name in names}

        fields = group("basis", _BASES[basis.__name__])
        return {
            "basis": basis(**fields, driver=self.driver),
            "probes": Probes(**group("probes", _PROBES)) if "probes.alpha" in arrays else None,
            "structure": self.structure,
            **group("run", _RUN),
        }


def write(
    path: str | os.PathLike,
    class_name: str,
    run: SavedRun,
    fields: Mapping[str, Array | None],
    static: Mapping[str, Any],
) -> None:
    """Writes a run and the fields of a belief. An older file at `path` stays whole until the end.

    Args:
        path: file to write, used as it is (no suffix is added); its folder must exist.
        class_name: name of the belief's class.
        run: the run.
        fields: further arrays; None is left out.
        static: further values that JSON can hold.

    Raises:
        ValueError: the arrays are traced (under `jit`), do not share their leading axes, or the
            run was preconditioned.
        FileNotFoundError: the folder does not exist.
    """
    if getattr(run, "preconditioner", None) is not None:
        raise ValueError(
            f"save cannot write the preconditioner of this {class_name}: keep what built it, and "
            "run again; or save a belief made without preconditioner=."
        )
    named = _run_arrays(run) | {f"field.{k}": v for k, v in fields.items() if v is not None}
    if not is_concrete(named):
        raise ValueError(
            "save writes numbers: call it outside jit/vmap/grad, not on traced values."
        )
    arrays = {name: np.asarray(array) for name, array in named.items()}
    _check_batch(arrays)
    header = {
        "format": FORMAT,
        "version": VERSION,
        # The package is loaded by now, but its __init__ imports this module.
        "library": sys.modules["pnkrylov"].__version__,
        "class": class_name,
        "dtype": run.basis.dtype.name,
        "basis": type(run.basis).__name__,
        "driver": run.basis.driver,
        "static": dict(static),
        "structure": _describe_structure(run.structure),
        "arrays": {name: [list(a.shape), a.dtype.name] for name, a in arrays.items()},
    }
    _write_atomically(path, {_HEADER: np.array(json.dumps(header))} | arrays)


def read(path: str | os.PathLike, *, like: PyTree | None) -> Archive:
    """Reads what `write` wrote, checking everything before it is used.

    Args:
        path: the file.
        like: an example of the user's vectors; needed unless they are single arrays.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is foreign, of a newer format, damaged or incomplete, or `like` is
            missing or has another structure.
        TypeError: the file is float64 while x64 is off, or a leaf of `like` has another dtype.
    """
    header, arrays = _read_file(path)
    try:
        class_name, driver = str(header["class"]), str(header["driver"])
        dtype = jnp.dtype(header["dtype"])
        static, saved = dict(header["static"]), list(header["structure"])
        # Files from before there were block beliefs name none.
        names = _BASES[header.get("basis", "KrylovBasis")]
        leaves = [(str(p), tuple(map(int, s)), jnp.dtype(d)) for p, s, d in saved]
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"its header cannot be read ({error!r})") from error
    structure = _restore_structure(path, leaves, like)
    missing = {f"basis.{name}" for name in names} | {f"run.{name}" for name in _RUN}
    if any(name.startswith("probes.") for name in arrays):
        missing |= {f"probes.{name}" for name in _PROBES}
    missing -= set(arrays)
    if missing:
        raise damaged(path, f"it lacks the arrays {sorted(missing)}")
    vectors = arrays["basis.vectors"]
    if vectors.ndim < 2 or vectors.shape[-1] != structure.size or vectors.dtype != dtype:
        raise damaged(
            path,
            f"its basis is {vectors.dtype}{list(vectors.shape)}, but its vectors are "
            f"{dtype}[{structure.size}]",
        )
    for name, array in arrays.items():
        if array.dtype not in (dtype, np.int32, np.bool_):
            raise damaged(path, f"its array {name} is {array.dtype}, not {dtype}")
    on_device = {name: jnp.asarray(array) for name, array in arrays.items()}
    return Archive(class_name, on_device, static, driver, structure)


def damaged(path: str | os.PathLike, what: str) -> ValueError:
    """The error for a file that is ours but cannot be used."""
    return ValueError(
        f"{path} is damaged: {what}. It was cut short or changed after it was written; save the "
        "belief again or restore a copy."
    )


def _run_arrays(run: SavedRun) -> dict[str, Array]:
    names = _BASES[type(run.basis).__name__]
    arrays = {f"basis.{name}": getattr(run.basis, name) for name in names}
    arrays |= {f"run.{name}": getattr(run, name) for name in _RUN}
    if run.probes is not None:
        arrays |= {f"probes.{name}": getattr(run.probes, name) for name in _PROBES}
    return arrays


def _check_batch(arrays: Mapping[str, np.ndarray]) -> None:
    """A batch must have its leading axes on every array, as `vmap` makes it by default."""
    batch = arrays["basis.vectors"].shape[:-2]
    for name, array in arrays.items():
        if array.shape[: len(batch)] != batch:
            raise ValueError(
                f"The belief has the batch axes {list(batch)}, but its array {name} has shape "
                f"{list(array.shape)}. Make batches by vmap with out_axes=0, or save one belief "
                "at a time."
            )


def _describe_structure(structure: VectorStructure) -> list[list[Any]]:
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(structure.tree)]
    return [
        [path, list(shape), np.dtype(dtype).name]
        for path, shape, dtype in zip(paths, structure.shapes, structure.dtypes, strict=True)
    ]


def _restore_structure(
    path: str | os.PathLike, leaves: list[tuple[str, tuple[int, ...], Any]], like: PyTree | None
) -> VectorStructure:
    for leaf, _, dtype in leaves:
        check_dtype(dtype, f"The leaf {leaf or 'array'} of the belief in {path}")
    if like is None:
        if [leaf for leaf, _, _ in leaves] != [""]:
            names = ", ".join(_picture(*leaf) for leaf in leaves)
            raise ValueError(
                f"The belief in {path} is about a pytree with the leaves {names}. Pass like=, an "
                "example of it (arrays or jax.ShapeDtypeStruct): a file holds no Python classes."
            )
        (_, shape, dtype) = leaves[0]
        return VectorStructure.of(jax.ShapeDtypeStruct(shape, dtype))
    structure = VectorStructure.of(like)
    given = [(p, tuple(s), jnp.dtype(d)) for p, s, d in _describe_structure(structure)]
    if len(given) != len(leaves):
        raise ValueError(
            f"like has {len(given)} leaves, but the belief in {path} has {len(leaves)}: "
            f"{', '.join(_picture(*leaf) for leaf in leaves)}."
        )
    for mine, saved in zip(given, leaves, strict=True):
        if mine != saved:
            kind = TypeError if mine[:2] == saved[:2] else ValueError
            raise kind(
                f"like does not fit the belief in {path}: it has the leaf {_picture(*mine)} where "
                f"the file has {_picture(*saved)}. Pass an example with the structure, shapes and "
                "dtypes of the right-hand side that made the belief."
            )
    return structure


def _picture(path: str, shape: tuple[int, ...], dtype: Any) -> str:
    return f"{path}: {np.dtype(dtype).name}[{','.join(map(str, shape))}]"


def _read_file(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            raise _foreign(path)
        file.seek(0)
        with _reading(path), np.load(file, allow_pickle=False) as archive:
            header = _read_header(path, archive)
            names = [name for name in archive.files if name != _HEADER]
            arrays = {name: _read_array(path, archive, name) for name in names}
    listed = header.get("arrays", {})
    if missing := sorted(set(listed) - set(arrays)):
        raise damaged(path, f"it lacks the arrays {missing}")
    for name, array in arrays.items():
        if listed.get(name) != [list(array.shape), array.dtype.name]:
            raise damaged(path, f"its array {name} is not what its header says")
    return header, arrays


@contextlib.contextmanager
def _reading(path: str | os.PathLike):
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise damaged(path, f"it cannot be read to its end ({error})") from error


def _read_array(path: str | os.PathLike, archive: Any, name: str) -> np.ndarray:
    try:
        return archive[name]
    except ValueError as error:  # a pickled object, or no array at all
        raise damaged(path, f"its array {name} cannot be read ({error})") from error


def _read_header(path: str | os.PathLike, archive: Any) -> dict[str, Any]:
    if _HEADER not in archive.files:
        raise _foreign(path)
    try:
        header = json.loads(archive[_HEADER].item())
        ours = header["format"] == FORMAT
    except (AttributeError, KeyError, TypeError, ValueError):
        ours = False
    if not ours:
        raise _foreign(path)
    version = header.get("version")
    if not isinstance(version, int) or version < 1:
        raise damaged(path, f"its format version is {version!r}")
    if version > VERSION:
        raise ValueError(
            f"{path} has format version {version}, written by pnkrylov {header.get('library')}; "
            f"this installation reads format version {VERSION}. Upgrade pnkrylov."
        )
    return header


def _foreign(path: str | os.PathLike) -> ValueError:
    return ValueError(
        f"{path} is not a belief saved by pnkrylov. Pass a file that belief.save wrote."
    )
