"""The quadrature rule against the inverse square root itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from pnkrylov.ciq import quadrature
from pnkrylov.ciq.quadrature import num_quadrature_points

CONDITIONS = [1.0, 1e1, 1e3, 1e8, 1e16]


def largest_error(rule, lower, upper):
    """Largest relative error on a fine grid, in NumPy float64 whatever the rule's dtype."""
    x = np.geomspace(lower, upper, 3001)
    shifts, weights = np.asarray(rule.shifts, np.float64), np.asarray(rule.weights, np.float64)
    return np.max(np.abs((weights / (shifts + x[:, None])).sum(axis=1) * np.sqrt(x) - 1))


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("rtol", [1e-1, 1e-4, 1e-8, 1e-11])
def test_meets_the_tolerance_on_the_whole_interval(condition, rtol, dtype):
    eps = float(jnp.finfo(dtype).eps)
    if rtol < 20 * eps:
        pytest.skip("below the rounding of the dtype")
    lower, upper = jnp.asarray(3.0 / condition, dtype), jnp.asarray(3.0, dtype)
    rule = quadrature(lower, upper, rtol)
    assert rule.shifts.dtype == dtype
    assert largest_error(rule, float(lower), float(upper)) <= rtol + 20 * eps
    assert np.all(np.asarray(rule.weights) > 0)
    assert np.all(np.diff(np.asarray(rule.shifts)) > 0)


def test_formula_of_the_paper_where_scipy_is_accurate():
    lower, upper, count = 0.02, 5.0, 7
    dtype = jnp.zeros(()).dtype
    rule = quadrature(jnp.asarray(lower, dtype), jnp.asarray(upper, dtype), num_points=count)
    m = 1 - lower / upper
    quarter = scipy.special.ellipk(m)
    sn, cn, dn, _ = scipy.special.ellipj((np.arange(count) + 0.5) / count * quarter, m)
    rtol = 1e-12 if dtype == jnp.float64 else 2e-5
    np.testing.assert_allclose(rule.shifts, lower * (sn / cn) ** 2, rtol=rtol)
    weights = 2 * np.sqrt(lower) / (np.pi * count) * quarter * dn / cn**2
    np.testing.assert_allclose(rule.weights, weights, rtol=rtol)


def test_geometric_convergence():
    # Each point buys the rate of METHOD section 7: the errors of Q and Q + 4 differ by its power.
    condition = 1e6
    errors = [
        largest_error(quadrature(1.0, condition, num_points=q, dtype=jnp.zeros(()).dtype), 1, 1e6)
        for q in (4, 8)
    ]
    rate = 2 * np.pi**2 / (np.log(condition) + 3)
    assert errors[1] / errors[0] == pytest.approx(np.exp(-4 * rate), rel=0.5)


def test_under_jit_and_vmap(dtype):
    lower = jnp.asarray([0.1, 0.01], dtype)
    upper = jnp.asarray([1.0, 2.0], dtype)
    rules = jax.jit(jax.vmap(lambda a, b: quadrature(a, b, num_points=6)))(lower, upper)
    for i in range(2):
        one = quadrature(lower[i], upper[i], num_points=6)
        np.testing.assert_allclose(rules.shifts[i], one.shifts, rtol=1e-5)
        np.testing.assert_allclose(rules.weights[i], one.weights, rtol=1e-5)


def test_inside_jit_the_default_serves_every_condition_number(dtype):
    rule = jax.jit(lambda a, b: quadrature(a, b, 1e-3))(
        jnp.asarray(1e-6, dtype), jnp.ones((), dtype)
    )
    assert rule.num_points == num_quadrature_points(1 / float(jnp.finfo(dtype).eps), 1e-3)
    assert largest_error(rule, 1e-6, 1.0) <= 1e-3


def test_relative_error_method(dtype):
    rule = quadrature(jnp.asarray(0.1, dtype), jnp.asarray(1.0, dtype), num_points=2)
    x = jnp.asarray([0.2, 0.7], dtype)
    shifts, weights = np.asarray(rule.shifts), np.asarray(rule.weights)
    expected = [np.sum(weights / (shifts + v)) * np.sqrt(v) - 1 for v in np.asarray(x)]
    np.testing.assert_allclose(rule.relative_error(x), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0, 1e-4), "0 < lmin"),
        ((2.0, 1.0, 1e-4), "lmin=2.0"),
        ((0.5, 1.0, 1.5), "rtol"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        quadrature(*arguments)


def test_bad_number_of_points():
    with pytest.raises(ValueError, match="num_points"):
        quadrature(0.5, 1.0, num_points=0)
