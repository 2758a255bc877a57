"""What a posterior predicts: the outputs' Gaussian or draws -> probabilities, means, densities."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pnkrylov.laplace.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)

Kind = Literal["auto", "linear", "probit", "mackay", "mc-linear", "mc"]
KINDS = ("auto", "linear", "probit", "mackay", "mc-linear", "mc")
CLOSED_FORMS = ("linear", "probit", "mackay")

_PI_OVER_8 = 0.39269908169872414
_HIGHEST = jax.lax.Precision.HIGHEST


class Predictive(eqx.Module):
    """Predictions for n inputs with K outputs.

    Attributes:
        likelihood: what the outputs say about targets.
        kind: how the uncertainty of the parameters was integrated out.
        functional_mean: `(n, K)`, outputs at the estimate of the parameters.
        functional_covariance: `(n, K, K)`, of the linearised outputs; None for the sampled kinds.
        draws: `(S, n, K)`, outputs for draws of the parameters; None for the closed forms.
    """

    likelihood: Likelihood
    functional_mean: Float[Array, "n K"]
    functional_covariance: Float[Array, "n K K"] | None
    draws: Float[Array, "S n K"] | None
    kind: str = eqx.field(static=True)

    def probabilities(self) -> Float[Array, "n K"]:
        """The predictive probabilities of classes (of a one, for a Bernoulli likelihood).

        Raises:
            TypeError: the likelihood is neither categorical nor Bernoulli.
        """
        if not isinstance(self.likelihood, Categorical | Bernoulli):
            raise TypeError(
                f"{type(self.likelihood).__name__} has no class probabilities; use mean() or "
                "log_density(targets)."
            )
        categorical = isinstance(self.likelihood, Categorical)
        if self.draws is not None:
            link = jax.nn.softmax if categorical else jax.nn.sigmoid
            return jnp.mean(link(self.draws), axis=0)
        assert self.functional_covariance is not None
        if not categorical:
            variance = jnp.diagonal(self.functional_covariance, axis1=1, axis2=2)
            return jax.nn.sigmoid(self.functional_mean / jnp.sqrt(1 + _PI_OVER_8 * variance))
        rule = probit if self.kind == "probit" else mackay
        return rule(self.functional_mean, self.functional_covariance)

    def mean(self) -> Float[Array, "n M"]:
        """The predictive mean of a target: probabilities, rates or regression outputs.

        Raises:
            TypeError: the likelihood is the user's own, whose mean is not known.
        """
        if isinstance(self.likelihood, Categorical | Bernoulli):
            return self.probabilities()
        if isinstance(self.likelihood, Gaussian) and self.draws is None:
            return self.functional_mean
        assert self.draws is not None
        return jnp.mean(_conditional_moments(self.likelihood, self.draws)[0], axis=0)

    def variance(self) -> Float[Array, "n M"]:
        """The predictive variance of a target: that of the outputs, and the noise.

        Raises:
            TypeError: the likelihood is the user's own, whose variance is not known.
        """
        if isinstance(self.likelihood, Categorical | Bernoulli):
            return self.probabilities() * (1 - self.probabilities())
        if isinstance(self.likelihood, Gaussian) and self.draws is None:
            return jnp.diagonal(self._noisy_covariance(), axis1=1, axis2=2)
        assert self.draws is not None
        means, variances = _conditional_moments(self.likelihood, self.draws)
        return jnp.mean(variances, axis=0) + jnp.var(means, axis=0)

    def log_density(self, targets: Any) -> Float[Array, " n"]:
        """`log p(target | data)` for each input.

        Args:
            targets: n targets, as the likelihood takes them.

        Raises:
            ValueError, TypeError: the targets do not fit the outputs.
            TargetError: a target lies outside the support.
        """
        self.likelihood.check(self.functional_mean, targets)
        if self.draws is not None:
            losses = jax.vmap(lambda f: self.likelihood.negative_log_density(f, targets))(
                self.draws
            )
            count = jnp.log(jnp.asarray(self.draws.shape[0], losses.dtype))
            return jax.scipy.special.logsumexp(-losses, axis=0) - count
        if isinstance(self.likelihood, Gaussian):
            mean = self.functional_mean
            residuals = mean - jnp.asarray(targets).astype(mean.dtype).reshape(mean.shape)
            return _gaussian_log_density(residuals, self._noisy_covariance())
        probabilities = self.probabilities()
        tiny = jnp.finfo(probabilities.dtype).tiny
        if isinstance(self.likelihood, Categorical):
            labels = jnp.asarray(targets)[:, None]
            chosen = jnp.take_along_axis(probabilities, labels, axis=1)
        else:
            ones = jnp.asarray(targets).reshape(probabilities.shape) == 1
            chosen = jnp.where(ones, probabilities, 1 - probabilities)
        return jnp.sum(jnp.log(jnp.maximum(chosen, tiny)), axis=1)

    def _noisy_covariance(self) -> Array:
        assert isinstance(self.likelihood, Gaussian) and self.functional_covariance is not None
        mean, covariance = self.functional_mean, self.functional_covariance
        precision = jnp.broadcast_to(self.likelihood.precision.astype(mean.dtype), mean.shape[1:])
        return covariance + jnp.diag(1 / precision)[None, :, :]


def resolve_kind(kind: str, likelihood: Likelihood) -> str:
    """The kind that `"auto"` stands for, and whether a kind fits the likelihood.

    Raises:
        ValueError: the kind is unknown or does not fit.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown: use one of {', '.join(KINDS)}.")
    classes = isinstance(likelihood, Categorical | Bernoulli)
    if kind == "auto":
        if classes:
            return "probit"
        return "linear" if isinstance(likelihood, Gaussian) else "mc-linear"
    if kind in ("probit", "mackay") and not classes:
        raise ValueError(
            f"kind={kind!r} approximates class probabilities, but the likelihood is "
            f"{type(likelihood).__name__}: use 'auto', 'mc-linear' or 'mc'."
        )
    if kind == "linear" and not isinstance(likelihood, Gaussian):
        raise ValueError(
            "kind='linear' is the closed form for a Gaussian likelihood, but this one is "
            f"{type(likelihood).__name__}: use 'auto', 'mc-linear' or 'mc'."
        )
    return kind


def probit(mean: Float[Array, "n K"], covariance: Float[Array, "n K K"]) -> Float[Array, "n K"]:
    """`softmax(f_k / sqrt(1 + pi/8 Var f_k))`: each logit scaled by its own variance.

    Source:
        MacKay 1992 for two classes; Lu, Ie and Sha 2020 (mean field 0) for more.
    """
    variance = jnp.diagonal(covariance, axis1=1, axis2=2)
    return jax.nn.softmax(mean / jnp.sqrt(1 + _PI_OVER_8 * variance), axis=1)


def mackay(mean: Float[Array, "n K"], covariance: Float[Array, "n K K"]) -> Float[Array, "n K"]:
    """MacKay's approximation for each pair of classes, with the variance of their difference.

    `1 / p_k = sum_j exp(-(f_k - f_j) / sqrt(1 + pi/8 Var(f_k - f_j)))`, normalised. Unlike
    `probit` it sees correlations: an offset common to all logits changes nothing.

    Source:
        MacKay 1992; Lu, Ie and Sha 2020 (mean field 2).
    """
    variance = jnp.diagonal(covariance, axis1=1, axis2=2)
    spread = variance[:, :, None] + variance[:, None, :] - 2 * covariance
    difference = mean[:, :, None] - mean[:, None, :]
    scaled = difference / jnp.sqrt(1 + _PI_OVER_8 * jnp.maximum(spread, 0))
    return jax.nn.softmax(-jax.scipy.special.logsumexp(-scaled, axis=2), axis=1)


def _conditional_moments(likelihood: Likelihood, outputs: Array) -> tuple[Array, Array]:
    """Mean and variance of a target given the outputs."""
    if isinstance(likelihood, Gaussian):
        precision = likelihood.precision.astype(outputs.dtype)
        shape = (1,) * (outputs.ndim - 1) + outputs.shape[-1:]
        noise = jnp.broadcast_to(1 / precision, outputs.shape[-1:]).reshape(shape)
        return outputs, jnp.broadcast_to(noise, outputs.shape)
    if isinstance(likelihood, HeteroscedasticGaussian):
        means, log_variances = jnp.split(outputs, 2, axis=-1)
        return means, jnp.exp(log_variances)
    if isinstance(likelihood, Poisson):
        rates = jnp.exp(outputs)
        return rates, rates
    raise TypeError(
        f"The mean of a target under {type(likelihood).__name__} is not known. Average what you "
        "need over `draws`, the outputs for draws of the parameters."
    )


def _gaussian_log_density(residuals: Array, covariance: Array) -> Array:
    factor = jnp.linalg.cholesky(covariance)
    white = jax.vmap(lambda L, r: jax.scipy.linalg.solve_triangular(L, r, lower=True))(
        factor, residuals
    )
    logdet = 2 * jnp.sum(jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)), axis=1)
    constant = residuals.shape[1] * 1.8378770664093453  # log 2 pi
    return -0.5 * (jnp.sum(white**2, axis=1) + logdet + constant)
