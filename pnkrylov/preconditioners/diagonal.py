"""Diagonal preconditioners: a multiple of the identity, given entries, or those of an operator."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._arguments import check_array, check_positive_counts
from pnkrylov.operators import as_operator
from pnkrylov.preconditioners._checks import as_scalar, check_finite, check_positive
from pnkrylov.preconditioners.base import Preconditioner
from pnkrylov.preconditioners.entries import diagonal_cost, operator_diagonal


class ScaledIdentity(Preconditioner):
    """`P = scale I`: the neutral element. One number; no set-up.

    Attributes:
        scale: The only eigenvalue, a scalar.
        num_products: Zero: setting it up costs no product.
    """

    scale: Float[Array, ""]
    _size: int = eqx.field(static=True)
    num_products: int = eqx.field(static=True)

    def __init__(self, size: int, scale: float | Float[Array, ""] = 1.0, *, dtype: Any = None):
        """Builds the preconditioner.

        Args:
            size: Number of rows d.
            scale: The eigenvalue, positive.
            dtype: Dtype of the vectors; that of `scale`, or JAX's default, when None.

        Raises:
            TypeError, ValueError: `size` is no positive int, or `scale` no real number.
            NotFiniteError, NotPositiveDefiniteError: `scale` is not finite, or not positive.
        """
        check_positive_counts(size=size)
        if dtype is None:
            dtype = scale.dtype if isinstance(scale, jax.Array) else jnp.result_type(float)
        scale = as_scalar(scale, "scale", dtype)
        self.scale = check_positive(scale, "scale", "Use 1 for no preconditioning.")
        self._size, self.num_products = size, 0

    @property
    def size(self) -> int:
        """Number of rows d."""
        return self._size

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the flat vectors."""
        return self.scale.dtype

    def power_mv(self, vectors: Float[Array, "*k d"], exponent: float) -> Float[Array, "*k d"]:
        """Returns `scale^exponent v`."""
        return vectors * self.scale**exponent

    def logdet(self) -> Float[Array, ""]:
        """`d log scale`."""
        return self.size * jnp.log(self.scale)

    def inv_diagonal(self) -> Float[Array, " d"]:
        """`1 / scale`, d times."""
        return jnp.broadcast_to(1 / self.scale, (self.size,))


class Diagonal(Preconditioner):
    """`P = diag(entries)`: d numbers, and no set-up beyond the entries.

    Attributes:
        entries: The eigenvalues, `(d,)`.
    """

    entries: Float[Array, " d"]
    num_products: int = eqx.field(static=True)

    def __init__(self, entries: Float[Array, " d"], *, num_products: int = 0):
        """Builds the preconditioner.

        Args:
            entries: Positive numbers, `(d,)`.
            num_products: Products with A that finding them has cost.

        Raises:
            TypeError: They are no real floating array.
            ValueError: They are not a vector, or empty.
            NotFiniteError, NotPositiveDefiniteError: An entry is not finite, or not positive.
        """
        check_array(entries, "entries", "d")
        remedy = "Pass the variances or curvatures themselves, or lift them above zero (damping)."
        self.entries = check_positive(entries, "entries", remedy)
        self.num_products = num_products

    @classmethod
    def of(
        cls,
        A: Any,
        *,
        key: PRNGKeyArray | None = None,
        num_probes: int = 32,
        floor: float | Float[Array, ""] | None = None,
        like: PyTree | None = None,
    ) -> "Diagonal":
        """The diagonal of an operator (Jacobi's preconditioner).

        Args:
            A: Anything that `as_operator` takes.
            key: Random key for an operator that is known by products only.
            num_probes: Products to spend on such an operator.
            floor: Smallest entry; what is below is raised to it. A known lower bound of the
                spectrum (damping, noise variance) is right: no diagonal entry can be smaller.
            like: Example of a vector, as in `as_operator`.

        Returns:
            The preconditioner; `num_products` is 0 where the diagonal is exact.

        Raises:
            TypeError, ValueError: As `as_operator`; `floor` is no real number; `key` is needed and
                missing, or `num_probes` is no int above 1.
            NotFiniteError, NotPositiveDefiniteError: An entry is not finite, or not positive.
        """
        operator = as_operator(A, like=like)
        spent = diagonal_cost(A, operator, num_probes)
        entries = operator_diagonal(A, key=key, num_probes=num_probes, like=like).value
        if floor is not None:
            floor = check_finite(as_scalar(floor, "floor", entries.dtype), "floor")
            entries = jnp.maximum(entries, floor)
        remedy = "Pass floor= (a known lower bound of the spectrum, such as the damping)" + (
            ", or more probes: the estimate is noisy." if spent else ", or check the operator."
        )
        check_positive(entries, "The diagonal of A", remedy)
        return cls(entries, num_products=spent)

    @property
    def size(self) -> int:
        """Number of rows d."""
        return self.entries.shape[0]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the flat vectors."""
        return self.entries.dtype

    def power_mv(self, vectors: Float[Array, "*k d"], exponent: float) -> Float[Array, "*k d"]:
        """Returns `entries^exponent v`."""
        powers = self.entries**exponent
        return vectors * (powers if vectors.ndim == 1 else powers[None, :])

    def logdet(self) -> Float[Array, ""]:
        """The sum of the logarithms."""
        return jnp.sum(jnp.log(self.entries))

    def inv_diagonal(self) -> Float[Array, " d"]:
        """The reciprocals."""
        return 1 / self.entries
