"""What every preconditioner offers: its symmetric powers, log-determinant and inverse diagonal."""

import abc
import math

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float


class Preconditioner(eqx.Module):
    """A symmetric positive definite matrix P on flat vectors, known by its symmetric powers.

    A preconditioned run works on `L^-1 A L^-1` with the symmetric root `L = P^{1/2}`, so P acts on
    flat vectors in the operator's order, and no product with P or a root of it may need an inner
    iteration. A preconditioner of your own derives from this class and implements `power_mv`,
    `logdet`, `inv_diagonal`, `size` and `dtype`.

    Attributes:
        num_products: Products with A that setting it up has cost.
    """

    num_products: eqx.AbstractVar[int]

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of rows d."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype:
        """Dtype of the flat vectors."""

    @abc.abstractmethod
    def power_mv(self, vectors: Float[Array, "*k d"], exponent: float) -> Float[Array, "*k d"]:
        """Returns `P^exponent v` for one vector `(d,)` or for every row of `(k, d)`."""

    @abc.abstractmethod
    def logdet(self) -> Float[Array, ""]:
        """The log-determinant of P."""

    @abc.abstractmethod
    def inv_diagonal(self) -> Float[Array, " d"]:
        """The diagonal of `P^-1`, exact up to rounding."""

    @property
    def num_floats(self) -> int:
        """How many floating-point numbers it stores."""
        leaves = jax.tree.leaves(eqx.filter(self, eqx.is_inexact_array))
        return sum(math.prod(leaf.shape) for leaf in leaves)

    def mv(self, vectors: Float[Array, "*k d"]) -> Float[Array, "*k d"]:
        """Returns `P v`."""
        return self.power_mv(vectors, 1.0)

    def inv_mv(self, vectors: Float[Array, "*k d"]) -> Float[Array, "*k d"]:
        """Returns `P^-1 v`."""
        return self.power_mv(vectors, -1.0)

    def sqrt_mv(self, vectors: Float[Array, "*k d"]) -> Float[Array, "*k d"]:
        """Returns `L v`, `L = P^{1/2}` symmetric."""
        return self.power_mv(vectors, 0.5)

    def inv_sqrt_mv(self, vectors: Float[Array, "*k d"]) -> Float[Array, "*k d"]:
        """Returns `L^-1 v`, `L = P^{1/2}` symmetric."""
        return self.power_mv(vectors, -0.5)
