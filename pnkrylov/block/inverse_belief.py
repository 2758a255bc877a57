"""The belief about `A^-1` of a block run."""

import dataclasses
import os
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._archive import write
from pnkrylov._doors import KEEP_PROBES, refining_driver, same_operator
from pnkrylov.block.calibration import block_stats
from pnkrylov.block.complement import block_complement, block_logdet
from pnkrylov.block.coupling import BlockCoupling
from pnkrylov.block.covariance import BlockCovariance
from pnkrylov.block.krylov import continue_block_run
from pnkrylov.block.runs import BlockRun, replaced
from pnkrylov.block.tridiagonal import BlockTridiagonal
from pnkrylov.calibration import Bulk, widened
from pnkrylov.estimate import Estimate
from pnkrylov.gaussian import GaussianBelief
from pnkrylov.krylov import check_num_steps
from pnkrylov.probes import run_probes
from pnkrylov.results import RESULTS
from pnkrylov.runs import finish, scalar
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
            TypeError: `alpha` is no real number.
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

    def refine(
        self,
        A: Any,
        *,
        num_steps: int,
        key: PRNGKeyArray | None = None,
        progress: bool = False,
    ) -> "BlockInverseBelief":
        """More computation, less uncertainty: adds `num_steps` blocks to the run.

        As for `InverseBelief.refine`: the random probes are kept while they still know the bulk
        variance to 5 %; after that new ones are drawn in the smaller complement, if a key is given.

        Args:
            A: the operator of the belief, unshifted.
            num_steps: further block steps, at least 1.
            key: random key for new probes.
            progress: show a progress bar (host driver).

        Returns:
            The refined belief.

        Raises:
            TypeError: a count is no int, or A of another kind or dtype; the layout is the paper's,
                and `key` is missing.
            ValueError: there would be more than d blocks, A has another size, or called under
                `jit` (shapes depend on values).
        """
        operator = same_operator(A, self.run)
        if self.layout == "paper" and key is None:
            raise TypeError("key is missing: the paper's layout needs new probes at its new level.")
        run, basis = self.run, self.run.basis.trim()
        check_num_steps(num_steps, self.structure.size, taken=basis.num_blocks)
        lookahead = max(basis.num_blocks - int(run.level), 0)
        if not bool(basis.exhausted()):
            driver, before = refining_driver(progress, basis.driver), basis.num_blocks
            basis = continue_block_run(basis, operator, num_steps, driver=driver, progress=progress)
            spent = jnp.asarray(basis.block_size * (basis.num_blocks - before), jnp.int32)
            run = replaced(run, basis, run.level, spent)
        if self.layout == "resolve-all":
            belief = block_inverse_belief(run, self.mean_flat, self.alpha, self.layout)
            stats = belief.stats
            known = bool(stats.bulk_standard_error <= KEEP_PROBES * stats.bulk_variance)
            if known or key is None:
                return finish(belief, throw=True)
        assert run.probes is not None and key is not None
        level = jnp.asarray(basis.num_blocks - lookahead, jnp.int32)
        probes = run_probes(
            operator,
            basis,
            level,
            key,
            run.probes.num_probes,
            run.probes.depth,
            shift=self.alpha,
            driver=basis.driver,
            progress=progress,
        )
        run = replaced(run, basis, level, probes.num_probes * probes.steps)
        run = dataclasses.replace(run, probes=probes)
        return finish(
            block_inverse_belief(run, self.mean_flat, self.alpha, self.layout), throw=True
        )

    def save(self, path: str | os.PathLike) -> None:
        """Writes the belief to one file, for `pnkrylov.load` (see `pnkrylov.storage`)."""
        fields = {"mean_flat": self.mean_flat, "alpha": self.alpha}
        write(path, "BlockInverseBelief", self.run, fields, {"layout": self.layout})

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
