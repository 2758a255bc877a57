"""How far `x_m = Q_m T_m^-1 Q_m^T v` is from `A^-1 v`, seen from the steps taken after level m.

For a run started at v, Hestenes and Stiefel (1952) give both errors as sums over later steps:
`||x - x_m||_A^2 = sum_{k >= m} delta_k` and
`||x - x_m||_2^2 = sum_{k >= m} w_k (energy_k + energy_{k+1})`, where `delta_k` and `w_k` come from
the pivots of T and `energy_k` is the squared A-norm error of level k. The steps that were taken
(the look-ahead) give the head of both sums exactly. The tail is extrapolated from the decay of
`delta`, and bracketed by Gauss-Radau quadrature when a lower spectral bound is known.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pnkrylov.tridiagonal import Tridiagonal

# The look-ahead is long enough when at most this share of ||x - x_m||^2 had to be extrapolated ...
UNSEEN = 0.1
# ... or when a proven bracket of it is at most this wide.
BRACKET = 4.0


class LookaheadError(eqx.Module):
    """The error of level m, relative to `||v|| / unit`; norms, so that squares do not underflow.

    Attributes:
        norm: estimate of `||x - x_m||_2`.
        norm_seen: its part from steps that were taken: a lower bound.
        norm_upper: proven upper bound; infinite without a lower spectral bound.
        energy_norm: estimate of `||x - x_m||_A`, in units of `||v|| / sqrt(unit)`.
        energy_norm_seen: its part from steps that were taken: a lower bound.
    """

    norm: Float[Array, "..."]
    norm_seen: Float[Array, "..."]
    norm_upper: Float[Array, "..."]
    energy_norm: Float[Array, "..."]
    energy_norm_seen: Float[Array, "..."]

    def stretched(self, factor: Float[Array, ""] | None) -> "LookaheadError":
        """The 2-norm errors times `factor`: those of a vector that the error is mapped to.

        The proven bound does not survive, because only the error that was seen is known to stretch
        by that factor.
        """
        if factor is None:
            return self
        return dataclasses.replace(
            self,
            norm=self.norm * factor,
            norm_seen=self.norm_seen * factor,
            norm_upper=jnp.full_like(self.norm_upper, jnp.inf),
        )

    def seen(self) -> Float[Array, "..."]:
        """Share of the squared error that was seen rather than extrapolated."""
        safe = jnp.where(self.norm > 0, self.norm, 1)
        return jnp.where(self.norm > 0, (self.norm_seen / safe) ** 2, 1)

    def sufficient(self) -> Array:
        """Whether the look-ahead has seen enough (see `UNSEEN` and `BRACKET`)."""
        bracketed = self.norm_upper <= jnp.sqrt(BRACKET) * self.norm_seen
        return (self.seen() >= 1 - UNSEEN) | bracketed


def lookahead_error(
    tridiagonal: Tridiagonal,
    level: Int[Array, ""],
    lower_bound: Float[Array, ""] | None = None,
    ritz_range: Float[Array, "2"] | None = None,
) -> LookaheadError:
    """Errors of level `level` of a run that was started from the right-hand side.

    Args:
        tridiagonal: the whole run, look-ahead included.
        level: m, at most `tridiagonal.filled`.
        lower_bound: a proven lower bound of the spectrum, unscaled, shift included; or None.
        ritz_range: `tridiagonal.ritz_range()` if it is known already.

    Returns:
        The errors, exactly zero where the Krylov space was exhausted.

    Source:
        Hestenes and Stiefel 1952, theorems 6:1 and 6:3; the delay idea: Meurant, Papez and Tichy
        2021; Gauss-Radau: METHOD.md section 5. The extrapolation is ours: a fit of log delta over
        the last half of the look-ahead, whose rate is capped at half the Chebyshev exponent of
        the Ritz range (a run that still finds smaller eigenvalues cannot be much slower).
    """
    run = _Increments.of(tridiagonal)
    rows = tridiagonal.rows()
    after = (rows >= level) & (rows < tridiagonal.filled)
    delta = jnp.where(after, run.delta, 0)
    weight = jnp.where(after, run.weight, 0)
    # energy_k for k = m, m + 1, ...: what is still to come after k steps.
    energy = jnp.cumsum(delta[::-1])[::-1]
    following = jnp.concatenate([energy[1:], jnp.zeros_like(energy[:1])])
    seen = jnp.sum(weight * (energy + following))

    exhausted = tridiagonal.residual == 0
    ritz_range = tridiagonal.ritz_range() if ritz_range is None else ritz_range
    rate, last, last_weight = _decay(run, tridiagonal, level, ritz_range)
    tail = jnp.where(exhausted, 0, last * rate / (1 - rate))
    beyond = last_weight * tail * (1 + rate) / (1 - rate)
    estimate = seen + 2 * tail * jnp.sum(weight) + jnp.where(exhausted, 0, beyond)

    upper = jnp.asarray(jnp.inf, seen.dtype)
    if lower_bound is not None:
        bound = lower_bound / tridiagonal.unit
        tail_upper = jnp.where(exhausted, 0, _radau_energy(run, tridiagonal, bound))
        # The 2-norm error of the last level is at most its energy over the spectral bound.
        upper = seen + 2 * tail_upper * jnp.sum(weight) + tail_upper / bound
        upper = jnp.where(jnp.isfinite(tail_upper), upper, jnp.inf)
        bracketed = upper <= BRACKET * seen
        estimate = jnp.where(bracketed, jnp.sqrt(seen * upper), jnp.clip(estimate, seen, upper))
        tail = jnp.minimum(tail, tail_upper)
    return LookaheadError(
        norm=jnp.sqrt(estimate),
        norm_seen=jnp.sqrt(seen),
        norm_upper=jnp.sqrt(upper),
        energy_norm=jnp.sqrt(jnp.sum(delta) + tail),
        energy_norm_seen=jnp.sqrt(jnp.sum(delta)),
    )


class _Increments(eqx.Module):
    """Per step k, for `||v|| = 1`: `delta_k`, and `w_k = ||p_k||^2 / p_k^T A p_k`."""

    delta: Float[Array, " n"]
    weight: Float[Array, " n"]
    last_residual: Float[Array, ""]

    @classmethod
    def of(cls, tridiagonal: Tridiagonal) -> "_Increments":
        # delta_k = y_k^2 / pivot_k with L y = e_1, that is y_k = -ratio_k y_{k-1}.
        one = jnp.ones((1,), tridiagonal.alpha.dtype)
        forward = jnp.concatenate([one, jnp.cumprod(-tridiagonal.ratios)])
        forward = forward / jnp.sqrt(tridiagonal.pivots)
        growth = _squared_norms(tridiagonal)
        last = jnp.maximum(tridiagonal.filled - 1, 0)
        coefficient = forward[last] / jnp.sqrt(tridiagonal.pivots[last])
        return cls(
            delta=forward**2,
            weight=growth / tridiagonal.pivots,
            last_residual=tridiagonal.residual * jnp.abs(coefficient),
        )


def _squared_norms(tridiagonal: Tridiagonal) -> Float[Array, " n"]:
    """Squared norms of the rows of L^-1 Q: the (unscaled) search directions of CG."""

    def grow(norm, ratio):
        norm = 1 + ratio**2 * norm
        return norm, norm

    start = jnp.ones((), tridiagonal.alpha.dtype)
    _, later = jax.lax.scan(grow, start, tridiagonal.ratios)
    return jnp.concatenate([start[None], later])


def _decay(
    run: _Increments, tridiagonal: Tridiagonal, level: Int[Array, ""], ritz_range: Array
) -> tuple[Array, Array, Array]:
    """Rate of decay of delta, its fitted last value, and the last weight."""
    dtype = run.delta.dtype
    rows = tridiagonal.rows()
    filled = tridiagonal.filled
    length = jnp.maximum(3, (filled - level + 1) // 2)
    window = ((rows >= filled - length) & (rows < filled)).astype(dtype)
    count = jnp.maximum(jnp.sum(window), 1)
    position = rows.astype(dtype)
    logs = jnp.log(jnp.maximum(run.delta, jnp.finfo(dtype).tiny))
    centre = jnp.sum(window * position) / count
    mean = jnp.sum(window * logs) / count
    spread = jnp.sum(window * (position - centre) ** 2)
    slope = jnp.sum(window * (position - centre) * (logs - mean))
    slope = slope / jnp.where(spread > 0, spread, 1)

    smallest, largest = ritz_range
    ratio = jnp.maximum(smallest, jnp.finfo(dtype).tiny) / largest
    cap = jnp.exp(-2 * jnp.sqrt(ratio))
    rate = jnp.minimum(jnp.exp(slope), jnp.minimum(cap, 1 - 1e-6))
    last = jnp.exp(mean + slope * (filled.astype(dtype) - 1 - centre))

    recent = (rows >= filled - jnp.maximum(3, length // 4)) & (rows < filled)
    log_weights = jnp.where(recent, jnp.log(run.weight), 0)
    count = jnp.maximum(jnp.sum(recent.astype(dtype)), 1)
    return rate, last, jnp.exp(jnp.sum(log_weights) / count)


def _radau_energy(
    run: _Increments, tridiagonal: Tridiagonal, bound: Float[Array, ""]
) -> Float[Array, ""]:
    """Upper bound of the energy left after the last step: `||r||^2 / (alpha_tilde - gamma)`."""
    shifted = tridiagonal.minus(bound)
    last = jnp.maximum(tridiagonal.filled - 1, 0)
    gamma = tridiagonal.residual**2 / tridiagonal.pivots[last]
    replaced = bound + tridiagonal.residual**2 / shifted.pivots[last]
    # Rounding may put a bound that touches the spectrum on the wrong side of a Ritz value.
    valid = jnp.all(shifted.pivots > 0) & (replaced > gamma)
    return jnp.where(valid, run.last_residual**2 / jnp.where(valid, replaced - gamma, 1), jnp.inf)
