"""Simulation-based calibration of beliefs that are right or wrong by construction."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from diagnostics_cases import SIZE, dense, moved, solve
from pnkrylov import diagnostics, simulation


def draws_of(belief, number, factor=1.0):
    """Truths that are `factor` times as far from the mean as the belief says."""
    draws = belief.sample(jax.random.key(12), number)
    return [(belief, belief.mean + factor * (draw - belief.mean)) for draw in draws]


def calibrate(problems, **options):
    return diagnostics.simulation_based_calibration(problems, key=jax.random.key(8), **options)


def between(group, level):
    """Coverage, its standard error from the spread between 100 problems, and its interval."""
    covered = np.abs(2 * group.values.reshape(100, -1) - 1) <= level
    return covered.mean(), covered.mean(axis=1).std() / 10


@pytest.mark.one_precision
@pytest.mark.parametrize(("factor", "calibrated"), [(1.0, True), (0.5, False), (2.0, False)])
def test_coverage_is_that_of_the_construction(factor, calibrated, dtype):
    report = calibrate(draws_of(solve(dtype), 100, factor))
    assert report.num_problems == 100
    for group in (report.functionals, report.coordinates):
        assert group.values.shape == (2000,) and group.num_exact == 0
        for coverage in group.coverage:
            observed, error = between(group, coverage.level)
            assert coverage.observed == pytest.approx(observed, abs=1e-12)
            true = (
                2 * scipy.stats.norm.cdf(scipy.stats.norm.ppf((1 + coverage.level) / 2) / factor)
                - 1
            )
            # The spread between problems is zero where all are covered.
            error = max(error, np.sqrt(true * (1 - true) / 2000))
            assert abs(observed - true) < 5 * error
            assert coverage.lower < observed < coverage.upper or observed == 1
        low, high = group.distance_range
        if calibrated:
            assert group.p_value > 0.005 and group.distance < 1.5 * high
        else:
            assert group.p_value == 1 / 401 and group.distance > high
        assert low < high
        reference = scipy.stats.kstest(group.values, "uniform").statistic
        assert group.distance == pytest.approx(reference, abs=1e-12)
    assert "100 problems" in str(report) and "95 %" in str(report)


def test_coordinates_are_transformed_as_defined(dtype):
    belief = solve(dtype)
    error = np.random.default_rng(2).standard_normal(SIZE) * 0.1
    report = calibrate([(belief, moved(belief, error))], num_coordinates=99)
    deviations = np.sqrt(np.diagonal(dense(belief)))
    expected = np.sort(scipy.stats.norm.cdf(error / deviations))
    np.testing.assert_allclose(
        np.sort(report.coordinates.values), expected, atol=1e3 * float(jnp.finfo(dtype).eps)
    )


def test_dependent_functionals_do_not_count_as_many():
    """A belief of rank one: all functionals of a problem are covered together, or none is."""
    belief = solve(jnp.float32, num_steps=SIZE - 1, scale="prior", num_probes=0)
    report = calibrate(draws_of(belief, 100), levels=(0.9,))
    (coverage,) = report.functionals.coverage
    together = report.functionals.values.reshape(100, 20)
    covered = np.abs(2 * together - 1) <= 0.9
    assert np.all(covered == covered[:, :1])
    interval = scipy.stats.binomtest(int(covered[:, 0].sum()), 100).proportion_ci()
    # The effective number of trials comes from 400 simulations: known to 5 sqrt(2/400) = 35 %.
    width = interval.high - interval.low
    assert 0.8 < (coverage.upper - coverage.lower) / width < 1.2


def test_binomial_intervals_are_clopper_and_pearson():
    values = np.concatenate([np.full(45, 0.5), np.full(5, 0.999)])
    coverage = simulation._coverage(0.9, values, np.full((3, 50), 0.5))
    exact = scipy.stats.binomtest(45, 50).proportion_ci(0.95, method="exact")
    assert (coverage.observed, coverage.lower, coverage.upper) == pytest.approx(
        (0.9, exact.low, exact.high), abs=1e-12
    )


def test_exact_answers_are_set_apart():
    belief = solve(jnp.float32, num_steps=SIZE)
    report = calibrate([(belief, belief.mean)] * 2)
    for group in (report.functionals, report.coordinates):
        assert len(group.values) == 0 and group.num_exact == 40
        assert np.isnan(group.distance) and np.isnan(group.coverage[0].observed)
        assert (group.coverage[0].lower, group.coverage[0].upper) == (0, 1)
    # A belief without variance that is wrong is not exact: it never covers.
    wrong = calibrate([(belief, belief.mean + 1)] * 2).coordinates
    assert wrong.num_exact == 0 and wrong.coverage[-1].observed == 0


def test_functions_make_problems_from_their_own_keys(capsys):
    belief, seen = solve(jnp.float32), []

    def problem(key):
        seen.append(jax.random.key_data(key).tolist())
        return belief, belief.sample(key, 1)[0]

    report = calibrate(problem, num_problems=5, num_functionals=1, progress=True)
    assert report.num_problems == 5 and len({tuple(key) for key in seen}) == 5
    assert len(np.unique(report.functionals.values)) == 5
    assert "Calibration" in capsys.readouterr().err
    again = calibrate(problem, num_problems=5, num_functionals=1)
    np.testing.assert_array_equal(again.functionals.values, report.functionals.values)
    assert calibrate(iter(draws_of(belief, 9)), num_problems=4).num_problems == 4


def test_an_interrupt_reports_on_what_was_done():
    belief, calls = solve(jnp.float32), []

    def problem(key):
        calls.append(key)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return belief, belief.mean

    assert calibrate(problem, num_problems=50).num_problems == 3 == len(calls)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_functionals": 0}, ValueError, "num_functionals=0 must be an int"),
        ({"num_coordinates": -1}, ValueError, "num_coordinates=-1 must be an int"),
        ({"num_problems": 0}, ValueError, "num_problems=0 must be an int"),
        ({"levels": (0.5, 1.0)}, ValueError, r"levels has 1\.0; each"),
        ({}, ValueError, "problems is empty"),
        ({"problems": lambda key: None}, TypeError, "num_problems is missing"),
    ],
)
def test_calibration_refuses_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        calibrate(options.pop("problems", []), **options)
