"""Plain arguments: counts, tolerances, choices, arrays. Every message names the argument.

A leaf of the import graph: what needs an operator or a run checks it where it is at hand.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pnkrylov._structure import check_dtype


def check_counts(**counts: int) -> None:
    """Refuses what is no int, or negative."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be an int.")
        if value < 0:
            raise ValueError(f"{name}={value} must not be negative.")


def check_positive_counts(**counts: int) -> None:
    """Refuses what is no int, or below 1."""
    check_counts(**counts)
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")


def check_reals(**values: Any) -> None:
    """Refuses what is no real number or array of them: strings, None, booleans, complex."""
    for name, value in values.items():
        python_number = isinstance(value, int | float | complex)
        dtype = getattr(value, "dtype", type(value) if python_number else object)
        if not jnp.issubdtype(dtype, np.number):
            raise TypeError(f"{name}={value!r} must be a real number.")
        if jnp.issubdtype(dtype, np.complexfloating):
            raise TypeError(f"{name}={value!r} must be a real number, not a complex one.")


def check_fractions(**values: float) -> None:
    """Refuses what is no real number strictly between 0 and 1 (tolerances, levels)."""
    check_reals(**values)
    for name, value in values.items():
        if not (np.ndim(value) == 0 and 0 < value < 1):
            raise ValueError(f"{name}={value} must lie strictly between 0 and 1.")


def check_positive_numbers(**values: float) -> None:
    """Refuses what is no real number, or not above zero."""
    check_reals(**values)
    for name, value in values.items():
        if not (np.ndim(value) == 0 and value > 0):
            raise ValueError(f"{name}={value} must be positive.")


def check_optimizer(optimizer: Any) -> None:
    """Refuses what does not look like an optimiser of optax."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}: pass one of optax, such as "
            "optax.adam(0.1)."
        )


def check_array(value: Any, name: str, *axes: str) -> None:
    """Refuses what is no real floating array, empty, or has other axes than those named.

    Args:
        value: What was passed.
        name: What the message calls it.
        *axes: Names of the axes, `"k", "d"`; an array with as many, all of positive length.

    Raises:
        TypeError: It is no array, or of another dtype (see `check_dtype`).
        ValueError: It has another number of axes, or no entry.
    """
    shape = f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} is of type {type(value).__name__}; pass an array {shape}.")
    check_dtype(value.dtype, name)
    if value.ndim != len(axes):
        kind = {1: "a vector ", 2: "a matrix "}.get(len(axes), "")
        raise ValueError(f"{name} must be {kind}{shape}, got shape {tuple(value.shape)}.")
    if value.size == 0:
        raise ValueError(f"{name} is empty: its shape is {tuple(value.shape)}.")


def check_square(value: Any, name: str, axis: str = "d") -> None:
    """Refuses what is no square matrix of a real floating dtype (see `check_array`)."""
    is_matrix = isinstance(value, jax.Array | np.ndarray)
    if is_matrix and (value.ndim != 2 or value.shape[0] != value.shape[1]):
        raise ValueError(f"{name} must be square ({axis}, {axis}), got shape {tuple(value.shape)}.")
    check_array(value, name, axis, axis)
