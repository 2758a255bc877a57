"""A number with an error bar."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri
from jaxtyping import Array, Int, PyTree


class Estimate(eqx.Module):
    """An estimate and its standard error.

    Attributes:
        value: the estimate, an array or a pytree of arrays.
        standard_error: standard deviation of the estimate over random probes, like `value`.
            Quadrature bias is not in it.
        num_matvecs: products with the operator that were spent.
    """

    value: PyTree
    standard_error: PyTree
    num_matvecs: Int[Array, ""]

    @property
    def lower(self) -> PyTree:
        """Lower end of the central 95 % interval."""
        return self.interval(0.95)[0]

    @property
    def upper(self) -> PyTree:
        """Upper end of the central 95 % interval."""
        return self.interval(0.95)[1]

    def interval(self, level: float) -> tuple[PyTree, PyTree]:
        """Central normal interval of probability `level`, between 0 and 1."""
        return normal_interval(self.value, self.standard_error, level)


def normal_interval(mean: PyTree, deviation: PyTree, level: float) -> tuple[PyTree, PyTree]:
    """`mean -+ z deviation` with the normal quantile z of a central interval.

    Raises:
        ValueError: `level` is not strictly between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie strictly between 0 and 1, for example 0.95.")

    def half_width(deviation):
        return ndtri(jnp.asarray(0.5 + level / 2, deviation.dtype)) * deviation

    widths = jax.tree.map(half_width, deviation)
    lower = jax.tree.map(lambda centre, width: centre - width, mean, widths)
    upper = jax.tree.map(lambda centre, width: centre + width, mean, widths)
    return lower, upper
