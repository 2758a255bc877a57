"""The kinds of SPD operators, as lineax operators on a flat vector.

Sets of vectors are stored as rows, `(k, d)` contiguous, everywhere in this library.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.core import Tracer
from jax.experimental import sparse as jsparse
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from pnkrylov._structure import VectorStructure


class SPDOperator(lx.AbstractLinearOperator):
    """A symmetric positive definite operator on flat vectors of a real floating dtype.

    A lineax operator and a pytree: arrays are leaves, so a jitted function that takes one does not
    recompile when only values change. Positive definiteness is the caller's claim; symmetry can be
    probed with `check_symmetric`, and a Lanczos run tests the rest.
    """

    structure: eqx.AbstractVar[VectorStructure]
    # Whether products leave JAX through a callback, which compiled loops on CPU may hang in.
    calls_host: ClassVar[bool] = False

    @abc.abstractmethod
    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """Returns `A v` for one vector of shape `(d,)`."""

    @abc.abstractmethod
    def block_mv(self, block: Float[Array, "k d"]) -> Float[Array, "k d"]:
        """Returns `A v` for every row `v` of `block`, shape `(k, d)`, in one block product."""

    def runs_on_host(self) -> bool:
        """Whether a product of this operator, or of one inside it, calls the host."""

        def found(node):
            return isinstance(node, SPDOperator) and node.calls_host

        return any(found(node) for node in jax.tree.leaves(self, is_leaf=found))

    @property
    def size(self) -> int:
        """Number of rows d."""
        return self.structure.size

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the flat vectors."""
        return self.structure.dtype

    def ravel(self, tree: PyTree) -> Float[Array, " d"]:
        """Flattens one of the user's vectors (see `VectorStructure.ravel`)."""
        return self.structure.ravel(tree)

    def unravel(self, flat: Float[Array, " d"]) -> PyTree:
        """Rebuilds the user's vector, with its structure and dtypes, from a flat one."""
        return self.structure.unravel(flat)

    def as_matrix(self) -> Float[Array, "d d"]:
        """The dense matrix, by d products."""
        return self.block_mv(jnp.eye(self.size, dtype=self.dtype))

    def transpose(self) -> "SPDOperator":
        """Returns the operator itself: it is symmetric."""
        return self

    def in_structure(self) -> jax.ShapeDtypeStruct:
        """The flat vector: shape `(d,)`."""
        return jax.ShapeDtypeStruct((self.size,), self.dtype)

    def out_structure(self) -> jax.ShapeDtypeStruct:
        """The flat vector: shape `(d,)`."""
        return self.in_structure()


class CovarianceOperator(SPDOperator):
    """A covariance by factors, of which draws, variances and push-forwards are cheap."""

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray, num_samples: int) -> Float[Array, "N d"]:
        """Zero-mean draws, one per row."""

    @abc.abstractmethod
    def diagonal(self) -> Float[Array, " d"]:
        """The marginal variances."""

    @abc.abstractmethod
    def push(self, rows: Float[Array, "k d"]) -> Float[Array, "k k"]:
        """`B Sigma B^T`, dense, positive semi-definite."""


class EntryOperator(SPDOperator):
    """An operator whose entries are known without a product."""

    @abc.abstractmethod
    def diagonal(self) -> Float[Array, " d"]:
        """The diagonal."""

    @abc.abstractmethod
    def row(self, index: Int[Array, ""]) -> Float[Array, " d"]:
        """Row `index`."""


class DenseOperator(EntryOperator):
    """A dense matrix in memory."""

    matrix: Float[Array, "d d"]
    structure: VectorStructure = eqx.field(static=True)

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """Returns `A v`."""
        # HIGHEST keeps float32 accurate on accelerators; on CPU it is the bare product.
        # One core, d = 2000, float64: A @ v 0.61 ms, v @ A 0.74 ms.
        return jnp.matmul(self.matrix, vector, precision=jax.lax.Precision.HIGHEST)

    def block_mv(self, block: Float[Array, "k d"]) -> Float[Array, "k d"]:
        """Returns `A v` for every row."""
        # block @ A (A is symmetric) beats (A @ block.T).T and a vmapped A @ v: one core, d = 2000,
        # float64, 4 rows 1.64 / 2.57 / 2.47 ms, 16 rows 2.70 / 3.62 / 3.13 ms.
        return jnp.matmul(block, self.matrix, precision=jax.lax.Precision.HIGHEST)

    def as_matrix(self) -> Float[Array, "d d"]:
        """The matrix itself."""
        return self.matrix

    def diagonal(self) -> Float[Array, " d"]:
        """The diagonal of the matrix."""
        return jnp.diagonal(self.matrix)

    def row(self, index: Int[Array, ""]) -> Float[Array, " d"]:
        """Row `index` of the matrix."""
        return self.matrix[index]


class SparseOperator(SPDOperator):
    """A sparse matrix as JAX arrays: one set of entries, indexed by coordinates and by rows.

    Both indexings are kept because neither is fast at both products. One core, five-point Laplacian
    with d = 90,000, float64: one vector 0.55 ms (BCOO) against 2.3 ms (BCSR), a block of 16 rows
    30 ms (BCOO) against 3.9 ms (BCSR).
    """

    entries: Float[Array, " nonzeros"]
    coordinates: Int[Array, "nonzeros 2"]
    row_starts: Int[Array, " rows_and_end"]
    structure: VectorStructure = eqx.field(static=True)

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """Returns `A v`."""
        return self._by_coordinates() @ vector

    def block_mv(self, block: Float[Array, "k d"]) -> Float[Array, "k d"]:
        """Returns `A v` for every row, by one sparse times dense product."""
        parts = (self.entries, self.coordinates[:, 1], self.row_starts)
        by_rows = jsparse.BCSR(
            parts, shape=(self.size, self.size), indices_sorted=True, unique_indices=True
        )
        return (by_rows @ block.T).T

    def as_matrix(self) -> Float[Array, "d d"]:
        """The matrix, dense."""
        return self._by_coordinates().todense()

    def _by_coordinates(self) -> jsparse.BCOO:
        return jsparse.BCOO(
            (self.entries, self.coordinates),
            shape=(self.size, self.size),
            indices_sorted=True,
            unique_indices=True,
        )


class FunctionOperator(SPDOperator):
    """A product `v -> A v` given by a JAX function of flat vectors."""

    function: Callable[[Array], Array]
    structure: VectorStructure = eqx.field(static=True)

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """Returns `A v`."""
        return self.function(vector)

    def block_mv(self, block: Float[Array, "k d"]) -> Float[Array, "k d"]:
        """Returns `A v` for every row, by `jax.vmap`."""
        return jax.vmap(self.function)(block)


class HostOperator(SPDOperator):
    """A product computed by NumPy code on the host, outside JAX."""

    calls_host: ClassVar[bool] = True
    host: "HostProduct" = eqx.field(static=True)
    structure: VectorStructure = eqx.field(static=True)

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """Returns `A v`; under `jax.vmap` one callback serves the whole batch."""
        if isinstance(vector, Tracer):
            return _host_product(self.host, vector)
        return jnp.asarray(self.host(vector))

    def block_mv(self, block: Float[Array, "k d"]) -> Float[Array, "k d"]:
        """Returns `A v` for every row, by one callback."""
        if isinstance(block, Tracer):
            return _host_product(self.host, block)
        return jnp.asarray(self.host(block))


class HostProduct:
    """Calls `matvec` or `matmat` on NumPy arrays; compared by the operator it wraps."""

    def __init__(self, operator: Any):
        self.operator = operator

    def __hash__(self) -> int:
        return id(self.operator)

    def __eq__(self, other: object) -> bool:
        # By identity: probnum overloads ==. The same object again must not recompile.
        return isinstance(other, HostProduct) and other.operator is self.operator

    def __call__(self, vectors: Any) -> np.ndarray:
        vectors = np.asarray(vectors)
        rows = vectors.reshape(-1, vectors.shape[-1])
        # One vector goes to matvec: many operators define only that one.
        products = self.operator @ rows[0] if len(rows) == 1 else (self.operator @ rows.T).T
        return np.asarray(products, dtype=vectors.dtype).reshape(vectors.shape)


def _host_product(host: HostProduct, vectors: Float[Array, "*k d"]) -> Float[Array, "*k d"]:
    def product(_, vectors):
        shape = jax.ShapeDtypeStruct(vectors.shape, vectors.dtype)
        return jax.pure_callback(host, shape, vectors, vmap_method="broadcast_all")

    # A callback has no derivative. A v is linear in v and its own transpose, and this is the one
    # public transformation-proof way to say so (`linear_call` has no batching rule): the "solve" is
    # our product, and the system that it nominally solves is only ever looked at for its shape.
    return jax.lax.custom_linear_solve(lambda x: x, vectors, product, symmetric=True)


# What lineax asks of an operator is answered by functions that dispatch on its type.


@lx.is_symmetric.register(SPDOperator)
@lx.is_positive_semidefinite.register(SPDOperator)
def _(operator: SPDOperator) -> bool:
    return True


@lx.is_diagonal.register(SPDOperator)
@lx.is_tridiagonal.register(SPDOperator)
@lx.is_lower_triangular.register(SPDOperator)
@lx.is_upper_triangular.register(SPDOperator)
def _(operator: SPDOperator) -> bool:
    return operator.size == 1


@lx.has_unit_diagonal.register(SPDOperator)
@lx.is_negative_semidefinite.register(SPDOperator)
def _(operator: SPDOperator) -> bool:
    return False


@lx.conj.register(SPDOperator)
@lx.linearise.register(SPDOperator)
def _(operator: SPDOperator) -> SPDOperator:
    return operator


@lx.materialise.register(SPDOperator)
def _(operator: SPDOperator) -> DenseOperator:
    return DenseOperator(matrix=operator.as_matrix(), structure=operator.structure)


@lx.diagonal.register(SPDOperator)
def _(operator: SPDOperator) -> Array:
    return jnp.diagonal(operator.as_matrix())


@lx.tridiagonal.register(SPDOperator)
def _(operator: SPDOperator) -> tuple[Array, Array, Array]:
    matrix = operator.as_matrix()
    return tuple(jnp.diagonal(matrix, offset=offset) for offset in (0, -1, 1))  # pyright: ignore
