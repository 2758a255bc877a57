"""The front doors of trace estimation: values, error bars, counts, growth, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg as spla

import oracles
import pnkrylov as pk
from harness import CountingOperator, no_type_checker
from pnkrylov.trace import METHODS, logdet, trace_function, trace_inverse
from pnkrylov.traces.bracket import quadrature_change

SIZE, BUDGET = 60, 40
PEERS = [method for method in METHODS if method != "pslq"]
INVERSE_ONLY = ("hutchinson", "hutch++", "xtrace", "ulisse")


def truths(eigenvalues):
    return {
        trace_inverse: np.sum(1 / eigenvalues),
        logdet: np.sum(np.log(eigenvalues)),
        trace_function: np.sum(np.sqrt(eigenvalues)),
    }


def estimate(door, A, **options):
    extra = (jnp.sqrt,) if door is trace_function else ()
    return door(A, *extra, **options)


@pytest.fixture(scope="module")
def problem():
    return oracles.power_law(SIZE)


@pytest.mark.parametrize("door", [trace_inverse, logdet, trace_function])
def test_a_budget_of_d_is_exact(door, problem, dtype, key):
    matrix, eigenvalues = problem
    A = jnp.asarray(matrix, dtype)
    result = estimate(door, A, key=key, budget=SIZE + 5)
    assert result.value.dtype == dtype
    assert int(result.num_matvecs) == SIZE
    assert float(result.standard_error) == 0
    assert result.bracket == "proved"
    truth = truths(eigenvalues)[door]
    # kappa is 60: rounding of the run, a few d eps.
    assert abs(float(result.value) - truth) <= 20 * SIZE * jnp.finfo(dtype).eps * abs(truth)


@pytest.mark.parametrize(
    ("door", "name"),
    [(trace_inverse, "bulk+outliers"), (logdet, "power-law-1"), (trace_function, "kernel-5d")],
)
def test_errors_are_as_large_as_they_say(door, name):
    """Twelve seeds: mean-square z in the chi2 range that one test in ten thousand leaves."""
    matrix, eigenvalues = oracles.SPECTRA[name](SIZE)
    A, truth, squares = jnp.asarray(matrix), truths(eigenvalues)[door], []
    for seed in range(12):
        result = estimate(door, A, key=jax.random.key(seed), budget=BUDGET, driver="compiled")
        low, high = result.interval(0.6827)  # one standard error and the bracket on each side
        half = (float(high) - float(low)) / 2
        squares.append(((float(result.value) - truth) / half) ** 2)
    # chi2 with 12 degrees of freedom at 1 - 1e-4 is 39.1; t-like tails of small samples: doubled.
    assert sum(squares) < 2 * 39.1
    # And no vacuous error bar: at 1e-4 from below, 1.1.
    assert sum(squares) > 1.1


def test_the_spectrum_that_defeats_quadrature_is_still_covered():
    """Exponential spectrum: Gauss quadrature alone is far too low; the bracket must reach."""
    matrix, eigenvalues = oracles.exponential(100)
    A, truth = jnp.asarray(matrix), np.sum(1 / eigenvalues)
    covered = 0
    for seed in range(8):
        result = trace_inverse(A, key=jax.random.key(seed), budget=40, driver="compiled")
        covered += bool(result.lower <= truth <= result.upper)
        assert float(result.quadrature_lower) < float(result.quadrature_upper)
    # Binomial(8, 0.9): fewer than 5 has probability 5e-3; seeds are fixed.
    assert covered >= 5


def test_inverse_belief_reports_its_quadrature_bias():
    """Depth 8 leaves a bias many standard errors wide on the exponential spectrum."""
    matrix, eigenvalues = oracles.exponential(100)
    belief = pk.inverse(
        jnp.asarray(matrix), key=jax.random.key(0), num_steps=30, probe_depth=8, num_probes=16
    )
    shifted = belief.shift(20.0)  # well conditioned: the probes have converged
    for door, read in (
        (trace_inverse, pk.InverseBelief.trace),
        (logdet, pk.InverseBelief.logdet),
    ):
        result, truth = read(belief), truths(eigenvalues)[door]
        assert result.bracket == "estimated"
        assert result.lower <= truth <= result.upper
        gauss = result.quadrature_lower if door is trace_inverse else result.quadrature_upper
        assert float(gauss) == float(result.value)
        assert abs(float(result.value) - truth) > 4 * float(result.standard_error)
        result = read(shifted)
        width = float(result.quadrature_upper) - float(result.quadrature_lower)
        assert width < 0.05 * abs(float(result.value))


def test_belief_bracket_passes_through_vmap(problem):
    """The bracket is a function of the shift: one run, every shift (METHOD section 12)."""
    belief = pk.inverse(jnp.asarray(problem[0]), key=jax.random.key(0), num_steps=20, probe_depth=4)
    alphas = jnp.asarray([0.0, 5.0], belief.mean_flat.dtype)
    for function in ("inverse", "log"):
        changes = jax.vmap(lambda a, f=function: quadrature_change(belief.run, a, f))(alphas)
        single = quadrature_change(belief.run, alphas[1], function)
        np.testing.assert_allclose(float(changes[1]), float(single), rtol=1e-3)
        # A shift narrows the spectrum, so less is left to add.
        assert abs(float(changes[1])) < abs(float(changes[0]))


@pytest.mark.parametrize("method", METHODS)
def test_products_are_counted(method, problem):
    operator = CountingOperator(problem[0])
    result = trace_inverse(operator, key=jax.random.key(0), budget=BUDGET, method=method)
    assert operator.products == int(result.num_matvecs) <= BUDGET


def test_breakdown_stops_the_run_and_the_rest_is_exact(key):
    """Rank three plus a multiple of the identity: every probe ends after one step."""
    factor = np.random.default_rng(0).standard_normal((SIZE, 3))
    matrix = 2 * np.eye(SIZE) + factor @ factor.T
    operator = CountingOperator(matrix)
    result = trace_inverse(operator, key=key, budget=BUDGET)
    assert operator.products == int(result.num_matvecs) <= BUDGET
    np.testing.assert_allclose(float(result.value), np.trace(np.linalg.inv(matrix)), rtol=1e-10)
    # Rounding of the forms: eps times their sum.
    assert float(result.standard_error) < 1e-12 * float(result.value)
    assert float(result.quadrature_upper) - float(result.quadrature_lower) < 1e-10


@pytest.mark.parametrize("probes", ["sphere", "gaussian", "rademacher"])
def test_kinds_of_probes(probes, problem):
    matrix, eigenvalues = problem
    result = trace_inverse(jnp.asarray(matrix), key=jax.random.key(2), budget=BUDGET, probes=probes)
    truth = np.sum(1 / eigenvalues)
    assert abs(float(result.value) - truth) < 5 * float(result.standard_error)
    plain = trace_inverse(jnp.asarray(matrix), key=jax.random.key(2), budget=BUDGET)
    assert (float(result.value) == float(plain.value)) == (probes == "sphere")


def test_rtol_grows_until_it_is_met():
    matrix, eigenvalues = oracles.power_law(200)
    operator = CountingOperator(matrix)
    result = trace_inverse(operator, key=jax.random.key(0), rtol=0.01)
    assert operator.products == int(result.num_matvecs)
    assert 64 < int(result.num_matvecs) < 200  # more than the first round, less than exact
    error = float(result.standard_error)
    half = (float(result.quadrature_upper) - float(result.quadrature_lower)) / 2
    assert np.hypot(error, half) <= 0.01 * float(result.value)
    truth = np.sum(1 / eigenvalues)
    assert abs(float(result.value) - truth) < 4 * np.hypot(error, half)


def test_rtol_beyond_reach_ends_exact():
    matrix, eigenvalues = oracles.power_law(70)
    operator = CountingOperator(matrix)
    result = trace_inverse(operator, key=jax.random.key(0), rtol=1e-9)
    np.testing.assert_allclose(float(result.value), np.sum(1 / eigenvalues), rtol=1e-12)
    # Nothing of the run is done twice: d products, and the probes of the rounds before.
    assert 70 <= operator.products == int(result.num_matvecs) < 2 * 70


@pytest.mark.slow
def test_rtol_stops_at_the_budget():
    operator = CountingOperator(oracles.power_law(70)[0])
    result = trace_inverse(operator, key=jax.random.key(0), rtol=1e-9, budget=66)
    assert operator.products == int(result.num_matvecs) <= 66
    assert float(result.standard_error) > 0


def test_a_lower_bound_proves_the_bracket():
    A = jnp.asarray(oracles.kernel_5d(SIZE)[0])
    for door in (trace_inverse, logdet):
        given = door(A, key=jax.random.key(1), budget=BUDGET, lower_bound=0.01)
        plain = door(A, key=jax.random.key(1), budget=BUDGET)
        assert (given.bracket, plain.bracket) == ("proved", "estimated")
        assert float(given.quadrature_lower) <= float(given.value) <= float(given.quadrature_upper)
        proved = "quadrature_lower" if door is trace_inverse else "quadrature_upper"
        assert float(getattr(given, proved)) == float(getattr(plain, proved))  # the Gauss end
    with pytest.raises(pk.NotPositiveDefiniteError, match=r"lower_bound=5 is not one"):
        trace_inverse(A, key=jax.random.key(1), budget=BUDGET, lower_bound=5.0)


def test_trees_and_callables_come_in(problem):
    matrix = jnp.asarray(problem[0])
    like = {"a": jnp.zeros((20,), matrix.dtype), "b": jnp.zeros((4, 10), matrix.dtype)}

    def product(tree):
        flat = jnp.concatenate([tree["a"], tree["b"].reshape(-1)])
        image = matrix @ flat
        return {"a": image[:20], "b": image[20:].reshape(4, 10)}

    there = trace_inverse(product, like=like, key=jax.random.key(0), budget=BUDGET)
    here = trace_inverse(matrix, key=jax.random.key(0), budget=BUDGET)
    np.testing.assert_allclose(float(there.value), float(here.value), rtol=1e-6)


@pytest.mark.parametrize("method", PEERS)
def test_peers_are_exact_on_multiples_of_the_identity(method):
    A = 4 * jnp.eye(SIZE, dtype=jnp.float32)
    result = trace_inverse(A, key=jax.random.key(0), budget=BUDGET, method=method, depth=3)
    assert result.bracket == "none" and result.quadrature_lower is None
    # One step solves it. Only Hutch++ leaves noise: its second sketch has no unit rows.
    assert float(result.value) == pytest.approx(SIZE / 4, rel=0.1 if method == "hutch++" else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", PEERS)
def test_peers_are_unbiased_with_deep_solves(method):
    """Depth 30 on kappa = 4: the solves are exact; eight seeds, z-test of the mean error."""
    eigenvalues = np.linspace(1, 4, SIZE)
    matrix = jnp.asarray(oracles.with_spectrum(eigenvalues, 0))
    truth = np.sum(1 / eigenvalues)
    errors = []
    for seed in range(8):
        result = trace_inverse(
            matrix, key=jax.random.key(seed), budget=240, method=method, depth=20
        )
        errors.append(float(result.value) - truth)
    # Student t with 7 degrees of freedom at 1 - 1e-4 (two-sided) is 7.9.
    assert abs(np.mean(errors)) < 7.9 * np.std(errors, ddof=1) / np.sqrt(8) + 1e-9 * truth
    assert np.max(np.abs(errors)) < 0.2 * truth


@pytest.mark.parametrize("method", ["slq", "krylov-aware"])
def test_peers_of_the_logarithm(method, problem):
    matrix, eigenvalues = problem
    for door in (logdet, trace_function):
        result = estimate(
            door, jnp.asarray(matrix), key=jax.random.key(0), budget=60, method=method, depth=12
        )
        error = abs(float(result.value) - truths(eigenvalues)[door])
        assert error < 5 * float(result.standard_error)


class TestRefusals:
    """Every message names the argument, the value and the remedy."""

    A = np.diag(np.arange(1.0, SIZE + 1))

    def refused(self, exception, match, door=trace_inverse, **options):
        options = {"key": jax.random.key(0), "budget": BUDGET} | options
        with no_type_checker(), pytest.raises(exception, match=match):
            estimate(door, options.pop("A", self.A), **options)

    def test_arguments(self):
        self.refused(TypeError, "key is missing", key=None)
        self.refused(ValueError, r"budget=7 is too small.*at least 8", budget=7)
        self.refused(TypeError, r"budget=2.5 must be an int", budget=2.5)
        self.refused(ValueError, r"method='magic' is unknown", method="magic")
        self.refused(ValueError, r"probes='cube' is unknown", probes="cube")
        self.refused(ValueError, r"rtol=0 must be positive", rtol=0)
        self.refused(ValueError, r"rtol=0.1 needs method='pslq'", rtol=0.1, method="slq")
        self.refused(ValueError, r"depth=5 is for the peers", depth=5)
        self.refused(ValueError, r"lower_bound=-1 must be positive", lower_bound=-1)

    def test_peers(self):
        self.refused(ValueError, r"depth=41 must lie between 1 and 40", method="slq", depth=41)
        self.refused(ValueError, r"depth=61 must lie .* 60", method="slq", depth=61, budget=99)
        self.refused(ValueError, r"budget=40 gives 2 solves", method="xtrace", depth=20)
        for method in INVERSE_ONLY:
            self.refused(ValueError, r"tr A\^-1 only", logdet, method=method)

    def test_values(self):
        indefinite = self.A - 10 * np.eye(SIZE)
        for door in (trace_inverse, logdet):
            self.refused(pk.NotPositiveDefiniteError, "Ritz value -", door, A=indefinite)
        self.refused(ValueError, r"f is not finite at the Ritz", trace_function, A=indefinite)
        broken = self.A.copy()
        broken[3, 3] = np.nan
        self.refused(pk.NotFiniteError, "NaN or infinity", A=broken)
        with pytest.raises(TypeError, match="f must be a function"), no_type_checker():
            trace_function(self.A, 3, key=jax.random.key(0))

    def test_tracing(self):
        with pytest.raises(ValueError, match="cannot be traced"):
            jax.jit(lambda A: trace_inverse(A, key=jax.random.key(0)).value)(self.A)


def test_small_dimensions(key):
    for size in (1, 2, 5):
        result = trace_inverse(jnp.diag(jnp.arange(1.0, size + 1)), key=key)
        np.testing.assert_allclose(float(result.value), np.sum(1 / np.arange(1, size + 1)))
    # A host operator with fewer dimensions than the smallest budget.
    host = spla.aslinearoperator(np.diag([1.0, 2.0, 4.0]))
    assert float(logdet(host, key=key, budget=3).value) == pytest.approx(np.log(8))


@pytest.mark.slow
@pytest.mark.parametrize("door", [trace_inverse, logdet])
@pytest.mark.parametrize("name", ["bulk+outliers", "power-law-1", "exponential", "kernel-5d"])
def test_intervals_cover(door, name):
    """100 seeds, d = 300, 100 products: coverage of the 95 % interval at least 0.88.

    Binomial(100, 0.95): below 88 with probability 4e-3.
    """
    matrix, eigenvalues = oracles.SPECTRA[name](300)
    A, truth = jnp.asarray(matrix), truths(eigenvalues)[door]
    covered = 0
    for seed in range(100):
        result = door(A, key=jax.random.key(seed), budget=100, driver="compiled")
        covered += bool(result.lower <= truth <= result.upper)
    assert covered >= 88


def test_a_true_lower_bound_is_not_refused_where_the_krylov_space_ends():
    # Outside the Krylov space A is 0.5 I, and what probes find beyond their first step is rounding.
    rows = np.random.default_rng(0).standard_normal((24, 38))
    matrix = rows.T @ rows + 0.5 * np.eye(38)
    key = jax.random.key(0)
    estimate = logdet(jnp.asarray(matrix), key=key, lower_bound=0.4995, budget=200)
    np.testing.assert_allclose(estimate.value, np.linalg.slogdet(matrix)[1], rtol=1e-10)
