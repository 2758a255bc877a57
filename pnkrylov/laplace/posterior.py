"""The Laplace posterior: a Gaussian over parameters, its draws, predictions and evidence."""

import dataclasses
import os
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._arguments import check_array, check_counts, check_positive_counts
from pnkrylov._operator_types import SPDOperator
from pnkrylov.estimate import Estimate
from pnkrylov.gaussian import DenseGaussian
from pnkrylov.krylov import is_concrete
from pnkrylov.laplace.covariances import BeliefCovariance, PosteriorCovariance, PrecisionOperator
from pnkrylov.laplace.files import belief_statics, write
from pnkrylov.laplace.likelihoods import Gaussian, Likelihood
from pnkrylov.laplace.network import Network
from pnkrylov.laplace.predictive import CLOSED_FORMS, Kind, Predictive, resolve_kind
from pnkrylov.laplace.prior import Prior
from pnkrylov.preconditioners._checks import as_scalar

# What the variances of each method are, compared with those of the exact posterior.
_TRUST = {
    "exact": "exact",
    "krylov": "total variance calibrated, single variances neither bounds nor calibrated",
    "ciq": "draws exact to the tolerance, covariances from a fixed set of draws",
    "diagonal": "neither conservative nor calibrated: correlations are ignored",
    "last-layer": "overconfident: exact for the last layer, no variance elsewhere",
    "eigen": "conservative up to the residuals of the Ritz pairs: prior variance on the rest",
    "subspace": "overconfident: no variance outside the subspace",
}


class LaplacePosterior(eqx.Module):
    """`N(theta*, (G + prior precision)^-1)`, made by `pnkrylov.laplace.fit`.

    Attributes:
        network: the model and its parameters at the estimate theta*.
        likelihood: what the outputs say about targets.
        prior: the prior precision.
        covariance: that of the scaled parameters, per unit of `curvature_scale`.
        loss: `-log p(data | theta*)`, of all the data that the curvature stands for.
        num_targets: how many numbers were observed (for the noise of a Gaussian likelihood).
        curvature_scale: factor on the curvature that `covariance` knows (a changed noise level).
        curvature: the operator G, for refinement; None after loading or where it is not needed.
        method: how the covariance was made.
        reason: why this method, where `"auto"` chose it.
    """

    network: Network
    likelihood: Likelihood
    prior: Prior
    covariance: PosteriorCovariance
    loss: Float[Array, ""]
    num_targets: Float[Array, ""]
    curvature_scale: Float[Array, ""]
    curvature: SPDOperator | None
    method: str = eqx.field(static=True)
    reason: str = eqx.field(static=True)

    @property
    def size(self) -> int:
        """Number p of uncertain parameters."""
        return self.network.size

    @property
    def mean(self) -> PyTree:
        """All parameters at the estimate, in the user's structure."""
        return self.network.parameters.combine(self.network.parameters.flat())

    @property
    def prior_precision(self) -> Float[Array, ""]:
        """The scalar prior precision; with a pattern, its geometric mean."""
        return self.prior.precision

    @property
    def num_matvecs(self) -> int:
        """Products with the curvature that were spent (none by the exact method)."""
        return int(self.covariance.num_matvecs)

    def sample(self, key: PRNGKeyArray, num_samples: int) -> PyTree:
        """Draws of all parameters: one function per draw, whatever inputs it is evaluated at.

        Args:
            key: random key.
            num_samples: number of draws N.

        Returns:
            The user's pytree with a leading axis of length N on every array, ready for
            `eqx.filter_vmap(apply, in_axes=(0, None))`; fixed parameters are repeated.

        Raises:
            TypeError, ValueError: `num_samples` is no int or negative; `key` is no random key.
            ToleranceNotMetError: method `"ciq"` missed its tolerance.
        """
        draws = self.draws(key, num_samples)
        return eqx.filter_vmap(self.network.parameters.combine)(draws)

    def draws(self, key: PRNGKeyArray, num_samples: int) -> Float[Array, "N p"]:
        """As `sample` (errors, too: TypeError, ValueError), but flat rows of what is uncertain."""
        check_counts(num_samples=num_samples)
        scaled = self.covariance.sample(key, num_samples)
        centre = self.network.parameters.flat()
        return centre[None, :] + self.prior.unscale(scaled) / jnp.sqrt(self.curvature_scale)

    def variance(self) -> PyTree:
        """Marginal variances of the uncertain parameters, in their structure."""
        scaled = self.covariance.diagonal() / self.curvature_scale
        root = self.prior.root
        flat = scaled if root is None else scaled / root**2
        return self.network.parameters.structure.unravel(flat)

    def std(self) -> PyTree:
        """Marginal standard deviations of the uncertain parameters, in their structure."""
        return jax.tree.map(jnp.sqrt, self.variance())

    def push(self, rows: Float[Array, "k p"]) -> Float[Array, "k k"]:
        """`B Sigma B^T` for rows of B that act on the flat uncertain parameters.

        Raises:
            TypeError, ValueError: `rows` is no array `(k, p)` of the parameters' dtype.
        """
        check_array(rows, "rows", "k", "p")
        dtype = self.network.parameters.structure.dtype
        if rows.shape[1] != self.size or rows.dtype != dtype:
            raise ValueError(
                f"rows is {rows.dtype}{list(rows.shape)}, but {dtype}[k, {self.size}] is needed."
            )
        return self.covariance.push(self.prior.unscale(rows)) / self.curvature_scale

    def functional(self, x: PyTree) -> tuple[Float[Array, "n K"], Float[Array, "n K K"]]:
        """Mean and covariance of the outputs of the linearised network, input by input.

        Args:
            x: inputs, as `apply` takes them.

        Raises:
            ValueError: `x` is no array, or holds no example.
        """
        blocks = [self._blocks(count, part) for count, part in self.network.jacobian_chunks(x)]
        return self.network.outputs(x), jnp.concatenate(blocks)

    def functional_joint(self, x: PyTree) -> DenseGaussian:
        """The joint Gaussian of all n K outputs; a ValueError for inputs as in `functional`."""
        chunks = [part[:count] for count, part in self.network.jacobian_chunks(x)]
        rows = jnp.concatenate(chunks).reshape(-1, self.size)
        return DenseGaussian(mean=self.network.outputs(x).reshape(-1), covariance=self.push(rows))

    def predictive(
        self,
        x: PyTree,
        kind: Kind = "auto",
        *,
        key: PRNGKeyArray | None = None,
        num_samples: int = 64,
    ) -> Predictive:
        """Predictions with the uncertainty of the parameters integrated out.

        Args:
            x: inputs, as `apply` takes them.
            kind: `"probit"` (each logit by its variance) or `"mackay"` (each pair of logits by the
                variance of their difference) for classes; `"linear"` (closed form) for a Gaussian
                likelihood; `"mc-linear"` (draws, linearised network) or `"mc"` (draws, the
                network itself) for any. `"auto"` is probit, linear or mc-linear, in this order.
            key: random key of the draws.
            num_samples: number of draws.

        Raises:
            ValueError: the kind does not fit the likelihood, or `num_samples` is not positive.
            TypeError: a key is missing, `num_samples` is no int, or `x` does not fit the model.
        """
        kind_found = resolve_kind(kind, self.likelihood)
        if kind_found in CLOSED_FORMS:
            mean, covariance = self.functional(x)
            return Predictive(self.likelihood, mean, covariance, None, kind_found)
        if key is None:
            raise TypeError(f"key is missing: kind={kind_found!r} draws parameters.")
        check_positive_counts(num_samples=num_samples)
        draws = self.draws(key, num_samples)
        evaluate = self.network.linear_outputs
        if kind_found == "mc":
            evaluate = self.network.outputs_of_draws
        mean = self.network.outputs(x)
        return Predictive(self.likelihood, mean, None, evaluate(x, draws), kind_found)

    def log_evidence(self) -> Estimate:
        """The Laplace approximation of `log p(data)`, with its error bar.

        `-loss - precision * energy / 2 - log det(I + G / precision) / 2`: the factors 2 pi of prior
        and posterior cancel, and so do their determinants where the data say nothing. The error
        bar is that of the determinant: zero for the exact method.

        Source:
            METHOD.md section 9.
        """
        energy = self.prior.energy(self.network.parameters.flat())
        fit = -self.loss - 0.5 * self.prior.precision * energy
        ratio = self.covariance.logdet_ratio()
        lower, upper = ratio.quadrature_upper, ratio.quadrature_lower
        return Estimate(
            value=fit - 0.5 * ratio.value,
            standard_error=0.5 * ratio.standard_error,
            num_matvecs=ratio.num_matvecs,
            quadrature_lower=None if lower is None else fit - 0.5 * lower,
            quadrature_upper=None if upper is None else fit - 0.5 * upper,
            bracket=ratio.bracket,
        )

    def effective_dimension(self) -> Float[Array, ""]:
        """`tr G (G + precision)^-1`: how many parameters the data determine.

        Source:
            MacKay 1992.
        """
        return self.covariance.effective_dimension()

    def with_prior_precision(self, prior_precision: Any) -> "LaplacePosterior":
        """The posterior under another prior precision, around the same estimate.

        No product is spent for another scalar (or another multiple of the same pattern), except by
        `"ciq"`, which draws its fixed set again.

        Args:
            prior_precision: as in `fit`.

        Raises:
            TypeError: the precision is no real number.
            ValueError: the precision is not positive, or its pattern differs from that of `fit`.
            NotPositiveDefiniteError: it does not lift an indefinite curvature above zero.

        Source:
            METHOD.md section 12.
        """
        prior = Prior.of(prior_precision, self.network.parameters)
        if not self.prior.same_pattern(prior):
            raise ValueError(
                "The prior precision has another pattern over the parameters than that of this "
                "posterior, which only serves multiples of its own. Call fit again with "
                "prior_precision=..., or pass a number times the old one."
            )
        return self.with_precision(prior.precision)

    def with_precision(self, precision: float | Float[Array, ""]) -> "LaplacePosterior":
        """The same pattern of prior precisions with another geometric mean, at no product.

        For a scalar prior this is `with_prior_precision`.

        Args:
            precision: positive.

        Raises:
            TypeError, ValueError: it is not.
        """
        precision = _positive(precision, "precision", self.loss.dtype)
        prior = dataclasses.replace(self.prior, precision=precision)
        return self._again(prior, self.likelihood, self.loss, self.curvature_scale)

    def with_noise_precision(self, noise_precision: float | Float[Array, ""]) -> "LaplacePosterior":
        """The posterior under another precision of Gaussian noise, at no product.

        Args:
            noise_precision: 1 / variance of the noise, positive; it replaces a scalar precision.

        Raises:
            TypeError: the likelihood is not `Gaussian`.
            ValueError: the precision is not positive, or the old one is not a scalar.
        """
        if not isinstance(self.likelihood, Gaussian):
            raise TypeError(
                f"{type(self.likelihood).__name__} has no noise precision; only Gaussian has."
            )
        old = self.likelihood.precision.astype(self.loss.dtype)
        if old.ndim:
            raise ValueError(
                "The likelihood has a noise precision for each output, whose ratios are in the "
                "curvature. Call fit again with another likelihood."
            )
        new = _positive(noise_precision, "noise_precision", self.loss.dtype)
        loss = 0.5 * new * self.squared_error()
        loss = loss - 0.5 * self.num_targets * jnp.log(new / (2 * jnp.pi))
        return self._again(self.prior, Gaussian(new), loss, self.curvature_scale * new / old)

    def squared_error(self) -> Float[Array, ""]:
        """The sum of squared residuals of the training data, under a Gaussian likelihood.

        It is read off the loss, which is linear in it.
        """
        assert isinstance(self.likelihood, Gaussian)
        noise = self.likelihood.precision.astype(self.loss.dtype)
        return (2 * self.loss + self.num_targets * jnp.log(noise / (2 * jnp.pi))) / noise

    def refine(
        self,
        *,
        num_steps: int,
        key: PRNGKeyArray | None = None,
        curvature: SPDOperator | None = None,
        progress: bool = False,
    ) -> "LaplacePosterior":
        """More computation, less approximation: more Lanczos steps (method `"krylov"` only).

        Args:
            num_steps: further steps of the run.
            key: random key for new probes, used when the old ones have become too few.
            curvature: the operator, for a posterior that was loaded from a file.
            progress: show a progress bar.

        Raises:
            ValueError: the method cannot be refined, or there is no operator.
        """
        if not isinstance(self.covariance, BeliefCovariance):
            raise ValueError(
                f"method={self.method!r} has nothing to refine. Only 'krylov' has; for 'eigen' and "
                "'subspace' call fit again with a larger num_steps or rank."
            )
        operator = self.curvature if curvature is None else curvature
        if operator is None:
            raise ValueError(
                "This posterior was loaded from a file and holds no operator: pass curvature=, "
                "for example pnkrylov.laplace.ggn(apply, params, data, likelihood)."
            )
        belief = self.covariance.belief.refine(
            PrecisionOperator(operator, self.prior.root),
            num_steps=num_steps,
            key=key,
            progress=progress,
        )
        return dataclasses.replace(self, covariance=BeliefCovariance.of(belief))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the posterior to one file, for `pnkrylov.laplace.load`: numbers only, no code.

        Raises:
            TypeError: method `"ciq"`, which draws with its operator.
            ValueError: the posterior is traced.
            OSError: the file cannot be written; `FileNotFoundError` if its folder is missing.
        """
        static = {
            "method": self.method,
            "reason": self.reason,
            "likelihood": type(self.likelihood).__name__,
        }
        fields = {
            "precision": self.prior.precision,
            "root": self.prior.root,
            "loss": self.loss,
            "num_targets": self.num_targets,
            "curvature_scale": self.curvature_scale,
        }
        numbers = jax.tree.leaves(eqx.filter(self.likelihood, eqx.is_array))
        fields |= {f"likelihood.{index}": number for index, number in enumerate(numbers)}
        static |= belief_statics(self.covariance)
        write(path, static, self.network.parameters, fields, self.covariance)

    def _blocks(self, count: int, jacobian: Float[Array, "c K p"]) -> Float[Array, "n K K"]:
        chunk, outputs, _ = jacobian.shape
        joint = self.push(jacobian.reshape(chunk * outputs, -1))
        blocks = joint.reshape(chunk, outputs, chunk, outputs)
        own = jnp.arange(chunk, dtype=jnp.int32)
        return blocks[own, :, own, :][:count]

    def _again(
        self, prior: Prior, likelihood: Likelihood, loss: Array, curvature_scale: Array
    ) -> "LaplacePosterior":
        changed = dataclasses.replace(
            self, prior=prior, likelihood=likelihood, loss=loss, curvature_scale=curvature_scale
        )
        covariance = self.covariance.at_shift(prior.precision / curvature_scale)
        return dataclasses.replace(changed, covariance=covariance)

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.loss)
        whole = leaves and all(eqx.is_array(leaf) for leaf in leaves)
        return str(self) if whole else eqx.tree_pformat(self)

    def __str__(self) -> str:
        lines = [
            f"LaplacePosterior over {self.size} parameters, method {self.method!r}",
            f"  prior      precision {float(self.prior.precision):.4g}"
            + ("" if self.prior.root is None else " (geometric mean of a pattern)"),
            f"  loss       {float(self.loss):.6g} ({type(self.likelihood).__name__})",
            f"  spent      {self.num_matvecs} products with the curvature",
            f"  variances  {_TRUST[self.method]}",
        ]
        if self.reason:
            lines.append(f"  chosen     {self.reason}")
        return "\n".join(lines)


def _positive(value: Any, name: str, dtype: Any) -> Float[Array, ""]:
    number = as_scalar(value, name, dtype)
    if is_concrete(number) and not (float(number) > 0 and jnp.isfinite(number)):
        raise ValueError(f"{name}={float(number)} must be positive and finite: it is 1 / variance.")
    return number
