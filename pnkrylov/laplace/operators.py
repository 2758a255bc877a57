"""Curvature matrices as operators: linearised once, streamed over batches, or from stored rows.

Which one fits: a linearisation keeps the activations of all data and is the fastest single product
of a dense network. Stored rows cost `num_rows * p` numbers and make products two matrix products,
by far the fastest for convolutions and for many vectors at once. A stream keeps neither.
"""

import abc
from collections.abc import Iterator
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, PyTree

from pnkrylov._operator_types import HostProduct, _host_product
from pnkrylov._structure import VectorStructure
from pnkrylov.krylov import is_concrete
from pnkrylov.laplace.batches import Batches
from pnkrylov.laplace.kinds import Problem, batch_product, map_product, row_chunks
from pnkrylov.laplace.parameters import Parameters
from pnkrylov.operators import SPDOperator

_HIGHEST = jax.lax.Precision.HIGHEST
# The dense form and the diagonal of a Hessian are made for this many unit vectors at a time.
_BLOCK = 64


class Curvature(SPDOperator):
    """The curvature of a summed loss at given parameters, without any prior.

    A symmetric operator on the flat vector of the selected parameters, positive semi-definite but
    for the exact Hessian. It is singular as soon as there are more parameters than rows: a run
    needs the prior precision as its shift.

    Attributes:
        parameters: the parameters that it was taken at, selection included.
        loss: negative log-likelihood of the data there, scaled like the curvature.
        num_outputs: outputs K of the model.
        num_examples: examples that were seen (before scaling).
        num_rows: rows of the square root, `None` for a Hessian, which has none.
    """

    parameters: eqx.AbstractVar[Parameters]
    loss: eqx.AbstractVar[Array]
    num_outputs: eqx.AbstractVar[int]
    num_examples: eqx.AbstractVar[int]
    num_rows: eqx.AbstractVar[int | None]

    @abc.abstractmethod
    def row_chunks(self) -> Iterator[Float[Array, "r p"]]:
        """Yields the square-root rows in order, some at a time.

        Raises:
            TypeError: There are none, for an exact Hessian.
        """

    @property
    def row_bytes(self) -> int | None:
        """Memory that `square_root_rows` takes, in bytes; None for a Hessian."""
        return None if self.num_rows is None else self.num_rows * self.size * self.dtype.itemsize

    def square_root_rows(self) -> Float[Array, "rows p"]:
        """The matrix R with `G = R^T R`: rows `sqrt(scale) L_i^T J_i`, examples in order.

        One vector-Jacobian product per row.

        Returns:
            `(num_rows, p)`.

        Raises:
            TypeError: For an exact Hessian.
        """
        return jnp.concatenate(list(self.row_chunks()))

    def stored(self) -> "RowsCurvature":
        """The same curvature with products from stored rows: `row_bytes` of memory."""
        _check_has_rows(self)
        return RowsCurvature(
            rows=self.square_root_rows(),
            parameters=self.parameters,
            loss=self.loss,
            structure=self.structure,
            num_outputs=self.num_outputs,
            num_examples=self.num_examples,
            num_rows=self.num_rows,
        )

    def gram(self) -> Float[Array, "rows rows"]:
        """The matrix `R R^T`, which has the non-zero spectrum of G. Stores the rows meanwhile."""
        rows = self.square_root_rows()
        return jnp.matmul(rows, rows.T, precision=_HIGHEST)

    def as_matrix(self) -> Float[Array, "p p"]:
        """The dense matrix, from the rows or, for a Hessian, by p products; made in chunks."""
        if self.num_rows is None:
            return jnp.concatenate([block for _, block in self._columns()])
        total = jnp.zeros((self.size, self.size), self.dtype)
        for rows in self.row_chunks():
            total = total + jnp.matmul(rows.T, rows, precision=_HIGHEST)
        return total

    def diagonal(self) -> Float[Array, " p"]:
        """The diagonal, exact, at the price of `as_matrix` but in the memory of a chunk."""
        if self.num_rows is None:
            entries = [jnp.diagonal(block, offset=start) for start, block in self._columns()]
            return jnp.concatenate(entries)
        total = jnp.zeros(self.size, self.dtype)
        for rows in self.row_chunks():
            total = total + jnp.sum(rows**2, axis=0)
        return total

    def _columns(self) -> Iterator[tuple[int, Array]]:
        """Yields first index and images of some unit vectors at a time; last chunk cut to fit."""
        length = min(_BLOCK, self.size)
        for start in range(0, self.size, length):
            begin = min(start, self.size - length)
            units = jnp.eye(length, self.size, k=begin, dtype=self.dtype)
            yield start, self.block_mv(units)[start - begin :]


@lx.diagonal.register(Curvature)
def _(operator: Curvature) -> Array:
    return operator.diagonal()


class Split(eqx.Module):
    """Any pytree as one with array leaves only, so that `jax.jit` takes an operator that holds it.

    Functions (a model, a user's density) and other leaves are static, compared by `==`.
    """

    arrays: list[Any]
    others: tuple[Any, ...] = eqx.field(static=True)
    treedef: Any = eqx.field(static=True)

    @classmethod
    def of(cls, tree: PyTree) -> "Split":
        """Splits a tree."""
        leaves, treedef = jax.tree.flatten(tree)
        arrays = [leaf if eqx.is_array(leaf) else None for leaf in leaves]
        others = tuple(None if eqx.is_array(leaf) else leaf for leaf in leaves)
        return cls(arrays, others, treedef)

    def tree(self) -> PyTree:
        """The tree again."""
        pairs = zip(self.arrays, self.others, strict=True)
        leaves = [other if array is None else array for array, other in pairs]
        return jax.tree.unflatten(self.treedef, leaves)


class InMemoryCurvature(Curvature):
    """Data in memory: the model is linearised once, every product reuses it.

    Attributes:
        linear: the `LinearMap`, residuals included.
        problem: the `Problem`, inputs and targets, which the rows are made of.
        scale: the sum over the data is multiplied by this.
    """

    linear: Split
    problem: Split
    parameters: Parameters
    scale: Array
    loss: Array
    num_outputs: int = eqx.field(static=True)
    structure: VectorStructure = eqx.field(static=True)
    num_examples: int = eqx.field(static=True)
    num_rows: int | None = eqx.field(static=True)

    def mv(self, vector: Float[Array, " p"]) -> Float[Array, " p"]:
        """Returns `G v`."""
        return self.scale * map_product(self.linear.tree(), vector)

    def block_mv(self, block: Float[Array, "k p"]) -> Float[Array, "k p"]:
        """Returns `G v` for every row."""
        return self.scale * map_product(self.linear.tree(), block)

    def row_chunks(self) -> Iterator[Float[Array, "r p"]]:
        """Yields the square-root rows in order, some at a time."""
        _check_has_rows(self)
        problem, inputs, targets = self.problem.tree()
        for rows in row_chunks(problem, inputs, targets, 0, self.num_outputs):
            yield jnp.sqrt(self.scale) * rows


class StreamedCurvature(Curvature):
    """Data in batches: every product goes through all of them, and nothing is kept.

    The loop over the batches runs in Python, around one compiled product per batch: inside an XLA
    loop on CPU, convolutions take five times as long (METHOD section 13). Under `jit` it is a
    callback, which the host driver of a Lanczos run is made for. A block of vectors shares the
    linearisation of each batch.
    """

    calls_host: ClassVar[bool] = True
    host: "StreamedProduct" = eqx.field(static=True)
    loss: Array
    num_outputs: int = eqx.field(static=True)
    structure: VectorStructure = eqx.field(static=True)
    num_examples: int = eqx.field(static=True)
    num_rows: int | None = eqx.field(static=True)

    @property
    def parameters(self) -> Parameters:
        """The parameters of the problem."""
        return self.host.problem.parameters

    def mv(self, vector: Float[Array, " p"]) -> Float[Array, " p"]:
        """Returns `G v`."""
        if is_concrete(vector):
            return self.host.product(vector)
        return _host_product(self.host, vector)

    def block_mv(self, block: Float[Array, "k p"]) -> Float[Array, "k p"]:
        """Returns `G v` for every row, in one pass over the data."""
        if is_concrete(block):
            return self.host.product(block)
        return _host_product(self.host, block)

    def row_chunks(self) -> Iterator[Float[Array, "r p"]]:
        """Yields the square-root rows in order, some at a time."""
        _check_has_rows(self)
        for offset, inputs, targets in self.host.passes():
            for rows in row_chunks(self.host.problem, inputs, targets, offset, self.num_outputs):
                yield self.host.scale**0.5 * rows


class StreamedProduct(HostProduct):
    """The sum over batches, as a function on the host; compared by identity.

    Attributes:
        problem: the model and the kind of curvature.
        batches: the data.
        num_examples: how many examples a pass must yield.
        scale: the sum is multiplied by this.
    """

    def __init__(self, problem: Problem, batches: Batches, num_examples: int, scale: float):
        super().__init__(self)
        self.problem = problem
        self.batches = batches
        self.num_examples = num_examples
        self.scale = scale

    def passes(self) -> Iterator[tuple[int, PyTree, Any]]:
        """Goes through the data once, and checks that there are as many as before."""
        seen = 0
        for offset, inputs, targets in self.batches:
            seen = offset + targets.shape[0]
            yield offset, inputs, targets
        if seen != self.num_examples:
            raise ValueError(
                f"data yielded {seen} examples, but {self.num_examples} in the first pass. Every "
                "pass must go through the same data: return a new iterator each time, without "
                "random sampling."
            )

    def product(self, vectors: Array) -> Array:
        """Products with one vector `(p,)` or the rows of `(k, p)`."""
        total = jnp.zeros_like(vectors)
        for offset, inputs, targets in self.passes():
            index = jnp.asarray(offset, jnp.int32)
            total = total + batch_product(self.problem, inputs, targets, index, vectors)
        return self.scale * total

    def __call__(self, vectors: Any) -> np.ndarray:
        """The callback."""
        vectors = jnp.asarray(vectors)
        rows = vectors.reshape(-1, vectors.shape[-1])
        # A single vector is not mapped over: convolutions are slower with a batch of one.
        products = self.product(rows[0] if len(rows) == 1 else rows)
        return np.asarray(products).reshape(vectors.shape)


class RowsCurvature(Curvature):
    """`G = R^T R` from stored rows: a product is two matrix products, for any number of vectors."""

    rows: Float[Array, "rows p"]
    parameters: Parameters
    loss: Array
    structure: VectorStructure = eqx.field(static=True)
    num_outputs: int = eqx.field(static=True)
    num_examples: int = eqx.field(static=True)
    num_rows: int | None = eqx.field(static=True)

    def mv(self, vector: Float[Array, " p"]) -> Float[Array, " p"]:
        """Returns `R^T (R v)`."""
        inner = jnp.matmul(self.rows, vector, precision=_HIGHEST)
        return jnp.matmul(inner, self.rows, precision=_HIGHEST)

    def block_mv(self, block: Float[Array, "k p"]) -> Float[Array, "k p"]:
        """Returns `R^T (R v)` for every row v."""
        inner = jnp.matmul(block, self.rows.T, precision=_HIGHEST)
        return jnp.matmul(inner, self.rows, precision=_HIGHEST)

    def row_chunks(self) -> Iterator[Float[Array, "r p"]]:
        """Yields the stored rows."""
        yield self.rows

    def square_root_rows(self) -> Float[Array, "rows p"]:
        """The stored rows."""
        return self.rows

    def stored(self) -> "RowsCurvature":
        """Returns itself."""
        return self


def _check_has_rows(curvature: Curvature) -> None:
    if curvature.num_rows is None:
        raise TypeError(
            "An exact Hessian has no square root: it may be indefinite. Use ggn(...) or fisher(...)"
            " for Gram and square-root forms."
        )
