"""A Lanczos run -> a `KrylovBasis`: orthonormal rows, their tridiagonal, and what comes next.

Two drivers give the same result. The compiled driver is one XLA loop, best for cheap products. The
host driver is a Python loop around one jitted step: on CPU, XLA runs a convolutional product
several times slower inside a loop than alone; only the host can show progress or be interrupted.
"""

import dataclasses
import signal
import threading
import time
import warnings
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree
from tqdm import tqdm

from pnkrylov.operators import (
    DenseOperator,
    SparseOperator,
    SPDOperator,
    as_operator,
    check_vector,
)

Driver = Literal["auto", "compiled", "host"]

# A product slower than this runs in the host loop, whose cost is about 0.2 ms per step.
_HOST_SECONDS_PER_STEP = 4e-3
# Gram-Schmidt reads only the rows filled so far, up to the end of a segment; segments double.
_FIRST_SEGMENT = 32


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


def lanczos(
    A: Any,
    start: PyTree,
    num_steps: int,
    *,
    driver: Driver = "auto",
    progress: bool = False,
) -> KrylovBasis:
    """Runs Lanczos with full re-orthogonalisation (two Gram-Schmidt passes per step).

    A breakdown (an invariant Krylov space) is not an error: the remaining rows stay zero.

    Args:
        A: anything `as_operator` takes; symmetric.
        start: start vector, an array `(d,)` or the operator's pytree.
        num_steps: number of products to spend, from 1 to d.
        driver: `"compiled"` (one XLA loop), `"host"` (a Python loop around a jitted step), or
            `"auto"`: compiled under `jit` and for stored matrices, host for NumPy operators, else
            by timing the first steps.
        progress: show a progress bar; implies the host driver.

    Returns:
        A `KrylovBasis` with `num_steps` rows.

    Raises:
        ValueError: `num_steps` is not between 1 and d, or `driver` is unknown.

    Source:
        Lanczos 1950; two passes are enough: Giraud, Langou, Rozloznik and van den Eshof 2005.
    """
    operator = as_operator(A, like=start)
    flat = check_vector(operator, start, "start")
    return continue_run(begin_run(flat), operator, num_steps, driver=driver, progress=progress)


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


def continue_run(
    basis: KrylovBasis,
    A: Any,
    num_steps: int,
    *,
    driver: Driver = "auto",
    progress: bool = False,
) -> KrylovBasis:
    """Adds `num_steps` steps to a run; the result is that of one longer run, to rounding.

    Args:
        basis: the run so far. Every row must be filled, or the Krylov space exhausted
            (`basis.trim()` removes the unfilled rows of an adaptive run).
        A: the operator of the run so far; for a callable on pytrees, `as_operator(A, like=v)`.
        num_steps: further steps, at least 1; at most d rows in total.
        driver: as in `lanczos`.
        progress: as in `lanczos`.

    Returns:
        A `KrylovBasis` with `basis.num_rows + num_steps` rows; fewer only if a host run was
        interrupted from the keyboard after at least one step.

    Raises:
        ValueError: the total number of steps is not between 1 and d, or `driver` is unknown.
    """
    operator = A if isinstance(A, SPDOperator) else as_operator(A, like=basis.next_vector)
    if operator.size != basis.size:
        raise ValueError(
            f"A has {operator.size} rows but the basis has vectors of length {basis.size}: "
            "continue a run with the operator that started it."
        )
    check_num_steps(num_steps, operator.size, taken=basis.num_rows)
    if driver not in ("auto", "compiled", "host"):
        raise ValueError(f"driver={driver!r} is unknown: use 'auto', 'compiled' or 'host'.")
    total = basis.num_rows + num_steps
    if not is_concrete((operator, basis)):
        if driver == "host" or progress:
            raise ValueError(
                "driver='host' and progress=True need concrete values: call the run outside "
                "jit/vmap/grad, or use driver='compiled' there."
            )
        driver = "compiled"
    elif progress:
        driver = "host"
    elif driver == "auto" and isinstance(operator, DenseOperator | SparseOperator):
        driver = "compiled"
    elif driver == "auto" and operator.runs_on_host():
        # Nothing is gained by calling NumPy from inside an XLA loop, and JAX has known deadlocks
        # of callbacks on CPU.
        driver = "host"
    if driver == "compiled":
        return _compiled_run(operator, basis, total)
    return _host_run(operator, basis, total, progress=progress, may_switch=driver == "auto")


def check_num_steps(num_steps: int, size: int, *, name: str = "num_steps", taken: int = 0) -> None:
    """Refuses a number of steps outside 1..d, counting the `taken` rows already there."""
    if isinstance(num_steps, bool) or not isinstance(num_steps, int | np.integer):
        raise TypeError(f"{name}={num_steps!r} must be an int, not {type(num_steps).__name__}.")
    if num_steps < 1:
        raise ValueError(f"{name}={num_steps} must be at least 1.")
    if taken + num_steps > size:
        already = f" after the {taken} already taken" if taken else ""
        raise ValueError(
            f"{name}={num_steps}{already} exceeds the dimension d={size}: a Krylov space has at "
            f"most d dimensions. Use at most {size - taken}."
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


def segments(first: int, last: int) -> list[int]:
    """Ends of the segments that cover the rows `first..last-1`: 32, 64, 128, ..., last."""
    ends, end = [], _FIRST_SEGMENT
    while end < last:
        if end > first:
            ends.append(end)
        end *= 2
    return [*ends, last]


def step(operator: SPDOperator, basis: KrylovBasis, index: Int[Array, ""]) -> KrylovBasis:
    """One Lanczos step: stores q_{index}, multiplies it, re-orthogonalises twice.

    A zero `next_vector` (after a breakdown) is a fixed point: it adds zero rows.
    """
    current = basis.next_vector
    # Slices, not `at[...]`: on CPU a scatter inside a loop costs as much as a small product.
    vectors = jax.lax.dynamic_update_slice_in_dim(basis.vectors, current[None, :], index, axis=0)
    product = operator.mv(current)
    first = jnp.matmul(vectors, product, precision=jax.lax.Precision.HIGHEST)
    product = product - jnp.matmul(first, vectors, precision=jax.lax.Precision.HIGHEST)
    second = jnp.matmul(vectors, product, precision=jax.lax.Precision.HIGHEST)
    product = product - jnp.matmul(second, vectors, precision=jax.lax.Precision.HIGHEST)
    alpha = _entry(first + second, index)
    previous = jnp.where(
        index > 0, _entry(basis.beta, jnp.maximum(index - 1, 0)), jnp.zeros_like(alpha)
    )
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
    """The same basis with room for `num_rows` rows."""
    extra = num_rows - basis.num_rows
    return dataclasses.replace(
        basis,
        vectors=jnp.pad(basis.vectors, ((0, extra), (0, 0))),
        alpha=jnp.pad(basis.alpha, (0, extra)),
        beta=jnp.pad(basis.beta, (0, extra)),
    )


@eqx.filter_jit
def _compiled_run(operator: SPDOperator, basis: KrylovBasis, total: int) -> KrylovBasis:
    first = basis.num_rows
    for end in segments(first, total):
        basis = jax.lax.fori_loop(
            first, end, lambda index, state: step(operator, state, index), pad(basis, end)
        )
        first = end
    return basis


# Everything but the operator is donated: the basis is updated in place.
@eqx.filter_jit(donate="all-except-first")
def _host_step(operator: SPDOperator, basis: KrylovBasis, index: Int[Array, ""]) -> KrylovBasis:
    return step(operator, basis, index)


def _host_run(
    operator: SPDOperator, basis: KrylovBasis, total: int, *, progress: bool, may_switch: bool
) -> KrylovBasis:
    begin = basis.num_rows
    ends = segments(begin, total)
    # A copy, because the steps update the basis in place and the caller keeps theirs.
    basis = pad(dataclasses.replace(jax.tree.map(jnp.copy, basis), driver="host"), ends[0])
    done, switch = begin, False
    with (
        Interruptible() as interrupt,
        tqdm(total=total, initial=begin, desc="Lanczos", unit="step", disable=not progress) as bar,
    ):
        while done < total and not interrupt.requested and not switch:
            if done == ends[0]:
                ends = ends[1:]
                basis = pad(basis, ends[0])
            started = time.perf_counter()
            # The index is an array, so that a new value does not recompile.
            basis = jax.block_until_ready(_host_step(operator, basis, jnp.asarray(done, jnp.int32)))
            seconds = time.perf_counter() - started
            done += 1
            bar.update()
            # The third step is the first one that neither compiles nor warms up.
            switch = may_switch and done == begin + 3 and seconds < _HOST_SECONDS_PER_STEP
    basis = dataclasses.replace(
        basis, vectors=basis.vectors[:done], alpha=basis.alpha[:done], beta=basis.beta[:done]
    )
    if interrupt.requested and done < total:
        warnings.warn(
            f"The Lanczos run was interrupted from the keyboard after {done} of {total} steps; the "
            "result describes the steps that were taken.",
            RuntimeWarning,
            stacklevel=3,
        )
    if switch and done < total:
        return _compiled_run(operator, dataclasses.replace(basis, driver="compiled"), total)
    return basis


class Interruptible:
    """Turns the first Ctrl-C into a request to stop after the step in progress.

    The second Ctrl-C interrupts at once. Outside the main thread, where Python delivers no
    signals, this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> "Interruptible":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: Any) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._previous)
