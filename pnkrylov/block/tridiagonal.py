"""The small block tridiagonal T of a block run, factored as `T = L L^T`, with the inverse of L.

Rows of L before and after a level factor T_m and the Schur complement beyond it, so one
factorisation serves every level. Everything is divided by the largest diagonal entry first.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pnkrylov._structure import VectorStructure
from pnkrylov.block.krylov import BlockKrylovBasis
from pnkrylov.krylov import begin_run, continue_run
from pnkrylov.operators import FunctionOperator
from pnkrylov.tridiagonal import Tridiagonal

_HIGHEST = jax.lax.Precision.HIGHEST
# Beyond so many rows the extreme eigenvalues come from Lanczos runs on the small matrix: all
# eigenvalues of 880 rows take 110 ms, as long as the products of a run on a dense 2000.
_DENSE_ROWS = 256
_EXTREME_STEPS = 30


class BlockTridiagonal(eqx.Module):
    """`(T + shift I) / unit`, factored. Absent rows hold a decoupled 1 on the diagonal.

    Attributes:
        diagonal: `(n, k, k)` diagonal blocks, in units of `unit`.
        below: `(n, k, k)`, block j couples block j - 1 to block j; zero for j = 0.
        residual: `(k, k)`, the coupling of the last filled block to `next_block`.
        inverse_pivots: `(n, k, k)`, inverses of the diagonal blocks of L.
        ratios: `(n, k, k)`, the blocks of L below its diagonal, stored like `below`.
        inverse_factor: `(n k, n k)`, the inverse of L.
        present: `(n k,)`, which rows belong to a basis vector.
        filled: how many blocks hold a vector.
        unit: the scale that was divided out.
    """

    diagonal: Float[Array, "n k k"]
    below: Float[Array, "n k k"]
    residual: Float[Array, "k k"]
    inverse_pivots: Float[Array, "n k k"]
    ratios: Float[Array, "n k k"]
    inverse_factor: Float[Array, "rows rows"]
    present: Bool[Array, " rows"]
    filled: Int[Array, ""]
    unit: Float[Array, ""]

    @classmethod
    def of(cls, basis: BlockKrylovBasis, shift: Float[Array, ""]) -> "BlockTridiagonal":
        """The factored `T + shift I` of a run; NaN in the factor if it is not definite."""
        size = basis.block_size
        unit = jnp.max(jnp.abs(jnp.diagonal(basis.diagonal, axis1=1, axis2=2)))
        unit = jnp.where(unit > 0, unit, jnp.ones_like(unit))
        inside = basis.present.reshape(-1, size)
        added = jnp.where(inside, shift / unit, 1)
        diagonal = basis.diagonal / unit + jax.vmap(jnp.diag)(added)
        last = jnp.maximum(basis.filled - 1, 0)
        residual = jax.lax.dynamic_index_in_dim(basis.coupling, last, keepdims=False) / unit
        before = jnp.arange(basis.num_blocks, dtype=jnp.int32)
        # The coupling of the last block is the residual, whatever comes after it in storage.
        inner = jnp.where((before < last)[:, None, None], basis.coupling / unit, 0)
        below = jnp.concatenate([jnp.zeros_like(inner[:1]), inner[:-1]])
        inverse_pivots, ratios, inverse_factor = _factor(diagonal, below)
        return cls(
            diagonal=diagonal,
            below=below,
            residual=residual,
            inverse_pivots=inverse_pivots,
            ratios=ratios,
            inverse_factor=inverse_factor,
            present=basis.present,
            filled=basis.filled,
            unit=unit,
        )

    def tail(self, level: Int[Array, ""]) -> "BlockTridiagonal":
        """The Schur complement of T_m in T: rows before `level` hold a decoupled 1.

        Its factor is that of T: eliminating the rows before `level` is what they record.
        """
        first = (self.blocks() == level)[:, None, None]
        inside = (self.blocks() >= level)[:, None, None]
        identity = jnp.eye(self.block_size, dtype=self.unit.dtype)[None]
        inverse = jax.lax.dynamic_index_in_dim(self.inverse_pivots, level, keepdims=False)
        pivot = jax.scipy.linalg.solve_triangular(inverse, identity[0], lower=True)
        diagonal = jnp.where(first, _mul(pivot, pivot.T)[None], self.diagonal)
        head = self.head_rows(level)
        whole = jnp.eye(head.shape[0], dtype=self.unit.dtype)
        return dataclasses.replace(
            self,
            diagonal=jnp.where(inside, diagonal, identity),
            below=jnp.where(inside & ~first, self.below, 0),
            inverse_pivots=jnp.where(inside, self.inverse_pivots, identity),
            ratios=jnp.where(inside & ~first, self.ratios, 0),
            inverse_factor=jnp.where(head[:, None] | head[None, :], whole, self.inverse_factor),
            present=self.present & ~head,
        )

    def minus(self, amount: Float[Array, ""]) -> "BlockTridiagonal":
        """`T - amount I`, with `amount` in units of `unit`, factored anew."""
        removed = jnp.where(self.present, amount, 0).reshape(-1, self.block_size)
        diagonal = self.diagonal - jax.vmap(jnp.diag)(removed)
        inverse_pivots, ratios, inverse_factor = _factor(diagonal, self.below)
        return dataclasses.replace(
            self,
            diagonal=diagonal,
            inverse_pivots=inverse_pivots,
            ratios=ratios,
            inverse_factor=inverse_factor,
        )

    @property
    def block_size(self) -> int:
        """Rows in a block, k."""
        return self.diagonal.shape[-1]

    @property
    def num_blocks(self) -> int:
        """Blocks n, filled or not."""
        return self.diagonal.shape[-3]

    def blocks(self) -> Int[Array, " n"]:
        """Block numbers 0..n-1."""
        return jnp.arange(self.num_blocks, dtype=jnp.int32)

    def head_rows(self, level: Int[Array, ""]) -> Bool[Array, " rows"]:
        """The rows before `level` blocks, absent ones included."""
        rows = jnp.arange(self.present.shape[0], dtype=jnp.int32)
        return rows < level * self.block_size

    def half_solve(self, rhs: Float[Array, "rows r"]) -> Float[Array, "rows r"]:
        """`L^-1 rhs`; its squared norm is `rhs^T T^-1 rhs`.

        For a right-hand side that begins at block m this is the half solve of the Schur complement
        of T_m.
        """
        return _mul(self.inverse_factor, rhs)

    def half_solve_transposed(self, rhs: Float[Array, "rows r"]) -> Float[Array, "rows r"]:
        """`L^-T rhs`, a square root of T^-1 times rhs.

        For a right-hand side that ends before block m this is the half solve of T_m.
        """
        return _mul(self.inverse_factor.T, rhs)

    def solve(self, rhs: Float[Array, "rows r"]) -> Float[Array, "rows r"]:
        """`T^-1 rhs` (in units of 1/unit)."""
        return self.half_solve_transposed(self.half_solve(rhs))

    def multiply(self, vectors: Float[Array, "rows r"]) -> Float[Array, "rows r"]:
        """`T x`."""
        x = vectors.reshape(self.num_blocks, self.block_size, -1)
        zero = jnp.zeros_like(x[:1])
        after = jnp.concatenate([self.below[1:], jnp.zeros_like(self.below[:1])])
        product = _mul(self.diagonal, x) + _mul(self.below, jnp.concatenate([zero, x[:-1]]))
        product = product + _mul(jnp.swapaxes(after, 1, 2), jnp.concatenate([x[1:], zero]))
        return product.reshape(vectors.shape)

    def logdet(self, inside: Bool[Array, " rows"] | None = None) -> Float[Array, ""]:
        """log det of the unscaled matrix, over the present rows, or those of them before a level.

        Args:
            inside: the rows before that level.
        """
        pivots = jnp.diagonal(self.inverse_pivots, axis1=1, axis2=2).reshape(-1)
        logs = jnp.log(self.unit) - 2 * jnp.log(pivots)
        counted = self.present if inside is None else self.present & inside
        return jnp.sum(jnp.where(counted, logs, 0))

    def inverse_trace(self, inside: Bool[Array, " rows"]) -> Float[Array, ""]:
        """`tr T_m^-1`, in units of 1/unit; a sum of squares.

        Args:
            inside: the rows of T_m.
        """
        counted = (self.present & inside)[:, None]
        return jnp.sum(jnp.where(counted, self.inverse_factor, 0) ** 2)

    def inverse_diagonal_along(
        self, rows: Float[Array, "rows d"], inside: Bool[Array, " rows"]
    ) -> Float[Array, " d"]:
        """The diagonal of `R^T T_m^-1 R`, in O(n k^2 d); a sum of squares, never negative.

        Args:
            rows: R.
            inside: the rows of T_m; R does not count elsewhere.
        """
        inside = inside & self.present
        shape = (self.num_blocks, self.block_size, -1)

        def forward(carry, row):
            before, total = carry
            inverse, ratio, entry, inside = row
            entry = _mul(inverse, entry - _mul(ratio, before))
            return (entry, total + jnp.sum(jnp.where(inside, entry**2, 0), axis=0)), None

        blocks = jnp.where(inside[:, None], rows, 0).reshape(shape)
        start = (jnp.zeros_like(blocks[0]), jnp.zeros_like(blocks[0, 0]))
        given = (self.inverse_pivots, self.ratios, blocks, inside[:, None].reshape(shape))
        (_, total), _ = jax.lax.scan(forward, start, given)
        return total

    def ritz_range(self) -> Float[Array, "2"]:
        """Smallest and largest eigenvalue of the present rows, unscaled."""
        if self.present.shape[0] <= _DENSE_ROWS:
            values = self.eigenvalues()
            return jnp.stack([values[0], values[-1]])
        return self.extremes_by_runs() * self.unit

    def extremes_by_runs(self) -> Float[Array, "2"]:
        """Extreme eigenvalues in units of `unit`, by Lanczos runs on T^-1 and on T."""
        structure = VectorStructure.flat(self.present.shape[0], self.unit.dtype)
        start = jax.random.normal(jax.random.key(0), self.present.shape, self.unit.dtype)
        start = begin_run(jnp.where(self.present, start, 0))

        def largest(inverse):
            operator = FunctionOperator(function=_OneVector(self, inverse), structure=structure)
            basis = continue_run(start, operator, _EXTREME_STEPS, driver="compiled")
            return Tridiagonal.of(basis, jnp.zeros_like(self.unit)).ritz_range()[1]

        return jnp.stack([1 / largest(True), largest(False)])

    def eigenvalues(self) -> Float[Array, " rows"]:
        """All eigenvalues, unscaled and ascending; absent rows repeat a Rayleigh quotient."""
        identity = jnp.eye(self.present.shape[0], dtype=self.unit.dtype)
        matrix = self.multiply(identity)
        stand_in = jnp.diagonal(matrix)[jnp.argmax(self.present)]
        inside = self.present[:, None] & self.present[None, :]
        return jnp.linalg.eigvalsh(jnp.where(inside, matrix, stand_in * identity)) * self.unit


class _OneVector(eqx.Module):
    """T, or its inverse, as a function of one vector."""

    tridiagonal: BlockTridiagonal
    inverse: bool = eqx.field(static=True)

    def __call__(self, vector: Float[Array, " rows"]) -> Float[Array, " rows"]:
        apply = self.tridiagonal.solve if self.inverse else self.tridiagonal.multiply
        return apply(vector[:, None])[:, 0]


def _factor(diagonal: Array, below: Array) -> tuple[Array, Array, Array]:
    """Inverse diagonal blocks of L, the blocks below them, and the inverse of L."""
    num_blocks, size, _ = diagonal.shape
    dtype = diagonal.dtype
    identity = jnp.eye(size, dtype=dtype)

    def eliminate(carry, row):
        inverse, before = carry
        block, coupling, rhs = row
        ratio = _mul(coupling, inverse.T)
        pivot = jnp.linalg.cholesky(block - _mul(ratio, ratio.T))
        inverse = jax.scipy.linalg.solve_triangular(pivot, identity, lower=True)
        # One row of blocks of L^-1; every later use of L is then one product, not a loop.
        before = _mul(inverse, rhs - _mul(ratio, before))
        return (inverse, before), (inverse, ratio, before)

    rows = num_blocks * size
    start = (identity, jnp.zeros((size, rows), dtype))
    right = jnp.eye(rows, dtype=dtype).reshape(num_blocks, size, rows)
    _, (pivots, ratios, inverse) = jax.lax.scan(eliminate, start, (diagonal, below, right))
    return pivots, ratios, inverse.reshape(rows, rows)


def _mul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_HIGHEST)
