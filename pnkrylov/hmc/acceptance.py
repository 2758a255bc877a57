"""Step size <-> acceptance probability <-> condition number, for leapfrog on a Gaussian target.

A trajectory's energy error is a sum over the principal directions. With `h` the step size and
`nu^4 = sum_n sigma_n^-4` it is close to normal with mean `mu = h^4 nu^4 / 64` and variance `2 mu`,
whatever the (random) integration time, and such a normal is accepted with probability
`2 Phi(-sqrt(mu / 2)) = 2 Phi(-h^2 nu^2 / (8 sqrt 2))`.
"""

import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr, ndtri
from jaxtyping import Array, Float

from pnkrylov.hmc._scalars import Scalar, as_floats, check_positive, check_probability
from pnkrylov.krylov import is_concrete

VALID_ACCEPTANCE = (0.8, 0.97)
"""Where simulation agrees with the formula to 0.02 (docs/hmc.md)."""

# Below this the formula is optimistic by more than a twentieth, and its inverse says little.
_REFUSED_BELOW = 0.5
_EIGHT_ROOT_TWO = 8 * math.sqrt(2)


class InferredConditionNumber(eqx.Module):
    """A condition number inferred from a run of the sampler.

    Attributes:
        value: the condition number.
        standard_error: what the errors of the acceptance and of `sigma_max` make of it, to first
            order; NaN where none was given.
    """

    value: Float[Array, ""]
    standard_error: Float[Array, ""]


def expected_acceptance(
    step_size: Scalar, condition_number: Scalar, sigma_max: Scalar = 1.0
) -> Float[Array, ""]:
    """The acceptance probability of leapfrog with a random integration time, at stationarity.

    Args:
        step_size: h, positive.
        condition_number: kappa (see `condition_number`).
        sigma_max: the largest standard deviation sigma_1, in the unit of h.

    Returns:
        `2 Phi(-h^2 nu^2 / (8 sqrt 2))` with `nu = kappa / sigma_1`, scalar. Good to 0.02 between
        0.8 and 0.97, in 128 dimensions or more, if about ten directions or more make up nu
        (`(sum sigma^-4)^2 / sum sigma^-8`); too large below.

    Raises:
        TypeError: an argument is no real number.
        ValueError: an argument is not positive.

    Source:
        hmc_condition_number.md, section 3; METHOD.md section 10.
    """
    check_positive(step_size=step_size, condition_number=condition_number, sigma_max=sigma_max)
    h, kappa, sigma = as_floats(step_size, condition_number, sigma_max)
    return 2 * ndtr(-((h * kappa / sigma) ** 2) / _EIGHT_ROOT_TWO)


def step_size_for(
    acceptance: Scalar, condition_number: Scalar, sigma_max: Scalar = 1.0
) -> Float[Array, ""]:
    """The step size at which `expected_acceptance` is `acceptance`.

    Args:
        acceptance: strictly between 0 and 1; 0.8 to 0.97 is where the formula holds.
        condition_number: kappa.
        sigma_max: the largest standard deviation; the step size comes in its unit.

    Raises:
        TypeError: an argument is no real number.
        ValueError: `acceptance` is not in (0, 1), or another argument is not positive.

    Source:
        METHOD.md section 10.
    """
    check_probability(acceptance=acceptance)
    check_positive(condition_number=condition_number, sigma_max=sigma_max)
    acceptance, kappa, sigma = as_floats(acceptance, condition_number, sigma_max)
    return _stiffness(acceptance) * sigma / kappa


def leapfrog_steps(
    acceptance: Scalar, condition_number: Scalar, integration_time: Scalar = math.pi / 2
) -> Float[Array, ""]:
    """Leapfrog steps (gradients) of one trajectory: what the condition number predicts.

    Args:
        acceptance: the acceptance probability that the step size is chosen for.
        condition_number: kappa.
        integration_time: length of the trajectory in units of `sigma_max`; a quarter period of
            the slowest direction by default.

    Returns:
        `integration_time sigma_1 / h`, not rounded: proportional to kappa.

    Raises:
        TypeError: an argument is no real number.
        ValueError: `acceptance` is not in (0, 1), or another argument is not positive.

    Source:
        hmc_condition_number.md, sections 1 and 3.
    """
    check_probability(acceptance=acceptance)
    check_positive(condition_number=condition_number, integration_time=integration_time)
    acceptance, kappa, time = as_floats(acceptance, condition_number, integration_time)
    return time / step_size_for(acceptance, kappa)


def condition_number_from_acceptance(
    step_size: Scalar,
    acceptance: Scalar,
    sigma_max: Scalar,
    *,
    acceptance_standard_error: Scalar | None = None,
    sigma_max_standard_error: Scalar | None = None,
) -> InferredConditionNumber:
    """Infers the condition number from a run with a fixed step size (HMC, not NUTS).

    Far better than the condition number of the sample covariance, which sees the smallest standard
    deviations last. `sigma_max` may come from the sample covariance.

    Args:
        step_size: h, positive.
        acceptance: the mean acceptance *probability* (less noisy than the accepted share).
        sigma_max: the largest standard deviation, or its estimate.
        acceptance_standard_error: standard error of `acceptance`, autocorrelation included.
        sigma_max_standard_error: standard error of `sigma_max`.

    Returns:
        Value and standard error. The formula's own error, a few per cent of kappa, comes on top.

    Raises:
        TypeError: an argument is no real number.
        ValueError: an argument is not positive; `acceptance` is not in (0, 1), or below 0.5, where
            the formula does not hold.

    Warns:
        UserWarning: `acceptance` is outside 0.8 to 0.97 (only seen outside `jit`).

    Source:
        hmc_condition_number.md, section 3.1; METHOD.md section 10.
    """
    check_probability(acceptance=acceptance)
    check_positive(step_size=step_size, sigma_max=sigma_max)
    _check_validity(acceptance)
    missing = acceptance_standard_error is None and sigma_max_standard_error is None
    errors = [
        e if e is not None else 0.0 for e in (acceptance_standard_error, sigma_max_standard_error)
    ]
    h, a, sigma, a_error, sigma_error = as_floats(step_size, acceptance, sigma_max, *errors)
    value = sigma * _stiffness(a) / h
    slope = jax.grad(lambda a: jnp.log(_stiffness(a)))(a)
    relative = jnp.hypot(sigma_error / sigma, slope * a_error)
    return InferredConditionNumber(value, jnp.nan * value if missing else value * relative)


def _stiffness(acceptance: Float[Array, ""]) -> Float[Array, ""]:
    """`h nu` at this acceptance."""
    return jnp.sqrt(-_EIGHT_ROOT_TWO * ndtri(acceptance / 2))


def _check_validity(acceptance: Scalar) -> None:
    if not is_concrete(acceptance):
        return
    value = float(acceptance)
    low, high = VALID_ACCEPTANCE
    if value < _REFUSED_BELOW:
        raise ValueError(
            f"acceptance={value:.3g} is below {_REFUSED_BELOW}, where the formula does not hold: "
            f"reduce step_size until the acceptance is between {low} and {high}."
        )
    if not low <= value <= high:
        consequence = (
            "the formula is optimistic there, and the condition number comes out too large"
            if value < low
            else "the acceptance hardly depends on the condition number there"
        )
        warnings.warn(
            f"acceptance={value:.4g} is outside {low} to {high}: {consequence}. "
            f"{'Reduce' if value < low else 'Increase'} step_size.",
            UserWarning,
            stacklevel=3,
        )
