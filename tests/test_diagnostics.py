"""Diagnostics against dense algebra, and beliefs that are right or wrong by construction."""

import functools
import os
import signal
import sys
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import pnkrylov as pk
from oracles import split, with_spectrum
from pnkrylov import diagnostics, simulation

SIZE, LEVEL = 20, 6
EIGENVALUES = np.geomspace(0.5, 30, SIZE)
MATRIX = with_spectrum(EIGENVALUES, seed=0)
SHIFT = 0.25


@functools.cache
def solve(dtype, **options):
    dtype = jnp.dtype(dtype)
    rhs = jnp.asarray(np.random.default_rng(1).standard_normal(SIZE), dtype)
    sizes = {"num_steps": LEVEL, "max_lookahead": 10, "check_symmetric": False}
    A = jnp.asarray(MATRIX, dtype)
    return pk.solve(A, rhs, key=jax.random.key(3), shift=SHIFT, **(sizes | options))


@functools.cache
def inverse(dtype, layout="paper", eigenvalues=None, **options):
    A = jnp.asarray(MATRIX if eigenvalues is None else np.diag(eigenvalues), dtype)
    sizes = {"num_steps": LEVEL, "lookahead": 5, "num_probes": 4, "probe_depth": SIZE}
    # Zero tolerance: the probes do not stop before their quadrature is exact.
    with mock.patch.object(sys.modules["pnkrylov.solve"], "_PROBE_TOLERANCE", 0.0):
        return pk.inverse(
            A,
            key=jax.random.key(3),
            layout=layout,
            shift=SHIFT,
            check_symmetric=False,
            **(sizes | options),
        )


# A full look-ahead, and as many probes as directions: every trace is exact.
FULL = {"lookahead": SIZE - LEVEL, "num_probes": SIZE - LEVEL - 1}
# What needs only one precision is compiled only for the best one.
BEST = jnp.dtype("float64" if jax.config.jax_enable_x64 else "float32")


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


def dense(belief):
    return np.asarray(belief.covariance.as_matrix(), np.float64)


def dense_statistic(belief, error, rank):
    """`e^T Sigma^+ e` and the share of e outside the range, by an eigendecomposition."""
    values, vectors = np.linalg.eigh(dense(belief))
    coordinates = vectors.T @ error
    inside = np.arange(SIZE) >= SIZE - rank
    statistic = np.sum(coordinates[inside] ** 2 / values[inside])
    return statistic, np.sum(coordinates[~inside] ** 2) / np.sum(error**2)


def moved(belief, error):
    return belief.mean_flat + jnp.asarray(error, belief.mean_flat.dtype)


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


# Simulation-based calibration.


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


# The regime.


def exact_split(belief):
    basis = belief.run.basis
    rows = np.asarray(basis.vectors, np.float64)
    return split(MATRIX + SHIFT * np.eye(SIZE), rows[:LEVEL], rows[LEVEL])


def test_the_regime_is_that_of_the_exact_complement(dtype):
    belief = inverse(dtype, **FULL)
    report, exact = pk.regime(belief, 0.5), exact_split(belief)
    # The library takes the largest value of T_perp, which is at least that of S.
    kappa = np.linalg.eigvalsh(exact.T_perp)[-1] / np.linalg.eigvalsh(exact.S)[0]
    expected = (kappa, exact.c_norm, exact.omega)
    assert kappa >= exact.kappa_S
    found = (report.kappa_s, report.coupling_norm, report.bulk_variance)
    # The probes run without re-orthogonalisation; their extreme values are still good to this.
    tolerance = float(np.sqrt(jnp.finfo(dtype).eps))
    assert found == pytest.approx(expected, rel=tolerance)
    assert report.num_directions == SIZE - LEVEL - 1
    assert report.damping_times_omega == pytest.approx(0.5 * exact.omega, rel=tolerance)
    assert report.kl_per_direction == pytest.approx((kappa - 1) ** 2 / 2, rel=tolerance)
    bound = exact.c_norm + exact.omega * (kappa - 1)
    assert report.operator_error == pytest.approx(bound, rel=tolerance)
    error = np.linalg.norm(exact.sigma() - exact.exact_inverse(), 2)
    assert exact.c_norm <= error * (1 + 1e-10) and error <= report.operator_error
    for line in ("Regime of the bulk, 13 directions", "kappa_S", "lambda omega", report.verdict):
        assert line in str(report)


def test_all_resolved_reports_its_own_omega_and_the_bound_of_the_level(dtype):
    belief, paper = inverse(dtype, "resolve-all"), inverse(dtype)
    report, reference = pk.regime(belief), pk.regime(paper)
    assert report.operator_error == pytest.approx(reference.operator_error, rel=1e-5)
    assert report.bulk_variance == float(belief.stats.bulk_variance) != reference.bulk_variance
    assert report.num_directions == SIZE - LEVEL - 5
    assert report.damping_times_omega is None and "lambda" not in str(report)


def test_the_regime_of_a_solve_belief_sees_the_schur_complement(dtype):
    belief = solve(dtype, max_lookahead=SIZE - LEVEL, scale="prior", num_probes=0)
    exact, report = exact_split(belief), pk.regime(belief)
    # All Ritz values lie between the extreme eigenvalues of S.
    assert 1 < report.kappa_s <= exact.kappa_S * (1 + 1e-4)
    assert report.coupling_norm == pytest.approx(exact.c_norm, rel=0.1)
    assert np.isinf(report.relative_error) and "no random probes" in str(report)


def of_condition(condition, **options):
    """The complement of a geometric spectrum is about as badly conditioned as the whole."""
    eigenvalues = np.geomspace(1, condition, SIZE) - SHIFT
    return inverse(jnp.float32, eigenvalues=tuple(eigenvalues), **options)


def of_outliers():
    """Five outliers over copies of 1.25 (shift included): six steps leave nothing but these."""
    eigenvalues = (1.0,) * 15 + (5.0, 10.0, 20.0, 30.0, 50.0)
    return inverse(jnp.float32, eigenvalues=eigenvalues, **FULL)


@pytest.mark.parametrize(
    ("make", "damping", "verdict"),
    [
        (lambda: of_condition(5, **FULL), None, r"Isotropic enough.*factor of"),
        (of_outliers, None, r"Isotropic enough.*factor of"),
        (of_outliers, 1.25, r"bulk is the prior"),
        (lambda: of_condition(60, **FULL), None, r"more steps: .*factor of"),
        (lambda: of_condition(1e4, **FULL), None, r"Use a preconditioner"),
        (lambda: of_condition(1e4), None, r"Probes uncertain: .*num_probes"),
        (lambda: solve(jnp.float32, scale="prior", num_probes=0), None, r"Probes uncertain"),
        (lambda: solve(jnp.float32, num_steps=SIZE), None, r"Exact"),
        (lambda: solve(jnp.float32, max_lookahead=1), None, r"saw only .*max_lookahead"),
    ],
)
def test_the_verdict_names_the_remedy(make, damping, verdict):
    found = pk.regime(make(), damping).verdict
    import re

    assert re.search(verdict, found), found


def test_the_regime_refuses_what_it_cannot_judge():
    belief = solve(jnp.float32)
    for bad in (0.0, -1.0, float("nan"), 40.0):
        with pytest.raises(ValueError, match=rf"damping={bad} must be positive and at most"):
            pk.regime(belief, bad)
    batch = jax.tree.map(lambda leaf: leaf[None] if eqx.is_array(leaf) else leaf, belief)
    with pytest.raises(ValueError, match="needs one belief with concrete values"):
        pk.regime(batch)
    with pytest.raises(ValueError, match="outside jit"):
        eqx.filter_jit(pk.regime)(belief)
    A = jnp.asarray(MATRIX - 5 * np.eye(SIZE), jnp.float32)
    failed = pk.solve(A, belief.mean, key=jax.random.key(0), num_steps=8, throw=False)
    with pytest.raises(pk.NotPositiveDefiniteError, match="Ritz value"):
        pk.regime(failed)
