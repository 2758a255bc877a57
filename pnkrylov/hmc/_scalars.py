"""Scalar arguments: Python numbers or JAX scalars, in one dtype, checked where concrete."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pnkrylov._arguments import check_reals
from pnkrylov.krylov import is_concrete

Scalar = float | int | Float[Array, ""]


def as_floats(*values: Any) -> list[Array]:
    """The values in the dtype of those that are JAX arrays, or in the default floating one.

    They have been checked to be numbers (`check_positive`, `check_probability`).
    """
    dtypes = {v.dtype for v in values if isinstance(v, jax.Array)}
    floating = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    dtype = jnp.result_type(*floating) if floating else jnp.zeros(()).dtype
    return [jnp.asarray(value, dtype) for value in values]


def check_positive(**values: Any) -> None:
    """Refuses what is no real number, or a concrete value with an entry that is not positive."""
    check_reals(**values)
    for name, value in values.items():
        if is_concrete(value) and not np.all(np.asarray(value) > 0):
            raise ValueError(f"{name}={value} must be positive.")


def check_probability(**values: Any) -> None:
    """Refuses what is no real number, or a concrete value not strictly between 0 and 1."""
    check_reals(**values)
    for name, value in values.items():
        if is_concrete(value) and not 0 < float(value) < 1:
            raise ValueError(f"{name}={value} must lie strictly between 0 and 1.")
