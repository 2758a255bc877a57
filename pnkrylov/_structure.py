"""The user's vectors (arrays or pytrees) seen as one flat vector, and their structural checks."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PyTree

X64_REMEDY = (
    "Enable double precision with jax.config.update('jax_enable_x64', True) before the first JAX "
    "operation, or cast the data to float32 yourself."
)


def check_dtype(dtype: Any, name: str) -> np.dtype:
    """Returns `dtype` when it is a real floating dtype that JAX can hold now.

    Args:
        dtype: Anything that NumPy accepts as a dtype, or None for a missing one.
        name: What the message calls the data.

    Returns:
        The dtype, unchanged.

    Raises:
        TypeError: For integer, boolean, complex or other dtypes, and for float64 while x64 is off
            (JAX would silently truncate it).
    """
    if dtype is None:  # np.dtype(None) would be float64
        raise TypeError(f"{name} has no dtype. Give it one: float32 or float64.")
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{name} has the complex dtype {dtype}; only real symmetric positive definite problems "
            "are supported. Solve the equivalent real problem of twice the size, "
            "[[Re, -Im], [Im, Re]]."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{name} has dtype {dtype}; a real floating dtype is needed. "
            "Cast it, for example with .astype(jnp.float32)."
        )
    if dtype.itemsize > 8:
        raise TypeError(f"{name} has dtype {dtype}, which JAX does not have. Cast it to float64.")
    if dtype == np.float64 and not jax.config.jax_enable_x64:  # pyright: ignore
        raise TypeError(f"{name} is float64, but JAX runs without it (x64 is off). {X64_REMEDY}")
    return dtype


def _leaf_shape_and_dtype(leaf: Any, name: str) -> tuple[tuple[int, ...], np.dtype]:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        if not isinstance(leaf, (bool, int, float, complex)):
            raise TypeError(
                f"{name} contains {leaf!r} of type {type(leaf).__name__}; every leaf must be a "
                "real floating array."
            )
        # A Python float carries double precision: JAX must not truncate it unasked.
        leaf = np.asarray(leaf)
    return tuple(leaf.shape), leaf.dtype


def describe(tree: PyTree) -> str:
    """Returns a one-line picture of a pytree: its containers, with dtype[shape] for each leaf."""

    def picture(leaf):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            return _Verbatim(f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]")
        return _Verbatim(type(leaf).__name__)

    return repr(jtu.tree_map(picture, tree))


class _Verbatim:
    """Prints as its text, without quotes."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class VectorStructure:
    """What the user's vectors look like: containers, leaf shapes and leaf dtypes. Hashable.

    The flat vector has the widest of the leaf dtypes, and at least float32: half precision
    leaves are computed with in single precision and cast back.
    """

    treedef: Any  # a jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @classmethod
    def of(cls, like: PyTree, name: str = "like") -> "VectorStructure":
        """Reads the structure off an example.

        Args:
            like: Array, pytree of arrays, or pytree of `jax.ShapeDtypeStruct`.
            name: What error messages call it.

        Returns:
            The structure.

        Raises:
            TypeError: A leaf is not a real floating array (see `check_dtype`).
            ValueError: There is no leaf, or no entry in any leaf.
        """
        leaves, treedef = jtu.tree_flatten(like)
        found = [_leaf_shape_and_dtype(leaf, name) for leaf in leaves]
        dtypes = tuple(check_dtype(dtype, name) for _, dtype in found)
        structure = cls(treedef, tuple(shape for shape, _ in found), dtypes)
        if structure.size == 0:
            raise ValueError(
                f"{name} is empty: {describe(like)} has no entries. "
                "Pass a vector with at least one entry."
            )
        return structure

    @classmethod
    def flat(cls, size: int, dtype: Any) -> "VectorStructure":
        """The structure of a single array of shape `(size,)`."""
        return cls.of(jax.ShapeDtypeStruct((size,), dtype))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each leaf."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """Number of entries d of the flat vector."""
        return sum(self.sizes)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the flat vector."""
        with jax.numpy_dtype_promotion("standard"):
            return np.dtype(jnp.result_type(jnp.float32, *self.dtypes))

    @property
    def epsilon(self) -> float:
        """Unit roundoff of the coarsest leaf dtype: what a product can be accurate to."""
        return max(float(jnp.finfo(dtype).eps) for dtype in self.dtypes)

    @property
    def tree(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The structure as a pytree of `jax.ShapeDtypeStruct`."""
        leaves = [
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        return jtu.tree_unflatten(self.treedef, leaves)

    def check(self, tree: PyTree, name: str, *, expected_by: str) -> None:
        """Raises unless `tree` has this structure, printing both sides.

        Args:
            tree: Array or pytree to look at.
            name: What error messages call it.
            expected_by: Who asks for the structure, for the message.

        Raises:
            TypeError: A leaf has another dtype.
            ValueError: The containers or the shape of a leaf differ.
        """
        leaves, treedef = jtu.tree_flatten(tree)
        found = [_leaf_shape_and_dtype(leaf, name) for leaf in leaves]
        sides = f"{name}: {describe(tree)}; expected by {expected_by}: {describe(self.tree)}"
        if treedef != self.treedef:
            raise ValueError(f"{name} has the wrong pytree structure. {sides}.")
        if tuple(shape for shape, _ in found) != self.shapes:
            raise ValueError(f"{name} has the wrong shape. {sides}.")
        for (_, dtype), expected in zip(found, self.dtypes, strict=True):
            if dtype != expected:
                check_dtype(dtype, name)
                raise TypeError(
                    f"{name} has dtype {dtype}, but {expected_by} needs {expected}; nothing is "
                    f"cast silently. Cast one of the two with .astype. {sides}."
                )

    def ravel(self, tree: PyTree) -> Float[Array, " d"]:
        """Flattens a tree of this structure; no checks.

        Args:
            tree: Array or pytree with this structure.

        Returns:
            The `(d,)` vector in `self.dtype`.
        """
        flats = [jnp.asarray(leaf).reshape(-1).astype(self.dtype) for leaf in jtu.tree_leaves(tree)]
        return flats[0] if len(flats) == 1 else jnp.concatenate(flats)

    def unravel(self, flat: Float[Array, " d"]) -> PyTree:
        """Rebuilds the tree from a flat vector; the inverse of `ravel`.

        Args:
            flat: Vector of shape `(d,)`.

        Returns:
            Array or pytree with this structure, every leaf in its own dtype.
        """
        pieces = jnp.split(flat, np.cumsum(self.sizes)[:-1]) if len(self.sizes) > 1 else [flat]
        leaves = [
            piece.reshape(shape).astype(dtype)
            for piece, shape, dtype in zip(pieces, self.shapes, self.dtypes, strict=True)
        ]
        return jtu.tree_unflatten(self.treedef, leaves)
