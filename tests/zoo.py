"""A zoo of operators: every kind that `as_operator` accepts, each beside its dense twin."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as spla

from oracles import with_spectrum
from pnkrylov.operators import as_operator

SIZE = 12


@dataclasses.dataclass(frozen=True)
class Animal:
    """`A` goes to `as_operator(A, like=like)`; `dense` is the same matrix in float64."""

    A: Any
    dense: np.ndarray
    like: Any = None


@dataclasses.dataclass(frozen=True)
class Species:
    """Makes an animal of a given dtype (and, by the seed, of given values)."""

    name: str
    make: Callable[..., Animal]
    on_host: bool = False
    on_tree: bool = False
    coarse: bool = False  # some leaves are bfloat16


def dense_matrix(dtype, seed=0):
    """A dense SPD matrix, rounded to `dtype`."""
    return with_spectrum(np.geomspace(1, 50, SIZE), seed).astype(dtype)


def banded_matrix(dtype, seed=0):
    """A sparse SPD matrix, as a scipy.sparse CSR array; some rows have a single entry."""
    rng = np.random.default_rng(seed)
    off = rng.uniform(-1, 1, SIZE - 2) * (np.arange(SIZE - 2) % 3 > 0)
    matrix = np.diag(rng.uniform(3, 5, SIZE)) + np.diag(off, 2) + np.diag(off, -2)
    return sp.csr_array(matrix.astype(dtype))


def _flat_like(dtype):
    return jax.ShapeDtypeStruct((SIZE,), jnp.dtype(dtype))


def _tree_like(dtype):
    shapes = {"bias": (), "layers": [(2, 3), (5,)]}
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), shapes, is_leaf=is_shape
    )


class Product(eqx.Module):
    """A callable pytree."""

    matrix: jax.Array

    def __call__(self, vector):
        return self.matrix @ vector


def _on_tree(matrix):
    """A product on trees, written without the library: concatenates and splits by hand."""

    def product(tree):
        bias, (kernel, rest) = tree["bias"], tree["layers"]
        parts = [bias[None], kernel.reshape(6), rest.reshape(-1)]
        out = matrix @ jnp.concatenate([part.astype(matrix.dtype) for part in parts])
        parts = out[0], out[1:7].reshape(2, 3), out[7:].reshape(rest.shape)
        parts = [p.astype(leaf.dtype) for p, leaf in zip(parts, (bias, kernel, rest), strict=True)]
        return {"bias": parts[0], "layers": parts[1:]}

    return product


def _dense(wrap, like=None):
    def make(dtype, seed=0):
        matrix = dense_matrix(dtype, seed)
        return Animal(wrap(matrix), matrix.astype(np.float64), like and like(dtype))

    return make


def _sparse(wrap):
    def make(dtype, seed=0):
        matrix = banded_matrix(dtype, seed)
        return Animal(wrap(matrix), matrix.toarray().astype(np.float64))

    return make


def _function(matrix):
    A = jnp.asarray(matrix)
    return lambda v: A @ v


def _jitted(matrix):
    return jax.jit(_function(matrix))


def _partial(matrix):
    return functools.partial(jnp.matmul, jnp.asarray(matrix))


def _pytree_partial(matrix):
    return jax.tree_util.Partial(jnp.matmul, jnp.asarray(matrix))


def _in_tree(matrix):
    return _on_tree(jnp.asarray(matrix))


def _mixed_like(dtype):
    like = _tree_like(dtype)
    like["layers"][0] = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    return like


def _lineax_matrix(matrix):
    return lx.MatrixLinearOperator(jnp.asarray(matrix), lx.positive_semidefinite_tag)


def _lineax_tagged(matrix):
    untagged = lx.MatrixLinearOperator(jnp.asarray(matrix))
    return lx.TaggedLinearOperator(untagged, lx.positive_semidefinite_tag)


def _lineax_function(matrix):
    return lx.FunctionLinearOperator(_function(matrix), _flat_like(matrix.dtype))


def _lineax_on_tree(matrix):
    return lx.FunctionLinearOperator(_in_tree(matrix), _tree_like(matrix.dtype))


def _lineax_jacobian(matrix):
    A = jnp.asarray(matrix)
    # The Jacobian of x -> A (x + x^3) at zero is A.
    return lx.JacobianLinearOperator(
        lambda x, _: A @ (x + x**3), jnp.zeros(SIZE, A.dtype), tags=lx.symmetric_tag
    )


def _lineax_sum(dtype, seed=0):
    matrix, diagonal = dense_matrix(dtype, seed), np.arange(1, SIZE + 1).astype(dtype)
    A = _lineax_matrix(matrix) + lx.DiagonalLinearOperator(jnp.asarray(diagonal)) * 1.0
    return Animal(A, matrix.astype(np.float64) + np.diag(diagonal.astype(np.float64)))


def _matvec_only(matrix):
    return spla.LinearOperator(matrix.shape, matvec=lambda v: matrix @ v, dtype=matrix.dtype)


def _duplicated(matrix):
    coo = matrix.tocoo()
    rows, columns = (np.concatenate([index, index]) for index in coo.coords)
    return sp.coo_array((np.concatenate([coo.data, coo.data]) / 2, (rows, columns)), matrix.shape)


def _probnum(wrap, of):
    def make(dtype, seed=0):
        from pnkrylov.interop.probnum import import_probnum

        return of(lambda matrix: wrap(import_probnum().linops, matrix))(dtype, seed)

    return make


def _kronecker(dtype, seed=0):
    from pnkrylov.interop.probnum import import_probnum

    left = with_spectrum(np.geomspace(1, 4, 3), seed).astype(dtype)
    right = with_spectrum(np.geomspace(1, 9, 4), seed + 1).astype(dtype)
    A = import_probnum().linops.Kronecker(left, right)
    return Animal(A, np.kron(left.astype(np.float64), right.astype(np.float64)))


ZOO = [
    Species("jax array", _dense(jnp.asarray)),
    Species("numpy array", _dense(lambda matrix: matrix)),
    Species("numpy array, Fortran order", _dense(np.asfortranarray)),
    Species("dense matrix on a pytree", _dense(jnp.asarray, _tree_like), on_tree=True),
    Species("function", _dense(_function, _flat_like)),
    Species("jitted function", _dense(_jitted, _flat_like)),
    Species("functools.partial", _dense(_partial, _flat_like)),
    Species("jax.tree_util.Partial", _dense(_pytree_partial, _flat_like)),
    Species("equinox module", _dense(lambda m: Product(jnp.asarray(m)), _flat_like)),
    Species("function on a pytree", _dense(_in_tree, _tree_like), on_tree=True),
    Species(
        "function on bfloat16 and wider leaves",
        _dense(_in_tree, _mixed_like),
        on_tree=True,
        coarse=True,
    ),
    Species("lineax matrix", _dense(_lineax_matrix)),
    Species("lineax tagged matrix", _dense(_lineax_tagged)),
    Species("lineax function", _dense(_lineax_function)),
    Species("lineax function on a pytree", _dense(_lineax_on_tree)),
    Species("lineax Jacobian", _dense(_lineax_jacobian)),
    Species("lineax sum", _lineax_sum),
    Species("scipy csr_array", _sparse(lambda matrix: matrix)),
    Species("scipy csc_matrix", _sparse(sp.csc_matrix)),
    Species("scipy coo_array with duplicates", _sparse(_duplicated)),
    Species("scipy dia_array", _sparse(sp.dia_array)),
    Species("scipy LinearOperator", _dense(spla.aslinearoperator), on_host=True),
    Species("scipy LinearOperator, matvec only", _dense(_matvec_only), on_host=True),
    Species("SPDOperator", _dense(lambda matrix: as_operator(matrix))),
]
if sys.version_info < (3, 12):
    ZOO += [
        Species("probnum Matrix", _probnum(lambda linops, m: linops.Matrix(m), _dense)),
        Species(
            "probnum sparse Matrix",
            _probnum(lambda linops, m: linops.Matrix(sp.csr_matrix(m)), _sparse),
        ),
        Species(
            "probnum sum",
            _probnum(lambda linops, m: linops.Matrix(m) + linops.Scaling(0 * m[0]), _dense),
            on_host=True,
        ),
        Species("probnum Kronecker", _kronecker, on_host=True),
    ]


def make(species, dtype, seed=0):
    animal = species.make(dtype, seed)
    return as_operator(animal.A, like=animal.like), animal.dense


def vectors(count, dtype):
    return np.random.default_rng(7).standard_normal((count, SIZE)).astype(dtype)


def assert_products(actual, expected, species, scale=1):
    """Compares products; a dot product of length 12 with entries below 50 rounds to a few eps."""
    epsilon = float(jnp.finfo(jnp.bfloat16 if species.coarse else actual.dtype).eps)
    bound = 4 * epsilon * np.linalg.norm(expected) * scale
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=bound)
