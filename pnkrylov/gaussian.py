"""What every Gaussian belief can do: its mean, its spread, draws, and push-forwards."""

import abc
import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._arguments import check_counts, check_reals
from pnkrylov._operator_types import CovarianceOperator
from pnkrylov._structure import VectorStructure
from pnkrylov.estimate import normal_interval
from pnkrylov.results import RESULTS

_HIGHEST = jax.lax.Precision.HIGHEST


class DenseGaussian(eqx.Module):
    """A small Gaussian with a dense covariance: what is known about `B x`.

    Attributes:
        mean: `(k,)`.
        covariance: `(k, k)`.
    """

    mean: Float[Array, " k"]
    covariance: Float[Array, "k k"]

    def variance(self) -> Float[Array, " k"]:
        """The marginal variances."""
        return jnp.diagonal(self.covariance)

    def std(self) -> Float[Array, " k"]:
        """The marginal standard deviations."""
        return jnp.sqrt(self.variance())

    def interval(self, level: float = 0.95) -> tuple[Float[Array, " k"], Float[Array, " k"]]:
        """Central intervals of probability `level`, entry by entry.

        Raises:
            TypeError, ValueError: `level` is not a number strictly between 0 and 1.
        """
        return normal_interval(self.mean, self.std(), level)

    def sample(self, key: PRNGKeyArray, num_samples: int) -> Float[Array, "N k"]:
        """Draws, one per row; singular covariances are fine.

        Raises:
            TypeError, ValueError: `num_samples` is no int or negative; `key` is no random key.
        """
        check_counts(num_samples=num_samples)
        values, vectors = jnp.linalg.eigh(self.covariance)
        noise = jax.random.normal(key, (num_samples, self.mean.shape[0]), self.mean.dtype)
        scaled = noise * jnp.sqrt(jnp.maximum(values, 0))[None, :]
        return self.mean[None, :] + jnp.matmul(scaled, vectors.T, precision=_HIGHEST)


class GaussianBelief(eqx.Module):
    """A Gaussian over one of the user's vectors: a mean and a structured covariance.

    Everything that has the shape of a vector comes back in the user's structure: an array, or a
    pytree with the dtypes of the right-hand side. For a batch of beliefs made by `vmap`, map the
    methods as well: `eqx.filter_vmap(lambda belief: belief.std())(beliefs)`.

    Attributes:
        mean_flat: `(d,)`, the mean as a flat vector.
        covariance: a lineax operator on flat vectors; never dense.
        result: `RESULTS.successful`, or what went wrong (then every number is NaN).
    """

    mean_flat: eqx.AbstractVar[Float[Array, " d"]]
    covariance: eqx.AbstractVar[CovarianceOperator]
    result: eqx.AbstractVar[RESULTS]

    @abc.abstractmethod
    def save(self, path: str | os.PathLike) -> None:
        """Writes the belief to one file, for `pnkrylov.load` (see `pnkrylov.storage`).

        Raises:
            ValueError: the belief is traced, or was made with a preconditioner.
            OSError: the file cannot be written; `FileNotFoundError` if its folder is missing.
        """

    @abc.abstractmethod
    def __str__(self) -> str:
        """A summary that a person wants to read."""

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self)
        # JAX also builds pytrees with leaves that are no arrays: they have no numbers to show.
        whole = leaves and all(eqx.is_array(leaf) for leaf in leaves)
        return str(self) if whole else eqx.tree_pformat(self)

    @property
    def structure(self) -> VectorStructure:
        """The structure of the user's vectors."""
        return self.covariance.structure

    @property
    def mean(self) -> PyTree:
        """The mean, in the user's structure; a batch (from `vmap`) keeps its leading axes."""
        unravel = self.structure.unravel
        for _ in range(self.mean_flat.ndim - 1):
            unravel = jax.vmap(unravel)
        return unravel(self.mean_flat)

    def variance(self) -> PyTree:
        """The marginal variances, closed form in O(n d)."""
        return self.structure.unravel(self.covariance.diagonal())

    def std(self) -> PyTree:
        """The marginal standard deviations."""
        return self.structure.unravel(jnp.sqrt(self.covariance.diagonal()))

    def sample(self, key: PRNGKeyArray, num_samples: int) -> PyTree:
        """Draws from the belief.

        Args:
            key: random key; the same key gives the same draws.
            num_samples: number of draws N.

        Returns:
            The user's structure with a leading axis of length N.

        Raises:
            TypeError, ValueError: `num_samples` is no int or negative; `key` is no random key.
        """
        check_counts(num_samples=num_samples)
        draws = self.mean_flat[None, :] + self.covariance.sample(key, num_samples)
        return jax.vmap(self.structure.unravel)(draws)

    def interval(self, level: float = 0.95) -> tuple[PyTree, PyTree]:
        """Central intervals of probability `level`, entry by entry.

        Raises:
            TypeError, ValueError: `level` is not a number strictly between 0 and 1.
        """
        lower, upper = normal_interval(self.mean_flat, jnp.sqrt(self.covariance.diagonal()), level)
        return self.structure.unravel(lower), self.structure.unravel(upper)

    def push(self, B: Any) -> DenseGaussian:
        """What is known about `B x`: the push-forward of the belief through a linear map.

        Args:
            B: an array `(k, d)` acting on flat vectors, an array `(d,)` (one functional), or a
                linear callable on the user's vectors that returns an array. A callable that is not
                linear is linearised at the mean.

        Returns:
            A dense Gaussian over the k outputs.

        Raises:
            TypeError: B is neither callable nor an array of real numbers.
            ValueError: an array B does not have d columns.
        """
        if callable(B):
            mean, rows = self._linearise(B)
        else:
            check_reals(B=B)
            rows = jnp.atleast_2d(jnp.asarray(B))
            if rows.ndim != 2 or rows.shape[1] != self.mean_flat.shape[0]:
                raise ValueError(
                    f"B has shape {jnp.shape(B)}; it needs {self.mean_flat.shape[0]} columns, one "
                    "for each entry of the flat vector."
                )
            rows = rows.astype(self.mean_flat.dtype)
            mean = jnp.matmul(rows, self.mean_flat, precision=_HIGHEST)
        return DenseGaussian(mean=mean, covariance=self.covariance.push(rows))

    def _linearise(self, B: Callable) -> tuple[Array, Array]:
        def flat_map(flat):
            output = jnp.asarray(B(self.structure.unravel(flat)))
            return output.reshape(-1).astype(self.mean_flat.dtype)

        mean, pull_back = jax.vjp(flat_map, self.mean_flat)
        (rows,) = jax.vmap(pull_back)(jnp.eye(mean.shape[0], dtype=mean.dtype))
        return mean, rows
