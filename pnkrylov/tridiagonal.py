"""The small tridiagonal T of a Lanczos run, factored as `T = L D L^T`, in O(n) per operation.

The pivots D are all one needs: their sign tests definiteness, their tail (after row m) is the
factorisation of the Schur complement beyond level m, and `L^-T D^{-1/2}` is a square root of T^-1.
Everything is divided by the largest |alpha| first, so that no scale of A under- or overflows.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pnkrylov.krylov import KrylovBasis


class Tridiagonal(eqx.Module):
    """`(T + shift I) / unit`, factored. Unfilled rows hold a decoupled 1 on the diagonal.

    Attributes:
        alpha: `(n,)` diagonal, in units of `unit`.
        off_diagonal: `(n - 1,)`, in units of `unit`.
        residual: the coupling beta to `next_vector`, in units of `unit`.
        filled: how many rows are real.
        unit: the scale that was divided out: the largest |alpha| of the unshifted run.
        pivots: `(n,)` D of `L D L^T`.
        ratios: `(n - 1,)` subdiagonal of the unit lower triangular L.
    """

    alpha: Float[Array, " n"]
    off_diagonal: Float[Array, " n-1"]
    residual: Float[Array, ""]
    filled: Int[Array, ""]
    unit: Float[Array, ""]
    pivots: Float[Array, " n"]
    ratios: Float[Array, " n-1"]

    @classmethod
    def of(cls, basis: KrylovBasis, shift: Float[Array, ""]) -> "Tridiagonal":
        """The factored `T + shift I` of a run."""
        unit = jnp.max(jnp.abs(basis.alpha))
        unit = jnp.where(unit > 0, unit, jnp.ones_like(unit))
        mask = basis.mask()
        alpha = jnp.where(mask, (basis.alpha + shift) / unit, jnp.ones_like(basis.alpha))
        off_diagonal = jnp.where(mask[1:], basis.beta[:-1] / unit, jnp.zeros_like(basis.beta[:-1]))
        pivots, ratios = _ldl(alpha, off_diagonal)
        return cls(
            alpha=alpha,
            off_diagonal=off_diagonal,
            residual=basis.residual_norm() / unit,
            filled=basis.filled,
            unit=unit,
            pivots=pivots,
            ratios=ratios,
        )

    @property
    def num_rows(self) -> int:
        """Rows n, filled or not."""
        return self.alpha.shape[-1]

    def rows(self) -> Int[Array, " n"]:
        """Row numbers 0..n-1."""
        return jnp.arange(self.num_rows, dtype=jnp.int32)

    def head(self, level: Int[Array, ""]) -> "Tridiagonal":
        """The leading block `T_m`: rows at and beyond `level` are unfilled."""
        level = jnp.minimum(level, self.filled)
        inside = self.rows() < level
        coupling = _with_zero(self.off_diagonal)
        at_end = jnp.where(level > 0, coupling[jnp.maximum(level - 1, 0)], 0)
        return Tridiagonal(
            alpha=jnp.where(inside, self.alpha, 1),
            off_diagonal=jnp.where(inside[1:], self.off_diagonal, 0),
            residual=jnp.where(level == self.filled, self.residual, at_end),
            filled=level,
            unit=self.unit,
            pivots=jnp.where(inside, self.pivots, 1),
            ratios=jnp.where(inside[1:], self.ratios, 0),
        )

    def tail(self, level: Int[Array, ""]) -> "Tridiagonal":
        """The Schur complement of `T_m` in T: rows before `level` hold a decoupled 1.

        Its pivots are those of T: eliminating the rows before `level` is what they record.
        """
        inside = (self.rows() >= level) & (self.rows() < self.filled)
        first = self.rows() == level
        return Tridiagonal(
            alpha=jnp.where(inside, jnp.where(first, self.pivots, self.alpha), 1),
            off_diagonal=jnp.where(inside[:-1], self.off_diagonal, 0),
            residual=self.residual,
            filled=self.filled,
            unit=self.unit,
            pivots=jnp.where(inside, self.pivots, 1),
            ratios=jnp.where(inside[:-1], self.ratios, 0),
        )

    def minus(self, amount: Float[Array, ""]) -> "Tridiagonal":
        """`T - amount I`, with `amount` in units of `unit`, factored anew."""
        alpha = jnp.where(self.rows() < self.filled, self.alpha - amount, 1)
        pivots, ratios = _ldl(alpha, self.off_diagonal)
        return dataclasses.replace(self, alpha=alpha, pivots=pivots, ratios=ratios)

    def solve(self, rhs: Float[Array, " n *k"]) -> Float[Array, " n *k"]:
        """`T^-1 rhs` (in units of 1/unit)."""
        # One LAPACK call; two substitutions would be two loops to compile wherever this is used.
        zero = jnp.zeros((1,), self.alpha.dtype)
        lower = jnp.concatenate([zero, self.off_diagonal])
        upper = _with_zero(self.off_diagonal)
        columns = rhs.reshape(rhs.shape[0], -1)
        solution = jax.lax.linalg.tridiagonal_solve(lower, self.alpha, upper, columns)
        return solution.reshape(rhs.shape)

    def factor_mv(self, vector: Float[Array, " n *k"]) -> Float[Array, " n *k"]:
        """`L^-T D^{-1/2} vector`: a square root of T^-1, so this draws from N(0, T^-1)."""
        scaled = vector / _column(jnp.sqrt(self.pivots), vector)
        # Row k of L^-T x needs row k + 1: the scan runs backwards.
        return _substitute(_with_zero(self.ratios), scaled, reverse=True)

    def factor_transpose_mv(self, vector: Float[Array, " n *k"]) -> Float[Array, " n *k"]:
        """`D^{-1/2} L^-1 vector`; its squared norm is `vector^T T^-1 vector`."""
        below = jnp.concatenate([jnp.zeros((1,), self.ratios.dtype), self.ratios])
        forward = _substitute(below, vector, reverse=False)
        return forward / _column(jnp.sqrt(self.pivots), vector)

    def inverse_diagonal(self) -> Float[Array, " n"]:
        """The diagonal of T^-1, a sum of positive terms; zero in unfilled rows."""

        def back(below, row):
            pivot, ratio = row
            entry = 1 / pivot + ratio**2 * below
            return entry, entry

        start = jnp.zeros((), self.pivots.dtype)
        rows = (self.pivots, _with_zero(self.ratios))
        _, diagonal = jax.lax.scan(back, start, rows, reverse=True)
        return jnp.where(self.rows() < self.filled, diagonal, 0)

    def inverse_diagonal_along(self, rows: Float[Array, "n d"]) -> Float[Array, " d"]:
        """The diagonal of `R^T T^-1 R` for the `(n, d)` matrix R of `rows`, in O(n d).

        R beyond the filled rows does not count; a sum of squares, never negative.
        """

        # Rows of D^-1/2 L^-1 R are scaled CG search directions: one recurrence, one row at a time.
        def recur(carry, row):
            direction, total = carry
            vector, ratio, pivot = row
            direction = vector - ratio * direction
            return (direction, total + direction**2 / pivot), None

        pivots = jnp.where(self.rows() < self.filled, self.pivots, jnp.inf)
        zeros = jnp.zeros((rows.shape[1],), rows.dtype)
        (_, total), _ = jax.lax.scan(
            recur, (zeros, zeros), (rows, jnp.roll(_with_zero(self.ratios), 1), pivots)
        )
        return total

    def logdet(self) -> Float[Array, ""]:
        """log det of the unscaled T, over the filled rows."""
        count = self.filled.astype(self.unit.dtype)
        return jnp.sum(jnp.log(self.pivots)) + count * jnp.log(self.unit)

    def ritz_range(self) -> Float[Array, "2"]:
        """Smallest and largest eigenvalue of the filled block, unscaled."""
        # Unfilled rows repeat a diagonal entry, which is a Rayleigh quotient: inside the range.
        alpha = jnp.where(self.rows() < self.filled, self.alpha, self.alpha[0])
        return extreme_eigenvalues(alpha, self.off_diagonal) * self.unit


def extreme_eigenvalues(
    alpha: Float[Array, " n"], off_diagonal: Float[Array, " n-1"]
) -> Float[Array, "2"]:
    """Smallest and largest eigenvalue of a symmetric tridiagonal matrix."""
    matrix = jnp.diag(alpha) + jnp.diag(off_diagonal, 1) + jnp.diag(off_diagonal, -1)
    # NaN in, NaN out: LAPACK would refuse.
    eigenvalues = jnp.linalg.eigvalsh(matrix)
    return jnp.stack([eigenvalues[0], eigenvalues[-1]])


def _ldl(alpha: Array, off_diagonal: Array) -> tuple[Array, Array]:
    def eliminate(pivot, row):
        diagonal, coupling = row
        ratio = coupling / pivot
        pivot = diagonal - ratio * coupling
        return pivot, (pivot, ratio)

    _, (pivots, ratios) = jax.lax.scan(eliminate, alpha[0], (alpha[1:], off_diagonal))
    return jnp.concatenate([alpha[:1], pivots]), ratios


def _with_zero(vector: Array) -> Array:
    return jnp.concatenate([vector, jnp.zeros((1,), vector.dtype)])


def _column(scales: Array, vector: Array) -> Array:
    return scales.reshape(scales.shape + (1,) * (vector.ndim - 1))


def _substitute(
    ratios: Shaped[Array, " n"], vector: Float[Array, " n *k"], *, reverse: bool
) -> Float[Array, " n *k"]:
    def eliminate(neighbour, row):
        ratio, entry = row
        entry = entry - ratio * neighbour
        return entry, entry

    start = jnp.zeros_like(vector[0])
    _, result = jax.lax.scan(eliminate, start, (ratios, vector), reverse=reverse)
    return result
