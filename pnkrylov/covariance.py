"""Resolved + coupling + bulk as one structured covariance: never dense, a square root for free."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pnkrylov._arguments import check_counts
from pnkrylov._operator_types import CovarianceOperator
from pnkrylov._structure import VectorStructure
from pnkrylov.tridiagonal import Tridiagonal

_HIGHEST = jax.lax.Precision.HIGHEST


class KrylovCovariance(CovarianceOperator):
    """`Q^T F F^T Q + [q u] C [q u]^T + omega P_rest`, by factors, over one Lanczos basis.

    The three parts are the resolved block (present in a belief about A^-1, absent in one about
    A^-1 v), the rank-two coupling at the truncation boundary, and an isotropic bulk over the
    directions that neither has explored. A lineax operator, positive semi-definite by construction.

    Attributes:
        vectors: `(n, d)`, rows of the Lanczos basis.
        resolved: the factored T of the resolved rows, or None.
        directions: `(2, n)`, coordinates of the unit vectors q (along q_par) and u in the basis.
        coupling_factor: `(2, 2)`, a square root of C.
        explored: `(n,)`, the basis rows that the bulk leaves out; u is left out where `has_u`.
        has_u: whether the bulk leaves out u.
        bulk_deviation: sqrt(omega).
        structure: the user's vectors.

    Source:
        pslq.md, section 4.1; METHOD.md section 3.
    """

    vectors: Float[Array, "n d"]
    resolved: Tridiagonal | None
    directions: Float[Array, "2 n"]
    coupling_factor: Float[Array, "2 2"]
    explored: Bool[Array, " n"]
    has_u: Bool[Array, ""]
    bulk_deviation: Float[Array, ""]
    structure: VectorStructure = eqx.field(static=True)

    def bulk_dimension(self) -> Int[Array, ""]:
        """Number of directions in the bulk."""
        explored = jnp.sum(self.explored, dtype=jnp.int32) + self.has_u.astype(jnp.int32)
        return self.size - explored

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`Sigma v`, in two products with the basis."""
        return self.block_mv(vector[None, :])[0]

    def block_mv(self, block: Float[Array, "k d"]) -> Float[Array, "k d"]:
        """`Sigma v` for every row v of `block`."""
        coordinates = self._coordinates(block)
        along = jnp.matmul(coordinates, self.directions.T, precision=_HIGHEST)
        coupled = jnp.matmul(along, self.coupling_factor, precision=_HIGHEST)
        coupled = jnp.matmul(coupled, self.coupling_factor.T, precision=_HIGHEST)
        inside = jnp.matmul(coupled, self.directions, precision=_HIGHEST)
        if self.resolved is not None:
            own = self.resolved.solve(self._filled(coordinates).T).T
            inside = inside + self._filled(own) / self.resolved.unit
        bulk = self.bulk_deviation**2
        return bulk * block + self._combine(inside - bulk * self._explored_part(coordinates))

    def sample_parts(self, key: PRNGKeyArray, num_samples: int) -> dict[str, Float[Array, "N d"]]:
        """Independent zero-mean draws of each part; a draw of the whole is their sum.

        Returns:
            `{"resolved": ..., "coupling": ..., "bulk": ...}`, each `(num_samples, d)`.

        Raises:
            TypeError, ValueError: `num_samples` is no int or negative; `key` is no random key.
        """
        check_counts(num_samples=num_samples)
        resolved_key, coupling_key, bulk_key = jax.random.split(key, 3)
        size, rows, dtype = self.size, self.vectors.shape[0], self.dtype
        noise = jax.random.normal(coupling_key, (num_samples, 2), dtype)
        noise = jnp.matmul(noise, self.coupling_factor.T, precision=_HIGHEST)
        coupling = self._combine(jnp.matmul(noise, self.directions, precision=_HIGHEST))
        noise = jax.random.normal(bulk_key, (num_samples, size), dtype)
        bulk = self.bulk_deviation * self._unexplored_rows(noise)
        resolved = jnp.zeros((num_samples, size), dtype)
        if self.resolved is not None:
            noise = jax.random.normal(resolved_key, (num_samples, rows), dtype)
            resolved = self._combine(self._resolved_factor_mv(noise))
        return {"resolved": resolved, "coupling": coupling, "bulk": bulk}

    def sample(self, key: PRNGKeyArray, num_samples: int) -> Float[Array, "N d"]:
        """Zero-mean draws, one per row.

        Raises:
            TypeError, ValueError: as `sample_parts`.
        """
        parts = self.sample_parts(key, num_samples)
        return parts["resolved"] + parts["coupling"] + parts["bulk"]

    def diagonal(self) -> Float[Array, " d"]:
        """The marginal variances, in O(n d)."""
        return self.diagonal_along(self.vectors, jnp.ones((self.size,), self.dtype))

    def diagonal_along(
        self, rows: Float[Array, "n d"], squares: Float[Array, " d"]
    ) -> Float[Array, " d"]:
        """The diagonal of `L Sigma L`, for symmetric L, in O(n d).

        Args:
            rows: `L v` for every basis vector v.
            squares: the diagonal of `L^2`.
        """
        directions = jnp.matmul(self.directions, rows, precision=_HIGHEST)
        coupled = jnp.matmul(self.coupling_factor.T, directions, precision=_HIGHEST)
        bulk = self.bulk_deviation**2 * self.unexplored_along(rows, squares)
        return jnp.sum(coupled**2, axis=0) + bulk + self._resolved_diagonal(rows)

    def unexplored(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`P_rest v`: the part of v in the bulk."""
        return self._unexplored_rows(vector[None, :])[0]

    def unexplored_diagonal(self) -> Float[Array, " d"]:
        """The diagonal of `P_rest`."""
        return self.unexplored_along(self.vectors, jnp.ones((self.size,), self.dtype))

    def unexplored_along(
        self, rows: Float[Array, "n d"], squares: Float[Array, " d"]
    ) -> Float[Array, " d"]:
        """The diagonal of `L P_rest L`; arguments as for `diagonal_along`."""
        explored = jnp.sum(jnp.where(self.explored[:, None], rows**2, 0), axis=0)
        u = jnp.matmul(self.directions[1], rows, precision=_HIGHEST)
        explored = explored + jnp.where(self.has_u, u**2, 0)
        # The rows are orthonormal before L: what they explain of `squares` is at most all of it;
        # rounding must not make a variance negative.
        return jnp.maximum(squares - explored, 0)

    def trace(self) -> Float[Array, ""]:
        """The trace, closed form."""
        total = jnp.sum(self.coupling_factor**2)
        total = total + self.bulk_deviation**2 * self.bulk_dimension().astype(self.dtype)
        if self.resolved is not None:
            total = total + jnp.sum(self.resolved.inverse_diagonal()) / self.resolved.unit
        return total

    def logdet(self) -> Float[Array, ""]:
        """The log-determinant, closed form; minus infinity where the covariance is singular."""
        if self.resolved is None:
            return jnp.asarray(-jnp.inf, self.dtype)
        coupling = jnp.matmul(self.coupling_factor, self.coupling_factor.T, precision=_HIGHEST)
        along_u = jnp.where(self.has_u, coupling[1, 1], 1)
        # Schur complement of u in the block [Q, u]: T^-1 plus a multiple of q q^T.
        left = jnp.where(self.has_u, coupling[0, 0] - coupling[0, 1] ** 2 / along_u, 0)
        stiffness = self._stiffness(self.directions[0])
        bulk_dimension = self.bulk_dimension()
        bulk = jnp.where(
            bulk_dimension > 0,
            2 * bulk_dimension.astype(self.dtype) * jnp.log(self.bulk_deviation),
            0,
        )
        return -self.resolved.logdet() + jnp.log1p(left * stiffness) + jnp.log(along_u) + bulk

    def push(self, rows: Float[Array, "k d"]) -> Float[Array, "k k"]:
        """`B Sigma B^T`, dense, positive semi-definite by construction."""
        coordinates = self._coordinates(rows)
        along = jnp.matmul(coordinates, self.directions.T, precision=_HIGHEST)
        coupling = jnp.matmul(along, self.coupling_factor, precision=_HIGHEST)
        factors = [coupling, self.bulk_deviation * self._unexplored_rows(rows)]
        if self.resolved is not None:
            factor = self.resolved.factor_transpose_mv(self._filled(coordinates).T).T
            factors.append(factor / jnp.sqrt(self.resolved.unit))
        joined = jnp.concatenate(factors, axis=1)
        return jnp.matmul(joined, joined.T, precision=_HIGHEST)

    def scaled(self, deviation: Float[Array, ""]) -> "KrylovCovariance":
        """The covariance times `deviation**2`; only for one without a resolved part."""
        return eqx.tree_at(
            lambda c: (c.coupling_factor, c.bulk_deviation),
            self,
            (self.coupling_factor * deviation, self.bulk_deviation * deviation),
        )

    def _coordinates(self, block: Array) -> Array:
        return jnp.matmul(block, self.vectors.T, precision=_HIGHEST)

    def _combine(self, coordinates: Array) -> Array:
        return jnp.matmul(coordinates, self.vectors, precision=_HIGHEST)

    def _explored_part(self, coordinates: Array) -> Array:
        along_u = jnp.matmul(coordinates, self.directions[1], precision=_HIGHEST)
        along_u = jnp.where(self.has_u, along_u, 0)
        return (
            jnp.where(self.explored[None, :], coordinates, 0)
            + along_u[:, None] * self.directions[1][None, :]
        )

    def _unexplored_rows(self, block: Array) -> Array:
        return block - self._combine(self._explored_part(self._coordinates(block)))

    def _filled(self, coordinates: Array) -> Array:
        assert self.resolved is not None
        inside = self.resolved.rows() < self.resolved.filled
        return jnp.where(inside[None, :], coordinates, 0)

    def _resolved_factor_mv(self, noise: Array) -> Array:
        assert self.resolved is not None
        own = self.resolved.factor_mv(self._filled(noise).T).T
        return self._filled(own) / jnp.sqrt(self.resolved.unit)

    def _resolved_diagonal(self, rows: Array) -> Array:
        if self.resolved is None:
            return jnp.zeros((self.size,), self.dtype)
        return self.resolved.inverse_diagonal_along(rows) / self.resolved.unit

    def _stiffness(self, direction: Array) -> Array:
        """`q^T T q`, unscaled."""
        assert self.resolved is not None
        tridiagonal = self.resolved
        inside = tridiagonal.rows() < tridiagonal.filled
        own = jnp.where(inside, direction, 0)
        return tridiagonal.unit * (
            jnp.sum(tridiagonal.alpha * own**2)
            + 2 * jnp.sum(tridiagonal.off_diagonal * own[:-1] * own[1:])
        )


@lx.diagonal.register(KrylovCovariance)
def _(operator: KrylovCovariance) -> Array:
    return operator.diagonal()


def coupling_square_root(
    parallel_norm: Float[Array, ""],
    p1: Float[Array, ""],
    p2: Float[Array, ""],
    p3: Float[Array, ""],
) -> Float[Array, "2 2"]:
    """A square root of the 2 x 2 block C_2 (METHOD.md section 3), zero where there is no coupling.

    `C_2 = [[p1 s^2, -s sqrt(p2)], [-s sqrt(p2), p3 / p2]]` with `s = ||q_par||`. Cauchy-Schwarz
    gives `p1 p3 >= p2^2`: what rounding takes below zero is clipped.
    """
    safe = jnp.where(p1 > 0, p1, 1)
    safe2 = jnp.where(p2 > 0, p2, 1)
    # Cholesky: first column (s sqrt(p1), -sqrt(p2 / p1)), and what is left of p3 / p2.
    left = jnp.sqrt(jnp.maximum(p3 / safe2 - p2 / safe, 0))
    factor = jnp.stack(
        [
            jnp.stack([parallel_norm * jnp.sqrt(safe), jnp.zeros_like(p1)]),
            jnp.stack([-jnp.sqrt(p2 / safe), left]),
        ]
    )
    return jnp.where(p1 > 0, factor, 0)
