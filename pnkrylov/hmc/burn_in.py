"""How many draws to precondition with: what they leave, and how many pay for themselves."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pnkrylov.hmc._scalars import Scalar, as_floats, check_positive

# Mean and variance of the Tracy-Widom distribution (real case).
_TRACY_WIDOM_MEAN = -1.2065336
_TRACY_WIDOM_VARIANCE = 1.6077810

# Halvings of the search interval for log(S / N - 1): to 1e-8 of its length.
_BISECTIONS = 60


def preconditioned_condition_number(
    num_samples: Scalar, dimension: Scalar, *, finite_size: bool = True
) -> Float[Array, ""]:
    """The condition number left after preconditioning by the covariance of independent draws.

    The stiffness follows the Marchenko-Pastur law, `(N (1 + y))^{1/4}` with `y = N / S`. The
    largest standard deviation belongs to the smallest eigenvalue of a Wishart matrix. Its limit is
    the edge `(1 - sqrt y)^2` of the law; in finite dimensions it lies above, by Tracy-Widom.

    Args:
        num_samples: S, more than N. The effective sample size, where draws are dependent.
        dimension: N.
        finite_size: take the mean of the smallest eigenvalue instead of the edge: 1 % from
            simulation for `N >= 50, S / N >= 2`, where the edge is up to 7 % too large.

    Returns:
        `(N (1 + y))^{1/4} / (1 - sqrt y)`, with the finite-size factor, scalar; infinite for
        `S <= N`, where the sample covariance is singular or nearly so.

    Raises:
        TypeError: an argument is no real number.
        ValueError: an argument is not positive.

    Source:
        hmc_condition_number.md, sections 4 and 5.2; METHOD.md section 10. Finite size: Ma 2012,
        Bernoulli 18 (log transform, centring and scaling of the smallest eigenvalue).
    """
    check_positive(num_samples=num_samples, dimension=dimension)
    samples, dimension = as_floats(num_samples, dimension)
    regular = samples > dimension
    samples = jnp.where(regular, samples, 2 * dimension)
    stiffness = (dimension * (1 + dimension / samples)) ** 0.25
    edge = 1 / (1 - jnp.sqrt(dimension / samples))
    if finite_size:
        edge = jnp.sqrt(samples) * _mean_inverse_root(samples, dimension)
    return jnp.where(regular, edge * stiffness, jnp.inf)


def _mean_inverse_root(samples: Array, dimension: Array) -> Array:
    """`E lambda^{-1/2}` of the smallest eigenvalue of `X^T X`, X standard normal, `S x N`."""
    tall, wide = jnp.sqrt(samples - 0.5), jnp.sqrt(dimension - 0.5)
    centre = (tall - wide) ** 2
    spread = (1 / wide - 1 / tall) ** (1 / 3) / (tall - wide)
    # log lambda is centre' - spread times a Tracy-Widom variable; normal moments for the tail.
    return jnp.exp(
        -(jnp.log(centre) + spread**2 / 8) / 2
        + spread * _TRACY_WIDOM_MEAN / 2
        + spread**2 * _TRACY_WIDOM_VARIANCE / 8
    )


class BurnIn(eqx.Module):
    """An optimal burn-in: draw `num_samples`, precondition by their covariance, start again.

    Attributes:
        num_samples: S, draws of the burn-in; zero where preconditioning does not pay.
        condition_number: what they leave.
        speedup: time without preconditioning over time with it, at least 1.
        worthwhile: whether preconditioning pays at all.
    """

    num_samples: Float[Array, ""]
    condition_number: Float[Array, ""]
    speedup: Float[Array, ""]
    worthwhile: Bool[Array, ""]


def optimal_burn_in(
    kappa0: Scalar,
    dimension: Scalar,
    final_samples: Scalar,
    *,
    efficiency: Scalar = 1.0,
    finite_size: bool = True,
) -> BurnIn:
    """The number of draws to precondition with, if a draw costs in proportion to kappa.

    It minimises the time `S kappa_0 + S_f kappa(e S)`, at the S where
    `d kappa / dS = -kappa_0 / S_f`.

    Args:
        kappa0: the condition number before.
        dimension: N.
        final_samples: S_f, draws that are wanted after the burn-in.
        efficiency: e, effective sample size per draw of the burn-in: 1 for independent draws. The
            paper found the effective sample size a good substitute for draws of NUTS.
        finite_size: as in `preconditioned_condition_number`.

    Returns:
        A `BurnIn`; usable under `jit` and `vmap`.

    Raises:
        TypeError: an argument is no real number.
        ValueError: an argument is not positive.

    Source:
        hmc_condition_number.md, section 5.2; METHOD.md section 10.
    """
    check_positive(
        kappa0=kappa0, dimension=dimension, final_samples=final_samples, efficiency=efficiency
    )

    numbers = as_floats(kappa0, dimension, final_samples, efficiency)
    return _optimum(*numbers, finite_size)


@functools.partial(jax.jit, static_argnames="finite_size")
def _optimum(
    kappa0: Array, dimension: Array, final_samples: Array, efficiency: Array, finite_size: bool
) -> BurnIn:
    def left(samples: Array) -> Array:
        effective = efficiency * samples
        return preconditioned_condition_number(effective, dimension, finite_size=finite_size)

    def slope(log_excess: Array) -> Array:
        samples = dimension / efficiency * (1 + jnp.exp(log_excess))
        return jax.grad(left)(samples) * final_samples + kappa0

    # kappa is convex in S: bisection on its slope, from S / N = 1 + 1e-3 to a million times N.
    low, high = as_floats(math.log(1e-3), math.log(1e6), kappa0)[:2]

    def halve(_: Array, interval: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = interval
        middle = (low + high) / 2
        falling = slope(middle) < 0
        return jnp.where(falling, middle, low), jnp.where(falling, high, middle)

    low, high = jax.lax.fori_loop(0, _BISECTIONS, halve, (low, high))
    samples = dimension / efficiency * (1 + jnp.exp((low + high) / 2))
    remaining = left(samples)
    speedup = final_samples * kappa0 / (samples * kappa0 + final_samples * remaining)
    worthwhile = speedup > 1
    return BurnIn(
        num_samples=jnp.where(worthwhile, samples, 0),
        condition_number=jnp.where(worthwhile, remaining, kappa0),
        speedup=jnp.where(worthwhile, speedup, 1),
        worthwhile=worthwhile,
    )
