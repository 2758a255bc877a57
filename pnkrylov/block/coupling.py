"""The coupling of rank k at a truncation boundary, by the look-ahead: METHOD.md section 14.

With k x k blocks for scalars everything is as for a single run: `Gamma`, `Q_par`, `Q_perp` and
`P_j = E_1^T S^-j E_1`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pnkrylov.block.tridiagonal import BlockTridiagonal

_HIGHEST = jax.lax.Precision.HIGHEST


class BlockCoupling(eqx.Module):
    """What couples the first m blocks to the rest; inverse powers of S in units of 1/unit.

    Where a vector of block m + 1 is absent (deflated, or the run ended), its row and column are
    zero.

    Attributes:
        exists: whether there is any coupling that the look-ahead saw.
        tail: `(n k,)`, the rows of the look-ahead.
        gamma: `(k, k)`, `B (T^-1)_mm B^T`, in units of unit.
        parallel: `(n k, k)`, coordinates of Q_par in the basis.
        perpendicular: `(n k, k)`, coordinates of Q_perp = `S^-1 E_1` in the look-ahead rows.
        p1, p2: `(k, k)`, `E_1^T S^-j E_1`.
        axes: `(k, n k)`, orthonormal rows U that span Q_perp; zero rows if it has a lower rank.
        axes_present: `(k,)`, which rows of U are not zero.
        axes_factor: `(k, k)`, `Q_perp = U^T axes_factor`.
        axes_covariance: `(k, k)`, Sigma_U = `U S^-1 U^T`.
        axes_square: `(k, k)`, `U S^-2 U^T`.
    """

    exists: Bool[Array, ""]
    tail: Bool[Array, " rows"]
    gamma: Float[Array, "k k"]
    parallel: Float[Array, "rows k"]
    perpendicular: Float[Array, "rows k"]
    p1: Float[Array, "k k"]
    p2: Float[Array, "k k"]
    axes: Float[Array, "k rows"]
    axes_present: Bool[Array, " k"]
    axes_factor: Float[Array, "k k"]
    axes_covariance: Float[Array, "k k"]
    axes_square: Float[Array, "k k"]

    @classmethod
    def of(cls, tridiagonal: BlockTridiagonal, level: Int[Array, ""]) -> "BlockCoupling":
        """Reads the coupling at `level` blocks off a factored run."""
        t, size = tridiagonal, tridiagonal.block_size
        dtype = t.diagonal.dtype
        exists = (level > 0) & (level < t.filled)
        head = t.head_rows(level)
        rows = jnp.arange(head.shape[0], dtype=jnp.int32)[:, None]
        columns = jnp.arange(size, dtype=jnp.int32)[None, :]
        strength = jax.lax.dynamic_index_in_dim(t.below, level, keepdims=False)
        strength = jnp.where(exists, strength, 0)
        last = (rows == (level - 1) * size + columns).astype(dtype)
        half = jnp.where(head[:, None], t.half_solve(_mul(last, strength.T)), 0)
        first = (rows == level * size + columns) & t.present[:, None] & exists
        forward = t.half_solve(first.astype(dtype))
        once = jnp.where(head[:, None], 0, t.half_solve_transposed(forward))
        axes, values, mixing = jnp.linalg.svd(once, full_matrices=False)
        found = values > size * jnp.finfo(dtype).eps * values[0]
        axes = jnp.where(found[None, :] & ~head[:, None], axes, 0)
        along = t.half_solve(axes)
        image = jnp.where(head[:, None], 0, t.half_solve_transposed(along))
        return cls(
            exists=exists,
            tail=~head & t.present,
            gamma=_gram(half),
            parallel=t.half_solve_transposed(half),
            perpendicular=once,
            p1=_gram(forward),
            p2=_gram(once),
            axes=axes.T,
            axes_present=found,
            axes_factor=jnp.where(found, values, 0)[:, None] * mixing,
            axes_covariance=_gram(along),
            axes_square=_gram(image),
        )

    def directions(self) -> tuple[Float[Array, "directions rows"], Float[Array, "directions f"]]:
        """Coordinates of the 2 k coupled directions and a square root of their covariance.

        The directions are the normalised rows of Q_par, and U; the block
        `[[P_1, -R^T], [-R, Sigma_U]]` with `Q_perp = U^T R` couples them.
        """
        norms = jnp.sqrt(jnp.sum(self.parallel**2, axis=0))
        parallel = self.parallel / jnp.where(norms > 0, norms, 1)[None, :]
        cross = -self.axes_factor * norms[None, :]
        block = jnp.block(
            [[norms[:, None] * self.p1 * norms[None, :], cross.T], [cross, self.axes_covariance]]
        )
        # Positive semi-definite (METHOD.md section 14): what rounding takes below zero is clipped.
        values, vectors = jnp.linalg.eigh(block)
        root = vectors * jnp.sqrt(jnp.maximum(values, 0))[None, :]
        return jnp.concatenate([parallel.T, self.axes]), jnp.where(self.exists, root, 0)

    def trace(self) -> Float[Array, ""]:
        """The trace of the coupled part: `tr(Q_par P_1 Q_par^T) + tr Sigma_U`."""
        parallel = jnp.sum(_gram(self.parallel) * self.p1)
        return parallel + jnp.trace(self.axes_covariance)

    def num_axes(self) -> Int[Array, ""]:
        """The rank of Q_perp."""
        return jnp.sum(self.axes_present, dtype=jnp.int32)

    def norm(self) -> Float[Array, ""]:
        """`||(I - U^T U) S^-1 U^T||_2`, which an isotropic bulk cannot represent."""
        square = self.axes_square - _mul(self.axes_covariance, self.axes_covariance)
        return jnp.sqrt(jnp.maximum(jnp.linalg.eigvalsh((square + square.T) / 2)[-1], 0))


def _gram(columns: Array) -> Array:
    return _mul(columns.T, columns)


def _mul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_HIGHEST)
