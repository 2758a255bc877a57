"""The covariances that a Laplace posterior can have, all seen as `(G + shift I)^-1`.

G is the curvature of the (scaled) parameters, positive semi-definite, and the shift is the prior
precision. Whatever a product with G was needed for is kept, so that another shift costs none.

Each class says whether its variances are exact, calibrated, conservative (never below the exact
ones) or overconfident (never above).
"""

import abc
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pnkrylov._operator_types import SPDOperator
from pnkrylov._structure import VectorStructure
from pnkrylov.beliefs import InverseBelief
from pnkrylov.ciq import inv_sqrt_matvec
from pnkrylov.errors import NotPositiveDefiniteError
from pnkrylov.estimate import Estimate
from pnkrylov.krylov import is_concrete
from pnkrylov.trace import logdet

_HIGHEST = jax.lax.Precision.HIGHEST
# Draws by CIQ are made in batches whose Krylov bases, at 256 steps, take about this much memory.
_BATCH_BYTES = 2**28


class PosteriorCovariance(eqx.Module):
    """Abstract: `(G + shift I)^-1`, or what stands in for it, on flat scaled parameters.

    Attributes:
        shift: the prior precision of the scaled parameters.
        num_matvecs: products with G that were spent.
    """

    shift: eqx.AbstractVar[Float[Array, ""]]
    num_matvecs: eqx.AbstractVar[Int[Array, ""]]

    @abc.abstractmethod
    def at_shift(self, shift: Float[Array, ""]) -> "PosteriorCovariance":
        """The same knowledge of G with another shift."""

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray, num_samples: int) -> Float[Array, "N p"]:
        """Draws with mean zero, one per row."""

    @abc.abstractmethod
    def push(self, rows: Float[Array, "k p"]) -> Float[Array, "k k"]:
        """`B (G + shift I)^-1 B^T` for the rows of B, positive semi-definite."""

    @abc.abstractmethod
    def diagonal(self) -> Float[Array, " p"]:
        """The marginal variances."""

    @abc.abstractmethod
    def logdet_ratio(self) -> Estimate:
        """`log det(I + G / shift)`: how much of the prior volume the data rule out."""

    def effective_dimension(self) -> Float[Array, ""]:
        """`tr G (G + shift I)^-1`."""
        # One by one: the sum of the terms loses fewer digits than the difference of the sums.
        return jnp.sum(1 - self.shift * self.diagonal())


class LowRankCovariance(PosteriorCovariance):
    """Eigenpairs of G, and the prior (or nothing) on the rest of the space.

    With all eigenpairs it is exact. With the leading ones and `rest=True` it is conservative: the
    prior variance can only be too large. With `rest=False` it is the projection `P (P^T (G + shift
    I) P)^-1 P^T`, overconfident: there is no variance outside the span of P.

    Attributes:
        values: `(r,)` eigenvalues (or those of the projection of G).
        vectors: `(r, p)` orthonormal rows.
        rest: whether directions outside the rows have their prior variance 1/shift, or none.
    """

    values: Float[Array, " r"]
    vectors: Float[Array, "r p"]
    shift: Float[Array, ""]
    num_matvecs: Int[Array, ""]
    rest: bool = eqx.field(static=True, default=True)

    def __check_init__(self):
        if is_concrete((self.values, self.shift)):
            refuse_indefinite(jnp.min(self.values, initial=0), self.shift)

    def at_shift(self, shift: Float[Array, ""]) -> "LowRankCovariance":
        """The same eigenpairs with another shift."""
        return dataclasses.replace(self, shift=shift)

    def sample(self, key: PRNGKeyArray, num_samples: int) -> Float[Array, "N p"]:
        """Draws with mean zero, one per row."""
        return _low_rank_sample(self, key, num_samples)

    def push(self, rows: Float[Array, "k p"]) -> Float[Array, "k k"]:
        """`B Sigma B^T`, as a sum of squares: nothing cancels."""
        return _low_rank_push(self, rows)

    def diagonal(self) -> Float[Array, " p"]:
        """The marginal variances."""
        squares = self.vectors**2
        weights = 1 / (self.values + self.shift)
        inside = jnp.matmul(weights, squares, precision=_HIGHEST)
        if not self.rest:
            return inside
        # Squares of orthonormal rows sum to at most 1; rounding must not make a variance negative.
        return inside + jnp.maximum(1 - jnp.sum(squares, axis=0), 0) / self.shift

    def logdet_ratio(self) -> Estimate:
        """`sum log(1 + value / shift)`."""
        total = jnp.sum(jnp.log1p(self.values / self.shift))
        return Estimate(total, jnp.zeros_like(total), self.num_matvecs)

    def effective_dimension(self) -> Float[Array, ""]:
        """`sum value / (value + shift)`."""
        return jnp.sum(self.values / (self.values + self.shift))


@eqx.filter_jit
def _low_rank_sample(cov: LowRankCovariance, key: PRNGKeyArray, num_samples: int) -> Array:
    deviations = 1 / jnp.sqrt(cov.values + cov.shift)
    rank, size = cov.vectors.shape
    if not cov.rest:
        noise = jax.random.normal(key, (num_samples, rank), cov.values.dtype)
        return jnp.matmul(noise * deviations[None, :], cov.vectors, precision=_HIGHEST)
    prior = 1 / jnp.sqrt(cov.shift)
    noise = jax.random.normal(key, (num_samples, size), cov.values.dtype)
    along = jnp.matmul(noise, cov.vectors.T, precision=_HIGHEST) * (deviations - prior)[None, :]
    return prior * noise + jnp.matmul(along, cov.vectors, precision=_HIGHEST)


@eqx.filter_jit
def _low_rank_push(cov: LowRankCovariance, rows: Array) -> Array:
    along = jnp.matmul(rows, cov.vectors.T, precision=_HIGHEST)
    scaled = along / jnp.sqrt(cov.values + cov.shift)[None, :]
    total = jnp.matmul(scaled, scaled.T, precision=_HIGHEST)
    if cov.rest:
        outside = rows - jnp.matmul(along, cov.vectors, precision=_HIGHEST)
        total = total + jnp.matmul(outside, outside.T, precision=_HIGHEST) / cov.shift
    return total


class DiagonalCovariance(PosteriorCovariance):
    """`1 / (diag G + shift)`: ignores every correlation; neither conservative nor calibrated.

    Attributes:
        values: `(p,)` the diagonal of G.
    """

    values: Float[Array, " p"]
    shift: Float[Array, ""]
    num_matvecs: Int[Array, ""]

    def __check_init__(self):
        if is_concrete((self.values, self.shift)):
            refuse_indefinite(jnp.min(self.values), self.shift)

    def at_shift(self, shift: Float[Array, ""]) -> "DiagonalCovariance":
        """The same diagonal with another shift."""
        return dataclasses.replace(self, shift=shift)

    def sample(self, key: PRNGKeyArray, num_samples: int) -> Float[Array, "N p"]:
        """Draws with mean zero, one per row."""
        noise = jax.random.normal(key, (num_samples, self.values.shape[0]), self.values.dtype)
        return noise * jnp.sqrt(self.diagonal())[None, :]

    def push(self, rows: Float[Array, "k p"]) -> Float[Array, "k k"]:
        """`B Sigma B^T`."""
        scaled = rows * jnp.sqrt(self.diagonal())[None, :]
        return jnp.matmul(scaled, scaled.T, precision=_HIGHEST)

    def diagonal(self) -> Float[Array, " p"]:
        """The variances."""
        return 1 / (self.values + self.shift)

    def logdet_ratio(self) -> Estimate:
        """`sum log(1 + value / shift)`."""
        total = jnp.sum(jnp.log1p(self.values / self.shift))
        return Estimate(total, jnp.zeros_like(total), self.num_matvecs)


class BeliefCovariance(PosteriorCovariance):
    """An `InverseBelief`: resolved exactly along Lanczos vectors, isotropic on the rest.

    Its trace is calibrated (equal to the exact one up to the error bar of the probes); single
    variances are neither bounds nor calibrated one by one.

    Attributes:
        belief: the belief about `(G + shift I)^-1`.
    """

    belief: InverseBelief
    shift: Float[Array, ""]
    num_matvecs: Int[Array, ""]

    @classmethod
    def of(cls, belief: InverseBelief) -> "BeliefCovariance":
        """The covariance of a belief."""
        spent = belief.stats.num_matvecs
        return cls(belief=belief, shift=belief.alpha, num_matvecs=spent)

    def at_shift(self, shift: Float[Array, ""]) -> "BeliefCovariance":
        """The same run with another shift (METHOD.md section 12)."""
        return self.of(self.belief.shift(shift))

    def sample(self, key: PRNGKeyArray, num_samples: int) -> Float[Array, "N p"]:
        """Draws with mean zero, one per row."""
        return _belief_sample(self.belief, key, num_samples)

    def push(self, rows: Float[Array, "k p"]) -> Float[Array, "k k"]:
        """`B Sigma B^T`."""
        return _belief_push(self.belief, rows)

    def diagonal(self) -> Float[Array, " p"]:
        """The marginal variances."""
        return self.belief.covariance.diagonal()

    def logdet_ratio(self) -> Estimate:
        """From the belief's probes, with their standard error and quadrature bracket."""
        # The derivative is known, tr (G + shift I)^-1; that of an eigendecomposition is not, where
        # eigenvalues coincide.
        estimate = jax.tree.map(jax.lax.stop_gradient, self.belief.logdet())
        slope = jax.lax.stop_gradient(self.belief.trace().value)
        change = slope * (self.shift - jax.lax.stop_gradient(self.shift))
        estimate = dataclasses.replace(estimate, value=estimate.value + change)
        return _without_prior(estimate, self.shift, self.belief.structure.size)


@eqx.filter_jit
def _belief_sample(belief: InverseBelief, key: PRNGKeyArray, num_samples: int) -> Array:
    return belief.covariance.sample(key, num_samples)


@eqx.filter_jit
def _belief_push(belief: InverseBelief, rows: Array) -> Array:
    return belief.covariance.push(rows)


class SampledCovariance(PosteriorCovariance):
    """Draws by contour-integral quadrature, exact up to a tolerance; their empirical covariance.

    What needs a covariance uses that of a fixed set of draws: unbiased, with a relative standard
    error of `sqrt(2 / S)` in each variance.

    Attributes:
        operator: `G + shift I`; every further draw costs products with it.
        draws: `(S, p)` the fixed set.
        key: what made the fixed set; another shift draws it again from the same noise.
        num_matvecs: products that the fixed set cost.
        rtol: largest relative error of a draw.
    """

    operator: "PrecisionOperator"
    draws: Float[Array, "S p"]
    key: PRNGKeyArray
    shift: Float[Array, ""]
    num_matvecs: Int[Array, ""]
    rtol: float = eqx.field(static=True)

    @classmethod
    def of(
        cls, operator: "PrecisionOperator", key: PRNGKeyArray, num_draws: int, rtol: float
    ) -> "SampledCovariance":
        """Draws the fixed set.

        Args:
            operator: the precision, shift included.
            key: random key.
            num_draws: S.
            rtol: largest relative error of a draw in the 2-norm.

        Raises:
            ToleranceNotMetError: the tolerance was not met, or rounding does not allow it.
            NotPositiveDefiniteError: a Ritz value is not positive.
        """
        draws, spent = _ciq_draws(operator, key, num_draws, rtol)
        assert operator.shift is not None
        return cls(
            operator=operator,
            draws=draws,
            key=key,
            shift=operator.shift,
            num_matvecs=spent,
            rtol=rtol,
        )

    def at_shift(self, shift: Float[Array, ""]) -> "SampledCovariance":
        """The same noise with another shift: the one covariance for which this costs products."""
        operator = PrecisionOperator(self.operator.base, self.operator.root, shift)
        return self.of(operator, self.key, self.draws.shape[0], self.rtol)

    def sample(self, key: PRNGKeyArray, num_samples: int) -> Float[Array, "N p"]:
        """New draws with mean zero, one per row."""
        return _ciq_draws(self.operator, key, num_samples, self.rtol)[0]

    def push(self, rows: Float[Array, "k p"]) -> Float[Array, "k k"]:
        """`B Sigma B^T` of the fixed draws."""
        images = jnp.matmul(rows, self.draws.T, precision=_HIGHEST)
        return jnp.matmul(images, images.T, precision=_HIGHEST) / self.draws.shape[0]

    def diagonal(self) -> Float[Array, " p"]:
        """The mean squares of the fixed draws."""
        return jnp.mean(self.draws**2, axis=0)

    def logdet_ratio(self) -> Estimate:
        """By P-SLQ with 200 products (`pnkrylov.trace.logdet`): a sampler knows no determinant."""
        estimate = logdet(self.operator, key=self.key)
        return _without_prior(estimate, self.shift, self.operator.size)


def _ciq_draws(
    operator: "PrecisionOperator", key: PRNGKeyArray, num_samples: int, rtol: float
) -> tuple[Float[Array, "N p"], Int[Array, ""]]:
    """Draws in batches whose Krylov bases fit into memory, and the products they cost."""
    size, dtype = operator.size, operator.dtype
    batch = max(1, min(num_samples, _BATCH_BYTES // (256 * size * dtype.itemsize)))
    noise_key, probe_key = jax.random.split(key)
    rows, spent = [jnp.zeros((0, size), dtype)], jnp.zeros((), jnp.int32)
    for start in range(0, num_samples, batch):
        # Every batch has one shape; what the last one has too many is cut off.
        noise = jax.random.normal(jax.random.fold_in(noise_key, start), (batch, size), dtype)
        solution = inv_sqrt_matvec(operator, noise, key=probe_key, rtol=rtol, random_rhs=True)
        rows.append(solution.value)
        spent = spent + solution.num_matvecs
    return jnp.concatenate(rows)[:num_samples], spent


class PrecisionOperator(SPDOperator):
    """`R^{-1/2} G R^{-1/2} + shift I` on flat vectors, for a diagonal R.

    Attributes:
        base: G.
        root: `(p,)`, the square root of R, or None for R = I.
        shift: what is added.
    """

    base: SPDOperator
    root: Float[Array, " p"] | None
    shift: Float[Array, ""] | None
    structure: VectorStructure = eqx.field(static=True)

    def __init__(
        self,
        base: SPDOperator,
        root: Float[Array, " p"] | None,
        shift: Float[Array, ""] | None = None,
    ):
        self.base, self.root, self.shift = base, root, shift
        # Scaled parameters have no structure of their own: rounding to leaf dtypes would be wrong.
        self.structure = VectorStructure.flat(base.size, base.dtype)

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """Returns the product with one vector."""
        inner = vector if self.root is None else vector / self.root
        product = self.base.mv(inner)
        product = product if self.root is None else product / self.root
        return product if self.shift is None else product + self.shift * vector

    def block_mv(self, block: Float[Array, "k d"]) -> Float[Array, "k d"]:
        """Returns the product with every row."""
        inner = block if self.root is None else block / self.root[None, :]
        product = self.base.block_mv(inner)
        product = product if self.root is None else product / self.root[None, :]
        return product if self.shift is None else product + self.shift * block


def _without_prior(estimate: Estimate, shift: Array, size: int) -> Estimate:
    """`log det(G + shift I)` minus that of the prior."""
    prior = size * jnp.log(shift)
    return Estimate(
        value=estimate.value - prior,
        standard_error=estimate.standard_error,
        num_matvecs=estimate.num_matvecs,
        quadrature_lower=_minus(estimate.quadrature_lower, prior),
        quadrature_upper=_minus(estimate.quadrature_upper, prior),
        bracket=estimate.bracket,
    )


def _minus(end: Array | None, prior: Array) -> Array | None:
    return None if end is None else end - prior


def refuse_indefinite(smallest: Array, shift: Array) -> None:
    """Raises unless an eigenvalue (concrete) plus the shift is positive."""
    if not float(smallest + shift) > 0:
        raise NotPositiveDefiniteError(
            f"The posterior precision is not positive definite: the curvature has the eigenvalue "
            f"{float(smallest):.6g} and the prior precision adds {float(shift):.6g}. Train to a "
            "minimum, raise prior_precision, or use curvature='ggn', which is never negative."
        )
