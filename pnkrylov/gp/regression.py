"""Gaussian process regression from one Lanczos run: `condition` and the belief it returns."""

import dataclasses
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from pnkrylov.beliefs import InverseBelief, inverse_belief
from pnkrylov.budgets import check_counts, check_positive_counts
from pnkrylov.estimate import Estimate
from pnkrylov.gp import evidence, pathwise
from pnkrylov.gp.data import Observations, frozen, into, observe, run_operator
from pnkrylov.gp.measured import Measured, checked, measure
from pnkrylov.gp.prediction import Prediction, predict
from pnkrylov.gp.remainder import calibration_points as points_near_inputs
from pnkrylov.krylov import Driver, begin_run, check_num_steps, continue_run, is_concrete
from pnkrylov.preconditioners import Preconditioner
from pnkrylov.preconditioners._checks import as_scalar, check_finite, refuse
from pnkrylov.runs import Run


class GPBelief(eqx.Module):
    """What a run knows about a Gaussian process given data.

    Attributes:
        measured: the observations, the run on their kernel matrix, and its probes.
    """

    measured: Measured

    @property
    def data(self) -> Observations:
        """The observations; `data.operator` is the kernel matrix."""
        return self.measured.data

    @property
    def run(self) -> Run:
        """The Lanczos run, with probes for the log-determinant."""
        return self.measured.run

    @property
    def start(self) -> str:
        """`"data"` or `"independent"`: how the run began."""
        return self.measured.start

    @property
    def noise(self) -> Float[Array, "*n"]:
        """The noise variance or variances."""
        return self.data.noise

    @property
    def num_products(self) -> Array:
        """Products with the kernel matrix that were spent."""
        return self.run.num_matvecs

    @property
    def weights(self) -> Float[Array, " n *k"]:
        """The representer weights `C (y - mean)`: the predicted mean is `mean + k*^T weights`."""
        rows = self.measured.weights()
        return rows[0] if self.data.single else rows.T

    @property
    def inverse(self) -> InverseBelief:
        """The belief about `(W K W + s I)^-1`, from the same run; W is I for one noise level."""
        centre = jnp.zeros((self.data.size,), self.data.operator.dtype)
        return inverse_belief(self.run, centre, self.measured.shift(), "resolve-all")

    def predict(self, Xs: Array, *, mean: Any = None) -> Prediction:
        """Mean and variances of f at new points, at no product with the kernel matrix.

        Args:
            Xs: points, `(s,)` or `(s, p)` as the inputs.
            mean: prior mean at the points, `(s,)` or `(s, k)`; needed where `condition` was given
                an array.

        Returns:
            A `Prediction`.

        Raises:
            TypeError, ValueError: Xs does not look like the inputs; `mean` is missing.
        """
        Xs = self.data.operator._check_points(Xs)
        prior = self.data.prior_mean(Xs, mean)
        return predict(self.measured, Xs, prior)

    def covariance(self, Xs: Array) -> lx.MatrixLinearOperator:
        """The joint covariance of f at new points, both parts together, for the first output.

        A lineax operator, tagged positive semi-definite; its diagonal is `predict(Xs).variance`.

        Args:
            Xs: points, `(s,)` or `(s, p)` as the inputs.

        Raises:
            TypeError, ValueError: Xs does not look like the inputs.
        """
        points = self.data.operator._check_points(Xs)
        return pathwise.joint_covariance(self.measured, points)

    def sample(
        self,
        key: PRNGKeyArray,
        Xs: Array,
        num_samples: int,
        *,
        mean: Any = None,
        rtol: float = 1e-2,
    ) -> Float[Array, " N s *k"]:
        """Draws of f at new points, with both parts of the variance, by pathwise conditioning.

        Args:
            key: random key; the same key gives the same draws.
            Xs: points, `(s,)` or `(s, p)` as the inputs.
            num_samples: number of draws N.
            mean: prior mean at the points, as for `predict`.
            rtol: relative error of the draws of the prior, which CIQ makes (see `pathwise`).

        Returns:
            `(N, s)`, or `(N, s, k)` for several outputs.

        Raises:
            TypeError, ValueError: Xs does not look like the inputs; `num_samples` is no int or
                negative, `rtol` not between 0 and 1, `key` no random key.
            ToleranceNotMetError: the prior could not be drawn to `rtol`.
        """
        check_counts(num_samples=num_samples)
        Xs = self.data.operator._check_points(Xs)
        centre = self.predict(Xs, mean=mean).mean
        rows = centre[None] if self.data.single else centre.T
        draws = pathwise.sample(self.measured, key, Xs, rows, num_samples, rtol)
        return draws[:, 0] if self.data.single else jnp.swapaxes(draws, 1, 2)

    def log_evidence(self) -> Estimate:
        """`log p(y)`, with its error bar; differentiable (see `evidence.log_evidence_of`)."""
        return evidence.log_evidence_of(self.measured)

    def evidence_gradient(self) -> Estimate:
        """The gradient of `log p(y)`, with its error (see `evidence.gradient_of`)."""
        return evidence.gradient_of(self.measured)

    def with_noise(self, noise: float | Float[Array, ""]) -> "GPBelief":
        """The belief for another noise level, from the same run: no product is spent.

        Args:
            noise: the noise variance; of noise variances that differ, the new geometric mean.

        Raises:
            TypeError: it is no real number.
            NotFiniteError: it is NaN or infinite.
            NotPositiveDefiniteError: it is negative, or zero for a singular kernel matrix.
            ValueError: it is not a single number; the run was preconditioned, which ties it to one
                noise level.

        Source:
            METHOD.md section 12.
        """
        if self.run.preconditioner is not None:
            raise ValueError(
                "with_noise: a preconditioned run knows one noise level only. Condition again, or "
                "without preconditioner=."
            )
        level = check_finite(as_scalar(noise, "noise", self.data.operator.dtype), "noise")
        level = refuse(level, level < 0, "noise must not be negative", "It is a variance.")
        old = self.data.noise
        moved = level if old.ndim == 0 else old * (level / self.data.level())
        measured = eqx.tree_at(lambda m: m.data.noise, self.measured, moved)
        return GPBelief(checked(measured, throw=True))

    def refine(self, num_steps: int, *, key: PRNGKeyArray, progress: bool = False) -> "GPBelief":
        """More computation, less computational variance: continues the run.

        Look-ahead steps that were taken are resolved first. The probes, which are tied to a level,
        are run again at the new one.

        Args:
            num_steps: further steps to resolve, at least 1.
            key: random key of the probes.
            progress: show progress bars.

        Raises:
            TypeError: `num_steps` is no int, or `key` no random key.
            ValueError: the total exceeds n, or called under `jit` (shapes depend on values).
        """
        if not is_concrete(self):
            raise ValueError("refine changes shapes: call it outside jit/vmap/grad.")
        kernel_matrix = self.data.kernel_matrix()
        operator = run_operator(self.data, kernel_matrix, self.run.preconditioner)
        basis, level = self.run.basis.trim(), int(self.run.level)
        check_num_steps(num_steps, operator.size, taken=level)
        lookahead = max(basis.num_rows - level, 1)
        spent = self.run.num_matvecs
        wanted = min(level + num_steps + lookahead, operator.size) - basis.num_rows
        if wanted > 0 and bool(basis.residual_norm() > 0):
            driver = "host" if progress or basis.driver == "host" else "compiled"
            before = basis.num_rows
            basis = continue_run(basis, operator, wanted, driver=driver, progress=progress)
            spent = spent + basis.num_rows - before
        level = min(level + num_steps, max(basis.num_rows - lookahead, level))
        level = operator.size if basis.num_rows == operator.size else level
        probes = self.run.probes
        assert probes is not None
        run = dataclasses.replace(
            self.run, basis=basis, level=jnp.asarray(level, jnp.int32), num_matvecs=spent
        )
        rows = self.measured.row_probes
        return GPBelief(
            measure(
                self.data,
                kernel_matrix,
                operator,
                run,
                rows.points,
                key,
                self.measured.start,
                num_probes=probes.num_probes,
                probe_depth=probes.depth,
                row_depth=rows.probes.depth,
                progress=progress,
                throw=True,
            )
        )

    def __repr__(self) -> str:
        if not is_concrete(self):
            return eqx.tree_pformat(self)
        data, run = self.data, self.run
        outputs = "" if data.single else f", {data.num_outputs} outputs"
        return (
            f"GPBelief given {data.size} observations{outputs}, {data.operator.dtype}: "
            f"{int(run.level)} steps resolved from a start that is "
            f"{'the targets' if self.start == 'data' else 'independent of the targets'}, "
            f"{int(run.num_matvecs)} products"
        )


def condition(
    kernel: Any,
    X: Array | np.ndarray,
    y: Array | np.ndarray,
    noise: float | Float[Array, "*n"],
    *,
    key: PRNGKeyArray,
    mean: Any = None,
    num_steps: int | None = None,
    lookahead: int = 20,
    start: Literal["auto", "data", "independent"] = "auto",
    preconditioner: Preconditioner | None = None,
    num_probes: int = 8,
    probe_depth: int = 20,
    calibration_points: Array | None = None,
    num_calibration: int = 16,
    block_rows: int | None = None,
    driver: Driver = "auto",
    progress: bool = False,
    throw: bool = True,
) -> GPBelief:
    """Conditions a Gaussian process on data by one Lanczos run on its kernel matrix.

    Args:
        kernel: a kernel of this package, tinygp or gpjax, or a JAX function `k(x, y)` of two
            points.
        X: inputs, `(n,)` or `(n, p)`, float32 or float64.
        y: targets, `(n,)`, or `(n, k)` for k outputs that share the kernel and the noise; dtype of
            X.
        noise: variance of the noise, one or `(n,)`.
        key: random key, for probes and calibration points (and an independent start).
        mean: prior mean: a JAX function of one point, a number, or an array `(n,)` or `(n, k)`;
            zero by default.
        num_steps: m, steps that the predictions resolve; `min(n, 100)` by default.
        lookahead: further steps, which show how far the mean of level m is off.
        start: `"data"` starts the run at the targets: the mean converges as that of conjugate
            gradients does, and its computational variance is scaled by what the look-ahead sees.
            `"independent"` starts it at random: the mean is farther off, by exactly what the
            remainder says, for any number of outputs. `"auto"` is `"data"` for one output.
        preconditioner: P, close to `K + noise I` (to `W K W + level I` where variances differ):
            the run is on `P^-1/2 (K + noise I) P^-1/2`. Ties the belief to one noise level.
        num_probes: random probes for the log-determinant.
        probe_depth: most steps of each probe.
        calibration_points: points like those to be predicted, `(N_c,)` or `(N_c, p)`, at which the
            remainder is measured; by default `num_calibration` points near inputs.
        num_calibration: how many points to make.
        block_rows: tile size of products (see `kernel_operator`).
        driver: `"auto"`, `"compiled"` or `"host"` (see `lanczos`).
        progress: show progress bars; Ctrl-C then ends the run, and the belief describes the steps
            that were taken.
        throw: raise on failure; with False, numbers are NaN instead.

    Returns:
        A `GPBelief`.

    Raises:
        TypeError, ValueError: wrong shapes, dtypes or sizes.
        NotFiniteError: NaN or infinity in inputs, targets, noise or products.
        NotPositiveDefiniteError: noise is negative, or too small for a singular kernel matrix.

    Source:
        METHOD.md sections 2, 11 and 12; IterGP: Wenger et al. 2022. The split of the combined
        variance and the scale are ours (docs/design.md).
    """
    check_positive_counts(
        lookahead=lookahead,
        num_probes=num_probes,
        probe_depth=probe_depth,
        num_calibration=num_calibration,
    )
    if start not in ("auto", "data", "independent"):
        raise ValueError(f"start={start!r} is unknown: use 'auto', 'data' or 'independent'.")
    data = observe(kernel, X, y, noise, mean, block_rows)
    if start == "data" and data.num_outputs > 1:
        raise ValueError(
            f"start='data' needs one output, but y has {data.num_outputs}: use 'independent', or "
            "condition on one output at a time."
        )
    if start == "auto":
        start = "data" if data.num_outputs == 1 else "independent"
    steps = min(data.size, 100) if num_steps is None else num_steps
    check_num_steps(steps, data.size)
    # No derivative goes through a run; that of the evidence has a rule of its own.
    fixed = frozen(data)
    kernel_matrix = fixed.kernel_matrix()
    operator = run_operator(fixed, kernel_matrix, preconditioner)
    start_key, points_key, probe_key = jax.random.split(key, 3)
    if start == "data":
        origin = into(fixed, preconditioner, fixed.residuals[0])
    else:
        origin = jax.random.normal(start_key, (data.size,), operator.dtype)
    total = min(steps + lookahead, data.size)
    basis = continue_run(begin_run(origin), operator, total, driver=driver, progress=progress)
    level = data.size if basis.num_rows == data.size else max(1, basis.num_rows - lookahead)
    run = Run(
        basis=basis,
        level=jnp.asarray(level, jnp.int32),
        probes=None,
        asymmetry=jnp.asarray(-1, operator.dtype),
        num_matvecs=jnp.asarray(basis.num_rows, jnp.int32),
        structure=operator.structure,
        preconditioner=preconditioner,
    )
    points = _points(fixed, calibration_points, points_key, num_calibration)
    return GPBelief(
        measure(
            data,
            kernel_matrix,
            operator,
            run,
            points,
            probe_key,
            start,
            num_probes=num_probes,
            probe_depth=probe_depth,
            row_depth=probe_depth,
            progress=progress,
            throw=throw,
        )
    )


def _points(data: Observations, given: Any, key: PRNGKeyArray, count: int) -> Array:
    if given is None:
        return points_near_inputs(data, key, count)
    return data.operator._check_points(given)
