"""A belief about A^-1 as a change of variables: the sampler sees a nearly isotropic target.

A belief's covariance is a small matrix inside the span of its basis and a multiple of the identity
outside. So its symmetric root is known after one small eigendecomposition, and costs two products
with the basis, O(n d), in either direction.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, PyTree

from pnkrylov._arguments import check_square
from pnkrylov._structure import VectorStructure
from pnkrylov.covariance import KrylovCovariance
from pnkrylov.errors import NotPositiveDefiniteError
from pnkrylov.krylov import is_concrete
from pnkrylov.preconditioned import PreconditionedCovariance
from pnkrylov.preconditioners.base import Preconditioner

_HIGHEST = jax.lax.Precision.HIGHEST
# Covariances of unknown structure are made dense up to this size.
_LARGEST_DENSE = 4096


class CovarianceRoot(eqx.Module):
    """A square, invertible F with `Sigma = F F^T`, by its products."""

    @abc.abstractmethod
    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`F v`."""

    @abc.abstractmethod
    def transpose_mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`F^T v`."""

    @abc.abstractmethod
    def inverse_mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`F^-1 v`."""

    @abc.abstractmethod
    def inverse_transpose_mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`F^-T v`."""

    @abc.abstractmethod
    def logdet(self) -> Float[Array, ""]:
        """`log |det F|`."""


class SymmetricRoot(CovarianceRoot):
    """The symmetric root of `Sigma = V^T diag(s^2) V + b^2 (I - V^T V)`; V has orthonormal rows.

    Attributes:
        vectors: `(n, d)`, V; a row may be zero (and has no effect then).
        deviations: `(n,)`, s, positive.
        bulk_deviation: b, positive.
    """

    vectors: Float[Array, "n d"]
    deviations: Float[Array, " n"]
    bulk_deviation: Float[Array, ""]

    def _power(self, vector: Array, exponent: int) -> Array:
        bulk = self.bulk_deviation**exponent
        coordinates = jnp.matmul(self.vectors, vector, precision=_HIGHEST)
        inside = (self.deviations**exponent - bulk) * coordinates
        return bulk * vector + jnp.matmul(inside, self.vectors, precision=_HIGHEST)

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`Sigma^{1/2} v`."""
        return self._power(vector, 1)

    def transpose_mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`Sigma^{1/2} v`."""
        return self._power(vector, 1)

    def inverse_mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`Sigma^{-1/2} v`."""
        return self._power(vector, -1)

    def inverse_transpose_mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`Sigma^{-1/2} v`."""
        return self._power(vector, -1)

    def logdet(self) -> Float[Array, ""]:
        """`log det Sigma^{1/2}`."""
        # A zero row stands for no direction; the others are of unit length.
        filled = jnp.sum(self.vectors**2, axis=1) > 0.5
        inside = jnp.sum(jnp.where(filled, jnp.log(self.deviations), 0))
        left = self.vectors.shape[1] - jnp.sum(filled, dtype=jnp.int32)
        outside = left.astype(self.vectors.dtype) * jnp.log(self.bulk_deviation)
        return inside + jnp.where(left > 0, outside, 0)


class PreconditionedRoot(CovarianceRoot):
    """`F = P^{-1/2} G` for the symmetric root G that a preconditioned run gives; not symmetric.

    Attributes:
        inner: G.
        preconditioner: P.
    """

    inner: SymmetricRoot
    preconditioner: Preconditioner

    def mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`P^{-1/2} G v`."""
        return self.preconditioner.inv_sqrt_mv(self.inner.mv(vector))

    def transpose_mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`G P^{-1/2} v`."""
        return self.inner.mv(self.preconditioner.inv_sqrt_mv(vector))

    def inverse_mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`G^-1 P^{1/2} v`."""
        return self.inner.inverse_mv(self.preconditioner.sqrt_mv(vector))

    def inverse_transpose_mv(self, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        """`P^{1/2} G^-1 v`."""
        return self.preconditioner.sqrt_mv(self.inner.inverse_mv(vector))

    def logdet(self) -> Float[Array, ""]:
        """`log |det F|`."""
        return self.inner.logdet() - self.preconditioner.logdet() / 2


@functools.singledispatch
def covariance_root(covariance: Any) -> CovarianceRoot:
    """A square root of a covariance, as a map from d to d numbers and back.

    Args:
        covariance: that of an `InverseBelief` (preconditioned or not): one eigendecomposition of
            an n x n matrix for a basis of n vectors, never a dense d x d matrix; an array
            `(d, d)`; a lineax diagonal operator; or any other lineax operator, which is made dense
            (d at most 4096).

    Returns:
        A `CovarianceRoot`: the symmetric root, except with a preconditioner.

    Raises:
        TypeError: not a covariance; or singular by construction (that of a `SolveBelief`).
        ValueError: an array is not square; an operator of unknown structure is too large to be
            made dense.
        NotPositiveDefiniteError: an eigenvalue is not positive (only seen outside `jit`).
    """
    if isinstance(covariance, lx.AbstractLinearOperator):
        size = covariance.in_size()
        if size > _LARGEST_DENSE:
            raise ValueError(
                f"{type(covariance).__name__} has no known square root, and d={size} is too large "
                f"to make it dense (at most {_LARGEST_DENSE}): pass an InverseBelief of "
                "pnkrylov.inverse about the same precision."
            )
        return _dense_root(covariance.as_matrix())
    raise TypeError(
        f"covariance is of type {type(covariance).__name__}: pass a belief's covariance, a lineax "
        "operator or an array."
    )


@covariance_root.register
def _(covariance: KrylovCovariance) -> SymmetricRoot:
    if covariance.resolved is None:
        raise TypeError(
            "The covariance of a SolveBelief is singular (it is zero on what the run resolved): "
            "whiten with an InverseBelief, pnkrylov.inverse(A, mean=..., key=...)."
        )
    values, axes = jnp.linalg.eigh(covariance.push(covariance.vectors))
    vectors = jnp.matmul(axes.T, covariance.vectors, precision=_HIGHEST)
    # Unfilled rows of the basis are zero, and so are the axes that they span.
    filled = jnp.sum(vectors**2, axis=1) > 0.5
    values = jnp.where(filled, values, 1)
    _check_definite(values, covariance)
    # Where nothing is left for the bulk its deviation may be zero, and any other will do.
    left = covariance.size - jnp.sum(filled, dtype=jnp.int32)
    bulk = jnp.where(left > 0, covariance.bulk_deviation, jnp.sqrt(values[-1]))
    _check_definite(bulk, covariance)
    return SymmetricRoot(jnp.where(filled[:, None], vectors, 0), jnp.sqrt(values), bulk)


@covariance_root.register
def _(covariance: PreconditionedCovariance) -> PreconditionedRoot:
    inner = covariance_root(covariance.inner)
    assert isinstance(inner, SymmetricRoot)
    return PreconditionedRoot(inner, covariance.preconditioner)


@covariance_root.register(jax.Array)
@covariance_root.register(np.ndarray)
def _(covariance: Any) -> SymmetricRoot:
    check_square(covariance, "covariance")
    return _dense_root(jnp.asarray(covariance))


@covariance_root.register
def _(covariance: lx.DiagonalLinearOperator) -> SymmetricRoot:
    variances = lx.diagonal(covariance)
    _check_definite(variances, covariance)
    vectors = jnp.eye(variances.shape[0], dtype=variances.dtype)
    return SymmetricRoot(vectors, jnp.sqrt(variances), jnp.sqrt(jnp.max(variances)))


def _dense_root(matrix: Float[Array, "d d"]) -> SymmetricRoot:
    values, axes = jnp.linalg.eigh(matrix)
    _check_definite(values, matrix)
    deviations = jnp.sqrt(values)
    return SymmetricRoot(axes.T, deviations, deviations[-1])


def _check_definite(values: Array, covariance: Any) -> None:
    if is_concrete(values) and not np.all(np.asarray(values) > 0):
        raise NotPositiveDefiniteError(
            f"The covariance ({type(covariance).__name__}) has the eigenvalue "
            f"{np.min(np.asarray(values)):.3g}: it must be positive definite to whiten with it. "
            "Resolve more of the precision, or use float64."
        )


class WhitenedTarget(eqx.Module):
    """A target in the coordinates `z = F^-1 (x - mean)` of a belief; `Sigma = F F^T`.

    Call it with a flat z `(d,)` for the log-density: it is what a sampler takes. If the belief is
    right, the target is N(0, I) in these coordinates.

    Attributes:
        logdensity: the log-density in the user's coordinates and structure.
        mean: `(d,)`, flat.
        root: F, the symmetric root of Sigma unless a preconditioner shapes it.
        structure: the user's vectors.
    """

    logdensity: Callable[[PyTree], Float[Array, ""]]
    mean: Float[Array, " d"]
    root: CovarianceRoot
    structure: VectorStructure = eqx.field(static=True)

    def __call__(self, z: Float[Array, " d"]) -> Float[Array, ""]:
        """`log p(x(z)) + log |det F|`: normalised if the target was."""
        return self.logdensity(self.position(z)) + self.root.logdet()

    def position(self, z: Float[Array, " d"]) -> PyTree:
        """`mean + F z`, in the user's structure (`jax.vmap` it over draws)."""
        return self.structure.unravel(self.mean + self.root.mv(z))

    def white(self, x: PyTree) -> Float[Array, " d"]:
        """`F^-1 (x - mean)`: the inverse of `position`."""
        self.structure.check(x, "x", expected_by="the belief")
        return self.root.inverse_mv(self.structure.ravel(x) - self.mean)


def whiten(logdensity: Callable[[PyTree], Float[Array, ""]], belief: Any) -> WhitenedTarget:
    """Turns a target and a Gaussian belief about it into a well-conditioned target.

    Args:
        logdensity: log-density of the target (up to a constant), in the belief's structure.
        belief: an `InverseBelief` about the precision at the mode with the mode as its `mean`, or
            any object with `mean_flat`, `structure` and a `covariance` that `covariance_root` takes
            (a Laplace posterior).

    Returns:
        A `WhitenedTarget`: call it for the log-density of z, `position(z)` for the way back.

    Raises:
        TypeError: the belief lacks one of the three attributes, or is a `SolveBelief`.
        NotPositiveDefiniteError: the covariance is singular.

    Source:
        hmc_condition_number.md, section 5 (preconditioning is a change of variables).
    """
    if not callable(logdensity):
        raise TypeError(f"logdensity must be a function of the position, got {logdensity!r}.")
    missing = [n for n in ("mean_flat", "structure", "covariance") if not hasattr(belief, n)]
    if missing:
        raise TypeError(
            f"belief is of type {type(belief).__name__} without {', '.join(missing)}: pass an "
            "InverseBelief, pnkrylov.inverse(A, mean=..., key=...)."
        )
    root = covariance_root(belief.covariance)
    return WhitenedTarget(logdensity, belief.mean_flat, root, belief.structure)
