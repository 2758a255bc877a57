"""Acceptance, step size and inferred condition number, against leapfrog simulated step by step."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from pnkrylov import hmc


def spectrum(dimension, largest, cutoff, power, seed=0):
    """Standard deviations between 1 and `largest`, low-pass filtered uniforms."""
    y = np.random.default_rng(seed).uniform(size=dimension)
    g = 1 / (1 + (y / cutoff) ** power)
    return 1 + (largest - 1) * (g - g.min()) / (g.max() - g.min())


def condition(sigma):
    return float(np.sum((sigma.max() / sigma) ** 4) ** 0.25)


def simulate(sigma, step_size, draws, seed):
    """Mean acceptance probability at stationarity, and its standard error: plain leapfrog."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((draws, len(sigma))) * sigma
    p = rng.standard_normal((draws, len(sigma)))
    before = np.sum((q / sigma) ** 2 + p**2, axis=1) / 2
    times = rng.uniform(0.5, 1.5, draws) * np.pi / 2 * sigma.max()
    steps = np.sort(np.maximum(1, np.rint(times / step_size).astype(int)))[::-1]
    for step in range(steps[0]):
        moving = np.count_nonzero(steps > step)  # the longest trajectories come first
        p[:moving] -= step_size / 2 * q[:moving] / sigma**2
        q[:moving] += step_size * p[:moving]
        p[:moving] -= step_size / 2 * q[:moving] / sigma**2
    after = np.sum((q / sigma) ** 2 + p**2, axis=1) / 2
    accepted = np.minimum(1, np.exp(before - after))
    return accepted.mean(), accepted.std(ddof=1) / np.sqrt(draws)


at_the_edge = pytest.mark.filterwarnings("ignore:acceptance=0:UserWarning")


@at_the_edge
@pytest.mark.parametrize("acceptance", [0.8, 0.9, 0.97])
def test_formula_and_its_inverse_against_simulation(acceptance):
    sigma = spectrum(128, 20, 0.25, 6)
    kappa = condition(sigma)
    h = float(hmc.step_size_for(acceptance, kappa, sigma.max()))
    assert float(hmc.expected_acceptance(h, kappa, sigma.max())) == pytest.approx(acceptance)
    observed, error = simulate(sigma, h, 2000, seed=1)
    assert abs(observed - acceptance) < 0.02 + 4 * error
    inferred = hmc.condition_number_from_acceptance(
        h, observed, sigma.max(), acceptance_standard_error=error
    )
    assert abs(float(inferred.value) - kappa) < 0.05 * kappa + 4 * float(inferred.standard_error)
    assert float(inferred.standard_error) < 0.1 * kappa


@at_the_edge
@pytest.mark.slow
@pytest.mark.parametrize("dimension", [128, 256, 512])
@pytest.mark.parametrize("largest", [5, 20])
@pytest.mark.parametrize("cutoff", [0.25, 0.75])
@pytest.mark.parametrize("power", [2, 6])
def test_formula_on_random_spectra(dimension, largest, cutoff, power):
    sigma = spectrum(dimension, largest, cutoff, power, seed=dimension)
    kappa = condition(sigma)
    # Where few directions make up nu, the central limit theorem has too little to work with.
    effective = np.sum(sigma**-4) ** 2 / np.sum(sigma**-8)
    for acceptance in (0.8, 0.9, 0.97):
        h = float(hmc.step_size_for(acceptance, kappa, sigma.max()))
        observed, error = simulate(sigma, h, 3000, seed=2)
        if effective >= 10:
            assert abs(observed - acceptance) < 0.02 + 4 * error
            inferred = hmc.condition_number_from_acceptance(
                h, observed, sigma.max(), acceptance_standard_error=error
            )
            bound = 0.05 * kappa + 4 * float(inferred.standard_error)
            assert abs(float(inferred.value) - kappa) < bound


def test_sample_covariance_is_a_worse_way_to_kappa():
    # Independent draws, four times the dimension: better than any chain could give it.
    sigma = spectrum(64, 5, 0.25, 2)
    kappa, h = condition(sigma), float(hmc.step_size_for(0.9, condition(sigma), sigma.max()))
    plug_in, inferred, known = [], [], []
    for seed in range(6):
        draws = np.random.default_rng(seed).standard_normal((4 * 64, 64)) * sigma
        values = np.linalg.eigvalsh(draws.T @ draws / len(draws))
        plug_in.append(condition(np.sqrt(values)))
        observed, _ = simulate(sigma, h, 4 * 64, seed)
        for found, largest in ((inferred, float(values[-1]) ** 0.5), (known, sigma.max())):
            estimate = hmc.condition_number_from_acceptance(h, observed, largest)
            found.append(float(estimate.value))
    rms = [np.sqrt(np.mean((np.array(f) / kappa - 1) ** 2)) for f in (plug_in, inferred, known)]
    # What is left in the middle one is the sample covariance's error in sigma_1.
    assert rms[0] > 1.8 * rms[1] and rms[1] > 1.8 * rms[2], rms
    assert rms[2] < 0.1


@settings(max_examples=20)
@given(
    acceptance=st.floats(0.81, 0.96),
    kappa=st.floats(1.5, 1e4),
    sigma=st.floats(1e-3, 1e3),
)
def test_inverse_and_scaling(acceptance, kappa, sigma):
    h = hmc.step_size_for(acceptance, kappa, sigma)
    nu = kappa / sigma
    closed = 2 * norm.cdf(-(float(h) ** 2) * nu**2 / (8 * np.sqrt(2)))
    assert closed == pytest.approx(acceptance, rel=1e-4)
    back = hmc.condition_number_from_acceptance(h, acceptance, sigma)
    assert float(back.value) == pytest.approx(kappa, rel=1e-4)
    assert np.isnan(float(back.standard_error))
    steps = hmc.leapfrog_steps(acceptance, kappa)
    assert float(steps) == pytest.approx(np.pi / 2 * sigma / float(h), rel=1e-4)


def test_error_bar_is_the_spread_of_noisy_inputs():
    rng, h = np.random.default_rng(0), 0.1
    a, sigma = 0.9 + 0.004 * rng.standard_normal(4000), 3 + 0.1 * rng.standard_normal(4000)
    values = sigma * np.sqrt(-8 * np.sqrt(2) * norm.ppf(a / 2)) / h
    found = hmc.condition_number_from_acceptance(
        h, 0.9, 3.0, acceptance_standard_error=0.004, sigma_max_standard_error=0.1
    )
    # The standard deviation of 4000 values is known to 1.1 %; the delta method to the curvature.
    assert float(found.standard_error) == pytest.approx(np.std(values), rel=0.05)


def test_dtype_jit_vmap_and_grad(dtype):
    kappas = jnp.asarray([10.0, 20.0], dtype)
    found = jax.jit(jax.vmap(lambda k: hmc.expected_acceptance(jnp.asarray(0.1, dtype), k)))(kappas)
    assert found.dtype == dtype
    expected = 2 * norm.cdf(-((0.1 * np.array([10, 20])) ** 2) / (8 * np.sqrt(2)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    slope = jax.grad(hmc.step_size_for)(jnp.asarray(0.9, dtype), 10.0)
    assert slope.dtype == dtype and float(slope) < 0
    back = jax.jit(lambda a: hmc.condition_number_from_acceptance(0.1, a, 1.0).value)
    assert back(jnp.asarray(0.3, dtype)) > 0  # traced: values are not judged


def test_outside_the_range_it_warns_or_refuses():
    with pytest.raises(ValueError, match=r"acceptance=0\.3.*reduce step_size"):
        hmc.condition_number_from_acceptance(0.1, 0.3, 1.0)
    with pytest.warns(UserWarning, match="Reduce step_size"):
        hmc.condition_number_from_acceptance(0.1, 0.7, 1.0)
    with pytest.warns(UserWarning, match="Increase step_size"):
        hmc.condition_number_from_acceptance(0.1, 0.99, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hmc.condition_number_from_acceptance(0.1, 0.9, 1.0)
    for bad in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="strictly between"):
            hmc.step_size_for(bad, 10.0)
    with pytest.raises(ValueError, match=r"step_size=-1.*positive"):
        hmc.expected_acceptance(-1.0, 10.0)
    with pytest.raises(ValueError, match="integration_time"):
        hmc.leapfrog_steps(0.9, 10.0, 0.0)
