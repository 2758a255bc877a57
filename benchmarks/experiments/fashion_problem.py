"""The Laplace problem of the FashionMNIST experiment: weights, curvature, prior, test Jacobians."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from fashion_network import apply, train
from images import FASHION, fashion_mnist
from jax.flatten_util import ravel_pytree

from pnkrylov import laplace

SUBSET, FULL = 200, 50_000
OTHERS, CHUNK = 50, 50


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything that the methods are given, and what they are judged on.

    Attributes:
        params: trained weights, float32.
        images, labels: of the training subset.
        test_images, test_labels: of the test set.
        other_images: training images outside of the subset, for directions of outputs.
        rows: `(1800, p)`, float64: G = rows^T rows, scaled to the full data.
        prior_precision: by the evidence of the unscaled subset, times the same factor.
        accuracy: of the network on the test set.
        cache: folder for Jacobians.
    """

    params: dict
    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    other_images: np.ndarray
    rows: np.ndarray
    prior_precision: float
    accuracy: float
    cache: pathlib.Path

    @property
    def flat(self):
        """The weights as one vector (p,)."""
        return np.asarray(ravel_pytree(self.params)[0])

    def logits(self, count):
        """Outputs at the first test points, (n, K)."""
        return np.asarray(jax.jit(apply)(self.params, self.test_images[:count]), np.float64)

    def test_jacobians(self, count):
        """Yields Jacobians (n, K, p) at the first test points, float32, in chunks; kept on disk."""
        path = self.cache / f"fashion_jacobians_{count}.npy"
        if not path.exists():
            chunks = list(jacobians(self.params, self.test_images[:count]))
            np.save(path, np.concatenate(chunks))
        stored = np.load(path, mmap_mode="r")
        for start in range(0, count, CHUNK):
            yield np.asarray(stored[start : start + CHUNK])

    def directions(self, count, seed):
        """Random mixtures (count, p) of the outputs' gradients at the other training images."""
        rng = np.random.default_rng((seed, 1))
        mixed = rng.standard_normal((count, len(self.other_images), 10)).astype(np.float32)
        chunks = jacobians(self.params, self.other_images)
        starts = range(0, len(self.other_images), CHUNK)
        return sum(
            np.einsum("cnk,nkp->cp", mixed[:, start : start + CHUNK], chunk)
            for start, chunk in zip(starts, chunks, strict=True)
        )

    def train_jacobians(self, count):
        """Jacobian rows (n K, p) at the first images of the subset, float32."""
        parts = list(jacobians(self.params, self.images[:count]))
        return np.concatenate(parts).reshape(-1, self.rows.shape[1])


def jacobians(params, images):
    """Yields Jacobians (n, K, p) in chunks; the last one is padded while it is made."""
    for start in range(0, len(images), CHUNK):
        chunk = images[start : start + CHUNK]
        padded = np.concatenate([chunk, np.repeat(chunk[-1:], CHUNK - len(chunk), axis=0)])
        yield np.asarray(_jacobian(params, padded))[: len(chunk)]


@jax.jit
def _jacobian(params, images):
    flat, unravel = ravel_pytree(params)

    def of_image(image):
        return jax.jacrev(lambda flat: apply(unravel(flat), image[None])[0])(flat)

    return jax.vmap(of_image)(images)


def prepare(cache, *, data=FASHION, seed=0):
    """Trains the network and builds the curvature, or reads both from the cache."""
    cache = pathlib.Path(cache)
    train_set, test_set = fashion_mnist(data)
    params, accuracy = train(train_set, test_set, cache, seed=seed)
    chosen = np.random.default_rng(seed).choice(len(train_set[0]), SUBSET, replace=False)
    images, labels = (part[chosen] for part in train_set)
    others = np.setdiff1d(np.arange(len(train_set[0])), chosen)
    others = train_set[0][np.random.default_rng(seed).choice(others, OTHERS, replace=False)]
    stored, about = cache / f"fashion_rows{seed}.npy", cache / f"fashion_rows{seed}.json"
    if not about.exists():
        rows, prior_precision = _curvature(params, images, labels)
        np.save(stored, rows)
        about.write_text(json.dumps({"prior_precision": prior_precision}))
    prior_precision = json.loads(about.read_text())["prior_precision"]
    rows = np.load(stored)
    return Problem(
        params, images, labels, *test_set, others, rows, prior_precision, accuracy, cache
    )


def _curvature(params, images, labels):
    """Rows of the scaled GGN, and the papers' prior precision (pslq.md section 6.2.1)."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    data = (jnp.asarray(images, jnp.float64), jnp.asarray(labels))
    posterior = laplace.fit(apply, params, data, likelihood=laplace.Categorical(), method="exact")
    tuned = laplace.tune_by_evidence(posterior).posterior.prior.precision
    ggn = laplace.ggn(apply, params, data, laplace.Categorical(), num_data=FULL)
    return np.asarray(ggn.square_root_rows()), float(tuned) * FULL / SUBSET
