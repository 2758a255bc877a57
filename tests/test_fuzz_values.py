"""Bad and extreme numbers: an error from the documented list, or what dense NumPy says."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pnkrylov as pk
from pnkrylov import ciq, hmc, preconditioners

D = 6
KEY = jax.random.key(0)
ROOT = pathlib.Path(__file__).parents[1]


def spd(seed, dtype, size=D):
    root = np.random.default_rng(seed).standard_normal((size, size))
    return (root @ root.T + size * np.eye(size)).astype(dtype)


def vector(seed, dtype, size=D):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def close(found, right, dtype, scale=None):
    """Agreement up to the rounding of a well conditioned problem."""
    right = np.asarray(right, np.float64)
    scale = np.abs(right).max() if scale is None else scale
    tolerance = 1e4 * float(jnp.finfo(dtype).eps) * scale
    np.testing.assert_allclose(np.asarray(found, np.float64), right, rtol=0, atol=tolerance)


# Scales that float32 holds; beyond 1e19 squares overflow in it, and nothing may go wrong by that.
SCALES = st.sampled_from([1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e20, 1e30])


def or_refused(call):
    """The answer, or None for an error of the documented kind."""
    try:
        return call()
    except pk.PnkrylovError as error:
        assert len(str(error)) > 40, "an error without a remedy"
        return None


@pytest.mark.one_precision
@settings(max_examples=12)
@given(seed=st.integers(0, 1000), scale=SCALES, rhs_scale=SCALES)
def test_solve_at_any_scale_is_right_or_refused(dtype, seed, scale, rhs_scale):
    """All steps are taken: the mean is the answer."""
    A, v = spd(seed, dtype), vector(seed, dtype)
    A, v = A * np.asarray(scale, dtype), v * np.asarray(rhs_scale, dtype)
    belief = or_refused(lambda: pk.solve(A, v, key=KEY, num_steps=D))
    exact = np.linalg.solve(A.astype(np.float64), v.astype(np.float64))
    largest = float(jnp.finfo(dtype).max)
    representable = 1e-30 < np.abs(exact).max() < largest / 1e3
    if not representable:
        return
    assert belief is not None, "refused, though the answer is a number of this dtype"
    close(belief.mean, exact, dtype)
    assert np.all(np.isfinite(belief.std()))


@pytest.mark.one_precision
@settings(max_examples=8)
@given(seed=st.integers(0, 1000), scale=SCALES)
def test_inverse_at_any_scale_is_right_or_refused(dtype, seed, scale):
    A = spd(seed, dtype) * np.asarray(scale, dtype)
    belief = pk.inverse(A, key=KEY, num_steps=D, num_probes=2, probe_depth=2)
    exact = np.linalg.inv(A.astype(np.float64))
    close(belief.covariance.diagonal(), np.diagonal(exact), dtype)
    close(belief.trace().value, np.trace(exact), dtype)
    # Up to d roundings of every logarithm.
    close(belief.logdet().value, np.linalg.slogdet(A.astype(np.float64))[1], dtype, scale=100.0)


@settings(max_examples=10)
@given(scale=st.sampled_from([1e-20, 1e-10, 1.0, 1e10, 1e20]), seed=st.integers(0, 1000))
def test_preconditioners_at_any_scale(dtype, scale, seed):
    """Diagonal and multiple of the identity have powers that are exact at any scale."""
    entries = (1 + np.abs(vector(seed, dtype))) * np.asarray(scale, dtype)
    v = vector(seed + 1, dtype)
    P = preconditioners.Diagonal(jnp.asarray(entries))
    close(P.inv_mv(jnp.asarray(v)) * entries, v, dtype)
    close(P.logdet(), np.log(entries.astype(np.float64)).sum(), dtype, scale=300.0)


POISON = st.sampled_from([np.nan, np.inf, -np.inf])


@pytest.mark.one_precision
@settings(max_examples=12)
@given(value=POISON, row=st.integers(0, D - 1), where=st.sampled_from(["A", "v"]))
def test_poison_anywhere_is_named(dtype, value, row, where):
    A, v = spd(0, dtype), vector(0, dtype)
    if where == "A":
        A[row, row] = value
    else:
        v[row] = value
    with pytest.raises(pk.NotFiniteError, match="NaN or infinity"):
        pk.solve(A, v, key=KEY, num_steps=D)


@pytest.mark.one_precision
@settings(max_examples=10)
@given(smallest=st.floats(-100, 0, width=32), seed=st.integers(0, 1000))
def test_an_indefinite_matrix_is_refused_by_its_ritz_value(dtype, smallest, seed):
    """All steps from a random start: the run sees every eigenvalue, also zero."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.standard_normal((D, D)))[0]
    A = (axes * np.array([smallest, 1, 2, 3, 4, 5]) @ axes.T).astype(dtype)
    for call in (
        lambda: pk.solve(A, vector(seed, dtype), key=KEY, num_steps=D),
        lambda: pk.inverse(A, key=KEY, num_steps=D, num_probes=2, probe_depth=2),
    ):
        # Next to zero either sign is rounding: then a huge number is as right as a refusal.
        if smallest < -1e4 * float(jnp.finfo(dtype).eps):
            with pytest.raises(pk.NotPositiveDefiniteError, match="Ritz value"):
                call()


def test_one_dimension(dtype):
    """d = 1: everything is a number, and exact."""
    A, v = np.array([[4.0]], dtype), np.array([2.0], dtype)
    belief = pk.solve(A, v, key=KEY)
    close(belief.mean, [0.5], dtype)
    np.testing.assert_array_equal(belief.std(), [0])
    inverse = pk.inverse(A, key=KEY)
    close(inverse.trace().value, 0.25, dtype)
    close(inverse.logdet().value, np.log(4), dtype)
    close(hmc.condition_number(covariance=jnp.asarray(A)).value, 1.0, dtype)
    np.testing.assert_allclose(
        preconditioners.Dense(jnp.asarray(A)).inv_mv(jnp.asarray(v)), [0.5], rtol=1e-6
    )


def test_bounds_that_are_eigenvalues_are_bounds(dtype):
    """Ritz values reach the ends of the spectrum, and pass them by rounding."""
    A, v = np.diag(np.arange(1, D + 1)).astype(dtype), np.ones(D, dtype)
    bounds = ciq.SpectralBounds.known(1.0, float(D), dtype)
    for method in ("lanczos", "ciq"):
        found = ciq.inv_sqrt_matvec(A, v, bounds=bounds, method=method, rtol=1e-4)
        np.testing.assert_allclose(found.value, np.arange(1, D + 1) ** -0.5, rtol=0, atol=1e-4)
    wrong = ciq.SpectralBounds.known(1.1, float(D), dtype)
    with pytest.raises(ciq.ToleranceNotMetError, match="outside the bounds"):
        ciq.inv_sqrt_matvec(A, v, bounds=wrong)


@pytest.mark.one_precision
def test_nothing_that_goes_well_makes_a_nan(dtype):
    """JAX stops at a NaN: none stands for what is unknown, and failures keep their names."""
    A, v = spd(0, dtype), vector(0, dtype)
    negative = np.diag(np.array([-1, 1, 2, 3, 4, 5])).astype(dtype)
    with jax.debug_nans(True):
        belief = pk.solve(A, v, key=KEY, num_steps=3)
        assert np.all(np.isfinite(belief.std()))
        inverse = pk.inverse(A, key=KEY, num_steps=3, num_probes=2, probe_depth=2)
        assert np.isfinite(inverse.trace().value) and np.isfinite(inverse.logdet().value)
        assert np.all(np.isfinite(inverse.sample(KEY, 2)))
        failed = pk.solve(negative, v, key=KEY, num_steps=D, throw=False)
        assert failed.result == pk.RESULTS.not_positive_definite
        with pytest.raises(pk.NotPositiveDefiniteError):
            ciq.inv_sqrt_matvec(negative, v, key=KEY, method="ciq")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["tests/test_fuzz.py", "tests/test_snippets.py"])
def test_the_suite_runs_under_debug_nans_as_well(file):
    """Bad input, and every snippet of the pages, in a process where JAX stops at every NaN."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", file]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"JAX_DEBUG_NANS": "1"}, capture_output=True,
        text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
