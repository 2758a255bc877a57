"""The Gaussian prior of the parameters: a scalar precision times a pattern."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pnkrylov.krylov import is_concrete
from pnkrylov.laplace.parameters import Parameters

# Two patterns that agree to this many units of rounding are the same.
_SAME = 16


class Prior(eqx.Module):
    """`theta ~ N(0, (precision * pattern)^-1)`, with a pattern of geometric mean one.

    With the pattern divided out, `theta sqrt(pattern)` has the scalar prior that a shift of the
    spectrum can change at no product (METHOD.md section 12).

    Attributes:
        precision: the scalar alpha.
        root: `(p,)`, square root of the pattern; None for a scalar prior.
    """

    precision: Float[Array, ""]
    root: Float[Array, " p"] | None

    @classmethod
    def of(cls, prior_precision: Any, parameters: Parameters) -> "Prior":
        """Reads a prior precision.

        Args:
            prior_precision: a positive number; or a pytree of numbers or arrays like the
                (selected) parameters, or the outer part of it: one number per layer, or one for
                each parameter.
            parameters: the uncertain parameters.

        Raises:
            ValueError: a precision is not positive and finite, or the containers do not match.
            TypeError: a precision is not a real number.
        """
        structure = parameters.structure
        if _is_number(prior_precision):
            if is_concrete(prior_precision):
                prior_precision = check_precision(prior_precision, "prior_precision")
            return cls(jnp.asarray(prior_precision, structure.dtype), None)
        entries = _spread(prior_precision, parameters)
        logarithms = np.log(entries)
        centre = float(np.mean(logarithms))
        root = np.exp(0.5 * (logarithms - centre))
        return cls(jnp.asarray(np.exp(centre), structure.dtype), jnp.asarray(root, structure.dtype))

    def same_pattern(self, other: "Prior") -> bool:
        """Whether the other prior is a multiple of this one."""
        if self.root is None or other.root is None:
            return self.root is None and other.root is None
        tolerance = _SAME * float(jnp.finfo(self.root.dtype).eps)
        return bool(jnp.all(jnp.abs(self.root - other.root) <= tolerance * self.root))

    def with_precision(self, precision: Float[Array, ""]) -> "Prior":
        """The same pattern with another scalar."""
        return dataclasses.replace(self, precision=precision)

    def energy(self, flat: Float[Array, " p"]) -> Float[Array, ""]:
        """`sum pattern theta^2`, so that `-log prior = precision * energy / 2 + constant`."""
        scaled = flat if self.root is None else flat * self.root
        return jnp.sum(scaled**2)

    def unscale(self, rows: Float[Array, "k p"]) -> Float[Array, "k p"]:
        """Rows divided by the root: scaled draws to draws, Jacobian rows to scaled ones."""
        return rows if self.root is None else rows / self.root[None, :]

    def diagonal(self, size: int) -> Float[Array, " p"]:
        """The precision of every parameter."""
        if self.root is None:
            return jnp.full((size,), self.precision)
        return self.precision * self.root**2


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "ndim") and value.ndim == 0)


def check_precision(value: Any, name: str) -> np.ndarray:
    """The numbers of a prior precision, in float64.

    Raises:
        TypeError, ValueError: they are no real numbers, or not positive and finite.
    """
    numbers = np.asarray(value)
    if numbers.dtype == bool or not np.issubdtype(numbers.dtype, np.number):
        raise TypeError(f"{name}={value!r} must be a positive number.")
    if np.iscomplexobj(numbers):
        raise TypeError(f"{name} is complex; it must be a positive real number.")
    numbers = numbers.astype(np.float64)
    if not (np.isfinite(numbers).all() and (numbers > 0).all()):
        worst = numbers.reshape(-1)[np.argmin(np.where(np.isfinite(numbers), numbers, -np.inf))]
        raise ValueError(
            f"{name} contains {worst}; a prior precision is 1 / variance, positive and finite. "
            "Use a small number such as 1e-4 for a weak prior."
        )
    return numbers


@dataclasses.dataclass
class _Entry:
    """One given number or array, and the shape of the parameters that it is for."""

    value: Any
    shape: tuple[int, ...]


def _spread(prior_precision: Any, parameters: Parameters) -> np.ndarray:
    """One precision per uncertain parameter, flat, in float64."""
    tree = parameters.structure.tree
    try:
        pairs = jax.tree.map(
            lambda value, subtree: [_Entry(value, leaf.shape) for leaf in jax.tree.leaves(subtree)],
            prior_precision,
            tree,
            # None stands for a part of the parameters that is fixed.
            is_leaf=lambda node: node is None,
        )
    except ValueError as error:
        raise ValueError(
            f"prior_precision does not match the parameters: {error}. Pass a number, or a pytree "
            "of numbers or arrays with the containers of the (selected) parameters or the outer "
            "part of them."
        ) from error
    pieces = []
    for entry in jax.tree.leaves(pairs):
        numbers, shape = check_precision(entry.value, "prior_precision"), entry.shape
        if numbers.shape not in ((), tuple(shape)):
            raise ValueError(
                f"prior_precision has a leaf of shape {numbers.shape} for parameters of shape "
                f"{tuple(shape)}: pass a number for all of them, or one for each."
            )
        pieces.append(np.broadcast_to(numbers, shape).reshape(-1))
    return np.concatenate(pieces)
