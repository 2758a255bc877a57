"""P-SLQ over the complement of a block run: traces and log-determinants beyond m blocks.

What couples the resolved blocks to the rest is exact, by the look-ahead; random probes, which avoid
the k vectors of block m + 1, measure what is left. With Y = T_perp^-1 and `P_j = E_1^T S^-j E_1`,
Woodbury's formula on `S = T_perp - E_1 Gamma E_1^T` gives

    E_1^T Y E_1 = P_1 (I + Gamma P_1)^-1,    tr S^-1 - tr Y = tr((I + Gamma P_1)^-1 Gamma P_2),
    log det S = log det T_perp - log det(I + Gamma P_1).

Source: METHOD.md sections 2, 4 and 14.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pnkrylov.block.coupling import BlockCoupling
from pnkrylov.block.runs import BlockRun
from pnkrylov.block.tridiagonal import BlockTridiagonal
from pnkrylov.probes import Probes
from pnkrylov.pslq import Complement

_HIGHEST = jax.lax.Precision.HIGHEST


def block_complement(
    tridiagonal: BlockTridiagonal,
    coupling: BlockCoupling,
    probes: Probes,
    shift: Float[Array, ""],
    rank: Int[Array, ""],
    ends: Float[Array, "2"],
) -> Complement:
    """The trace of `S^-1`, in units of 1/unit.

    Args:
        tridiagonal: the run.
        coupling: at level m.
        probes: random probes at that level.
        shift: alpha.
        rank: d less the vectors of the first m blocks.
        ends: extreme Ritz values of S in the look-ahead, unscaled.
    """
    forms = probes.inverse_forms(shift, tridiagonal.unit)
    trace, error = probes.mean(forms)
    share = _share(coupling, probes, rank)
    opened = _opened(coupling)
    known = jnp.trace(jnp.linalg.solve(opened, coupling.p1))
    correction = jnp.trace(jnp.linalg.solve(opened, _mul(coupling.gamma, coupling.p2)))
    ends = ends / tridiagonal.unit
    sampled = probes.ritz_range(shift, tridiagonal.unit)
    smallest = jnp.where(coupling.exists, jnp.minimum(ends[0], sampled[0]), sampled[0])
    largest = jnp.where(coupling.exists, jnp.maximum(ends[1], sampled[1]), sampled[1])
    return Complement(
        trace=share * trace + known + correction,
        standard_error=share * error,
        ritz_range=jnp.stack([smallest, largest]),
    )


def block_logdet(run: BlockRun, shift: Float[Array, ""]) -> tuple[Array, Array]:
    """`log det (A + shift I)` and its standard error."""
    assert run.probes is not None
    tridiagonal = run.tridiagonal(shift)
    level = jnp.minimum(run.level, run.basis.filled)
    coupling = BlockCoupling.of(tridiagonal, level)
    rank = run.basis.size - run.basis.num_vectors(level)
    matrices = run.probes.tridiagonals(shift, tridiagonal.unit)
    share = _share(coupling, run.probes, rank)
    trace, error = run.probes.mean(jax.vmap(_first_log)(matrices))
    # T_perp as the look-ahead sees it; what is not in it decouples as 1, whose logarithm is zero.
    rows = coupling.tail
    identity = jnp.eye(rows.shape[0], dtype=trace.dtype)
    inside = rows[:, None] & rows[None, :]
    seen = jnp.where(inside, tridiagonal.multiply(identity), identity)
    values, vectors = jnp.linalg.eigh(seen)
    first = rows & tridiagonal.head_rows(level + 1)
    known = jnp.sum(jnp.where(first[:, None], vectors, 0) ** 2 * jnp.log(values)[None, :])
    value = tridiagonal.logdet(tridiagonal.head_rows(level))
    value = value + share * trace + known + rank.astype(trace.dtype) * jnp.log(tridiagonal.unit)
    return value - jnp.linalg.slogdet(_opened(coupling))[1], share * error


def _share(coupling: BlockCoupling, probes: Probes, rank: Array) -> Array:
    """By how much the probes' trace grows where nothing is known of the block that they avoid."""
    directions = jnp.maximum(probes.dimension, 1).astype(probes.alpha.dtype)
    return jnp.where(coupling.exists, 1, rank.astype(probes.alpha.dtype) / directions)


def _opened(coupling: BlockCoupling) -> Array:
    """`I + Gamma P_1`."""
    identity = jnp.eye(coupling.gamma.shape[0], dtype=coupling.gamma.dtype)
    return identity + _mul(coupling.gamma, coupling.p1)


def _first_log(matrix: Array) -> Array:
    values, vectors = jnp.linalg.eigh(matrix)
    return jnp.sum(vectors[0] ** 2 * jnp.log(values))


def _mul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_HIGHEST)
