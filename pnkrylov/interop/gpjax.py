"""gpjax: conditioning that never forms the covariance matrix.

`KrylovModel(prior * likelihood)` is the whole change to a model. What is called with it keeps
working: `model.condition(data)`, `model | data`, `gpjax.objectives.conjugate_mll` and `gpjax.fit`.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray

from pnkrylov.estimate import Estimate
from pnkrylov.gp.noisy import Factor, factor

try:
    from gpjax.conditioning import Posterior
    from gpjax.dataset import Dataset
    from gpjax.distributions import GaussianDistribution
    from gpjax.gps import ConjugateModel
    from gpjax.likelihoods import Gaussian
except ModuleNotFoundError as error:
    raise ImportError(
        "The gpjax bridge needs the package gpjax, which could not be imported "
        f"({error}). Install it with: pip install 'gpjax>=1.0'."
    ) from error


class KrylovPosterior(Posterior):
    """A process conditioned on data with Gaussian noise, through products only.

    Means and covariances are accurate to about `rtol`, with an error that the noise level proves
    (`pnkrylov.gp.roots`); variances are at least the exact ones. The log-determinant inside
    `log_marginal_likelihood` is an estimate from random probes: `logdet()` tells its standard
    error, and it is exact once `num_steps` reaches n. Derivatives in the parameters of the model
    never differentiate through an iteration.

    Attributes:
        prior: The gpjax prior.
        factor: The stand-in for the Cholesky factor.
        representer_weights: `(K + noise)^-1 (y - m(X))`, shape `(n,)`.
        log_marginal_likelihood: The evidence, half its log-determinant estimated.
    """

    prior: Any
    factor: Factor
    representer_weights: Float[Array, " n"]
    log_marginal_likelihood: Float[Array, ""]

    def __init__(
        self,
        prior: Any,
        likelihood: Any,
        train_data: Dataset,
        *,
        key: PRNGKeyArray | None = None,
        **options: Any,
    ):
        """Conditions a prior on data.

        Args:
            prior: gpjax prior; its jitter is added to the noise, as gpjax does.
            likelihood: gpjax Gaussian likelihood with one output.
            train_data: gpjax data set, X of shape `(n, p)` and y of shape `(n, 1)`.
            key: Random key, `jax.random.key(0)` by default.
            **options: `num_steps`, `num_probes`, `probe_depth`, `rtol`, `max_steps` and
                `block_rows` of `pnkrylov.gp.noisy.factor`.

        Raises:
            TypeError: The likelihood is not Gaussian, or dtypes differ.
            ValueError: There are several outputs, or as `pnkrylov.gp.noisy.factor`.
            PnkrylovError: As `pnkrylov.inverse`.
            PnkrylovError: `max_steps` are not enough for `rtol` (NaN inside `jit`).
        """
        if not isinstance(likelihood, Gaussian):
            raise TypeError(
                f"likelihood is {type(likelihood).__name__}; only Gaussian noise gives a Gaussian "
                "posterior. Use gpjax's own model for others."
            )
        X, y = train_data.X, train_data.y
        if X is None or y is None:
            raise ValueError("train_data has no X or no y; conditioning needs both.")
        if y.shape[1] != 1 or likelihood.num_outputs != 1:
            raise ValueError(
                f"y has shape {y.shape} for {likelihood.num_outputs} outputs of the likelihood; "
                "only one is supported. Condition a model for each output."
            )
        noise = likelihood.noise_vector(len(X)).astype(X.dtype) + prior.jitter
        self.prior = prior
        self.factor = factor(prior.kernel, X, noise, key=key, **options)
        residual = (y - prior.mean_function(X)).T
        white = self.factor.inverse_root(residual, transpose=False)
        self.representer_weights = self.factor.inverse_root(white, transpose=True)[0]
        normalization = self.factor.half_logdet() + 0.5 * len(X) * math.log(2 * math.pi)
        self.log_marginal_likelihood = -0.5 * jnp.sum(white**2) - normalization

    def logdet(self) -> Estimate:
        """The log-determinant of `K + noise` with its standard error; costs nothing."""
        return self.factor.belief.logdet()

    def __call__(
        self, test_inputs: Float[Array, "s p"], *, covariance: str = "dense"
    ) -> GaussianDistribution:
        """The process at test inputs.

        Args:
            test_inputs: Points, shape `(s, p)`.
            covariance: `"dense"` for the joint covariance, `"diagonal"` for the variances.

        Returns:
            gpjax's Gaussian distribution. Its `scale` is a lineax operator tagged positive
            semidefinite, with gpjax's jitter on its diagonal.

        Raises:
            ValueError: `covariance` is unknown, or the points look unlike the inputs.
            PnkrylovError: `max_steps` are not enough for `rtol` (NaN inside `jit`).
        """
        if covariance not in ("dense", "diagonal"):
            raise ValueError(f"covariance={covariance!r} must be 'dense' or 'diagonal'.")
        kernel, jitter = self.factor.operator.bare.kernel, self.prior.jitter
        cross = self.factor.operator.bare.cross(test_inputs)
        mean = self.prior.mean_function(test_inputs)[:, 0] + cross @ self.representer_weights
        white = self.factor.inverse_root(cross, transpose=False)
        if covariance == "diagonal":
            explained = jnp.sum(white**2, axis=1)
            variances = jnp.maximum(kernel.diagonal(test_inputs) - explained, 0) + jitter
            scale = lx.DiagonalLinearOperator(variances)
        else:
            explained = jnp.matmul(white, white.T, precision=jax.lax.Precision.HIGHEST)
            matrix = _semidefinite(kernel.matrix(test_inputs, test_inputs) - explained)
            scale = lx.MatrixLinearOperator(
                matrix + jitter * jnp.eye(len(matrix), dtype=matrix.dtype)
            )
        tagged = lx.TaggedLinearOperator(scale, lx.positive_semidefinite_tag)
        return GaussianDistribution(loc=mean, scale=tagged)


class KrylovModel(ConjugateModel):
    """A gpjax model with Gaussian noise whose conditioning is a `KrylovPosterior`.

    Attributes:
        seed: Seed of the random key: `gpjax.fit` would take an array for a parameter.
        options: Further options of the posterior.
    """

    seed: int = eqx.field(static=True)
    options: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    def __init__(self, model: ConjugateModel, *, seed: int = 0, **options: Any):
        """Takes over the prior and the likelihood of a model.

        Args:
            model: `prior * likelihood` with a Gaussian likelihood.
            seed: Seed of the posterior's random key.
            **options: Other options of `KrylovPosterior`.
        """
        super().__init__(prior=model.prior, likelihood=model.likelihood)
        self.seed = seed
        self.options = tuple(sorted(options.items()))

    def condition(self, train_data: Dataset) -> KrylovPosterior:
        """Conditions on data; see `KrylovPosterior` for what is raised."""
        key = jax.random.key(self.seed)
        return KrylovPosterior(
            self.prior, self.likelihood, train_data, key=key, **dict(self.options)
        )


def _semidefinite(matrix: Float[Array, "s s"]) -> Float[Array, "s s"]:
    """The nearest positive semidefinite matrix; derivatives are those of `matrix`."""
    matrix = (matrix + matrix.T) / 2
    eigenvalues, vectors = jnp.linalg.eigh(jax.lax.stop_gradient(matrix))
    # Sums of tolerances, at most: what is taken away has no derivative worth having.
    excess = vectors * jnp.minimum(eigenvalues, 0)[None, :]
    return matrix - jnp.matmul(excess, vectors.T, precision=jax.lax.Precision.HIGHEST)
