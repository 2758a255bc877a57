"""The regime of a belief: can one variance describe what the run left unresolved?"""

import dataclasses
import math

import jax.numpy as jnp

from pnkrylov._arguments import check_reals
from pnkrylov.beliefs import InverseBelief, SolveBelief
from pnkrylov.calibration import calibrate_inverse
from pnkrylov.krylov import is_concrete
from pnkrylov.stats import number

# Up to here one variance describes the bulk: the largest is at most this often the smallest.
_ISOTROPIC = 10.0
# From here on single directions may be wrong by so much that only a preconditioner helps.
_WIDE = 100.0
# omega is a mean over probes; beyond this relative error they were too few.
_UNCERTAIN = 0.25
# From here on the bulk is the prior, and its curvature is noise.
_PRIOR = 0.99


@dataclasses.dataclass(frozen=True)
class RegimeReport:
    """Whether one variance can describe what a run left unresolved; `print` it.

    The condition number comes from the Ritz values of the complement, T_perp and S, that the run
    and the probes have seen. They lie inside the spectra, so both bounds hold only once the probes
    have found the extremes; then they err on the safe side (T_perp reaches beyond S).

    Attributes:
        num_directions: directions in the bulk.
        kappa_s: condition number of the complement, as far as it was seen.
        coupling_norm: `||c||`, which an isotropic bulk cannot represent; a proven lower bound of
            `||Sigma_m - A^-1||_2`, zero where there is no coupling.
        bulk_variance: omega (of a SolveBelief before its scale nu).
        relative_error: standard error of omega, relative; infinite without random probes.
        damping: lambda, if it was given.
        damping_times_omega: `lambda omega`; 1 means that the bulk is the prior.
        kl_per_direction: bound of the KL divergence of the bulk, `(kappa_S - 1)^2 / 2`.
        operator_error: bound of `||Sigma_m - A^-1||_2`, `||c|| + omega (kappa_S - 1)`. For the
            layout `"resolve-all"` it is that of the layout `"paper"` of the same run, as are
            `kappa_s` and `coupling_norm`.
        verdict: a sentence with the remedy.
    """

    num_directions: int
    kappa_s: float
    coupling_norm: float
    bulk_variance: float
    relative_error: float
    damping: float | None
    damping_times_omega: float | None
    kl_per_direction: float
    operator_error: float
    verdict: str

    def __str__(self) -> str:
        error = "no random probes"
        if math.isfinite(self.relative_error):
            error = f"+- {100 * self.relative_error:.2g} %"
        lines = [
            f"Regime of the bulk, {self.num_directions} directions",
            f"  omega          {self.bulk_variance:.3g} ({error})",
            f"  kappa_S        {self.kappa_s:.3g}",
            f"  ||c||          {self.coupling_norm:.3g}",
            f"  KL / direction {self.kl_per_direction:.3g} at most, at this kappa_S",
            f"  ||error||_2    {self.operator_error:.3g} at most, at this kappa_S",
        ]
        if self.damping is not None:
            lines.append(f"  lambda omega   {self.damping_times_omega:.4g}")
        return "\n".join([*lines, f"  {self.verdict}"])


def regime(belief: SolveBelief | InverseBelief, damping: float | None = None) -> RegimeReport:
    """Whether the bulk of a belief is isotropic enough, and the remedy if not. No product is spent.

    Args:
        belief: one belief, outside `jit`.
        damping: lambda, where `A + alpha I` is a positive semi-definite matrix plus `lambda I`
            (prior precision, noise variance; the shift alpha included).

    Raises:
        TypeError: `belief` is none with a single run, or `damping` no real number.
        ValueError: `belief` is a batch, traced, or of a failed run; `damping` is not positive or
            above the smallest Ritz value.

    Source:
        pslq.md, theorem 13 and proposition 14; `lambda omega`: its section 6.2, "Two regimes".
    """
    if not isinstance(belief, SolveBelief | InverseBelief):
        raise TypeError(
            f"belief is of type {type(belief).__name__}: pass what pnkrylov.solve or "
            "pnkrylov.inverse returned."
        )
    if damping is not None:
        check_reals(damping=damping)
    if not is_concrete(belief) or belief.mean_flat.ndim != 1:
        raise ValueError(
            "regime needs one belief with concrete values: call it outside jit/vmap/grad, and for "
            "a batch on each, jax.tree.map(lambda leaf: leaf[i], belief)."
        )
    belief.run.raise_unless(belief.result, belief.alpha, getattr(belief, "lower_bound", None))
    stats = level = belief.stats
    if isinstance(belief, InverseBelief) and belief.layout != "paper":
        level = calibrate_inverse(belief.run, belief.mean_flat, belief.alpha, "paper").stats
    omega, kappa = float(stats.bulk_variance), float(stats.kappa_s)
    coupling = float(stats.coupling_norm)
    report = RegimeReport(
        num_directions=int(belief.covariance.bulk_dimension()),
        kappa_s=kappa,
        coupling_norm=coupling,
        bulk_variance=omega,
        relative_error=float(stats.bulk_standard_error) / omega if omega > 0 else 0.0,
        damping=damping,
        damping_times_omega=None if damping is None else damping * omega,
        kl_per_direction=(kappa - 1) ** 2 / 2,
        operator_error=coupling + float(level.bulk_variance) * (kappa - 1),
        verdict="",
    )
    if damping is not None:
        _check_damping(damping, belief)
    return dataclasses.replace(report, verdict=_verdict(report, belief))


def _check_damping(damping: float, belief: SolveBelief | InverseBelief) -> None:
    smallest, eps = float(belief.stats.ritz_min), float(jnp.finfo(belief.mean_flat.dtype).eps)
    if not 0 < damping <= smallest + 100 * eps * float(belief.stats.ritz_max):
        raise ValueError(
            f"damping={damping} must be positive and at most the smallest Ritz value "
            f"{smallest:.6g}, because A + alpha I is assumed to be at least damping * I."
        )


def _verdict(report: RegimeReport, belief: SolveBelief | InverseBelief) -> str:
    stats, kappa = belief.stats, report.kappa_s
    # A scale from the look-ahead makes up for what probes would tell.
    scale = None
    if isinstance(belief, SolveBelief) and bool(belief.fixed_scale < 0):
        scale = belief.error
    if report.num_directions == 0 or (scale is not None and bool(scale.scale == 0)):
        return "Exact: the run left nothing unresolved."
    if scale is not None and not bool(scale.sufficient):
        return (
            f"Scale uncertain: the look-ahead saw only {number(100 * scale.seen)} % of the squared "
            "error. Raise max_lookahead, or pass lower_bound."
        )
    at_floor = bool(stats.bulk_at_floor)
    if scale is None and (report.relative_error > _UNCERTAIN or at_floor):
        return (
            "Probes uncertain: omega is known too badly to judge by. Spend more probes "
            "(num_probes=)."
        )
    if report.damping_times_omega is not None and report.damping_times_omega >= _PRIOR:
        return "The bulk is the prior: further steps only pay if they find outliers."
    if kappa <= _ISOTROPIC:
        return f"Isotropic enough: variances in the bulk differ by a factor of {kappa:.2g}."
    if kappa <= _WIDE:
        return (
            f"Take more steps: averages over many directions are fine, but single ones may be off "
            f"by a factor of {kappa:.2g}."
        )
    return (
        f"Use a preconditioner: variances in the bulk differ by a factor of {kappa:.2g}, more than "
        "further steps are likely to remove."
    )
