"""Forms of small tridiagonals, what a run resolves, and multilevel means, against dense NumPy."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracles
import pnkrylov as pk
from pnkrylov.traces.multilevel import convergence, multilevel_mean, plug_in_variance
from pnkrylov.traces.probes import Boundary, NestedProbes
from pnkrylov.traces.quadrature import (
    INVERSE,
    LOG,
    SpectralFunction,
    gauss,
    largest_estimate,
    radau,
    ritz_range,
)
from pnkrylov.traces.resolved import Tridiagonal, deflated_rows, resolved_trace, start_probe

SIZE, LEVEL = 40, 10
SQRT = SpectralFunction("f", np.sqrt, "general")
FUNCTIONS = {"inverse": INVERSE, "log": LOG, "general": SQRT}


@pytest.fixture(scope="module")
def problem():
    """A dense matrix, its eigenvalues, the rows of a run of 14 steps, and its tridiagonal."""
    matrix, eigenvalues = oracles.power_law(SIZE)
    start = jax.random.normal(jax.random.key(3), (SIZE,), jnp.float64)
    basis = pk.lanczos(jnp.asarray(matrix), start, LEVEL + 4)
    return matrix, eigenvalues, basis, Tridiagonal.of(basis)


def compressed(matrix, rows):
    """`T_perp`, and its basis as rows."""
    complement = np.linalg.svd(rows)[2][len(rows) :]
    return complement @ matrix @ complement.T, complement


def dense_function(f, matrix):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * f.evaluate(values)) @ vectors.T


def lanczos_forms(matrix, starts, depth):
    """alpha and beta of plain Lanczos runs, by Gram-Schmidt in NumPy."""
    alpha, beta = np.zeros((len(starts), depth)), np.zeros((len(starts), depth))
    for i, start in enumerate(starts):
        rows = [start / np.linalg.norm(start)]
        for j in range(depth):
            w = matrix @ rows[j]
            alpha[i, j] = rows[j] @ w
            w = w - np.array(rows).T @ (np.array(rows) @ w)
            w = w - np.array(rows).T @ (np.array(rows) @ w)
            beta[i, j] = np.linalg.norm(w)
            rows.append(w / beta[i, j])
    return alpha, beta


needs_x64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="identities to 1e-10")


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_gauss_and_radau_bracket_the_form(depth):
    matrix, eigenvalues = oracles.power_law(30)
    starts = np.random.default_rng(0).standard_normal((6, 30))
    starts /= np.linalg.norm(starts, axis=1)[:, None]
    alpha, beta = lanczos_forms(matrix, starts, depth)
    for f, side in ((INVERSE, 1), (LOG, -1)):
        exact = np.einsum("ij,jk,ik->i", starts, dense_function(f, matrix), starts)
        low = gauss(f, alpha, beta)
        right = radau(f, alpha, beta, eigenvalues[-1] * 1.01)
        left = radau(f, alpha, beta, eigenvalues[0] * 0.99)
        # Gauss <= right Radau <= exact <= left Radau for 1/x; all reversed for log.
        assert np.all(side * (right - low) >= -1e-12)
        assert np.all(side * (exact - right) >= -1e-12)
        assert np.all(side * (left - exact) >= -1e-12)
    assert np.mean(np.abs(right - exact)) < np.mean(np.abs(low - exact))


@hypothesis.given(st.integers(1, 6), st.integers(0, 2**31))
def test_exact_for_the_polynomials_they_promise(depth, seed):
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((12, 12))
    matrix = root @ root.T / 12 + 0.1 * np.eye(12)
    start = rng.standard_normal((1, 12))
    alpha, beta = lanczos_forms(matrix, start, depth)
    start /= np.linalg.norm(start)
    node = np.linalg.eigvalsh(matrix)[-1] * 1.1
    for degree, rule in (
        (2 * depth - 1, lambda f: gauss(f, alpha, beta)),
        (2 * depth, lambda f: radau(f, alpha, beta, node)),
    ):
        power = SpectralFunction("f", lambda x, degree=degree: x**degree, "general")
        exact = start @ np.linalg.matrix_power(matrix, degree) @ start.T
        np.testing.assert_allclose(rule(power), exact[0], rtol=1e-7)
    one_more = SpectralFunction("f", lambda x: x ** (2 * depth), "general")
    exact = start @ np.linalg.matrix_power(matrix, 2 * depth) @ start.T
    assert gauss(one_more, alpha, beta)[0] < exact[0, 0]


def test_rows_after_a_breakdown_are_ignored():
    alpha = np.array([[2.0, 3.0, 0.0, 0.0]])
    beta = np.array([[0.5, 0.0, 0.0, 0.0]])
    exact = np.linalg.inv([[2.0, 0.5], [0.5, 3.0]])[0, 0]
    np.testing.assert_allclose(gauss(INVERSE, alpha, beta), exact, rtol=1e-14)
    np.testing.assert_allclose(radau(INVERSE, alpha, beta, 9.0), exact, rtol=1e-14)
    assert ritz_range(alpha, beta)[0] > 1.7
    # The breakdown makes the top Ritz value exact: no residual is added.
    assert largest_estimate(alpha, beta) == pytest.approx(ritz_range(alpha, beta)[1])


@needs_x64
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_run_and_complement_together_are_the_trace(problem, kind):
    """METHOD section 2, with an exact look-ahead: the run continues to d."""
    matrix, eigenvalues, basis, _ = problem
    f = FUNCTIONS[kind]
    full = pk.continue_run(basis, jnp.asarray(matrix), SIZE - basis.num_rows)
    run, rows = Tridiagonal.of(full), np.asarray(full.vectors)
    inside = resolved_trace(f, run, LEVEL)
    if kind == "general":
        complement = np.linalg.svd(rows[: LEVEL + 1])[2][LEVEL + 1 :]
        rest = np.trace(complement @ dense_function(f, matrix) @ complement.T)
    else:
        below, complement = compressed(matrix, rows[:LEVEL])
        along = complement @ rows[LEVEL]
        image = dense_function(f, below)
        rest = np.trace(image) - along @ image @ along
    np.testing.assert_allclose(inside + rest, np.sum(f.evaluate(eigenvalues)), rtol=1e-10)


@needs_x64
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_probes_that_span_the_complement_leave_no_variance(problem, kind):
    matrix, _, basis, run = problem
    f = FUNCTIONS[kind]
    projected, deflated = deflated_rows(basis, LEVEL)
    operator = pk.as_operator(jnp.asarray(matrix))
    probes = NestedProbes(
        operator, deflated, None if kind == "general" else projected, kind="sphere"
    )
    probes.add(jax.random.key(0), 9)
    probes.add(jax.random.key(1), SIZE - LEVEL - 1 - 9)
    starts = np.asarray(probes._starts)
    np.testing.assert_allclose(starts @ starts.T, np.eye(len(starts)), atol=1e-13)
    np.testing.assert_allclose(starts @ np.asarray(deflated).T, 0, atol=1e-13)
    # All at once now: only the newest block can be advanced.
    probes = NestedProbes(
        operator, deflated, None if kind == "general" else projected, kind="sphere"
    )
    probes.add(jax.random.key(0), SIZE - LEVEL - 1)
    for _ in range(25):
        probes.advance(SIZE - LEVEL - 1)
    starts = np.asarray(probes._starts)
    mean = multilevel_mean(f, probes, run.largest_after(LEVEL), lower_bound=None)
    assert mean.variance == 0
    assert probes.num_matvecs == 25 * (SIZE - LEVEL - 1)
    if kind == "general":
        exact = np.trace(starts @ dense_function(f, matrix) @ starts.T)
    else:
        below, complement = compressed(matrix, np.asarray(projected))
        inside = starts @ complement.T
        exact = np.trace(inside @ dense_function(f, below) @ inside.T)
    np.testing.assert_allclose(probes.dimension * mean.value, exact, rtol=1e-9)


@needs_x64
@pytest.mark.parametrize(("norm", "decay"), [(1e2, 0.0), (1e6, 0.0), (1.0, 8.0)])
def test_what_exact_arithmetic_removes_stands_in_for_re_projection(norm, decay):
    """`Q^T A v = beta_m (q_{m+1}^T v) e_m`; what rounding leaves is removed when it matters.

    With outliers every step magnifies rounding, with a slow decay many steps do so a little.
    """
    rng = np.random.default_rng(3)
    vectors = np.linalg.qr(rng.standard_normal((90, 90)))[0]
    bulk = 0.5 + np.exp(-decay * np.arange(87) / 87)
    eigenvalues = np.concatenate([norm * np.array([4, 2, 1.6]), bulk])
    matrix = (vectors * eigenvalues) @ vectors.T
    operator = pk.as_operator(jnp.asarray((matrix + matrix.T) / 2))
    basis = pk.lanczos(operator, jnp.asarray(rng.standard_normal(90), operator.dtype), 10)
    projected, deflated = deflated_rows(basis, 8)
    forms, eps = [], float(jnp.finfo(operator.dtype).eps)
    for boundary in (None, Boundary.of(basis, 8)):
        probes = NestedProbes(operator, deflated, projected, kind="sphere", boundary=boundary)
        probes.add(jax.random.key(0), 4)
        for _ in range(60):
            probes.advance(4)
        forms.append(gauss(INVERSE, *probes.tridiagonals(np.arange(4), 60)))
    # Rounding errors of a product are eps ||A||, and T_perp has its spectrum about 1.
    np.testing.assert_allclose(forms[1], forms[0], rtol=1e3 * eps * norm + 1e-13)


@needs_x64
def test_probes_end_at_the_rounding_of_the_whole_operator():
    """Two eigenvalues are left after the run: two steps exhaust a probe, however large ||A|| is."""
    rng = np.random.default_rng(4)
    vectors = np.linalg.qr(rng.standard_normal((40, 40)))[0]
    matrix = (vectors * np.array([1e6, 5e5, 2e5] + [1.0] * 18 + [2.0] * 19)) @ vectors.T
    operator = pk.as_operator(jnp.asarray((matrix + matrix.T) / 2))
    start = jnp.asarray(vectors[:, :3].sum(axis=1) + 1e-3 * vectors[:, 3])
    basis = pk.lanczos(operator, start, 4)
    projected, deflated = deflated_rows(basis, 3)
    boundary = Boundary.of(basis, 3)
    probes = NestedProbes(operator, deflated, projected, kind="sphere", boundary=boundary)
    probes.add(jax.random.key(0), 2)
    for _ in range(4):
        probes.advance(2)
    assert np.all(probes.beta[:, 0] > 0.1)
    np.testing.assert_array_equal(probes.beta[:, 1], 0)
    np.testing.assert_array_equal(probes.alpha[:, 2:4], 0)


@needs_x64
def test_multilevel_mean_telescopes(problem):
    """A mean over nested probes is the sum of level means, and equal depths give the plain mean."""
    matrix, _, basis, run = problem
    projected, deflated = deflated_rows(basis, LEVEL)
    probes = NestedProbes(pk.as_operator(jnp.asarray(matrix)), deflated, projected, kind="sphere")
    probes.add(jax.random.key(0), 12)
    for count in (12, 6, 6, 2):
        probes.advance(count)
    assert probes.num_matvecs == 26
    assert probes.depths.tolist() == [4] * 2 + [3] * 4 + [1] * 6
    mean = multilevel_mean(INVERSE, probes, run.largest_after(LEVEL), lower_bound=0.5)

    def level(depth, count):
        return gauss(INVERSE, *probes.tridiagonals(np.arange(count), depth))

    # With the node far away Radau is Gauss, which can be recomputed here.
    far = multilevel_mean(INVERSE, probes, 1e9, lower_bound=0.5)
    expected = level(1, 12).mean() + (level(3, 6) - level(1, 6)).mean()
    expected += (level(4, 2) - level(3, 2)).mean()
    np.testing.assert_allclose(far.value, expected, rtol=1e-8)
    assert mean.gauss < mean.value < mean.opposite
    assert mean.variance > 0


def test_gaussian_and_rademacher_weights_have_mean_one(problem):
    matrix, _, basis, _ = problem
    _, deflated = deflated_rows(basis, LEVEL)
    for kind in ("gaussian", "rademacher"):
        probes = NestedProbes(pk.as_operator(jnp.asarray(matrix)), deflated, None, kind=kind)
        probes.add(jax.random.key(0), 400)
        # Squared norm over D: variance at most 2/D each, 29 dimensions, 400 probes.
        tolerance = 5 * np.sqrt(2 / probes.dimension / 400)
        assert abs(probes.weights.mean() - 1) < tolerance
        assert probes.weights.std() > 0


def test_plug_in_variance_is_that_of_the_sphere():
    """Against simulation: 20 000 directions in 8 dimensions."""
    values = np.array([1.0, 2, 3, 5, 8, 13, 21, 34])
    block = np.random.default_rng(0).standard_normal((20_000, 8))
    block /= np.linalg.norm(block, axis=1)[:, None]
    forms = block**2 @ values
    predicted = plug_in_variance(values.mean(), np.mean(values**2), 8)
    # Standard error of a sample variance, by its own fourth moment.
    error = np.std((forms - forms.mean()) ** 2) / np.sqrt(len(forms))
    assert abs(forms.var() - predicted) < 5 * error


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_convergence_sums_a_geometric_tail(rate):
    def forms_at(depth):
        return np.arange(3), np.full(3, 7 - rate**depth)

    limit = convergence(12, forms_at)
    assert limit.change == pytest.approx(rate**12, rel=1e-3)
    assert limit.bound >= limit.change


def test_growing_changes_are_not_called_converging():
    def forms_at(depth):
        return np.arange(2), np.full(2, 1.1**depth)

    assert np.isinf(convergence(12, forms_at).change)
    assert np.isinf(convergence(2, lambda depth: (np.arange(2), np.full(2, -(0.1**depth)))).bound)
    assert convergence(2, lambda depth: (np.arange(2), np.ones(2))).bound == 0


def test_start_probe_is_the_run_itself(problem):
    matrix, _, basis, run = problem
    start = np.asarray(basis.vectors[0])
    exact = start @ np.linalg.solve(matrix, start)
    probe = start_probe(INVERSE, run, SIZE)
    assert probe.value < SIZE * exact
    assert probe.value + SIZE * probe.convergence.bound > SIZE * exact
    tridiagonal = np.diag(run.alpha) + np.diag(run.beta[:-1], 1) + np.diag(run.beta[:-1], -1)
    inverse = np.linalg.inv(tridiagonal)
    assert probe.value == pytest.approx(SIZE * inverse[0, 0], rel=1e-6)
    square = (inverse @ inverse)[0, 0]
    expected = SIZE**2 * plug_in_variance(inverse[0, 0], square, SIZE)
    assert probe.variance == pytest.approx(expected, rel=1e-4)


def test_functions_say_what_they_cannot_take():
    with pytest.raises(pk.NotPositiveDefiniteError, match=r"Ritz value -1"):
        LOG(np.array([-1.0, 2.0]))
    with pytest.raises(pk.NotFiniteError, match="NaN or infinity"):
        INVERSE(np.array([np.nan]))
    outside = dataclasses.replace(SQRT, evaluate=lambda x: np.log(x - 3))
    with pytest.raises(ValueError, match=r"not finite at the Ritz value 2"):
        outside(np.array([2.0, 4.0]))
    with pytest.raises(ValueError, match="elementwise"):
        dataclasses.replace(SQRT, evaluate=np.sum)(np.array([2.0, 4.0]))
