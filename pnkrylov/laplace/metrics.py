"""How good predictive probabilities are, and how close two posteriors are.

Everything here takes plain arrays, so that any other method can be scored the same way.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pnkrylov._arguments import check_reals

# Probabilities below this count as this: one certain mistake does not make a score infinite.
_FLOOR = 1e-30


class Reliability(eqx.Module):
    """A reliability diagram: the accuracy of predictions by their confidence.

    Attributes:
        edges: `(bins + 1,)`, ends of the bins, from 0 to 1.
        confidence: `(bins,)`, mean confidence in each bin; NaN in an empty one.
        accuracy: `(bins,)`, share of right predictions in each bin; NaN in an empty one.
        count: `(bins,)`, predictions in each bin.
    """

    edges: Float[Array, " ends"]
    confidence: Float[Array, " bins"]
    accuracy: Float[Array, " bins"]
    count: Int[Array, " bins"]

    def expected_error(self) -> Float[Array, ""]:
        """The expected calibration error: the mean of |accuracy - confidence|, by count."""
        accuracy, confidence = (
            jnp.where(self.count > 0, each, 0) for each in (self.accuracy, self.confidence)
        )
        gaps = jnp.abs(accuracy - confidence)
        weights = self.count.astype(gaps.dtype)
        return jnp.sum(gaps * weights) / jnp.sum(weights)


@eqx.filter_jit
def negative_log_likelihood(
    probabilities: Float[Array, "n K"], labels: Int[Array, " n"]
) -> Float[Array, ""]:
    """The mean of `-log p(label)`, in nats.

    Args:
        probabilities: `(n, K)`, rows that sum to one.
        labels: `(n,)`, integers from 0 to K - 1.

    Raises:
        TypeError: an argument holds no real numbers.
        ValueError: there are no predictions, or more or fewer labels than predictions.
    """
    _check(probabilities, labels)
    chosen = jnp.take_along_axis(probabilities, labels[:, None], axis=1)[:, 0]
    return -jnp.mean(jnp.log(jnp.maximum(chosen, _FLOOR)))


@eqx.filter_jit
def brier_score(probabilities: Float[Array, "n K"], labels: Int[Array, " n"]) -> Float[Array, ""]:
    """The mean over predictions of `sum_k (p_k - [k is the label])^2`, between 0 and 2.

    Args:
        probabilities: `(n, K)`, rows that sum to one.
        labels: `(n,)`, integers from 0 to K - 1.

    Raises:
        TypeError: an argument holds no real numbers.
        ValueError: there are no predictions, or more or fewer labels than predictions.

    Source:
        Brier 1950, in its original multi-class form.
    """
    _check(probabilities, labels)
    classes = jnp.arange(probabilities.shape[1], dtype=jnp.int32).astype(labels.dtype)
    truth = (labels[:, None] == classes[None, :]).astype(probabilities.dtype)
    return jnp.mean(jnp.sum((probabilities - truth) ** 2, axis=1))


def reliability(
    probabilities: Float[Array, "n K"], labels: Int[Array, " n"], *, num_bins: int = 15
) -> Reliability:
    """The reliability diagram of the predicted class, in bins of equal width.

    Args:
        probabilities: `(n, K)`, rows that sum to one.
        labels: `(n,)`, integers from 0 to K - 1.
        num_bins: number of bins of confidence, the first one open at 0 and each closed above.

    Raises:
        TypeError: an argument holds no real numbers.
        ValueError: there are no predictions, more or fewer labels than predictions, or
            `num_bins` is not positive.

    Source:
        Guo, Pleiss, Sun and Weinberger 2017, section 2.
    """
    # An empty bin has no mean: that is no accident for jax_debug_nans to stop at.
    with jax.debug_nans(False):
        return _reliability(probabilities, labels, num_bins)


@eqx.filter_jit
def _reliability(
    probabilities: Float[Array, "n K"], labels: Int[Array, " n"], num_bins: int
) -> Reliability:
    _check(probabilities, labels)
    if num_bins < 1:
        raise ValueError(f"num_bins={num_bins} must be at least 1, for example 15.")
    dtype = probabilities.dtype
    edges = jnp.linspace(0, 1, num_bins + 1, dtype=dtype)
    confidence = jnp.max(probabilities, axis=1)
    right = jnp.argmax(probabilities, axis=1).astype(labels.dtype) == labels
    # Confidences may exceed 1 by rounding; they belong to the last bin.
    bins = jnp.clip(jnp.searchsorted(edges, confidence, side="left") - 1, 0, num_bins - 1)
    inside = bins[None, :] == jnp.arange(num_bins, dtype=jnp.int32).astype(bins.dtype)[:, None]
    count = jnp.sum(inside, axis=1, dtype=jnp.int32)
    number = count.astype(dtype)
    confidences = jnp.sum(jnp.where(inside, confidence[None, :], 0), axis=1)
    hits = jnp.sum(inside & right[None, :], axis=1, dtype=jnp.int32).astype(dtype)
    return Reliability(edges, confidences / number, hits / number, count)


@eqx.filter_jit
def expected_calibration_error(
    probabilities: Float[Array, "n K"], labels: Int[Array, " n"], *, num_bins: int = 15
) -> Float[Array, ""]:
    """The expected calibration error of the predicted class (see `reliability`)."""
    return reliability(probabilities, labels, num_bins=num_bins).expected_error()


@eqx.filter_jit
def gaussian_kl(
    reference: Float[Array, "n K K"], covariance: Float[Array, "n K K"]
) -> Float[Array, " n"]:
    """Per point, `KL(N(0, reference) || N(0, covariance))` of two functional covariances.

    Args:
        reference: `(n, K, K)`, for example of the exact posterior; positive definite.
        covariance: `(n, K, K)`, of the posterior that is judged. Infinite where it is singular in
            a direction in which the reference is not.

    Returns:
        `(n,)`, in nats; zero where the two agree.

    Raises:
        ValueError: the shapes differ.

    Source:
        pslq.md section 6.2.2 (fidelity).
    """
    if reference.shape != covariance.shape or reference.ndim != 3:
        raise ValueError(
            f"reference has shape {reference.shape} and covariance {covariance.shape}; both must "
            "be (n, K, K)."
        )
    # By the square root of the reference: a logit that the softmax ignores (a common offset) may
    # have next to no variance in both, and Cholesky factors would fail there.
    values, vectors = jnp.linalg.eigh(reference)
    tiny = jnp.finfo(reference.dtype).eps * jnp.max(values, axis=1, keepdims=True)
    root = vectors / jnp.sqrt(jnp.maximum(values, tiny))[:, None, :]
    relative = jnp.einsum("nki,nkl,nlj->nij", root, covariance, root, precision="highest")
    ratios = jnp.linalg.eigvalsh(relative)
    size = reference.shape[1]
    singular = ratios[:, 0] <= size * jnp.finfo(reference.dtype).eps
    safe = jnp.where(singular[:, None], 1, ratios)
    divergence = 0.5 * jnp.sum(1 / safe - 1 + jnp.log(safe), axis=1)
    return jnp.where(singular, jnp.inf, divergence)


@eqx.filter_jit
def log_trace(covariance: Float[Array, "n K K"]) -> Float[Array, ""]:
    """`log sum_i tr Sigma_i`: the total predictive variance, on a log scale.

    Source:
        pslq.md section 6.2.5, after Faller and Martin 2025.
    """
    return jnp.log(jnp.sum(jnp.trace(covariance, axis1=1, axis2=2)))


def _check(probabilities: Array, labels: Array) -> None:
    check_reals(probabilities=probabilities, labels=labels)
    if probabilities.ndim != 2 or probabilities.shape[0] == 0:
        raise ValueError(
            f"probabilities have shape {probabilities.shape}; (n, K) with n >= 1 is needed. For a "
            "single probability p, pass the columns 1 - p and p."
        )
    if labels.shape != probabilities.shape[:1]:
        raise ValueError(
            f"labels have shape {labels.shape}, but there are {probabilities.shape[0]} predictions."
        )
