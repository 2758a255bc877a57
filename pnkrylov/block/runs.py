"""A block run and its price, its look-ahead, and the level that it supports."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pnkrylov._structure import VectorStructure
from pnkrylov.block.basis import BlockKrylovBasis, block_step, pad_blocks
from pnkrylov.block.krylov import HostBlockRun
from pnkrylov.block.lookahead import BlockIncrements, block_lookahead_error
from pnkrylov.block.tridiagonal import BlockTridiagonal
from pnkrylov.checkpoints import Checkpoint
from pnkrylov.interruption import Interruptible
from pnkrylov.krylov import is_concrete
from pnkrylov.operators import SPDOperator, symmetry_tolerance
from pnkrylov.probes import Probes
from pnkrylov.results import RESULTS
from pnkrylov.runs import first_failure, raise_failure

# The look-ahead is judged after every so many steps.
_CHUNK = 10


class BlockRun(eqx.Module):
    """One block run; beliefs are views of it.

    Attributes:
        basis: the basis, look-ahead included, of the unshifted operator.
        level: m, in blocks, where the look-ahead begins.
        asymmetry: what the symmetry probe measured, or -1.
        num_matvecs: all products that were spent, k for each step.
        structure: one of the user's vectors.
        probes: random probes of the complement at level m, or None.
    """

    basis: BlockKrylovBasis
    level: Int[Array, ""]
    asymmetry: Float[Array, ""]
    num_matvecs: Int[Array, ""]
    structure: VectorStructure = eqx.field(static=True)
    probes: Probes | None = None

    def tridiagonal(self, shift: Float[Array, ""]) -> BlockTridiagonal:
        """The factored T, shifted."""
        return BlockTridiagonal.of(self.basis, shift)

    def result(
        self,
        shift: Float[Array, ""],
        lower_bound: Float[Array, ""] | None,
        ritz_range: Float[Array, "2"],
    ) -> RESULTS:
        """The result code: the first thing that is wrong, in the order of cause and effect."""
        basis = self.basis
        return first_failure(
            given=jnp.all(jnp.isfinite(basis.start_norms)),
            finite=jnp.all(jnp.isfinite(basis.diagonal)) & jnp.all(jnp.isfinite(basis.coupling)),
            symmetric=~(self.asymmetry > symmetry_tolerance(self.structure)),
            nothing=basis.filled == 0,
            ritz_range=ritz_range,
            lower_bound=None if lower_bound is None else lower_bound + shift,
        )

    def raise_unless(self, result: RESULTS, shift: Array, lower_bound: Array | None) -> None:
        """Raises the error of a failed run, with the measured value (concrete values only)."""
        if bool(result == RESULTS.successful):
            return
        values = self.tridiagonal(shift).eigenvalues()
        smallest = float(values[0])
        if self.probes is not None:
            smallest = min(smallest, float(self.probes.ritz_range(shift, jnp.ones_like(shift))[0]))
        raise_failure(
            result,
            given="A right-hand side" if self.probes is None else "The mean",
            asymmetry=self.asymmetry,
            structure=self.structure,
            ritz_range=(smallest, float(values[-1])),
            lower_bound=lower_bound,
            shift=shift,
        )


def block_look_ahead(
    operator: SPDOperator,
    basis: BlockKrylovBasis,
    level: Int[Array, ""],
    limit: int,
    shift: Float[Array, ""],
    lower_bound: Float[Array, ""] | None,
    keeper: Checkpoint | None = None,
) -> tuple[BlockKrylovBasis, Int[Array, ""]]:
    """Continues a run until the errors of level m are seen, of every right-hand side.

    Args:
        operator: A, unshifted.
        basis: the run so far, without room, at least `level` blocks.
        level: m.
        limit: most steps to take.
        shift: alpha.
        lower_bound: a lower bound of the spectrum, unshifted, or None.
        keeper: the checkpoint of a run on the host, or None.

    Returns:
        The longer basis, with room for at most `limit` more blocks, and the steps taken.
    """
    if limit == 0:
        return basis, jnp.zeros((), jnp.int32)
    # Ten steps are taken in any case, without room for more: that room would cost every
    # Gram-Schmidt pass as much as vectors.
    first, bounds, begin = min(limit, _CHUNK), (shift, lower_bound), basis.num_blocks
    host = basis.driver == "host"
    basis = pad_blocks(basis, begin + first)
    if host:
        basis, taken = _on_host(operator, basis, begin, level, None, keeper)
    else:
        basis, taken = _unjudged(operator, basis, begin)
    begin = basis.num_blocks
    if limit == first:
        return basis, taken
    # Fewer steps than wanted: the space is exhausted, or the run was interrupted.
    enough = (taken < first) | seen_enough(basis, level, *bounds)
    if is_concrete(enough) and bool(enough):
        return basis, taken
    basis = pad_blocks(basis, begin + limit - first)
    if host:
        basis, more = _on_host(operator, basis, begin, level, bounds, keeper)
    else:
        basis, more = _judged(operator, basis, begin, level, bounds, enough)
    return basis, taken + more


def block_look_ahead_or_choose(
    operator: SPDOperator,
    basis: BlockKrylovBasis,
    limit: int | None,
    shift: Float[Array, ""],
    lower_bound: Float[Array, ""] | None,
    keeper: Checkpoint | None,
) -> tuple[BlockKrylovBasis, Int[Array, ""], int | Int[Array, ""]]:
    """A run without room, after at most `limit` steps that look ahead (None: not one).

    Returns:
        The run, the level whose means are to be reported, and the block steps taken in all.
    """
    done = basis.num_blocks
    if limit is None:
        return basis, best_block_level(basis, shift, lower_bound), done
    level = jnp.asarray(done, jnp.int32)
    basis, ahead = block_look_ahead(operator, basis, level, limit, shift, lower_bound, keeper)
    if basis.driver == "host" and int(ahead) < min(limit, _CHUNK):
        # Interrupted before it saw anything, unless nothing was left to see.
        best = best_block_level(basis, shift, lower_bound)
        level = jnp.where(basis.exhausted(), level, best)
    return basis, level, done + ahead


def _on_host(
    operator: SPDOperator,
    basis: BlockKrylovBasis,
    begin: int,
    level: Array,
    bounds: tuple[Array, Array | None] | None,
    keeper: Checkpoint | None,
) -> tuple[BlockKrylovBasis, Int[Array, ""]]:
    """Steps after the first `begin` ones; with bounds, judged after every ten."""
    limit = basis.num_blocks
    run = HostBlockRun(operator, basis, begin, limit, keeper)
    with Interruptible() as interrupt:
        while run.done < limit and not interrupt.requested:
            if bool(run.basis.exhausted()):
                break
            due = run.done > begin and (run.done - begin) % _CHUNK == 0
            if bounds is not None and due and bool(seen_enough(run.basis, level, *bounds)):
                break
            run.take()
    run.save()
    return run.basis, jnp.asarray(run.done - begin, jnp.int32)


@eqx.filter_jit
def _unjudged(
    operator: SPDOperator, basis: BlockKrylovBasis, begin: int
) -> tuple[BlockKrylovBasis, Int[Array, ""]]:
    end = jnp.asarray(basis.num_blocks, jnp.int32)
    basis, position = _fill(operator, basis, jnp.asarray(begin, jnp.int32), end)
    return basis, position - begin


def _fill(
    operator: SPDOperator, basis: BlockKrylovBasis, position: Array, end: Array
) -> tuple[BlockKrylovBasis, Array]:
    """Steps to `end`, or until the space is exhausted."""
    return jax.lax.while_loop(
        lambda state: (state[1] < end) & ~state[0].exhausted(),
        lambda state: (block_step(operator, state[0], state[1]), state[1] + 1),
        (basis, position),
    )


@eqx.filter_jit
def _judged(
    operator: SPDOperator,
    basis: BlockKrylovBasis,
    begin: int,
    level: Array,
    bounds: tuple[Array, Array | None],
    enough: Array,
) -> tuple[BlockKrylovBasis, Int[Array, ""]]:
    end = basis.num_blocks

    def unfinished(state):
        basis, position, enough = state
        return (position < end) & ~basis.exhausted() & ~enough

    def chunk(state):
        basis, position, _ = state
        basis, position = _fill(operator, basis, position, jnp.minimum(position + _CHUNK, end))
        return basis, position, seen_enough(basis, level, *bounds)

    start = (basis, jnp.asarray(begin, jnp.int32), enough)
    basis, position, _ = jax.lax.while_loop(unfinished, chunk, start)
    return basis, position - begin


@eqx.filter_jit
def seen_enough(
    basis: BlockKrylovBasis, level: Array, shift: Array, lower_bound: Array | None
) -> Array:
    """Whether the blocks after level m show enough of every error; ten blocks at least."""
    tridiagonal = BlockTridiagonal.of(basis, shift)
    increments = BlockIncrements.of(tridiagonal, basis.start_coordinates)
    bound = None if lower_bound is None else lower_bound + shift
    error = block_lookahead_error(tridiagonal, increments, level, tridiagonal.ritz_range(), bound)
    return (basis.filled >= level + _CHUNK) & jnp.all(error.sufficient())


@eqx.filter_jit
def best_block_level(
    basis: BlockKrylovBasis, shift: Float[Array, ""], lower_bound: Float[Array, ""] | None
) -> Int[Array, ""]:
    """The last level whose errors the remaining blocks have seen; else half of the blocks."""
    tridiagonal = BlockTridiagonal.of(basis, shift)
    increments = BlockIncrements.of(tridiagonal, basis.start_coordinates)
    ritz_range = tridiagonal.ritz_range()
    bound = None if lower_bound is None else lower_bound + shift

    def sufficient(level):
        error = block_lookahead_error(tridiagonal, increments, level, ritz_range, bound)
        return jnp.all(error.sufficient())

    levels = tridiagonal.blocks() + 1
    # Ten steps must follow, as in an adaptive look-ahead, unless there is nothing left to see.
    enough = jax.vmap(sufficient)(levels) & (levels + _CHUNK <= basis.filled)
    best = jnp.max(jnp.where(enough, levels, 0))
    best = jnp.where(best > 0, best, jnp.maximum(basis.filled // 2, 1))
    return jnp.where(basis.exhausted(), basis.filled, best)


def replaced(run: BlockRun, basis: BlockKrylovBasis, level: Array, spent: Array) -> BlockRun:
    """The run after `spent` more products."""
    return dataclasses.replace(run, basis=basis, level=level, num_matvecs=run.num_matvecs + spent)
