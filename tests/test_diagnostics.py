"""Z- and S-statistics against dense algebra."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from diagnostics_cases import BEST, LEVEL, MATRIX, SHIFT, SIZE, dense, inverse, moved, solve
from pnkrylov import diagnostics

BELIEFS = {  # name -> (belief, rank)
    "solve": (solve, SIZE - LEVEL + 1),
    "solve, one step ahead: a degenerate plane": (
        lambda dtype: solve(dtype, max_lookahead=1),
        SIZE - LEVEL,
    ),
    "solve, all but one step: one direction": (lambda dtype: solve(dtype, num_steps=SIZE - 1), 1),
    "solve, exact": (lambda dtype: solve(dtype, num_steps=SIZE), 0),
    "solve, prior scale, probes": (
        lambda dtype: solve(dtype, scale="prior", num_probes=3, probe_depth=5),
        SIZE - LEVEL + 1,
    ),
    "inverse, paper": (inverse, SIZE),
    "inverse, resolve-all": (lambda dtype: inverse(dtype, "resolve-all"), SIZE),
}


def dense_statistic(belief, error, rank):
    """`e^T Sigma^+ e` and the share of e outside the range, by an eigendecomposition."""
    values, vectors = np.linalg.eigh(dense(belief))
    coordinates = vectors.T @ error
    inside = np.arange(SIZE) >= SIZE - rank
    statistic = np.sum(coordinates[inside] ** 2 / values[inside])
    return statistic, np.sum(coordinates[~inside] ** 2) / np.sum(error**2)


CASES = [(name, "float32") for name in ("solve", "inverse, paper")]
if BEST == "float64":
    CASES += [(name, "float64") for name in BELIEFS]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_z_is_the_pseudo_inverse_form(name, dtype):
    make, rank = BELIEFS[name]
    belief = make(jnp.dtype(dtype))
    error = np.random.default_rng(5).standard_normal(SIZE)
    found = diagnostics.z_statistic(belief, moved(belief, error))
    statistic, outside = dense_statistic(belief, error, rank)
    # Rounding of Sigma is magnified by its condition number, below 1e4 in its range.
    tolerance = 1e4 * float(jnp.finfo(dtype).eps)
    assert int(found.degrees_of_freedom) == rank
    np.testing.assert_allclose(found.value, statistic, rtol=tolerance)
    np.testing.assert_allclose(found.outside, outside, atol=tolerance)
    if rank:
        tail = scipy.stats.chi2.sf(float(found.value), rank)
        np.testing.assert_allclose(found.tail_probability, tail, rtol=1e-4, atol=1e-30)
    assert f"chi2({rank})" in str(found)


@pytest.mark.parametrize("name", ["solve", "inverse, paper", "inverse, resolve-all"])
def test_z_of_draws_is_chi2(name):
    (make, rank), dtype = BELIEFS[name], BEST
    belief, number = make(dtype), 2000
    draws = belief.sample(jax.random.key(9), number)
    found = jax.jit(jax.vmap(lambda x: diagnostics.z_statistic(belief, x)))(draws)
    assert np.all(np.asarray(found.outside) < 1e4 * float(jnp.finfo(dtype).eps))
    # The largest distance of 2000 chi2 draws from their distribution exceeds 0.05 with p < 1e-4.
    assert scipy.stats.kstest(np.asarray(found.value), "chi2", args=(rank,)).statistic < 0.05
    assert abs(float(np.mean(found.value)) - rank) < 5 * np.sqrt(2 * rank / number)


def test_the_exact_remainder_has_the_mean_that_the_docstring_claims():
    """tr(Sigma^+ Sigma_exact) = d - m + 1, by summing Z over the columns of a square root."""
    belief = solve(
        BEST,
        scale="prior",
        max_lookahead=SIZE - LEVEL,
        num_probes=SIZE - LEVEL - 1,
        probe_depth=SIZE,
    )
    rows = np.asarray(belief.run.basis.vectors, np.float64)[:LEVEL]
    shifted = MATRIX + SHIFT * np.eye(SIZE)
    remainder = np.linalg.inv(shifted) - rows.T @ np.linalg.inv(rows @ shifted @ rows.T) @ rows
    values, vectors = np.linalg.eigh(remainder)
    columns = (vectors * np.sqrt(np.maximum(values, 0))).T
    found = jax.vmap(lambda e: diagnostics.z_statistic(belief, belief.mean_flat + e))(
        jnp.asarray(columns, belief.mean_flat.dtype)
    )
    np.testing.assert_allclose(np.sum(found.value), SIZE - LEVEL + 1, rtol=1e-3)


def test_z_reads_trees_and_refuses_other_structures():
    belief = solve(jnp.float32)
    with pytest.raises(ValueError, match=r"x has the wrong shape.*float32\[3\].*float32\[20\]"):
        diagnostics.z_statistic(belief, jnp.zeros(3, jnp.float32))
    batch = jax.tree.map(lambda leaf: leaf[None] if eqx.is_array(leaf) else leaf, belief)
    with pytest.raises(ValueError, match=r"batch of shape \[1\]"):
        diagnostics.z_statistic(batch, belief.mean)
    mapped = eqx.filter_vmap(diagnostics.z_statistic)(batch, belief.mean[None, :] + 1)
    np.testing.assert_allclose(
        mapped.value[0], diagnostics.z_statistic(belief, belief.mean + 1).value, rtol=1e-4
    )


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_s_is_exact_with_enough_probes(name, dtype):
    dtype = jnp.dtype(dtype)
    belief, A = BELIEFS[name][0](dtype), jnp.asarray(MATRIX, dtype)
    error = np.random.default_rng(6).standard_normal(SIZE)
    found = diagnostics.s_statistic(
        A, belief, moved(belief, error), key=jax.random.key(0), num_probes=50
    )
    shifted, sigma = MATRIX + SHIFT * np.eye(SIZE), dense(belief)
    tolerance = 1e4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(found.value, error @ shifted @ error, rtol=tolerance)
    np.testing.assert_allclose(
        found.expected.value, np.trace(shifted @ sigma), rtol=tolerance, atol=1e-30
    )
    spread = np.sqrt(2 * np.trace(shifted @ sigma @ shifted @ sigma))
    np.testing.assert_allclose(found.spread, spread, rtol=tolerance, atol=1e-30)
    assert float(found.expected.standard_error) == 0
    assert int(found.num_matvecs) == SIZE + 1
    assert "spread" in str(found)


def test_the_standard_error_of_s_is_that_of_its_probes():
    belief, A = inverse(jnp.float32, "resolve-all"), jnp.asarray(MATRIX, jnp.float32)
    number = 2000
    found = jax.jit(
        jax.vmap(lambda key: diagnostics.s_statistic(A, belief, belief.mean, key=key, num_probes=4))
    )(jax.random.split(jax.random.key(4), number))
    truth = np.trace((MATRIX + SHIFT * np.eye(SIZE)) @ dense(belief))
    errors = np.asarray(found.expected.value, np.float64) - truth
    claimed = np.asarray(found.expected.standard_error, np.float64)
    assert abs(errors.mean()) < 5 * errors.std() / np.sqrt(number)
    # Sampling errors of both second moments; (D-N)/D for (D-N)/(D-1), D = 9, adds 1/9 at most.
    noise = np.hypot(np.std(errors**2), np.std(claimed**2)) / np.sqrt(number)
    assert abs(np.mean(errors**2) - np.mean(claimed**2)) < 5 * noise + np.mean(errors**2) / 9
    assert claimed.min() > 0 and float(found.value[0]) == 0


@pytest.mark.one_precision
def test_s_of_draws_scatters_as_it_says(dtype):
    belief, A, number = inverse(dtype), jnp.asarray(MATRIX, dtype), 2000
    draws = belief.sample(jax.random.key(2), number)
    found = jax.jit(
        jax.vmap(
            lambda x: diagnostics.s_statistic(A, belief, x, key=jax.random.key(0), num_probes=20)
        )
    )(draws)
    values = np.asarray(found.value, np.float64)
    spread, expected = float(found.spread[0]), float(found.expected.value[0])
    assert abs(values.mean() - expected) < 5 * spread / np.sqrt(number)
    square = (values - values.mean()) ** 2
    assert abs(square.mean() - spread**2) < 5 * square.std() / np.sqrt(number)
    np.testing.assert_allclose(found.ratio[0], values[0] / expected, rtol=1e-5)


def test_s_refuses_bad_arguments():
    belief, A = solve(jnp.float32), jnp.asarray(MATRIX, jnp.float32)
    for bad in (0, True):
        with pytest.raises(ValueError, match=f"num_probes={bad} must be an int of at least 1"):
            diagnostics.s_statistic(A, belief, belief.mean, key=jax.random.key(0), num_probes=bad)
