"""Gaussian process problems with dense answers, in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pnkrylov import gp

KEY = jax.random.key(8)


def matern32(A, B, lengthscale=0.5):
    distance = np.sqrt(np.sum((A[:, None] - B[None]) ** 2, axis=2))
    scaled = np.sqrt(3) * distance / lengthscale
    return (1 + scaled) * np.exp(-scaled)


def rbf(A, B, lengthscale=0.5):
    return np.exp(-np.sum((A[:, None] - B[None]) ** 2, axis=2) / (2 * lengthscale**2))


MATRICES = {"matern32": matern32, "rbf": rbf}
KERNELS = {"matern32": gp.Matern32, "rbf": gp.RBF}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Draws of a prior, in float64; `outputs` data sets with the same inputs."""

    name: str
    X: np.ndarray
    Xs: np.ndarray
    y: np.ndarray
    f: np.ndarray
    noise: np.ndarray
    lengthscale: float

    def matrix(self, A, B):
        return MATRICES[self.name](A, B, self.lengthscale)

    def kernel(self, dtype=jnp.float64):
        return KERNELS[self.name](lengthscale=jnp.asarray(self.lengthscale, dtype))

    def condition(self, dtype=jnp.float64, output=0, **options):
        y = self.y[:, output] if output is not None else self.y
        noise = jnp.asarray(self.noise, dtype)
        X, y = jnp.asarray(self.X, dtype), jnp.asarray(y, dtype)
        return gp.condition(self.kernel(dtype), X, y, noise, **{"key": KEY, **options})

    def noisy(self):
        return self.matrix(self.X, self.X) + np.diag(np.broadcast_to(self.noise, len(self.X)))

    def exact(self, output=0):
        """The exact posterior's mean and variance at Xs."""
        cross = self.matrix(self.Xs, self.X)
        solved = np.linalg.solve(self.noisy(), np.column_stack([self.y, cross.T]))
        k = self.y.shape[1]
        mean = cross @ solved[:, :k]
        variance = 1 - np.sum(cross * solved[:, k:].T, axis=1)
        return (mean if output is None else mean[:, output]), variance

    def truncated(self, belief):
        """`C`, from the rows that a belief resolves, by IterGP's formula; in float64."""
        measured = belief.measured
        rows = measured.out_of(belief.run.basis.vectors[: int(belief.run.level)])
        rows = np.asarray(rows, np.float64)
        return rows.T @ np.linalg.solve(rows @ self.noisy() @ rows.T, rows)

    def combined(self, belief):
        """IterGP's combined variance at Xs."""
        cross = self.matrix(self.Xs, self.X)
        return 1 - np.sum((cross @ self.truncated(belief)) * cross, axis=1)


def problem(name, n, p, noise, lengthscale=0.5, outputs=1, num_points=40, seed=0):
    rng = np.random.default_rng(seed)
    X, Xs = rng.uniform(size=(n, p)), rng.uniform(size=(num_points, p))
    joint = np.concatenate([X, Xs])
    values, vectors = np.linalg.eigh(MATRICES[name](joint, joint, lengthscale))
    root = vectors * np.sqrt(np.maximum(values, 0))[None, :]
    f = root @ rng.standard_normal((n + num_points, outputs))
    deviation = np.sqrt(np.broadcast_to(noise, n))[:, None]
    y = f[:n] + deviation * rng.standard_normal((n, outputs))
    return Problem(name, X, Xs, y, f[n:], np.asarray(noise), lengthscale)
