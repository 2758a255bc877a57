"""Real targets: Gaussian noise, of one level or of one that depends on the input."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from pnkrylov._arguments import check_reals
from pnkrylov.krylov import is_concrete
from pnkrylov.laplace.likelihoods._base import (
    Likelihood,
    check_numbers,
    column_shapes,
    diagonal_root,
    numbers,
)

LOG_2PI = float(np.log(2 * np.pi))


def _as_real(value: Any) -> Array:
    check_reals(precision=value)
    array = jnp.asarray(value)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(float)


class Gaussian(Likelihood):
    """Regression: `y = f + noise`, noise of a known precision. H = precision * I.

    Targets are real, `(n, K)` (or `(n,)` for K = 1).

    Attributes:
        precision: 1 / variance of the noise, a positive scalar or one per output `(K,)`.

    Raises:
        TypeError: `precision` is no real number or array of them.
        ValueError: it is not positive and finite, or has two axes.
    """

    precision: Array = eqx.field(converter=_as_real, default=1.0)  # pyright: ignore

    def __check_init__(self):
        shape = jnp.shape(self.precision)
        if len(shape) > 1:
            raise ValueError(f"precision has shape {shape}; a scalar or one per output is needed.")
        if is_concrete(self.precision) and isinstance(self.precision, jax.Array):
            value = np.asarray(self.precision)
            if not (np.isfinite(value).all() and (value > 0).all()):
                raise ValueError(
                    f"precision={value} must be positive and finite: it is 1 / variance."
                )

    @classmethod
    def fit(cls, outputs: Float[Array, "n K"], targets: Any) -> "Gaussian":
        """The maximum-likelihood precision of given residuals, one for all outputs.

        Args:
            outputs: Outputs of the model, shape `(n, K)`.
            targets: Real, `(n, K)`.

        Raises:
            ValueError: Shapes do not fit, or the residuals are all zero.
        """
        check_numbers(targets, column_shapes(outputs), "Gaussian")
        residuals = outputs - numbers(targets, outputs.shape, outputs.dtype)
        return cls(1 / jnp.mean(residuals**2))

    def _precision(self, outputs: Array) -> Array:
        return jnp.broadcast_to(self.precision.astype(outputs.dtype), outputs.shape[1:])[None, :]

    def negative_log_density(
        self, outputs: Float[Array, "n K"], targets: Any
    ) -> Float[Array, " n"]:
        """Returns `sum_k (rho_k (y_k - f_k)^2 - log rho_k + log 2 pi) / 2` per example."""
        precision = self._precision(outputs)
        residuals = outputs - numbers(targets, outputs.shape, outputs.dtype)
        return 0.5 * jnp.sum(precision * residuals**2 - jnp.log(precision) + LOG_2PI, axis=1)

    def hessian_mv(
        self, outputs: Float[Array, "n K"], tangents: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K"]:
        """Returns `precision * t`."""
        return self._precision(outputs) * tangents

    def hessian_sqrt(
        self, outputs: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K K"]:
        """Returns `sqrt(precision) * I`."""
        return diagonal_root(jnp.broadcast_to(self._precision(outputs), outputs.shape))

    def sample(self, key: PRNGKeyArray, outputs: Float[Array, "n K"]) -> Float[Array, "n K"]:
        """Draws `f + noise`."""
        noise = jax.random.normal(key, outputs.shape, outputs.dtype)
        return outputs + noise / jnp.sqrt(self._precision(outputs))

    def check_targets(self, outputs: Float[Array, "n K"], targets: Any) -> None:
        """Checks shapes and finiteness, and the precision against the number of outputs."""
        check_numbers(targets, column_shapes(outputs), "Gaussian")
        if self.precision.ndim == 1 and self.precision.shape[0] != outputs.shape[1]:
            raise ValueError(
                f"precision has {self.precision.shape[0]} entries, but there are "
                f"{outputs.shape[1]} outputs. Pass a scalar or one per output."
            )


class HeteroscedasticGaussian(Likelihood):
    """Regression with a noise level that depends on the input.

    Of 2 M outputs the first M are means, the last M logarithms of variances. Targets are real,
    `(n, M)` (or `(n,)` for M = 1).

    The exact output Hessian `[[1/s, r/s], [r/s, r^2/(2 s)]]` (variance s, residual r) has the
    determinant `-r^2/(2 s^2)`: it is indefinite at every residual that is not zero, and would give
    no positive semi-definite GGN. H here is its expectation over p(y | f), `diag(1/s, 1/2)`, the
    Fisher information of the outputs. `curvature.hessian` differentiates the loss itself and is
    not affected.
    """

    def _split(self, outputs: Array) -> tuple[Array, Array]:
        means, log_variances = jnp.split(outputs, 2, axis=1)
        return means, log_variances

    def _information(self, outputs: Array) -> Array:
        _, log_variances = self._split(outputs)
        half = jnp.full_like(log_variances, 0.5)
        return jnp.concatenate([jnp.exp(-log_variances), half], axis=1)

    def negative_log_density(
        self, outputs: Float[Array, "n K"], targets: Any
    ) -> Float[Array, " n"]:
        """Returns `sum ((y - mean)^2 / s + log s + log 2 pi) / 2` per example."""
        means, log_variances = self._split(outputs)
        squares = (numbers(targets, means.shape, outputs.dtype) - means) ** 2
        terms = squares * jnp.exp(-log_variances) + log_variances + LOG_2PI
        return 0.5 * jnp.sum(terms, axis=1)

    def hessian_mv(
        self, outputs: Float[Array, "n K"], tangents: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K"]:
        """Returns the *expected* Hessian `diag(1/s, 1/2)` times t."""
        return self._information(outputs) * tangents

    def hessian_sqrt(
        self, outputs: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K K"]:
        """Returns `diag(1/sqrt(s), 1/sqrt(2))`."""
        return diagonal_root(self._information(outputs))

    def sample(self, key: PRNGKeyArray, outputs: Float[Array, "n K"]) -> Float[Array, "n M"]:
        """Draws `mean + sqrt(s) * noise`, shape `(n, M)`."""
        means, log_variances = self._split(outputs)
        noise = jax.random.normal(key, means.shape, outputs.dtype)
        return means + jnp.exp(0.5 * log_variances) * noise

    def check_targets(self, outputs: Float[Array, "n K"], targets: Any) -> None:
        """Checks that outputs come in pairs, shapes, and finiteness."""
        if outputs.shape[1] % 2:
            raise ValueError(
                f"The model has {outputs.shape[1]} outputs; a heteroscedastic Gaussian needs an "
                "even number: means first, then logarithms of variances."
            )
        shapes = column_shapes(outputs, outputs.shape[1] // 2)
        check_numbers(targets, shapes, "HeteroscedasticGaussian")
