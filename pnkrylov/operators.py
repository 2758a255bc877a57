"""Anything operator-like -> one symmetric positive definite operator on a flat vector."""

import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from pnkrylov._closures import close
from pnkrylov._operator_types import (
    DenseOperator,
    EntryOperator,
    FunctionOperator,
    HostOperator,
    HostProduct,
    SparseOperator,
    SPDOperator,
)
from pnkrylov._structure import VectorStructure, check_dtype, describe

__all__ = [
    "DenseOperator",
    "EntryOperator",
    "FunctionOperator",
    "HostOperator",
    "SPDOperator",
    "SparseOperator",
    "as_operator",
    "check_symmetric",
    "check_vector",
    "symmetry_tolerance",
]


def as_operator(A: Any, *, like: PyTree | None = None) -> SPDOperator:
    """Adapts anything operator-like to one SPD operator on flat vectors.

    Args:
        A: One of
            - a JAX or NumPy array of shape `(d, d)`;
            - a callable `v -> A v` on arrays or pytrees, in pure JAX (needs `like`). It is traced
              once per call of `as_operator`, and every array in it becomes a leaf of the operator:
              what a function closes over *now*, and the leaves of a callable that is a pytree
              (`jax.tree_util.Partial`, `equinox.Module` with `__call__`). Jitted code that takes
              the operator does not recompile while the program stays the same. Python numbers
              belong to the program; a pytree callable with array leaves is the sure way to
              change values without recompilation;
            - a lineax linear operator, on flat vectors or pytrees;
            - a `scipy.sparse` matrix or array, which becomes JAX arrays;
            - a `scipy.sparse.linalg.LinearOperator` or a probnum linear operator: products run on
              the host through a callback (dense and sparse probnum matrices become JAX arrays);
            - an `SPDOperator`, which is returned as it is (`like`, if given, must agree).
        like: An example right-hand side: array, pytree of arrays or of `jax.ShapeDtypeStruct`.
            Fixes the structure that vectors come in and go out with. Without it, matrices act on
            vectors of shape `(d,)`.

    Returns:
        The operator. Its dtype is the widest leaf dtype, and at least float32.

    Raises:
        TypeError: `A` is of no known kind or a callable without `like`, its dtype is not a real
            floating one or float64 while x64 is off, or its dtype and that of `like` differ.
        ValueError: `A` is not square, not two-dimensional or empty, `like` has another length, or
            a callable returns another structure or shape than it was given.
    """
    structure = None if like is None else VectorStructure.of(like)
    if isinstance(A, SPDOperator):
        if like is not None:
            A.structure.check(like, "like", expected_by="the operator A")
        return A
    if isinstance(A, (jax.Array, np.ndarray)):
        structure = _matrix_structure(A, "A", structure)
        return DenseOperator(matrix=jnp.asarray(A), structure=structure)
    if scipy.sparse.issparse(A):
        return _from_scipy_sparse(A, _matrix_structure(A, "A", structure))
    if isinstance(A, lx.AbstractLinearOperator):
        return _from_lineax(A, structure)
    if isinstance(A, scipy.sparse.linalg.LinearOperator):
        return _from_host(A, structure)
    if _is_probnum(A, "Matrix"):
        return as_operator(A.A, like=like)  # its array or scipy.sparse matrix
    if _is_probnum(A, "LinearOperator"):
        return _from_host(A, structure)
    if callable(A):
        return _from_callable(A, structure)
    raise TypeError(
        f"A is {describe(A)} of type {type(A).__name__}, which is no known kind of operator. Pass "
        "a two-dimensional array, a callable v -> A v, a lineax operator, a scipy.sparse matrix, a "
        "scipy.sparse.linalg.LinearOperator or a probnum linear operator."
    )


def _matrix_structure(A: Any, name: str, like: VectorStructure | None) -> VectorStructure:
    """Checks shape and dtype of something with `.shape` and `.dtype`."""
    shape = tuple(A.shape)
    if len(shape) != 2:
        raise ValueError(f"{name} must be two-dimensional, got shape {shape}.")
    if shape[0] != shape[1]:
        raise ValueError(
            f"{name} must be square, got shape {shape}. "
            "For least squares, pass the normal operator v -> B.T @ (B @ v)."
        )
    if shape[0] == 0:
        raise ValueError(f"{name} is empty: its shape is {shape}.")
    dtype = check_dtype(A.dtype, name)
    if dtype.itemsize < 4:
        raise TypeError(
            f"{name} has dtype {dtype}, too coarse for orthogonal bases. Cast it to float32."
        )
    if like is None:
        return VectorStructure.flat(shape[0], dtype)
    return _agreeing(like, shape[0], dtype)


def _agreeing(like: VectorStructure, size: int, dtype: np.dtype) -> VectorStructure:
    """Returns `like` if an operator of this size and dtype can act on it."""
    if like.size != size:
        raise ValueError(
            f"A acts on vectors of length {size}, but the right-hand side {describe(like.tree)} "
            f"has {like.size} entries."
        )
    if like.dtype != dtype:
        raise TypeError(
            f"A has dtype {dtype}, but the right-hand side {describe(like.tree)} has dtype "
            f"{like.dtype}; nothing is cast silently. Cast one of the two with .astype."
        )
    return like


def _from_scipy_sparse(A: Any, structure: VectorStructure) -> SparseOperator:
    rows = scipy.sparse.csr_array(A, copy=True)  # sum_duplicates works in place
    rows.sum_duplicates()
    coordinates = np.stack(rows.tocoo().coords, axis=1).astype(np.int32)
    return SparseOperator(
        entries=jnp.asarray(rows.data),
        coordinates=jnp.asarray(coordinates),
        row_starts=jnp.asarray(rows.indptr.astype(np.int32)),
        structure=structure,
    )


def _from_host(A: Any, like: VectorStructure | None) -> HostOperator:
    return HostOperator(host=HostProduct(A), structure=_matrix_structure(A, "A", like))


def _from_lineax(A: lx.AbstractLinearOperator, like: VectorStructure | None) -> SPDOperator:
    if isinstance(A, lx.MatrixLinearOperator):
        return as_operator(A.matrix) if like is None else as_operator(A.matrix, like=like.tree)
    ins, outs = A.in_structure(), A.out_structure()
    structure = VectorStructure.of(ins, "A.in_structure()")
    structure.check(outs, "A.out_structure()", expected_by="A square operator")
    if like is not None:
        like.check(ins, "A.in_structure()", expected_by="the right-hand side")
    # Linearised once, a Jacobian costs its tangent pass only (METHOD section 13).
    return _from_function(lx.linearise(A).mv, structure)


class _OnTrees(eqx.Module):
    """A callable on the user's trees, as a function of flat vectors."""

    function: Callable
    structure: VectorStructure = eqx.field(static=True)

    def __call__(self, flat: Float[Array, " d"]) -> Float[Array, " d"]:
        product = self.function(self.structure.unravel(flat))
        expected = "A symmetric operator, whose output looks like its input,"
        self.structure.check(product, "The product A v", expected_by=expected)
        return self.structure.ravel(product)


def _is_probnum(A: Any, kind: str) -> bool:
    # An instance can only exist if probnum has been imported; nothing is imported here.
    linops = sys.modules.get("probnum.linops")
    return linops is not None and isinstance(A, getattr(linops, kind))


def _from_callable(A: Callable, structure: VectorStructure | None) -> FunctionOperator:
    if structure is None:
        raise TypeError(
            "A is a callable, so its size is unknown: pass like=, an example right-hand side "
            "(array, pytree, or pytree of jax.ShapeDtypeStruct)."
        )
    return _from_function(A, structure)


def _from_function(function: Callable, structure: VectorStructure) -> FunctionOperator:
    flat = jax.ShapeDtypeStruct((structure.size,), structure.dtype)
    try:
        closed = close(_OnTrees(function, structure), flat)
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            "A is a callable that JAX cannot trace: it needs the numbers in its argument, as NumPy "
            "code does. Wrap it as scipy.sparse.linalg.LinearOperator((d, d), matvec=..., "
            "dtype=...), which runs on the host."
        ) from error
    return FunctionOperator(function=closed, structure=structure)


def check_vector(operator: SPDOperator, vector: PyTree, name: str = "v") -> Float[Array, " d"]:
    """Checks one of the user's vectors against an operator and flattens it.

    Args:
        operator: The operator.
        vector: Array or pytree with the operator's structure.
        name: What error messages call it.

    Returns:
        The flat vector, shape `(d,)`, in `operator.dtype`.

    Raises:
        TypeError: The dtype of a leaf differs (both are named), is not a real floating one, or is
            float64 while x64 is off.
        ValueError: The length, shape or containers differ.
    """
    operator.structure.check(vector, name, expected_by="the operator A")
    return operator.ravel(vector)


def check_symmetric(
    operator: SPDOperator, key: PRNGKeyArray, *, tolerance: float | None = None
) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """Probes `x.Ay = y.Ax` with two random vectors, at the price of two products.

    For independent normal x and y, the asymmetry `|x.Ay - y.Ax| / ((||Ax|| + ||Ay||)/2)` is about
    `|z| ||A - A.T||_F / ||A||_F` with z standard normal. Rounding errors of a product add up like
    a random walk to about `eps sqrt(d) ||A y||`, and their inner product with x to as much, times
    a standard normal. The default tolerance `100 eps sqrt(d)` leaves a factor of 100 for products
    that cancel inside (`J.T (H (J v))`); eps is that of the coarsest leaf dtype.

    Args:
        operator: The operator.
        key: Random key.
        tolerance: Largest asymmetry that is accepted; None derives it as above.

    Returns:
        The measured asymmetry and whether it is acceptable, as arrays (usable under `jit`).
        Products that are not finite give a NaN asymmetry and are accepted: they are another error.
    """
    x, y = probes = jax.random.normal(key, (2, operator.size), operator.dtype)
    images = operator.block_mv(probes)
    scale = jnp.mean(jnp.linalg.norm(images, axis=1))
    difference = jnp.abs(jnp.vdot(x, images[1]) - jnp.vdot(y, images[0]))
    asymmetry = jnp.where(scale == 0, 0, difference / jnp.where(scale == 0, 1, scale))
    if tolerance is None:
        tolerance = symmetry_tolerance(operator.structure)
    return asymmetry, ~(asymmetry > tolerance)


def symmetry_tolerance(structure: VectorStructure) -> float:
    """The default tolerance of `check_symmetric`, derived there."""
    return 100 * structure.epsilon * structure.size**0.5
