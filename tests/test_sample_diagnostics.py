"""Diagnostics of samples: their claims are probabilities, and are tested as such."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from oracles import with_spectrum
from pnkrylov.sample_diagnostics import (
    check_distances,
    check_samples,
    mahalanobis,
)


def perfect(count, dimension, seed=0):
    return np.random.default_rng(seed).chisquare(dimension, count)


def test_distances_match_the_dense_formula(dtype):
    matrix = with_spectrum(np.geomspace(0.1, 10, 6), 0)
    rng = np.random.default_rng(0)
    samples, mean = rng.standard_normal((5, 6)), rng.standard_normal(6)
    centred = samples - mean
    exact = np.einsum("ni,ij,nj->n", centred, matrix, centred)
    jnp_samples, jnp_mean = jnp.asarray(samples, dtype), jnp.asarray(mean, dtype)
    value = mahalanobis(jnp.asarray(matrix, dtype), jnp_samples, jnp_mean)
    np.testing.assert_allclose(value, exact, rtol=1e-4)
    inverse = jnp.asarray(np.linalg.inv(matrix), dtype)
    value = mahalanobis(inverse, jnp_samples, jnp_mean, role="covariance", key=jax.random.key(0))
    np.testing.assert_allclose(value, exact, rtol=1e-3)


def test_pytree_samples(dtype):
    diagonal = {"a": jnp.asarray([1.0, 4.0], dtype), "b": jnp.asarray([[9.0]], dtype)}
    samples = jax.tree.map(lambda leaf: jnp.ones((3, *leaf.shape), dtype), diagonal)

    def product(tree):
        return jax.tree.map(jnp.multiply, diagonal, tree)

    np.testing.assert_allclose(mahalanobis(product, samples), [14.0] * 3)
    assert check_samples(product, samples).dimension == 3


def test_interval_covers_the_true_distance():
    # Scaled chi-squared: the true Kolmogorov-Smirnov distance is known by optimisation on a grid.
    dimension, scale = 20, 1.1
    grid = np.linspace(0, 80, 20001)
    difference = scipy.stats.chi2.cdf(grid / scale, dimension) - scipy.stats.chi2.cdf(
        grid, dimension
    )
    truth = np.max(np.abs(difference))
    covered = 0
    repeats = 300
    for seed in range(repeats):
        check = check_distances(scale * perfect(150, dimension, seed), dimension, level=0.9)
        covered += check.interval[0] <= truth <= check.interval[1]
    # At least 90 %: five standard errors of a binomial below.
    assert covered / repeats >= 0.9 - 5 * np.sqrt(0.9 * 0.1 / repeats)


def test_variance_interval_covers():
    covered = 0
    repeats = 400
    for seed in range(repeats):
        low, high = check_distances(perfect(200, 10, seed), 10, level=0.9).variance_interval
        covered += low <= 1 <= high
    # Two-sided; the normal approximation itself is good to a per cent at this skewness.
    assert abs(covered / repeats - 0.9) <= 0.01 + 5 * np.sqrt(0.9 * 0.1 / repeats)


def test_more_samples_do_not_turn_a_harmless_error_into_a_failure():
    # The caveat of a bare p-value: at this size it rejects samples that nobody could tell apart.
    check = check_distances(1.005 * perfect(400_000, 50), 50)
    assert check.p_value < 1e-3
    assert check.verdict(0.05) == "agrees"
    assert check.variance_interval[0] > 1


def test_verdicts():
    assert check_distances(perfect(5000, 30), 30).verdict(0.05) == "agrees"
    assert check_distances(1.5 * perfect(2000, 30), 30).verdict(0.05) == "differs"
    assert check_distances(perfect(50, 30), 30).verdict(0.05) == "undecided"


def test_samples_needed_are_enough_on_average():
    needed = check_distances(perfect(10, 30), 30).samples_needed(0.05)
    verdicts = [check_distances(perfect(needed, 30, s), 30).verdict(0.05) for s in range(100)]
    # The mean of the statistic lies near its median: about half agree; five binomial errors.
    assert verdicts.count("agrees") >= 50 - 5 * 5
    far_fewer = [check_distances(perfect(needed // 4, 30, s), 30).verdict(0.05) for s in range(100)]
    assert far_fewer.count("agrees") == 0


def test_histogram_and_quantiles():
    check = check_distances(perfect(5000, 8), 8)
    edges, density, expected = check.histogram(bins=10)
    counts = density * 5000 * np.diff(edges)
    probabilities = expected * np.diff(edges)
    assert counts.sum() == pytest.approx(5000)
    errors = (counts - 5000 * probabilities) / np.sqrt(5000 * probabilities + 1)
    assert np.all(np.abs(errors) < 5)
    theory, observed = check.quantiles()
    assert np.all(np.diff(observed) >= 0)
    middle = slice(1250, 3750)
    np.testing.assert_allclose(observed[middle], theory[middle], rtol=0.05)


def test_isotropy_is_the_trace_formula_and_covers(dtype):
    # Whitened variances M with d tr(M^2) / (tr M)^2 known; cosines make it a ratio of Gaussians,
    # so the reference is Monte Carlo with its own error.
    dimension = 12
    scales = np.linspace(0.5, 1.5, dimension)
    rng = np.random.default_rng(0)
    pairs = np.sqrt(scales) * rng.standard_normal((2, 400_000, dimension))
    x, y = pairs / np.linalg.norm(pairs, axis=2, keepdims=True)
    squares = dimension * (x * y).sum(axis=1) ** 2
    truth = squares.mean()
    assert truth > 1.05
    covered = exact = 0
    for seed in range(60):
        rows = np.random.default_rng(seed + 1).standard_normal((200, dimension))
        eye = jnp.eye(dimension, dtype=dtype)
        check = check_samples(eye, jnp.asarray(rows * np.sqrt(scales), dtype), level=0.9)
        covered += check.isotropy_interval[0] <= truth <= check.isotropy_interval[1]
        perfect_check = check_samples(eye, jnp.asarray(rows, dtype), level=0.9)
        exact += perfect_check.isotropy_interval[0] <= 1 <= perfect_check.isotropy_interval[1]
    # At least 90 %, less five binomial standard errors.
    allowance = 5 * np.sqrt(0.9 * 0.1 / 60)
    assert covered / 60 >= 0.9 - allowance
    assert exact / 60 >= 0.9 - allowance


def test_infinite_distances_are_counted_as_far():
    distances = perfect(100, 5)
    distances[:50] = np.nan
    check = check_distances(distances, 5)
    assert check.verdict() == "differs"
    assert check.statistic >= 0.49


def test_printing_names_the_numbers():
    text = str(check_distances(perfect(5000, 30), 30))
    assert "5000 samples in 30 dimensions: agrees" in text
    assert "variance ratio" in text


def test_bad_arguments():
    with pytest.raises(ValueError, match="two or more"):
        check_distances(np.ones(1), 3)
    with pytest.raises(ValueError, match="dimension"):
        check_distances(np.ones(4), 0)
    with pytest.raises(ValueError, match="level"):
        check_distances(np.ones(4), 2, level=1.0)
    with pytest.raises(ValueError, match="role"):
        mahalanobis(jnp.eye(2), jnp.ones((2, 2)), role="variance")
