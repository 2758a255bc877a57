"""Random probes of the complement: short Lanczos runs, re-projected at every step, side by side.

All probes advance together by block products. Their tridiagonals are stored without any shift, so
that the same probes serve `A + shift I` for every shift.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from tqdm import tqdm

from pnkrylov._outside import multiplied
from pnkrylov.basis import Frame, KrylovBasis
from pnkrylov.krylov import Interruptible
from pnkrylov.operators import SPDOperator
from pnkrylov.preconditioners import PreconditionedOperator
from pnkrylov.tridiagonal import extreme_eigenvalues

# Random probes stop when a further step changes their mean by less than this, relatively.
PROBE_TOLERANCE = 2e-3


@runtime_checkable
class Framed(Protocol):
    """A basis, of one run or of blocks, as far as probes know it."""

    @property
    def vectors(self) -> Any:
        """Its vectors as rows."""
        ...

    def frame(self, level: Int[Array, ""]) -> Frame:
        """What probes at a level stay out of."""
        ...


def probe_tolerance(num_probes: int, basis: Framed) -> float:
    """The stop tolerance; 0 for probes that span the complement, which have no other error."""
    rows, size = basis.vectors.shape
    left = size - rows
    return 0.0 if 0 < left <= num_probes else PROBE_TOLERANCE


class Probes(eqx.Module):
    """Tridiagonals of N Lanczos runs in the complement of the first `level` basis vectors.

    Attributes:
        alpha: `(N, l)` diagonals.
        beta: `(N, l)` off-diagonals (the last one is unused by the quadrature).
        valid: `(N,)`; probes beyond the dimension of the complement are not valid.
        level: m, the number of basis vectors the probes were projected against.
        dimension: dimension of the space the starts were drawn from: d - m, less one for
            q_{m+1}, whose own quadratic form the boundary probe knows.
        steps: steps that were taken, at most l.
    """

    alpha: Float[Array, "N l"]
    beta: Float[Array, "N l"]
    valid: Bool[Array, " N"]
    level: Int[Array, ""]
    dimension: Int[Array, ""]
    steps: Int[Array, ""]

    @property
    def num_probes(self) -> int:
        """Number of probes N."""
        return self.alpha.shape[-2]

    @property
    def depth(self) -> int:
        """Room for steps of each probe, l."""
        return self.alpha.shape[-1]

    def tridiagonals(self, shift: Float[Array, ""], unit: Float[Array, ""]) -> Array:
        """`(N, l, l)`: `(Theta_i + shift I) / unit`; rows after a breakdown hold a decoupled 1."""
        alpha, off_diagonal = self._scaled(shift, unit)
        diagonal = jax.vmap(jnp.diag)(alpha)
        if self.depth == 1:
            return diagonal
        upper = jax.vmap(lambda row: jnp.diag(row, 1))(off_diagonal)
        return diagonal + upper + jnp.swapaxes(upper, -1, -2)

    def _scaled(self, shift: Array, unit: Array) -> tuple[Array, Array]:
        inside = self._inside()
        alpha = jnp.where(inside, (self.alpha + shift) / unit, 1)
        return alpha, jnp.where(inside[:, 1:], self.beta[:, :-1] / unit, 0)

    def _inside(self) -> Array:
        alive = jnp.concatenate([self.valid[:, None], self.beta[:, :-1] != 0], axis=1)
        return jnp.cumprod(alive.astype(jnp.int32), axis=1) > 0

    def inverse_forms(self, shift: Float[Array, ""], unit: Float[Array, ""]) -> Array:
        """`(N,)`: `e_1^T (Theta_i + shift I)^-1 e_1`, in units of 1/unit."""
        alpha, off_diagonal = self._scaled(shift, unit)

        def eliminate(pivot, row):
            diagonal, coupling = row
            pivot = diagonal - coupling**2 / pivot
            return pivot, None

        rows = (alpha[:, :-1].T, off_diagonal.T)
        # Eliminating from the last row up leaves 1 / (Theta^-1)_11 as the first pivot.
        pivots, _ = jax.lax.scan(eliminate, alpha[:, -1], rows, reverse=True)
        return 1 / pivots

    def ritz_range(self, shift: Float[Array, ""], unit: Float[Array, ""]) -> Float[Array, "2"]:
        """Smallest and largest Ritz value of `T_perp` over all probes, in units of `unit`."""
        alpha, off_diagonal = self._scaled(shift, unit)
        # Rows after a breakdown repeat the first diagonal entry, which is inside the range.
        alpha = jnp.where(self._inside(), alpha, alpha[:, :1])
        ends = jax.vmap(extreme_eigenvalues)(alpha, off_diagonal)
        smallest = jnp.min(jnp.where(self.valid, ends[:, 0], jnp.inf))
        largest = jnp.max(jnp.where(self.valid, ends[:, 1], -jnp.inf))
        return jnp.stack([smallest, largest])

    def mean(self, forms: Float[Array, " N"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Sphere-weighted trace `dimension * mean(forms)` and its standard error.

        Orthonormal starts drawn without replacement: the variance of their mean carries the factor
        (D - N)/D, zero when the probes span the space.
        """
        dtype = forms.dtype
        count = jnp.sum(self.valid.astype(dtype))
        dimension = self.dimension.astype(dtype)
        safe = jnp.maximum(count, 1)
        mean = jnp.sum(jnp.where(self.valid, forms, 0)) / safe
        deviations = jnp.where(self.valid, forms - mean, 0)
        variance = jnp.sum(deviations**2) / jnp.maximum(count - 1, 1)
        # One probe alone says nothing of its own error, unless it spans the whole space.
        unknown = jnp.where(count < dimension, jnp.inf, 0).astype(dtype)
        remaining = jnp.maximum(dimension - count, 0) / jnp.maximum(dimension, 1)
        error = jnp.where(count > 1, jnp.sqrt(variance * remaining / safe), unknown)
        return dimension * mean, dimension * error


class TraceProbes(eqx.Module):
    """Probes for the trace of the original `A^-1` of a preconditioned run.

    Their starts are `P_perp P^-1/2 z` with `E z z^T = I`, so that `||start||^2 e_1^T Theta^-1 e_1`
    has the mean `tr (P^-1/2 T_perp^-1 P^-1/2)`: the trace of the inside, weighted by P^-1.

    Attributes:
        probes: the runs, with normalised starts.
        squares: `(N,)`, squared norms of the starts.
    """

    probes: Probes
    squares: Float[Array, " N"]

    def mean(self, forms: Float[Array, " N"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The mean of `squares * forms` and its standard error."""
        weighted = jnp.where(self.probes.valid, self.squares * forms, 0)
        count = weighted.shape[0]
        mean = jnp.sum(weighted) / count
        if count == 1:
            return mean, jnp.where(self.probes.valid[0], jnp.inf, jnp.zeros_like(mean))
        return mean, jnp.sqrt(jnp.sum((weighted - mean) ** 2) / (count * (count - 1)))


def run_trace_probes(
    operator: PreconditionedOperator,
    basis: KrylovBasis,
    level: Int[Array, ""],
    key: PRNGKeyArray,
    num_probes: int,
    depth: int,
    **options: Any,
) -> TraceProbes:
    """Runs probes whose starts have the shape of `P^-1/2`; arguments as for `run_probes`.

    Source:
        METHOD.md section 6; the weighting is ours (docs/design.md).
    """
    starts = _shaped_starts(operator, basis.frame(level), key, num_probes)
    probes = run_probes(operator, basis, level, key, num_probes, depth, starts=starts, **options)
    return TraceProbes(probes, jnp.sum(starts**2, axis=1))


@eqx.filter_jit
def _shaped_starts(
    operator: PreconditionedOperator, frame: Frame, key: Array, num_probes: int
) -> Array:
    signs = jax.random.rademacher(key, (num_probes, operator.size), operator.dtype)
    whole = operator.preconditioner.inv_sqrt_mv(signs)
    starts = frame.project(frame.project(whole))
    # What is left of a start at rounding level is not a start.
    norms, eps = jnp.linalg.norm(starts, axis=1), jnp.finfo(starts.dtype).eps
    left = norms > 100 * eps * jnp.linalg.norm(whole, axis=1)
    return jnp.where(left[:, None], starts, 0)


def run_probes(
    operator: SPDOperator,
    basis: Framed,
    level: Int[Array, ""],
    key: PRNGKeyArray,
    num_probes: int,
    depth: int,
    *,
    tolerance: float = 0.0,
    shift: Float[Array, ""] | None = None,
    starts: Float[Array, "N d"] | None = None,
    driver: str = "compiled",
    progress: bool = False,
) -> Probes:
    """Draws mutually orthonormal probes in the complement and runs them side by side.

    Args:
        operator: A, unshifted.
        basis: the main run, of single vectors or of blocks; probes are projected against its
            vectors up to the level, every step.
        level: m, in steps of the run.
        key: random key.
        num_probes: N, at least 1.
        depth: steps of each probe l, at least 1; the cost is N l products in l block products.
        tolerance: stop before `depth` when a step changes the mean of `e_1^T Theta_i^-1 e_1` by
            less than this, relatively; 0 never stops early.
        shift: the shift at which that change is measured; the tridiagonals stay unshifted.
        starts: `(N, d)`, start vectors in the complement of `level` to use instead of random ones;
            a zero vector makes a probe that is not valid.
        driver: `"compiled"` or `"host"`, as for the main run.
        progress: show a progress bar (host driver only).

    Returns:
        The probes' tridiagonals.

    Source:
        pslq.md, section 5 (P-SLQ); sphere weights and orthogonal starts: METHOD.md section 4.
    """
    shift = jnp.zeros((), operator.dtype) if shift is None else shift
    frame = basis.frame(level)
    if starts is None:
        starts, dimension = _draw(frame, key, num_probes)
    else:
        dimension = operator.size - frame.num_inside
    state = _start(starts, frame.level, dimension, depth, shift)
    del starts  # the state has copies, and N vectors may be large
    if driver != "host":
        return _advance(operator, frame, state, tolerance)
    with (
        Interruptible() as interrupt,
        tqdm(total=depth, desc="Probes", unit="block", disable=not progress) as bar,
    ):
        while int(state.steps) < depth and not bool(state.change < tolerance):
            if interrupt.requested and int(state.steps) > 0:
                break
            state = _advance_once(operator, frame, state)
            bar.update()
    return state.closed()


class _ProbeState(eqx.Module):
    probes: Probes
    current: Float[Array, "N d"]
    previous: Float[Array, "N d"]
    steps: Int[Array, ""]
    shift: Float[Array, ""]
    form: Float[Array, ""]
    change: Float[Array, ""]

    def closed(self) -> Probes:
        """The probes, with the coupling to steps that were not taken removed."""
        column = jnp.arange(self.probes.depth, dtype=jnp.int32)
        taken = column[None, :] < self.steps - 1
        beta = jnp.where(taken, self.probes.beta, 0)
        return dataclasses.replace(self.probes, beta=beta, steps=self.steps)


@eqx.filter_jit
def _draw(frame: Frame, key: PRNGKeyArray, num_probes: int) -> tuple[Array, Array]:
    """Orthonormal starts (zero where the space is too small), and the space's dimension."""
    dtype, size = frame.dtype, frame.size
    # Starts avoid what comes next as well: the boundary probe gives its share of every trace
    # exactly.
    dimension = frame.dimension()

    def remove(block):
        block = frame.project(block)
        along = jnp.matmul(block, frame.boundary.T, precision=jax.lax.Precision.HIGHEST)
        return block - jnp.matmul(along, frame.boundary, precision=jax.lax.Precision.HIGHEST)

    block = jax.random.normal(key, (num_probes, size), dtype)
    block = remove(remove(block))
    columns, triangle = jnp.linalg.qr(block.T)
    if 2 * num_probes >= size - frame.vectors.shape[0]:
        # Nearly dependent starts amplify what is left along the basis: once more.
        columns, _ = jnp.linalg.qr(remove(columns.T).T)
    found = jnp.abs(jnp.diag(triangle)) > 100 * size * jnp.finfo(dtype).eps
    count = min(num_probes, size)
    valid = jnp.zeros((num_probes,), bool).at[:count].set(found[:count])
    valid = valid & (jnp.arange(num_probes, dtype=jnp.int32) < dimension)
    rows = jnp.zeros((num_probes, size), dtype).at[:count].set(columns.T[:count])
    return jnp.where(valid[:, None], rows, 0), dimension


@eqx.filter_jit
def _start(starts: Array, level: Array, dimension: Array, depth: int, shift: Array) -> _ProbeState:
    num_probes, dtype = starts.shape[0], starts.dtype
    norms = jnp.linalg.norm(starts, axis=1)
    valid = norms > 0
    zeros = jnp.zeros((num_probes, depth), dtype)
    steps = jnp.zeros((), jnp.int32)
    # Copies, because the state is updated in place and the caller keeps theirs.
    level, dimension, shift = jnp.copy(level), jnp.copy(dimension), jnp.copy(shift)
    return _ProbeState(
        probes=Probes(zeros, jnp.copy(zeros), valid, level, dimension, steps),
        current=starts / jnp.where(valid, norms, 1)[:, None],
        previous=jnp.zeros_like(starts),
        steps=jnp.copy(steps),
        shift=shift,
        form=jnp.zeros((), dtype),
        change=jnp.asarray(jnp.inf, dtype),
    )


def _probe_step(operator: SPDOperator, frame: Frame, state: _ProbeState) -> _ProbeState:
    probes, index = state.probes, state.steps
    product = operator.block_mv(state.current)
    before = jnp.where(index > 0, probes.beta[:, jnp.maximum(index - 1, 0)], 0)
    alpha = jnp.sum(product * state.current, axis=1)
    scale = jnp.max(jnp.abs(product), axis=1)
    product = product - before[:, None] * state.previous - alpha[:, None] * state.current
    # Re-projection at every step keeps the run inside the complement (pslq.md, section 5.1).
    product = frame.project(product)
    # What one projection leaves is a few eps of the product; a second one is needed where little
    # of the product is left, or that would be amplified.
    product = jax.lax.cond(
        jnp.any(jnp.max(jnp.abs(product), axis=1) < 1e-2 * scale),
        lambda block: frame.project(block),
        lambda block: block,
        product,
    )
    largest = jnp.max(jnp.abs(product), axis=1)
    safe = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    beta = safe * jnp.sqrt(jnp.sum((product / safe[:, None]) ** 2, axis=1))
    # A residual at rounding level ends the probe; NaN must not look like one. Products are right to
    # a few eps ||A||, however small A is on the complement.
    size = jnp.maximum(jnp.abs(alpha) + before + scale, frame.norm)
    exhausted = beta <= 10 * jnp.finfo(beta.dtype).eps * size
    beta = jnp.where(exhausted, 0, beta)
    following = product / jnp.where(exhausted, 1, beta)[:, None]
    probes = dataclasses.replace(
        probes,
        alpha=jax.lax.dynamic_update_index_in_dim(probes.alpha, alpha, index, axis=1),
        beta=jax.lax.dynamic_update_index_in_dim(probes.beta, beta, index, axis=1),
    )
    state = dataclasses.replace(
        state,
        probes=probes,
        current=jnp.where(exhausted[:, None], 0, following),
        previous=state.current,
        steps=index + 1,
    )
    forms = state.closed().inverse_forms(state.shift, frame.unit)
    form = jnp.sum(jnp.where(probes.valid, forms, 0))
    change = jnp.abs(form - state.form) / jnp.where(form == 0, 1, jnp.abs(form))
    return dataclasses.replace(state, form=form, change=change)


@eqx.filter_jit
def _advance(operator: SPDOperator, frame: Frame, state: _ProbeState, tolerance: float) -> Probes:
    state = jax.lax.while_loop(
        lambda state: (state.steps < state.probes.depth) & ~(state.change < tolerance),
        lambda state: _probe_step(operator, frame, state),
        state,
    )
    return state.closed()


def _advance_once(operator: SPDOperator, frame: Frame, state: _ProbeState) -> _ProbeState:
    fixed = multiplied(operator, state.current), frame
    previous, current, probes, rest = jax.block_until_ready(_in_place(fixed, state))
    return _ProbeState(probes, current, previous, *rest)


@eqx.filter_jit(donate="all-except-first")
def _in_place(
    fixed: tuple[SPDOperator, Frame], state: _ProbeState
) -> tuple[Array, Array, Probes, tuple[Array, ...]]:
    """A step that takes no memory for its result.

    Results get the memory of the arguments of their shape, in order. `previous` comes first, so
    that the rows which were the current ones stay where they are.
    """
    state = _probe_step(*fixed, state)
    rest = (state.steps, state.shift, state.form, state.change)
    return state.previous, state.current, state.probes, rest
