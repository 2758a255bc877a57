"""Conditioning and predictions against dense answers."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import gp_cases as cases
from harness import no_type_checker
from pnkrylov import NotFiniteError, NotPositiveDefiniteError, gp
from pnkrylov.preconditioners import pivoted_cholesky

N, STEPS, AHEAD = 120, 16, 8
SIZES = {"num_steps": STEPS, "lookahead": AHEAD, "num_probes": 6, "probe_depth": 16}


@functools.cache
def small(noise=0.05, outputs=1):
    return cases.problem("matern32", N, 2, noise, outputs=outputs)


@functools.cache
def believed(dtype):
    return small().condition(dtype, **SIZES)


def within_factor_two(estimates, truth):
    ratio = np.asarray(estimates) / truth
    return np.mean((ratio > 0.5) & (ratio < 2))


def test_mean_and_variances_are_those_of_the_rows_that_are_resolved(dtype):
    problem, belief = small(), believed(dtype)
    tolerance = {"float32": 2e-3, "float64": 1e-8}[dtype.name]
    prediction = belief.predict(jnp.asarray(problem.Xs, dtype))
    cross = problem.matrix(problem.Xs, problem.X)
    weights = problem.truncated(belief) @ problem.y[:, 0]
    np.testing.assert_allclose(prediction.mean, cross @ weights, atol=tolerance)
    size = np.abs(weights).max()
    np.testing.assert_allclose(belief.weights / size, weights / size, atol=tolerance)
    # The exact posterior's variance and the true remainder add up to IterGP's variance.
    combined, exact = problem.combined(belief), problem.exact()[1]
    np.testing.assert_allclose(prediction.combined, combined, atol=tolerance)
    parts = prediction.mathematical + prediction.remainder
    np.testing.assert_allclose(parts, combined, atol=tolerance)
    assert within_factor_two(prediction.remainder, combined - exact) >= 0.9
    off = np.abs(np.log(np.asarray(prediction.mathematical, np.float64) / exact))
    assert np.median(off) < 0.1
    assert float(jnp.min(prediction.variance)) > 0


def test_the_computational_variance_is_that_of_the_mean_about_the_exact_one():
    problem = small()
    prediction = believed(jnp.float64).predict(jnp.asarray(problem.Xs))
    error = np.asarray(prediction.mean) - problem.exact()[0]
    # One data set: the error of a few smooth directions, about chi^2 with few degrees of freedom.
    ratio = np.sum(error**2) / float(jnp.sum(prediction.computational))
    assert 0.2 < ratio < 5
    assert float(jnp.max(prediction.computational / prediction.remainder)) < 3


def test_another_noise_level_takes_no_product():
    problem, belief = small(), believed(jnp.float64)
    moved, again = belief.with_noise(0.4), small(0.4)
    assert int(moved.num_products) == int(belief.num_products)
    # The basis is the same, because the targets are: only the noise differs.
    again = cases.dataclasses.replace(again, y=problem.y, f=problem.f)
    expected = again.condition(**SIZES).predict(jnp.asarray(problem.Xs))
    found = moved.predict(jnp.asarray(problem.Xs))
    for name in ("mean", "combined", "remainder", "computational"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-7)


def test_duplicates_and_a_mean_function_do_not_matter():
    problem = small()
    X, y = problem.X.copy(), problem.y[:, 0]
    X[60:] = X[:60]
    twice = cases.dataclasses.replace(problem, X=X)
    slope = 3.0 + X[:, 0]
    belief = gp.condition(
        twice.kernel(), jnp.asarray(X), jnp.asarray(y + slope), 0.05, key=cases.KEY,
        mean=lambda x: 3.0 + x[0], **SIZES,
    )  # fmt: skip
    prediction = belief.predict(jnp.asarray(problem.Xs))
    np.testing.assert_allclose(prediction.combined, twice.combined(belief), atol=1e-8)
    cross = twice.matrix(problem.Xs, X) @ twice.truncated(belief)
    np.testing.assert_allclose(prediction.mean, 3 + problem.Xs[:, 0] + cross @ y, atol=1e-7)


def test_one_data_point_is_exact():
    belief = gp.condition(
        gp.RBF(), jnp.zeros((1, 1)), jnp.ones((1,)), 0.5, key=cases.KEY, num_probes=1, probe_depth=2
    )
    prediction = belief.predict(jnp.asarray([[0.0], [1.0]]))
    row = np.exp(-np.array([0.0, 1.0]) / 2)
    np.testing.assert_allclose(prediction.mean, row * row[0] / 1.5)
    np.testing.assert_allclose(prediction.mathematical, 1 - row**2 / 1.5)
    np.testing.assert_allclose(prediction.computational, 0, atol=1e-15)


def test_wrong_data_are_refused_by_name():
    X, y, kernel = jnp.zeros((5, 2)), jnp.ones((5,)), gp.RBF()

    def conditioned(X=X, y=y, noise=0.1, **options):
        return lambda: gp.condition(kernel, X, y, noise, key=cases.KEY, **options)

    refusals = [
        (ValueError, r"y has shape \(4,\)", conditioned(y=y[:4])),
        (TypeError, "y has dtype float32", conditioned(y=y.astype(jnp.float32))),
        (NotFiniteError, "y contains NaN", conditioned(y=y.at[2].set(jnp.nan))),
        (NotFiniteError, "X contains NaN", conditioned(X=X.at[0, 0].set(jnp.inf))),
        (NotPositiveDefiniteError, "noise must not be negative", conditioned(noise=-0.1)),
        (NotPositiveDefiniteError, "entry 0 is 0", conditioned(noise=jnp.zeros(5))),
        (ValueError, r"noise has shape \(3,\)", conditioned(noise=jnp.ones(3))),
        (ValueError, "num_steps=6", conditioned(num_steps=6)),
        (ValueError, "start='y' is unknown", conditioned(start="y")),
        (ValueError, "needs one output", conditioned(y=jnp.ones((5, 2)), start="data")),
        (ValueError, "mean has values", conditioned(mean=jnp.ones(3))),
    ]
    for error, message, call in refusals:
        with no_type_checker(), pytest.raises(error, match=message):
            call()
    with no_type_checker(), pytest.raises(ValueError, match=r"Xs has shape \(3,\)"):
        believed(jnp.float64).predict(jnp.ones(3))


@pytest.mark.slow
def test_equal_points_without_noise_are_refused():
    with pytest.raises(NotPositiveDefiniteError, match="Ritz value"):
        gp.condition(gp.RBF(), jnp.zeros((5, 2)), jnp.ones((5,)), 0.0, key=cases.KEY)


@pytest.mark.slow
def test_several_outputs_share_a_run_that_starts_independently():
    problem = small(outputs=3)
    belief = problem.condition(output=None, **SIZES)
    prediction = belief.predict(jnp.asarray(problem.Xs))
    cross = problem.matrix(problem.Xs, problem.X)
    mean = cross @ problem.truncated(belief) @ problem.y
    np.testing.assert_allclose(prediction.mean, mean, atol=1e-8)
    np.testing.assert_allclose(prediction.combined[:, 1], problem.combined(belief), atol=1e-8)
    np.testing.assert_allclose(prediction.computational[:, 2], prediction.remainder)
    assert belief.start == "independent" and "3 outputs" in repr(belief)


@pytest.mark.slow
def test_noise_that_differs_is_divided_out():
    noise = 0.05 * np.exp(np.random.default_rng(1).standard_normal(N))
    problem = small()
    problem = cases.dataclasses.replace(problem, noise=noise)
    belief = problem.condition(**SIZES)
    prediction = belief.predict(jnp.asarray(problem.Xs))
    np.testing.assert_allclose(prediction.combined, problem.combined(belief), atol=1e-8)
    truth = problem.combined(belief) - problem.exact()[1]
    assert within_factor_two(prediction.remainder, truth) >= 0.9
    doubled = cases.dataclasses.replace(problem, noise=2 * noise)
    moved = belief.with_noise(2 * belief.data.level())
    expected = doubled.condition(**SIZES).predict(jnp.asarray(problem.Xs))
    np.testing.assert_allclose(
        moved.predict(jnp.asarray(problem.Xs)).mean, expected.mean, rtol=1e-6
    )


@pytest.mark.slow
def test_a_preconditioner_changes_the_run_and_not_the_answer():
    problem = small()
    preconditioner = pivoted_cholesky(jnp.asarray(problem.noisy()), 20, damping=0.05)
    belief = problem.condition(preconditioner=preconditioner, **SIZES)
    prediction = belief.predict(jnp.asarray(problem.Xs))
    mean, exact = problem.exact()
    np.testing.assert_allclose(prediction.combined, problem.combined(belief), atol=1e-8)
    assert within_factor_two(prediction.mathematical, exact) >= 0.9
    # The mean is far nearer than without, and known to be.
    plain = believed(jnp.float64).predict(jnp.asarray(problem.Xs))
    error = np.linalg.norm(prediction.mean - mean)
    assert error < 0.2 * np.linalg.norm(plain.mean - mean)
    predicted = float(jnp.sqrt(jnp.sum(prediction.computational)))
    assert 0.2 < error / predicted < 5
    with pytest.raises(ValueError, match="with_noise"):
        belief.with_noise(0.1)


@pytest.mark.slow
def test_refining_and_converging():
    problem, belief = small(), believed(jnp.float64)
    refined = belief.refine(10, key=cases.KEY)
    assert int(refined.run.level) == STEPS + 10
    longer = problem.condition(**{**SIZES, "num_steps": STEPS + 10})
    points = jnp.asarray(problem.Xs)
    np.testing.assert_allclose(refined.predict(points).mean, longer.predict(points).mean, atol=1e-8)
    assert jnp.all(refined.predict(points).combined <= belief.predict(points).combined + 1e-12)
    # All steps: nothing is left to compute.
    whole = problem.condition(**{**SIZES, "num_steps": N}).predict(points)
    mean, variance = problem.exact()
    np.testing.assert_allclose(whole.mean, mean, atol=1e-8)
    np.testing.assert_allclose(whole.variance, variance, rtol=1e-7)
    np.testing.assert_allclose(whole.computational, 0, atol=1e-12)


@pytest.mark.slow
def test_a_saved_belief_loads_as_it_was(tmp_path):
    problem, belief = small(), believed(jnp.float64)
    gp.save(belief, tmp_path / "belief")
    again = gp.load(tmp_path / "belief", problem.kernel())
    points = jnp.asarray(problem.Xs)
    np.testing.assert_array_equal(again.predict(points).variance, belief.predict(points).variance)
    np.testing.assert_array_equal(again.log_evidence().value, belief.log_evidence().value)
    with pytest.raises(ValueError, match="class InverseBelief: read it"):
        belief.inverse.save(tmp_path / "inverse")
        gp.load(tmp_path / "inverse", problem.kernel())


def test_prior_means_at_the_inputs_only_are_asked_for_again():
    problem = small()
    belief = problem.condition(mean=jnp.full((N,), 2.0), **SIZES)
    with pytest.raises(ValueError, match="mean was an array"):
        belief.predict(jnp.asarray(problem.Xs))


CALIBRATED = [("matern32", 3, 0.02, 0.5), ("rbf", 4, 0.05, 0.6), ("rbf", 8, 0.01, 1.0)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CALIBRATED, ids=str)
def test_parts_and_coverage_at_two_thousand_observations(case):
    """The issue's demands, at every number of steps."""
    name, p, noise, lengthscale = case
    data_sets = 10
    problem = cases.problem(
        name, 2000, p, noise, lengthscale, outputs=data_sets, num_points=300, seed=3
    )
    exact, points = problem.exact()[1], jnp.asarray(problem.Xs)
    for steps in (20, 50, 100):
        covered, iterative = [], []
        for output in range(data_sets):
            belief = problem.condition(output=output, num_steps=steps)
            prediction = belief.predict(points)
            if output == 0:
                combined = problem.combined(belief)
                np.testing.assert_allclose(prediction.combined, combined, atol=1e-8)
                visible = combined - exact > 1e-10
                ratio = (np.asarray(prediction.remainder) / (combined - exact))[visible]
                assert np.mean((ratio > 0.5) & (ratio < 2)) >= 0.9, steps
            error = np.abs(np.asarray(prediction.mean) - problem.f[:, output])
            covered.append(np.mean(error < 1.96 * np.asarray(prediction.std())))
            iterative.append(np.mean(error < 1.96 * np.sqrt(np.asarray(prediction.combined))))
        print(f"{case} m={steps}: {np.mean(covered):.3f}, IterGP's {np.mean(iterative):.3f}")
        # Errors within a data set are correlated: the spread over data sets is the sampling error.
        error = np.std(covered, ddof=1) / data_sets**0.5
        assert 0.92 - 2 * error < np.mean(covered) < 0.98 + 2 * error
