"""Products that call the host are made before a compiled step, not inside of it.

A callback inside of a program on CPU may wait for ever where the product runs programs of JAX
itself, as a curvature streamed over batches does, and cores are few: the thread that runs the
callback is the one that its programs need. Seen on one core.
"""

import equinox as eqx
from jaxtyping import Array, Float

from pnkrylov._operator_types import SPDOperator
from pnkrylov._structure import VectorStructure
from pnkrylov.basis import is_concrete


class _Known(SPDOperator):
    """An operator of which one product is known: that of the vectors which come next."""

    product: Float[Array, "..."]
    structure: VectorStructure = eqx.field(static=True)

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """The product, whatever `vector` is called by now."""
        return self.product

    def block_mv(self, block: Float[Array, "k d"]) -> Float[Array, "k d"]:
        """The products, whatever `block` is called by now."""
        return self.product


def multiplied(operator: SPDOperator, vectors: Float[Array, "*k d"]) -> SPDOperator:
    """The operator for a compiled step whose only product is that with `vectors`.

    Args:
        operator: any operator.
        vectors: one vector `(d,)` or rows `(k, d)`.

    Returns:
        One that holds that product, if the operator calls the host; else the operator.
    """
    if not is_concrete((operator, vectors)) or not operator.runs_on_host():
        return operator
    product = operator.mv(vectors) if vectors.ndim == 1 else operator.block_mv(vectors)
    return _Known(product=product, structure=operator.structure)
