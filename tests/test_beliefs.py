"""Beliefs: shifts, refinement, budgets, scales, push-forwards, samples."""

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
    assert_same_belief,
    counted,
    counting,
    problem,
    same,
)
from harness import start_vector

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


@pytest.mark.parametrize("budget", [6, 21, pytest.param(90, marks=pytest.mark.slow)])
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
