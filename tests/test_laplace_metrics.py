"""Metrics against loops and numbers worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from harness import no_type_checker
from pnkrylov.laplace import metrics


def random_predictions(n, classes, seed=0):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(classes, 0.5), size=n), rng.integers(0, classes, size=n)


def scored(dtype):
    probabilities, labels = random_predictions(200, 4)
    return probabilities, labels, jnp.asarray(probabilities, dtype), jnp.asarray(labels)


def test_scores_are_those_of_a_loop(dtype):
    probabilities, labels, given, targets = scored(dtype)
    losses = [-np.log(row[label]) for row, label in zip(probabilities, labels, strict=True)]
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-12
    np.testing.assert_allclose(
        metrics.negative_log_likelihood(given, targets), np.mean(losses), rtol=tolerance
    )
    brier = [
        sum((p - (k == label)) ** 2 for k, p in enumerate(row))
        for row, label in zip(probabilities, labels, strict=True)
    ]
    np.testing.assert_allclose(metrics.brier_score(given, targets), np.mean(brier), rtol=tolerance)
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    error = 0.0
    for lower in np.arange(15) / 15:
        inside = (confidence > lower) & (confidence <= lower + 1 / 15)
        if inside.any():
            gap = abs(right[inside].mean() - confidence[inside].mean())
            error += inside.mean() * gap
    found = metrics.expected_calibration_error(given, targets)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, error, rtol=10 * tolerance)


def test_reliability_bins_by_hand():
    probabilities = jnp.asarray([[0.5, 0.5], [0.3, 0.7], [0.9, 0.1], [0.0, 1.0], [0.24, 0.76]])
    labels = jnp.asarray([0, 1, 1, 1, 0])
    diagram = metrics.reliability(probabilities, labels, num_bins=4)
    np.testing.assert_array_equal(diagram.count, [0, 1, 1, 3])
    # Confidence 0.5 belongs to the bin that ends there; ties predict the first class.
    np.testing.assert_allclose(diagram.accuracy[1:], [1, 1, 1 / 3])
    np.testing.assert_allclose(diagram.confidence[1:], [0.5, 0.7, (0.9 + 1 + 0.76) / 3])
    gap = abs(1 / 3 - 2.66 / 3)
    np.testing.assert_allclose(diagram.expected_error(), (0.5 + 0.3 + 3 * gap) / 5, rtol=1e-6)


def test_perfect_and_useless_predictions():
    labels = jnp.asarray([0, 1, 2, 1])
    perfect = jnp.eye(3)[labels]
    assert metrics.brier_score(perfect, labels) == 0
    assert metrics.negative_log_likelihood(perfect, labels) == 0
    assert metrics.expected_calibration_error(perfect, labels) == 0
    wrong = jnp.eye(3)[(labels + 1) % 3]
    np.testing.assert_allclose(metrics.brier_score(wrong, labels), 2)
    assert jnp.isfinite(metrics.negative_log_likelihood(wrong, labels))
    np.testing.assert_allclose(metrics.expected_calibration_error(wrong, labels), 1)


def test_gaussian_divergence_is_the_textbook_one(dtype):
    rng = np.random.default_rng(1)
    factors = rng.normal(size=(2, 7, 3, 3))
    reference, other = np.einsum("xnik,xnjk->xnij", factors, factors) + 0.1 * np.eye(3)
    inverse = np.linalg.inv(other)
    expected = 0.5 * (
        np.trace(inverse @ reference, axis1=1, axis2=2)
        - 3
        + np.linalg.slogdet(other)[1]
        - np.linalg.slogdet(reference)[1]
    )
    given = jnp.asarray(reference, dtype), jnp.asarray(other, dtype)
    found = metrics.gaussian_kl(*given)
    # Condition numbers of a few hundred cost two of the seven digits.
    tolerance = 1e-3 if dtype == jnp.float32 else 1e-10
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(metrics.gaussian_kl(given[0], given[0]), 0, atol=tolerance)
    trace = np.log(np.trace(reference, axis1=1, axis2=2).sum())
    np.testing.assert_allclose(metrics.log_trace(given[0]), trace, rtol=tolerance)


def test_a_covariance_that_misses_a_direction_is_infinitely_far():
    reference = jnp.asarray(np.stack([np.eye(2), np.eye(2)]))
    flat = jnp.asarray(np.stack([np.diag([1.0, 0.0]), np.diag([1.0, 0.5])]))
    found = metrics.gaussian_kl(reference, flat)
    assert jnp.isinf(found[0])
    np.testing.assert_allclose(found[1], 0.5 * (2 - 1 + np.log(0.5)), rtol=1e-6)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda p, y: metrics.brier_score(p[:0], y[:0]), "n >= 1"),
        (lambda p, y: metrics.negative_log_likelihood(p, y[:-1]), "labels have shape"),
        (lambda p, y: metrics.reliability(p, y, num_bins=0), "num_bins=0"),
        (lambda p, y: metrics.gaussian_kl(p[:, :, None], p[:, None, :]), r"must be \(n, K, K\)"),
    ],
)
def test_bad_input_is_named(score, message):
    probabilities, labels = random_predictions(5, 3)
    with pytest.raises(ValueError, match=message), no_type_checker():
        score(jnp.asarray(probabilities), jnp.asarray(labels))
