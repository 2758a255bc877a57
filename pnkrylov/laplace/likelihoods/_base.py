"""What every likelihood offers, and the checks that the families share.

Every family is a proper density, so that its negative logarithm, summed over the data, is the loss
of METHOD section 9, and gives the Hessian with respect to the outputs in closed form. Outputs are
`(n, K)` for n examples; nothing here knows the network.
"""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from pnkrylov.errors import NotFiniteError, PnkrylovError
from pnkrylov.krylov import is_concrete


class TargetError(PnkrylovError, ValueError):
    """Raised when a target lies outside the support of the likelihood."""


class Likelihood(eqx.Module):
    """A density p(y | f) of targets given the outputs f of a model, independent over examples.

    Targets are cast to the dtype of the outputs where numbers are computed with.
    """

    @abc.abstractmethod
    def negative_log_density(
        self, outputs: Float[Array, "n K"], targets: Any
    ) -> Float[Array, " n"]:
        """Returns `-log p(y_i | f_i)`, normalised, summed over the outputs of an example.

        Args:
            outputs: Outputs of the model, shape `(n, K)`.
            targets: n targets, as the family documents them.

        Returns:
            One value per example, in the dtype of the outputs.
        """

    @abc.abstractmethod
    def hessian_mv(
        self, outputs: Float[Array, "n K"], tangents: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K"]:
        """Returns `H_i t_i` with `H_i = d^2(-log p(y_i | f_i))/df^2`, shape `(n, K)`.

        Args:
            outputs: Outputs of the model, shape `(n, K)`.
            tangents: One vector per example, shape `(n, K)`.
            targets: Needed by `Custom` only; for the other families H does not depend on them.
        """

    @abc.abstractmethod
    def hessian_sqrt(
        self, outputs: Float[Array, "n K"], targets: Any = None
    ) -> Float[Array, "n K R"]:
        """Returns `L_i` with `L_i L_i^T = H_i`, shape `(n, K, R)` with `R = root_rank(K)`.

        Args:
            outputs: Outputs of the model, shape `(n, K)`.
            targets: Needed by `Custom` only.
        """

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray, outputs: Float[Array, "n K"]) -> Array:
        """Draws one target per example from p(y | f).

        Args:
            key: Random key.
            outputs: Outputs of the model, shape `(n, K)`.

        Returns:
            n targets in the form that `negative_log_density` takes.
        """

    @abc.abstractmethod
    def check_targets(self, outputs: Float[Array, "n K"], targets: Any) -> None:
        """Checks outputs and targets of this family against each other; see `check`."""

    def root_rank(self, num_outputs: int) -> int:
        """Number of columns R of `hessian_sqrt` for K outputs."""
        return num_outputs

    def check(self, outputs: Float[Array, "n K"], targets: Any) -> None:
        """Checks shapes always, and values when they are concrete (not under `jit`).

        Args:
            outputs: Outputs of the model, shape `(n, K)`.
            targets: n targets.

        Raises:
            ValueError: Shapes do not fit, or there is no example.
            TypeError: The targets have a dtype that the family has no use for.
            NotFiniteError: An output, a target or the loss is NaN or infinite.
            TargetError: A target lies outside the support.
            NotPositiveDefiniteError: A user's density has an indefinite Hessian (`Custom`).
        """
        if outputs.ndim != 2 or outputs.shape[0] == 0 or outputs.shape[1] == 0:
            raise ValueError(
                f"outputs has shape {tuple(outputs.shape)}; (n, K) with at least one example and "
                "one output is needed."
            )
        if is_concrete(outputs):
            bad = np.flatnonzero(~np.isfinite(np.asarray(outputs)).all(axis=1))
            if bad.size:
                raise NotFiniteError(
                    f"The outputs of {bad.size} of {outputs.shape[0]} examples are NaN or "
                    f"infinite, first that of example {bad[0]}. Check the inputs and the "
                    "parameters (diverged training?)."
                )
        self.check_targets(outputs, targets)
        if is_concrete((outputs, targets, self)):
            _check_finite_loss(np.asarray(losses_of(self, outputs, targets)))


@eqx.filter_jit
def losses_of(likelihood: Likelihood, outputs: Array, targets: Any) -> Array:
    """The negative log density of every example, compiled."""
    return likelihood.negative_log_density(outputs, targets)


def _check_finite_loss(losses: np.ndarray) -> None:
    if not np.isfinite(losses).all():
        index = int(np.argmin(np.isfinite(losses)))
        raise NotFiniteError(
            f"The loss -log p(y | f) of example {index} is {losses[index]}. Check its target and "
            "output; if it overflows, use float64."
        )


def check_numbers(targets: Any, shapes: tuple[tuple[int, ...], ...], family: str) -> None:
    """Refuses targets of another shape, complex ones, and concrete ones that are not finite."""
    shape = tuple(np.shape(targets))
    if shape not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(
            f"targets has shape {shape}, but {family} needs {expected} for these outputs. Reshape "
            "the targets, or check that inputs and targets belong together."
        )
    dtype = jnp.result_type(targets)
    real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    if not real and dtype != np.bool_:
        raise TypeError(f"targets has dtype {dtype}; {family} needs real numbers.")
    if is_concrete(targets) and not np.isfinite(np.asarray(targets)).all():
        index = int(np.argmin(np.isfinite(np.asarray(targets)).reshape(shape[0], -1).all(axis=1)))
        raise NotFiniteError(
            f"The target of example {index} is NaN or infinite. Remove incomplete examples first."
        )


def column_shapes(outputs: Array, columns: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Shapes of targets with one number per output; `(n,)` will do for a single output."""
    n, columns = outputs.shape[0], outputs.shape[1] if columns is None else columns
    return ((n, 1), (n,)) if columns == 1 else ((n, columns),)


def numbers(targets: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Targets as an array of the outputs' shape and dtype."""
    return jnp.asarray(targets).astype(dtype).reshape(shape)


def refuse(wrong: np.ndarray, targets: np.ndarray, needed: str) -> None:
    """Raises `TargetError` for the first example of which an entry is marked as wrong."""
    if wrong.any():
        where = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise TargetError(f"The target of example {where[0]} is {targets[where]}; {needed}")


def diagonal_root(diagonal: Float[Array, "n K"]) -> Float[Array, "n K K"]:
    """`(n, K, K)` diagonal matrices with the square roots of a diagonal."""
    identity = jnp.eye(diagonal.shape[1], dtype=diagonal.dtype)
    return jnp.sqrt(diagonal)[:, :, None] * identity[None, :, :]
