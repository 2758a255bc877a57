"""The parameters that a curvature acts on: all of a model's, or a selected part, as one vector."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PyTree

from pnkrylov._structure import VectorStructure, describe
from pnkrylov.krylov import is_concrete

Mask = PyTree | Callable[[str, Any], bool] | None


class Parameters(eqx.Module):
    """A pytree of parameters, the selected of which form a flat vector.

    Attributes:
        leaves: All leaves of the user's pytree that are arrays, in order; None for the others.
        chosen: Flat positions of the selected entries of each leaf; None for a leaf that is
            selected as a whole or not at all.
        structure: What the selected part looks like: the user's pytree with None in place of
            leaves that are not selected, and with the selected entries `(count,)` in place of a
            leaf that is selected in part.
    """

    leaves: list[Any]
    chosen: list[Any]
    _selected: tuple[bool, ...] = eqx.field(static=True)
    _constants: tuple[Any, ...] = eqx.field(static=True)
    _treedef: Any = eqx.field(static=True)
    structure: VectorStructure = eqx.field(static=True)

    @property
    def size(self) -> int:
        """Number of selected parameters p."""
        return self.structure.size

    def subset(self) -> PyTree:
        """The selected part of the parameters, with `structure`."""
        parts = [
            None if not wanted else leaf if chosen is None else leaf.reshape(-1)[chosen]
            for leaf, chosen, wanted in zip(self.leaves, self.chosen, self._selected, strict=True)
        ]
        return jtu.tree_unflatten(self._treedef, parts)

    def flat(self) -> Float[Array, " p"]:
        """The selected parameters as one vector `(p,)`."""
        return self.structure.ravel(self.subset())

    def combine(self, flat: Float[Array, " p"]) -> PyTree:
        """All parameters in the user's form, with the selected ones replaced.

        Args:
            flat: Selected parameters, shape `(p,)`.

        Returns:
            The user's pytree; under `jax.vmap`, a stack of them.
        """
        pieces = iter(jtu.tree_leaves(self.structure.unravel(flat)))
        leaves = []
        for leaf, chosen, constant, wanted in zip(
            self.leaves, self.chosen, self._constants, self._selected, strict=True
        ):
            if leaf is None:
                leaves.append(constant)
            elif not wanted:
                leaves.append(leaf)
            elif chosen is None:
                leaves.append(next(pieces))
            else:
                entries = leaf.reshape(-1).at[chosen].set(next(pieces))
                leaves.append(entries.reshape(leaf.shape))
        return jtu.tree_unflatten(self._treedef, leaves)


def select_parameters(params: PyTree, mask: Mask = None) -> Parameters:
    """Selects the parameters that a curvature acts on.

    Args:
        params: Any pytree. Leaves that are not real floating arrays (activation functions, counters
            and other parts of an Equinox module) are constants and cannot be selected.
        mask: What to select; None selects every floating leaf. Either
            - a pytree of bools, the same as `params` or a prefix of it (one bool for a whole
              layer); or of boolean arrays, for single entries of a leaf;
            - a predicate `(path, leaf) -> bool`, with the path as `jax.tree_util.keystr` prints it
              (`"['dense']['kernel']"`, `".layers[2].weight"`).

    Returns:
        The parameters.

    Raises:
        ValueError: Nothing is selected, or mask and params do not match.
        TypeError: A mask leaf is not boolean, or dtypes are not real floating ones.
    """
    with_paths, treedef = jtu.tree_flatten_with_path(params)
    wanted = _wanted(params, mask, with_paths)
    leaves, chosen, selected, constants, parts = [], [], [], [], []
    for (path, leaf), want in zip(with_paths, wanted, strict=True):
        is_array = eqx.is_array(leaf) or isinstance(leaf, np.ndarray)
        floating = is_array and jnp.issubdtype(leaf.dtype, jnp.floating)
        array = jnp.asarray(leaf) if is_array else None
        positions = _positions(want, leaf, jtu.keystr(path)) if floating else None
        take = floating and (want is True if positions is None else positions.size > 0)
        leaves.append(array)
        constants.append(None if is_array else leaf)
        selected.append(take)
        partly = take and positions is not None
        chosen.append(jnp.asarray(positions, jnp.int32) if partly else None)
        shape = positions.shape if positions is not None else np.shape(leaf)
        parts.append(jax.ShapeDtypeStruct(shape, leaf.dtype) if take else None)
    if not any(selected):
        reason = "there is no floating array in it" if mask is None else "the mask selects nothing"
        raise ValueError(f"params has no parameter to act on: {reason}. Got {describe(params)}.")
    return Parameters(
        leaves=leaves,
        chosen=chosen,
        _selected=tuple(selected),
        _constants=tuple(constants),
        _treedef=treedef,
        structure=VectorStructure.of(jtu.tree_unflatten(treedef, parts), "params"),
    )


def _wanted(params: PyTree, mask: Mask, with_paths: list[tuple[Any, Any]]) -> list[Any]:
    """One entry of the mask for every leaf: a bool or a boolean array."""
    if mask is None:
        return [True] * len(with_paths)
    if callable(mask) and not isinstance(mask, eqx.Module):
        return [bool(mask(jtu.keystr(path), leaf)) for path, leaf in with_paths]
    if not is_concrete(mask):
        raise ValueError("mask is being traced by jit or vmap; it decides shapes: close over it.")

    def spread(entry, subtree):
        return [entry] * len(jtu.tree_leaves(subtree))

    try:
        spread_out = jtu.tree_map(spread, mask, params)
    except ValueError as error:
        raise ValueError(
            f"mask does not match params: {error}. Pass a pytree of bools with the containers of "
            "params or the outer part of them, or a predicate (path, leaf) -> bool."
        ) from error
    return jtu.tree_leaves(spread_out)


def _positions(want: Any, leaf: Any, path: str) -> np.ndarray | None:
    """Flat positions that a boolean array marks; None for a plain bool."""
    if isinstance(want, bool):
        return None
    if np.asarray(want).dtype != np.bool_:
        raise TypeError(f"mask at {path} is {want!r}; True, False or a boolean array is needed.")
    marks = np.asarray(want)
    if marks.shape not in ((), tuple(leaf.shape)):
        raise ValueError(
            f"mask at {path} has shape {marks.shape}, but the parameter has {tuple(leaf.shape)}."
        )
    return np.flatnonzero(np.broadcast_to(marks, leaf.shape))
