"""From a block run to the numbers of a belief; no product with the operator is spent here."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pnkrylov.block.coupling import BlockCoupling
from pnkrylov.block.covariance import BlockCovariance
from pnkrylov.block.lookahead import BlockIncrements, block_lookahead_error, seen_products
from pnkrylov.block.runs import BlockRun
from pnkrylov.block.tridiagonal import BlockTridiagonal
from pnkrylov.calibration import Bulk
from pnkrylov.krylov import safe_norm
from pnkrylov.lookahead import LookaheadError
from pnkrylov.results import RESULTS
from pnkrylov.stats import SolveStats, Stats

_HIGHEST = jax.lax.Precision.HIGHEST


class CalibratedBlock(eqx.Module):
    """What a block run says: `vec(X) ~ N(vec(mean), rhs_covariance kron covariance)`."""

    mean: Float[Array, "k d"]
    covariance: BlockCovariance
    rhs_covariance: Float[Array, "k k"]
    result: RESULTS
    stats: Stats
    error: SolveStats


@eqx.filter_jit
def calibrate_block(
    run: BlockRun, shift: Float[Array, ""], lower_bound: Float[Array, ""] | None
) -> CalibratedBlock:
    """Means, covariance `N kron Sigma_perp` and predicted errors of a block solve belief.

    The errors are exactly `E = (Q_perp - Q_par P_1) C`, C the residual in the next block. N has the
    diagonal that the look-ahead predicts, `||e_j||^2 / tr Sigma_perp`, and the correlations of the
    part of the errors that it saw.

    Source:
        METHOD.md sections 5 and 14.
    """
    basis, tridiagonal = run.basis, run.tridiagonal(shift)
    unit, level = tridiagonal.unit, jnp.minimum(run.level, run.basis.filled)
    # Of T and of the Schur complement, side by side: one program to compile.
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), tridiagonal, tridiagonal.tail(level))
    ritz_range, complement_range = jax.vmap(BlockTridiagonal.ritz_range)(both)
    increments = BlockIncrements.of(tridiagonal, basis.start_coordinates)
    head = tridiagonal.head_rows(level)
    early = jnp.where(head[:, None], increments.half, 0)
    solution = tridiagonal.half_solve_transposed(early) * (basis.start_norms / unit)[None, :]
    mean = jnp.matmul(solution.T, basis.vectors, precision=_HIGHEST)

    bound = None if lower_bound is None else lower_bound + shift
    error = block_lookahead_error(tridiagonal, increments, level, ritz_range, bound)
    coupling = BlockCoupling.of(tridiagonal, level)
    rank = basis.size - basis.num_vectors(level)
    bulk = Bulk(
        value=_bulk(error, coupling, rank, unit, basis.start_norms, ritz_range),
        standard_error=jnp.asarray(jnp.inf, unit.dtype),
        at_floor=jnp.zeros((), bool),
        kappa=jnp.where(coupling.exists, complement_range[1] / complement_range[0], 1),
        smallest=complement_range[0] / unit,
    )
    covariance = BlockCovariance.of(
        basis, tridiagonal, coupling, bulk.value, run.structure, resolved=False
    )
    products = seen_products(tridiagonal, increments, level)
    rounding = _rounding_errors(mean, ritz_range)
    rhs_covariance, stats = _scale(
        basis.start_norms, error, products, rounding, covariance.trace(), unit, rank
    )
    return CalibratedBlock(
        mean=mean,
        covariance=covariance,
        rhs_covariance=rhs_covariance,
        result=run.result(shift, lower_bound, ritz_range),
        stats=block_stats(run, unit, coupling, bulk, basis.num_vectors(level), ritz_range),
        error=stats,
    )


def _bulk(
    error: LookaheadError,
    coupling: BlockCoupling,
    rank: Array,
    unit: Array,
    norms: Array,
    ritz_range: Array,
) -> Array:
    """omega in units of 1/unit: the errors themselves measure the trace of the remainder.

    The exact remainder has `||e||_2^2 / tr Sigma_perp = ||e||_A^2 / (d - m)` for every column;
    columns count alike, whatever their length.
    """
    counted = (norms > 0) & (error.energy_norm > 0)
    ratios = jnp.where(counted, error.norm / jnp.where(counted, error.energy_norm, 1), 0)
    number = jnp.maximum(jnp.sum(counted.astype(ratios.dtype)), 1)
    trace = rank.astype(ratios.dtype) * jnp.sum(ratios**2) / number
    dimension = rank - coupling.num_axes()
    value = (trace - coupling.trace()) / jnp.maximum(dimension, 1).astype(ratios.dtype)
    return jnp.where(dimension > 0, jnp.maximum(value, unit / ritz_range[1]), 0)


def _rounding_errors(mean: Array, ritz_range: Array) -> Array:
    """What rounding leaves of the error of a converged mean, about: `eps kappa ||mean|| / 10`."""
    eps, tiny = jnp.finfo(mean.dtype).eps, jnp.finfo(mean.dtype).tiny
    condition = ritz_range[1] / jnp.maximum(ritz_range[0], tiny)
    return 0.1 * eps * condition * jax.vmap(safe_norm)(mean)


def _scale(
    norms: Array,
    error: LookaheadError,
    products: Array,
    rounding: Array,
    trace: Array,
    unit: Array,
    rank: Array,
) -> tuple[Array, SolveStats]:
    """N, and the predicted errors per right-hand side."""
    lengths = jnp.sqrt(jnp.diagonal(products))
    safe = jnp.where(lengths > 0, lengths, 1)
    correlations = products / (safe[:, None] * safe[None, :])
    predicted = norms * error.norm / unit
    products = correlations * predicted[:, None] * predicted[None, :]
    # A diagonal of exactly what is predicted, also where nothing was seen.
    own = jnp.diag(predicted**2 - jnp.diagonal(products) + rounding**2)
    known = trace > 0
    rhs_covariance = jnp.where(known, (products + own) / jnp.where(known, trace, 1), 0)
    energy = norms * error.energy_norm / jnp.sqrt(unit)
    return rhs_covariance, SolveStats(
        error_norm=jnp.hypot(predicted, rounding),
        energy_norm=energy,
        error_norm_upper=norms * error.norm_upper / unit,
        seen=error.seen(),
        sufficient=error.sufficient(),
        scale=jnp.diagonal(rhs_covariance),
        energy_scale=energy**2 / jnp.maximum(rank, 1).astype(energy.dtype),
    )


def block_stats(
    run: BlockRun,
    unit: Array,
    coupling: BlockCoupling,
    bulk: Bulk,
    resolved: Array,
    ritz_range: Array,
) -> Stats:
    """What a block run spent and learnt; `resolved` counts vectors."""
    basis, probes, zero = run.basis, run.probes, jnp.zeros((), jnp.int32)
    return Stats(
        num_matvecs=run.num_matvecs,
        num_steps=resolved,
        lookahead=basis.num_vectors() - resolved,
        num_probes=zero if probes is None else jnp.sum(probes.valid, dtype=jnp.int32),
        probe_depth=zero if probes is None else probes.steps,
        ritz_min=ritz_range[0],
        ritz_max=ritz_range[1],
        residual_norm=basis.residual_norm(),
        kappa_s=bulk.kappa,
        coupling_norm=jnp.where(coupling.exists, coupling.norm() / unit, 0),
        bulk_variance=bulk.value / unit,
        bulk_standard_error=bulk.standard_error / unit,
        bulk_at_floor=bulk.at_floor,
        asymmetry=run.asymmetry,
        driver=basis.driver,
    )
