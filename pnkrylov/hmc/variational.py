"""Preconditioners that variational inference finds on a Gaussian, and what each of them leaves.

A preconditioner is a factor F: the sampler runs on `z = F^-1 (x - mean)`, whose covariance is
`F^-1 C F^-T`. The Kullback-Leibler divergence is not the condition number: in the eigenvalues
`lambda^2` of that covariance the reverse one is `sum (lambda^-2 + log lambda^2) / 2` up to a
constant, the forward one `sum (lambda^2 - log lambda^2) / 2`, and kappa is neither.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pnkrylov.hmc._scalars import Scalar, as_floats, check_positive

_HIGHEST = jax.lax.Precision.HIGHEST


def diagonal_preconditioner(
    covariance: Float[Array, "N N"], divergence: Literal["reverse", "forward"] = "reverse"
) -> Float[Array, " N"]:
    """The best diagonal Gaussian, as scales: mean-field variational inference at its optimum.

    Args:
        covariance: `(N, N)`, positive definite.
        divergence: `"reverse"`, KL(q || p), gives `(C^-1)_nn^{-1/2}`, the conditional standard
            deviations; `"forward"`, KL(p || q), gives `C_nn^{1/2}`, the marginal ones (what a
            diagonal mass matrix adapts to).

    Returns:
        `(N,)` scales, the diagonal of F.

    Raises:
        ValueError: `divergence` is unknown.

    Source:
        hmc_condition_number.md, section 5.3.
    """
    if divergence == "forward":
        return jnp.sqrt(jnp.diagonal(covariance))
    if divergence != "reverse":
        raise ValueError(f"divergence={divergence!r} is unknown: use 'reverse' or 'forward'.")
    return 1 / jnp.sqrt(jnp.diagonal(jnp.linalg.inv(covariance)))


def reverse_kl_preconditioner(
    covariance: Float[Array, "N N"], noise: Float[Array, "M N"]
) -> Float[Array, "N N"]:
    """The minimiser of the sampled reverse divergence over all affine maps, in closed form.

    Stochastic variational inference with fixed noise `z_i` (sample path optimisation) minimises
    `mean_i -log p(m + F z_i) - log |det F|`. On a Gaussian the minimiser obeys `F S F^T = C` with
    S the noise's own sample covariance, so `F = C^{1/2} S^{-1/2}`: what it leaves is S.

    Args:
        covariance: `(N, N)`, positive definite.
        noise: `(M, N)`, standard normal draws, M at least N + 1.

    Returns:
        F, `(N, N)`.

    Raises:
        ValueError: there are too few draws: the objective has no minimum.

    Source:
        hmc_condition_number.md, section 5.3 (the objective); the closed form is ours.
    """
    draws, dimension = noise.shape
    if draws < dimension + 1:
        raise ValueError(
            f"noise has {draws} draws in {dimension} dimensions: the sampled divergence is "
            f"unbounded below. Pass at least {dimension + 1}."
        )
    centred = noise - jnp.mean(noise, axis=0)[None, :]
    sample = jnp.matmul(centred.T, centred, precision=_HIGHEST) / draws
    # Any roots of C and S will do: F S F^T = C.
    factor = jnp.linalg.cholesky(sample)
    root = jnp.linalg.cholesky(covariance)
    return jax.scipy.linalg.solve_triangular(factor, root.T, lower=True, trans=1).T


def remaining_covariance(
    covariance: Float[Array, "N N"], factor: Float[Array, "N N"] | Float[Array, " N"]
) -> Float[Array, "N N"]:
    """`F^-1 C F^-T`: the covariance that the sampler sees; its condition number is what F leaves.

    Args:
        covariance: `(N, N)`.
        factor: F, `(N, N)`, or its diagonal `(N,)`.

    Source:
        hmc_condition_number.md, section 5.
    """
    if factor.ndim == 1:
        return covariance / (factor[:, None] * factor[None, :])
    half = jnp.linalg.solve(factor, covariance)
    whole = jnp.linalg.solve(factor, half.T)
    return (whole + whole.T) / 2


def reverse_kl_condition_number(num_draws: Scalar, dimension: Scalar) -> Float[Array, ""]:
    """The condition number left by `reverse_kl_preconditioner`, by the Marchenko-Pastur law.

    What is left is a Wishart matrix itself, not the inverse of one: the largest standard deviation
    is at its upper edge, and `mean mu^-2 = (1 - y)^-3`.

    Args:
        num_draws: M, more than N + 1; draws of noise, not of the target.
        dimension: N.

    Returns:
        `(1 + sqrt y) N^{1/4} (1 - y)^{-3/4}` with `y = N / (M - 1)` (the mean is fitted too),
        scalar; infinite for too few draws. Within 2 % of simulation for N >= 50 and M >= 2 N.

    Raises:
        ValueError: an argument is not positive.

    Source:
        Derived here, like METHOD.md section 10 for the sample covariance.
    """
    check_positive(num_draws=num_draws, dimension=dimension)
    draws, dimension = as_floats(num_draws, dimension)
    ratio = dimension / (draws - 1)
    regular = (ratio < 1) & (ratio > 0)
    ratio = jnp.where(regular, ratio, 0.5)
    left = (1 + jnp.sqrt(ratio)) * (dimension / (1 - ratio) ** 3) ** 0.25
    return jnp.where(regular, left, jnp.inf)
