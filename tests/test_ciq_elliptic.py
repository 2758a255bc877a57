"""Elliptic functions against mpmath (50 digits) and scipy.special."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from pnkrylov.ciq import ellipj, ellipjm1, ellipk, ellipkm1
from pnkrylov.ciq.elliptic import ellipj_at_fraction

mpmath.mp.dps = 60

# k'^2 from 1e-16 to 1 - 1e-16, given through the complementary parameter p = 1 - k'^2.
COMPLEMENTS = [1e-16, 1e-14, 1e-12, 1e-9, 1e-6, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-3, 1 - 1e-9, 1 - 1e-16]
TOLERANCE = {"float32": 2e-6, "float64": 1e-12}


def exact_jacobi(u, p):
    """(sn, cn, dn) at m = 1 - p by mpmath, for floats taken as exact."""
    m = 1 - mpmath.mpf(float(p))
    return [mpmath.ellipfun(name, mpmath.mpf(u), m=m) for name in ("sn", "cn", "dn")]


def relative_error(value, exact):
    return abs(float((mpmath.mpf(float(value)) - exact) / exact))


@pytest.mark.parametrize("p", COMPLEMENTS)
def test_complete_integral(p, dtype):
    p = jnp.asarray(p, dtype)
    exact = mpmath.ellipk(1 - mpmath.mpf(float(p)))
    value = ellipkm1(p)
    assert value.dtype == dtype
    assert relative_error(value, exact) <= TOLERANCE[dtype.name]
    scipy_value = scipy.special.ellipkm1(float(p))
    assert abs(float(value) / scipy_value - 1) <= TOLERANCE[dtype.name]


@pytest.mark.parametrize("p", COMPLEMENTS)
@pytest.mark.parametrize("count", [1, 20])
def test_jacobi_at_fractions_of_the_quarter_period(p, count, dtype):
    # These are the points of the quadrature.
    p = jnp.asarray(p, dtype)
    fractions = (np.arange(count) + 0.5) / count
    quarter = mpmath.ellipk(1 - mpmath.mpf(float(p)))
    compiled = jax.jit(lambda p: ellipj_at_fraction(fractions, p))
    for values in (ellipj_at_fraction(fractions, p), compiled(p)):
        for i, fraction in enumerate(fractions):
            exact = exact_jacobi(quarter * mpmath.mpf(float(fraction)), p)
            for value, reference in zip(values, exact, strict=True):
                assert relative_error(value[i], reference) <= TOLERANCE[dtype.name]


@pytest.mark.parametrize("p", COMPLEMENTS)
def test_jacobi_for_any_argument(p, dtype):
    p = jnp.asarray(p, dtype)
    quarter = float(mpmath.ellipk(1 - mpmath.mpf(float(p))))
    u = jnp.asarray(np.linspace(-4.3, 4.3, 10) * quarter, dtype)
    sn, cn, dn = jax.vmap(ellipjm1, (0, None))(u, p)
    for i in range(len(u)):
        ref_sn, ref_cn, ref_dn = exact_jacobi(float(u[i]), p)
        # A rounding of u changes a function f by |u f'/f| roundings: no algorithm can do better.
        slopes = (ref_cn * ref_dn / ref_sn, ref_sn * ref_dn / ref_cn, ref_sn * ref_cn / ref_dn)
        references = (ref_sn, ref_cn, ref_dn)
        for value, reference, slope in zip((sn[i], cn[i], dn[i]), references, slopes, strict=True):
            condition = max(1.0, abs(float(u[i]) * float(slope)))
            assert relative_error(value, reference) <= TOLERANCE[dtype.name] * condition


def test_against_scipy_where_scipy_is_accurate(dtype):
    # scipy takes m itself, so it is only a reference away from m = 1.
    rng = np.random.default_rng(0)
    u, m = rng.uniform(-3, 3, 50).astype(dtype), rng.uniform(0, 0.9, 50).astype(dtype)
    reference = scipy.special.ellipj(u.astype(np.float64), m.astype(np.float64))[:3]
    values = ellipj(jnp.asarray(u), jnp.asarray(m))
    for value, exact in zip(values, reference, strict=True):
        # Absolute: the zeros of cn lie inside the range.
        np.testing.assert_allclose(value, exact, rtol=0, atol=10 * TOLERANCE[dtype.name])
    exact = scipy.special.ellipk(m.astype(np.float64))
    np.testing.assert_allclose(ellipk(jnp.asarray(m)), exact, rtol=5 * TOLERANCE[dtype.name])


@given(st.floats(-16, 0), st.floats(-4, 4))
@settings(max_examples=10)
def test_identities_and_no_nan(log_p, periods):
    for dtype in (jnp.float32, jnp.zeros(()).dtype):
        p = jnp.asarray(10.0**log_p, dtype)
        u = jnp.asarray(periods, dtype) * ellipkm1(p)
        sn, cn, dn = ellipjm1(u, p)
        assert np.all(np.isfinite([sn, cn, dn, ellipkm1(p)]))
        eps = float(jnp.finfo(dtype).eps)
        assert abs(float(sn**2 + cn**2) - 1) <= 8 * eps
        assert abs(float(dn**2 - cn**2 - p * sn**2)) <= 8 * eps


def test_limits(dtype):
    zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
    assert float(ellipkm1(one)) == pytest.approx(np.pi / 2, rel=TOLERANCE[dtype.name])
    assert np.isposinf(ellipkm1(zero))
    assert np.isnan(ellipkm1(-one))
    assert [float(x) for x in ellipjm1(zero, one / 2)] == [0, 1, 1]
    u = 0.7 * one
    for value, exact in zip(
        ellipjm1(u, zero), (np.tanh(0.7), *2 * [1 / np.cosh(0.7)]), strict=True
    ):
        assert float(value) == pytest.approx(exact, rel=TOLERANCE[dtype.name])
    for value, exact in zip(ellipjm1(u, one), (np.sin(0.7), np.cos(0.7), 1), strict=True):
        assert float(value) == pytest.approx(exact, rel=TOLERANCE[dtype.name])
    assert all(np.isnan(x) for x in ellipjm1(u, -one))


@pytest.mark.parametrize("p", [1e-8, 0.3, 1.0])
@pytest.mark.parametrize("u", [0.0, 0.7, -2.0])
def test_derivatives(u, p):
    dtype = jnp.zeros(()).dtype
    rtol = 1e-10 if dtype == jnp.float64 else 1e-4
    u, p = jnp.asarray(u, dtype), jnp.asarray(p, dtype)
    sn, cn, dn = ellipjm1(u, p)
    expected = (cn * dn, -sn * dn, -(1 - p) * sn * cn)
    for i in range(3):
        for grad in (jax.grad, jax.jacfwd):
            value = grad(lambda u, i=i: ellipjm1(u, p)[i])(u)
            np.testing.assert_allclose(value, expected[i], rtol=rtol, atol=1e-7)
    slope = mpmath.diff(lambda q: mpmath.ellipk(1 - q), float(p))
    np.testing.assert_allclose(jax.grad(ellipkm1)(p), float(slope), rtol=rtol)


def test_fractions_must_lie_inside():
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        ellipj_at_fraction(np.array([0.5, 1.0]), jnp.asarray(0.5))


def test_shapes_and_dtypes_are_checked():
    with pytest.raises(ValueError, match="share a shape"):
        ellipjm1(jnp.ones(2), jnp.ones((2, 1)))
