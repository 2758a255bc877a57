"""Training with the evidence, on problems whose answer is known."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize

from pnkrylov import laplace
from pnkrylov.errors import NotFiniteError, PnkrylovError

N, FEATURES = 60, 6


def linear(params, x):
    return (x @ params["w"])[:, None]


def regression(seed=0):
    """Bayesian linear regression: the Laplace approximation is exact, the evidence a formula."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, FEATURES))
    y = x @ (0.6 * rng.normal(size=FEATURES)) + 0.5 * rng.normal(size=N)
    return x, y


def negative_evidence(logs, x, y):
    prior, noise = np.exp(logs)
    covariance = x @ x.T / prior + np.eye(N) / noise
    _, logdet = np.linalg.slogdet(2 * np.pi * covariance)
    return 0.5 * (y @ np.linalg.solve(covariance, y) + logdet)


def train(x, y, **options):
    settings = {
        "likelihood": laplace.Gaussian(1.0),
        "optimizer": optax.sgd(5e-2, momentum=0.9),
        "num_epochs": 120,
        "batch_size": 30,
        "key": jax.random.key(0),
        "method": "exact",
        "evidence_every": 10,
    }
    params = {"w": jnp.zeros(FEATURES)}
    return laplace.marglik_train(
        linear, params, (jnp.asarray(x), jnp.asarray(y)), **(settings | options)
    )


def test_linear_regression_finds_the_best_prior_and_noise_precision():
    x, y = regression()
    trained = train(x, y, batch_size=N)
    best = scipy.optimize.minimize(
        negative_evidence, np.zeros(2), args=(x, y), method="Nelder-Mead"
    )
    posterior = trained.posterior
    found = np.log([float(posterior.prior_precision), float(posterior.likelihood.precision)])
    np.testing.assert_allclose(found, best.x, atol=1e-2)
    assert -best.fun - 1e-3 < trained.log_evidences.max() < -best.fun + 1e-6
    assert float(posterior.log_evidence().value) == pytest.approx(trained.log_evidences.max())
    assert trained.log_evidences[0] < trained.log_evidences[-1]
    assert list(trained.epochs) == list(range(9, 120, 10))
    prior, noise = np.exp(found)
    ridge = np.linalg.solve(noise * x.T @ x + prior * np.eye(FEATURES), noise * x.T @ y)
    np.testing.assert_allclose(trained.params["w"], ridge, atol=1e-2)


@pytest.mark.slow
def test_a_useless_layer_is_switched_off():
    x, y = regression()

    def two(params, x):
        return (x[:, :3] @ params["used"] + x[:, 3:] @ params["useless"])[:, None]

    rng = np.random.default_rng(1)
    y = x[:, :3] @ np.array([1.0, -1.0, 0.5]) + 0.5 * rng.normal(size=N)
    trained = laplace.marglik_train(
        two, {"used": jnp.zeros(3), "useless": jnp.zeros(3)}, (jnp.asarray(x), jnp.asarray(y)),
        likelihood=laplace.Gaussian(4.0), optimizer=optax.sgd(5e-2, momentum=0.9), num_epochs=120,
        batch_size=30, key=jax.random.key(0), method="exact", evidence_every=10, per_layer=True,
    )  # fmt: skip
    precisions = trained.posterior.prior.diagonal(6)
    assert float(precisions[0]) < 5
    assert float(precisions[3]) > 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_epochs": 0}, "num_epochs=0"),
        ({"batch_size": 100}, "batch_size=100 exceeds the 60"),
        ({"evidence_every": 0}, "evidence_every=0"),
    ],
)
def test_wrong_counts_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        train(*regression(), **options)


def test_a_diverging_loss_is_refused():
    x, y = regression()
    with pytest.raises(NotFiniteError, match="loss of epoch"):
        train(x, y, num_epochs=3, optimizer=optax.sgd(1e200))


def test_targets_that_overflow_are_refused_before_training():
    x, y = regression()
    with pytest.raises(PnkrylovError, match=r"loss .* of example 0 is inf"):
        train(x, 1e200 * y, num_epochs=3)
