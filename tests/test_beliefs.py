"""Beliefs end to end: shifts, refinement, budgets, push-forwards, samples, calibration, batches."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import oracles
import pnkrylov as pk
from harness import CountingOperator, count_compilations, start_vector
from pnkrylov.beliefs import solve_belief

SIZE, STEPS, AHEAD = 24, 8, 10
KEY = jax.random.key(7)
SOLVE = {"key": KEY, "num_steps": STEPS, "max_lookahead": AHEAD}
INVERSE = {"key": KEY, "num_steps": STEPS, "lookahead": 4, "num_probes": 5, "probe_depth": 6}


@functools.cache
def problem(spectrum="power-law-1", size=SIZE):
    matrix, _ = oracles.SPECTRA[spectrum](size)
    return matrix, oracles.right_hand_side(matrix, "normal")


@functools.cache
def counting(dtype="float64"):
    """One operator for all tests that count: a new one would be a new program."""
    return CountingOperator(problem()[0].astype(dtype))


def counted(run):
    """The result of `run(operator)` and the products that it spent."""
    operator = counting()
    before = operator.products
    return run(operator), operator.products - before


def same(a, b, rtol=1e-8):
    scale = float(np.max(np.abs(b), initial=0))
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


def assert_same_belief(a, b):
    same(a.mean, b.mean)
    same(a.covariance.as_matrix(), b.covariance.as_matrix(), rtol=1e-7)


# Shifts: METHOD section 12.


@pytest.mark.parametrize("alpha", [0.4, 30.0, -0.5])
def test_a_shifted_solve_belief_is_that_of_a_fresh_run(alpha):
    matrix, rhs = problem()
    belief = pk.solve(counting(), rhs, **SOLVE)
    shifted, products = counted(lambda _: belief.shift(alpha))
    assert products == 0
    fresh = pk.solve(matrix + alpha * np.eye(SIZE), rhs, **SOLVE)
    assert_same_belief(shifted, fresh)
    assert_same_belief(shifted, pk.solve(matrix, rhs, shift=alpha, **SOLVE))
    same(shifted.error.error_norm, fresh.error.error_norm)
    same(shifted.stats.ritz_min, fresh.stats.ritz_min)
    # A shift replaces the former one.
    assert_same_belief(shifted.shift(0.0), belief)
    assert abs(float(shifted.mean[0] - belief.mean[0])) > 1e-3 * abs(float(belief.mean[0]))


@pytest.mark.parametrize("layout", ["resolve-all", "paper"])
def test_a_shifted_inverse_belief_is_that_of_a_fresh_run(layout):
    # The exponential keeps every probe busy to its full depth, whatever the shift.
    matrix, _ = problem("exponential")
    options = INVERSE | {"layout": layout, "start": start_vector(SIZE, "float64")}
    belief = pk.inverse(matrix, **options)
    alpha = 0.05
    shifted, fresh = belief.shift(alpha), pk.inverse(matrix + alpha * np.eye(SIZE), **options)
    assert int(fresh.stats.probe_depth) == int(shifted.stats.probe_depth) == 6
    assert_same_belief(shifted, fresh)
    for name in ("trace", "logdet"):
        a, b = getattr(shifted, name)(), getattr(fresh, name)()
        same(a.value, b.value)
        same(a.standard_error, b.standard_error, rtol=1e-6)


def test_a_singular_operator_with_a_shift():
    """A bare rank-ten curvature and a prior precision: the belief is exact on the null space."""
    factor = np.random.default_rng(0).standard_normal((SIZE, 10))
    options = {"key": KEY, "num_steps": 16, "lookahead": 8, "num_probes": 4, "probe_depth": 6}
    belief = pk.inverse(factor @ factor.T, shift=0.5, **options)
    for alpha in (0.5, 2.0):
        exact = np.linalg.inv(factor @ factor.T + alpha * np.eye(SIZE))
        again = belief.shift(alpha)
        same(again.covariance.as_matrix(), exact, rtol=1e-7)
        same(again.logdet().value, -np.linalg.slogdet(exact)[1], rtol=1e-7)
    with pytest.raises(pk.NotPositiveDefiniteError, match=r"Ritz value"):
        belief.shift(0.0)


# Refinement and budgets.


def test_a_refined_solve_belief_is_that_of_a_longer_run():
    _, rhs = problem()
    belief, products = counted(lambda A: pk.solve(A, rhs, **SOLVE))
    assert products == int(belief.stats.num_matvecs) == 2 + STEPS + AHEAD
    refined, products = counted(lambda A: belief.refine(A, num_steps=5, max_lookahead=AHEAD))
    # Five look-ahead steps became part of the mean, five new ones follow.
    assert products == 5 == int(refined.stats.num_matvecs) - int(belief.stats.num_matvecs)
    assert int(refined.stats.num_steps) == STEPS + 5
    longer = pk.solve(counting(), rhs, **SOLVE | {"num_steps": STEPS + 5})
    assert_same_belief(refined, longer)
    # Beyond the look-ahead, and to the end: exact, and nothing but the rest is spent.
    last, products = counted(lambda A: refined.refine(A, num_steps=SIZE - STEPS - 5))
    assert products == SIZE - (STEPS + 5 + AHEAD)
    same(last.mean, np.linalg.solve(problem()[0], rhs))
    assert not np.any(last.std())


def test_a_refined_inverse_belief_counts_only_new_products():
    matrix, _ = problem()
    belief, products = counted(lambda A: pk.inverse(A, **INVERSE))
    assert products == int(belief.stats.num_matvecs)
    refined, products = counted(lambda A: belief.refine(A, num_steps=3))
    assert products == 3 == int(refined.stats.num_matvecs) - int(belief.stats.num_matvecs)
    longer = pk.inverse(counting(), **INVERSE | {"lookahead": 7})
    same(refined.run.basis.vectors, longer.run.basis.vectors)
    same(refined.covariance.resolved.pivots, longer.covariance.resolved.pivots)
    # The same probes give the same trace of what they saw.
    np.testing.assert_allclose(refined.trace().value, longer.trace().value, rtol=1e-6)
    paper = pk.inverse(counting(), **INVERSE | {"layout": "paper"})
    again, products = counted(lambda A: paper.refine(A, num_steps=3, key=KEY))
    assert products == int(again.stats.num_matvecs) - int(paper.stats.num_matvecs)
    assert products == 3 + 5 * int(again.stats.probe_depth)
    assert int(again.stats.num_steps) == STEPS + 3
    with pytest.raises(TypeError, match=r"key is missing: the paper's layout needs new probes"):
        paper.refine(counting(), num_steps=3)
    with pytest.raises(ValueError, match=r"num_steps=99 after the 12 already taken exceeds"):
        belief.refine(matrix, num_steps=99)


def test_the_belief_that_is_refined_stays_usable():
    matrix, rhs = problem()
    belief = pk.solve(matrix, rhs, key=KEY, num_steps=5, max_lookahead=10, driver="host")
    assert belief.stats.driver == "host"
    before = np.asarray(belief.shift(0.1).mean)
    refined = belief.refine(matrix, num_steps=3, max_lookahead=16)
    assert int(refined.stats.num_matvecs) > int(belief.stats.num_matvecs)
    same(belief.shift(0.1).mean, before)


@pytest.mark.parametrize("budget", [6, 21, 90])
def test_a_budget_is_never_exceeded(budget):
    _, rhs = problem()
    belief, products = counted(lambda A: pk.solve(A, rhs, key=KEY, budget=budget))
    assert products == int(belief.stats.num_matvecs) <= budget
    inverse, products = counted(lambda A: pk.inverse(A, key=KEY, budget=budget))
    assert products == int(inverse.stats.num_matvecs) <= budget
    # Nor is it left lying while there is something to resolve.
    for stats_, least in ((belief.stats, budget), (inverse.stats, 0.7 * budget)):
        resolved = int(stats_.num_steps) + int(stats_.lookahead)
        assert int(stats_.num_matvecs) >= least or resolved == SIZE
    if budget == 90:
        same(belief.mean, np.linalg.solve(problem()[0], rhs))


def test_probes_of_a_solve_belief_are_counted():
    _, rhs = problem()
    options = SOLVE | {"scale": "prior", "num_probes": 3, "probe_depth": 4}
    belief, products = counted(lambda A: pk.solve(A, rhs, check_symmetric=False, **options))
    assert products == int(belief.stats.num_matvecs)
    assert products == STEPS + AHEAD + 3 * int(belief.stats.probe_depth)


# What a belief can do.


def test_scales():
    matrix, rhs = problem()
    prior = pk.solve(matrix, rhs, scale="prior", **SOLVE)
    four = pk.solve(matrix, rhs, scale=4.0, **SOLVE)
    same(four.covariance.as_matrix(), 4 * prior.covariance.as_matrix())
    same(four.error.scale, 4.0)
    seen = pk.solve(matrix, rhs, **SOLVE)
    same(seen.covariance.trace(), seen.error.error_norm**2)
    error = np.linalg.norm(np.linalg.solve(matrix, rhs) - seen.mean)
    assert float(seen.error.sufficient) == 1
    # Sufficient: at most a tenth of the square was extrapolated.
    assert 0.9 <= float(seen.error.error_norm) ** 2 / error**2 <= 1.1
    assert float(seen.error.scale) != pytest.approx(1.0, rel=0.01)


def test_a_lower_bound_brackets_the_error():
    matrix, rhs = problem()
    smallest = np.linalg.eigvalsh(matrix)[0]
    belief = pk.solve(matrix, rhs, lower_bound=0.9 * smallest, **SOLVE)
    error = np.linalg.norm(np.linalg.solve(matrix, rhs) - belief.mean)
    seen = float(belief.error.error_norm) * float(belief.error.seen) ** 0.5
    assert seen <= error * (1 + 1e-9)
    assert error <= float(belief.error.error_norm_upper) < 2 * error
    shifted = belief.shift(1.0)
    error = np.linalg.norm(np.linalg.solve(matrix + np.eye(SIZE), rhs) - shifted.mean)
    assert error <= float(shifted.error.error_norm_upper) < 2 * error


def test_intervals(dtype):
    matrix, rhs = (x.astype(dtype) for x in problem())
    belief = pk.solve(matrix, rhs, **SOLVE)
    lower, upper = belief.interval(0.9)
    half = stats.norm.ppf(0.95) * np.asarray(belief.std())
    np.testing.assert_allclose((upper - lower) / 2, half, rtol=1e-4)
    np.testing.assert_allclose((upper + lower) / 2, belief.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(belief.variance(), belief.std() ** 2, rtol=1e-5)
    pushed = belief.push(np.eye(SIZE)[:2]).interval(0.9)
    np.testing.assert_allclose(pushed[0], lower[:2], rtol=1e-3, atol=1e-5)
    for level in (0.0, 1.0, 95.0):
        with pytest.raises(ValueError, match=r"level=.* must lie strictly between 0 and 1"):
            belief.interval(level)


def tree_problem(dtype=jnp.float64):
    """An operator on a pytree of two dtypes, its dense twin, and a right-hand side."""
    matrix = jnp.asarray(oracles.with_spectrum(np.geomspace(1, 20, 9), 2), dtype)

    def product(tree):
        flat = jnp.concatenate([tree["a"].astype(dtype), tree["b"].reshape(-1)])
        image = matrix @ flat
        return {"a": image[:3].astype(jnp.float32), "b": image[3:].reshape(2, 3)}

    rhs = {
        "a": jnp.asarray([1.0, -2.0, 0.5], jnp.float32),
        "b": jnp.arange(6, dtype=dtype).reshape(2, 3),
    }
    return product, np.asarray(matrix, np.float64), rhs


def flatten(tree):
    return np.concatenate([np.asarray(tree["a"], np.float64), np.ravel(tree["b"])])


def test_pytrees_keep_their_structure_and_dtypes():
    product, matrix, rhs = tree_problem()
    belief = pk.solve(product, rhs, key=KEY, num_steps=4)
    inverse = pk.inverse(product, like=rhs, key=KEY, num_steps=4, lookahead=2, mean=rhs)
    kinds = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), rhs)
    trees = [belief.mean, belief.std(), belief.variance(), *belief.interval()]
    trees += [inverse.mean, inverse.diagonal().value, inverse.matvec(rhs).standard_error]
    for tree in trees:
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) == kinds
    for a, b in zip(jax.tree.leaves(inverse.mean), jax.tree.leaves(rhs), strict=True):
        np.testing.assert_array_equal(a, b)
    draws = belief.sample(KEY, 5)
    assert draws["a"].shape == (5, 3) and draws["a"].dtype == jnp.float32
    assert draws["b"].shape == (5, 2, 3) and draws["b"].dtype == jnp.float64
    again, other = belief.sample(KEY, 5), belief.sample(jax.random.key(8), 5)
    np.testing.assert_array_equal(again["b"], draws["b"])
    assert not np.array_equal(other["b"], draws["b"])
    assert belief.sample(KEY, 0)["b"].shape == (0, 2, 3)
    with pytest.raises(ValueError, match=r"num_samples=-1 must not be negative"):
        belief.sample(KEY, -1)
    # The answer is right, float32 leaves and all.
    full = pk.solve(product, rhs, key=KEY, num_steps=9)
    expected = np.linalg.solve(matrix, flatten(rhs))
    np.testing.assert_allclose(flatten(full.mean), expected, rtol=1e-5)


def test_push_forward():
    matrix, rhs = problem()
    belief = pk.solve(matrix, rhs, **SOLVE)
    dense, mean = np.asarray(belief.covariance.as_matrix()), np.asarray(belief.mean)
    B = np.random.default_rng(0).standard_normal((3, SIZE))
    for argument in (B, jnp.asarray(B), lambda x: jnp.asarray(B) @ x):
        pushed = belief.push(argument)
        same(pushed.mean, B @ mean)
        same(pushed.covariance, B @ dense @ B.T)
        same(pushed.std(), np.sqrt(np.diag(B @ dense @ B.T)))
    one = belief.push(B[0])
    assert one.mean.shape == (1,) and one.covariance.shape == (1, 1)
    same(one.mean, B[:1] @ mean)
    # A curved map is linearised at the mean.
    curved = belief.push(lambda x: jnp.sin(jnp.asarray(B) @ x))
    same(curved.mean, np.sin(B @ mean))
    slope = np.diag(np.cos(B @ mean)) @ B
    same(curved.covariance, slope @ dense @ slope.T)
    with pytest.raises(ValueError, match=r"B has shape \(3, 4\); it needs 24 columns"):
        belief.push(np.zeros((3, 4)))
    draws = np.asarray(belief.push(B).sample(KEY, 20_000))
    error = np.sqrt(np.diag(B @ dense @ B.T) / 20_000)
    assert np.all(np.abs(draws.mean(0) - B @ mean) <= 5 * error)


def test_push_forward_of_a_pytree():
    product, _, rhs = tree_problem()
    belief = pk.solve(product, rhs, key=KEY, num_steps=4)
    pushed = belief.push(lambda tree: jnp.stack([jnp.sum(tree["b"]), tree["b"][0, 1]]))
    rows = np.zeros((2, 9))
    rows[0, 3:], rows[1, 4] = 1, 1
    dense = np.asarray(belief.covariance.as_matrix())
    same(pushed.mean, rows @ np.asarray(belief.mean_flat))
    same(pushed.covariance, rows @ dense @ rows.T)


def test_a_belief_samples_around_its_mean():
    matrix, rhs = problem()
    belief, count = pk.solve(matrix, rhs, **SOLVE), 20_000
    draws = np.asarray(belief.sample(KEY, count))
    assert np.all(np.abs(draws.mean(0) - belief.mean) <= 5 * belief.std() / count**0.5)
    spread = draws.std(0) / np.asarray(belief.std())
    assert np.all(np.abs(spread - 1) <= 5 / np.sqrt(2 * count))


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
    with count_compilations() as compiled:
        second = jitted(2 * matrix, rhs[::-1], jax.random.key(1))
    eager = [c for c in compiled if c]
    assert jitted._cache_size() == 1 and len(eager) <= 3  # the arguments themselves
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
