"""The Lanczos run: its defining equations, breakdowns, drivers, interruption, scales."""

import functools
import os
import signal
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import CountingOperator, count_compilations, no_type_checker
from oracles import SPECTRA, with_spectrum
from pnkrylov import krylov
from pnkrylov.krylov import Interruptible, continue_run, lanczos
from pnkrylov.operators import as_operator


def normal(size, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def assert_lanczos(matrix, basis, *, scale=1.0):
    """A Q = Q T + beta q e^T and orthonormal rows, on the filled rows; the rest is zero.

    Orthonormality: after two passes a Gram entry is the rounding of one subtraction and two dot
    products of unit vectors, each a few eps (measured: 3 eps at d = 20, 6 eps at d = 200); 10 eps
    is allowed. The recurrence is accurate to the rounding of a product, whose error is about
    eps ||A||_F / sqrt(d) per row and dot product; (10 + sqrt(d)) eps ||A||_2 is allowed.
    """
    eps = float(jnp.finfo(basis.dtype).eps)
    size, filled = basis.size, int(basis.filled)
    matrix = np.asarray(matrix, np.float64) / scale
    rows = np.asarray(basis.vectors, np.float64)
    T = np.asarray(basis.tridiagonal(), np.float64) / scale
    gram = rows @ rows.T
    expected = np.diag((np.arange(basis.num_rows) < filled).astype(float))
    np.testing.assert_allclose(gram, expected, rtol=0, atol=10 * eps)
    following = np.asarray(basis.next_vector, np.float64)
    assert np.abs(rows @ following).max() <= 10 * eps
    last = np.zeros(basis.num_rows)
    last[max(filled - 1, 0)] = float(basis.residual_norm()) / scale
    residual = matrix @ rows.T - rows.T @ T - np.outer(following, last)
    assert np.linalg.norm(residual, 2) <= (10 + size**0.5) * eps * np.linalg.norm(matrix, 2)
    assert not rows[filled:].any()
    assert not np.asarray(basis.alpha)[filled:].any()


@pytest.mark.parametrize("size", [1, 2, 3, 20, 200])
@pytest.mark.parametrize("spectrum", ["bulk+outliers", "power-law-2", "exponential", "kernel-5d"])
def test_the_lanczos_relation_and_orthonormal_rows(spectrum, size, dtype):
    matrix = SPECTRA[spectrum](size)[0].astype(dtype)
    start = normal(size, dtype)
    for steps in sorted({1, (size + 1) // 2, size}):
        basis = lanczos(matrix, start, steps)
        assert basis.dtype == dtype and basis.num_rows == steps
        assert_lanczos(matrix, basis)
        # In float32 the last few directions of a wide spectrum are lost in rounding.
        assert int(basis.filled) == steps or (dtype == jnp.float32 and int(basis.filled) >= 190)
        first = start.astype(np.float64) / np.linalg.norm(start.astype(np.float64))
        np.testing.assert_allclose(basis.vectors[0], first, atol=4 * jnp.finfo(dtype).eps)
        np.testing.assert_allclose(basis.start_norm, np.linalg.norm(start), rtol=1e-6)
    if int(basis.filled) == size:
        assert float(basis.residual_norm()) == 0 and not np.any(basis.next_vector)


@pytest.mark.parametrize("driver", ["compiled", "host"])
def test_the_identity_breaks_down_after_one_step(driver, dtype):
    basis = lanczos(np.eye(20, dtype=dtype), normal(20, dtype), 20, driver=driver)
    assert int(basis.filled) == 1 and float(basis.residual_norm()) == 0
    assert_lanczos(np.eye(20), basis)
    np.testing.assert_allclose(basis.alpha[0], 1, rtol=4 * jnp.finfo(dtype).eps)
    trimmed = basis.trim()
    assert trimmed.num_rows == 1
    np.testing.assert_array_equal(trimmed.vectors, basis.vectors[:1])


def test_breakdowns_under_jit(dtype):
    """A start inside an invariant subspace of dimension r stops the run at r, for any m."""
    # Every entry is a sum of a few powers of two: the matrix has exactly four eigenvalues.
    eigenvectors = scipy.linalg.hadamard(16) / 4.0
    matrix = ((eigenvectors * np.repeat([1.0, 2.0, 5.0, 3.0], 4)) @ eigenvectors.T).astype(dtype)
    run = jax.jit(lambda matrix, start: lanczos(matrix, start, 16))
    generic, inside = normal(16, dtype), eigenvectors[:, 9] + eigenvectors[:, 14]
    for start, rank in ((generic, 4), (inside, 2), (eigenvectors[:, 9], 1), (0 * generic, 0)):
        basis = run(matrix, jnp.asarray(start.astype(dtype)))
        assert int(basis.filled) == rank
        assert float(basis.residual_norm()) == 0
        assert_lanczos(matrix, basis)
    # Where the norm of A lies outside the subspace, its rounding may carry the run on; the
    # coupling then is at the level of that rounding, and everything that must hold still does.
    basis = run(matrix, jnp.asarray((eigenvectors[:, 3] + eigenvectors[:, 6]).astype(dtype)))
    assert_lanczos(matrix, basis)
    assert float(basis.beta[1]) <= 50 * 5 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("driver", ["compiled", "host"])
def test_a_continued_run_equals_a_longer_one(driver, dtype):
    # A few outliers: their Ritz values converge early, where roundings would be amplified most.
    matrix = SPECTRA["power-law-1"](100)[0].astype(dtype)
    start = normal(100, dtype)
    longer = lanczos(matrix, start, 70, driver=driver)
    first = lanczos(matrix, start, 20, driver=driver)
    before = jax.tree.map(np.array, first)
    continued = continue_run(first, matrix, 15, driver=driver)
    continued = continue_run(continued, matrix, 35, driver=driver)
    # The caller's basis is intact, although the steps work in place.
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, first))
    assert_lanczos(matrix, continued)
    # Only the padding differs, so that sums may be taken in another order: rounding level. A
    # Lanczos run amplifies it, in float32 beyond use after forty steps: the first are compared.
    compared = 70 if dtype == jnp.float64 else 25
    tolerance = {"float32": 1e-3, "float64": 1e-7}[dtype.name]
    for name in ("vectors", "alpha", "beta"):
        a, b = getattr(continued, name)[:compared], getattr(longer, name)[:compared]
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.max(jnp.abs(b))))
    assert int(continued.filled) == 70


def test_a_run_is_continued_after_its_breakdown(dtype):
    basis = lanczos(np.eye(5, dtype=dtype), normal(5, dtype), 2)
    continued = continue_run(basis, np.eye(5, dtype=dtype), 3)
    assert continued.num_rows == 5 and int(continued.filled) == 1
    assert_lanczos(np.eye(5), continued)


def test_the_host_driver_equals_the_compiled_one(dtype):
    matrix, start = SPECTRA["power-law-1"](60)[0].astype(dtype), normal(60, dtype)
    compiled = lanczos(matrix, start, 40, driver="compiled")
    host = lanczos(matrix, start, 40, driver="host")
    assert compiled.driver == "compiled" and host.driver == "host"
    assert_lanczos(matrix, host)
    tolerance = {"float32": 1e-3, "float64": 1e-9}[dtype.name]
    compared = 40 if dtype == jnp.float64 else 20
    for name in ("vectors", "alpha", "beta"):
        a, b = getattr(host, name)[:compared], getattr(compiled, name)[:compared]
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.max(jnp.abs(b))))


def test_the_automatic_driver_times_a_callable(monkeypatch):
    """Slow products stay on the host, quick ones move into the compiled loop; both are right."""
    # Far above what a quick step takes on a busy machine.
    monkeypatch.setattr(krylov, "_HOST_SECONDS_PER_STEP", 0.1)
    matrix = with_spectrum(np.geomspace(1, 10, 12), 0).astype(np.float32)
    start = normal(12, np.float32)

    def quick(vector):
        return matrix @ vector

    def slow(vector):
        def product(vector):
            time.sleep(0.15)
            return matrix @ np.asarray(vector)

        return jax.pure_callback(product, vector, vector)

    for product, driver in ((slow, "host"), (quick, "compiled")):
        basis = lanczos(product, start, 8)
        assert basis.driver == driver
        assert_lanczos(matrix, basis)
    assert lanczos(matrix, start, 8).driver == "compiled"
    # NumPy code gains nothing from a compiled loop, however quick it is.
    assert lanczos(CountingOperator(matrix), start, 8).driver == "host"


@pytest.mark.parametrize("exponent", [-30, -15, 15, 30])
def test_extreme_scales(exponent, dtype):
    """Neither the operator nor the start vector may be of order one; float32 ends at 1e+-38."""
    scale = 10.0**exponent
    matrix = with_spectrum(np.geomspace(1, 30, 20), 0)
    start = normal(20, np.float64)
    reference = lanczos(matrix.astype(dtype), jnp.asarray(start, dtype), 12)
    for operator_scale, start_scale in ((scale, 1.0), (1.0, scale), (scale, 1 / scale)):
        scaled = (matrix * operator_scale).astype(dtype)
        basis = lanczos(scaled, jnp.asarray(start * start_scale, dtype), 12)
        assert int(basis.filled) == 12
        assert_lanczos(scaled, basis, scale=operator_scale)
        norm = np.linalg.norm(start) * start_scale
        np.testing.assert_allclose(float(basis.start_norm), norm, rtol=1e-5)
        tolerance = {"float32": 1e-3, "float64": 1e-10}[dtype.name]
        expected = np.asarray(reference.alpha, np.float64) * operator_scale
        np.testing.assert_allclose(np.asarray(basis.alpha, np.float64), expected, rtol=tolerance)


def test_the_start_and_the_product_may_be_pytrees(dtype):
    matrix = with_spectrum(np.geomspace(1, 10, 7), 1).astype(dtype)
    like = {"a": jnp.asarray(normal(3, dtype)), "b": [jnp.asarray(normal((2, 2), dtype, 1))]}
    A = jnp.asarray(matrix)

    def product(tree):
        flat = A @ jnp.concatenate([tree["a"], tree["b"][0].reshape(-1)])
        return {"a": flat[:3], "b": [flat[3:].reshape(2, 2)]}

    flat = jnp.concatenate([like["a"], like["b"][0].reshape(-1)])
    tree_basis, basis = lanczos(product, like, 5), lanczos(matrix, flat, 5)
    assert_lanczos(matrix, tree_basis)
    np.testing.assert_allclose(tree_basis.alpha, basis.alpha, rtol=1e-4)
    continued = continue_run(tree_basis, as_operator(product, like=like), 2)
    assert_lanczos(matrix, continued)


def test_ctrl_c_returns_the_shorter_basis(dtype):
    matrix, start = with_spectrum(np.geomspace(1, 50, 40), 0).astype(dtype), normal(40, dtype)

    def interrupt(count):
        if count == 7:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    operator = CountingOperator(matrix, interrupt)
    with pytest.warns(RuntimeWarning, match="interrupted from the keyboard after 7 of 40 steps"):
        basis = lanczos(operator, start, 40, driver="host")
    assert signal.getsignal(signal.SIGINT) is handler
    assert basis.num_rows == int(basis.filled) == operator.products == 7
    assert_lanczos(matrix, basis)
    # What was paid for is not lost.
    operator.before_product = None
    assert_lanczos(matrix, continue_run(basis, operator, 33, driver="host"))
    assert operator.products == 40


def test_the_second_ctrl_c_interrupts_at_once():
    # Shells let their background jobs ignore SIGINT: set what a foreground process has.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Interruptible() as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupt.requested
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_in_the_product_restores_the_handler():
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), Interruptible():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("driver", ["compiled", "host"])
def test_new_values_do_not_recompile(driver, dtype):
    def run(seed):
        matrix = jnp.asarray(with_spectrum(np.geomspace(1, 9, 11), seed).astype(dtype))
        start = jnp.asarray(normal(11, dtype, seed))
        return lanczos(lambda v: matrix @ v, start, 9, driver=driver)

    run(0)
    with count_compilations() as compiled:
        bases = [run(1), run(2)]
    assert not compiled
    assert not np.array_equal(bases[0].alpha, bases[1].alpha)
    with count_compilations() as compiled:
        lanczos(as_operator(np.eye(13, dtype=dtype)), normal(13, dtype), 9, driver=driver)
    assert compiled  # a new shape is a new program: the counter counts


def test_vmap_over_starts_equals_a_loop(dtype):
    matrix = with_spectrum(np.geomspace(1, 20, 15), 0).astype(dtype)
    starts = jnp.asarray(normal((4, 15), dtype)).at[2].set(0)
    batch = jax.vmap(lambda start: lanczos(matrix, start, 9))(starts)
    for index, start in enumerate(starts):
        one = lanczos(matrix, start, 9)
        same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-3)
        jax.tree.map(lambda a, b, i=index, same=same: same(a[i], b), batch, one)
        assert_lanczos(matrix, jax.tree.map(lambda a, i=index: a[i], batch))
    np.testing.assert_array_equal(batch.filled, [9, 9, 0, 9])


def test_vmap_over_operators(dtype):
    matrices = np.stack([with_spectrum(np.geomspace(1, 20, 15), s) for s in range(3)]).astype(dtype)
    start = jnp.asarray(normal(15, dtype))
    batch = jax.vmap(lambda matrix: lanczos(matrix, start, 9))(jnp.asarray(matrices))
    for index in range(3):
        assert_lanczos(matrices[index], jax.tree.map(lambda a, i=index: a[i], batch))


def test_the_progress_bar(capsys):
    matrix, start = np.diag(np.arange(1, 13)).astype(np.float32), normal(12, np.float32)
    basis = lanczos(matrix, start, 10, progress=True)
    shown = capsys.readouterr().err
    assert "Lanczos" in shown and "10/10" in shown
    assert basis.driver == "host"
    lanczos(matrix, start, 10, driver="host")
    assert capsys.readouterr().err == ""


def test_mistakes_have_their_own_messages():
    matrix, start = np.eye(3, dtype=np.float32), np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"num_steps=0 must be at least 1"):
        lanczos(matrix, start, 0)
    with pytest.raises(ValueError, match=r"num_steps=4 exceeds the dimension d=3.*Use at most 3"):
        lanczos(matrix, start, 4)
    basis = lanczos(matrix, start, 2)
    with pytest.raises(ValueError, match=r"num_steps=2 after the 2 already taken.*Use at most 1"):
        continue_run(basis, matrix, 2)
    with pytest.raises(ValueError, match=r"A has 4 rows but the basis has vectors of length 3"):
        continue_run(basis, as_operator(np.eye(4, dtype=np.float32)), 1)
    with (
        no_type_checker(),
        pytest.raises(ValueError, match=r"driver='fast' is unknown: use 'auto', 'compiled' or"),
    ):
        lanczos(matrix, start, 2, driver="fast")
    for options in ({"driver": "host"}, {"progress": True}):
        with pytest.raises(ValueError, match=r"driver='host' and progress=True need concrete"):
            jax.jit(lambda v, options=options: lanczos(matrix, v, 2, **options))(start)


@settings(max_examples=25)
@given(
    exponents=st.lists(st.floats(-3, 3), min_size=8, max_size=8),
    repeat=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_any_spectrum(dtype, exponents, repeat, seed):
    """Repeated eigenvalues, clusters, wide ranges: the relation holds and nothing is lost."""
    eigenvalues = 10.0 ** np.asarray(exponents)
    eigenvalues[:repeat] = eigenvalues[0]
    matrix = with_spectrum(eigenvalues, seed).astype(dtype)
    basis = _run(matrix, jnp.asarray(normal(8, dtype, seed)))
    assert_lanczos(matrix, basis)
    if repeat > 1:
        # At most one vector per distinct eigenvalue; rounding may add some of negligible coupling.
        distinct = 8 - repeat + 1
        beyond = np.asarray(basis.beta)[distinct - 1 : int(basis.filled)]
        eps = float(jnp.finfo(dtype).eps)
        smallest = np.min(beyond, initial=np.inf)
        assert int(basis.filled) <= distinct or smallest <= 100 * eps * eigenvalues.max()


_run = eqx.filter_jit(lambda matrix, start: lanczos(matrix, start, 8))
