"""The two beliefs: about `A^-1 v` (SolveBelief) and about `A^-1` itself (InverseBelief)."""

import dataclasses
import os
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._archive import write
from pnkrylov._arguments import check_counts
from pnkrylov._doors import KEEP_PROBES, refining_driver, require_plain, same_operator
from pnkrylov.calibration import (
    calibrate_inverse,
    calibrate_logdet,
    calibrate_solve,
    calibrate_trace,
)
from pnkrylov.estimate import Estimate
from pnkrylov.gaussian import GaussianBelief
from pnkrylov.krylov import check_num_steps, continue_run
from pnkrylov.looking_ahead import look_ahead, seen_enough
from pnkrylov.preconditioned import Covariance
from pnkrylov.probes import run_probes
from pnkrylov.results import RESULTS
from pnkrylov.runs import Run, finish, scalar, with_trace_probes
from pnkrylov.stats import SolveStats, Stats, describe_run, number
from pnkrylov.traces.bracket import quadrature_change

_HIGHEST = jax.lax.Precision.HIGHEST


class SolveBelief(GaussianBelief):
    """What m Lanczos steps know about `x = A^-1 v`: `x ~ N(mean, nu Sigma_perp)`.

    Attributes:
        mean_flat: `Q_m T_m^-1 Q_m^T v`; `mean` gives it in the user's structure.
        covariance: the scaled remainder (METHOD.md section 5), a lineax operator.
        result: result code.
        stats: what the run spent and learnt.
        error: what the belief predicts of its own error.
        run: the run; other beliefs can be made of it without a product.
        rhs: `(d,)`, v.
        alpha: the shift: the belief is about `(A + alpha I)^-1 v`.
        fixed_scale: nu where it was given, -1 where the look-ahead chooses it.
        lower_bound: a lower bound of the spectrum of A without shift, or None.
        from_rhs: whether the run was started at v.
    """

    mean_flat: Float[Array, " d"]
    covariance: Covariance
    result: RESULTS
    stats: Stats
    error: SolveStats
    run: Run
    rhs: Float[Array, " d"]
    alpha: Float[Array, ""]
    fixed_scale: Float[Array, ""]
    lower_bound: Float[Array, ""] | None
    from_rhs: bool = eqx.field(static=True)

    def shift(self, alpha: float | Float[Array, ""]) -> "SolveBelief":
        """The belief about `(A + alpha I)^-1 v` from the same run; no product is spent.

        Args:
            alpha: replaces the current shift; `A + alpha I` must be positive definite.

        Raises:
            TypeError: `alpha` is no real number.
            NotPositiveDefiniteError: it is not, by a Ritz value.
            ValueError: the run was preconditioned, which ties it to one shift.

        Source:
            METHOD.md section 12.
        """
        require_plain(self.run)
        alpha = scalar(alpha, "alpha", self.mean_flat.dtype)
        return self._again(self.run, alpha)

    def refine(
        self, A: Any, *, num_steps: int, max_lookahead: int = 60, progress: bool = False
    ) -> "SolveBelief":
        """More computation, less uncertainty: resolves `num_steps` more vectors of the same run.

        Look-ahead steps that were already taken are resolved first, so fewer products may be
        spent than steps are added.

        Args:
            A: the operator of the belief, unshifted.
            num_steps: further steps for the mean, at least 1.
            max_lookahead: longest look-ahead beyond the new level.
            progress: show a progress bar (host driver).

        Returns:
            The refined belief.

        Raises:
            TypeError: a count is no int, or A of another kind or dtype.
            ValueError: the total exceeds d, A has another size, or called under `jit` (shapes
                depend on values).
        """
        operator = same_operator(A, self.run)
        check_counts(max_lookahead=max_lookahead)
        run, level = self.run, int(self.run.level)
        check_num_steps(num_steps, self.structure.size, taken=level)
        level = level + num_steps
        basis, spent = run.basis.trim(), 0
        exhausted = bool(basis.residual_norm() == 0)
        if level > basis.num_rows and not exhausted:
            spent = level - basis.num_rows
            driver = refining_driver(progress, basis.driver)
            basis = continue_run(basis, operator, spent, driver=driver, progress=progress)
        target = jnp.asarray(min(level, basis.num_rows), jnp.int32)
        limit = min(max_lookahead - basis.num_rows + level, self.structure.size - basis.num_rows)
        ahead = jnp.zeros((), jnp.int32)
        if limit > 0 and not seen_enough(basis, target, self.alpha, self.lower_bound):
            basis, ahead = look_ahead(operator, basis, target, limit, self.alpha, self.lower_bound)
        run = dataclasses.replace(
            run, basis=basis, level=target, num_matvecs=run.num_matvecs + spent + ahead
        )
        return self._again(run, self.alpha)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the belief to one file, for `pnkrylov.load` (see `pnkrylov.storage`)."""
        names = ("rhs", "alpha", "fixed_scale", "lower_bound")
        fields = {name: getattr(self, name) for name in names}
        write(path, "SolveBelief", self.run, fields, {"from_rhs": self.from_rhs})

    def _again(self, run: Run, alpha: Array) -> "SolveBelief":
        belief = solve_belief(
            run, self.rhs, alpha, self.fixed_scale, self.lower_bound, self.from_rhs
        )
        return finish(belief, throw=True)

    def __str__(self) -> str:
        error, stats = self.error, self.stats
        source = "look-ahead" if self.from_rhs else "prior"
        lines = [
            f"SolveBelief about A^-1 v, d = {self.structure.size}, {self.structure.dtype}",
            f"  error     ||x - mean||_2 ~ {number(error.error_norm)}, "
            f"||x - mean||_A ~ {number(error.energy_norm)}, "
            f"||mean||_2 = {number(jnp.linalg.norm(self.mean_flat))}",
            f"  scale     nu = {number(error.scale)} ({source}; it saw "
            f"{number(100 * error.seen)} % of the squared error)",
            *describe_run(stats),
        ]
        notes = stats.warnings + error.warnings
        return "\n".join(lines + [f"  warning   {note}" for note in notes])


class InverseBelief(GaussianBelief):
    """What a run knows about `A^-1`: draws are from N(mean, Sigma), Sigma close to A^-1.

    Attributes:
        mean_flat: centre of the draws, zero unless it was given.
        covariance: Sigma_m (METHOD.md section 3), a lineax operator.
        result: result code.
        stats: what the run spent and learnt.
        run: the run; other beliefs can be made of it without a product.
        alpha: the shift: the belief is about `(A + alpha I)^-1`.
        layout: `"resolve-all"` or `"paper"`.
    """

    mean_flat: Float[Array, " d"]
    covariance: Covariance
    result: RESULTS
    stats: Stats
    run: Run
    alpha: Float[Array, ""]
    layout: Literal["resolve-all", "paper"] = eqx.field(static=True)

    def shift(self, alpha: float | Float[Array, ""]) -> "InverseBelief":
        """The belief about `(A + alpha I)^-1` from the same run; no product is spent.

        Args:
            alpha: replaces the current shift; `A + alpha I` must be positive definite.

        Raises:
            TypeError: `alpha` is no real number.
            NotPositiveDefiniteError: it is not, by a Ritz value.
            ValueError: the run was preconditioned, which ties it to one shift.

        Source:
            METHOD.md section 12.
        """
        require_plain(self.run)
        alpha = scalar(alpha, "alpha", self.mean_flat.dtype)
        return finish(inverse_belief(self.run, self.mean_flat, alpha, self.layout), throw=True)

    def solve(self, v: PyTree) -> SolveBelief:
        """The belief about `A^-1 v` for any right-hand side, without a product (scale 1).

        It is calibrated for v drawn independently of the run (METHOD.md section 5).

        Args:
            v: a right-hand side in the structure of the operator.

        Raises:
            TypeError, ValueError: `v` has another structure, shape or dtype.
        """
        self.structure.check(v, "v", expected_by="the belief")
        one = jnp.ones((), self.mean_flat.dtype)
        belief = solve_belief(
            self.run, self.structure.ravel(v), self.alpha, one, None, from_rhs=False
        )
        return finish(belief, throw=False)

    def matvec(self, v: PyTree) -> Estimate:
        """`Sigma v`, and per entry the standard error that comes from the bulk variance.

        Raises:
            TypeError, ValueError: `v` has another structure, shape or dtype.
        """
        self.structure.check(v, "v", expected_by="the belief")
        flat = self.structure.ravel(v)
        error = self._bulk_error() * jnp.abs(self.covariance.unexplored(flat))
        return self._estimate(self.covariance.mv(flat), error)

    def diagonal(self) -> Estimate:
        """The diagonal of A^-1 (marginal variances), and its standard error."""
        share = self.covariance.unexplored_diagonal()
        return self._estimate(self.covariance.diagonal(), self._bulk_error() * share)

    def trace(self) -> Estimate:
        """`tr A^-1`, its standard error and the bracket of its quadrature bias, by P-SLQ.

        Gauss quadrature bounds the trace from below; from above it is extrapolated.
        """
        if self.run.preconditioner is None:
            dimension = self.covariance.bulk_dimension().astype(self.mean_flat.dtype)
            error = jnp.where(dimension > 0, dimension * self._bulk_error(), 0)
            value = self.covariance.trace()
        else:
            # The covariance has the trace of the inside right, not that of the original operator.
            value, error = calibrate_trace(self.run, self.alpha)
        change = quadrature_change(self.run, self.alpha, "inverse")
        return Estimate(
            value, error, self.stats.num_matvecs, value, value + change, bracket="estimated"
        )

    def logdet(self) -> Estimate:
        """`log det A`, its standard error and the bracket of its bias, from the same probes.

        Gauss quadrature bounds the logarithm from above; from below it is extrapolated.

        Source:
            METHOD.md section 2: `log det T + tr log T_perp + log(1 - gamma (T_perp^-1)_11)`.
        """
        value, error = calibrate_logdet(self.run, self.alpha)
        change = quadrature_change(self.run, self.alpha, "log")
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
    ) -> "InverseBelief":
        """More computation, less uncertainty: adds `num_steps` Lanczos vectors to the run.

        The random probes are kept while they still know the bulk variance to 5 %; after that new
        ones are drawn in the smaller complement, if a key is given.

        Args:
            A: the operator of the belief, unshifted.
            num_steps: further steps, at least 1.
            key: random key for new probes.
            progress: show a progress bar (host driver).

        Returns:
            The refined belief.

        Raises:
            TypeError: a count is no int, or A of another kind or dtype.
            ValueError: the total exceeds d, A has another size, or called under `jit` (shapes
                depend on values).
        """
        operator = same_operator(A, self.run)
        if self.layout == "paper" and key is None:
            raise TypeError("key is missing: the paper's layout needs new probes at its new level.")
        run, basis = self.run, self.run.basis.trim()
        check_num_steps(num_steps, self.structure.size, taken=basis.num_rows)
        lookahead = basis.num_rows - int(run.level)
        if bool(basis.residual_norm() > 0):
            driver = refining_driver(progress, basis.driver)
            basis = continue_run(basis, operator, num_steps, driver=driver, progress=progress)
            run = dataclasses.replace(run, basis=basis, num_matvecs=run.num_matvecs + num_steps)
        if self.layout == "resolve-all":
            belief = inverse_belief(run, self.mean_flat, self.alpha, self.layout)
            stats = belief.stats
            known = bool(stats.bulk_standard_error <= KEEP_PROBES * stats.bulk_variance)
            if known or key is None:
                return finish(belief, throw=True)
        assert run.probes is not None and key is not None
        level = jnp.asarray(basis.num_rows - lookahead, jnp.int32)
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
        spent = run.num_matvecs + probes.num_probes * probes.steps
        run = dataclasses.replace(run, level=level, probes=probes, num_matvecs=spent)
        run = with_trace_probes(operator, run, jax.random.fold_in(key, 1), self.alpha, progress)
        return finish(inverse_belief(run, self.mean_flat, self.alpha, self.layout), throw=True)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the belief to one file, for `pnkrylov.load` (see `pnkrylov.storage`)."""
        fields = {"mean_flat": self.mean_flat, "alpha": self.alpha}
        write(path, "InverseBelief", self.run, fields, {"layout": self.layout})

    def _bulk_error(self) -> Float[Array, ""]:
        return self.stats.bulk_standard_error

    def _estimate(self, value: Array, error: Array) -> Estimate:
        return Estimate(
            self.structure.unravel(value), self.structure.unravel(error), self.stats.num_matvecs
        )

    def __str__(self) -> str:
        trace_of = InverseBelief.trace
        for _ in range(self.mean_flat.ndim - 1):
            trace_of = eqx.filter_vmap(trace_of)
        trace, stats = trace_of(self), self.stats
        lines = [
            f"InverseBelief about A^-1, d = {self.structure.size}, {self.structure.dtype}, "
            f"layout {self.layout!r}",
            f"  trace     tr A^-1 = {number(trace.value)} +- {number(trace.standard_error)}",
            f"  bulk      omega = {number(stats.bulk_variance)} "
            f"+- {number(stats.bulk_standard_error)}, ||c|| = {number(stats.coupling_norm)}",
            *describe_run(stats),
        ]
        return "\n".join(lines + [f"  warning   {note}" for note in stats.warnings])


def solve_belief(
    run: Run,
    rhs: Float[Array, " d"],
    alpha: Float[Array, ""],
    fixed_scale: Float[Array, ""],
    lower_bound: Float[Array, ""] | None,
    from_rhs: bool,
) -> SolveBelief:
    """The belief about `(A + alpha I)^-1 rhs` that a run supports (see `calibrate_solve`)."""
    mean, calibrated, error = calibrate_solve(run, rhs, alpha, fixed_scale, lower_bound, from_rhs)
    return SolveBelief(
        mean_flat=mean,
        covariance=calibrated.covariance,
        result=calibrated.result,
        stats=calibrated.stats,
        error=error,
        run=run,
        rhs=rhs,
        alpha=alpha,
        fixed_scale=fixed_scale,
        lower_bound=lower_bound,
        from_rhs=from_rhs,
    )


def inverse_belief(
    run: Run,
    mean: Float[Array, " d"],
    alpha: Float[Array, ""],
    layout: Literal["resolve-all", "paper"],
) -> InverseBelief:
    """The belief about `(A + alpha I)^-1` that a run supports (see `calibrate_inverse`)."""
    calibrated = calibrate_inverse(run, mean, alpha, layout)
    return InverseBelief(
        mean_flat=mean,
        covariance=calibrated.covariance,
        result=calibrated.result,
        stats=calibrated.stats,
        run=run,
        alpha=alpha,
        layout=layout,
    )
