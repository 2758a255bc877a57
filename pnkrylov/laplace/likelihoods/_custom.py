"""A density that the user writes down."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from pnkrylov._structure import describe
from pnkrylov.errors import NotPositiveDefiniteError
from pnkrylov.krylov import is_concrete
from pnkrylov.laplace.likelihoods._base import Likelihood


class Custom(Likelihood):
    """A user's own density; derivatives by automatic differentiation.

    A GGN needs positive semi-definite H, that is a density that is log-concave in the outputs at
    the data. `check` refuses another one; use `curvature.fisher` or `curvature.hessian` then.

    Attributes:
        log_density: Function `(output, target) -> log p(target | output)` of one example: output
            `(K,)`, target of any shape, result a scalar. Normalised, if evidences are wanted.
        sampler: Function `(key, output) -> target` of one example, or None; the sampled Fisher and
            Monte-Carlo predictions need it.
    """

    log_density: Callable[[Array, Any], Array]
    sampler: Callable[[PRNGKeyArray, Array], Array] | None = None

    def __check_init__(self):
        if not callable(self.log_density):
            raise TypeError(
                f"log_density={self.log_density!r} must be a function (output, target) -> scalar."
            )

    def _loss(self, output: Array, target: Any) -> Array:
        value = self.log_density(output, target)
        if not eqx.is_array(value) or jnp.shape(value) != ():
            raise ValueError(
                f"log_density returned {describe(value)} for one example of shape "
                f"{output.shape}; it must return a scalar. Sum over the outputs."
            )
        return -value

    def negative_log_density(
        self, outputs: Float[Array, "n K"], targets: Any
    ) -> Float[Array, " n"]:
        """Returns `-log_density`, mapped over the examples."""
        return jax.vmap(self._loss)(outputs, _given(targets, outputs.dtype))

    def hessian_mv(
        self, outputs: Float[Array, "n K"], tangents: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K"]:
        """Returns `H t`, forward over reverse."""

        def product(output, tangent, target):
            gradient = jax.grad(lambda f: self._loss(f, target))
            return jax.jvp(gradient, (output,), (tangent,))[1]

        return jax.vmap(product)(outputs, tangents, _given(targets, outputs.dtype))

    def _hessians(self, outputs: Array, targets: Any) -> Array:
        return jax.vmap(jax.hessian(self._loss))(outputs, _given(targets, outputs.dtype))

    def hessian_sqrt(
        self, outputs: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K K"]:
        """Returns `V sqrt(w)` of the eigendecomposition; negative rounding is clipped."""
        values, vectors = jnp.linalg.eigh(self._hessians(outputs, targets))
        return vectors * jnp.sqrt(jnp.maximum(values, 0))[:, None, :]

    def sample(self, key: PRNGKeyArray, outputs: Float[Array, "n K"]) -> Array:
        """Draws with the user's `sampler`, one key per example."""
        if self.sampler is None:
            raise TypeError(
                "This Custom likelihood cannot draw targets: pass sampler=, a function "
                "(key, output) -> target of one example."
            )
        return jax.vmap(self.sampler)(jax.random.split(key, outputs.shape[0]), outputs)

    def check_targets(self, outputs: Float[Array, "n K"], targets: Any) -> None:
        """Checks the number of targets and what `log_density` returns.

        Raises:
            ValueError: there is not one target for each example, or `log_density` returns no
                scalar.
        """
        if np.ndim(targets) == 0 or np.shape(targets)[0] != outputs.shape[0]:
            raise ValueError(
                f"targets has shape {tuple(np.shape(targets))}; one target for each of the "
                f"{outputs.shape[0]} examples is needed."
            )
        jax.eval_shape(self.negative_log_density, outputs, targets)

    def check_definite(self, outputs: Float[Array, "n K"], targets: Any) -> None:
        """Raises unless every `H_i` is positive semi-definite up to rounding (concrete values).

        Raises:
            NotPositiveDefiniteError: An eigenvalue is negative.
        """
        if not is_concrete((self, outputs, targets)):
            return
        values = np.linalg.eigvalsh(np.asarray(_jitted_hessians(self, outputs, targets)))
        tolerance = 100 * float(jnp.finfo(outputs.dtype).eps) * np.abs(values).max()
        if values.min() < -tolerance:
            index = int(np.argmin(values.min(axis=1)))
            raise NotPositiveDefiniteError(
                f"The Hessian of -log p with respect to the outputs of example {index} has the "
                f"eigenvalue {values.min():.6g}: the density is not log-concave in the outputs, so "
                "that its GGN is indefinite. Use curvature.fisher(...), which is always positive "
                "semi-definite, or curvature.hessian(...) with a prior that outweighs it."
            )


def _given(targets: Any, dtype: Any) -> Array:
    """Targets as an array; real ones in the dtype of the outputs."""
    if targets is None:
        raise TypeError("targets=None: the Hessian of a user's density needs the targets.")
    targets = jnp.asarray(targets)
    return targets.astype(dtype) if jnp.issubdtype(targets.dtype, jnp.floating) else targets


@eqx.filter_jit
def _jitted_hessians(likelihood: Custom, outputs: Array, targets: Any) -> Array:
    return likelihood._hessians(outputs, targets)
