"""An operator and a preconditioner -> `L^-1 A L^-1`, what every preconditioned run works on."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pnkrylov._structure import VectorStructure
from pnkrylov.errors import NotFiniteError
from pnkrylov.krylov import is_concrete
from pnkrylov.operators import SPDOperator
from pnkrylov.preconditioners.base import Preconditioner


class PreconditionedOperator(SPDOperator):
    """`L^-1 A L^-1` with `L = P^{1/2}` on flat vectors; it keeps the structure of A's vectors.

    Attributes:
        operator: A.
        preconditioner: P.
        structure: that of A's vectors.
    """

    operator: SPDOperator
    preconditioner: Preconditioner
    structure: VectorStructure = eqx.field(static=True)

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """Returns `L^-1 A L^-1 v`."""
        inner = self.operator.mv(self.preconditioner.inv_sqrt_mv(vector))
        return self.preconditioner.inv_sqrt_mv(inner)

    def block_mv(self, block: Float[Array, "k d"]) -> Float[Array, "k d"]:
        """Returns `L^-1 A L^-1 v` for every row, with one block product."""
        inner = self.operator.block_mv(self.preconditioner.inv_sqrt_mv(block))
        return self.preconditioner.inv_sqrt_mv(inner)


def precondition(operator: SPDOperator, preconditioner: Any) -> SPDOperator:
    """`L^-1 A L^-1`, or the operator itself when there is no preconditioner.

    Args:
        operator: The operator A.
        preconditioner: A `Preconditioner` of its size and dtype, or None.

    Returns:
        The operator of the preconditioned run.

    Raises:
        TypeError: It is no `Preconditioner`, or has another dtype.
        ValueError: It has another size.
        NotFiniteError: `P^{-1/2}` of a vector of ones is not finite: P is singular, indefinite or
            holds NaN (outside `jit` only; a run inside finds its products not finite).
    """
    if preconditioner is None:
        return operator
    check_preconditioner(preconditioner, operator.size, operator.dtype)
    return PreconditionedOperator(
        operator=operator, preconditioner=preconditioner, structure=operator.structure
    )


def check_preconditioner(preconditioner: Any, size: int, dtype: np.dtype) -> None:
    """Refuses what is no preconditioner for an operator of this size and dtype.

    Args:
        preconditioner: What was passed.
        size: Dimension d of the operator.
        dtype: Its dtype.

    Raises:
        TypeError, ValueError, NotFiniteError: As in `precondition`.
    """
    if not isinstance(preconditioner, Preconditioner):
        raise TypeError(
            f"preconditioner is of type {type(preconditioner).__name__}; pass one of "
            "pnkrylov.preconditioners, such as Diagonal(entries), or a subclass of Preconditioner."
        )
    name = type(preconditioner).__name__
    if preconditioner.size != size:
        raise ValueError(
            f"The preconditioner {name} has size {preconditioner.size}, but the operator acts on "
            f"vectors of length {size}. Build it from the same operator or the same parameters."
        )
    if np.dtype(preconditioner.dtype) != np.dtype(dtype):
        raise TypeError(
            f"The preconditioner {name} has dtype {np.dtype(preconditioner.dtype)}, but the "
            f"operator has dtype {np.dtype(dtype)}. Cast what it is built from with .astype."
        )
    if not is_concrete(preconditioner):
        return
    image = preconditioner.inv_sqrt_mv(jnp.ones((size,), dtype))
    if is_concrete(image) and not np.all(np.isfinite(np.asarray(image))):
        raise NotFiniteError(
            f"The preconditioner {name} is singular, indefinite or holds NaN: P^(-1/2) of a vector "
            "of ones is not finite. Check what it is built from; a larger alpha or floor lifts "
            "small eigenvalues above zero."
        )
