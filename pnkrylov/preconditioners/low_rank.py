"""`P = alpha I + B^T B` from few rows B, in closed form."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pnkrylov._arguments import check_array
from pnkrylov.preconditioners._checks import as_scalar, check_finite, check_positive
from pnkrylov.preconditioners.base import Preconditioner

_ALPHA_REMEDY = (
    "Without it P is singular: use the damping, prior precision or noise variance of the operator."
)


class LowRank(Preconditioner):
    """`P = alpha I + B^T B = alpha I + U^T diag(squares) U` with orthonormal rows U.

    Every power is closed form, `alpha^p I + U^T ((alpha + squares)^p - alpha^p) U`, at two thin
    products. Memory: `r (d + 1) + 1` numbers for r rows (at most d). Set-up: `O(r^2 d)`, no product
    with A.

    Attributes:
        vectors: U, `(r, d)`; orthonormal rows, or zero rows where `squares` is zero.
        squares: Eigenvalues of `B^T B`, `(r,)`, not negative.
        alpha: The eigenvalue of the rest, a positive scalar.
        num_products: Products with A that finding B has cost.
    """

    vectors: Float[Array, "r d"]
    squares: Float[Array, " r"]
    alpha: Float[Array, ""]
    num_products: int = eqx.field(static=True)

    def __init__(
        self, rows: Float[Array, "k d"], alpha: float | Float[Array, ""], *, num_products: int = 0
    ):
        """Builds the preconditioner.

        The eigenvectors come from the Gram matrix `B B^T` where `k < d`, orthonormalised once more,
        which is an order of magnitude faster than a thin SVD. Squared singular values below
        `10 k eps` of the largest are rounding and count as zero, so P differs from
        `alpha I + B^T B` by a rounding error of its norm, while its powers agree with each other.

        Args:
            rows: B, `(k, d)`; zero and repeated rows are fine, and so is `k >= d`.
            alpha: Multiple of the identity, positive.
            num_products: Products with A that finding the rows has cost.

        Raises:
            TypeError: `rows` is no real floating array, or `alpha` no real number.
            ValueError: `rows` is not a matrix, or empty.
            NotFiniteError: `rows` or `alpha` is not finite.
            NotPositiveDefiniteError: `alpha` is zero or negative.

        Source:
            METHOD.md, section 6.
        """
        check_array(rows, "rows", "k", "d")
        rows = check_finite(rows, "rows")
        self.vectors, self.squares = _eigenvectors(rows)
        alpha = as_scalar(alpha, "alpha", rows.dtype)
        self.alpha = check_positive(alpha, "alpha", _ALPHA_REMEDY)
        self.num_products = num_products

    @property
    def size(self) -> int:
        """Number of rows d."""
        return self.vectors.shape[1]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the flat vectors."""
        return self.vectors.dtype

    @property
    def rank(self) -> int:
        """Number of stored eigenvectors r."""
        return self.vectors.shape[0]

    def power_mv(self, vectors: Float[Array, "*k d"], exponent: float) -> Float[Array, "*k d"]:
        """Returns `P^exponent v`."""
        rest = self.alpha**exponent
        gain = (self.alpha + self.squares) ** exponent - rest
        inside = _dot(vectors, self.vectors.T)
        inside = inside * (gain if vectors.ndim == 1 else gain[None, :])
        return rest * vectors + _dot(inside, self.vectors)

    def logdet(self) -> Float[Array, ""]:
        """`sum log(alpha + squares) + (d - r) log alpha`."""
        rest = (self.size - self.rank) * jnp.log(self.alpha)
        return jnp.sum(jnp.log(self.alpha + self.squares)) + rest

    def inv_diagonal(self) -> Float[Array, " d"]:
        """Closed form, `O(r d)`."""
        shares = self.vectors**2
        inside = _dot(1 / (self.alpha + self.squares), shares)
        # Rounding may push the sum of the shares above one.
        return inside + jnp.maximum(1 - jnp.sum(shares, axis=0), 0) / self.alpha


def _dot(left: Array, right: Array) -> Array:
    # HIGHEST keeps float32 accurate on accelerators.
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def _eigenvectors(rows: Float[Array, "k d"]) -> tuple[Float[Array, "r d"], Float[Array, " r"]]:
    """Eigenvectors (as rows) and eigenvalues of `B^T B` with `r = min(k, d)`."""
    count, size = rows.shape
    if count >= size:
        squares, vectors = jnp.linalg.eigh(_dot(rows.T, rows))
        return vectors.T, jnp.maximum(squares, 0)
    squares, mixing = jnp.linalg.eigh(_dot(rows, rows.T))
    significant = squares > 10 * count * jnp.finfo(rows.dtype).eps * jnp.max(squares, initial=0)
    scale = jnp.where(significant, 1 / jnp.sqrt(jnp.where(significant, squares, 1)), 0)
    vectors = scale[:, None] * _dot(mixing.T, rows)
    # Next to a large singular value, the vectors of small ones are orthogonal only roughly (to 0.1
    # in float32 at a ratio of 1e3). The symmetric orthonormalisation changes them the least.
    gram = _dot(vectors, vectors.T) + jnp.diag(jnp.where(significant, 0, 1).astype(rows.dtype))
    values, rotation = jnp.linalg.eigh(gram)
    vectors = _dot(_dot(rotation / jnp.sqrt(values)[None, :], rotation.T), vectors)
    images = _dot(vectors, rows.T)
    return vectors, jnp.where(significant, jnp.sum(images**2, axis=1), 0)
