"""Draws: their moments are those of the predictions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import gp_cases as cases

SIZES = {"num_steps": 16, "lookahead": 8, "num_probes": 6, "probe_depth": 16}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["data", "independent"])
def test_draws_have_the_moments_of_the_prediction(start):
    # The sizes of test_gp_regression, where conditioning has been compiled.
    problem = cases.problem("matern32", 120, 2, 0.05)
    belief = problem.condition(start=start, **SIZES)
    points, count = jnp.asarray(problem.Xs), 600
    prediction = belief.predict(points)
    draws = np.asarray(belief.sample(jax.random.key(1), points, count))
    np.testing.assert_array_equal(draws, belief.sample(jax.random.key(1), points, count))
    z = (draws - np.asarray(prediction.mean)) / np.asarray(prediction.std())
    # The worst of 40 points, each with probability 1e-5 / 40 to be beyond.
    assert np.abs(z.mean(axis=0)).max() < scipy.stats.norm.isf(1e-5 / 80) / count**0.5
    # The split is an estimate, off by up to a tenth here; the draws themselves solve for it.
    low, high = scipy.stats.chi2.ppf([1e-5 / 80, 1 - 1e-5 / 80], count - 1) / (count - 1)
    variance = z.var(axis=0, ddof=1)
    assert variance.min() > 0.85 * low and variance.max() < 1.15 * high


@pytest.mark.slow
def test_joint_covariances():
    problem = cases.problem("matern32", 120, 2, 0.05, outputs=2)
    points = jnp.asarray(problem.Xs)
    cross = problem.matrix(problem.Xs, problem.X)
    prior = problem.matrix(problem.Xs, problem.Xs)
    for options in ({"output": None}, {}):
        belief = problem.condition(**options, **SIZES)
        prediction, covariance = belief.predict(points), belief.covariance(points).as_matrix()
        variance = np.asarray(prediction.variance).reshape(len(problem.Xs), -1)[:, 0]
        np.testing.assert_allclose(np.diag(covariance), variance, rtol=1e-6)
        assert np.linalg.eigvalsh(covariance).min() > -1e-12
        if belief.start == "independent":
            combined = prior - cross @ problem.truncated(belief) @ cross.T
            np.testing.assert_allclose(covariance, combined, atol=1e-8)
    draws = problem.condition(output=None, **SIZES).sample(jax.random.key(1), points, 3)
    assert draws.shape == (3, 40, 2)
