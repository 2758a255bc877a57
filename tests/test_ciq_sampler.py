"""Samples: their covariance within sampling error, their protocol, and their failures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracles import with_spectrum
from pnkrylov.ciq import CIQSampler, SpectralBounds, ToleranceNotMetError
from pnkrylov.preconditioners import Diagonal
from pnkrylov.sample_diagnostics import check_samples

KEY = jax.random.key(11)


def problem(dtype, size=20, condition=1e2):
    matrix = with_spectrum(np.geomspace(1 / condition, 1, size), 0)
    return jnp.asarray(matrix, dtype)


def covariance_test(samples, mean, covariance):
    """Standardised deviation of the whitened sample covariance, all entries pooled.

    With S the whitened sample covariance of N samples in d dimensions, `N ||S - I||_F^2` is close
    to chi-squared with d (d + 1) / 2 degrees of freedom, each off-diagonal entry counted twice with
    variance 1/N and each diagonal one with 2/N: its mean is d (d + 1), its variance 4 d (d + 1)
    plus terms of order 1/N (the entries are uncorrelated, their squares too at leading order).
    """
    count, size = samples.shape
    white = np.linalg.solve(np.linalg.cholesky(covariance), (samples - mean).T)
    deviation = white @ white.T / count - np.eye(size)
    total = count * np.sum(deviation**2)
    return (total - size * (size + 1)) / np.sqrt(4 * size * (size + 1))


@pytest.mark.parametrize("role", ["precision", "covariance"])
@pytest.mark.parametrize("method", ["auto", "ciq"])
def test_covariance_within_sampling_error(role, method, dtype):
    matrix = problem(dtype)
    mean = np.linspace(-1, 1, 20)
    sampler = CIQSampler(matrix, jnp.asarray(mean, dtype), role=role, method=method, key=KEY)
    samples = np.asarray(sampler.sample(jax.random.key(1), 2000), np.float64)
    dense = np.asarray(matrix, np.float64)
    covariance = np.linalg.inv(dense) if role == "precision" else dense
    assert abs(covariance_test(samples, mean, covariance)) < 5
    # The mean: whitened, its squared norm times N is chi-squared with d degrees of freedom.
    white = np.linalg.solve(np.linalg.cholesky(covariance), samples.mean(axis=0) - mean)
    assert abs(2000 * white @ white - 20) < 5 * np.sqrt(40)
    # The test can fail: one per cent too much variance in all directions would be seen at 5 %.
    assert covariance_test(mean + 1.15 * (samples - mean), mean, covariance) > 5


@pytest.mark.slow
def test_covariance_of_twenty_thousand_samples(dtype):
    matrix = problem(dtype, size=100, condition=1e3)
    samples = np.asarray(CIQSampler(matrix).sample(jax.random.key(2), 20_000), np.float64)
    covariance = np.linalg.inv(np.asarray(matrix, np.float64))
    assert abs(covariance_test(samples, 0, covariance)) < 5
    check = check_samples(matrix, jnp.asarray(samples, dtype))
    assert check.verdict() == "agrees"


@pytest.mark.one_precision
def test_preconditioned_samples_have_the_same_covariance(dtype):
    size = 20
    scales = np.geomspace(1, 100, size)
    matrix = with_spectrum(np.linspace(1, 3, size), 0) * np.sqrt(np.outer(scales, scales))
    preconditioner = Diagonal(jnp.asarray(scales, dtype))
    sampler = CIQSampler(jnp.asarray(matrix, dtype), preconditioner=preconditioner)
    samples = np.asarray(sampler.sample(jax.random.key(3), 2000), np.float64)
    assert abs(covariance_test(samples, 0, np.linalg.inv(matrix))) < 5


@pytest.mark.slow
def test_chi_square_check_passes_and_fails_on_an_unconverged_run(dtype):
    matrix = problem(dtype, size=40, condition=1e3)
    # Perfect samples have a distance above 0.031 with probability 2 exp(-2 n 0.031^2) = 1.3e-4,
    # and the interval adds 0.019: below the tolerance of 0.05.
    good = CIQSampler(matrix).sample(jax.random.key(4), 5000)
    assert check_samples(matrix, good).verdict() == "agrees"
    bounds = SpectralBounds.known(9e-4, 1.1, dtype)
    for method in ("lanczos", "ciq"):
        hasty = CIQSampler(matrix, bounds=bounds, max_steps=4, throw=False, method=method)
        samples = hasty.sample(jax.random.key(4), 5000)
        check = check_samples(matrix, samples)
        assert check.verdict() == "differs"
        if method == "ciq":
            assert check.p_value < 1e-6
            assert check.interval[0] > 0.05
        else:
            # The distances of Lanczos-FA are exactly chi-squared whether it converged or not.
            assert check.interval[1] < 0.05
            assert check.isotropy_interval[0] > 1.05
    with pytest.raises(ToleranceNotMetError):
        CIQSampler(matrix, bounds=bounds, max_steps=4).sample(jax.random.key(4), 10)


@pytest.mark.one_precision
def test_same_protocol_as_a_belief(dtype):
    diagonal = {"a": jnp.asarray([1.0, 4.0], dtype), "b": jnp.asarray([[9.0]], dtype)}
    mean = jax.tree.map(jnp.ones_like, diagonal)

    def product(tree):
        return jax.tree.map(jnp.multiply, diagonal, tree)

    sampler = CIQSampler(product, mean)
    samples = sampler.sample(jax.random.key(5), 7)
    assert samples["a"].shape == (7, 2)
    assert samples["b"].shape == (7, 1, 1)
    again = sampler.sample(jax.random.key(5), 7)
    np.testing.assert_array_equal(samples["a"], again["a"])
    other = sampler.sample(jax.random.key(6), 7)
    assert np.all(np.asarray(samples["a"]) != np.asarray(other["a"]))
    assert sampler.sample(jax.random.key(5), 0)["b"].shape == (0, 1, 1)


@pytest.mark.one_precision
def test_batches_do_not_repeat_each_other(dtype, monkeypatch):
    monkeypatch.setattr("pnkrylov.ciq.sampler._BATCH_BYTES", 256 * 20 * dtype.itemsize * 8)
    matrix = problem(dtype)
    samples = np.asarray(CIQSampler(matrix).sample(jax.random.key(7), 21))
    assert samples.shape == (21, 20)
    assert len(np.unique(samples[:, 0])) == 21
    distances = np.einsum("ni,ij,nj->n", samples, np.asarray(matrix), samples)
    assert np.all((distances > 2) & (distances < 70))


@pytest.mark.one_precision
def test_under_jit(dtype):
    matrix = problem(dtype)
    sampler = CIQSampler(matrix, throw=False)
    direct = sampler.sample(jax.random.key(8), 3)
    compiled = jax.jit(lambda s, k: s.sample(k, 3))(sampler, jax.random.key(8))
    np.testing.assert_allclose(
        compiled, direct, rtol=0, atol=3e-4 * float(jnp.abs(direct).max()) * 5
    )


def test_bad_arguments():
    with pytest.raises(ValueError, match="role"):
        CIQSampler(jnp.eye(3), role="variance")
    with pytest.raises(ValueError, match="num_samples"):
        CIQSampler(jnp.eye(3)).sample(jax.random.key(0), -1)
