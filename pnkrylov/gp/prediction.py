"""Predictions: what the data leave unknown and what the computation leaves unknown, apart.

At a new point, IterGP's combined variance `k** - k*^T C k*` is exact and costs no product. It is
the sum of the mathematical variance `k** - k*^T Khat^-1 k*` and of the remainder
`k*^T (Khat^-1 - C) k*`. Two estimates split it. One is the squared residual of the kernel row
times its mean ratio to the remainder at calibration points: good where the remainder is small. The
other is the variance given the nearest observations only (which bounds the mathematical variance)
times its mean ratio to that: good where the remainder is large. They are weighted by how far they
were off at the calibration points.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from pnkrylov.estimate import normal_interval
from pnkrylov.gp.data import Observations
from pnkrylov.gp.measured import Measured
from pnkrylov.gp.remainder import edge, next_vector
from pnkrylov.lookahead import lookahead_error
from pnkrylov.tridiagonal import Tridiagonal

_HIGHEST = jax.lax.Precision.HIGHEST
# Observations that the local variance is conditioned on.
_NUM_NEIGHBOURS = 32
# Points are taken in batches whose kernel rows take about this much memory.
_BATCH_BYTES = 2**27
# Calibration points are few: ratios are not trusted to less than this.
_LEAST_SPREAD = 0.05


class Prediction(eqx.Module):
    """A prediction of f (without noise) at s points, for one output or for k.

    Attributes:
        mean: `(s,)` or `(s, k)`.
        mathematical: variance that more computation would not remove: the exact posterior's.
        computational: variance of the mean about the exact posterior's mean.
        combined: `k** - k*^T C k*`, IterGP's variance; exact, no estimate.
        remainder: `(s,)`, what computation left unknown of `k*^T Khat^-1 k*`: the computational
            variance before it is scaled by what is known of these targets.
    """

    mean: Float[Array, " s *k"]
    mathematical: Float[Array, " s *k"]
    computational: Float[Array, " s *k"]
    combined: Float[Array, " s *k"]
    remainder: Float[Array, " s"]

    @property
    def variance(self) -> Float[Array, " s *k"]:
        """The sum of both variances, never negative."""
        return self.mathematical + self.computational

    def std(self) -> Float[Array, " s *k"]:
        """The standard deviation."""
        return jnp.sqrt(self.variance)

    def interval(self, level: float = 0.95) -> tuple[Float[Array, " s *k"], Float[Array, " s *k"]]:
        """Central intervals of probability `level` for f; add the noise variance for targets.

        Raises:
            ValueError: `level` is not strictly between 0 and 1.
        """
        return normal_interval(self.mean, self.std(), level)


class Rows(eqx.Module):
    """What a run says of the kernel rows of some points.

    Attributes:
        coordinates: `(s, n)`, in the basis.
        combined: `(s,)`, `k** - k*^T C k*`.
        squares: `(s,)`, squared norms of the residuals `k* - Khat C k*`, as the run sees them.
        local: `(s,)`, variance given the nearest observations only.
    """

    coordinates: Float[Array, "s n"]
    combined: Float[Array, " s"]
    squares: Float[Array, " s"]
    local: Float[Array, " s"]

    @classmethod
    def of(
        cls, measured: Measured, tridiagonal: Tridiagonal, points: Float[Array, " s *p"]
    ) -> "Rows":
        """Evaluates the kernel between the points and all inputs, some points at a time."""
        data, basis, level = measured.data, measured.run.basis, measured.level()
        head, parallel = tridiagonal.head(level), edge(tridiagonal, level)
        following, inside = next_vector(basis, level), tridiagonal.rows() < level
        kernel, inputs = data.operator.kernel, data.operator.inputs

        def one(point):
            plain = kernel.matrix(point[None], inputs)[0]
            row = measured.into(plain)
            coordinates = jnp.matmul(basis.vectors, row, precision=_HIGHEST)
            coordinates = jnp.where(inside, coordinates, 0)
            explained = jnp.sum(head.factor_transpose_mv(coordinates) ** 2) / tridiagonal.unit
            residual = row - jnp.matmul(coordinates, basis.vectors, precision=_HIGHEST)
            residual = residual - jnp.sum(parallel * coordinates) * following
            prior = kernel.diagonal(point[None])[0]
            combined, local = jnp.maximum(prior - explained, 0), _local_variance(data, plain, prior)
            return coordinates, combined, jnp.sum(residual**2), local

        batch = max(1, _BATCH_BYTES // (4 * data.size * inputs.dtype.itemsize))
        if len(points) <= batch:
            return cls(*jax.vmap(one)(points))
        return cls(*jax.lax.map(one, points, batch_size=batch))

    def split(self, count: int) -> tuple["Rows", "Rows"]:
        """The first `count` points, and the others."""
        first = jax.tree.map(lambda values: values[:count], self)
        return first, jax.tree.map(lambda values: values[count:], self)


def _local_variance(
    data: Observations, row: Float[Array, " n"], prior: Float[Array, ""]
) -> Float[Array, ""]:
    """Variance given the most correlated observations: never below the exact posterior's."""
    count = min(_NUM_NEIGHBOURS, data.size)
    _, nearest = jax.lax.top_k(jnp.abs(row), count)
    points = data.operator.inputs[nearest]
    matrix = data.operator.kernel.matrix(points, points)
    # Equal points without noise are singular; jitter only makes the bound wider.
    jitter = 10 * count * jnp.finfo(row.dtype).eps * jnp.max(jnp.diagonal(matrix))
    noise = jnp.broadcast_to(data.noise_of(nearest), (count,)) + jitter
    factor = jnp.linalg.cholesky(matrix + jnp.diag(noise))
    explained = solve_triangular(factor, row[nearest], lower=True)
    return jnp.maximum(prior - jnp.sum(explained**2), 0)


class Split(eqx.Module):
    """How the combined variance divides, as measured at the calibration points.

    Attributes:
        per_square: remainder per squared residual.
        per_square_spread: relative deviation from that.
        per_local: mathematical variance per local variance.
        per_local_spread: relative deviation from that.
    """

    per_square: Float[Array, ""]
    per_square_spread: Float[Array, ""]
    per_local: Float[Array, ""]
    per_local_spread: Float[Array, ""]

    @classmethod
    def of(cls, rows: Rows, remainders: Float[Array, " N_c"]) -> "Split":
        """From calibration points whose remainders are known."""
        remainders = jnp.minimum(remainders, rows.combined)
        exact, local = rows.combined - remainders, jnp.minimum(rows.local, rows.combined)
        per_square, first = _ratio(remainders, rows.squares)
        per_local, second = _ratio(exact, local)
        return cls(per_square, first, per_local, second)

    def remainder(self, rows: Rows) -> Float[Array, " s"]:
        """The remainder of every row, between zero and its combined variance."""
        local = jnp.minimum(rows.local, rows.combined)
        first, exact = self.per_square * rows.squares, self.per_local * local
        first_variance = (self.per_square_spread * first) ** 2
        second_variance = (self.per_local_spread * exact) ** 2
        total = first_variance + second_variance
        share = jnp.where(total > 0, first_variance / jnp.where(total > 0, total, 1), 0)
        value = (1 - share) * first + share * (rows.combined - exact)
        # The local variance bounds the mathematical one from above, exactly. From below, it is
        # not believed to be more than two deviations (or a factor 10) smaller than estimated.
        smallest = jnp.maximum(1 - 2 * self.per_local_spread, 0.1) * exact
        return jnp.clip(value, rows.combined - local, rows.combined - smallest)


def _ratio(values: Array, references: Array) -> tuple[Array, Array]:
    """Ratio of the sums, and the root-mean-square relative deviation from it."""
    some = references > 0
    total = jnp.sum(jnp.where(some, references, 0))
    ratio = jnp.sum(jnp.where(some, values, 0)) / jnp.where(total > 0, total, 1)
    expected = jnp.where(some, ratio * references, 1)
    usable = some & (expected > 0)
    deviations = jnp.where(usable, values / jnp.where(usable, expected, 1) - 1, 0)
    count = jnp.maximum(jnp.sum(some.astype(values.dtype)), 1)
    return ratio, jnp.maximum(jnp.sqrt(jnp.sum(deviations**2) / count), _LEAST_SPREAD)


class Calibrated(eqx.Module):
    """A measured run at its noise level, and what it says of the kernel rows of some points.

    Attributes:
        tridiagonal: T, noise included.
        rows: the kernel rows.
        remainder: `(s,)`, `k*^T (Khat^-1 - C) k*`, estimated.
        scale: `(k,)`, computational variance over remainder, for every output.
    """

    tridiagonal: Tridiagonal
    rows: Rows
    remainder: Float[Array, " s"]
    scale: Float[Array, " k"]

    @classmethod
    def of(cls, measured: Measured, points: Float[Array, " s *p"]) -> "Calibrated":
        """Calibrates; no product is spent."""
        row_probes, tridiagonal = measured.row_probes, measured.tridiagonal()
        count = row_probes.num_points
        # Calibration points and new ones together: that halves what has to be compiled.
        rows = Rows.of(measured, tridiagonal, jnp.concatenate([row_probes.points, points]))
        known, rows = rows.split(count)
        forms, _ = row_probes.forms(tridiagonal, measured.level(), measured.shift())
        scale = jnp.ones((measured.data.num_outputs,), forms.dtype)
        if measured.start == "data":
            scale = data_scale(measured, tridiagonal, jnp.mean(forms[count:]))[None]
        remainder = Split.of(known, forms[:count]).remainder(rows)
        return cls(tridiagonal=tridiagonal, rows=rows, remainder=remainder, scale=scale)


@eqx.filter_jit
def predict(
    measured: Measured, points: Float[Array, " s *p"], prior: Float[Array, "k s"]
) -> Prediction:
    """Predictions at points, given the prior mean there."""
    calibrated = Calibrated.of(measured, points)
    rows, remainder, scale = calibrated.rows, calibrated.remainder, calibrated.scale
    targets = measured.into(measured.data.residuals)
    solution = measured.solution(targets, calibrated.tridiagonal, measured.level())
    mean = prior + jnp.matmul(solution, rows.coordinates.T, precision=_HIGHEST)
    ones = jnp.ones_like(scale)[:, None]

    def shaped(values):
        return values[0] if measured.data.single else values.T

    return Prediction(
        mean=shaped(mean),
        mathematical=shaped(ones * (rows.combined - remainder)[None, :]),
        computational=shaped(scale[:, None] * remainder[None, :]),
        combined=shaped(ones * rows.combined[None, :]),
        remainder=remainder,
    )


def data_scale(
    measured: Measured, tridiagonal: Tridiagonal, expected: Float[Array, ""]
) -> Float[Array, ""]:
    """nu of a run that was started from the targets: computational variance over remainder.

    The steps after level m show how far the mean is off at the inputs, `||K (x - x_m)||^2`; what
    they do not see is extrapolated as the energy of the error is.

    Args:
        measured: the run.
        tridiagonal: its T, noise included.
        expected: what it would be if the targets were drawn independently of the run,
            `tr K (Khat^-1 - C) K`.
    """
    data, run, level = measured.data, measured.run, measured.level()
    first = (tridiagonal.rows() == 0).astype(tridiagonal.alpha.dtype)
    early = jnp.where(tridiagonal.rows() < level, tridiagonal.head(level).solve(first), 0)
    late = jnp.where(tridiagonal.rows() < tridiagonal.filled, tridiagonal.solve(first), 0)
    seen = run.basis.start_norm / tridiagonal.unit * (late - early)
    product = tridiagonal.alpha * seen
    product = product.at[1:].add(tridiagonal.off_diagonal * seen[:-1])
    product = product.at[:-1].add(tridiagonal.off_diagonal * seen[1:])
    last = seen[jnp.maximum(tridiagonal.filled - 1, 0)]
    image = jnp.matmul(product, run.basis.vectors, precision=_HIGHEST)
    image = tridiagonal.unit * (image + tridiagonal.residual * last * run.basis.next_vector)
    error = run.map(jnp.matmul(seen, run.basis.vectors, precision=_HIGHEST))
    plain = run.preconditioner is None
    # A K-weighted error: `(W K W + s I) e` as the run has it, less `s e`.
    image = image if run.preconditioner is None else run.preconditioner.sqrt_mv(image)
    found = jnp.sum((image - data.level() * error) ** 2)
    ahead = lookahead_error(tridiagonal, level, data.level() if plain else None)
    head = ahead.energy_norm_seen
    unseen = jnp.where(head > 0, ahead.energy_norm / jnp.where(head > 0, head, 1), 1)
    return jnp.where(expected > 0, unseen**2 * found / jnp.where(expected > 0, expected, 1), 0)
