"""A small dense SPD matrix by its eigendecomposition: the usual block of a block-diagonal P."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pnkrylov._arguments import check_square
from pnkrylov.errors import NotSymmetricError
from pnkrylov.krylov import is_concrete
from pnkrylov.preconditioners._checks import check_finite, refuse
from pnkrylov.preconditioners.base import Preconditioner


class Dense(Preconditioner):
    """`P = V^T diag(values) V`. Memory: `d (d + 1)` numbers; set-up: `O(d^3)`.

    Attributes:
        vectors: Eigenvectors as rows, `(d, d)`.
        values: Eigenvalues, `(d,)`, positive.
        num_products: Products with A that finding the matrix has cost.
    """

    vectors: Float[Array, "d d"]
    values: Float[Array, " d"]
    num_products: int = eqx.field(static=True)

    def __init__(self, matrix: Float[Array, "d d"], *, num_products: int = 0):
        """Builds the preconditioner.

        Args:
            matrix: Symmetric positive definite, `(d, d)`.
            num_products: Products with A that finding it has cost.

        Raises:
            TypeError: It is no real floating array.
            ValueError: It is not square, or empty.
            NotFiniteError: An entry is not finite.
            NotSymmetricError: It differs from its transpose beyond rounding (outside `jit` only;
                inside, its symmetric part is taken).
            NotPositiveDefiniteError: An eigenvalue is not positive beyond rounding.
        """
        check_square(matrix, "matrix")
        matrix = check_finite(matrix, "matrix")
        _check_symmetric(matrix)
        values, vectors = jnp.linalg.eigh((matrix + matrix.T) / 2)
        rounding = matrix.shape[0] * jnp.finfo(values.dtype).eps * jnp.max(jnp.abs(values))
        self.values = refuse(
            values,
            values <= rounding,
            "The eigenvalues of matrix must be positive beyond rounding",
            "Add a multiple of the identity (damping, prior precision, noise variance).",
        )
        self.vectors, self.num_products = vectors.T, num_products

    @property
    def size(self) -> int:
        """Number of rows d."""
        return self.values.shape[0]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the flat vectors."""
        return self.values.dtype

    def power_mv(self, vectors: Float[Array, "*k d"], exponent: float) -> Float[Array, "*k d"]:
        """Returns `P^exponent v`."""
        powers = self.values**exponent
        inside = jnp.matmul(vectors, self.vectors.T, precision=lax.Precision.HIGHEST)
        inside = inside * (powers if vectors.ndim == 1 else powers[None, :])
        return jnp.matmul(inside, self.vectors, precision=lax.Precision.HIGHEST)

    def logdet(self) -> Float[Array, ""]:
        """The sum of the logarithms of the eigenvalues."""
        return jnp.sum(jnp.log(self.values))

    def inv_diagonal(self) -> Float[Array, " d"]:
        """Closed form, `O(d^2)`."""
        return jnp.matmul(1 / self.values, self.vectors**2, precision=lax.Precision.HIGHEST)


def _check_symmetric(matrix: Array) -> None:
    if not is_concrete(matrix):
        return
    entries = np.asarray(matrix)
    asymmetry = np.max(np.abs(entries - entries.T)) / max(
        np.max(np.abs(entries)), np.finfo(entries.dtype).tiny
    )
    tolerance = 100 * len(entries) ** 0.5 * float(jnp.finfo(matrix.dtype).eps)
    if asymmetry > tolerance:
        raise NotSymmetricError(
            f"matrix differs from its transpose by {asymmetry:.2g} of its largest entry; rounding "
            f"explains at most {tolerance:.2g}. Pass (matrix + matrix.T) / 2."
        )
