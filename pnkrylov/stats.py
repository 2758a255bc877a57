"""What a run spent and what it learnt, as arrays; and as lines that a person wants to read."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

# An isotropic bulk says little about a complement whose condition number exceeds this.
_WIDE_COMPLEMENT = 100.0


class Stats(eqx.Module):
    """Cost and findings of a run; all arrays, so that it passes through `jit` and `vmap`.

    Attributes:
        num_matvecs: all products with A, probes and checks included.
        num_steps: Lanczos vectors that the mean resolves.
        lookahead: further Lanczos vectors that served the coupling and the scale.
        num_probes: random probes.
        probe_depth: steps of each probe.
        ritz_min, ritz_max: extreme Ritz values of the main run (shift included).
        residual_norm: the coupling beta at the end of the run.
        kappa_s: condition number of the Schur complement S, from Ritz values (an estimate).
        coupling_norm: `||c||`, a lower bound of `||Sigma_m - A^-1||_2`; 0 without coupling.
        bulk_variance: omega.
        bulk_standard_error: its standard error; infinite if no probe measured it.
        bulk_at_floor: whether omega had to be clipped at the provable floor.
        asymmetry: what the symmetry probe measured; -1 if it was switched off.
        driver: which loop ran.
    """

    num_matvecs: Int[Array, "..."]
    num_steps: Int[Array, "..."]
    lookahead: Int[Array, "..."]
    num_probes: Int[Array, "..."]
    probe_depth: Int[Array, "..."]
    ritz_min: Float[Array, "..."]
    ritz_max: Float[Array, "..."]
    residual_norm: Float[Array, "..."]
    kappa_s: Float[Array, "..."]
    coupling_norm: Float[Array, "..."]
    bulk_variance: Float[Array, "..."]
    bulk_standard_error: Float[Array, "..."]
    bulk_at_floor: Bool[Array, "..."]
    asymmetry: Float[Array, "..."]
    driver: str = eqx.field(static=True)

    @property
    def warnings(self) -> list[str]:
        """What a careful user should know before trusting the belief (concrete values only)."""
        found = []
        if _true(self.kappa_s > _WIDE_COMPLEMENT):
            found.append(
                f"the complement is far from isotropic (kappa_S ~ {number(self.kappa_s)}): "
                "single directions may be off by that factor; a preconditioner helps"
            )
        if _true(self.bulk_at_floor):
            found.append(
                "the bulk variance was clipped at its floor 1/mu_1: the probes were too few or "
                "the run outgrew them; spend more probes"
            )
        relative = self.bulk_standard_error / self.bulk_variance
        if _true(jnp.isfinite(relative) & (relative > 0.25)):
            found.append(f"the bulk variance is uncertain by {number(100 * relative)} %")
        return found


class SolveStats(eqx.Module):
    """What a solve belief knows about its own error.

    Attributes:
        error_norm: predicted `||x - mean||_2`.
        energy_norm: predicted `||x - mean||_A`; infinite where the run did not start at v.
        error_norm_upper: proven upper bound of `||x - mean||_2`; infinite without `lower_bound`.
        seen: share of the squared error that look-ahead steps showed; the rest is extrapolated.
        sufficient: whether the look-ahead saw what it needs.
        scale: the factor nu of the covariance (2-norm).
        energy_scale: the factor that the A-norm would give; infinite like `energy_norm`.
    """

    error_norm: Float[Array, "..."]
    energy_norm: Float[Array, "..."]
    error_norm_upper: Float[Array, "..."]
    seen: Float[Array, "..."]
    sufficient: Bool[Array, "..."]
    scale: Float[Array, "..."]
    energy_scale: Float[Array, "..."]

    @property
    def warnings(self) -> list[str]:
        """What a careful user should know before trusting the scale."""
        if _true(~self.sufficient):
            return [
                f"the look-ahead saw only {number(100 * self.seen)} % of the squared error; the "
                "rest is extrapolated: raise max_lookahead or pass lower_bound"
            ]
        return []


def _true(condition: Array) -> bool:
    return not isinstance(condition, Tracer) and bool(jnp.any(condition))


def number(value: Any) -> str:
    """Three digits of a scalar, or the range over a batch, or its shape while traced."""
    if isinstance(value, Tracer):
        return "<traced>"
    value = jnp.asarray(value)
    if value.ndim == 0:
        return f"{value.item():.3g}"
    return f"{jnp.min(value).item():.3g}..{jnp.max(value).item():.3g}"


def describe_run(stats: Stats) -> list[str]:
    """The lines that every belief prints about its run."""
    probes = "no random probes"
    if _true(stats.num_probes > 0):
        probes = f"{number(stats.num_probes)} probes of depth {number(stats.probe_depth)}"
    return [
        f"  spent     {number(stats.num_matvecs)} matvecs: {number(stats.num_steps)} resolved, "
        f"{number(stats.lookahead)} look-ahead, {probes} ({stats.driver} driver)",
        f"  spectrum  Ritz values {number(stats.ritz_min)} to {number(stats.ritz_max)}, "
        f"kappa_S ~ {number(stats.kappa_s)}",
    ]
