"""The kernel matrix of a data set as an operator that is never formed."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pnkrylov._arguments import check_positive_counts, check_reals
from pnkrylov._operator_types import EntryOperator
from pnkrylov._structure import VectorStructure, check_dtype
from pnkrylov.gp.adapt import as_kernel
from pnkrylov.gp.kernels import Kernel
from pnkrylov.preconditioners._checks import check_finite


class KernelOperator(EntryOperator):
    """`K(X, X)` on flat vectors `(n,)`, without noise: noise is a shift.

    Products evaluate the kernel tile by tile, `block_rows` points against `block_rows` points, once
    for all vectors of a block. They hold one tile at a time, also while they are differentiated.
    The matrix is positive *semi*definite: two equal points make it singular.

    Attributes:
        kernel: the covariance function.
        inputs: the points, `(n,)` or `(n, p)`.
        block_rows: points along each side of a tile.
        structure: that of a vector `(n,)`.
    """

    kernel: Kernel
    inputs: Float[Array, " n *p"]
    block_rows: int = eqx.field(static=True)
    structure: VectorStructure = eqx.field(static=True)

    def mv(self, vector: Float[Array, " n"]) -> Float[Array, " n"]:
        """Returns `K v`."""
        return self.block_mv(vector[None])[0]

    def block_mv(self, block: Float[Array, "k n"]) -> Float[Array, "k n"]:
        """Returns `K v` for every row; the kernel is evaluated once for all."""
        return _product(self.kernel, self.inputs, self.inputs, block, self.block_rows)

    def as_matrix(self) -> Float[Array, "n n"]:
        """The dense matrix, by n^2 evaluations."""
        return self.kernel.matrix(self.inputs, self.inputs)

    def diagonal(self) -> Float[Array, " n"]:
        """The variances `k(x_i, x_i)`, shape `(n,)`."""
        return self.kernel.diagonal(self.inputs)

    def columns(self, indices: Int[Array, " k"]) -> Float[Array, "k n"]:
        """Columns of the matrix, stored as rows, by `k n` evaluations."""
        return self.kernel.matrix(self.inputs[indices], self.inputs)

    def row(self, index: Int[Array, ""]) -> Float[Array, " n"]:
        """Row `index`, by n evaluations."""
        return self.columns(index[None])[0]

    def cross(self, Xs: Float[Array, " s *p"]) -> Float[Array, "s n"]:
        """The kernel matrix `K(Xs, X)` between other points and the inputs.

        Args:
            Xs: Points, shape `(s,)` or `(s, p)` as the inputs, same dtype.

        Returns:
            The matrix, shape `(s, n)`, all of it in memory.

        Raises:
            ValueError: The points have another shape than the inputs.
            TypeError: They have another dtype.
        """
        return self.kernel.matrix(self._check_points(Xs), self.inputs)

    def cross_mv(
        self, Xs: Float[Array, " s *p"], block: Float[Array, "k n"]
    ) -> Float[Array, "k s"]:
        """Returns `K(Xs, X) v` for every row v, tile by tile.

        Args:
            Xs: Points, shape `(s,)` or `(s, p)` as the inputs, same dtype.
            block: Vectors as rows, shape `(k, n)`.

        Returns:
            The products as rows, shape `(k, s)`.

        Raises:
            ValueError: The points have another shape than the inputs.
            TypeError: They have another dtype.
        """
        return _product(self.kernel, self._check_points(Xs), self.inputs, block, self.block_rows)

    def _check_points(self, Xs: Float[Array, " s *p"]) -> Float[Array, " s *p"]:
        check_reals(Xs=Xs)
        Xs = jnp.asarray(Xs)
        if Xs.ndim != self.inputs.ndim or Xs.shape[1:] != self.inputs.shape[1:]:
            raise ValueError(
                f"Xs has shape {Xs.shape}, but the inputs have shape {self.inputs.shape}: points "
                "must look the same."
            )
        if Xs.dtype != self.inputs.dtype:
            raise TypeError(
                f"Xs has dtype {Xs.dtype}, but the inputs have dtype {self.inputs.dtype}; nothing "
                "is cast silently. Cast one of the two with .astype."
            )
        return Xs


def kernel_operator(kernel: Any, X: Any, *, block_rows: int | None = None) -> KernelOperator:
    """The matrix `K(X, X)` of a covariance function, as an operator.

    Args:
        kernel: A kernel of this package, of tinygp or of gpjax, or a JAX function `k(x, y)` of two
            points (see `as_kernel`). A point is a scalar for inputs of shape `(n,)`, else a `(p,)`
            vector.
        X: Inputs, a JAX or NumPy array of shape `(n,)` or `(n, p)`, float32 or float64.
        block_rows: Points along each side of a tile; memory is `block_rows^2` numbers. By default
            256 on CPU, where a tile stays in the cache, and 4096 elsewhere (64 MB in float32).

    Returns:
        The operator, on vectors `(n,)` of the dtype of X.

    Raises:
        TypeError: X has no real floating dtype, or the kernel is not callable or returns another
            dtype.
        ValueError: X is empty or has more than two axes, `block_rows` is below 1, or the kernel
            does not return scalars.
        NotFiniteError: X contains NaN or infinity.
    """
    dtype = check_dtype(getattr(X, "dtype", None), "X")
    if X.ndim not in (1, 2) or X.size == 0:
        raise ValueError(
            f"X has shape {X.shape}; it must be (n,) or (n, p), with at least one point."
        )
    X = check_finite(jnp.asarray(X), "X")
    if block_rows is None:
        block_rows = 256 if jax.default_backend() == "cpu" else 4096
    check_positive_counts(block_rows=block_rows)
    kernel = as_kernel(kernel, jax.ShapeDtypeStruct(X.shape[1:], dtype))
    return KernelOperator(
        kernel=kernel,
        inputs=X,
        block_rows=block_rows,
        structure=VectorStructure.flat(len(X), dtype),
    )


@eqx.filter_jit
def _product(
    kernel: Kernel,
    X1: Float[Array, " s *p"],
    X2: Float[Array, " n *p"],
    block: Float[Array, "k n"],
    tile: int,
) -> Float[Array, "k s"]:
    """`K(X1, X2) v` for every row v of the block, one tile in memory at a time."""
    rows, columns = _tiles(X1, tile), _tiles(X2, tile)
    count, width = columns.shape[:2]
    # The points that fill up the last tile get zero weights.
    padded = jnp.pad(block, ((0, 0), (0, count * width - block.shape[1])))
    weights = padded.reshape(len(block), count, width).transpose(1, 0, 2)

    # Differentiation evaluates a tile anew instead of keeping all of them.
    @jax.checkpoint
    def tile_product(X1: Array, X2: Array, weights: Array) -> Array:
        matrix = kernel.matrix(X1, X2)
        return jnp.matmul(weights, matrix.T, precision=jax.lax.Precision.HIGHEST)

    def row_of_tiles(X1: Array) -> Array:
        def add(total: Array, column: tuple[Array, Array]) -> tuple[Array, None]:
            return total + tile_product(X1, *column), None

        start = jnp.zeros((len(block), len(X1)), block.dtype)
        return jax.lax.scan(add, start, (columns, weights))[0]

    products = jax.lax.map(row_of_tiles, rows)  # (tiles, k, points)
    return products.transpose(1, 0, 2).reshape(len(block), -1)[:, : len(X1)]


def _tiles(X: Float[Array, " n *p"], tile: int) -> Float[Array, " tiles rows *p"]:
    """The points in tiles of equal size, the last one filled up with copies of the last point."""
    count = math.ceil(len(X) / tile)
    width = math.ceil(len(X) / count)
    padding = [(0, count * width - len(X))] + [(0, 0)] * (X.ndim - 1)
    return jnp.pad(X, padding, mode="edge").reshape(count, width, *X.shape[1:])
