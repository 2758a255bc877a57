"""A number with an error bar: how far it may be off by chance, and how far by quadrature."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri
from jaxtyping import Array, Int, PyTree

from pnkrylov._arguments import check_fractions

Bracket = Literal["none", "estimated", "proved"]


class Estimate(eqx.Module):
    """An estimate, its standard error, and a bracket of its quadrature bias.

    Attributes:
        value: the estimate, an array or a pytree of arrays.
        standard_error: standard deviation of the estimate over random probes, like `value`.
        num_matvecs: products with the operator that were spent.
        quadrature_lower: what the estimate would at least be with exact quadrature (same probes);
            None where no quadrature is involved or nothing is known of its bias.
        quadrature_upper: what it would at most be; infinite where nothing bounds it.
        bracket: `"proved"` if both ends are bounds (Gauss on one side, Gauss-Radau with a given
            bound of the spectrum on the other), `"estimated"` if one of them extrapolates how fast
            the quadrature converges, `"none"` without a bracket.
    """

    value: PyTree
    standard_error: PyTree
    num_matvecs: Int[Array, ""]
    quadrature_lower: PyTree | None = None
    quadrature_upper: PyTree | None = None
    bracket: Bracket = eqx.field(static=True, default="none")

    @property
    def lower(self) -> PyTree:
        """Lower end of the central 95 % interval."""
        return self.interval(0.95)[0]

    @property
    def upper(self) -> PyTree:
        """Upper end of the central 95 % interval."""
        return self.interval(0.95)[1]

    def interval(self, level: float) -> tuple[PyTree, PyTree]:
        """Central interval of probability `level`, between 0 and 1, for chance and bias together.

        On either side, the normal half-width `z standard_error` and the distance to that end of
        the quadrature bracket are added in quadrature.

        Raises:
            TypeError, ValueError: `level` is not a number strictly between 0 and 1.
        """
        lower, upper = normal_interval(self.value, self.standard_error, level)
        if self.quadrature_lower is not None:
            lower = jax.tree.map(_below, self.value, lower, self.quadrature_lower)
        if self.quadrature_upper is not None:
            upper = jax.tree.map(_above, self.value, upper, self.quadrature_upper)
        return lower, upper


def _below(value: Array, end: Array, bracket: Array) -> Array:
    return value - jnp.hypot(value - end, value - bracket)


def _above(value: Array, end: Array, bracket: Array) -> Array:
    return value + jnp.hypot(end - value, bracket - value)


def normal_interval(mean: PyTree, deviation: PyTree, level: float) -> tuple[PyTree, PyTree]:
    """`mean -+ z deviation` with the normal quantile z of a central interval.

    Raises:
        TypeError, ValueError: `level` is not a number strictly between 0 and 1.
    """
    check_fractions(level=level)

    def half_width(deviation):
        return ndtri(jnp.asarray(0.5 + level / 2, deviation.dtype)) * deviation

    widths = jax.tree.map(half_width, deviation)
    lower = jax.tree.map(lambda centre, width: centre - width, mean, widths)
    upper = jax.tree.map(lambda centre, width: centre + width, mean, widths)
    return lower, upper
