"""How far every column of `X_m` is from `A^-1 V`, seen from the block steps taken after level m.

Block CG takes the steps `g_j = Q L^-T y_j`, with `L y = Q^T V` and j a block, so that
`X - X_m = sum_{j >= m} g_j`. The steps are A-orthogonal: energies add up. Squared lengths telescope
as in Hestenes and Stiefel (1952): `||x - x_j||^2` falls by `<g_j, (x - x_j) + (x - x_{j+1})>`,
which is `w_j (energy_j + energy_{j+1})` for a weight w_j of each right-hand side. For one
right-hand side w_j does not depend on what is still to come; for a block it is taken from what was
seen. The rest is as in `pnkrylov.lookahead`: the steps taken are exact, the tail is extrapolated
for every column by itself, and block Gauss-Radau quadrature bounds it when a lower spectral bound
is known.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pnkrylov.block.tridiagonal import BlockTridiagonal
from pnkrylov.lookahead import BRACKET, LookaheadError

_HIGHEST = jax.lax.Precision.HIGHEST


class BlockIncrements(eqx.Module):
    """What every block step does to unit right-hand sides; columns belong to right-hand sides.

    Attributes:
        half: `(n k, k)`, `y = L^-1 Q^T V`.
        delta: `(n, k)`, by how much step j reduces the squared A-norm error.
        decrease: `(n, k)`, by how much it reduces the squared 2-norm error that was seen.
        weight: `(n, k)`, `||g_j||^2 / delta_j`, inverse Rayleigh quotients.
    """

    half: Float[Array, "rows k"]
    delta: Float[Array, "n k"]
    decrease: Float[Array, "n k"]
    weight: Float[Array, "n k"]

    @classmethod
    def of(
        cls, tridiagonal: BlockTridiagonal, coordinates: Float[Array, "k k"]
    ) -> "BlockIncrements":
        """Reads them off a factored run.

        Args:
            tridiagonal: the whole run, look-ahead included.
            coordinates: row j holds the coordinates of right-hand side j in the first block.
        """
        t, size = tridiagonal, tridiagonal.block_size
        rhs = jnp.zeros((t.present.shape[0], size), coordinates.dtype)
        half = t.half_solve(rhs.at[:size].set(coordinates.T))
        blocks = half.reshape(t.num_blocks, size, size)
        delta = jnp.sum(blocks**2, axis=1)

        # Rows of L^-1 Q, block by block: P_j = C_j^-1 (Q_j - R_j P_{j-1}), with the Gram matrix
        # P_j P_j^T = C_j^-1 (I + R_j P_{j-1} P_{j-1}^T R_j^T) C_j^-T.
        def grow(gram, row):
            inverse, ratio, present = row
            inner = jnp.diag(present.astype(gram.dtype)) + _mul(_mul(ratio, gram), ratio.T)
            gram = _mul(_mul(inverse, inner), inverse.T)
            return gram, gram

        present = t.present.reshape(-1, size)
        zero = jnp.zeros((size, size), delta.dtype)
        _, grams = jax.lax.scan(grow, zero, (t.inverse_pivots, t.ratios, present))

        # P_j (X - X_{j+1}) = P_j P_j^T h_j, where h_j collects the steps after j: later rows of
        # L^-1 Q see P_j through -C_{j+1}^-1 R_{j+1} only.
        def collect(later, row):
            inverse, ratio, own = row
            here = own + later
            return -_mul(_mul(inverse, ratio).T, here), later

        _, later = jax.lax.scan(collect, zero, (t.inverse_pivots, t.ratios, blocks), reverse=True)
        along = _mul(grams, blocks)
        length = jnp.sum(blocks * along, axis=1)
        decrease = length + 2 * jnp.sum(later * along, axis=1)
        weight = length / jnp.where(delta > 0, delta, 1)
        return cls(half=half, delta=delta, decrease=decrease, weight=weight)


def block_lookahead_error(
    tridiagonal: BlockTridiagonal,
    increments: BlockIncrements,
    level: Int[Array, ""],
    ritz_range: Float[Array, "2"],
    lower_bound: Float[Array, ""] | None = None,
) -> LookaheadError:
    """Errors of the columns of `X_m` of a run that was started from the right-hand sides.

    Args:
        tridiagonal: the whole run, look-ahead included.
        increments: of this run.
        level: m, in blocks.
        ritz_range: `tridiagonal.ritz_range()`.
        lower_bound: a proven lower bound of the spectrum, unscaled, shift included; or None.

    Returns:
        The errors, `(k,)` each, for right-hand sides of length one.

    Source:
        METHOD.md sections 5 and 14; for k = 1 this is `pnkrylov.lookahead.lookahead_error`.
    """
    t, run = tridiagonal, increments
    after = ((t.blocks() >= level) & (t.blocks() < t.filled))[:, None]
    delta = jnp.where(after, run.delta, 0)
    decrease = jnp.where(after, run.decrease, 0)
    # energy_j for j = m, m + 1, ...: what is still to come after j steps, as far as it was seen.
    energy = jnp.cumsum(delta[::-1], axis=0)[::-1]
    both = 2 * energy - delta
    weights = jnp.sum(jnp.maximum(decrease, 0) / jnp.where(both > 0, both, 1), axis=0)
    seen = jnp.maximum(jnp.sum(decrease, axis=0), 0)

    exhausted = ~jnp.any(t.residual != 0)
    rate, last, last_weight = _decay(t, run, level, ritz_range)
    tail = jnp.where(exhausted, 0, last * rate / (1 - rate))
    beyond = last_weight * tail * (1 + rate) / (1 - rate)
    estimate = seen + 2 * tail * weights + beyond

    upper = jnp.full_like(seen, jnp.inf)
    if lower_bound is not None:
        bound = lower_bound / t.unit
        tail_upper, cross = _radau(t, run, level, bound)
        # The 2-norm error of the last level is at most its energy over the spectral bound.
        upper = seen + 2 * cross + tail_upper / bound
        upper = jnp.where(jnp.isfinite(tail_upper), upper, jnp.inf)
        upper = jnp.where(exhausted, seen, upper)
        tail_upper = jnp.where(exhausted, 0, tail_upper)
        bracketed = upper <= BRACKET * seen
        estimate = jnp.where(bracketed, jnp.sqrt(seen * upper), jnp.clip(estimate, seen, upper))
        tail = jnp.minimum(tail, tail_upper)
    seen_energy = jnp.sum(delta, axis=0)
    return LookaheadError(
        norm=jnp.sqrt(estimate),
        norm_seen=jnp.sqrt(seen),
        norm_upper=jnp.sqrt(upper),
        energy_norm=jnp.sqrt(seen_energy + tail),
        energy_norm_seen=jnp.sqrt(seen_energy),
    )


def seen_products(
    tridiagonal: BlockTridiagonal, increments: BlockIncrements, level: Int[Array, ""]
) -> Float[Array, "k k"]:
    """`(X_n - X_m)^T (X_n - X_m)` for unit right-hand sides: how the errors lie to each other."""
    head = tridiagonal.head_rows(level)
    steps = jnp.where(head[:, None], 0, increments.half)
    difference = tridiagonal.half_solve_transposed(steps)
    return _mul(difference.T, difference)


def _decay(
    t: BlockTridiagonal, run: BlockIncrements, level: Int[Array, ""], ritz_range: Array
) -> tuple[Array, Array, Array]:
    """Per column: rate of decay of delta, its fitted last value, and the last weight."""
    dtype = run.delta.dtype
    tiny = jnp.finfo(dtype).tiny
    blocks, filled = t.blocks(), t.filled
    length = jnp.maximum(3, (filled - level + 1) // 2)
    window = ((blocks >= filled - length) & (blocks < filled)).astype(dtype)[:, None]
    count = jnp.maximum(jnp.sum(window), 1)
    position = blocks.astype(dtype)[:, None]
    logs = jnp.log(jnp.maximum(run.delta, tiny))
    centre = jnp.sum(window * position) / count
    mean = jnp.sum(window * logs, axis=0) / count
    spread = jnp.sum(window * (position - centre) ** 2)
    slope = jnp.sum(window * (position - centre) * (logs - mean[None, :]), axis=0)
    slope = slope / jnp.where(spread > 0, spread, 1)

    smallest, largest = ritz_range
    cap = jnp.exp(-2 * jnp.sqrt(jnp.maximum(smallest, tiny) / largest))
    rate = jnp.minimum(jnp.exp(slope), jnp.minimum(cap, 1 - 1e-6))
    last = jnp.exp(mean + slope * (filled.astype(dtype) - 1 - centre))

    recent = ((blocks >= filled - jnp.maximum(3, length // 4)) & (blocks < filled))[:, None]
    recent = recent & (run.weight > 0)
    log_weights = jnp.where(recent, jnp.log(jnp.where(recent, run.weight, 1)), 0)
    count = jnp.maximum(jnp.sum(recent.astype(dtype), axis=0), 1)
    return rate, last, jnp.exp(jnp.sum(log_weights, axis=0) / count)


def _radau(
    t: BlockTridiagonal, run: BlockIncrements, level: Int[Array, ""], bound: Float[Array, ""]
) -> tuple[Array, Array]:
    """Per column: bounds of the energy after the last step and of `<x_n - x_m, x - x_n>`.

    After n steps the residual is `Q_{n+1} C`, the energy `C^T P_1 C`, and, with the boundary pivot
    of T - bound I in place of the unknown one, `P_1 <= (tilde - Gamma)^-1` (block Gauss-Radau).
    The cross term is `C^T P_1 K` for a K that the rows of L^-1 Q give, bounded by Cauchy-Schwarz.
    """
    last = jnp.maximum(t.filled - 1, 0)

    def last_block(rows):
        return jax.lax.dynamic_slice_in_dim(rows, last * t.block_size, t.block_size)

    inverse = jax.lax.dynamic_index_in_dim(t.inverse_pivots, last, keepdims=False)
    shifted = t.minus(bound)
    shifted_inverse = jax.lax.dynamic_index_in_dim(shifted.inverse_pivots, last, keepdims=False)
    coupled = _mul(inverse, t.residual.T)
    gamma = _mul(coupled.T, coupled)
    replaced = _mul(shifted_inverse, t.residual.T)
    identity = jnp.eye(t.block_size, dtype=gamma.dtype)
    pivot = jnp.linalg.cholesky(bound * identity + _mul(replaced.T, replaced) - gamma)

    residual = _mul(t.residual, _mul(inverse.T, last_block(run.half)))
    head = t.head_rows(level)
    steps = jnp.where(head[:, None], 0, run.half)
    seen = last_block(t.half_solve(t.half_solve_transposed(steps)))
    cross = _mul(t.residual, _mul(inverse.T, seen))

    def form(columns):
        half = jax.scipy.linalg.solve_triangular(pivot, columns, lower=True)
        return jnp.sum(half**2, axis=0)

    energy = form(residual)
    # A bound above a Ritz value, or rounding, makes a pivot fail: then nothing is proven.
    valid = jnp.all(jnp.isfinite(shifted.inverse_pivots)) & jnp.all(jnp.isfinite(pivot))
    return (
        jnp.where(valid, energy, jnp.inf),
        jnp.where(valid, jnp.sqrt(energy * form(cross)), jnp.inf),
    )


def _mul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_HIGHEST)
