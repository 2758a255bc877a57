"""The condition number from every description, against dense algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pnkrylov as pk
from harness import no_type_checker
from oracles import SPECTRA, with_spectrum
from pnkrylov import hmc
from pnkrylov.hmc.condition import _trace_of_square


def exact(precision_eigenvalues):
    """`tr(Lambda^2)^{1/4} / lambda_min^{1/2}`."""
    values = np.asarray(precision_eigenvalues, np.float64)
    return float(np.sum(values**2) ** 0.25 / values.min() ** 0.5)


def test_all_descriptions_agree(dtype):
    eigenvalues = np.geomspace(0.1, 10, 12)
    matrix = with_spectrum(eigenvalues, seed=0)
    rtol = 1e-4 if dtype == jnp.float32 else 1e-11
    for given in (
        {"standard_deviations": jnp.asarray(eigenvalues**-0.5, dtype)},
        {"precision": jnp.asarray(matrix, dtype)},
        {"covariance": jnp.asarray(np.linalg.inv(matrix), dtype)},
    ):
        found = hmc.condition_number(**given)
        assert found.value.dtype == dtype
        np.testing.assert_allclose(found.value, exact(eigenvalues), rtol=rtol)
        assert found.lower == found.value == found.upper
        np.testing.assert_allclose(found.sigma_max, 0.1**-0.5, rtol=rtol)
        np.testing.assert_allclose(found.stiffness * found.sigma_max, found.value, rtol=rtol)
        assert int(found.num_matvecs) == 0


def test_standard_deviations_under_jit_and_vmap(dtype):
    sigma = np.random.default_rng(0).uniform(1, 5, (3, 7))

    def kappa(deviations):
        return hmc.condition_number(standard_deviations=deviations).value

    found = jax.jit(jax.vmap(kappa))(jnp.asarray(sigma, dtype))
    np.testing.assert_allclose(found, [exact(row**-2.0) for row in sigma], rtol=1e-5)
    # Scale free, and no overflow of fourth powers.
    tiny = kappa(jnp.asarray(sigma[0] * 1e-20, dtype))
    np.testing.assert_allclose(tiny, exact(sigma[0] ** -2.0), rtol=1e-5)


@pytest.mark.parametrize("name", ["bulk+outliers", "power-law-1", "exponential"])
def test_operators_are_within_their_error_bar(name):
    matrix, eigenvalues = SPECTRA[name](80)
    operator = pk.as_operator(jnp.asarray(matrix))
    for seed in range(3):
        found = hmc.condition_number(precision=operator, key=jax.random.key(seed))
        truth = exact(eigenvalues)
        assert float(found.lower) <= truth * (1 + 1e-5) and truth <= float(found.upper) * (1 + 1e-5)
        assert float(found.upper) <= 1.2 * truth
        assert abs(float(found.value) / truth - 1) < 0.15


def test_covariance_operator_is_within_its_error_bar():
    matrix, eigenvalues = SPECTRA["kernel-5d"](80)
    found = hmc.condition_number(
        covariance=pk.as_operator(jnp.asarray(matrix)), key=jax.random.key(0)
    )
    truth = exact(1 / eigenvalues)
    assert float(found.lower) <= truth * (1 + 1e-5) and truth <= float(found.upper) * (1 + 1e-5)
    np.testing.assert_allclose(found.value, truth, rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SPECTRA))
def test_large_operators_are_within_their_error_bar(name):
    matrix, eigenvalues = SPECTRA[name](2000)
    operator = pk.as_operator(jnp.asarray(matrix))
    found = hmc.condition_number(precision=operator, key=jax.random.key(1))
    truth = exact(eigenvalues)
    assert float(found.lower) <= truth * (1 + 1e-6) and truth <= float(found.upper) * (1 + 1e-6)
    if name == "exponential-1e6":
        # The default limit of 1000 steps cannot exclude smaller eigenvalues, and says so.
        assert np.isinf(float(found.upper))
        return
    assert float(found.upper) <= 1.25 * float(found.lower)
    if name in ("bulk+outliers", "power-law-1", "kernel-5d"):
        found = hmc.condition_number(covariance=operator, key=jax.random.key(1))
        truth = exact(1 / eigenvalues)
        assert float(found.lower) <= truth <= float(found.upper) <= 1.25 * float(found.lower)


def test_trace_of_the_square_is_unbiased_and_its_error_bar_honest():
    matrix, eigenvalues = SPECTRA["power-law-1"](80)
    operator = pk.as_operator(jnp.asarray(matrix))
    start = jnp.asarray(np.random.default_rng(5).standard_normal(80))
    basis = pk.lanczos(operator, start, 6)
    rows = np.asarray(basis.vectors)
    truth = np.sum(eigenvalues**2)
    values, errors = [], []
    for seed in range(150):
        resolved, rest, error, spent = _trace_of_square(operator, basis, jax.random.key(seed), 8)
        assert spent == 8
        np.testing.assert_allclose(resolved, np.sum((rows @ matrix) ** 2), rtol=1e-9)
        values.append(resolved + rest)
        errors.append(error)
    spread = np.std(values, ddof=1)
    assert abs(np.mean(values) - truth) < 5 * spread / np.sqrt(150)
    # The ratio of two variances over 150 draws, with excess kurtosis: known to about 15 %.
    assert 0.5 < np.mean(np.square(errors)) / spread**2 < 1.6


def test_as_many_probes_as_directions_leave_no_chance():
    matrix, eigenvalues = SPECTRA["power-law-1"](20)
    operator = pk.as_operator(jnp.asarray(matrix))
    basis = pk.lanczos(operator, jnp.ones(20), 6)
    resolved, rest, error, spent = _trace_of_square(operator, basis, jax.random.key(0), 50)
    np.testing.assert_allclose(resolved + rest, np.sum(eigenvalues**2), rtol=1e-10)
    assert (error, spent) == (0, 14)


def test_repeated_eigenvalues():
    matrix = with_spectrum(np.repeat([1.0, 2.0, 5.0], 20), seed=3)
    operator = pk.as_operator(jnp.asarray(matrix))
    found = hmc.condition_number(precision=operator, key=jax.random.key(0), num_probes=57)
    truth = exact(np.repeat([1.0, 2.0, 5.0], 20))
    np.testing.assert_allclose([found.value, found.lower], truth, rtol=1e-6)
    assert truth * (1 - 1e-6) <= float(found.upper) <= 1.02 * truth


def test_an_invariant_space_is_the_end_of_the_run():
    operator = pk.as_operator(lambda v: 2 * v, like=jnp.ones(10))
    found = hmc.condition_number(precision=operator, key=jax.random.key(0))
    np.testing.assert_allclose([found.lower, found.value, found.upper], 10**0.25, rtol=1e-6)


def test_a_run_that_is_too_short_says_so():
    matrix, eigenvalues = SPECTRA["exponential"](80)
    operator = pk.as_operator(jnp.asarray(matrix))
    found = hmc.condition_number(precision=operator, key=jax.random.key(0), max_steps=8)
    assert float(found.lower) <= exact(eigenvalues) <= float(found.upper)
    assert float(found.upper) > 2 * float(found.lower)
    assert int(found.num_matvecs) == 8 + 16


def test_bad_input():
    operator = pk.as_operator(jnp.eye(3))
    with pytest.raises(TypeError, match=r"exactly one of.*got none"):
        hmc.condition_number()
    with pytest.raises(TypeError, match="got covariance, precision"):
        hmc.condition_number(covariance=jnp.eye(3), precision=jnp.eye(3))
    with pytest.raises(TypeError, match="key is missing"):
        hmc.condition_number(precision=operator)
    with pytest.raises(ValueError, match=r"standard_deviations=.*positive"):
        hmc.condition_number(standard_deviations=jnp.asarray([1.0, 0.0]))
    with pytest.raises(pk.NotPositiveDefiniteError, match="-1"):
        hmc.condition_number(covariance=jnp.diag(jnp.asarray([1.0, -1.0])))
    with pytest.raises(pk.NotPositiveDefiniteError, match="Ritz value"):
        indefinite = pk.as_operator(jnp.diag(jnp.asarray([1.0, -1.0, 2.0])))
        hmc.condition_number(precision=indefinite, key=jax.random.key(0))
    with pytest.raises(pk.NotFiniteError):
        broken = pk.as_operator(lambda v: v * jnp.nan, like=jnp.ones(3))
        hmc.condition_number(precision=broken, key=jax.random.key(0))
    with pytest.raises(ValueError, match="max_steps=0"):
        hmc.condition_number(precision=operator, key=jax.random.key(0), max_steps=0)
    with no_type_checker(), pytest.raises(ValueError, match="square"):
        hmc.condition_number(covariance=jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda k: hmc.condition_number(precision=operator, key=k).value)(jax.random.key(0))
