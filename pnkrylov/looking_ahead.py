"""The steps of a run that look ahead: taken until the error of a level is seen."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from pnkrylov.basis import KrylovBasis, laid_out, pad, row_layout, step
from pnkrylov.checkpoints import Checkpoint
from pnkrylov.interruption import Interruptible
from pnkrylov.krylov import host_step
from pnkrylov.lookahead import lookahead_error
from pnkrylov.operators import SPDOperator
from pnkrylov.tridiagonal import Tridiagonal

# The look-ahead is judged after every so many steps.
_CHUNK = 10


def look_ahead(
    operator: SPDOperator,
    basis: KrylovBasis,
    level: Int[Array, ""],
    limit: int,
    shift: Float[Array, ""],
    lower_bound: Float[Array, ""] | None,
    *,
    done: int | None = None,
    keeper: Checkpoint | None = None,
) -> tuple[KrylovBasis, Int[Array, ""]]:
    """Continues a run until the error of level m is seen.

    Args:
        operator: A, unshifted.
        basis: the run so far, at least `level` steps. If it has room for `limit` more, it is used
            up by the host driver, else copied.
        level: m.
        limit: most steps to take.
        shift: alpha.
        lower_bound: a lower bound of the spectrum, unshifted, or None.
        done: steps of the run so far; every row by default.
        keeper: the checkpoint of a run on the host, or None.

    Returns:
        The longer basis, with room for `limit` more rows, and the number of steps taken.
    """
    begin = basis.num_rows if done is None else done
    if limit == 0:
        return basis, jnp.zeros((), jnp.int32)
    if basis.num_rows < begin + limit:
        basis = pad(basis, begin + limit)
    layout = row_layout(basis.next_vector)
    if basis.driver != "host":
        return _look_ahead_compiled(
            operator, basis, level, begin, limit, shift, lower_bound, layout
        )
    taken = 0

    def take(basis, index):
        return host_step(operator, basis, index, layout)

    if keeper is not None:
        basis, reached = keeper.restore(basis, begin, begin + limit, take)
        taken = reached - begin
    with Interruptible() as interrupt:
        while taken < limit and not interrupt.requested and bool(basis.residual_norm() > 0):
            judged = taken > 0 and taken % _CHUNK == 0
            if judged and bool(seen_enough(basis, level, shift, lower_bound)):
                break
            basis = jax.block_until_ready(take(basis, jnp.asarray(begin + taken, jnp.int32)))
            taken += 1
            if keeper is not None and keeper.due():
                keeper.save(basis, begin + taken)
    if keeper is not None:
        keeper.save(basis, begin + taken)
    return basis, jnp.asarray(taken, jnp.int32)


def look_ahead_or_choose(
    operator: SPDOperator,
    basis: KrylovBasis,
    done: int,
    limit: int | None,
    shift: Float[Array, ""],
    lower_bound: Float[Array, ""] | None,
    keeper: Checkpoint | None,
) -> tuple[KrylovBasis, Int[Array, ""], int | Int[Array, ""]]:
    """A run of `done` steps, after at most `limit` steps that look ahead (None: not one).

    Returns:
        The run, the level whose mean is to be reported, and the steps taken in all.
    """
    if limit is None:
        return basis, best_level(basis, shift, lower_bound), done
    level = jnp.asarray(done, jnp.int32)
    basis, ahead = look_ahead(
        operator, basis, level, limit, shift, lower_bound, done=done, keeper=keeper
    )
    if basis.driver == "host" and int(ahead) < min(limit, _CHUNK):
        # Interrupted before it saw anything, unless nothing was left to see.
        level = jnp.where(basis.residual_norm() > 0, best_level(basis, shift, lower_bound), level)
    return basis, level, done + ahead


@eqx.filter_jit
def best_level(
    basis: KrylovBasis, shift: Float[Array, ""], lower_bound: Float[Array, ""] | None
) -> Int[Array, ""]:
    """The last level whose error the remaining rows have seen; else half of the rows."""
    tridiagonal = Tridiagonal.of(basis, shift)
    bound = None if lower_bound is None else lower_bound + shift
    levels = tridiagonal.rows() + 1
    errors = jax.vmap(lambda level: lookahead_error(tridiagonal, level, bound))(levels)
    # Ten steps must follow, as in an adaptive look-ahead, unless there is nothing left to see.
    exhausted = basis.residual_norm() == 0
    enough = errors.sufficient() & (levels + 10 <= basis.filled)
    best = jnp.max(jnp.where(enough, levels, 0))
    best = jnp.where(best > 0, best, jnp.maximum(basis.filled // 2, 1))
    return jnp.where(exhausted, basis.filled, best)


@eqx.filter_jit
def seen_enough(basis: KrylovBasis, level: Array, shift: Array, lower_bound: Array | None) -> Array:
    """Whether the rows after level m show enough of its error; ten at least."""
    bound = None if lower_bound is None else lower_bound + shift
    seen = lookahead_error(Tridiagonal.of(basis, shift), level, bound).sufficient()
    return (basis.filled >= level + _CHUNK) & seen


@eqx.filter_jit
def _look_ahead_compiled(
    operator: SPDOperator,
    basis: KrylovBasis,
    level: Int[Array, ""],
    begin: int,
    limit: int,
    shift: Array,
    lower_bound: Array | None,
    layout: NamedSharding | None,
) -> tuple[KrylovBasis, Int[Array, ""]]:
    end = begin + limit

    def unfinished(state):
        basis, position, enough = state
        return (position < end) & (basis.residual_norm() > 0) & ~enough

    def chunk(state):
        basis, position, _ = state
        stop = jnp.minimum(position + _CHUNK, end)
        basis = jax.lax.fori_loop(
            position, stop, lambda index, basis: step(operator, basis, index), basis
        )
        basis = laid_out(basis, layout)
        return basis, stop, seen_enough(basis, level, shift, lower_bound)

    start = (basis, jnp.asarray(begin, jnp.int32), jnp.zeros((), bool))
    basis, position, _ = jax.lax.while_loop(unfinished, chunk, start)
    return basis, position - begin
