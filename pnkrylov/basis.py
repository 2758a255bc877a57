"""What a Lanczos run leaves behind, and the one step that makes it grow.

Sets of vectors are rows. Rows that are not there yet, or never will be, are zero.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from pnkrylov._operator_types import SPDOperator

# Gram-Schmidt reads only the rows filled so far, up to the end of a segment; segments double.
_FIRST_SEGMENT = 32
# A longer segment is a copy of the last one. A basis of more bytes gets all its rows at once:
# Gram-Schmidt then reads up to 1.5 times as much, but two copies may not fit.
_LARGE = 2**28


class Frame(eqx.Module):
    """What random probes stay out of, read off a basis at a level.

    Attributes:
        vectors: `(n, d)`, rows of the basis.
        inside: `(n,)`, the rows up to the level: probes are projected against them at every step.
        boundary: `(k, d)`, the orthonormal or zero rows that come next, which starts avoid too.
        level: m, as the basis counts it.
        num_inside: how many of the rows up to the level are vectors.
        norm: about the norm of the operator.
        unit: its scale, for numbers that should not overflow.
    """

    vectors: Float[Array, "n d"]
    inside: Bool[Array, " n"]
    boundary: Float[Array, "k d"]
    level: Int[Array, ""]
    num_inside: Int[Array, ""]
    norm: Float[Array, ""]
    unit: Float[Array, ""]

    @property
    def size(self) -> int:
        """Dimension d of the operator."""
        return self.vectors.shape[-1]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the basis."""
        return self.vectors.dtype

    def dimension(self) -> Int[Array, ""]:
        """Dimension of the space that starts are drawn from."""
        beyond = jnp.sum(jnp.any(self.boundary != 0, axis=1), dtype=jnp.int32)
        return self.size - self.num_inside - beyond

    def project(self, block: Float[Array, "N d"]) -> Float[Array, "N d"]:
        """Removes the components of every row along the basis vectors up to the level."""
        coefficients = jnp.matmul(block, self.vectors.T, precision=jax.lax.Precision.HIGHEST)
        coefficients = jnp.where(self.inside[None, :], coefficients, 0)
        return block - jnp.matmul(coefficients, self.vectors, precision=jax.lax.Precision.HIGHEST)


class KrylovBasis(eqx.Module):
    """What n Lanczos steps from a start vector leave behind: `A Q = Q T + beta_n q_{n+1} e_n^T`.

    Rows `filled, filled + 1, ...` are zero: the Krylov space was exhausted (breakdown), or an
    adaptive run stopped there. The coefficients of those rows are zero too.

    Attributes:
        vectors: `(n, d)`, the orthonormal Lanczos vectors as rows (Q transposed).
        alpha: `(n,)`, the diagonal of T.
        beta: `(n,)`, the off-diagonal of T and, at `filled - 1`, the norm of the residual.
        next_vector: `(d,)`, the unit vector q_{n+1}; zero after a breakdown.
        filled: how many rows are Lanczos vectors.
        start_norm: 2-norm of the start vector.
        driver: which loop ran, `"compiled"` or `"host"`.
    """

    vectors: Float[Array, "n d"]
    alpha: Float[Array, " n"]
    beta: Float[Array, " n"]
    next_vector: Float[Array, " d"]
    filled: Int[Array, ""]
    start_norm: Float[Array, ""]
    driver: str = eqx.field(static=True, default="compiled")

    @property
    def num_rows(self) -> int:
        """Rows of storage n, filled or not."""
        return self.vectors.shape[-2]

    @property
    def size(self) -> int:
        """Dimension d of the operator."""
        return self.vectors.shape[-1]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the basis."""
        return self.vectors.dtype

    def mask(self) -> Array:
        """Boolean `(n,)`: which rows are Lanczos vectors."""
        return jnp.arange(self.num_rows, dtype=jnp.int32) < self.filled

    def residual_norm(self) -> Float[Array, ""]:
        """The coupling beta_n between the filled rows and `next_vector`."""
        last = jnp.maximum(self.filled - 1, 0)
        return jnp.where(self.filled > 0, self.beta[last], jnp.zeros((), self.dtype))

    def tridiagonal(self) -> Float[Array, "n n"]:
        """T, dense and small; zero in unfilled rows and columns."""
        inside = jnp.arange(self.num_rows - 1, dtype=jnp.int32) + 1 < self.filled
        off_diagonal = jnp.where(inside, self.beta[:-1], jnp.zeros((), self.dtype))
        return jnp.diag(self.alpha) + jnp.diag(off_diagonal, 1) + jnp.diag(off_diagonal, -1)

    def frame(self, level: Int[Array, ""]) -> Frame:
        """What probes at level m, at most `filled`, stay out of; without a copy of the basis."""
        # Compiled by itself only outside of a program: inside one, XLA 0.10.2 was seen to wait for
        # ever where this was a call of its own (docs/design.md).
        parts = _compiled_frame if is_concrete((self, level)) else _frame
        return Frame(self.vectors, *parts(self, level))

    def trim(self) -> "KrylovBasis":
        """The same basis without its unfilled rows (outside `jit` only: shapes change)."""
        filled = max(int(self.filled), 1)
        if filled == self.num_rows:
            return self
        return dataclasses.replace(
            self,
            vectors=self.vectors[:filled],
            alpha=self.alpha[:filled],
            beta=self.beta[:filled],
        )


def _frame(basis: KrylovBasis, level: Array) -> tuple[Array, ...]:
    level = jnp.minimum(level, basis.filled)
    # q_{m+1} is a row of the basis if the run went on, else its `next_vector`; or zero.
    row = basis.vectors[jnp.minimum(level, basis.num_rows - 1)]
    boundary = jnp.where(level < basis.filled, row, basis.next_vector)
    inside = jnp.arange(basis.num_rows, dtype=jnp.int32) < level
    unit = jnp.max(jnp.abs(basis.alpha))
    norm = jnp.max(jnp.abs(basis.alpha) + basis.beta, initial=0)
    return inside, boundary[None, :], level, level, norm, jnp.where(unit > 0, unit, 1)


_compiled_frame = eqx.filter_jit(_frame)


@eqx.filter_jit
def begin_run(start: Float[Array, " d"]) -> KrylovBasis:
    """A run before its first step."""
    norm = safe_norm(start)
    return KrylovBasis(
        vectors=jnp.zeros((0, start.shape[0]), start.dtype),
        alpha=jnp.zeros((0,), start.dtype),
        beta=jnp.zeros((0,), start.dtype),
        next_vector=_unit(start, norm),
        filled=jnp.zeros((), jnp.int32),
        start_norm=norm,
    )


def is_concrete(tree: PyTree) -> bool:
    """Whether no array in `tree` is being traced by jit, vmap or grad."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def safe_norm(vector: Float[Array, " d"]) -> Float[Array, ""]:
    """The 2-norm, without underflow or overflow of the squares at extreme scales."""
    largest = jnp.max(jnp.abs(vector))
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, jnp.ones_like(largest))
    return scale * jnp.sqrt(jnp.sum((vector / scale) ** 2))


def _unit(vector: Array, norm: Array) -> Array:
    return vector / jnp.where(norm == 0, jnp.ones_like(norm), norm)


def segments(first: int, last: int, row_bytes: int) -> list[int]:
    """Ends of the segments that cover the rows `first..last-1`: 32, 64, 128, ..., last."""
    ends, end = [], _FIRST_SEGMENT
    while end < last and not is_large(last, row_bytes):
        if end > first:
            ends.append(end)
        end *= 2
    return [*ends, last]


def is_large(num_rows: int, row_bytes: int) -> bool:
    """Whether so many rows should be allocated once, because a second copy may not fit."""
    return num_rows * row_bytes > _LARGE


def row_layout(vector: Float[Array, " d"]) -> NamedSharding | None:
    """How rows must lie on the devices to be split like `vector`; None if it is not split.

    A traced vector does not say how it is laid out: there the compiler decides.

    Raises:
        ValueError: it is split over a mesh axis of the kind `Explicit`.
    """
    sharding = None if isinstance(vector, Tracer) else vector.sharding
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return None
    if set(sharding.mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            f"The vectors are split over a mesh with axis_types={sharding.mesh.axis_types}, where "
            "every operation needs its layout spelled out. Make the mesh with "
            "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))."
        )
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def laid_out(basis: KrylovBasis, layout: NamedSharding | None) -> KrylovBasis:
    """The same basis with its rows, and the vector that follows them, split over the devices."""
    if layout is None:
        return basis
    along = NamedSharding(layout.mesh, PartitionSpec(*layout.spec[1:]))
    return dataclasses.replace(
        basis,
        vectors=jax.lax.with_sharding_constraint(basis.vectors, layout),
        next_vector=jax.lax.with_sharding_constraint(basis.next_vector, along),
    )


def step(operator: SPDOperator, basis: KrylovBasis, index: Int[Array, ""]) -> KrylovBasis:
    """One Lanczos step: stores q_{index}, multiplies it, orthogonalises the product.

    The recurrence takes out the two components that are large, one Gram-Schmidt pass the rounding
    that is left along every row: together two passes.

    A zero `next_vector` (after a breakdown) is a fixed point: it adds zero rows.
    """
    current = basis.next_vector
    # Slices, not `at[...]`: on CPU a scatter inside a loop costs as much as a small product.
    vectors = jax.lax.dynamic_update_slice_in_dim(basis.vectors, current[None, :], index, axis=0)
    product = operator.mv(current)
    last = jnp.maximum(index - 1, 0)
    previous = jnp.where(index > 0, _entry(basis.beta, last), jnp.zeros_like(basis.start_norm))
    # Read from the rows just written: XLA would copy the basis to keep the old ones.
    product = product - previous * _entry(vectors, last)
    alpha = jnp.matmul(current, product, precision=jax.lax.Precision.HIGHEST)
    product = product - alpha * current
    rest = jnp.matmul(vectors, product, precision=jax.lax.Precision.HIGHEST)
    product = product - jnp.matmul(rest, vectors, precision=jax.lax.Precision.HIGHEST)
    alpha = alpha + _entry(rest, index)
    # Row sums of T bound its norm from above within a factor 3; the largest seen so far stands in.
    operator_norm = jnp.maximum(
        jnp.max(jnp.abs(basis.alpha) + basis.beta), jnp.abs(alpha) + previous
    )
    # Divided by it, squares do not under- or overflow unless the vector is negligible.
    scale = jnp.where(operator_norm > 0, operator_norm, jnp.ones_like(operator_norm))
    beta = scale * jnp.sqrt(jnp.sum((product / scale) ** 2))
    # What is left below a few eps ||T|| is rounding; d vectors leave no room for another.
    exhausted = (beta <= 10 * jnp.finfo(beta.dtype).eps * operator_norm) | (
        index + 1 >= operator.size
    )
    beta = jnp.where(exhausted, jnp.zeros_like(beta), beta)
    following = jnp.where(exhausted, jnp.zeros_like(product), _unit(product, beta))
    # The current vector is zero after a breakdown, and when the start was.
    is_vector = jnp.where(index > 0, previous != 0, basis.start_norm != 0)
    return KrylovBasis(
        vectors=vectors,
        alpha=_with_entry(basis.alpha, alpha, index),
        beta=_with_entry(basis.beta, beta, index),
        next_vector=following,
        filled=basis.filled + is_vector.astype(jnp.int32),
        start_norm=basis.start_norm,
        driver=basis.driver,
    )


def _entry(vector: Array, index: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(vector, index, keepdims=False)


def _with_entry(vector: Array, value: Array, index: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_index_in_dim(vector, value, index, axis=0)


def pad(basis: KrylovBasis, num_rows: int) -> KrylovBasis:
    """A copy of the basis with room for `num_rows` rows, more than it has."""
    layout = row_layout(basis.next_vector)
    # On arrays it is one compiled program: nothing is in memory twice on the way.
    return (_pad_compiled if is_concrete(basis) else _pad)(basis, num_rows, layout)


def _pad(basis: KrylovBasis, num_rows: int, layout: NamedSharding | None) -> KrylovBasis:
    extra = num_rows - basis.num_rows
    longer = dataclasses.replace(
        jax.tree.map(jnp.copy, basis),
        vectors=jnp.pad(basis.vectors, ((0, extra), (0, 0))),
        alpha=jnp.pad(basis.alpha, (0, extra)),
        beta=jnp.pad(basis.beta, (0, extra)),
    )
    return laid_out(longer, layout)


_pad_compiled = eqx.filter_jit(_pad)
