"""Split preconditioning: everything runs on `L^-1 K L^-T` for `P = L L^T`.

A preconditioner is any object with two methods on flat vectors,

    inv_sqrt_mv(v)            -> L^-1 v
    inv_sqrt_transpose_mv(v)  -> L^-T v

`L` may be any square root of `P`: a Cholesky factor, or the symmetric one.
"""

from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
from jaxtyping import Array, Float

from pnkrylov._structure import VectorStructure
from pnkrylov.operators import SPDOperator


@runtime_checkable
class SplitPreconditioner(Protocol):
    """What CIQ needs of a preconditioner `P = L L^T`, on flat vectors of the operator's dtype."""

    def inv_sqrt_mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """Returns `L^-1 v`."""
        ...

    def inv_sqrt_transpose_mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """Returns `L^-T v`."""
        ...


class PreconditionedOperator(SPDOperator):
    """`L^-1 A L^-T` on flat vectors; the rows of a block are preconditioned together."""

    operator: SPDOperator
    preconditioner: Any
    structure: VectorStructure = eqx.field(static=True)

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """Returns `L^-1 A L^-T v`."""
        inner = self.operator.mv(self.preconditioner.inv_sqrt_transpose_mv(vector))
        return self.preconditioner.inv_sqrt_mv(inner)

    def block_mv(self, block: Float[Array, "k d"]) -> Float[Array, "k d"]:
        """Returns `L^-1 A L^-T v` for every row, with one block product."""
        inner = self.operator.block_mv(jax.vmap(self.preconditioner.inv_sqrt_transpose_mv)(block))
        return jax.vmap(self.preconditioner.inv_sqrt_mv)(inner)


def precondition(operator: SPDOperator, preconditioner: Any) -> SPDOperator:
    """`L^-1 A L^-T`, or the operator itself when there is no preconditioner.

    Raises:
        TypeError: If the object lacks one of the two methods.
    """
    if preconditioner is None:
        return operator
    if not isinstance(preconditioner, SplitPreconditioner):
        raise TypeError(
            f"preconditioner of type {type(preconditioner).__name__} needs the methods "
            "inv_sqrt_mv(v) = L^-1 v and inv_sqrt_transpose_mv(v) = L^-T v of P = L L^T."
        )
    return PreconditionedOperator(
        operator=operator, preconditioner=preconditioner, structure=operator.structure
    )
