"""What the pictures show is what they were given; they are rendered to see that they can be."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

import oracles
import pnkrylov as pk
from pnkrylov import plotting, preconditioners
from pnkrylov.ciq import quadrature
from pnkrylov.laplace import metrics
from pnkrylov.sample_diagnostics import check_distances
from pnkrylov.simulation import Coverage, Uniformity

SIZE = 60
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def rendered():
    """Draws what a test has made, and closes it."""
    yield
    for number in plt.get_fignums():
        plt.figure(number).savefig(io.BytesIO(), dpi=40)
    plt.close("all")


@pytest.fixture(scope="module")
def problem():
    matrix, eigenvalues = oracles.SPECTRA["power-law-1"](SIZE)
    return jnp.asarray(matrix), eigenvalues


def test_beliefs_contract_onto_the_exact_number(problem):
    matrix, _ = problem
    v = jnp.ones(SIZE, matrix.dtype)
    functional = jnp.zeros(SIZE, matrix.dtype).at[3].set(1)
    beliefs = [pk.solve(matrix, v, key=KEY, num_steps=steps) for steps in (5, 20)]
    truth = float(np.linalg.solve(np.asarray(matrix), np.asarray(v))[3])
    axes = plotting.contraction(beliefs, functional, truth=truth)
    points, _, (bars,) = axes.containers[0]
    np.testing.assert_allclose(points.get_ydata(), [float(b.mean[3]) for b in beliefs], rtol=1e-5)
    widths = [np.ptp(segment[:, 1]) / 2 for segment in bars.get_segments()]
    np.testing.assert_allclose(widths, [1.959964 * float(b.std()[3]) for b in beliefs], rtol=1e-5)
    spent = [str(int(b.stats.num_matvecs)) for b in beliefs]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == spent
    with pytest.raises(ValueError, match="beliefs is empty"):
        plotting.contraction([], functional)
    with pytest.raises(ValueError, match=r"level=1\.0"):
        plotting.contraction(beliefs, functional, level=1.0)


def test_calibration_shows_the_empirical_distribution():
    values = np.random.default_rng(0).uniform(size=50)
    coverage = (Coverage(0.9, 0.88, 0.8, 0.95),)
    axes = plotting.calibration(Uniformity(values, 0, coverage, 0.1, (0.05, 0.2), 0.5))
    curve = axes.lines[1]
    np.testing.assert_array_equal(curve.get_xdata(), np.sort(values))
    np.testing.assert_allclose(curve.get_ydata(), (np.arange(50) + 0.5) / 50)


def test_the_spectrum_has_an_eigenvalue_within_every_residual_bound(problem):
    matrix, eigenvalues = problem
    belief = pk.inverse(matrix, key=KEY, num_steps=12, lookahead=4).shift(0.5)
    ritz, residuals = plotting.ritz_values(belief.run.basis.trim())
    distance = np.min(np.abs(ritz[:, None] - eigenvalues[None, :]), axis=1)
    assert np.all(distance <= residuals + 1e-10 * ritz[0])
    assert np.all(np.diff(ritz) < 0)
    axes = plotting.spectrum(belief, eigenvalues=eigenvalues + 0.5)
    np.testing.assert_allclose(axes.containers[0][0].get_ydata(), ritz + 0.5)
    rest = axes.lines[-1]
    np.testing.assert_allclose(rest.get_ydata(), float(belief.covariance.bulk_deviation) ** -2)


def test_the_spectrum_of_a_preconditioned_run_is_refused(problem):
    scaling = preconditioners.ScaledIdentity(SIZE, dtype=problem[0].dtype)
    belief = pk.inverse(problem[0], key=KEY, num_steps=12, lookahead=4, preconditioner=scaling)
    with pytest.raises(ValueError, match="made with preconditioner="):
        plotting.spectrum(belief)


def test_quadrature_shows_its_points_and_its_error():
    rule = quadrature(1.0, 100.0, num_points=5)
    upper, lower = plotting.quadrature(rule, 1.0, 100.0)
    x, error = upper.lines[0].get_data()
    sums = np.sum(np.asarray(rule.weights) / (np.asarray(rule.shifts) + x[:, None]), axis=1)
    np.testing.assert_allclose(error, np.abs(sums * np.sqrt(x) - 1), rtol=1e-3, atol=1e-9)
    np.testing.assert_array_equal(lower.lines[0].get_xdata(), rule.shifts)


@dataclasses.dataclass
class TwoPoints:
    mean = jnp.asarray([0.0, 1.0])
    mathematical = jnp.asarray([0.04, 0.01])
    variance = jnp.asarray([0.25, 0.01])


def test_two_variances_are_nested_bands():
    x = np.array([0.0, 1.0])
    axes = plotting.two_variances(x, TwoPoints(), level=0.6826894921)
    inner, *_, outer = (band.get_paths()[0].vertices for band in axes.collections)
    np.testing.assert_allclose(inner[:, 1].max(), 1.1, rtol=1e-6)
    np.testing.assert_allclose([inner[:, 1].min(), outer[:, 1].max()], [-0.2, 1.1], rtol=1e-6)
    assert np.isclose(outer[:, 1], 0.5).any()
    with pytest.raises(ValueError, match=r"x has shape \(3,\)"):
        plotting.two_variances(np.arange(3.0), TwoPoints())


def test_reliability_diagrams_are_drawn_without_their_empty_bins():
    diagram = metrics.reliability(jnp.asarray([[0.3, 0.7], [0.1, 0.9]]), jnp.asarray([1, 0]))
    line = plotting.reliability(diagram, label="a").lines[-1]
    np.testing.assert_allclose(line.get_xdata(), [0.7, 0.9], rtol=1e-6)
    np.testing.assert_allclose(line.get_ydata(), [1, 0])


def test_samples_are_compared_quantile_by_quantile():
    check = check_distances(np.random.default_rng(1).chisquare(8, 200), 8)
    left, right = plotting.sample_check(check)
    assert left.get_xlabel() == "squared Mahalanobis distance"
    expected, observed = right.lines[0].get_data()
    np.testing.assert_array_equal(observed, check.distances)
    np.testing.assert_array_equal(expected, check.quantiles()[0])
