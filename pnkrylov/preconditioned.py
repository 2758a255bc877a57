"""The covariance of a run on `P^-1/2 A P^-1/2`, mapped back to that of A exactly.

With `y = P^1/2 x` every belief about the inner operator is one about the outer: means map by
`P^-1/2`, covariances by `P^-1/2 . P^-1/2`, and the isotropic bulk takes the shape of `P^-1`.

Source: METHOD.md section 6.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pnkrylov._operator_types import CovarianceOperator
from pnkrylov._structure import VectorStructure
from pnkrylov.covariance import KrylovCovariance
from pnkrylov.preconditioners import Preconditioner


class PreconditionedCovariance(CovarianceOperator):
    """`P^-1/2 Sigma P^-1/2` for the covariance Sigma of a preconditioned run.

    Marginal variances and the trace map every basis vector once, which takes the memory of a
    second basis while they are computed.

    Attributes:
        inner: Sigma.
        preconditioner: P.
        structure: the user's vectors.
    """

    inner: KrylovCovariance
    preconditioner: Preconditioner
    structure: VectorStructure = eqx.field(static=True)

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`P^-1/2 Sigma P^-1/2 v`."""
        return self.block_mv(vector[None, :])[0]

    def block_mv(self, block: Float[Array, "k d"]) -> Float[Array, "k d"]:
        """`P^-1/2 Sigma P^-1/2 v` for every row v of `block`."""
        return self._map(self.inner.block_mv(self._map(block)))

    def bulk_dimension(self) -> Int[Array, ""]:
        """Number of directions in the bulk."""
        return self.inner.bulk_dimension()

    def sample_parts(self, key: PRNGKeyArray, num_samples: int) -> dict[str, Float[Array, "N d"]]:
        """Independent zero-mean draws of each part; a draw of the whole is their sum."""
        parts = self.inner.sample_parts(key, num_samples)
        return {name: self._map(part) for name, part in parts.items()}

    def sample(self, key: PRNGKeyArray, num_samples: int) -> Float[Array, "N d"]:
        """Zero-mean draws, one per row."""
        return self._map(self.inner.sample(key, num_samples))

    def diagonal(self) -> Float[Array, " d"]:
        """The marginal variances."""
        rows = self._map(self.inner.vectors)
        return self.inner.diagonal_along(rows, self.preconditioner.inv_diagonal())

    def unexplored(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`P^-1/2 P_rest P^-1/2 v`: what a unit of bulk variance does to v."""
        return self._map(self.inner.unexplored(self._map(vector)))

    def unexplored_diagonal(self) -> Float[Array, " d"]:
        """The diagonal of `P^-1/2 P_rest P^-1/2`."""
        rows = self._map(self.inner.vectors)
        return self.inner.unexplored_along(rows, self.preconditioner.inv_diagonal())

    def trace(self) -> Float[Array, ""]:
        """The trace."""
        return jnp.sum(self.diagonal())

    def logdet(self) -> Float[Array, ""]:
        """The log-determinant; minus infinity where the covariance is singular."""
        return self.inner.logdet() - self.preconditioner.logdet()

    def push(self, rows: Float[Array, "k d"]) -> Float[Array, "k k"]:
        """`B P^-1/2 Sigma P^-1/2 B^T`, dense, positive semi-definite by construction."""
        return self.inner.push(self._map(rows))

    def scaled(self, deviation: Float[Array, ""]) -> "PreconditionedCovariance":
        """The covariance times `deviation**2`; only for one without a resolved part."""
        inner = self.inner.scaled(deviation)
        return PreconditionedCovariance(
            inner=inner, preconditioner=self.preconditioner, structure=self.structure
        )

    def _map(self, vectors: Array) -> Array:
        return self.preconditioner.inv_sqrt_mv(vectors)


Covariance = KrylovCovariance | PreconditionedCovariance


def mapped_back(covariance: KrylovCovariance, preconditioner: Preconditioner | None) -> Covariance:
    """The covariance of `x = P^-1/2 y` for that of y; as it is without a preconditioner."""
    if preconditioner is None:
        return covariance
    return PreconditionedCovariance(
        inner=covariance, preconditioner=preconditioner, structure=covariance.structure
    )


def inner_view(
    covariance: CovarianceOperator, error: Float[Array, " d"]
) -> tuple[KrylovCovariance, Float[Array, " d"]]:
    """A covariance and an error as the preconditioned run sees them: Z and S do not change.

    Raises:
        TypeError: the covariance is that of a block run.
    """
    if isinstance(covariance, KrylovCovariance):
        return covariance, error
    if not isinstance(covariance, PreconditionedCovariance):
        raise TypeError(
            f"belief has a {type(covariance).__name__}, but Z and S are for beliefs of single "
            "vectors: use block_size=1, or one right-hand side."
        )
    return covariance.inner, covariance.preconditioner.sqrt_mv(error)
