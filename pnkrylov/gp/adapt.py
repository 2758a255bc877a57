"""Anybody's covariance function -> a kernel that is evaluated on whole sets of points."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pnkrylov._closures import close
from pnkrylov.gp.kernels import Kernel


class PointKernel(Kernel):
    """A function of two points, mapped over all pairs."""

    function: Callable[[Array, Array], Array]

    def matrix(self, X1: Float[Array, " s *p"], X2: Float[Array, " n *p"]) -> Float[Array, "s n"]:
        """The function at all pairs."""
        along_second = jax.vmap(self.function, in_axes=(None, 0))
        return jax.vmap(along_second, in_axes=(0, None))(X1, X2)

    def diagonal(self, X: Float[Array, " n *p"]) -> Float[Array, " n"]:
        """The function at all points, paired with themselves."""
        return jax.vmap(self.function)(X, X)


class _OnVectors(eqx.Module):
    """A function of points of shape `(p,)`, on scalar points: gpjax knows no others."""

    function: Callable[..., Any]

    def __call__(self, x: Float[Array, ""], y: Float[Array, ""]) -> Float[Array, ""]:
        return self.function(x[None], y[None])


class _OnPairs(eqx.Module):
    """A traced function of two points, its arrays as leaves (see `close`)."""

    closed: Callable[[Array], Array]

    def __call__(self, x: Float[Array, "*p"], y: Float[Array, "*p"]) -> Float[Array, ""]:
        return self.closed(jnp.stack([x, y]).reshape(-1))


def as_kernel(kernel: Any, point: jax.ShapeDtypeStruct) -> Kernel:
    """Adapts any description of a covariance function.

    Args:
        kernel: One of
            - a kernel of `pnkrylov.gp.kernels`, returned as it is;
            - a tinygp kernel (anything with `evaluate` and `evaluate_diag`);
            - a gpjax kernel (anything with `cross_covariance`);
            - a function `k(x, y)` of two points, in pure JAX. A plain function is traced once, and
              every array that it closes over becomes a leaf; the leaves of a callable pytree
              (`equinox.Module`, `jax.tree_util.Partial`) stay where they are.
        point: Shape `()` or `(p,)` and dtype of one point.

    Returns:
        The kernel.

    Raises:
        TypeError: `kernel` is not callable, or its values are not of the dtype of the points.
        ValueError: Its values are not scalars, or its lengthscales do not fit the points.
    """
    function: Callable[..., Any]
    if isinstance(kernel, Kernel):
        _check_value(jax.eval_shape(kernel, point, point), point)
        return kernel
    if hasattr(kernel, "evaluate") and hasattr(kernel, "evaluate_diag"):
        function = kernel.evaluate
    elif callable(kernel):
        gpjax_scalars = hasattr(kernel, "cross_covariance") and point.shape == ()
        function = _OnVectors(kernel) if gpjax_scalars else kernel
    else:
        raise TypeError(
            f"kernel is of type {type(kernel).__name__}. Pass a function k(x, y) of two points, or "
            "a kernel of pnkrylov.gp, tinygp or gpjax."
        )
    _check_value(jax.eval_shape(function, point, point), point)
    if jax.tree_util.all_leaves([function]):  # a plain function, not a pytree
        function = _close(function, point)
    return PointKernel(function)


def _close(function: Callable[[Array, Array], Array], point: jax.ShapeDtypeStruct) -> _OnPairs:
    """Turns the arrays that a plain function closes over into leaves."""

    def of_pair(flat: Float[Array, " twice_p"]) -> Float[Array, ""]:
        x, y = flat.reshape(2, *point.shape)
        return function(x, y)

    return _OnPairs(
        close(of_pair, jax.ShapeDtypeStruct((2 * math.prod(point.shape),), point.dtype))
    )


def _check_value(value: Any, point: jax.ShapeDtypeStruct) -> None:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape != ():
        raise ValueError(
            f"kernel returns {value} for two points of shape {point.shape}; it must return a "
            "scalar. Sum over the coordinates."
        )
    if dtype != point.dtype:
        raise TypeError(
            f"kernel returns {dtype} for points of dtype {point.dtype}; nothing is cast silently. "
            "Cast the points or the kernel's hyperparameters, for example with "
            f"jax.tree.map(lambda leaf: leaf.astype({point.dtype}), kernel)."
        )
