"""What a checkpoint reads off a run and puts back: a run of single vectors, or of blocks.

Both are the same to it: each step adds rows and two coefficients, and something comes next. A step
of a block run is k rows where that of a single vector is one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pnkrylov.basis import laid_out, row_layout


@runtime_checkable
class Recorded(Protocol):
    """A run, as far as a checkpoint knows it; a `RunKind` tells the names of its other fields."""

    @property
    def vectors(self) -> Any:
        """Its vectors as rows."""
        ...

    @property
    def size(self) -> int:
        """Dimension d of the operator."""
        ...

    @property
    def dtype(self) -> Any:
        """Dtype of the vectors."""
        ...


@dataclasses.dataclass(frozen=True)
class RunKind:
    """The names of the fields of a run, and what a checkpoint does with them.

    Attributes:
        following: the vector that comes next, or the block of them.
        diagonal, coupling: the coefficients, with one entry for each step.
        norms: of what the run was started from.
        coordinates: of the start vectors, in the first block; None for a single one.
        present: which rows, and which of those that come next, are not zero; None if not stored.
    """

    following: str
    diagonal: str
    coupling: str
    norms: str
    coordinates: str | None = None
    present: tuple[str, str] | None = None

    def next_rows(self, run: Recorded) -> Array:
        """What comes next: `(d,)`, or `(k, d)` for blocks."""
        return getattr(run, self.following)

    def rows(self, run: Recorded, index: int) -> Array:
        """The rows of a step, in the same shape."""
        return _take(run.vectors, jnp.asarray(index, jnp.int32), self.next_rows(run))

    def with_rows(self, run: Any, index: int, rows: np.ndarray) -> Any:
        """The run, which is used up, with the rows of a step."""
        following = self.next_rows(run)
        # Only single vectors are told how to lie on several devices.
        layout = row_layout(following) if following.ndim == 1 else None
        return _put((rows, jnp.asarray(index, jnp.int32)), run, layout)

    def arrays(self, run: Recorded, steps: int) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of a run of so many steps, beside the rows."""
        names = [name for name in (self.norms, self.coordinates, "filled") if name is not None]
        arrays = {name: np.asarray(getattr(run, name)) for name in names}
        for name in (self.diagonal, self.coupling):
            arrays[name] = np.asarray(getattr(run, name))[:steps]
        return arrays

    def with_arrays(
        self, run: Any, arrays: Mapping[str, np.ndarray], steps: int, following: Array
    ) -> Any:
        """The run after the first `steps` of those that `arrays` are of."""
        changes: dict[str, Array] = {self.following: following}
        for name, array in arrays.items():
            if name in (self.diagonal, self.coupling):
                room = getattr(run, name).shape[0] - steps
                array = np.pad(array[:steps], ((0, room), *((0, 0),) * (array.ndim - 1)))
            changes[name] = jnp.array(array)
        changes["filled"] = jnp.array(min(int(arrays["filled"]), steps), jnp.int32)
        if self.present is not None:
            changes |= dict(zip(self.present, _not_zero(run.vectors, following), strict=True))
        return dataclasses.replace(run, **changes)

    def same_start(
        self,
        arrays: Mapping[str, np.ndarray],
        rows: Any,
        others: Mapping[str, np.ndarray],
        other_rows: Any,
        tolerance: float,
    ) -> bool:
        """Whether two runs were started from the same vectors; `rows` are those of step 0."""
        own, other = self._starts(arrays, rows), self._starts(others, other_rows)
        apart, largest = (float(jnp.max(jnp.abs(each))) for each in (own - other, other))
        norms = arrays[self.norms], others[self.norms]
        return apart <= tolerance * largest and np.allclose(*norms, rtol=tolerance, atol=0)

    def _starts(self, arrays: Mapping[str, np.ndarray], rows: Any) -> Any:
        if self.coordinates is None:
            return rows
        # Not the rows: one of a start nearly dependent on the others is mostly rounding.
        return _matmul(arrays[self.coordinates], rows)

    def same_steps(
        self, arrays: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]
    ) -> bool:
        """Whether the coefficients of two runs are equal, as far as the shorter one goes."""
        for name in (self.diagonal, self.coupling):
            common = min(len(arrays[name]), len(others[name]))
            if not np.array_equal(arrays[name][:common], others[name][:common], equal_nan=True):
                return False
        return True

    def apart(
        self, run: Recorded, index: int, arrays: Mapping[str, np.ndarray], following: Array
    ) -> tuple[float, float]:
        """By how much step `index` of a run differs from that of `arrays`, and the norm of A.

        Args:
            run: after the step.
            index: of the step.
            arrays: of the other run.
            following: what comes next there.
        """
        own, other = (
            [_as_blocks(each[name]) for name in (self.diagonal, self.coupling)]
            for each in (self.arrays(run, index + 1), arrays)
        )
        norm = np.max(np.sum(np.abs(other[0]), axis=2) + np.sum(np.abs(other[1]), axis=1))
        if not all(np.all(np.isfinite(each[index])) for each in other):
            # What is not finite shows nothing: the run fails by its own check.
            return 0.0, 0.0
        beyond = _matmul(own[1][index].T, self.next_rows(run))
        beyond = beyond - _matmul(other[1][index].T, following)
        within = np.max(np.abs(own[0][index] - other[0][index]))
        # Not the built-in max, which may lose a NaN.
        return float(np.max([within, np.asarray(jnp.linalg.norm(beyond))])), float(norm)


SINGLE = RunKind("next_vector", "alpha", "beta", "start_norm")
BLOCKS = RunKind(
    "next_block",
    "diagonal",
    "coupling",
    "start_norms",
    "start_coordinates",
    ("present", "next_present"),
)


def _as_blocks(coefficients: np.ndarray) -> np.ndarray:
    """Coefficients of single vectors as blocks of one."""
    return coefficients if coefficients.ndim == 3 else coefficients[:, None, None]


def _matmul(coefficients: np.ndarray, rows: Any) -> Array:
    rows = jnp.reshape(rows, (coefficients.shape[1], -1))
    return jnp.matmul(jnp.asarray(coefficients), rows, precision=jax.lax.Precision.HIGHEST)


@eqx.filter_jit
def _take(vectors: Array, index: Array, like: Array) -> Array:
    count = like.size // like.shape[-1]
    rows = jax.lax.dynamic_slice_in_dim(vectors, index * count, count, axis=0)
    return jnp.reshape(rows, like.shape)


@eqx.filter_jit(donate="all-except-first")
def _put(rows_and_index: tuple[Any, Array], run: Any, layout: Any) -> Any:
    rows, index = rows_and_index
    rows = jnp.reshape(rows, (-1, rows.shape[-1]))
    begin = index * rows.shape[0]
    vectors = jax.lax.dynamic_update_slice_in_dim(run.vectors, rows, begin, axis=0)
    run = dataclasses.replace(run, vectors=vectors)
    return run if layout is None else laid_out(run, layout)


@jax.jit
def _not_zero(vectors: Array, following: Array) -> tuple[Array, Array]:
    return jnp.any(vectors != 0, axis=1), jnp.any(following != 0, axis=1)
