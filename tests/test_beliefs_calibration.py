"""Beliefs: estimates and their errors, calibration, batches, what they print."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import oracles
import pnkrylov as pk
from belief_cases import (
    AHEAD,
    INVERSE,
    KEY,
    SIZE,
    SOLVE,
    STEPS,
    problem,
    same,
)
from harness import count_compilations, start_vector
from pnkrylov.beliefs import solve_belief

# The inverse belief and its estimates.


@functools.cache
def inverse_estimates(count=6):
    matrix, _ = problem()
    vector = start_vector(SIZE, "float64", 5)
    start = start_vector(SIZE, "float64")

    @jax.vmap
    def estimate(key):
        belief = pk.inverse(
            matrix,
            key=key,
            start=start,
            num_steps=6,
            lookahead=18,
            num_probes=4,
            probe_depth=30,
            layout="paper",
        )
        return belief.matvec(vector), belief.diagonal(), belief.trace(), belief.logdet(), belief

    return estimate(jax.random.split(KEY, count)), vector, start


@pytest.mark.slow
def test_estimates_lie_within_their_errors():
    """5 standard errors, plus the 2e-3 at which the quadrature of the probes may stop.

    What is estimated: the trace and determinant of A^-1 itself; entries and products of Sigma_m,
    whose only random number is the bulk variance.
    """
    (matvec, diagonal, trace, logdet, beliefs), vector, _ = inverse_estimates()
    (matrix, _), vector = problem(), np.asarray(vector)
    rows = np.asarray(beliefs.run.basis.vectors)[0]
    exact = oracles.split(matrix, rows[:6], rows[6])
    sigma, inverse = exact.sigma(), np.linalg.inv(matrix)
    for found, truth in (
        (matvec, sigma @ vector),
        (diagonal, np.diag(sigma)),
        (trace, np.trace(inverse)),
        (logdet, np.linalg.slogdet(matrix)[1]),
    ):
        value, error = np.asarray(found.value), np.asarray(found.standard_error)
        stopped = 2e-3 * np.max(np.abs(truth))
        assert np.all(np.abs(value - truth) <= 5 * error + stopped)
        assert np.all(error >= 0) and error.max() > 1e-3 * np.abs(truth).max()
        assert len(np.unique(value.round(9), axis=0)) == len(value)
    np.testing.assert_array_equal(trace.num_matvecs, beliefs.stats.num_matvecs)


def test_a_solve_belief_from_an_inverse_belief():
    """Mean of level m and the remainder at scale one, for any right-hand side, at no product."""
    matrix, _ = problem()
    start, vector = start_vector(SIZE, "float64"), start_vector(SIZE, "float64", 5)
    inverse = pk.inverse(matrix, start=start, **INVERSE | {"lookahead": 16, "layout": "paper"})
    belief = inverse.solve(vector)
    rows = np.asarray(inverse.run.basis.vectors)
    exact = oracles.split(matrix, rows[:STEPS], rows[STEPS])
    same(belief.mean, exact.rows.T @ np.linalg.solve(exact.T, exact.rows @ vector))
    omega = float(inverse.stats.bulk_variance)
    remainder = exact.parts()["coupling"] + omega / exact.omega * exact.parts()["bulk"]
    same(belief.covariance.as_matrix(), remainder)
    assert int(belief.stats.num_matvecs) == int(inverse.stats.num_matvecs)
    # The inverse belief is that remainder and the resolved block.
    resolved = exact.parts()["resolved"]
    same(inverse.covariance.as_matrix(), resolved + remainder)
    batch = jax.vmap(lambda v: inverse.solve(v).mean)(jnp.stack([vector, 2 * vector]))
    same(batch[1], 2 * belief.mean)


def test_prior_scale_is_calibrated_for_an_independent_start():
    """x ~ N(0, A^-1) and a basis that does not depend on v: METHOD section 5.

    E ||x - mean||^2 is exactly the trace of the remainder, and the variance of the squared norm of
    a Gaussian is 2 tr Sigma^2. With outliers resolved and a bulk of condition 1.2, the remainder
    is the model's to a few per cent, so that Z is chi-squared with d - m degrees of freedom up to
    these per cents; the Kolmogorov-Smirnov bound is that of one false alarm in a million.
    """
    size, steps, count = 40, 14, 400
    rng = np.random.default_rng(3)
    eigenvalues = np.concatenate([np.geomspace(1e4, 1e2, 8), rng.uniform(0.91, 1.09, size - 8)])
    matrix = oracles.with_spectrum(eigenvalues, 3)
    root = np.linalg.cholesky(matrix)
    start = start_vector(size, "float64", 9)
    x = np.linalg.solve(root.T, rng.standard_normal((size, count))).T

    @eqx.filter_vmap
    def mean_of(v):
        options = {"num_steps": steps, "max_lookahead": size, "num_probes": size}
        belief = pk.solve(matrix, v, key=KEY, start=start, scale="prior", probe_depth=30, **options)
        return belief.mean, belief.covariance

    means, covariances = mean_of(jnp.asarray(x @ matrix))
    sigma = np.asarray(jax.tree.map(lambda leaf: leaf[0], covariances).as_matrix())
    errors = x - np.asarray(means)
    rows = np.asarray(covariances.vectors[0])[:steps]
    exact = np.linalg.inv(matrix) - rows.T @ np.linalg.inv(rows @ matrix @ rows.T) @ rows
    squares = (errors**2).sum(1)
    bound = 5 * np.sqrt(2 * np.trace(exact @ exact) / count)
    assert abs(squares.mean() - np.trace(sigma)) <= bound + 2e-3 * np.trace(sigma)
    assert bound < 0.1 * np.trace(sigma)
    z = np.einsum("ni,ij,nj->n", errors, np.linalg.pinv(sigma, rcond=1e-9, hermitian=True), errors)
    distance = stats.kstest(z, stats.chi2(size - steps).cdf).statistic
    alarm = np.sqrt(np.log(2 / 1e-6) / (2 * count))
    # A relative error of Z of 5 % moves its distribution function by at most this much.
    model = 0.05 * (size - steps) * stats.chi2(size - steps).pdf(size - steps - 2)
    assert distance <= alarm + model
    # The same numbers at another scale are refused.
    assert stats.kstest(z / 2, stats.chi2(size - steps).cdf).statistic > 2 * (alarm + model)


# Under transformations.


def test_jit_and_no_recompilation():
    # One jitted caller; nothing compiles for new values, new right-hand sides, new keys.
    def both(matrix, rhs, key):
        belief = pk.solve(matrix, rhs, key=key, num_steps=STEPS, max_lookahead=AHEAD)
        inverse = pk.inverse(matrix, **INVERSE | {"key": key})
        return belief.mean, belief.std(), inverse.trace().value, inverse.sample(key, 2)

    matrix, rhs = (jnp.asarray(x) for x in problem())
    jitted = jax.jit(both)
    first = jitted(matrix, rhs, KEY)
    for a, b in zip(first, both(matrix, rhs, KEY), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.max(jnp.abs(b))))
    others = 2 * matrix, rhs[::-1], jax.random.key(1)
    with count_compilations() as compiled:
        second = jitted(*others)
    assert jitted._cache_size() == 1 and not compiled
    assert not np.allclose(first[0], second[0])


def test_new_values_do_not_recompile():
    def run(seed):
        matrix, _ = oracles.SPECTRA["power-law-1"](SIZE, seed)
        matrix, rhs = jnp.asarray(matrix), start_vector(SIZE, "float64", seed)
        key = jax.random.key(seed)
        belief = pk.solve(matrix, rhs, **SOLVE | {"key": key})
        inverse = pk.inverse(lambda v: matrix @ v, like=rhs, driver="compiled", **INVERSE)
        return belief.shift(0.1 * seed).mean, inverse.shift(0.1).stats.bulk_variance

    run(0)
    with count_compilations() as compiled:
        run(1)
        run(2)
    assert not compiled


@pytest.mark.slow
@pytest.mark.one_precision
def test_vmap_equals_a_loop(dtype):
    matrix, _ = problem()
    matrix = jnp.asarray(matrix, dtype)
    vectors = jnp.stack([start_vector(SIZE, dtype, seed) for seed in range(3)]).at[1].set(0)
    keys = jax.random.split(KEY, 3)
    options = {"num_steps": STEPS, "max_lookahead": 2 * AHEAD}
    solve = lambda v, key: pk.solve(matrix, v, key=key, **options)  # noqa: E731
    inverse = lambda key: pk.inverse(matrix, **INVERSE | {"key": key})  # noqa: E731
    beliefs, inverses = jax.vmap(solve)(vectors, keys), jax.vmap(inverse)(keys)
    stds = eqx.filter_vmap(lambda belief: belief.std())(beliefs)
    traces = eqx.filter_vmap(lambda belief: belief.trace().value)(inverses)
    assert beliefs.mean.shape == (3, SIZE)
    tolerance = {"float32": 2e-3, "float64": 1e-8}[dtype.name]
    for index in range(3):
        belief = solve(vectors[index], keys[index])
        for a, b in ((beliefs.mean[index], belief.mean), (stds[index], belief.std())):
            scale = float(jnp.max(jnp.abs(b)))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)
        assert int(beliefs.stats.num_matvecs[index]) == int(belief.stats.num_matvecs)
        np.testing.assert_allclose(traces[index], inverse(keys[index]).trace().value, rtol=2e-3)
    assert not np.any(beliefs.mean[1]) and not np.any(stds[1])
    assert ".." in str(beliefs) and "SolveBelief" in str(beliefs)
    assert "InverseBelief" in str(inverses)


# What a person reads.


def test_a_belief_prints_what_it_spent_and_its_warnings():
    matrix, rhs = problem("exponential")
    belief = pk.solve(matrix, rhs, key=KEY, num_steps=3, max_lookahead=2)
    text = str(belief)
    assert f"{int(belief.stats.num_matvecs)} matvecs: 3 resolved, 2 look-ahead" in text
    assert "warning   the look-ahead saw only" in text and "float64" in text
    inverse = pk.inverse(matrix, **INVERSE | {"num_steps": 2})
    text = str(inverse)
    assert f"{int(inverse.stats.num_matvecs)} matvecs" in text and "tr A^-1 = " in text
    assert "warning   the complement is far from isotropic (kappa_S ~ " in text
    calm = pk.solve(np.eye(5), np.ones(5), key=KEY)
    assert "warning" not in str(calm)
    assert "<traced>" in jax.eval_shape(lambda v: print_to(v), jnp.ones(5)).tag


class _Printed(eqx.Module):
    value: jax.Array
    tag: str = eqx.field(static=True)


def print_to(v):
    belief = pk.solve(jnp.eye(5), v, key=KEY)
    return _Printed(belief.mean, str(belief))


@pytest.mark.one_precision
def test_the_belief_of_a_known_answer(dtype):
    """A = I, d = 1, zero right-hand sides: exact answers, with no spread but rounding."""
    eye = np.eye(4, dtype=dtype)
    for rhs in (np.ones(4, dtype), np.zeros(4, dtype)):
        belief = pk.solve(eye, rhs, key=KEY)
        np.testing.assert_allclose(belief.mean, rhs, rtol=1e-6)
        # Exact but for rounding, which the belief knows of.
        assert np.all(np.asarray(belief.std()) <= np.finfo(dtype).eps * rhs)
    zero = pk.solve(problem()[0].astype(dtype), np.zeros(SIZE, dtype), **SOLVE)
    np.testing.assert_array_equal(zero.mean, np.zeros(SIZE, dtype))
    np.testing.assert_array_equal(zero.std(), np.zeros(SIZE, dtype))
    one = pk.inverse(4 * eye[:1, :1], key=KEY)
    np.testing.assert_allclose(one.covariance.as_matrix(), [[0.25]], rtol=1e-6)
    np.testing.assert_allclose(one.logdet().value, np.log(4), rtol=1e-6)
    identity = pk.inverse(eye, key=KEY)
    np.testing.assert_allclose(identity.covariance.as_matrix(), eye, atol=1e-5)


def test_the_same_run_serves_both_kinds_of_start(dtype):
    """From v itself, coordinates are exact; from another start, they are products with v."""
    matrix, rhs = (x.astype(dtype) for x in problem())
    belief = pk.solve(matrix, rhs, **SOLVE)
    one = jnp.ones((), dtype)
    other = solve_belief(belief.run, jnp.asarray(rhs), 0 * one, one, None, from_rhs=False)
    scale = float(jnp.max(jnp.abs(belief.mean)))
    np.testing.assert_allclose(other.mean, belief.mean, atol=1e-3 * scale)
