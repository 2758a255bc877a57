"""Covariance functions of two points: the standard ones, their sums and products.

A *point* is one row of the inputs: a scalar where the inputs have the shape `(n,)`, a vector `(p,)`
where they have the shape `(n, p)`. Kernels are Equinox modules whose hyperparameters are leaves, so
`jax.grad` with respect to a kernel gives a kernel of derivatives.
"""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pnkrylov._arguments import check_reals
from pnkrylov.krylov import is_concrete

# Up to here differences cost no more than a matrix product, and nothing in them cancels. One core,
# float32, tiles of 256 points, a product with RBF: p = 8 0.9 (differences) and 0.8 ns (matrix
# product) an entry; p = 40 about 3.6 and 1.3 ns.
_DIFFERENCES_UP_TO = 16


class Kernel(eqx.Module):
    """A covariance function `k(x, y)`, evaluated on whole sets of points at once."""

    @abc.abstractmethod
    def matrix(self, X1: Float[Array, " s *p"], X2: Float[Array, " n *p"]) -> Float[Array, "s n"]:
        """The kernel matrix between two sets of points, shape `(s, n)`, in their dtype."""

    @abc.abstractmethod
    def diagonal(self, X: Float[Array, " n *p"]) -> Float[Array, " n"]:
        """The variances `k(x, x)`, shape `(n,)`."""

    def __call__(self, x: Float[Array, "*p"], y: Float[Array, "*p"]) -> Float[Array, ""]:
        """The covariance of two points, for use inside other functions."""
        return self.matrix(x[None], y[None])[0, 0]

    def __add__(self, other: "Kernel") -> "Sum":
        return Sum(self, other) if isinstance(other, Kernel) else NotImplemented

    def __mul__(self, other: "Kernel") -> "Product":
        return Product(self, other) if isinstance(other, Kernel) else NotImplemented


class Sum(Kernel):
    """`k1 + k2`, written with a plus sign."""

    first: Kernel
    second: Kernel

    def matrix(self, X1: Float[Array, " s *p"], X2: Float[Array, " n *p"]) -> Float[Array, "s n"]:
        """The sum of both matrices."""
        return self.first.matrix(X1, X2) + self.second.matrix(X1, X2)

    def diagonal(self, X: Float[Array, " n *p"]) -> Float[Array, " n"]:
        """The sum of both variances."""
        return self.first.diagonal(X) + self.second.diagonal(X)


class Product(Kernel):
    """`k1 * k2`, entry by entry."""

    first: Kernel
    second: Kernel

    def matrix(self, X1: Float[Array, " s *p"], X2: Float[Array, " n *p"]) -> Float[Array, "s n"]:
        """The entrywise product of both matrices."""
        return self.first.matrix(X1, X2) * self.second.matrix(X1, X2)

    def diagonal(self, X: Float[Array, " n *p"]) -> Float[Array, " n"]:
        """The product of both variances."""
        return self.first.diagonal(X) * self.second.diagonal(X)


def _positive(name: str) -> Callable[[Any], Float[Array, "..."]]:
    """Converts a hyperparameter, refusing what is not positive (unless it is being traced)."""

    def convert(value: Any) -> Float[Array, "..."]:
        check_reals(**{name: value})
        value = jnp.asarray(value)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            value = value.astype(jnp.result_type(float))
        if is_concrete(value) and not np.all((np.asarray(value) > 0) & np.isfinite(value)):
            raise ValueError(f"{name}={np.asarray(value)} must be positive and finite.")
        return value

    return convert


def _hyperparameter(name: str, default: Any = 1.0) -> Any:
    convert = _positive(name)
    return eqx.field(default_factory=lambda: convert(default), converter=convert)


class StationaryKernel(Kernel):
    """`variance * profile(r^2)`, with the distance `r = ||(x - y) / lengthscale||`.

    Hyperparameters are cast to the dtype of the points.
    """

    lengthscale: eqx.AbstractVar[Float[Array, "..."]]
    variance: eqx.AbstractVar[Float[Array, ""]]

    @abc.abstractmethod
    def profile(self, squares: Float[Array, "s n"]) -> Float[Array, "s n"]:
        """The correlation at squared, scaled distances."""

    def matrix(self, X1: Float[Array, " s *p"], X2: Float[Array, " n *p"]) -> Float[Array, "s n"]:
        """The kernel matrix.

        Raises:
            ValueError: `lengthscale` is neither a number nor one number per column of the points.
        """
        scale = self.lengthscale.astype(X1.dtype)
        if scale.shape not in ((), X1.shape[1:]):
            raise ValueError(
                f"lengthscale has shape {scale.shape}, but the points have shape {X1.shape[1:]}: "
                "pass a single number, or one number per column."
            )
        correlations = self.profile(squared_distances(X1, X2, scale))
        return self.variance.astype(X1.dtype) * correlations

    def diagonal(self, X: Float[Array, " n *p"]) -> Float[Array, " n"]:
        """The variance, n times."""
        return jnp.broadcast_to(self.variance.astype(X.dtype), X.shape[:1])


def squared_distances(
    X1: Float[Array, " s *p"], X2: Float[Array, " n *p"], lengthscale: Float[Array, "..."]
) -> Float[Array, "s n"]:
    """Squared distances `||(x - y) / lengthscale||^2` between two sets of points.

    Up to 16 coordinates they are sums of squared differences, accurate to a few roundings of
    themselves. Beyond, they come from one matrix product, about the mean of both sets, and are
    accurate to rounding of `||x / lengthscale||^2 + ||y / lengthscale||^2`; what is smaller than
    that is zero, so that equal points have distance zero.

    Args:
        X1: Points, shape `(s,)` or `(s, p)`.
        X2: Points, shape `(n,)` or `(n, p)`, same dtype.
        lengthscale: Shape `()` or `(p,)`, same dtype.

    Returns:
        The squared distances, shape `(s, n)`, never negative.
    """
    # One row per coordinate: the inner loops run along contiguous memory.
    first, second = (X[None, :] if X.ndim == 1 else X.T for X in (X1, X2))
    if len(first) <= _DIFFERENCES_UP_TO:
        # Scaled after the difference, which is exact where points are near each other.
        weights = 1 / lengthscale**2
        if weights.ndim == 1:
            return _sum_of_squares(first, second, weights)
        # A common scale stays outside: its derivative then costs no second look at the points.
        return weights * _sum_of_squares(first, second, jnp.ones_like(first[:, 0]))
    scale = jnp.broadcast_to(lengthscale, first.shape[:1])
    middle = (jnp.mean(first, axis=1) + jnp.mean(second, axis=1)) / 2
    first, second = ((X - middle[:, None]) / scale[:, None] for X in (first, second))
    inner = jnp.matmul(first.T, second, precision=jax.lax.Precision.HIGHEST)
    norms = jnp.sum(first**2, axis=0)[:, None] + jnp.sum(second**2, axis=0)[None, :]
    squares = norms - 2 * inner
    # p products of rounding errors add up like a random walk.
    rounding = 2 * len(first) ** 0.5 * float(jnp.finfo(X1.dtype).eps)
    return jnp.where(squares > rounding * norms, squares, 0)


@jax.jit
def _sum_of_squares(
    first: Float[Array, "p s"], second: Float[Array, "p n"], weights: Float[Array, " p"]
) -> Float[Array, "s n"]:
    """Weighted sums of squared differences, coordinate by coordinate."""

    # Derivatives take the differences anew instead of keeping them for every coordinate.
    @jax.checkpoint
    def square(x: Array, y: Array, weight: Array) -> Array:
        return weight * (x[:, None] - y[None, :]) ** 2

    def add_square(total: Array, coordinate: tuple[Array, ...]) -> tuple[Array, None]:
        return total + square(*coordinate), None

    start = jnp.zeros((first.shape[1], second.shape[1]), first.dtype)
    return jax.lax.scan(add_square, start, (first, second, weights))[0]


def _distances(squares: Float[Array, "s n"]) -> Float[Array, "s n"]:
    """Square roots, whose derivative where points coincide is zero instead of infinite."""
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)


class RBF(StationaryKernel):
    """`variance * exp(-r^2 / 2)`, the squared exponential.

    Attributes:
        lengthscale: One number, or `(p,)` numbers, one per column of the inputs.
        variance: One number.

    Raises:
        TypeError, ValueError: A hyperparameter is no real number, or not positive and finite.

    Source:
        Rasmussen and Williams (2006), equation 4.9.
    """

    lengthscale: Float[Array, "..."] = _hyperparameter("lengthscale")
    variance: Float[Array, ""] = _hyperparameter("variance")

    def profile(self, squares: Float[Array, "s n"]) -> Float[Array, "s n"]:
        """`exp(-r^2 / 2)`."""
        return jnp.exp(-squares / 2)


class Matern12(StationaryKernel):
    """`variance * exp(-r)`: continuous, nowhere differentiable functions.

    Attributes:
        lengthscale: One number, or `(p,)` numbers, one per column of the inputs.
        variance: One number.

    Raises:
        TypeError, ValueError: A hyperparameter is no real number, or not positive and finite.

    Source:
        Rasmussen and Williams (2006), equation 4.18.
    """

    lengthscale: Float[Array, "..."] = _hyperparameter("lengthscale")
    variance: Float[Array, ""] = _hyperparameter("variance")

    def profile(self, squares: Float[Array, "s n"]) -> Float[Array, "s n"]:
        """`exp(-r)`."""
        return jnp.exp(-_distances(squares))


class Matern32(StationaryKernel):
    """`variance * (1 + a) exp(-a)` with `a = sqrt(3) r`: functions differentiable once.

    Attributes:
        lengthscale: One number, or `(p,)` numbers, one per column of the inputs.
        variance: One number.

    Raises:
        TypeError, ValueError: A hyperparameter is no real number, or not positive and finite.

    Source:
        Rasmussen and Williams (2006), equation 4.17.
    """

    lengthscale: Float[Array, "..."] = _hyperparameter("lengthscale")
    variance: Float[Array, ""] = _hyperparameter("variance")

    def profile(self, squares: Float[Array, "s n"]) -> Float[Array, "s n"]:
        """`(1 + a) exp(-a)`."""
        scaled = 3**0.5 * _distances(squares)
        return (1 + scaled) * jnp.exp(-scaled)


class Matern52(StationaryKernel):
    """`variance * (1 + a + a^2 / 3) exp(-a)`, `a = sqrt(5) r`: functions differentiable twice.

    Attributes:
        lengthscale: One number, or `(p,)` numbers, one per column of the inputs.
        variance: One number.

    Raises:
        TypeError, ValueError: A hyperparameter is no real number, or not positive and finite.

    Source:
        Rasmussen and Williams (2006), equation 4.17.
    """

    lengthscale: Float[Array, "..."] = _hyperparameter("lengthscale")
    variance: Float[Array, ""] = _hyperparameter("variance")

    def profile(self, squares: Float[Array, "s n"]) -> Float[Array, "s n"]:
        """`(1 + a + a^2 / 3) exp(-a)`."""
        scaled = 5**0.5 * _distances(squares)
        return (1 + scaled + scaled**2 / 3) * jnp.exp(-scaled)


class RationalQuadratic(StationaryKernel):
    """`variance * (1 + r^2 / (2 mixture))^-mixture`: RBF kernels of many lengthscales, mixed.

    Attributes:
        lengthscale: One number, or `(p,)` numbers, one per column of the inputs.
        variance: One number.
        mixture: One number, alpha in the source; at infinity the kernel is RBF.

    Raises:
        TypeError, ValueError: A hyperparameter is no real number, or not positive and finite.

    Source:
        Rasmussen and Williams (2006), equation 4.19.
    """

    lengthscale: Float[Array, "..."] = _hyperparameter("lengthscale")
    variance: Float[Array, ""] = _hyperparameter("variance")
    mixture: Float[Array, ""] = _hyperparameter("mixture")

    def profile(self, squares: Float[Array, "s n"]) -> Float[Array, "s n"]:
        """`(1 + r^2 / (2 mixture))^-mixture`."""
        mixture = self.mixture.astype(squares.dtype)
        return jnp.exp(-mixture * jnp.log1p(squares / (2 * mixture)))
