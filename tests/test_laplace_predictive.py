"""Predictions against closed forms, loops in NumPy, and averages over draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import laplace_cases as cases
from harness import no_type_checker
from pnkrylov import laplace
from pnkrylov.laplace import network
from pnkrylov.laplace.predictive import Predictive, mackay, probit

KEY = jax.random.key(2)
N = 8


@functools.cache
def posterior(family):
    return cases.fit(family, N, jnp.float64, prior_precision=0.7, method="exact")


def points():
    return cases.inputs_for_test(jnp.float64)


def random_gaussians(n=5, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(n, classes, classes))
    return rng.normal(size=(n, classes)), np.einsum("nik,njk->nij", factors, factors)


def test_probit_and_mackay_are_their_formulas(dtype):
    mean, covariance = random_gaussians()
    given = jnp.asarray(mean, dtype), jnp.asarray(covariance, dtype)
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-12
    variances = np.diagonal(covariance, axis1=1, axis2=2)
    expected = cases.softmax(mean / np.sqrt(1 + np.pi / 8 * variances))
    np.testing.assert_allclose(probit(*given), expected, rtol=tolerance)
    found = mackay(*given)
    assert found.dtype == dtype
    for row, m, C in zip(found, mean, covariance, strict=True):
        inverse = [
            sum(
                np.exp(-(m[k] - m[j]) / np.sqrt(1 + np.pi / 8 * (C[k, k] + C[j, j] - 2 * C[k, j])))
                for j in range(4)
            )
            for k in range(4)
        ]
        expected = (1 / np.array(inverse)) / (1 / np.array(inverse)).sum()
        np.testing.assert_allclose(row, expected, rtol=tolerance)


def test_mackay_ignores_what_the_softmax_ignores():
    mean, covariance = (jnp.asarray(array) for array in random_gaussians())
    offset = mackay(mean, covariance + 7.0)  # a common random offset of all logits
    np.testing.assert_allclose(offset, mackay(mean, covariance), rtol=1e-10)
    certain = jnp.zeros_like(covariance)
    np.testing.assert_allclose(mackay(mean, certain), jax.nn.softmax(mean, axis=1), rtol=1e-12)
    np.testing.assert_allclose(probit(mean, certain), jax.nn.softmax(mean, axis=1), rtol=1e-12)


def test_two_classes_are_close_to_the_integral():
    # MacKay's sigmoid approximation is good to 0.02 in probability (known from quadrature).
    grid, weights = np.polynomial.hermite_e.hermegauss(80)
    for mean, variance in [(0.5, 1.0), (2.0, 9.0), (-1.0, 4.0)]:
        logits = mean + np.sqrt(variance) * grid
        integral = weights @ (1 / (1 + np.exp(-logits))) / weights.sum()
        outputs = jnp.asarray([[mean, 0.0]])
        covariance = jnp.asarray([[[variance, 0.0], [0.0, 0.0]]])
        assert abs(mackay(outputs, covariance)[0, 0] - integral) < 0.02


def test_gaussian_predictions_are_closed_form():
    predicted = posterior("gaussian").predictive(points())
    assert predicted.kind == "linear"
    curvature = cases.problem("gaussian", N)[2]
    covariance = np.linalg.inv(curvature + 0.7 * np.eye(cases.SIZE))
    noisy = cases.functional_covariance(covariance) + np.eye(cases.OUTPUTS) / 2.5
    mean = cases.outputs_and_jacobian(cases.arrays()[2])[0]
    targets = mean + 0.3
    expected = [
        scipy.stats.multivariate_normal(m, C).logpdf(y)
        for m, C, y in zip(mean, noisy, targets, strict=True)
    ]
    np.testing.assert_allclose(predicted.log_density(jnp.asarray(targets)), expected, rtol=1e-8)
    np.testing.assert_allclose(predicted.mean(), mean, rtol=1e-10)
    variances = np.diagonal(noisy, axis1=1, axis2=2)
    np.testing.assert_allclose(predicted.variance(), variances, rtol=1e-8)
    # Draws agree within five standard errors of a mean of 4000 squares (and of their mean).
    sampled = posterior("gaussian").predictive(points(), "mc-linear", key=KEY, num_samples=4000)
    functional = variances - 1 / 2.5
    spread = np.var(np.asarray(sampled.draws), axis=0)
    assert np.abs(spread / functional - 1).max() < 5 * (2 / 4000) ** 0.5
    assert np.abs((np.mean(sampled.draws, axis=0) - mean) / functional**0.5).max() < 5 / 4000**0.5
    np.testing.assert_allclose(sampled.variance(), spread + 1 / 2.5, rtol=1e-10)


def test_linear_draws_are_the_linearised_network():
    # Eleven draws: a full block of eight, and a padded one.
    predicted = posterior("categorical").predictive(points(), "mc-linear", key=KEY, num_samples=11)
    changes = np.asarray(posterior("categorical").draws(KEY, 11)) - cases.flat_params()
    mean, jacobian = cases.outputs_and_jacobian(cases.arrays()[2])
    expected = mean + np.einsum("nkp,sp->snk", jacobian, changes)
    np.testing.assert_allclose(predicted.draws, expected, rtol=1e-9, atol=1e-9)
    probabilities = cases.softmax(expected)
    np.testing.assert_allclose(predicted.probabilities(), probabilities.mean(0), rtol=1e-8)
    labels = np.array([0, 1, 2, 0, 1, 2])
    chosen = probabilities[:, np.arange(cases.NUM_TEST), labels].mean(0)
    np.testing.assert_allclose(
        predicted.log_density(jnp.asarray(labels)), np.log(chosen), rtol=1e-8
    )


def test_class_log_densities_are_those_of_the_probabilities():
    x = points()
    labels = jnp.asarray([0, 1, 2, 0, 1, 2])
    predicted = posterior("categorical").predictive(x, "mackay")
    rows = np.asarray(predicted.probabilities())
    np.testing.assert_allclose(rows.sum(axis=1), 1, rtol=1e-12)
    expected = np.log(rows[np.arange(cases.NUM_TEST), labels])
    np.testing.assert_allclose(predicted.log_density(labels), expected, rtol=1e-10)
    bernoulli = posterior("bernoulli").predictive(x)
    p = np.asarray(bernoulli.probabilities())
    covariance = np.linalg.inv(cases.problem("bernoulli", N)[2] + 0.7 * np.eye(cases.SIZE))
    blocks = cases.functional_covariance(covariance)
    mean = cases.outputs_and_jacobian(cases.arrays()[2])[0]
    scaled = mean / np.sqrt(1 + np.pi / 8 * np.diagonal(blocks, axis1=1, axis2=2))
    np.testing.assert_allclose(p, 1 / (1 + np.exp(-scaled)), rtol=1e-8)
    targets = np.eye(3)[labels]
    expected = np.log(np.where(targets == 1, p, 1 - p)).sum(axis=1)
    np.testing.assert_allclose(bernoulli.log_density(jnp.asarray(targets)), expected, rtol=1e-8)


def test_chunks_do_not_show(monkeypatch):
    mean, covariance = posterior("categorical").functional(points())
    monkeypatch.setattr(network, "_CHUNK_ROWS", 4 * cases.OUTPUTS)  # chunks of four and two
    chunks = [count for count, _ in posterior("categorical").network.jacobian_chunks(points())]
    assert chunks == [4, 2]
    again = posterior("categorical").functional(points())
    np.testing.assert_allclose(again[1], covariance, rtol=1e-12)
    joint = posterior("categorical").functional_joint(points())
    size = cases.OUTPUTS
    np.testing.assert_allclose(joint.mean, np.asarray(mean).reshape(-1))
    for index in range(cases.NUM_TEST):
        own = slice(index * size, (index + 1) * size)
        np.testing.assert_allclose(joint.covariance[own, own], covariance[index], rtol=1e-10)
    assert np.abs(joint.covariance[:size, size:]).max() > 1e-3


def sampled(likelihood, outputs):
    """Predictions from given draws of the outputs."""
    return Predictive(likelihood, outputs[0], None, outputs, "mc")


def test_moments_of_other_families():
    outputs = np.random.default_rng(3).normal(size=(50, 4, 2))
    rates = np.exp(outputs)
    poisson = sampled(laplace.Poisson(), jnp.asarray(outputs))
    np.testing.assert_allclose(poisson.mean(), rates.mean(0), rtol=1e-10)
    np.testing.assert_allclose(poisson.variance(), rates.mean(0) + rates.var(0), rtol=1e-10)
    counts = np.array([[0, 1], [2, 0], [1, 1], [3, 2]])
    density = scipy.stats.poisson(rates).pmf(counts).prod(axis=2).mean(axis=0)
    np.testing.assert_allclose(poisson.log_density(jnp.asarray(counts)), np.log(density), rtol=1e-8)
    noisy = sampled(laplace.HeteroscedasticGaussian(), jnp.asarray(outputs))
    np.testing.assert_allclose(noisy.mean(), outputs[:, :, :1].mean(0), rtol=1e-10)
    expected = rates[:, :, 1:].mean(0) + outputs[:, :, :1].var(0)
    np.testing.assert_allclose(noisy.variance(), expected, rtol=1e-10)
    own = sampled(laplace.Custom(lambda f, y: -0.5 * jnp.sum((f - y) ** 2)), jnp.asarray(outputs))
    with pytest.raises(TypeError, match="mean of a target under Custom is not known"):
        own.mean()
    with pytest.raises(TypeError, match="Poisson has no class probabilities"):
        poisson.probabilities()


@pytest.mark.parametrize(
    ("family", "kind", "options", "error", "message"),
    [
        ("categorical", "linear", {}, ValueError, "closed form for a Gaussian"),
        ("gaussian", "probit", {}, ValueError, "approximates class probabilities"),
        ("categorical", "best", {}, ValueError, "kind='best' is unknown"),
        ("categorical", "mc", {}, TypeError, "key is missing: kind='mc'"),
        ("categorical", "mc", {"key": KEY, "num_samples": 0}, ValueError, "num_samples=0"),
    ],
)
def test_wrong_requests_are_named(family, kind, options, error, message):
    with pytest.raises(error, match=message), no_type_checker():
        posterior(family).predictive(points(), kind, **options)


def test_inputs_and_targets_are_checked():
    with pytest.raises(ValueError, match="no example"):
        posterior("categorical").functional(points()[:0])
    with pytest.raises(laplace.TargetError, match="labels must lie in"):
        posterior("categorical").predictive(points()).log_density(jnp.full(6, 3))
    with pytest.raises(ValueError, match="num_samples=-1"):
        posterior("categorical").sample(KEY, -1)
