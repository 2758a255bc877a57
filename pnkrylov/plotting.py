"""Pictures of beliefs, calibration, spectra and quadrature; needs matplotlib, imports it when used.

Every function draws into `axes`, or makes a figure without them, and returns the axes. Colours are
those of Okabe and Ito, told apart without red-green vision; where two things could be confused
they differ in marker or line as well.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import PyTree

from pnkrylov._arguments import check_fractions
from pnkrylov.beliefs import InverseBelief
from pnkrylov.ciq.quadrature import Quadrature
from pnkrylov.covariance import KrylovCovariance
from pnkrylov.gaussian import GaussianBelief
from pnkrylov.krylov import KrylovBasis
from pnkrylov.laplace.metrics import Reliability
from pnkrylov.sample_diagnostics import SampleCheck
from pnkrylov.simulation import Uniformity

BLACK, BLUE, ORANGE, GREEN, GREY = "#000000", "#0072B2", "#D55E00", "#009E73", "#999999"


def contraction(
    beliefs: Sequence[GaussianBelief],
    functional: PyTree,
    *,
    truth: float | None = None,
    labels: Sequence[str] | None = None,
    level: float = 0.95,
    axes: Any = None,
) -> Any:
    """One number of the answer, as more and more computation pins it down.

    Args:
        beliefs: about the same answer, in order of computation.
        functional: `c` of the number `c . x`, as a row for `push`.
        truth: the exact number, drawn as a line.
        labels: below the beliefs; the number of products each has spent by default.
        level: probability of the intervals.
        axes: matplotlib axes; a new figure when None.

    Returns:
        The axes.

    Raises:
        TypeError: `beliefs` is no list, or `functional` no array or function.
        ValueError: no beliefs, another number of labels, or `functional` is not a single one;
            `level` is not in (0, 1).
    """
    if not isinstance(beliefs, Sequence):
        raise TypeError(f"beliefs is of type {type(beliefs).__name__}: pass a list of them.")
    if not beliefs:
        raise ValueError("beliefs is empty: pass at least one.")
    if labels is not None and len(labels) != len(beliefs):
        raise ValueError(f"labels has {len(labels)} entries for {len(beliefs)} beliefs.")
    pushed = [belief.push(functional) for belief in beliefs]
    if any(each.mean.size != 1 for each in pushed):
        raise ValueError(f"functional must be a single one, got {pushed[0].mean.size} rows.")
    axes = _axes(axes)
    means = np.array([float(jnp.ravel(each.mean)[0]) for each in pushed])
    widths = _quantile(level) * np.array([float(jnp.ravel(each.std())[0]) for each in pushed])
    if labels is None:
        labels = [str(int(getattr(belief, "stats").num_matvecs)) for belief in beliefs]  # noqa: B009
        axes.set_xlabel("products with A")
    places = np.arange(len(beliefs))
    axes.errorbar(
        places, means, yerr=widths, fmt="o", color=BLUE, capsize=3, label=f"{100 * level:g} %"
    )
    if truth is not None:
        axes.axhline(truth, color=ORANGE, linestyle="--", label="exact")
    axes.set_xticks(places, labels)
    axes.legend(frameon=False)
    return axes


def calibration(found: Uniformity, *, axes: Any = None) -> Any:
    """Observed against expected probabilities: on the diagonal a belief errs as much as it says.

    Args:
        found: `functionals` or `coordinates` of a `CalibrationReport`.
        axes: matplotlib axes; a new figure when None.

    Returns:
        The axes. The band holds 95 % of all calibrated beliefs, over its whole length.

    Raises:
        ImportError: matplotlib is not installed.
    """
    axes = _axes(axes)
    values = np.sort(np.asarray(found.values))
    observed = (np.arange(len(values)) + 0.5) / max(len(values), 1)
    line = np.array([0.0, 1.0])
    band = found.distance_range[1]
    axes.fill_between(line, line - band, line + band, color=GREY, alpha=0.3, linewidth=0)
    axes.plot(line, line, color=GREY, linewidth=1)
    axes.plot(values, observed, color=BLUE, linewidth=1.8)
    for each in found.coverage:
        inner = [(1 - each.level) / 2, (1 + each.level) / 2]
        axes.plot(inner, inner, "|", color=BLACK, markersize=9)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability by the belief", ylabel="share observed")
    return axes


def spectrum(belief: InverseBelief, *, eigenvalues: Any = None, axes: Any = None) -> Any:
    """Ritz values, how far each may be off, and the one value that stands for all the rest.

    Args:
        belief: about `A^-1`.
        eigenvalues: the exact ones, an array in any order, for comparison.
        axes: matplotlib axes; a new figure when None.

    Returns:
        The axes, logarithmic in the eigenvalue.

    Raises:
        TypeError: `belief` is no `InverseBelief`.
        ValueError: the belief was preconditioned: its Ritz values are not those of A.
    """
    if not isinstance(belief, InverseBelief):
        raise TypeError(
            f"belief is of type {type(belief).__name__}: pass what pnkrylov.inverse returned."
        )
    covariance = belief.covariance
    if not isinstance(covariance, KrylovCovariance):
        raise ValueError(
            "belief was made with preconditioner=, so its Ritz values are those of "
            "P^-1/2 A P^-1/2. Draw the spectrum of a belief made without it."
        )
    axes = _axes(axes)
    basis = belief.run.basis.trim()
    ritz, residuals = ritz_values(basis)
    ritz = ritz + float(belief.alpha)
    places = np.arange(1, len(ritz) + 1)
    if eigenvalues is not None:
        exact = np.sort(np.asarray(eigenvalues))[::-1]
        axes.plot(np.arange(1, len(exact) + 1), exact, color=GREY, linewidth=3, label="exact")
    lower = np.minimum(residuals, 0.999 * ritz)
    axes.errorbar(
        places, ritz, yerr=[lower, residuals], fmt=".", color=BLUE, ecolor=BLUE, elinewidth=0.8,
        markersize=4, label="Ritz values and residual bounds",
    )  # fmt: skip
    deviation = float(covariance.bulk_deviation)
    if deviation > 0 and basis.size > basis.num_rows:
        rest = [len(ritz) + 1, basis.size]
        axes.plot(rest, 2 * [deviation**-2], color=ORANGE, linewidth=1.8, label="what is left")
    axes.set(yscale="log", xlabel="number", ylabel="eigenvalue")
    axes.legend(frameon=False)
    return axes


def ritz_values(basis: KrylovBasis) -> tuple[np.ndarray, np.ndarray]:
    """Ritz values of a run, largest first, and the norms of their residuals.

    Within its residual norm of every Ritz value there is an eigenvalue (Parlett 1998, section 4.5).

    Args:
        basis: the run, all of its n rows filled (`basis.trim()`).

    Returns:
        `(n,)` Ritz values and `(n,)` norms.

    Raises:
        ValueError: the run is traced (under `jit`).
    """
    ritz, vectors = np.linalg.eigh(np.asarray(basis.tridiagonal(), np.float64))
    residuals = float(basis.residual_norm()) * np.abs(vectors[-1])
    return ritz[::-1], residuals[::-1]


def quadrature(rule: Quadrature, lmin: float, lmax: float, *, axes: Any = None) -> Any:
    """The error of a rule for `x^{-1/2}` over the spectrum, above its points and their weights.

    Args:
        rule: from `pnkrylov.ciq.quadrature`.
        lmin: lower end of the spectrum.
        lmax: upper end of the spectrum.
        axes: two matplotlib axes, one above the other; a new figure when None.

    Returns:
        The two axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    upper, lower = _axes(axes, rows=2)
    dtype = rule.shifts.dtype
    x = jnp.asarray(np.geomspace(lmin, lmax, 1000), dtype)
    error = np.abs(np.asarray(rule.relative_error(x)))
    upper.plot(x, np.maximum(error, np.finfo(dtype).eps), color=BLUE)
    upper.set(xscale="log", yscale="log", ylabel="relative error")
    shifts, weights = np.asarray(rule.shifts), np.asarray(rule.weights)
    lower.vlines(shifts, weights.min() / 2, weights, color=BLUE, linewidth=1)
    lower.plot(shifts, weights, "o", color=BLUE, markersize=4)
    lower.axvspan(lmin, lmax, color=GREY, alpha=0.25, linewidth=0, label="spectrum")
    lower.set(xscale="log", yscale="log", xlabel="spectrum; shift of a point", ylabel="weight")
    lower.legend(frameon=False)
    return upper, lower


def two_variances(x: Any, prediction: Any, *, level: float = 0.95, axes: Any = None) -> Any:
    """A Gaussian process in one dimension: what data and what computation leave unknown.

    Args:
        x: an array `(s,)` of points, ascending.
        prediction: of those points and one output, from `pnkrylov.gp`.
        level: probability of the bands.
        axes: matplotlib axes; a new figure when None.

    Returns:
        The axes. The inner band is the mathematical variance, the outer one the sum of both.

    Raises:
        TypeError: `level` is no real number.
        ValueError: the prediction is not of one output at the points `x`, or `level` is not in
            (0, 1).
    """
    x, mean = np.asarray(x), np.asarray(prediction.mean)
    if x.ndim != 1 or mean.shape != x.shape:
        raise ValueError(
            f"x has shape {x.shape} and the prediction {mean.shape}; both must be (s,): pass the "
            "points that were predicted, and one output."
        )
    axes = _axes(axes)
    factor = _quantile(level)
    inner = factor * np.sqrt(np.asarray(prediction.mathematical))
    outer = factor * np.sqrt(np.asarray(prediction.variance))
    axes.fill_between(x, mean - inner, mean + inner, color=BLUE, alpha=0.35, linewidth=0,
                      label="lack of data")  # fmt: skip
    for sign in (-1, 1):
        axes.fill_between(
            x, mean + sign * inner, mean + sign * outer, color=ORANGE, alpha=0.35, linewidth=0,
            label="lack of computation" if sign > 0 else None,
        )  # fmt: skip
    axes.plot(x, mean, color=BLACK, linewidth=1.2, label="mean")
    axes.legend(frameon=False)
    return axes


def reliability(
    diagram: Reliability, *, label: str | None = None, axes: Any = None, **options: Any
) -> Any:
    """Accuracy against confidence, with the line of perfect calibration.

    Args:
        diagram: from `pnkrylov.laplace.metrics.reliability`.
        label: name in the legend.
        axes: matplotlib axes; a new figure when None.
        **options: for `axes.plot`.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    axes = _axes(axes)
    axes.plot([0, 1], [0, 1], color="0.6", lw=1, ls="--", zorder=0)
    filled = diagram.count > 0
    confidence, accuracy = diagram.confidence[filled], diagram.accuracy[filled]
    axes.plot(confidence, accuracy, **({"marker": "o", "label": label} | options))
    axes.set(xlabel="confidence", ylabel="accuracy")
    return axes


def sample_check(check: SampleCheck, *, axes: Any = None) -> Any:
    """Squared distances of samples against chi-squared: the histogram, and the quantiles.

    Args:
        check: from `pnkrylov.sample_diagnostics.check_samples`.
        axes: two matplotlib axes, side by side; a new figure when None.

    Returns:
        The two axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    left, right = _axes(axes, columns=2)
    edges, density, _ = check.histogram()
    left.stairs(density, edges, fill=True, alpha=0.4, color=BLUE, label="samples")
    grid = np.linspace(edges[0], edges[-1], 300)
    name = f"chi2({check.dimension})"
    left.plot(grid, scipy.stats.chi2.pdf(grid, check.dimension), color=ORANGE, label=name)
    left.set(xlabel="squared Mahalanobis distance", ylabel="density")
    left.legend(frameon=False)
    expected, observed = check.quantiles()
    right.plot(expected, observed, ".", markersize=3, color=BLUE)
    ends = [min(expected[0], observed[0]), max(expected[-1], observed[-1])]
    right.plot(ends, ends, linewidth=1, color=GREY)
    right.set(xlabel=f"quantiles of {name}", ylabel="quantiles of the samples")
    low, high = check.interval
    right.set_title(f"KS {check.statistic:.3f} in [{low:.3f}, {high:.3f}]", fontsize=9)
    return left, right


def _axes(axes: Any, *, rows: int = 1, columns: int = 1) -> Any:
    if axes is not None:
        return axes
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("pnkrylov.plotting needs matplotlib: pip install matplotlib.") from error
    size = (4.8 * columns, 1.4 + 2.2 * rows)
    return plt.subplots(rows, columns, figsize=size, layout="constrained")[1]


def _quantile(level: float) -> float:
    check_fractions(level=level)
    return float(scipy.stats.norm.ppf((1 + level) / 2))
