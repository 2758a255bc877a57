"""Resolved + coupling of rank 2 k + bulk over one block basis, as a structured covariance."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pnkrylov._operator_types import CovarianceOperator
from pnkrylov._structure import VectorStructure
from pnkrylov.block.coupling import BlockCoupling
from pnkrylov.block.krylov import BlockKrylovBasis
from pnkrylov.block.tridiagonal import BlockTridiagonal

_HIGHEST = jax.lax.Precision.HIGHEST


class BlockCovariance(CovarianceOperator):
    """`Q^T T_m^-1 Q + D^T F F^T D + omega P_rest`: `KrylovCovariance` over a block basis.

    Attributes:
        vectors: `(n k, d)`, rows of the basis, zero where absent.
        resolved: the factored T, or None in a belief about A^-1 V.
        directions: `(2 k, n k)`, coordinates of the coupled directions.
        coupling_factor: `(2 k, 2 k)`, F.
        explored: `(n k,)`, the rows that are resolved and that the bulk leaves out.
        axes: `(k, n k)`, orthonormal or zero rows U that the bulk leaves out too.
        num_explored: how many directions the bulk leaves out.
        bulk_deviation: sqrt(omega).
        structure: the user's vectors.

    Source:
        METHOD.md section 14.
    """

    vectors: Float[Array, "rows d"]
    resolved: BlockTridiagonal | None
    directions: Float[Array, "directions rows"]
    coupling_factor: Float[Array, "directions f"]
    explored: Bool[Array, " rows"]
    axes: Float[Array, "k rows"]
    num_explored: Int[Array, ""]
    bulk_deviation: Float[Array, ""]
    structure: VectorStructure = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        basis: BlockKrylovBasis,
        tridiagonal: BlockTridiagonal,
        coupling: BlockCoupling,
        bulk: Float[Array, ""],
        structure: VectorStructure,
        *,
        resolved: bool,
    ) -> "BlockCovariance":
        """The covariance at the level of a coupling; `bulk` is omega in units of 1/unit."""
        directions, root = coupling.directions()
        explored = ~coupling.tail & basis.present
        unit = jnp.sqrt(tridiagonal.unit)
        return cls(
            vectors=basis.vectors,
            resolved=tridiagonal if resolved else None,
            directions=directions,
            coupling_factor=root / unit,
            explored=explored,
            axes=coupling.axes,
            num_explored=jnp.sum(explored, dtype=jnp.int32) + coupling.num_axes(),
            bulk_deviation=jnp.sqrt(bulk) / unit,
            structure=structure,
        )

    def bulk_dimension(self) -> Int[Array, ""]:
        """Number of directions in the bulk."""
        return self.size - self.num_explored

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`Sigma v`, in two products with the basis."""
        return self.block_mv(vector[None, :])[0]

    def block_mv(self, block: Float[Array, "r d"]) -> Float[Array, "r d"]:
        """`Sigma v` for every row v of `block`."""
        coordinates = _mul(block, self.vectors.T)
        factors = _mul(self.coupling_factor.T, self.directions)
        inside = _mul(_mul(coordinates, factors.T), factors)
        if self.resolved is not None:
            half = self._resolved_half(coordinates)
            inside = inside + self._resolved_back(half)
        bulk = self.bulk_deviation**2
        inside = inside - bulk * self._explored_part(coordinates)
        return bulk * block + _mul(inside, self.vectors)

    def sample(self, key: PRNGKeyArray, num_samples: int) -> Float[Array, "N d"]:
        """Zero-mean draws, one per row."""
        keys = jax.random.split(key, 3)
        rows, dtype = self.vectors.shape[0], self.dtype
        noise = jax.random.normal(keys[0], (num_samples, self.coupling_factor.shape[1]), dtype)
        inside = _mul(_mul(noise, self.coupling_factor.T), self.directions)
        if self.resolved is not None:
            noise = jax.random.normal(keys[1], (num_samples, rows), dtype)
            inside = inside + self._resolved_back(noise)
        noise = jax.random.normal(keys[2], (num_samples, self.size), dtype)
        return _mul(inside, self.vectors) + self.bulk_deviation * self._unexplored_rows(noise)

    def diagonal(self) -> Float[Array, " d"]:
        """The marginal variances, in O(n k d), or O(n k^2 d) with a resolved part."""
        factors = _mul(self.coupling_factor.T, self.directions)
        variances = jnp.sum(_mul(factors, self.vectors) ** 2, axis=0)
        variances = variances + self.bulk_deviation**2 * self.unexplored_diagonal()
        if self.resolved is None:
            return variances
        own = self.resolved.inverse_diagonal_along(self.vectors, self.explored)
        return variances + own / self.resolved.unit

    def unexplored(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`P_rest v`: the part of v in the bulk."""
        return self._unexplored_rows(vector[None, :])[0]

    def unexplored_diagonal(self) -> Float[Array, " d"]:
        """The diagonal of `P_rest`."""
        explored = jnp.sum(jnp.where(self.explored[:, None], self.vectors**2, 0), axis=0)
        explored = explored + jnp.sum(_mul(self.axes, self.vectors) ** 2, axis=0)
        # The rows are orthonormal: rounding must not make a variance negative.
        return jnp.maximum(1 - explored, 0)

    def trace(self) -> Float[Array, ""]:
        """The trace, closed form."""
        overlap = _mul(self.directions, self.directions.T)
        gram = _mul(self.coupling_factor, self.coupling_factor.T)
        total = jnp.sum(overlap * gram)
        total = total + self.bulk_deviation**2 * self.bulk_dimension().astype(self.dtype)
        if self.resolved is None:
            return total
        return total + self.resolved.inverse_trace(self.explored) / self.resolved.unit

    def push(self, rows: Float[Array, "p d"]) -> Float[Array, "p p"]:
        """`B Sigma B^T`, dense, positive semi-definite by construction."""
        coordinates = _mul(rows, self.vectors.T)
        along = _mul(_mul(coordinates, self.directions.T), self.coupling_factor)
        factors = [along, self.bulk_deviation * self._unexplored_rows(rows)]
        if self.resolved is not None:
            factors.append(self._resolved_half(coordinates))
        joined = jnp.concatenate(factors, axis=1)
        return _mul(joined, joined.T)

    def _explored_part(self, coordinates: Array) -> Array:
        own = jnp.where(self.explored[None, :], coordinates, 0)
        return own + _mul(_mul(coordinates, self.axes.T), self.axes)

    def _unexplored_rows(self, block: Array) -> Array:
        explored = self._explored_part(_mul(block, self.vectors.T))
        return block - _mul(explored, self.vectors)

    def _resolved_half(self, coordinates: Array) -> Array:
        """Rows of coordinates times a square root of T_m^-1."""
        assert self.resolved is not None
        own = jnp.where(self.explored[None, :], coordinates, 0)
        half = self.resolved.half_solve(own.T).T / jnp.sqrt(self.resolved.unit)
        return jnp.where(self.explored[None, :], half, 0)

    def _resolved_back(self, half: Array) -> Array:
        assert self.resolved is not None
        own = jnp.where(self.explored[None, :], half, 0)
        return self.resolved.half_solve_transposed(own.T).T / jnp.sqrt(self.resolved.unit)


@lx.diagonal.register(BlockCovariance)
def _(operator: BlockCovariance) -> Array:
    return operator.diagonal()


def _mul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_HIGHEST)
