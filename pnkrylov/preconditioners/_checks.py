"""Refusals that depend on run-time values: named errors outside `jit`, the same words inside."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Real

from pnkrylov._arguments import check_counts
from pnkrylov.errors import NotFiniteError, NotPositiveDefiniteError
from pnkrylov.krylov import is_concrete


def as_scalar(value: Any, name: str, dtype: Any) -> Float[Array, ""]:
    """A real number as an array of the working dtype.

    Raises:
        TypeError: It is not a real number.
        ValueError: It is an array with axes.
    """
    numeric = isinstance(value, (int, float, np.number)) or hasattr(value, "dtype")
    array = jnp.asarray(value if numeric else jnp.nan)
    if not numeric or array.dtype == bool or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name}={value!r} must be a real number.")
    if array.ndim != 0:
        raise ValueError(f"{name} has shape {array.shape}; it must be a single number.")
    return array.astype(dtype)


def as_damping(value: Any, dtype: Any) -> Float[Array, ""]:
    """A damping as an array: a finite number that is not negative.

    Raises:
        TypeError, ValueError: As `as_scalar`.
        NotFiniteError, NotPositiveDefiniteError: It is not finite, or negative.
    """
    damping = check_finite(as_scalar(value, "damping", dtype), "damping")
    return refuse(damping, damping < 0, "damping must not be negative", "0 means none.")


def check_rank(rank: int, size: int) -> None:
    """Refuses what is no int between 1 and d."""
    check_counts(rank=rank)
    if not 1 <= rank <= size:
        raise ValueError(f"rank={rank} must lie between 1 and the dimension d={size}.")


def check_finite(values: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """Returns the values if all are finite.

    Raises:
        NotFiniteError: Outside `jit`; inside, the runtime error of `equinox.error_if`.
    """
    message = NotFiniteError.message(name)
    if not is_concrete(values):
        return eqx.error_if(values, ~jnp.all(jnp.isfinite(values)), message)
    if not np.all(np.isfinite(np.asarray(values))):
        raise NotFiniteError(message)
    return values


def check_positive(values: Float[Array, "..."], name: str, remedy: str) -> Float[Array, "..."]:
    """Returns the values if all are finite and positive.

    Raises:
        NotFiniteError, NotPositiveDefiniteError: As in `check_finite`.
    """
    values = check_finite(values, name)
    return refuse(values, ~(values > 0), f"{name} must be positive", remedy)


def refuse(
    values: Real[Array, "*n"],
    bad: Bool[Array, "*n"],
    rule: str,
    remedy: str,
    guarding: Array | None = None,
) -> Array:
    """Returns `guarding` (by default the values) unless one value is bad; the error quotes it.

    Raises:
        NotPositiveDefiniteError: Outside `jit`; inside, the runtime error of `equinox.error_if`.
    """
    guarding = values if guarding is None else guarding
    if not is_concrete((values, bad)):
        return eqx.error_if(guarding, jnp.any(bad), f"{rule}. {remedy}")
    found = np.flatnonzero(np.asarray(bad))
    if len(found):
        value = np.asarray(values).reshape(-1)[found[0]]
        where = f", got {value}" if np.ndim(values) == 0 else f"; entry {found[0]} is {value}"
        raise NotPositiveDefiniteError(f"{rule}{where}. {remedy}")
    return guarding
