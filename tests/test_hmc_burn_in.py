"""What preconditioners leave, and the optimal burn-in, against simulated Wishart matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import no_type_checker
from oracles import with_spectrum
from pnkrylov import hmc


def kappas(values):
    """Condition numbers left by a sample covariance, and by the sampled reverse divergence."""
    by_samples = values[:, 0] ** -0.5 * np.sum(values**2, axis=1) ** 0.25
    by_divergence = values[:, -1] ** 0.5 * np.sum(values**-2.0, axis=1) ** 0.25
    return by_samples, by_divergence


@functools.cache
def wishart_spectra(dimension, samples, repeats, seed=0):
    rng = np.random.default_rng(seed)
    spectra = []
    for _ in range(repeats):
        x = rng.standard_normal((samples, dimension))
        spectra.append(np.linalg.eigvalsh(x.T @ x / samples))
    return np.array(spectra)


def mean_and_error(values):
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values))


CASES = [(64, 128), (64, 256), (128, 256)]
SLOW = [(96, 384), (128, 2048), (256, 512), (256, 1024)]


@pytest.mark.parametrize(
    ("dimension", "samples"),
    CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
)
def test_prediction_against_simulation(dimension, samples):
    spectra = wishart_spectra(dimension, samples, 250 if dimension == 64 else 60)
    for found, predicted in zip(
        kappas(spectra),
        (
            hmc.preconditioned_condition_number(samples, dimension),
            # The noise's mean is subtracted: as if there were one draw more.
            hmc.reverse_kl_condition_number(samples + 1, dimension),
        ),
        strict=True,
    ):
        mean, error = mean_and_error(found)
        assert abs(float(predicted) / mean - 1) < 0.02 + 4 * error / mean
    edge = hmc.preconditioned_condition_number(samples, dimension, finite_size=False)
    y = dimension / samples
    assert float(edge) == pytest.approx((dimension * (1 + y)) ** 0.25 / (1 - np.sqrt(y)), rel=1e-5)


def test_finite_size_is_needed_at_the_edge():
    mean, error = mean_and_error(kappas(wishart_spectra(64, 128, 250))[0])
    edge = float(hmc.preconditioned_condition_number(128, 64, finite_size=False))
    assert edge / mean - 1 > 0.03 + 4 * error / mean
    # And vanishes where the law is exact.
    large = [hmc.preconditioned_condition_number(1e7, 1e6, finite_size=f) for f in (True, False)]
    np.testing.assert_allclose(float(large[0]), float(large[1]), rtol=1e-3)


def test_paper_example():
    for finite_size in (True, False):
        found = hmc.optimal_burn_in(10 * 50**0.25, 50, 40 * 50, finite_size=finite_size)
        assert float(found.num_samples) / 50 == pytest.approx(4, abs=0.4)
        assert float(found.speedup) == pytest.approx(3, abs=0.4)
        assert found.worthwhile


@pytest.mark.parametrize(("ratio", "final"), [(10, 40), (4, 20)])
def test_optimum_against_brute_force_on_simulated_matrices(ratio, final):
    dimension = 64
    kappa0 = ratio * dimension**0.25
    oversampling = np.arange(1.5, 8, 0.25)
    # Nested samples: the curve is smooth, so that its minimum is not that of the noise.
    rng, total = np.random.default_rng(0), np.zeros(len(oversampling))
    for _ in range(60):
        x = rng.standard_normal((int(oversampling[-1] * dimension), dimension))
        for i, factor in enumerate(oversampling):
            count = int(factor * dimension)
            values = np.linalg.eigvalsh(x[:count].T @ x[:count] / count)
            total[i] += kappas(values[None])[0][0] / 60
    time = oversampling * kappa0 + final * total
    at = np.argmin(time)
    # The vertex of the parabola through the smallest value and its neighbours.
    a, b, _ = np.polyfit(oversampling[at - 2 : at + 3], time[at - 2 : at + 3], 2)
    found = hmc.optimal_burn_in(kappa0, dimension, final * dimension)
    assert float(found.num_samples) / dimension == pytest.approx(-b / (2 * a), rel=0.1)
    assert float(found.speedup) == pytest.approx(final * kappa0 / time.min(), rel=0.05)


@settings(max_examples=25)
@given(ratio=st.floats(1.0, 200.0), dimension=st.integers(10, 1000), final=st.floats(1.5, 500.0))
def test_no_other_burn_in_is_faster(ratio, dimension, final):
    kappa0, samples = ratio * dimension**0.25, final * dimension
    found = hmc.optimal_burn_in(kappa0, dimension, samples)
    assert float(found.speedup) >= 1
    assert bool(found.worthwhile) == (float(found.num_samples) > 0)
    for factor in (0.7, 0.97, 1.03, 1.5):
        other = max(float(found.num_samples), 2 * dimension) * factor
        if other <= 1.01 * dimension:
            continue
        left = float(hmc.preconditioned_condition_number(other, dimension))
        speedup = samples * kappa0 / (other * kappa0 + samples * left)
        assert speedup <= float(found.speedup) * (1 + 1e-4)


def test_effective_samples_stand_in_for_draws():
    independent = hmc.optimal_burn_in(30.0, 50, 2000)
    # A draw worth half a sample: the same problem in units of draws twice as cheap.
    chain = hmc.optimal_burn_in(15.0, 50, 4000, efficiency=0.5)
    reference = hmc.preconditioned_condition_number(0.5 * chain.num_samples, 50)
    np.testing.assert_allclose(float(chain.condition_number), float(reference), rtol=1e-5)
    slow = hmc.optimal_burn_in(30.0, 50, 2000, efficiency=0.5)
    assert float(slow.num_samples) > float(independent.num_samples)
    assert float(slow.speedup) < float(independent.speedup)


def test_preconditioning_that_does_not_pay():
    found = hmc.optimal_burn_in(1.05 * 50**0.25, 50, 100)
    assert not found.worthwhile
    assert (float(found.num_samples), float(found.speedup)) == (0, 1)
    assert float(found.condition_number) == pytest.approx(1.05 * 50**0.25, rel=1e-5)


def test_dtype_jit_and_vmap(dtype):
    run = jax.jit(jax.vmap(lambda kappa0: hmc.optimal_burn_in(kappa0, 50, 2000)))
    found = run(jnp.asarray([10.0, 26.6], dtype))
    assert found.speedup.dtype == found.num_samples.dtype == dtype
    one = hmc.optimal_burn_in(26.6, 50, 2000)
    np.testing.assert_allclose(found.num_samples[1], float(one.num_samples), rtol=1e-3)
    assert np.isinf(hmc.preconditioned_condition_number(50, 50))
    assert np.isinf(hmc.reverse_kl_condition_number(50, 50))


def test_bad_input():
    with pytest.raises(ValueError, match=r"kappa0=-1"):
        hmc.optimal_burn_in(-1.0, 50, 100)
    with pytest.raises(ValueError, match="num_samples=0"):
        hmc.preconditioned_condition_number(0, 50)
    with no_type_checker(), pytest.raises(ValueError, match="divergence='both'"):
        hmc.diagonal_preconditioner(jnp.eye(2), "both")
    with pytest.raises(ValueError, match=r"3 draws in 3 dimensions.*at least 4"):
        hmc.reverse_kl_preconditioner(jnp.eye(3), jnp.ones((3, 3)))


def divergence(q, p):
    """KL(N(0, q) || N(0, p)) by dense algebra."""
    ratio = np.linalg.solve(p, q)
    return (np.trace(ratio) - len(p) - np.linalg.slogdet(ratio)[1]) / 2


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_diagonal_preconditioner_minimises_its_divergence(kind, dtype):
    covariance = with_spectrum(np.geomspace(1, 100, 8), seed=1)
    scales = hmc.diagonal_preconditioner(jnp.asarray(covariance, dtype), kind)
    assert scales.dtype == dtype
    scales = np.asarray(scales, np.float64)

    def loss(scales):
        pair = np.diag(scales**2), covariance
        return divergence(*(pair if kind == "reverse" else pair[::-1]))

    for i in range(8):
        for factor in (0.97, 1.03):
            other = scales.copy()
            other[i] *= factor
            assert loss(other) > loss(scales)


def test_sampled_divergence_has_its_minimum_there(dtype):
    covariance = with_spectrum(np.geomspace(1, 100, 6), seed=2)
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((20, 6))
    factor = hmc.reverse_kl_preconditioner(
        jnp.asarray(covariance, dtype), jnp.asarray(noise, dtype)
    )
    assert factor.dtype == dtype
    precision = np.linalg.inv(covariance)

    def loss(factor):
        # The mean of the map is free: the best one centres the draws.
        draws = (noise - noise.mean(axis=0)) @ factor.T
        return np.mean(np.sum(draws @ precision * draws, axis=1)) / 2 - np.linalg.slogdet(factor)[1]

    best = np.asarray(factor, np.float64)
    for _ in range(10):
        change = 0.02 * rng.standard_normal((6, 6))
        assert loss(best @ (np.eye(6) + change)) > loss(best)
    # What is left has the spectrum of the noise's sample covariance.
    left = hmc.remaining_covariance(jnp.asarray(covariance, dtype), factor)
    sample = np.cov(noise.T, bias=True)
    tolerance = 1e-3 if dtype == jnp.float32 else 1e-9
    np.testing.assert_allclose(
        np.linalg.eigvalsh(np.asarray(left, np.float64)), np.linalg.eigvalsh(sample), rtol=tolerance
    )


def test_diagonal_of_a_diagonal_leaves_nothing():
    covariance = jnp.diag(jnp.asarray([1.0, 4.0, 9.0]))
    for kind in ("reverse", "forward"):
        left = hmc.remaining_covariance(covariance, hmc.diagonal_preconditioner(covariance, kind))
        np.testing.assert_allclose(left, np.eye(3), atol=1e-6)
        kappa = hmc.condition_number(covariance=left)
        assert float(kappa.value) == pytest.approx(3**0.25, rel=1e-5)
