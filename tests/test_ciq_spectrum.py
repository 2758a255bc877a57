"""Spectral bounds: they must bracket, whatever the spectrum and however the start falls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracles import SPECTRA, with_spectrum
from pnkrylov.ciq import SpectralBounds, spectral_bounds
from pnkrylov.ciq.spectrum import certified_interval, extreme_ritz_values, smallest_share


def tridiagonal(alpha, beta):
    return np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1)


@pytest.mark.parametrize("name", sorted(SPECTRA))
def test_brackets_every_test_spectrum(name, dtype):
    matrix, _ = SPECTRA[name](80)
    matrix = jnp.asarray(matrix, dtype)
    exact = np.linalg.eigvalsh(np.asarray(matrix, np.float64))
    for seed in range(3):
        bounds = spectral_bounds(matrix, key=jax.random.key(seed))
        if not bounds.certified:
            # Only where rounding hides the smallest eigenvalue may the bounds be open.
            assert dtype == jnp.float32
            assert exact[0] <= 100 * float(jnp.finfo(dtype).eps) * exact[-1]
            continue
        assert 0 < float(bounds.lower) <= exact[0] * (1 + 1e-6)
        assert float(bounds.upper) >= exact[-1] * (1 - 1e-6)
        # And they are not silly: the quadrature pays for the logarithm of the ratio.
        assert float(bounds.lower) >= exact[0] / 20
        assert float(bounds.upper) <= 1.2 * exact[-1]
        assert int(bounds.num_matvecs) <= 80


def test_finds_one_small_eigenvalue_below_a_flat_bulk(dtype):
    # A short run sees only the bulk, and a Ritz value says nothing about the outlier.
    eigenvalues = np.concatenate([[1e-3], np.linspace(0.3, 1.0, 199)])
    matrix = jnp.asarray(with_spectrum(eigenvalues, 0), dtype)
    for seed in range(5):
        bounds = spectral_bounds(matrix, key=jax.random.key(seed))
        assert bounds.certified
        assert float(bounds.lower) <= 1e-3 <= float(bounds.ritz_min) * 1.01


def test_unlucky_start_is_not_believed():
    """A start that hardly sees the small eigenvalue must not certify a bound above it."""
    # Diagonal operator, exact tridiagonal by a dense float64 Lanczos with re-orthogonalisation.
    size, steps = 60, 20
    eigenvalues = np.concatenate([[1e-3], np.linspace(0.3, 1.0, size - 1)])
    share = smallest_share(1, size, 1e-3)
    start = np.ones(size)
    start[0] = np.sqrt(2 * share * size)  # unlucky, but not yet excluded by the probability
    rows = [start / np.linalg.norm(start)]
    alpha, beta = [], []
    for _ in range(steps):
        product = eigenvalues * rows[-1]
        alpha.append(product @ rows[-1])
        for _ in range(2):
            product -= np.array(rows).T @ (np.array(rows) @ product)
        beta.append(np.linalg.norm(product))
        rows.append(product / beta[-1])
    dtype = jnp.zeros(()).dtype
    interval = jax.jit(certified_interval, static_argnums=3)
    for count in range(2, steps + 1):
        ritz = np.linalg.eigvalsh(tridiagonal(alpha[:count], beta[: count - 1]))
        lower, _, certified = interval(
            jnp.asarray(alpha, dtype)[:, None],
            jnp.asarray(beta, dtype)[:, None],
            jnp.asarray(count, jnp.int32),
            share,
        )
        assert not certified or float(lower) <= 1e-3, (count, float(lower), ritz[0])
    # The rule is no blanket refusal: more steps find the eigenvalue even so.
    assert certified


def test_smallest_share_is_a_probability_bound():
    # Monte Carlo: the mean share of k uniform starts falls below it with at most probability delta.
    rng = np.random.default_rng(0)
    size, draws, delta = 30, 200_000, 0.02
    for count in (1, 3):
        starts = rng.standard_normal((draws, count, size))
        shares = (starts[:, :, 0] ** 2 / (starts**2).sum(axis=2)).mean(axis=1)
        # Either end has half of the probability.
        frequency = np.mean(shares < smallest_share(count, size, delta))
        assert frequency <= delta / 2 + 5 * np.sqrt(delta / 2 / draws)
        assert frequency >= delta / 20


def test_ritz_values_match_a_dense_eigensolver(dtype):
    rng = np.random.default_rng(1)
    alpha, beta = rng.uniform(1, 2, (12, 2)), rng.uniform(0.1, 1, (12, 2))
    low, high = extreme_ritz_values(
        jnp.asarray(alpha, dtype), jnp.asarray(beta, dtype), jnp.asarray(9, jnp.int32)
    )
    values = [np.linalg.eigvalsh(tridiagonal(alpha[:9, i], beta[:8, i])) for i in range(2)]
    atol = 1e-5 if dtype == jnp.float32 else 1e-12
    np.testing.assert_allclose(low, min(v[0] for v in values), atol=atol)
    np.testing.assert_allclose(high, max(v[-1] for v in values), atol=atol)


@pytest.mark.one_precision
def test_indefinite_and_singular_operators_are_not_certified(dtype):
    indefinite = jnp.asarray(with_spectrum(np.linspace(-1, 3, 30), 0), dtype)
    bounds = spectral_bounds(indefinite, key=jax.random.key(0))
    assert not bounds.certified
    assert float(bounds.ritz_min) < 0
    singular = jnp.asarray(np.diag([0.0, 1.0, 2.0]), dtype)
    assert not spectral_bounds(singular, key=jax.random.key(0)).certified


@pytest.mark.one_precision
def test_identity_and_one_dimension(dtype):
    for matrix in (2 * jnp.eye(5, dtype=dtype), 2 * jnp.eye(1, dtype=dtype)):
        bounds = spectral_bounds(matrix, key=jax.random.key(0))
        assert bounds.certified
        assert float(bounds.lower) <= 2 <= float(bounds.upper)
        assert float(bounds.lower) > 1


def test_under_jit(dtype):
    matrix = jnp.asarray(with_spectrum(np.geomspace(1, 100, 20), 0), dtype)
    outside = spectral_bounds(matrix, key=jax.random.key(3))
    inside = jax.jit(lambda a, k: spectral_bounds(a, key=k))(matrix, jax.random.key(3))
    np.testing.assert_allclose(inside.lower, outside.lower, rtol=1e-3)


def test_bad_arguments():
    with pytest.raises(ValueError, match="failure_probability"):
        spectral_bounds(jnp.eye(2), key=jax.random.key(0), failure_probability=0.0)
    with pytest.raises(ValueError, match="max_steps"):
        spectral_bounds(jnp.eye(2), key=jax.random.key(0), max_steps=0)
    with pytest.raises(ValueError, match="0 < lower"):
        SpectralBounds.known(0.0, 1.0)
