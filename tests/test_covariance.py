"""Sigma_m against the dense formula of METHOD section 3: operator, sampler and numbers."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from harness import (
    exact_run,
    identity_cases,
    make_run,
    relative_tolerance,
    split_of,
    start_vector,
)
from oracles import SPECTRA, split, with_spectrum
from pnkrylov.beliefs import inverse_belief, solve_belief
from pnkrylov.covariance import coupling_square_root
from pnkrylov.krylov import lanczos

SIZE, LEVEL = 20, 6


def belief_of(run, layout, shift=0.0):
    dtype = run.basis.dtype
    mean = jnp.zeros(run.basis.size, dtype)
    return inverse_belief(run, mean, jnp.asarray(shift, dtype), layout)


@functools.cache
def case(layout, dtype, spectrum="power-law-1"):
    """A covariance and its dense twin, whose only input from the library is omega and Q."""
    matrix, run = exact_run(spectrum, SIZE, dtype, LEVEL)
    exact = split_of(matrix, run)
    if layout == "paper":
        return belief_of(run, "paper").covariance, exact.parts()
    if layout == "remainder":
        rhs, one = jnp.zeros(SIZE, dtype), jnp.ones((), dtype)
        covariance = solve_belief(run, rhs, 0 * one, one, None, from_rhs=False).covariance
        parts = exact.parts()
        return covariance, parts | {"resolved": 0 * parts["resolved"]}
    # resolve-all, with three steps of look-ahead: every row is resolved, the rest is isotropic.
    rows = LEVEL + 3
    shorter = lanczos(matrix.astype(dtype), start_vector(SIZE, dtype), rows)
    belief = belief_of(make_run(shorter, LEVEL, run.probes), "resolve-all")
    known = split(matrix, shorter.vectors)
    explored = known.rows.T @ known.rows
    omega = float(belief.stats.bulk_variance)
    parts = {
        "resolved": known.rows.T @ np.linalg.inv(known.T) @ known.rows,
        "coupling": np.zeros((SIZE, SIZE)),
        "bulk": omega * (np.eye(SIZE) - explored),
    }
    return belief.covariance, parts


LAYOUTS = ("paper", "remainder", "resolve-all")


@eqx.filter_jit
def everything(covariance, block):
    return {
        "matrix": covariance.as_matrix(),
        "mv": covariance.mv(block[0]),
        "block_mv": covariance.block_mv(block),
        "diagonal": covariance.diagonal(),
        "trace": covariance.trace(),
        "push": covariance.push(block),
        "unexplored": covariance.unexplored(block[0]),
        "unexplored_diagonal": covariance.unexplored_diagonal(),
        "bulk_dimension": covariance.bulk_dimension(),
        "logdet": covariance.logdet(),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_an_operator(layout, dtype):
    covariance, parts = case(layout, dtype.name)
    dense = sum(parts.values())
    size_of = np.linalg.norm(dense, 2)
    tolerance = relative_tolerance(dtype, 20)
    block = np.random.default_rng(0).standard_normal((3, SIZE)).astype(dtype)
    found = everything(covariance, jnp.asarray(block))

    def same(name, expected, scale):
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=tolerance * scale)

    same("matrix", dense, size_of)
    same("mv", dense @ block[0], 10 * size_of)
    same("block_mv", block @ dense, 10 * size_of)
    same("diagonal", np.diag(dense), size_of)
    same("trace", np.trace(dense), SIZE * size_of)
    same("push", block @ dense @ block.T, 40 * size_of)
    if layout == "remainder":
        assert found["logdet"] == -np.inf
    else:
        same("logdet", np.linalg.slogdet(dense)[1], SIZE)
    # P_rest, the projection that the bulk is a multiple of.
    dimension = int(found["bulk_dimension"])
    rest = parts["bulk"] / np.trace(parts["bulk"]) * dimension
    same("unexplored", rest @ block[0], 10)
    same("unexplored_diagonal", np.diag(rest), 1)
    assert dimension == np.linalg.matrix_rank(rest, tol=1e-3)
    # Symmetric and positive semi-definite beyond the comparison.
    matrix = np.asarray(found["matrix"], np.float64)
    scale = float(jnp.finfo(dtype).eps) * size_of
    np.testing.assert_allclose(matrix, matrix.T, atol=10 * scale)
    values = np.linalg.eigvalsh((matrix + matrix.T) / 2)
    assert values[0] >= -10 * scale
    # A belief about A^-1 is positive definite; one about A^-1 v vanishes on the resolved rows but
    # for q_par, which the coupling of an isotropic model adds to the rank d - m of the exact one.
    rank = SIZE - LEVEL + 1 if layout == "remainder" else SIZE
    assert np.sum(values > 100 * scale) == rank


def test_the_push_is_positive_semidefinite_for_dependent_rows(dtype):
    covariance, _ = case("paper", dtype.name)
    row = np.random.default_rng(0).standard_normal(SIZE)
    pushed = np.asarray(covariance.push(jnp.asarray(np.stack([row, 2 * row, -row]), dtype)))
    assert np.linalg.eigvalsh(pushed)[0] >= -10 * jnp.finfo(dtype).eps * pushed.max()
    np.testing.assert_array_equal(pushed, pushed.T)


@pytest.mark.one_precision
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lineax_works_with_it(layout, dtype):
    covariance, parts = case(layout, dtype.name)
    dense = sum(parts.values())
    tolerance = relative_tolerance(dtype, 20) * np.linalg.norm(dense, 2)
    assert lx.is_symmetric(covariance) and lx.is_positive_semidefinite(covariance)
    assert not lx.is_diagonal(covariance)
    np.testing.assert_array_equal(lx.diagonal(covariance), covariance.diagonal())
    np.testing.assert_allclose(lx.diagonal(covariance), np.diag(dense), atol=tolerance)
    twice = covariance + covariance
    np.testing.assert_allclose(twice.as_matrix(), 2 * dense, atol=2 * tolerance)
    assert covariance.T is covariance
    if layout != "remainder":
        vector = start_vector(SIZE, dtype, 3)
        eps = float(jnp.finfo(dtype).eps)
        solver = lx.CG(rtol=10 * eps, atol=0.0, max_steps=500)
        x = lx.linear_solve(covariance, vector, solver, throw=False).value
        residual = dense @ np.asarray(x, np.float64) - np.asarray(vector)
        assert np.linalg.norm(residual) <= 1e4 * eps * np.linalg.norm(vector)


def test_scaled(dtype):
    covariance, _ = case("remainder", dtype.name)
    scaled = covariance.scaled(jnp.asarray(3.0, dtype))
    np.testing.assert_allclose(scaled.as_matrix(), 9 * covariance.as_matrix(), rtol=1e-4, atol=1e-5)


@eqx.filter_jit
def summary(belief):
    estimate = belief.trace()
    covariance = belief.covariance
    return covariance.as_matrix(), covariance.trace(), estimate.value, estimate.standard_error


@pytest.mark.parametrize(("spectrum", "size", "level", "depth"), identity_cases())
def test_the_trace_and_the_error_of_sigma_m(spectrum, size, level, depth):
    """tr Sigma_m = tr A^-1, and ||c|| <= ||Sigma_m - A^-1||_2 <= ||c|| + omega (kappa_S - 1)."""
    matrix, run = exact_run(spectrum, size, "float64", level, depth)
    exact, inverse = split_of(matrix, run), np.linalg.inv(matrix)
    # First the oracle itself: the five exact terms are A^-1, by dense algebra.
    largest = np.linalg.norm(inverse, 2)
    np.testing.assert_allclose(exact.exact_inverse(), inverse, atol=1e-10 * largest)
    paper, all_rows = belief_of(run, "paper"), belief_of(run, "resolve-all")
    (sigma, *traces), (everything_resolved, *other) = summary(paper), summary(all_rows)
    for value, estimate, standard_error in (traces, other):
        np.testing.assert_allclose(value, np.trace(inverse), rtol=1e-10)
        np.testing.assert_allclose(estimate, np.trace(inverse), rtol=1e-10)
        assert float(standard_error) == 0
    np.testing.assert_allclose(sigma, exact.sigma(), atol=1e-10 * largest)
    np.testing.assert_allclose(paper.stats.bulk_variance, exact.omega, rtol=1e-9, atol=1e-12)
    error = np.linalg.norm(exact.sigma() - inverse, 2)
    if not exact.exists:
        assert error <= 1e-10 * largest if level == size else error > 0
        return
    slack = 1e-8 * largest
    np.testing.assert_allclose(paper.stats.coupling_norm, exact.c_norm, atol=1e-5 * exact.sigma_u)
    assert exact.c_norm <= error + slack
    assert error <= exact.c_norm + exact.omega * (exact.kappa_S - 1) + slack
    # Everything resolved: no error is left.
    np.testing.assert_allclose(everything_resolved, inverse, atol=1e-10 * largest)


@pytest.mark.parametrize("spectrum", ["power-law-1", "exponential", "kernel-5d", "bulk+outliers"])
@pytest.mark.parametrize("level", [1, 10, 19])
def test_the_trace_in_float32(spectrum, level):
    """1e-4, or 20 eps kappa where the condition number does not allow it."""
    matrix, run = exact_run(spectrum, 20, "float32", level)
    values = np.linalg.eigvalsh(matrix)
    tolerance = relative_tolerance("float32", values[-1] / values[0])
    for layout in ("paper", "resolve-all"):
        trace = float(belief_of(run, layout).covariance.trace())
        np.testing.assert_allclose(trace, np.sum(1 / values), rtol=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_moments_of_50000_samples(layout):
    """Entrywise within 5 standard errors, every part separately and the whole.

    For normal draws with known mean zero, the standard error of entry (i, j) of the sample
    covariance is sqrt((C_ii C_jj + C_ij^2) / n), that of the mean sqrt(C_ii / n).
    """
    count = 50_000
    covariance, parts = case(layout, "float64")
    draws = covariance.sample_parts(jax.random.key(1), count)
    draws = {name: np.asarray(value) for name, value in draws.items()}
    draws["whole"] = np.asarray(covariance.sample(jax.random.key(1), count))
    np.testing.assert_allclose(
        draws["whole"], sum(draws[name] for name in ("resolved", "coupling", "bulk")), atol=1e-12
    )
    draws["whole"] = np.asarray(covariance.sample(jax.random.key(2), count))
    for name, expected in (parts | {"whole": sum(parts.values())}).items():
        values = draws[name]
        assert values.shape == (count, SIZE)
        diagonal = np.diag(expected)
        rounding = 1e-12
        assert np.all(np.abs(values.mean(0)) <= 5 * np.sqrt(diagonal / count) + rounding), name
        standard_error = np.sqrt((np.outer(diagonal, diagonal) + expected**2) / count)
        assert np.all(np.abs(values.T @ values / count - expected) <= 5 * standard_error + rounding)
    # The parts are independent of each other.
    for a, b in (("resolved", "coupling"), ("resolved", "bulk"), ("coupling", "bulk")):
        cross = draws[a].T @ draws[b] / count
        error = np.sqrt(np.outer(np.diag(parts[a]), np.diag(parts[b])) / count)
        assert np.all(np.abs(cross) <= 5 * error + 1e-12)


def test_samples_in_float32_and_under_vmap(dtype):
    covariance, _ = case("paper", dtype.name)
    keys = jax.random.split(jax.random.key(0), 3)
    batch = jax.vmap(lambda key: covariance.sample(key, 4))(keys)
    assert batch.shape == (3, 4, SIZE) and batch.dtype == dtype
    for key, draws in zip(keys, batch, strict=True):
        np.testing.assert_allclose(draws, covariance.sample(key, 4), atol=1e-5)
    assert covariance.sample(keys[0], 0).shape == (0, SIZE)


def test_the_coupling_root(dtype):
    """F F^T is C_2, also where Cauchy-Schwarz is an equality or there is no coupling."""
    for p1, p2, p3, norm in ((2.0, 3.0, 7.0, 0.5), (2.0, 2.0, 2.0, 1.5), (1.0, 4.0, 16.0, 1.0)):
        arguments = [jnp.asarray(x, dtype) for x in (norm, p1, p2, p3)]
        root = np.asarray(coupling_square_root(*arguments), np.float64)
        cross = -norm * np.sqrt(p2)
        expected = np.array([[p1 * norm**2, cross], [cross, p3 / p2]])
        np.testing.assert_allclose(root @ root.T, expected, rtol=1e-4)
    zero = jnp.zeros((), dtype)
    assert not np.any(coupling_square_root(zero, zero, zero, zero))


def test_extreme_scales(dtype):
    """The covariance of a matrix of scale 1e+-20 is that of scale one, over the scale."""
    matrix = with_spectrum(np.geomspace(1, 30, 12), 0)
    run = functools.partial(lanczos, start=start_vector(12, dtype), num_steps=9)

    def covariance(scale):
        basis = run((matrix * scale).astype(dtype))
        one = jnp.ones((), dtype)
        rhs = jnp.zeros(12, dtype)
        return solve_belief(make_run(basis, 5), rhs, 0 * one, one, None, from_rhs=False).covariance

    reference = np.asarray(covariance(1.0).diagonal(), np.float64)
    for scale in (1e-20, 1e20):
        found = np.asarray(covariance(scale).diagonal(), np.float64) * scale
        np.testing.assert_allclose(found, reference, rtol=2e-3)


def test_nothing_is_dense_on_the_way():
    """d = 20,000 would need 3 GB: the operator, its diagonal and its samples do not."""
    diagonal = jnp.asarray(np.random.default_rng(0).uniform(1, 2, 20_000), jnp.float32)
    start = start_vector(20_000, jnp.float32)
    basis = lanczos(lambda v: diagonal * v, start, 8, driver="compiled")
    one = jnp.ones((), jnp.float32)
    run = make_run(basis, 5)
    covariance = solve_belief(run, start, 0 * one, one, None, from_rhs=True).covariance
    largest = 0
    for function in (
        lambda c: c.mv(start),
        lambda c: c.diagonal(),
        lambda c: c.sample(jax.random.key(0), 2),
        lambda c: c.push(jnp.stack([start, start])),
        lambda c: c.trace(),
    ):
        jaxpr = jax.make_jaxpr(function)(covariance)
        shapes = [v.aval.shape for e in jaxpr.jaxpr.eqns for v in e.outvars]
        largest = max([largest, *(int(np.prod(shape)) for shape in shapes)])
    assert largest <= 8 * 20_000 * 2


def test_the_spectra_of_the_tests_are_the_ones_asked_for():
    """METHOD section 4, last paragraph: otherwise everything above is about something else."""
    matrix, values = SPECTRA["bulk+outliers"](200)
    np.testing.assert_allclose(np.linalg.eigvalsh(matrix), values, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(values[-10:], np.geomspace(1e2, 1e4, 10), rtol=1e-12)
    assert values[0] >= 0.5 and values[-11] <= 2
    values = SPECTRA["exponential"](200)[1]
    np.testing.assert_allclose(values[::-1], 1e2 * np.exp(-np.arange(1, 201) / 20), rtol=2e-3)
