"""Preconditioners that variational inference finds on a Gaussian, and what each of them leaves.

A preconditioner is a factor F: the sampler runs on `z = F^-1 (x - mean)`, whose covariance is
`F^-1 C F^-T`. The Kullback-Leibler divergence is not the condition number: in the eigenvalues
`lambda^2` of that covariance the reverse one is `sum (lambda^-2 + log lambda^2) / 2` up to a
constant, the forward one `sum (lambda^2 - log lambda^2) / 2`, and kappa is neither.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pnkrylov._arguments import check_array, check_square
from pnkrylov.errors import NotPositiveDefiniteError
from pnkrylov.hmc._scalars import Scalar, as_floats, check_positive
from pnkrylov.krylov import is_concrete
from pnkrylov.preconditioners._checks import check_finite

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
        TypeError, ValueError: `covariance` is no square real floating array, or `divergence` is
            unknown.
        NotFiniteError, NotPositiveDefiniteError: by the entries or the smallest eigenvalue of the
            covariance (outside `jit`; inside, the scales are NaN).

    Source:
        hmc_condition_number.md, section 5.3.
    """
    _check_covariance(covariance)
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
        TypeError: an array is not of a real floating dtype.
        ValueError: shapes do not agree, or there are too few draws: the objective has no minimum.
        NotFiniteError, NotPositiveDefiniteError: by the covariance, or by draws that do not span
            all dimensions (outside `jit`; inside, F is NaN).

    Source:
        hmc_condition_number.md, section 5.3 (the objective); the closed form is ours.
    """
    _check_covariance(covariance)
    check_array(noise, "noise", "M", "N")
    draws, dimension = noise.shape
    if dimension != covariance.shape[0]:
        raise ValueError(
            f"noise has {dimension} dimensions, but covariance has {covariance.shape[0]}."
        )
    if draws < dimension + 1:
        raise ValueError(
            f"noise has {draws} draws in {dimension} dimensions: the sampled divergence is "
            f"unbounded below. Pass at least {dimension + 1}."
        )
    centred = noise - jnp.mean(noise, axis=0)[None, :]
    sample = jnp.matmul(centred.T, centred, precision=_HIGHEST) / draws
    _check_definite(sample, "The sample covariance of noise")
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

    Returns:
        `(N, N)`, symmetric.

    Raises:
        TypeError, ValueError: an array is not of a real floating dtype, or shapes do not agree.
        NotFiniteError: `F^-1 C F^-T` is not finite: F is singular, or an entry is NaN (outside
            `jit`).

    Source:
        hmc_condition_number.md, section 5.
    """
    check_square(covariance, "covariance", "N")
    if getattr(factor, "ndim", 2) == 1:
        check_array(factor, "factor", "N")
    else:
        check_square(factor, "factor", "N")
    if factor.shape[0] != covariance.shape[0]:
        raise ValueError(
            f"factor has {factor.shape[0]} rows, but covariance has {covariance.shape[0]}."
        )
    if factor.ndim == 1:
        factor = jnp.asarray(factor)
        left = jnp.asarray(covariance) / (factor[:, None] * factor[None, :])
    else:
        half = jnp.linalg.solve(factor, covariance)
        whole = jnp.linalg.solve(factor, half.T)
        left = (whole + whole.T) / 2
    if is_concrete(left):
        check_finite(left, "F^-1 C F^-T of covariance and factor (is factor singular?)")
    return left


def _check_covariance(covariance: Array) -> None:
    check_square(covariance, "covariance", "N")
    _check_definite(covariance, "covariance")


def _check_definite(matrix: Array, name: str) -> None:
    """Refuses a concrete matrix that is not positive definite beyond rounding."""
    if not is_concrete(matrix):
        return
    entries = np.asarray(check_finite(matrix, name))
    values = np.linalg.eigvalsh(entries)
    if values[0] <= len(entries) * float(jnp.finfo(matrix.dtype).eps) * abs(values[-1]):
        raise NotPositiveDefiniteError(
            f"{name} must be positive definite, but has the eigenvalue {values[0]:.6g} next to "
            f"{values[-1]:.6g}. Add a multiple of the identity, or use more draws."
        )


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
        TypeError: an argument is no real number.
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
