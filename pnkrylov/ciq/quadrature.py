"""Quadrature rule for the inverse square root: `x^{-1/2} ~ sum_q w_q / (t_q + x)`."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pnkrylov._arguments import check_fractions, check_positive_counts, check_reals
from pnkrylov.ciq.elliptic import ellipj_at_fraction, ellipkm1
from pnkrylov.krylov import is_concrete


class Quadrature(eqx.Module):
    """Shifts and weights of a rational approximation of the inverse square root.

    On `[lower, upper]` of the spectrum, `sum_q weights_q / (shifts_q + x)` agrees with `x^{-1/2}`
    up to a relative error that shrinks geometrically with the number of points.

    Attributes:
        shifts: `(q,)`, positive, ascending.
        weights: `(q,)`, positive.
    """

    shifts: Float[Array, " q"]
    weights: Float[Array, " q"]

    @property
    def num_points(self) -> int:
        """Number of shifted systems Q."""
        return self.shifts.shape[0]

    def relative_error(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
        """Relative error of the rule as an approximation of `x^{-1/2}`, at each entry of `x`."""
        approximation = jnp.sum(self.weights[None, :] / (self.shifts[None, :] + x[:, None]), axis=1)
        return approximation * jnp.sqrt(x) - 1


def quadrature(
    lmin: float | Float[Array, ""],
    lmax: float | Float[Array, ""],
    rtol: float = 1e-4,
    *,
    num_points: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Quadrature:
    """Quadrature points and weights for `K^{-1/2}` with the spectrum of `K` in `[lmin, lmax]`.

    The contour integral for the inverse square root, mapped by Jacobi elliptic functions so that
    the trapezoidal rule converges like `exp(-2 pi^2 Q / (log(lmax / lmin) + 3))`.

    Args:
        lmin: Lower bound of the spectrum, positive.
        lmax: Upper bound of the spectrum, at least `lmin`.
        rtol: Relative error that the rule has to meet on the whole interval.
        num_points: Number of points Q; chosen from `rtol` when None. Inside `jit` the bounds have
            no concrete values: without `num_points` the rule is then sized for the largest
            condition number that the dtype can represent, `1 / eps`.
        dtype: Dtype of the result when the bounds are Python numbers.

    Returns:
        A `Quadrature` with `Q` shifts (ascending) and weights, all positive.

    Raises:
        TypeError: If an argument is no real number, or `num_points` no int.
        ValueError: If concrete bounds are not `0 < lmin <= lmax`, `rtol` is not in (0, 1), or
            `num_points` is not positive.

    Source:
        Hale, Higham and Trefethen (2008), SIAM J. Numer. Anal. 46, section 4; Pleiss et al. (2020),
        appendix B. The parameter of the elliptic functions is `1 - lmin / lmax`.
    """
    check_fractions(rtol=rtol)
    lmin, lmax = _as_bounds(lmin, lmax, dtype)
    if num_points is None:
        num_points = num_quadrature_points(_condition(lmin, lmax), rtol)
    check_positive_counts(num_points=num_points)
    # Dividing the roots keeps the ratio representable where lmin / lmax would underflow.
    complement = (jnp.sqrt(lmin) / jnp.sqrt(lmax)) ** 2
    fractions = (np.arange(num_points) + 0.5) / num_points
    sn, cn, dn = ellipj_at_fraction(fractions, complement)
    scale = 2 * jnp.sqrt(lmin) / (np.pi * num_points) * ellipkm1(complement)
    return Quadrature(shifts=lmin * (sn / cn) ** 2, weights=scale * dn / cn**2)


def num_quadrature_points(condition: float, rtol: float) -> int:
    """Number of points that meets `rtol` at a condition number (a Python number).

    The geometric rate alone gives the tolerance within a factor of ten (checked for condition
    numbers from 1 to 1e16), so the rule is asked for a tenth of it.

    Raises:
        ValueError: If `condition < 1` or `rtol` is not in (0, 1).

    Source:
        METHOD.md, section 7.
    """
    if not condition >= 1:
        raise ValueError(f"condition must be at least 1, got {condition}.")
    check_fractions(rtol=rtol)
    rate = 2 * math.pi**2 / (math.log(condition) + 3)
    return math.ceil(math.log(10 / rtol) / rate)


def _as_bounds(lmin, lmax, dtype) -> tuple[Array, Array]:
    check_reals(lmin=lmin, lmax=lmax)
    if jnp.ndim(lmin) or jnp.ndim(lmax):
        raise ValueError(
            f"lmin and lmax must be single numbers, got the shapes {jnp.shape(lmin)} and "
            f"{jnp.shape(lmax)}."
        )
    lmin, lmax = jnp.asarray(lmin, dtype), jnp.asarray(lmax, dtype)
    if not jnp.issubdtype(lmin.dtype, jnp.floating):
        lmin, lmax = lmin.astype(float), lmax.astype(float)
    if not is_concrete((lmin, lmax)):
        return lmin, lmax
    if not 0 < lmin <= lmax < np.inf:
        raise ValueError(
            f"quadrature needs 0 < lmin <= lmax < inf, got lmin={float(lmin)} and "
            f"lmax={float(lmax)}; take them from spectral_bounds."
        )
    return lmin, lmax


def _condition(lmin: Array, lmax: Array) -> float:
    if not is_concrete((lmin, lmax)):
        return 1 / float(jnp.finfo(lmin.dtype).eps)
    return float(lmax) / float(lmin)
