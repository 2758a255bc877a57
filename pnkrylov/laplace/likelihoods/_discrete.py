"""Classes, yes-or-no targets and counts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from pnkrylov.krylov import is_concrete
from pnkrylov.laplace.likelihoods._base import (
    Likelihood,
    check_numbers,
    column_shapes,
    diagonal_root,
    numbers,
    refuse,
)


class Categorical(Likelihood):
    """Classification into K >= 2 classes; outputs are logits. H = diag(p) - p p^T.

    Targets are integer labels 0 .. K-1, shape `(n,)`.
    """

    def negative_log_density(
        self, outputs: Float[Array, "n K"], targets: Any
    ) -> Float[Array, " n"]:
        """Returns `log sum_k exp(f_k) - f_y` per example."""
        labels = jnp.asarray(targets)[:, None]
        return -jnp.take_along_axis(jax.nn.log_softmax(outputs, axis=1), labels, axis=1)[:, 0]

    def hessian_mv(
        self, outputs: Float[Array, "n K"], tangents: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K"]:
        """Returns `p * (t - p.t)`."""
        p = jax.nn.softmax(outputs, axis=1)
        # A dot product, not sum(p * t): XLA:CPU of jaxlib 0.10.2 gets that wrong under jit and vmap
        # beyond 32768 entries (jax issue 39103).
        inner = jnp.einsum("nk,nk->n", p, tangents, precision="highest")
        return p * (tangents - inner[:, None])

    def hessian_sqrt(
        self, outputs: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K R"]:
        """Returns K x (K-1) square roots in closed form.

        `diag(s) - p s^T` with `s = sqrt(p)` is a root whose null vector is s. A Householder
        reflection that takes s to the first axis turns that into a zero column, which is dropped:
        H has rank K-1, and every row of a stored square root is paid for.
        """
        s = jnp.exp(0.5 * jax.nn.log_softmax(outputs, axis=1))
        tail = s[:, None, 1:] / (1 + s[:, :1])[:, :, None]
        first_axis = jnp.zeros_like(s).at[:, 0].set(1)
        reflected = jnp.eye(s.shape[1], dtype=s.dtype)[None, :, 1:]
        return s[:, :, None] * (reflected - (s + first_axis)[:, :, None] * tail)

    def root_rank(self, num_outputs: int) -> int:
        """K - 1: logits are defined up to a constant."""
        return num_outputs - 1

    def sample(self, key: PRNGKeyArray, outputs: Float[Array, "n K"]) -> Array:
        """Draws labels, int32 `(n,)`."""
        return jax.random.categorical(key, outputs, axis=1).astype(jnp.int32)

    def check_targets(self, outputs: Float[Array, "n K"], targets: Any) -> None:
        """Checks shape, dtype and range of the labels."""
        classes = outputs.shape[1]
        if classes < 2:
            raise ValueError(
                "The model has a single output, and a categorical likelihood needs one logit per "
                "class. Use Bernoulli() for two classes with one logit."
            )
        if np.ndim(targets) == 2:
            raise ValueError(
                f"targets has shape {tuple(np.shape(targets))}: Categorical takes integer labels "
                "(n,). From one-hot rows, take targets.argmax(axis=1)."
            )
        check_numbers(targets, ((outputs.shape[0],),), "Categorical")
        if not jnp.issubdtype(jnp.result_type(targets), jnp.integer):
            raise TypeError(
                f"targets has dtype {jnp.result_type(targets)}, but Categorical needs integer "
                "labels. Cast them with .astype(int)."
            )
        if is_concrete(targets):
            labels = np.asarray(targets)
            needed = (
                f"the model has {classes} outputs, so labels must lie in 0..{classes - 1}. "
                "Number the classes from 0, or check the width of the last layer."
            )
            refuse((labels < 0) | (labels >= classes), labels, needed)


class Bernoulli(Likelihood):
    """K independent yes-or-no targets; outputs are logits. H = diag(p (1 - p)).

    Targets are 0 or 1 of any real dtype or bool, `(n, K)` (or `(n,)` for K = 1).
    """

    def _variance(self, outputs: Array) -> Array:
        return jax.nn.sigmoid(outputs) * jax.nn.sigmoid(-outputs)

    def negative_log_density(
        self, outputs: Float[Array, "n K"], targets: Any
    ) -> Float[Array, " n"]:
        """Returns `sum_k log(1 + exp(f_k)) - y_k f_k` per example."""
        targets = numbers(targets, outputs.shape, outputs.dtype)
        # softplus(f) - y f, without the cancellation that it has for large f.
        losses = targets * jax.nn.softplus(-outputs) + (1 - targets) * jax.nn.softplus(outputs)
        return jnp.sum(losses, axis=1)

    def hessian_mv(
        self, outputs: Float[Array, "n K"], tangents: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K"]:
        """Returns `p (1 - p) t`."""
        return self._variance(outputs) * tangents

    def hessian_sqrt(
        self, outputs: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K K"]:
        """Returns `diag(sqrt(p (1 - p)))`."""
        return diagonal_root(self._variance(outputs))

    def sample(self, key: PRNGKeyArray, outputs: Float[Array, "n K"]) -> Float[Array, "n K"]:
        """Draws zeros and ones, `(n, K)`, in the dtype of the outputs."""
        draws = jax.random.bernoulli(key, jax.nn.sigmoid(outputs))
        return draws.astype(outputs.dtype)

    def check_targets(self, outputs: Float[Array, "n K"], targets: Any) -> None:
        """Checks shapes, and that every target is 0 or 1."""
        check_numbers(targets, column_shapes(outputs), "Bernoulli")
        if is_concrete(targets):
            values = np.asarray(targets)
            refuse((values != 0) & (values != 1), values, "Bernoulli targets are 0 or 1.")


class Poisson(Likelihood):
    """Counts; outputs are logarithms of rates. H = diag(exp(f)).

    Targets are non-negative whole numbers of any real dtype, `(n, K)` (or `(n,)` for K = 1).
    """

    def negative_log_density(
        self, outputs: Float[Array, "n K"], targets: Any
    ) -> Float[Array, " n"]:
        """Returns `sum_k exp(f_k) - y_k f_k + log y_k!` per example."""
        targets = numbers(targets, outputs.shape, outputs.dtype)
        factorial = jax.scipy.special.gammaln(targets + 1)
        return jnp.sum(jnp.exp(outputs) - targets * outputs + factorial, axis=1)

    def hessian_mv(
        self, outputs: Float[Array, "n K"], tangents: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K"]:
        """Returns `exp(f) t`."""
        return jnp.exp(outputs) * tangents

    def hessian_sqrt(
        self, outputs: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K K"]:
        """Returns `diag(exp(f / 2))`."""
        return diagonal_root(jnp.exp(outputs))

    def sample(self, key: PRNGKeyArray, outputs: Float[Array, "n K"]) -> Float[Array, "n K"]:
        """Draws counts, `(n, K)`, in the dtype of the outputs."""
        return jax.random.poisson(key, jnp.exp(outputs)).astype(outputs.dtype)

    def check_targets(self, outputs: Float[Array, "n K"], targets: Any) -> None:
        """Checks shapes, and that every target is a count."""
        check_numbers(targets, column_shapes(outputs), "Poisson")
        if is_concrete(targets):
            values = np.asarray(targets)
            wrong = (values < 0) | (values != np.floor(values))
            refuse(wrong, values, "Poisson targets are counts 0, 1, 2, ...")
