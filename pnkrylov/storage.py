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
from pnkrylov.block.basis import BlockKrylovBasis
from pnkrylov.block.beliefs import BlockSolveBelief, block_solve_belief
from pnkrylov.block.inverse_belief import BlockInverseBelief, block_inverse_belief
from pnkrylov.block.runs import BlockRun
from pnkrylov.runs import finish

# Per class: the arrays that a file must hold besides the run, and the static fields.
_REQUIRED = {
    "SolveBelief": (
        ("basis.alpha", "field.rhs", "field.alpha", "field.fixed_scale"),
        ("from_rhs",),
    ),
    "InverseBelief": (
        ("basis.alpha", "field.mean_flat", "field.alpha", "probes.alpha"),
        ("layout",),
    ),
    "BlockSolveBelief": (("basis.diagonal", "field.alpha"), ()),
    "BlockInverseBelief": (
        ("basis.diagonal", "field.mean_flat", "field.alpha", "probes.alpha"),
        ("layout",),
    ),
}
Belief = SolveBelief | InverseBelief | BlockSolveBelief | BlockInverseBelief


def save(belief: Any, path: str | os.PathLike) -> None:
    """Writes a belief to one file (.npz format); an older file there is replaced only at the end.

    Args:
        belief: what `solve` or `inverse` returned, or a batch of such beliefs made by `vmap`.
        path: the file to write, used as it is; its folder must exist.

    Raises:
        TypeError: `belief` is not a belief.
        ValueError: the belief is traced (under `jit`).
        FileNotFoundError: the folder does not exist.
    """
    if not isinstance(belief, Belief):
        raise TypeError(
            f"belief is of type {type(belief).__name__}; only what pnkrylov.solve or "
            "pnkrylov.inverse returned can be saved."
        )
    belief.save(path)


def load(path: str | os.PathLike, *, like: PyTree | None = None) -> Belief:
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
    arrays, statics = _REQUIRED[archive.class_name]
    missing = sorted(set(arrays) - set(archive.arrays))
    if missing:
        raise damaged(path, f"it lacks the arrays {missing}")
    for name in statics:
        if name not in archive.static:
            raise damaged(path, f"its header lacks {name!r}")
    rebuild = functools.partial(_rebuild, archive)
    for _ in range(archive.num_batch_axes):
        rebuild = jax.vmap(rebuild)
    return rebuild(archive.arrays)


def _rebuild(archive: Archive, arrays: dict[str, Array]) -> Belief:
    name, alpha = archive.class_name, arrays["field.alpha"]
    bound = arrays.get("field.lower_bound")
    if name == "SolveBelief":
        belief = solve_belief(
            archive.run(arrays),
            arrays["field.rhs"],
            alpha,
            arrays["field.fixed_scale"],
            bound,
            archive.static["from_rhs"],
        )
    elif name == "BlockSolveBelief":
        belief = block_solve_belief(_block_run(archive, arrays), alpha, bound)
    elif name == "InverseBelief":
        belief = inverse_belief(
            archive.run(arrays), arrays["field.mean_flat"], alpha, archive.static["layout"]
        )
    else:
        mean, layout = arrays["field.mean_flat"], archive.static["layout"]
        belief = block_inverse_belief(_block_run(archive, arrays), mean, alpha, layout)
    return finish(belief, throw=False)


def _block_run(archive: Archive, arrays: dict[str, Array]) -> BlockRun:
    return BlockRun(**archive.parts(arrays, BlockKrylovBasis))
