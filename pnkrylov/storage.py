"""Beliefs on disk: `save` and `load`. No pickle: loading a file runs no code from it.

A file holds the run (what was paid for) and the few numbers that make a belief of it. Everything
else (mean, covariance, statistics) is derived again on loading, which takes no product.
"""

import functools
import os
from typing import Any

import jax
from jaxtyping import Array, PyTree

from pnkrylov._archive import Archive, damaged, read
from pnkrylov.beliefs import InverseBelief, SolveBelief, inverse_belief, solve_belief
from pnkrylov.runs import finish

# Per class: the arrays that a file must hold besides the run, and the static field.
_REQUIRED = {
    "SolveBelief": (("field.rhs", "field.alpha", "field.fixed_scale"), "from_rhs"),
    "InverseBelief": (("field.mean_flat", "field.alpha", "probes.alpha"), "layout"),
}


def save(belief: Any, path: str | os.PathLike) -> None:
    """Writes a belief to one file (.npz format); an older file there is replaced only at the end.

    Args:
        belief: a SolveBelief or InverseBelief, or a batch of beliefs made by `vmap`.
        path: the file to write, used as it is; its folder must exist.

    Raises:
        TypeError: `belief` is not a belief.
        ValueError: the belief is traced (under `jit`).
        FileNotFoundError: the folder does not exist.
    """
    if not isinstance(belief, SolveBelief | InverseBelief):
        raise TypeError(
            f"belief is of type {type(belief).__name__}; only a SolveBelief or an InverseBelief "
            "can be saved."
        )
    belief.save(path)


def load(path: str | os.PathLike, *, like: PyTree | None = None) -> SolveBelief | InverseBelief:
    """Reads a belief that `save` wrote. No product with the operator is spent.

    A belief of a failed run loads as it was: its numbers are NaN and `result` says why.

    Args:
        path: the file.
        like: an example of the vectors the belief is about (arrays or `jax.ShapeDtypeStruct`),
            needed where they are pytrees: their Python containers are not in the file. It is
            checked against the file leaf by leaf.

    Returns:
        The belief, equal to the saved one to rounding (to the bit on the same machine).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is foreign, of a newer format, damaged or incomplete, or `like` is
            missing or has other leaves.
        TypeError: the file is float64 while x64 is off, or a leaf of `like` has another dtype.
    """
    archive = read(path, like=like)
    if archive.class_name == "LaplacePosterior":
        raise ValueError(f"{path} holds a Laplace posterior: read it with pnkrylov.laplace.load.")
    if archive.class_name not in _REQUIRED:
        raise damaged(path, f"its class is {archive.class_name!r}")
    arrays, static = _REQUIRED[archive.class_name]
    missing = sorted(set(arrays) - set(archive.arrays))
    if missing:
        raise damaged(path, f"it lacks the arrays {missing}")
    if static not in archive.static:
        raise damaged(path, f"its header lacks {static!r}")
    rebuild = functools.partial(_rebuild, archive)
    for _ in range(archive.num_batch_axes):
        rebuild = jax.vmap(rebuild)
    return rebuild(archive.arrays)


def _rebuild(archive: Archive, arrays: dict[str, Array]) -> SolveBelief | InverseBelief:
    run, alpha = archive.run(arrays), arrays["field.alpha"]
    if archive.class_name == "SolveBelief":
        belief = solve_belief(
            run,
            arrays["field.rhs"],
            alpha,
            arrays["field.fixed_scale"],
            arrays.get("field.lower_bound"),
            archive.static["from_rhs"],
        )
    else:
        mean, layout = arrays["field.mean_flat"], archive.static["layout"]
        belief = inverse_belief(run, mean, alpha, layout)
    return finish(belief, throw=False)
