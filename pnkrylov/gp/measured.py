"""Data, a run on their kernel matrix, and the probes that measure what the run leaves unknown."""

import dataclasses
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pnkrylov._operator_types import SPDOperator
from pnkrylov.gp.data import Observations, frozen, into, out_of
from pnkrylov.gp.remainder import RowProbes, run_row_probes
from pnkrylov.probes import probe_tolerance, run_probes
from pnkrylov.results import RESULTS
from pnkrylov.runs import Run, finish
from pnkrylov.tridiagonal import Tridiagonal

_HIGHEST = jax.lax.Precision.HIGHEST
Start = Literal["data", "independent"]


class Measured(eqx.Module):
    """Everything that products were spent on; predictions and evidences are views of it.

    Attributes:
        data: the observations.
        run: the Lanczos run, with probes for the log-determinant; its level is m.
        row_probes: probes for the remainder of kernel rows.
        key: random key of the probes for the evidence's gradient.
        start: whether the run began at the targets or independently of them.
    """

    data: Observations
    run: Run
    row_probes: RowProbes
    key: PRNGKeyArray
    start: Start = eqx.field(static=True)

    def shift(self) -> Float[Array, ""]:
        """What takes the operator of the run to `W K W + s I`: zero if the noise is in it."""
        level = self.data.level()
        return level if self.run.preconditioner is None else jnp.zeros_like(level)

    def tridiagonal(self) -> Tridiagonal:
        """T at this noise level."""
        return self.run.tridiagonal(self.shift())

    def level(self) -> Int[Array, ""]:
        """m, the rows that predictions resolve."""
        return jnp.minimum(self.run.level, self.run.basis.filled)

    def into(self, rows: Float[Array, "*k n"]) -> Float[Array, "*k n"]:
        """Right-hand sides, or kernel rows, as the run sees them: `P^-1/2 W v`."""
        return into(self.data, self.run.preconditioner, rows)

    def out_of(self, rows: Float[Array, "*k n"]) -> Float[Array, "*k n"]:
        """Solutions of the run, mapped back: `W P^-1/2 v`."""
        return out_of(self.data, self.run.preconditioner, rows)

    def solution(
        self, rows: Float[Array, "k n"], tridiagonal: Tridiagonal, level: Int[Array, ""]
    ) -> Float[Array, "k m"]:
        """Coordinates of `C v` in the basis, for right-hand sides as the run sees them."""
        coordinates = jnp.matmul(rows, self.run.basis.vectors.T, precision=_HIGHEST)
        inside = tridiagonal.rows()[None, :] < level
        solution = tridiagonal.head(level).solve(jnp.where(inside, coordinates, 0).T).T
        return jnp.where(inside, solution, 0) / tridiagonal.unit

    @eqx.filter_jit
    def weights(self) -> Float[Array, "k n"]:
        """The representer weights `C (y - mean)`, one row per output."""
        rows = self.into(self.data.residuals)
        solution = self.solution(rows, self.tridiagonal(), self.level())
        return self.out_of(jnp.matmul(solution, self.run.basis.vectors, precision=_HIGHEST))


def measure(
    data: Observations,
    kernel_matrix: SPDOperator,
    operator: SPDOperator,
    run: Run,
    points: Float[Array, " N_c *p"],
    key: PRNGKeyArray,
    start: Start,
    *,
    num_probes: int,
    probe_depth: int,
    row_depth: int,
    progress: bool,
    throw: bool,
) -> Measured:
    """Adds both kinds of probes to a run, and checks the numbers.

    Args:
        data: the observations.
        kernel_matrix: `W K W`.
        operator: what the run is on.
        run: the run, without probes.
        points: where the remainder is calibrated.
        key: random key.
        start: how the run began.
        num_probes: probes for the log-determinant, and mixtures among the row probes.
        probe_depth: most steps of the former.
        row_depth: steps of the row probes.
        progress: show progress bars.
        throw: raise on failure.
    """
    trace_key, row_key, gradient_key = jax.random.split(key, 3)
    num_probes, fixed = min(num_probes, data.size), frozen(data)
    level = fixed.level()
    probes = run_probes(
        operator,
        run.basis,
        run.level,
        trace_key,
        num_probes,
        probe_depth,
        tolerance=probe_tolerance(num_probes, run.basis),
        shift=level if run.preconditioner is None else jnp.zeros_like(level),
        driver=run.basis.driver,
        progress=progress,
    )
    row_probes = run_row_probes(
        fixed,
        kernel_matrix,
        operator,
        run.preconditioner,
        run.basis,
        run.level,
        points,
        row_key,
        num_probes,
        row_depth,
    )
    spent = num_probes * (probes.steps + 1) + (num_probes + len(points)) * row_depth
    run = dataclasses.replace(run, probes=probes, num_matvecs=run.num_matvecs + spent)
    measured = Measured(data, run, row_probes, gradient_key, start)
    return checked(measured, throw=throw)


class _Check(eqx.Module):
    """What `finish` looks at."""

    run: Run
    result: RESULTS
    alpha: Float[Array, ""]


def checked(measured: Measured, *, throw: bool) -> Measured:
    """Throws for a failed run, or replaces the noise by NaN, and with it every prediction."""
    fixed = frozen(measured)
    check = finish(_Check(fixed.run, _result(fixed), fixed.shift()), throw=throw)
    measured = dataclasses.replace(measured, run=check.run)
    if throw:
        return measured
    good = check.result == RESULTS.successful
    noise = jnp.where(good, measured.data.noise, jnp.nan)
    return eqx.tree_at(lambda m: m.data.noise, measured, noise)


@eqx.filter_jit
def _result(measured: Measured) -> RESULTS:
    run, shift = measured.run, measured.shift()
    tridiagonal = measured.tridiagonal()
    ritz_range = tridiagonal.ritz_range()
    if run.probes is not None:
        sampled = run.probes.ritz_range(shift, tridiagonal.unit) * tridiagonal.unit
        ritz_range = ritz_range.at[0].min(sampled[0])
    return run.result(measured.data.residuals.reshape(-1), shift, None, ritz_range)
