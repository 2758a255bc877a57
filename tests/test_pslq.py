"""P-SLQ: full probes are exact, partial ones unbiased with an honest error; the coupling exact."""

import dataclasses
import os
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from harness import (
    CountingOperator,
    exact_run,
    identity_cases,
    make_run,
    relative_tolerance,
    split_of,
    start_vector,
)
from pnkrylov.calibration import calibrate_logdet
from pnkrylov.covariance import coupling_square_root
from pnkrylov.krylov import lanczos
from pnkrylov.operators import as_operator
from pnkrylov.probes import run_probes
from pnkrylov.pslq import Boundary, Complement
from pnkrylov.tridiagonal import Tridiagonal


def _power(unit, k):
    return unit if k == 1 else unit * _power(unit, k - 1)


@eqx.filter_jit
def measure(run, shift):
    """What P-SLQ says about the complement, in the user's units."""
    T = run.tridiagonal(shift)
    level = jnp.minimum(run.level, run.basis.filled)
    boundary = Boundary.of(T, level)
    complement = Complement.of(T, boundary, run.probes, shift, run.basis.size - level)
    unit = T.unit
    # tr T_perp^-1 by the probes and the boundary vector, without the correction.
    trace = run.probes.mean(run.probes.inverse_forms(shift, unit))[0] + boundary.inverse_form()
    root = coupling_square_root(
        jnp.sqrt(boundary.parallel_square()), boundary.p1, boundary.p2, boundary.p3
    )
    return {
        "exists": boundary.exists,
        "gamma": boundary.gamma * unit,
        "q_par": boundary.parallel @ run.basis.vectors,
        "q_perp": boundary.perpendicular @ run.basis.vectors / unit,
        "p": [getattr(boundary, f"p{k}") / _power(unit, k) for k in (1, 2, 3, 4)],
        "sigma_u": boundary.direction_variance() / unit,
        "c": boundary.coupling_norm() / unit,
        "a1": boundary.inverse_form() / unit,
        "correction": boundary.trace_correction() / unit,
        "block": root @ root.T / unit,
        "trace T_perp": trace / unit,
        "trace S": complement.trace / unit,
        "standard error": complement.standard_error / unit,
        "range": complement.ritz_range * unit,
        "logdet": calibrate_logdet(run, shift),
    }


def check_identities(matrix, run, shift, tolerance):
    found = jax.tree.map(
        lambda x: np.asarray(x, np.float64), measure(run, jnp.asarray(shift, run.basis.dtype))
    )
    exact = split_of(matrix + shift * np.eye(len(matrix)), run)
    same = lambda a, b, atol=0.0: np.testing.assert_allclose(a, b, rtol=tolerance, atol=atol)  # noqa: E731
    inverse_S = np.linalg.inv(exact.S)
    scale = np.trace(np.linalg.inv(matrix + shift * np.eye(len(matrix))))
    assert found["standard error"] == 0
    same(found["trace S"], np.trace(inverse_S), atol=tolerance * 1e-3 * scale)
    same(found["trace T_perp"], np.trace(np.linalg.inv(exact.T_perp)), tolerance * 1e-3 * scale)
    values = np.linalg.eigvalsh(matrix + shift * np.eye(len(matrix)))
    same(found["logdet"][0], np.log(values).sum(), atol=tolerance * len(matrix))
    assert found["logdet"][1] == 0
    assert bool(found["exists"]) == exact.exists
    if not exact.exists:
        assert not found["q_par"].any() and not found["q_perp"].any() and not found["block"].any()
        assert found["gamma"] == 0 and found["correction"] == 0
        return
    same(found["gamma"], exact.gamma)
    a1 = np.linalg.inv(exact.T_perp)[0, 0]
    same(found["a1"], a1)
    a2 = np.linalg.matrix_power(np.linalg.inv(exact.T_perp), 2)[0, 0]
    # METHOD section 4: tr S^-1 = tr T_perp^-1 + gamma a_2 / (1 - gamma a_1).
    difference = exact.gamma * a2 / (1 - exact.gamma * a1)
    same(found["correction"], difference, atol=tolerance * np.trace(inverse_S))
    for k, p in enumerate(found["p"], start=1):
        np.testing.assert_allclose(p, exact.p(k), rtol=k * tolerance)
    for name in ("q_par", "q_perp"):
        expected = getattr(exact, name)
        same(found[name], expected, atol=tolerance * np.linalg.norm(expected))
    same(found["sigma_u"], exact.sigma_u)
    # ||c|| is the root of a difference of squares: absolute to sqrt(tolerance) at worst.
    same(found["c"] ** 2, exact.c_norm**2, atol=4 * tolerance * exact.sigma_u**2)
    block = exact.coupling_block()
    same(found["block"], block, atol=tolerance * np.abs(block).max())
    assert np.linalg.eigvalsh(found["block"])[0] >= -tolerance * np.abs(block).max()
    # The look-ahead is a run in S to its end; what it knows of the smallest value is exact.
    smallest = np.linalg.eigvalsh(exact.S)[0]
    np.testing.assert_allclose(found["range"][0], smallest, rtol=100 * tolerance)


@pytest.mark.parametrize(("spectrum", "size", "level", "depth"), identity_cases())
def test_the_identities_in_float64(spectrum, size, level, depth):
    matrix, run = exact_run(spectrum, size, "float64", level, depth)
    check_identities(matrix, run, 0.0, 1e-10)


@pytest.mark.parametrize(("spectrum", "size"), [("power-law-1", 20), ("kernel-5d", 20)])
@pytest.mark.parametrize("level", [1, 10, 19, 20])
def test_the_identities_in_float32(spectrum, size, level):
    matrix, run = exact_run(spectrum, size, "float32", level)
    values = np.linalg.eigvalsh(matrix)
    check_identities(matrix, run, 0.0, relative_tolerance("float32", values[-1] / values[0]))


@pytest.mark.parametrize("shift", [0.3, 50.0])
def test_the_identities_hold_for_every_shift_of_one_run(shift):
    """METHOD section 12: T and every Theta take the shift; no product is spent."""
    matrix, run = exact_run("power-law-1", 20, "float64", 4)
    check_identities(matrix, run, shift, 1e-10)


def test_a_breakdown_leaves_no_coupling(dtype):
    """A start with five coordinates under a diagonal A; the complement is the probes' alone."""
    matrix = np.diag(np.linspace(1, 8, 20)).astype(dtype)
    start = start_vector(20, dtype).at[5:].set(0)
    basis = lanczos(matrix, start, 9)
    assert int(basis.filled) == 5
    key = jax.random.key(1)
    # A level beyond the rank means the rank.
    probes = run_probes(as_operator(matrix), basis, jnp.asarray(9, jnp.int32), key, 20, 40)
    assert int(probes.level) == 5 and int(probes.dimension) == 15
    assert int(jnp.sum(probes.valid)) == 15
    tolerance = relative_tolerance(dtype, 8)
    check_identities(matrix.astype(np.float64), make_run(basis, 9, probes), 0.0, tolerance)


class Recorder(CountingOperator):
    def __init__(self, matrix):
        super().__init__(matrix)
        self.blocks = []

    def _matmat(self, X):
        self.blocks.append(np.array(X.T, np.float64))
        return super()._matmat(X)


@pytest.mark.parametrize(("rows", "level"), [(6, 6), (12, 6)])
def test_probes_are_orthonormal_and_stay_in_the_complement(rows, level, dtype):
    """Starts avoid q_{m+1}, whether it is the next vector or already a row of the basis."""
    matrix = oracles.SPECTRA["power-law-1"](30)[0].astype(dtype)
    basis = lanczos(matrix, start_vector(30, dtype), rows)
    operator, key = Recorder(matrix), jax.random.key(0)
    level_array = jnp.asarray(level, jnp.int32)
    run_probes(as_operator(operator), basis, level_array, key, 5, 4, driver="host")
    assert operator.products == 20 and len(operator.blocks) == 4
    starts, eps = operator.blocks[0], float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(starts @ starts.T, np.eye(5), atol=20 * eps)
    resolved = np.asarray(basis.vectors, np.float64)[:level]
    following = np.asarray(basis.vectors[level] if rows > level else basis.next_vector, np.float64)
    assert np.abs(starts @ following).max() <= 20 * eps
    for block in operator.blocks:
        # Without re-projection, the outliers that the basis has resolved would grow back.
        assert np.abs(block @ resolved.T).max() <= 100 * eps
        np.testing.assert_allclose(np.linalg.norm(block, axis=1), 1, rtol=10 * eps)
    # A later step may go along q_{m+1}: it belongs to the complement.
    assert np.abs(operator.blocks[1] @ following).max() > 1e-3


def test_estimates_are_unbiased_and_know_their_error():
    """Over 400 keys at full depth, every bound from sampling error.

    The mean of K estimates lies within 5 standard deviations / sqrt(K) of the truth. The reported
    variance, averaged, lies within 5 standard errors of the empirical one; the error of a sample
    variance is sqrt((mu_4 - var^2) / K), that of the averaged variance its own spread / sqrt(K).
    """
    count = 400
    matrix, _ = oracles.SPECTRA["power-law-1"](20)
    operator, basis = as_operator(matrix), lanczos(matrix, start_vector(20, "float64"), 20)
    T = Tridiagonal.of(basis, jnp.zeros(()))
    level = jnp.asarray(3, jnp.int32)
    boundary = Boundary.of(T, level)

    @jax.jit
    def estimate(key, num_steps=40):
        probes = run_probes(operator, basis, level, key, 4, num_steps)
        complement = Complement.of(T, boundary, probes, jnp.zeros(()), 20 - level)
        log = calibrate_logdet(make_run(basis, 3, probes), jnp.zeros(()))
        trace = complement.trace / T.unit, complement.standard_error / T.unit
        return jnp.stack([jnp.stack(trace), jnp.stack(log)])

    found = np.asarray(jax.vmap(estimate)(jax.random.split(jax.random.key(0), count)))
    exact = oracles.split(matrix, basis.vectors[:3], basis.vectors[3])
    truths = np.trace(np.linalg.inv(exact.S)), np.linalg.slogdet(matrix)[1]
    for (values, errors), truth in zip(np.moveaxis(found, 0, -1), truths, strict=True):
        spread = values.std(ddof=1)
        assert spread > 1e-3 * abs(truth)  # otherwise there is nothing to test
        assert abs(values.mean() - truth) <= 5 * spread / count**0.5
        variance, reported = values.var(ddof=1), errors**2
        fourth = ((values - values.mean()) ** 4).mean()
        bound = ((fourth - variance**2) / count + reported.var() / count) ** 0.5
        assert abs(reported.mean() - variance) <= 5 * bound
        assert 5 * bound < 0.7 * variance  # the bound is sharp enough to mean something


def test_ritz_values_of_probes_lie_inside_the_complement():
    """Also after a probe has exhausted it: no resolved outlier may enter kappa_S or the floor."""
    matrix, run = exact_run("bulk+outliers", 20, "float64", 10)
    found = np.asarray(measure(run, jnp.zeros(()))["range"])
    exact = split_of(matrix, run)
    smallest, largest = np.linalg.eigvalsh(exact.S)[0], np.linalg.eigvalsh(exact.T_perp)[-1]
    np.testing.assert_allclose(found, (smallest, largest), rtol=1e-10)


def test_one_probe_knows_nothing_of_its_error(dtype):
    matrix = oracles.SPECTRA["power-law-1"](12)[0].astype(dtype)
    basis, key = lanczos(matrix, start_vector(12, dtype), 3), jax.random.key(0)
    probes = run_probes(as_operator(matrix), basis, jnp.asarray(3, jnp.int32), key, 1, 5)
    forms = probes.inverse_forms(jnp.zeros((), dtype), jnp.ones((), dtype))
    value, error = probes.mean(forms)
    np.testing.assert_allclose(value, 8 * forms[0], rtol=1e-5)  # d - m - 1 directions
    assert np.isinf(error)


def shortened(probes, depth):
    """The same probes, had they been stopped after `depth` steps."""
    return dataclasses.replace(probes, alpha=probes.alpha[:, :depth], beta=probes.beta[:, :depth])


def test_the_quadrature_converges_from_below():
    """Gauss quadrature of 1/x is a lower bound, step by step (METHOD section 4)."""
    matrix, _ = oracles.SPECTRA["exponential"](25)
    operator, key = as_operator(matrix), jax.random.key(0)
    basis, level = lanczos(matrix, start_vector(25, "float64"), 5), jnp.asarray(5, jnp.int32)
    probes = run_probes(operator, basis, level, key, 4, 16)
    before = np.zeros(4)
    for depth in (1, 2, 5, 10, 16):
        forms = shortened(probes, depth).inverse_forms(jnp.zeros(()), jnp.ones(()))
        assert np.all(np.asarray(forms) > before)
        before = np.asarray(forms)


@pytest.mark.parametrize("driver", ["compiled", "host"])
def test_probes_stop_early_and_leave_closed_tridiagonals(driver, dtype):
    """A well-conditioned complement needs few steps; what was not taken decouples."""
    matrix = oracles.SPECTRA["bulk+outliers"](60)[0].astype(dtype)
    operator, key = CountingOperator(matrix), jax.random.key(0)
    basis, level = lanczos(matrix, start_vector(60, dtype), 20), jnp.asarray(20, jnp.int32)

    def probe(depth, tolerance):
        return run_probes(
            as_operator(operator), basis, level, key, 6, depth, tolerance=tolerance, driver=driver
        )

    early = probe(30, 1e-2)
    steps = int(early.steps)
    assert 2 <= steps < 15 and operator.products == 6 * steps
    assert early.depth == 30
    assert not np.any(early.beta[:, steps - 1 :]) and not np.any(early.alpha[:, steps:])
    whole = probe(30, 0.0)
    assert int(whole.steps) == 30
    zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
    exactly = shortened(whole, steps)
    found, expected = early.inverse_forms(zero, one), exactly.inverse_forms(zero, one)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    found, expected = early.ritz_range(zero, one), exactly.ritz_range(zero, one)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    # Stopped where a further step changes the mean by less than was asked for, and not before.
    sums = [
        float(jnp.sum(shortened(whole, n).inverse_forms(zero, one)))
        for n in (steps - 2, steps - 1, steps)
    ]
    assert abs(sums[2] - sums[1]) < 1e-2 * sums[2]
    assert abs(sums[1] - sums[0]) >= 1e-2 * sums[1]


def test_the_host_driver_equals_the_compiled_one(dtype, capsys):
    matrix = oracles.SPECTRA["kernel-5d"](25)[0].astype(dtype)
    operator, key = as_operator(matrix), jax.random.key(4)
    basis, level = lanczos(matrix, start_vector(25, dtype), 5), jnp.asarray(5, jnp.int32)
    compiled = run_probes(operator, basis, level, key, 4, 6)
    host = run_probes(operator, basis, level, key, 4, 6, driver="host", progress=True)
    assert "Probes" in capsys.readouterr().err
    for a, b in zip(jax.tree.leaves(host), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)


def test_ctrl_c_leaves_shorter_probes():
    matrix = oracles.SPECTRA["kernel-5d"](25)[0]
    basis, level = lanczos(matrix, start_vector(25, "float64"), 5), jnp.asarray(5, jnp.int32)

    def interrupt(count):
        if count == 12:
            os.kill(os.getpid(), signal.SIGINT)

    handler, key = signal.getsignal(signal.SIGINT), jax.random.key(4)
    operator = as_operator(CountingOperator(matrix, interrupt))
    interrupted = run_probes(operator, basis, level, key, 4, 6, driver="host")
    assert signal.getsignal(signal.SIGINT) is handler
    assert int(interrupted.steps) == 3
    whole = run_probes(as_operator(matrix), basis, level, key, 4, 3)
    one, zero = jnp.ones(()), jnp.zeros(())
    np.testing.assert_allclose(
        interrupted.inverse_forms(zero, one), whole.inverse_forms(zero, one), rtol=1e-9
    )


def test_vmap_over_keys_equals_a_loop(dtype):
    matrix = oracles.SPECTRA["kernel-5d"](25)[0].astype(dtype)
    operator, keys = as_operator(matrix), jax.random.split(jax.random.key(4), 3)
    basis, level = lanczos(matrix, start_vector(25, dtype), 5), jnp.asarray(5, jnp.int32)
    # An adaptive stop must be each key's own.
    probe = lambda key: run_probes(operator, basis, level, key, 4, 12, tolerance=1e-2)  # noqa: E731
    batch = jax.vmap(probe)(keys)
    for index, key in enumerate(keys):
        for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(probe(key)), strict=True):
            np.testing.assert_allclose(a[index], b, rtol=1e-3, atol=1e-5)


@settings(max_examples=20)
@given(
    exponents=st.lists(st.floats(-2, 2), min_size=9, max_size=9),
    level=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_the_trace_and_determinant_of_any_matrix(exponents, level, seed):
    """tr A^-1 = tr T^-1 + s11 ||q_par||^2 + tr S^-1 and its twin for the determinant."""
    eigenvalues = 10.0 ** np.asarray(exponents)
    matrix = oracles.with_spectrum(eigenvalues, seed)
    start, key = start_vector(9, "float64", seed), jax.random.key(seed)
    trace, error, logdet = _whole_trace(matrix, start, jnp.asarray(level, jnp.int32), key)
    tolerance = relative_tolerance("float64", eigenvalues.max() / eigenvalues.min())
    np.testing.assert_allclose(trace, np.sum(1 / eigenvalues), rtol=tolerance)
    np.testing.assert_allclose(logdet, np.sum(np.log(eigenvalues)), rtol=1e-9, atol=1e-9)
    assert float(error) == 0


@eqx.filter_jit
def _whole_trace(matrix, start, level, key):
    basis, zero = lanczos(matrix, start, 9), jnp.zeros(())
    probes = run_probes(as_operator(matrix), basis, level, key, 9, 30)
    T = Tridiagonal.of(basis, zero)
    level = jnp.minimum(level, basis.filled)
    boundary = Boundary.of(T, level)
    complement = Complement.of(T, boundary, probes, zero, basis.size - level)
    trace = jnp.sum(T.head(level).inverse_diagonal()) + boundary.p1 * boundary.parallel_square()
    logdet, _ = calibrate_logdet(make_run(basis, level, probes), zero)
    return (trace + complement.trace) / T.unit, complement.standard_error, logdet
