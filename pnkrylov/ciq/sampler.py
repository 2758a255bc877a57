"""Samples of N(mean, A^-1) or N(mean, A), exact up to a tolerance."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._arguments import check_counts
from pnkrylov.ciq.drivers import Method, Options
from pnkrylov.ciq.results import raise_unless_successful
from pnkrylov.ciq.spectrum import SpectralBounds, spectral_bounds
from pnkrylov.ciq.square_root import square_root_rows
from pnkrylov.krylov import is_concrete
from pnkrylov.operators import SPDOperator, as_operator, check_vector
from pnkrylov.preconditioners import Preconditioner, precondition

# Samples are drawn in batches whose Krylov bases, at 256 steps, take about this much memory.
_BATCH_BYTES = 2**27


class CIQSampler(eqx.Module):
    """Draws from a Gaussian that is known through products with its precision or covariance.

    The protocol is that of a belief: `sample(key, N)` returns the user's structure with a leading
    axis of length N. The samples are `mean + A^{-1/2} eps`, each with a relative error below `rtol`
    (or, with a preconditioner, a rotation of it with exactly the same distribution).

    Attributes:
        operator: The matrix A.
        mean: Mean of the Gaussian, flat; zero by default.
        preconditioner: Preconditioner of A, or None.
        bounds: Spectral bounds, or None where the samples bound the spectrum themselves.
        role: Whether A is the precision or the covariance.
    """

    operator: SPDOperator
    mean: Float[Array, " d"]
    preconditioner: Preconditioner | None
    bounds: SpectralBounds | None
    rtol: float = eqx.field(static=True)
    method: Method = eqx.field(static=True)
    role: str = eqx.field(static=True)
    max_steps: int | None = eqx.field(static=True)
    throw: bool = eqx.field(static=True)

    def __init__(
        self,
        A: Any,
        mean: PyTree = None,
        *,
        rtol: float = 1e-4,
        preconditioner: Preconditioner | None = None,
        method: Method = "auto",
        role: str = "precision",
        key: PRNGKeyArray | None = None,
        bounds: SpectralBounds | None = None,
        like: PyTree = None,
        max_steps: int | None = None,
        throw: bool = True,
    ):
        """Builds a sampler.

        Args:
            A: Anything that `as_operator` takes; symmetric positive definite.
            mean: Mean, structured like the operator's vectors; zero when None.
            rtol: Largest relative error of every sample in the 2-norm.
            preconditioner: As in `inv_sqrt_matvec`.
            method: As in `inv_sqrt_matvec`.
            role: `"precision"` samples N(mean, A^-1), `"covariance"` samples N(mean, A).
            key: When given, the spectrum is bounded once, now, and every call reuses it. Worth it
                for many calls with few samples each: many samples bound it cheaply themselves.
            bounds: Spectral bounds of the (preconditioned) operator, if known.
            like: Example of the user's vectors, where neither A nor mean determines it.
            max_steps: Largest number of iterations.
            throw: Raise when the tolerance is not met.

        Raises:
            TypeError, ValueError: `role` or `method` is unknown, `rtol` is not between 0 and 1, a
                count is not positive, or shapes and dtypes do not agree.
        """
        Options(forward=False, rtol=rtol, method=method, bounds=bounds, max_steps=max_steps)
        if role not in ("precision", "covariance"):
            raise ValueError(f"role must be 'precision' or 'covariance', got {role!r}.")
        self.operator = as_operator(A, like=mean if like is None else like)
        if mean is None:
            self.mean = jnp.zeros((self.operator.size,), self.operator.dtype)
        else:
            self.mean = check_vector(self.operator, mean, "mean")
        self.preconditioner = preconditioner
        self.rtol, self.method, self.role = rtol, method, role
        self.max_steps, self.throw = max_steps, throw
        preconditioned = precondition(self.operator, preconditioner)
        if bounds is None and key is not None:
            bounds = spectral_bounds(preconditioned, key=key)
        self.bounds = bounds

    def sample(self, key: PRNGKeyArray, num_samples: int) -> PyTree:
        """Draws samples.

        Args:
            key: Random key.
            num_samples: Number of samples N; zero gives empty arrays.

        Returns:
            The user's structure with a leading axis of length N on every leaf.

        Raises:
            ToleranceNotMetError: As `inv_sqrt_matvec`, unless `throw=False`.
            TypeError, ValueError: `num_samples` is no int or negative; `key` is no random key.
        """
        check_counts(num_samples=num_samples)
        size, dtype = self.operator.size, self.operator.dtype
        batch = min(max(num_samples, 1), max(1, _BATCH_BYTES // (256 * size * dtype.itemsize)))
        num_batches = max(-(-num_samples // batch), 1)
        noise_key, probe_key = jax.random.split(key)
        noise = jax.random.normal(noise_key, (num_batches, batch, size), dtype)
        probe_keys = jax.random.split(probe_key, num_batches)
        if not is_concrete(key):
            rows = jax.lax.map(lambda pair: self._draw(*pair), (noise, probe_keys))
        else:
            pairs = zip(noise, probe_keys, strict=True)
            rows = jnp.stack([self._draw(block, probe) for block, probe in pairs])
        rows = rows.reshape((num_batches * batch, size))[:num_samples] + self.mean[None, :]
        return jax.vmap(self.operator.unravel)(rows)

    def _draw(self, noise: Float[Array, "k d"], key: PRNGKeyArray) -> Float[Array, "k d"]:
        options = Options(
            forward=self.role == "covariance",
            rtol=self.rtol,
            method=self.method,
            preconditioner=self.preconditioner,
            bounds=self.bounds,
            random_rhs=True,
            max_steps=self.max_steps,
        )
        solution = square_root_rows(self.operator, noise, key, options)
        if self.throw:
            solution = raise_unless_successful(solution, self.rtol)
        return solution.value
