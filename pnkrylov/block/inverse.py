"""A belief about `A^-1` from a block run: `inverse_block`, which `inverse(block_size=k)` calls."""

import os
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._doors import require_key
from pnkrylov._structure import describe
from pnkrylov.block.calibration import block_stats
from pnkrylov.block.complement import block_complement, block_logdet
from pnkrylov.block.coupling import BlockCoupling
from pnkrylov.block.covariance import BlockCovariance
from pnkrylov.block.krylov import begin_block_run, continue_block_run
from pnkrylov.block.runs import BlockRun
from pnkrylov.block.tridiagonal import BlockTridiagonal
from pnkrylov.budgets import check_positive_counts, main_steps, split_budget
from pnkrylov.calibration import Bulk, widened
from pnkrylov.errors import NotFiniteError
from pnkrylov.estimate import Estimate
from pnkrylov.gaussian import GaussianBelief
from pnkrylov.krylov import Driver, is_concrete
from pnkrylov.operators import SPDOperator, as_operator, check_vector
from pnkrylov.probes import probe_tolerance, run_probes
from pnkrylov.results import RESULTS
from pnkrylov.runs import finish, probe_symmetry, scalar
from pnkrylov.stats import Stats, describe_run, number
from pnkrylov.traces.bracket import change_of_mean

Layout = Literal["resolve-all", "paper"]


class BlockInverseBelief(GaussianBelief):
    """What a block run knows about `A^-1`: draws are from N(mean, Sigma), Sigma close to A^-1.

    Attributes:
        mean_flat: centre of the draws, zero unless it was given.
        covariance: Sigma_m with a coupling of rank 2 k, a lineax operator.
        result: result code.
        stats: what the run spent and learnt; steps are counted in vectors.
        run: the run; other beliefs can be made of it without a product.
        alpha: the shift: the belief is about `(A + alpha I)^-1`.
        layout: `"resolve-all"` or `"paper"`.
    """

    mean_flat: Float[Array, " d"]
    covariance: BlockCovariance
    result: RESULTS
    stats: Stats
    run: BlockRun
    alpha: Float[Array, ""]
    layout: Layout = eqx.field(static=True)

    def shift(self, alpha: float | Float[Array, ""]) -> "BlockInverseBelief":
        """The belief about `(A + alpha I)^-1` from the same run; no product is spent.

        Args:
            alpha: replaces the current shift; `A + alpha I` must be positive definite.

        Raises:
            NotPositiveDefiniteError: it is not, by a Ritz value.

        Source:
            METHOD.md section 12.
        """
        alpha = scalar(alpha, "alpha", self.mean_flat.dtype)
        belief = block_inverse_belief(self.run, self.mean_flat, alpha, self.layout)
        return finish(belief, throw=True)

    def matvec(self, v: PyTree) -> Estimate:
        """`Sigma v`, and per entry the standard error that comes from the bulk variance."""
        self.structure.check(v, "v", expected_by="the belief")
        flat = self.structure.ravel(v)
        share = jnp.abs(self.covariance.unexplored(flat))
        return self._estimate(self.covariance.mv(flat), share)

    def diagonal(self) -> Estimate:
        """The diagonal of A^-1 (marginal variances), and its standard error."""
        return self._estimate(self.covariance.diagonal(), self.covariance.unexplored_diagonal())

    def trace(self) -> Estimate:
        """`tr A^-1`, its standard error and the bracket of its quadrature bias, by P-SLQ.

        Gauss quadrature bounds the trace from below; from above it is extrapolated.
        """
        dimension = self.covariance.bulk_dimension().astype(self.mean_flat.dtype)
        error = jnp.where(dimension > 0, dimension * self.stats.bulk_standard_error, 0)
        value = self.covariance.trace()
        change = _change(self.run, self.alpha, "inverse")
        return Estimate(
            value, error, self.stats.num_matvecs, value, value + change, bracket="estimated"
        )

    def logdet(self) -> Estimate:
        """`log det A`, its standard error and the bracket of its bias, from the same probes.

        Gauss quadrature bounds the logarithm from above; from below it is extrapolated.

        Source:
            METHOD.md sections 2 and 14.
        """
        value, error = _logdet(self.run, self.alpha)
        change = _change(self.run, self.alpha, "log")
        return Estimate(
            value, error, self.stats.num_matvecs, value + change, value, bracket="estimated"
        )

    def save(self, path: str | os.PathLike) -> None:
        """Refused: a block belief cannot be saved yet.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"A belief of a block run cannot be saved, so nothing was written to {path}: save one "
            "of inverse(block_size=1), or draws of this one."
        )

    def _estimate(self, value: Array, share: Array) -> Estimate:
        error = self.stats.bulk_standard_error * share
        return Estimate(
            self.structure.unravel(value), self.structure.unravel(error), self.stats.num_matvecs
        )

    def __str__(self) -> str:
        trace_of = BlockInverseBelief.trace
        for _ in range(self.mean_flat.ndim - 1):
            trace_of = eqx.filter_vmap(trace_of)
        trace, stats = trace_of(self), self.stats
        lines = [
            f"BlockInverseBelief about A^-1, d = {self.structure.size}, {self.structure.dtype}, "
            f"blocks of {self.run.basis.block_size}, layout {self.layout!r}",
            f"  trace     tr A^-1 = {number(trace.value)} +- {number(trace.standard_error)}",
            f"  bulk      omega = {number(stats.bulk_variance)} "
            f"+- {number(stats.bulk_standard_error)}, ||c|| = {number(stats.coupling_norm)}",
            *describe_run(stats),
        ]
        return "\n".join(lines + [f"  warning   {note}" for note in stats.warnings])


def inverse_block(
    A: Any,
    *,
    block_size: int,
    key: PRNGKeyArray | None = None,
    like: PyTree | None = None,
    mean: PyTree | None = None,
    num_steps: int | None = None,
    budget: int | None = None,
    lookahead: int = 20,
    num_probes: int = 8,
    probe_depth: int = 20,
    layout: Layout = "resolve-all",
    shift: float | Float[Array, ""] = 0.0,
    start: PyTree | None = None,
    check_symmetric: bool = True,
    driver: Driver = "auto",
    progress: bool = False,
    throw: bool = True,
) -> BlockInverseBelief:
    """A Gaussian with covariance close to `(A + shift I)^-1`, from a block run and probes.

    For operators whose product with k vectors costs little more than with one. At equal products a
    single run knows the ends of the spectrum better; a block run takes less time for them.

    Args:
        A: symmetric positive definite (positive semi-definite if `shift` makes up for it).
        block_size: k, start vectors, 1 to d.
        key: random key, for random start vectors, the symmetry check and the probes.
        like: example of a vector, needed for callables only (`mean` serves as well).
        mean: centre of the draws, zero by default.
        num_steps: m, block steps of the main run, each k products; by default as many as make 100
            vectors, or fill the space.
        budget: all products to spend, instead of the sizes; not under `jit`.
        lookahead: l, further block steps that show the coupling at level m.
        num_probes: N, random probes for the trace of the complement.
        probe_depth: most steps of each probe; they stop when their quadrature has converged.
        layout: `"resolve-all"` resolves all m + l blocks and spreads the rest isotropically;
            `"paper"` resolves m and keeps the exact coupling at level m.
        shift: alpha such that `A + alpha I` is positive definite; costs nothing.
        start: start vectors as rows, `(k, d)` or a vector's pytree with a leading axis of length
            k; random normal by default. Directions in which A^-1 is wanted make the belief close
            there first (for predictions: principal directions of Jacobian rows).
        check_symmetric: spend two products on checking that A is symmetric.
        driver: `"auto"`, `"compiled"` or `"host"` (see `block_lanczos`).
        progress: show progress bars (host driver).
        throw: raise on failure; with False the belief carries `result` and NaN instead.

    Returns:
        A `BlockInverseBelief`.

    Raises:
        TypeError, ValueError: wrong shapes, dtypes or sizes; a missing key.
        PnkrylovError: NaN or infinity, a non-symmetric or indefinite operator.

    Source:
        METHOD.md sections 3, 4 and 14.
    """
    operator = as_operator(A, like=like if like is not None else mean)
    key = require_key(key)
    size, dtype = operator.size, operator.dtype
    if layout not in ("resolve-all", "paper"):
        raise ValueError(f"layout={layout!r} is unknown: use 'resolve-all' or 'paper'.")
    check_positive_counts(
        block_size=block_size, lookahead=lookahead, num_probes=num_probes, probe_depth=probe_depth
    )
    if block_size > size:
        raise ValueError(f"block_size={block_size} exceeds the size of A, {size}.")
    shift = scalar(shift, "shift", dtype)
    centre = jnp.zeros((size,), dtype) if mean is None else check_vector(operator, mean, "mean")
    num_probes, most = min(num_probes, size), -(-size // block_size)
    start_key, symmetry_key, probe_key = jax.random.split(key, 3)
    asymmetry, checked = probe_symmetry(operator, symmetry_key, wanted=check_symmetric)
    if budget is None:
        steps = main_steps(num_steps, None, 0, default=min(-(-100 // block_size), most), size=size)
        ahead = min(lookahead, size - steps)
    else:
        total = main_steps(num_steps, budget, checked, default=most, size=None)
        if not is_concrete((operator, key)):
            raise ValueError("budget= chooses shapes from what it sees: not under jit/vmap/grad.")
        steps, num_probes, probe_depth = split_budget(total, num_probes, probe_depth, size, 1)
        if steps < block_size:
            raise ValueError(
                f"budget={budget} is too small: one block step takes {block_size} products, and "
                f"probes and checks take {budget - steps}. Pass more, or a smaller block_size."
            )
        steps, ahead = steps // block_size, 0
    if start is None:
        starts = jax.random.normal(start_key, (block_size, size), dtype)
    else:
        starts = _start_rows(operator, start, block_size)
    basis = continue_block_run(
        begin_block_run(starts), operator, steps + ahead, driver=driver, progress=progress
    )
    done = basis.num_blocks
    level = jnp.asarray(min(steps, done - min(ahead, done // 5)), jnp.int32)
    probes = run_probes(
        operator,
        basis,
        level,
        probe_key,
        num_probes,
        probe_depth,
        tolerance=probe_tolerance(num_probes, basis),
        shift=shift,
        driver=basis.driver,
        progress=progress,
    )
    spent = block_size * done + checked + num_probes * probes.steps
    # What the probes did not need goes to the run.
    left = 0 if budget is None else min((budget - int(spent)) // block_size, most - done)
    if left > 0:
        basis = continue_block_run(basis, operator, left, driver=driver, progress=progress)
        spent = spent + block_size * (basis.num_blocks - done)
    run = BlockRun(
        basis=basis,
        level=level,
        asymmetry=asymmetry,
        num_matvecs=spent,
        structure=operator.structure,
        probes=probes,
    )
    return finish(block_inverse_belief(run, centre, shift, layout), throw=throw)


def _start_rows(operator: SPDOperator, start: PyTree, block_size: int) -> Float[Array, "k d"]:
    """Start vectors of the user as flat rows."""
    for leaf in jax.tree.leaves(start):
        if jnp.shape(leaf)[:1] != (block_size,):
            raise ValueError(
                f"start is {describe(start)}: start vectors are rows, so every array needs a "
                f"leading axis of length block_size={block_size}."
            )
    one = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf)[1:], jnp.asarray(leaf).dtype), start
    )
    operator.structure.check(one, "start[0]", expected_by="the operator A")
    rows = jax.vmap(operator.structure.ravel)(jax.tree.map(jnp.asarray, start))
    if is_concrete(rows) and not bool(jnp.all(jnp.isfinite(rows))):
        raise NotFiniteError(NotFiniteError.message("start"))
    return rows


def block_inverse_belief(
    run: BlockRun, mean: Float[Array, " d"], alpha: Float[Array, ""], layout: Layout
) -> BlockInverseBelief:
    """The belief about `(A + alpha I)^-1` that a run with probes supports."""
    bare, result, stats = _calibrate(run, mean, alpha, layout)
    # What a compiled function returns is a new array: the basis would be in memory twice.
    covariance = eqx.tree_at(
        lambda c: c.vectors, bare, run.basis.vectors, is_leaf=lambda leaf: leaf is None
    )
    return BlockInverseBelief(
        mean_flat=mean,
        covariance=covariance,
        result=result,
        stats=stats,
        run=run,
        alpha=alpha,
        layout=layout,
    )


@eqx.filter_jit
def _calibrate(
    run: BlockRun, mean: Array, shift: Array, layout: Layout
) -> tuple[BlockCovariance, RESULTS, Stats]:
    """The covariance without its basis, the result code and the statistics."""
    assert run.probes is not None
    basis, tridiagonal = run.basis, run.tridiagonal(shift)
    unit, level = tridiagonal.unit, jnp.minimum(run.level, basis.filled)
    head = tridiagonal.head_rows(level)
    # Of T and of the Schur complement, side by side: one program to compile.
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), tridiagonal, tridiagonal.tail(level))
    ritz_range, ends = jax.vmap(BlockTridiagonal.ritz_range)(both)
    boundary = BlockCoupling.of(tridiagonal, level)
    rank = basis.size - basis.num_vectors(level)
    complement = block_complement(tridiagonal, boundary, run.probes, shift, rank, ends)
    if layout == "paper":
        kept = boundary
        left = complement.trace - jnp.trace(boundary.axes_covariance)
    else:
        kept = BlockCoupling.of(tridiagonal, basis.filled)
        coupled = boundary.trace() - jnp.trace(boundary.axes_covariance)
        left = tridiagonal.inverse_trace(head) + coupled + complement.trace
        left = left - tridiagonal.inverse_trace(tridiagonal.present)
    explored = basis.num_vectors() - jnp.sum(kept.tail, dtype=jnp.int32)
    dimension = basis.size - explored - kept.num_axes()
    bulk = Bulk.measured(left, complement, dimension)
    covariance = BlockCovariance.of(
        basis, tridiagonal, kept, bulk.value, run.structure, resolved=True
    )
    given = jnp.all(jnp.isfinite(mean))
    widest = widened(ritz_range, bulk, unit)
    result = run.result(shift, None, widest)
    result = RESULTS.where(given, result, RESULTS.nonfinite_input)
    stats = block_stats(run, unit, boundary, bulk, explored, ritz_range)
    return eqx.tree_at(lambda c: c.vectors, covariance, None), result, stats


_logdet = eqx.filter_jit(block_logdet)


@eqx.filter_jit
def _change(run: BlockRun, shift: Array, function: Literal["inverse", "log"]) -> Array:
    assert run.probes is not None
    return change_of_mean(run.probes, shift, run.tridiagonal(shift).unit, function)
