"""Complete and Jacobi elliptic functions in pure JAX.

Everything is computed from the complementary parameter `p = 1 - m`. The quadrature of CIQ has
`m = 1 - lambda_min / lambda_max`, so at condition number 1e12 the parameter `m` keeps only four
digits of what matters, and `p` keeps all of them.

Both functions descend the arithmetic-geometric mean of `1` and `sqrt(p)`. Its number of steps is
fixed by the dtype (convergence is quadratic from the smallest normal number), so the loop works
under `jit`, `vmap` and both directions of differentiation.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pnkrylov._arguments import check_reals


def ellipk(m: Float[Array, "..."] | float) -> Float[Array, "..."]:
    """Complete elliptic integral of the first kind `K(m)`, with parameter `m = k^2`.

    Near `m = 1` use `ellipkm1`, which does not lose `1 - m` to rounding.

    Args:
        m: Parameter, `m <= 1`, real floating dtype, any shape.

    Returns:
        `K(m)`, same shape and dtype; `inf` at `m = 1` and `nan` for `m > 1`.

    Raises:
        TypeError: m is no real floating number or array.

    Source:
        Abramowitz and Stegun, 17.3.1 and 17.6.3.
    """
    m = _as_floating("m", m)
    return ellipkm1(1 - m)


def ellipkm1(p: Float[Array, "..."] | float) -> Float[Array, "..."]:
    """Complete elliptic integral of the first kind at `m = 1 - p`.

    Args:
        p: Complementary parameter `p = 1 - m >= 0`, real floating dtype, any shape.

    Returns:
        `K(1 - p) = pi / (2 agm(1, sqrt(p)))`, same shape and dtype; `inf` at `p = 0` and `nan`
        for `p < 0`.

    Raises:
        TypeError: p is no real floating number or array.

    Source:
        Abramowitz and Stegun, 17.6.3.
    """
    p = _as_floating("p", p)
    # The unused branch of a `where` must stay finite, or its gradient poisons the used one.
    inside = p > 0
    (means, _), _ = _arithmetic_geometric_means(jnp.where(inside, p, jnp.ones_like(p)))
    outside = jnp.where(p == 0, jnp.full_like(p, jnp.inf), jnp.full_like(p, jnp.nan))
    return jnp.where(inside, (np.pi / 2) / means[-1], outside)


def ellipj(
    u: Float[Array, "..."] | float, m: Float[Array, "..."] | float
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Jacobi elliptic functions `sn(u | m)`, `cn(u | m)`, `dn(u | m)`.

    Near `m = 1` use `ellipjm1`, which does not lose `1 - m` to rounding.

    Args:
        u: Argument, real floating dtype, any shape.
        m: Parameter, `m <= 1`, same shape and dtype as `u` (or a scalar).

    Returns:
        `(sn, cn, dn)`, each of the shape and dtype of `u`; `nan` for `m > 1`.

    Raises:
        TypeError: u or m is no real floating number or array, or their dtypes differ.
        ValueError: Their shapes differ, and neither is a scalar.

    Source:
        Bulirsch (1965), Numerische Mathematik 7, 78-90, procedure `sncndn`.
    """
    m = _as_floating("m", m)
    return ellipjm1(u, 1 - m)


def ellipjm1(
    u: Float[Array, "..."] | float, p: Float[Array, "..."] | float
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Jacobi elliptic functions at the parameter `m = 1 - p`.

    The relative error of `cn` close to its zeros is that of the argument: it is
    `u / |K - u|` roundings there, as for the cosine. `ellipj_at_fraction` avoids it.

    Args:
        u: Argument, real floating dtype, any shape.
        p: Complementary parameter `p = 1 - m >= 0`, same shape and dtype as `u` (or a scalar).

    Returns:
        `(sn, cn, dn)`, each of the shape and dtype of `u`; `nan` for `p < 0`.

    Raises:
        TypeError: u or p is no real floating number or array, or their dtypes differ.
        ValueError: Their shapes differ, and neither is a scalar.

    Source:
        Bulirsch (1965), Numerische Mathematik 7, 78-90, procedure `sncndn`.
    """
    u, p = _same_shape(u, p)
    inside = p > 0
    levels, lost = _arithmetic_geometric_means(jnp.where(inside, p, jnp.ones_like(p)))
    mean, lost_mean = levels[0][-1], lost[0][-1]
    # Below sqrt(eps) the Taylor series is exact to rounding, and the cotangent would overflow.
    tiny = jnp.abs(u) < np.sqrt(jnp.finfo(u.dtype).eps)
    argument = jnp.where(tiny, jnp.ones_like(u), u)
    angle = argument * mean
    lost_angle = argument * lost_mean + _product_error(argument, mean, angle)
    sine = jnp.sin(angle)
    # Multiples of the half period, where the sine may round to zero: any tiny sine will do.
    sine = jnp.where(sine == 0, jnp.finfo(u.dtype).eps ** 2, sine)
    sn, cn, dn = _jacobi(jnp.cos(angle) / sine, -lost_angle / sine**2, levels, lost)
    sn, cn = jnp.sign(sine) * sn, jnp.sign(sine) * cn
    m = 1 - p
    series = (u, 1 - u**2 / 2, 1 - m * u**2 / 2)
    sn, cn, dn = (jnp.where(tiny, s, f) for s, f in zip(series, (sn, cn, dn), strict=True))
    # At p = 0 the functions are hyperbolic and the period is infinite.
    sech = 1 / jnp.cosh(u)
    limits = (jnp.tanh(u), sech, sech)
    nan = jnp.full_like(u, jnp.nan)
    sn, cn, dn = (
        jnp.where(inside, general, jnp.where(p == 0, limit, nan))
        for general, limit in zip((sn, cn, dn), limits, strict=True)
    )
    return sn, cn, dn


def ellipj_at_fraction(
    fraction: np.ndarray, p: Float[Array, ""]
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """Jacobi elliptic functions at `u = fraction * K(1 - p)`, to a few roundings everywhere.

    The descending Landen transformation ends in the circular functions of `pi/2 * fraction`. With
    fractions known ahead of time these are exact, and every step back up adds and multiplies
    positive numbers only, so `cn` keeps its relative accuracy right up to its zero at `K`.

    Args:
        fraction: Concrete (n,) array of fractions of the quarter period, strictly inside (0, 1).
        p: Complementary parameter, scalar, positive.

    Returns:
        `(sn, cn, dn)`, each (n,) in the dtype of `p`.

    Raises:
        ValueError: If a fraction is not strictly between 0 and 1.
    """
    fraction = np.asarray(fraction, dtype=np.float64)
    if not np.all((fraction > 0) & (fraction < 1)):
        raise ValueError(
            f"fraction must lie strictly between 0 and 1, got {fraction}; "
            "use ellipjm1 for arguments outside the first quarter period."
        )
    p = _as_floating("p", p)
    exact = np.sin(np.pi / 2 * (1 - fraction)) / np.sin(np.pi / 2 * fraction)
    cotangent = exact.astype(p.dtype)
    rounding = (exact - cotangent.astype(np.float64)).astype(p.dtype)
    levels = _arithmetic_geometric_means(jnp.broadcast_to(p, fraction.shape))
    sn, cn, dn = _jacobi(jnp.asarray(cotangent), jnp.asarray(rounding), *levels)
    return sn, cn, dn


def _arithmetic_geometric_means(p: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Arithmetic means a_0 = 1, a_1, ... and geometric means b_0 = sqrt(p), b_1, ..., stacked.

    Also what rounding took from each, to first order: the Jacobi functions magnify it.
    """

    def descend(levels: tuple[Array, ...], _: None) -> tuple[Any, Any]:
        mean, root, lost_mean, lost_root = levels
        total = mean + root
        rest = total - mean
        lost_total = (mean - (total - rest)) + (root - rest) + lost_mean + lost_root
        product = mean * root
        lost_product = _product_error(mean, root, product) + root * lost_mean + mean * lost_root
        following, lost_following = _square_root(product, lost_product)
        return (total / 2, following, lost_total / 2, lost_following), levels

    # From b_0 = sqrt(smallest normal), log2(log2(1 / b_0)) + 5 steps reach rounding.
    num_steps = {2: 8, 4: 10, 8: 13}[p.dtype.itemsize]
    root, lost = _square_root(p, jnp.zeros_like(p))
    start = (jnp.ones_like(p), root, jnp.zeros_like(p), lost)
    _, (means, roots, lost_means, lost_roots) = jax.lax.scan(descend, start, length=num_steps + 1)
    return (means, roots), jax.lax.stop_gradient((lost_means, lost_roots))


def _square_root(x: Array, lost: Array) -> tuple[Array, Array]:
    """The square root of `x + lost`, and what rounding took from it."""
    root = jnp.sqrt(x)
    square = root * root
    excess = (square - x) + _product_error(root, root, square)
    return root, (lost - excess) / (2 * root)


def _jacobi(cotangent: Array, lost: Array, levels: Any, lost_levels: Any) -> tuple[Array, ...]:
    """sn (up to its sign), cn and dn from the circular cotangent; roundings are put back.

    The recurrence multiplies relative errors of its start and of the first levels by up to
    `2 K / pi` (12 at p = 1e-16).
    """
    start = levels[0][-1] * cotangent
    lost_start = levels[0][-1] * lost + lost_levels[0][-1] * cotangent
    lost_start = lost_start + _product_error(levels[0][-1], cotangent, start)
    tangents = jax.lax.stop_gradient((lost_start, lost_levels))
    values, corrections = jax.jvp(_ascend, (start, levels), tangents)
    return tuple(value + correction for value, correction in zip(values, corrections, strict=True))


def _ascend(start: Array, levels: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Bulirsch's recurrence from `means[-1] cot(angle)` back to sn (up to its sign), cn and dn."""

    def climb(carry: tuple[Array, ...], level: tuple[Array, Array]) -> tuple[Any, None]:
        a, c, dn = carry
        mean, root = level
        a, c = a * c, c * dn
        return (c / mean, c, (root + a) / (mean + a)), None

    carry = (start / levels[0][-1], start, jnp.ones_like(start))
    (_, c, dn), _ = jax.lax.scan(climb, carry, levels, reverse=True)
    sn = 1 / jnp.sqrt(c**2 + 1)
    return sn, c * sn, dn


def _product_error(a: Array, b: Array, product: Array) -> Array:
    """The rounding error of `product = a * b`, exactly (Dekker 1971)."""
    splitter = 2.0 ** ((jnp.finfo(a.dtype).nmant + 2) // 2) + 1

    def split(x):
        high = splitter * x - (splitter * x - x)
        return high, x - high

    (a_high, a_low), (b_high, b_low) = split(a), split(b)
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _as_floating(name: str, value: Array | float) -> Array:
    check_reals(**{name: value})
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"{name} must have a real floating dtype, got {value.dtype}; convert it first."
        )
    return value


def _same_shape(u: Array | float, p: Array | float) -> tuple[Array, Array]:
    u, p = _as_floating("u", u), _as_floating("p", p)
    if u.dtype != p.dtype:
        raise TypeError(f"u and the parameter must share a dtype, got {u.dtype} and {p.dtype}.")
    if u.shape != p.shape and () not in (u.shape, p.shape):
        raise ValueError(
            f"u and the parameter must share a shape or one must be a scalar, "
            f"got {u.shape} and {p.shape}."
        )
    shape = jnp.broadcast_shapes(u.shape, p.shape)
    return jnp.broadcast_to(u, shape), jnp.broadcast_to(p, shape)


__all__ = ["ellipj", "ellipj_at_fraction", "ellipjm1", "ellipk", "ellipkm1"]
