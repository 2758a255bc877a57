"""Prior and noise precision after training: by the evidence, or by a validation set.

The curvature is not computed again: one run serves every scalar prior precision and every Gaussian
noise level (METHOD.md section 12).
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from pnkrylov._arguments import check_positive_counts
from pnkrylov.laplace.batches import as_batch
from pnkrylov.laplace.likelihoods import Gaussian
from pnkrylov.laplace.posterior import LaplacePosterior
from pnkrylov.laplace.predictive import Kind

# Prior precisions that are tried, relative to the present one, before the search closes in.
_DECADES = 8
_PER_DECADE = 2
_GOLDEN = (5**0.5 - 1) / 2


class Tuned(eqx.Module):
    """A tuned posterior and how it was found.

    Attributes:
        posterior: with the best precision.
        precisions: the prior precisions that were tried, in order.
        scores: log evidence, or mean validation log density, at each of them.
    """

    posterior: LaplacePosterior
    precisions: np.ndarray
    scores: np.ndarray


def tune_by_evidence(posterior: LaplacePosterior, *, noise: bool = False) -> Tuned:
    """Maximises the log evidence over the scalar prior precision, at no product.

    The estimate of the parameters stays where it is, as usual for a Laplace approximation after
    training; `marglik_train` moves both. With a stochastic determinant the maximum is that of one
    fixed set of probes: a smooth function, off by the error bar of `log_evidence()`.

    Args:
        posterior: any method but `"ciq"`, which would spend products on every trial.
        noise: choose the scalar noise precision of a Gaussian likelihood as well.

    Raises:
        ValueError: method `"ciq"`, or no maximum inside 8 decades around the present precision.
        TypeError: `posterior` is none, or `noise=True` and the likelihood is not Gaussian.

    Source:
        MacKay 1992; Immer et al. 2021. For a fixed ratio of prior and noise precision, the best
        noise precision is a closed form, so that the search is one-dimensional with noise, too.
    """
    _check_posterior(posterior)
    if posterior.method == "ciq":
        raise ValueError(
            "method='ciq' would spend products on every trial: tune an 'exact' or 'krylov' "
            "posterior and pass its prior_precision to fit(..., method='ciq')."
        )
    if noise and not isinstance(posterior.likelihood, Gaussian):
        raise TypeError(
            f"noise=True needs a Gaussian likelihood, not {type(posterior.likelihood).__name__}."
        )
    move = _move_both if noise else _move_prior

    def score(factor: float) -> float:
        return float(move(posterior, factor).log_evidence().value)

    return _search(posterior, move, score)


def tune_by_validation(
    posterior: LaplacePosterior,
    data: tuple[PyTree, Any],
    *,
    kind: Kind = "auto",
    key: PRNGKeyArray | None = None,
    num_samples: int = 64,
) -> Tuned:
    """Maximises the mean log density of held-out targets over the scalar prior precision.

    Every trial makes the predictions anew (their Jacobians, not the curvature).

    Args:
        posterior: any method; `"ciq"` spends products on every trial.
        data: inputs and targets that were not trained on.
        kind: as in `LaplacePosterior.predictive`.
        key: random key for the sampled kinds; the same draws serve every trial.
        num_samples: draws for the sampled kinds.

    Raises:
        TypeError, ValueError: as `LaplacePosterior.predictive`; `data` is no pair (x, y) of equal
            lengths; no maximum inside 8 decades around the present precision.
    """
    _check_posterior(posterior)
    check_positive_counts(num_samples=num_samples)
    inputs, targets = as_batch(data)

    def score(factor: float) -> float:
        moved = _move_prior(posterior, factor)
        predicted = moved.predictive(inputs, kind, key=key, num_samples=num_samples)
        return float(jnp.mean(predicted.log_density(targets)))

    return _search(posterior, _move_prior, score)


def _check_posterior(posterior: Any) -> None:
    if not isinstance(posterior, LaplacePosterior):
        raise TypeError(
            f"posterior is of type {type(posterior).__name__}: pass what pnkrylov.laplace.fit "
            "returned."
        )


def _move_prior(posterior: LaplacePosterior, factor: float) -> LaplacePosterior:
    return posterior.with_precision(factor * posterior.prior.precision)


def _move_both(posterior: LaplacePosterior, factor: float) -> LaplacePosterior:
    """The prior-to-noise ratio times a factor, with the noise precision that is best for it."""
    energy = posterior.prior.energy(posterior.network.parameters.flat())
    assert isinstance(posterior.likelihood, Gaussian)
    noise = posterior.likelihood.precision.astype(energy.dtype)
    ratio = factor * posterior.prior.precision / noise
    best = posterior.num_targets / (posterior.squared_error() + ratio * energy)
    return posterior.with_noise_precision(best).with_precision(ratio * best)


def _search(
    posterior: LaplacePosterior,
    move: Callable[[LaplacePosterior, float], LaplacePosterior],
    score: Callable[[float], float],
) -> Tuned:
    """A grid over 8 decades, then golden sections, to 1 % in the precision."""
    tried: dict[float, float] = {}

    def at(log_factor: float) -> float:
        if log_factor not in tried:
            tried[log_factor] = score(float(np.exp(log_factor)))
        return tried[log_factor]

    half = _DECADES / 2 * np.log(10)
    grid = np.linspace(-half, half, _DECADES * _PER_DECADE + 1)
    best = int(np.argmax([at(float(point)) for point in grid]))
    if best in (0, len(grid) - 1):
        side = "smallest" if best == 0 else "largest"
        raise ValueError(
            f"The {side} prior precision that was tried, "
            f"{float(posterior.prior.precision) * np.exp(grid[best]):.3g}, scores best: there is "
            "no maximum within four decades of the present one. Start nearer with "
            "with_prior_precision, or check that the network is trained."
        )
    low, high = float(grid[best - 1]), float(grid[best + 1])
    while high - low > 1e-2:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if at(left) >= at(right):
            high = right
        else:
            low = left
    winner = max(tried, key=tried.__getitem__)
    order = sorted(tried)
    return Tuned(
        posterior=move(posterior, float(np.exp(winner))),
        precisions=np.exp(order) * float(posterior.prior.precision),
        scores=np.array([tried[point] for point in order]),
    )
