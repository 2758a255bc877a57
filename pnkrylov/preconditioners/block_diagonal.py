"""A preconditioner made of smaller ones, each on its own part of the flat vector."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pnkrylov.preconditioners.base import Preconditioner


class BlockDiagonal(Preconditioner):
    """Blocks on contiguous slices of the flat vector, in order, or on given sets of indices.

    Memory and set-up are those of the blocks. The blocks of a network's curvature are usually its
    layers: in a flattened pytree they are contiguous.

    Attributes:
        blocks: The preconditioners of the parts, of one dtype.
        order: Indices of the parts one after the other, `(d,)`; None where they are contiguous.
        inverse_order: Where each index stands in `order`, `(d,)`, or None.
    """

    blocks: tuple[Preconditioner, ...]
    order: Int[Array, " d"] | None
    inverse_order: Int[Array, " d"] | None

    def __init__(
        self, blocks: Sequence[Preconditioner], indices: Sequence[Int[Array, " n"]] | None = None
    ):
        """Builds the preconditioner.

        Args:
            blocks: The preconditioners of the parts.
            indices: For each block, the indices that it acts on; together `0..d-1`, each once.
                None for contiguous slices of the blocks' sizes.

        Raises:
            TypeError: The blocks are no preconditioners, or have different dtypes.
            ValueError: There is no block, or the indices do not fit the blocks or are no partition.
        """
        if not isinstance(blocks, Sequence) or isinstance(blocks, str):
            raise TypeError(f"blocks is of type {type(blocks).__name__}; pass a list or tuple.")
        if not blocks:
            raise ValueError("blocks is empty; pass at least one preconditioner.")
        for index, block in enumerate(blocks):
            if not isinstance(block, Preconditioner):
                raise TypeError(
                    f"blocks[{index}] is of type {type(block).__name__}: pass preconditioners, for "
                    "a matrix Dense(matrix)."
                )
        dtypes = sorted({np.dtype(block.dtype).name for block in blocks})
        if len(dtypes) > 1:
            raise TypeError(f"The blocks have the dtypes {dtypes}; cast them to one.")
        self.blocks = tuple(blocks)
        self.order = self.inverse_order = None
        if indices is not None:
            order = _checked_order(self.blocks, indices)
            self.order = jnp.asarray(order, jnp.int32)
            self.inverse_order = jnp.asarray(np.argsort(order), jnp.int32)

    @property
    def size(self) -> int:
        """Number of rows d."""
        return sum(block.size for block in self.blocks)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the flat vectors."""
        return self.blocks[0].dtype

    @property
    def num_products(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Products with A that setting up the blocks has cost."""
        return sum(block.num_products for block in self.blocks)

    def power_mv(self, vectors: Float[Array, "*k d"], exponent: float) -> Float[Array, "*k d"]:
        """Returns `P^exponent v`, block by block."""
        if self.order is not None:
            vectors = vectors[..., self.order]
        ends = np.cumsum([block.size for block in self.blocks])[:-1]
        parts = jnp.split(vectors, ends, axis=-1)
        images = [
            block.power_mv(part, exponent) for block, part in zip(self.blocks, parts, strict=True)
        ]
        return self._in_place(jnp.concatenate(images, axis=-1))

    def logdet(self) -> Float[Array, ""]:
        """The sum over the blocks."""
        return jnp.sum(jnp.stack([block.logdet() for block in self.blocks]))

    def inv_diagonal(self) -> Float[Array, " d"]:
        """That of every block, in place."""
        return self._in_place(jnp.concatenate([block.inv_diagonal() for block in self.blocks]))

    def _in_place(self, vectors: Array) -> Array:
        return vectors if self.inverse_order is None else vectors[..., self.inverse_order]


def _checked_order(blocks: tuple[Preconditioner, ...], indices: Sequence[Array]) -> np.ndarray:
    counts, sizes = [len(part) for part in indices], [block.size for block in blocks]
    if counts != sizes:
        raise ValueError(f"indices has the lengths {counts}, but the blocks the sizes {sizes}.")
    order = np.concatenate([np.asarray(part) for part in indices])
    if not np.array_equal(np.sort(order), np.arange(len(order))):
        raise ValueError(
            f"indices must contain each of 0..{len(order) - 1} once: every entry of the vector "
            "belongs to exactly one block."
        )
    return order
