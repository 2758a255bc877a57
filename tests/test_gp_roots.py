"""Square roots of K + noise, and what other packages are given for a factor, against dense ones."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpr_shapes import all_shapes
from pnkrylov.errors import NotPositiveDefiniteError, PnkrylovError
from pnkrylov.gp.kernels import RBF
from pnkrylov.gp.noisy import factor
from pnkrylov.gp.roots import square_root
from pnkrylov.operators import as_operator

N = 30
NOISE = 0.05


def matrix():
    """A kernel matrix plus noise, in float64, with its eigenvectors."""
    X = np.random.default_rng(0).uniform(size=(N, 2))
    squares = ((X[:, None] - X[None]) ** 2).sum(-1)
    dense = np.exp(-squares / (2 * 0.4**2)) + NOISE * np.eye(N)
    return X, dense, np.linalg.eigh(dense)


def power(exponent):
    _, _, (eigenvalues, vectors) = matrix()
    return (vectors * eigenvalues**exponent) @ vectors.T


def rows_of_interest():
    """A random row, one in an invariant space of two dimensions, and zero."""
    _, _, (_, vectors) = matrix()
    random = np.random.default_rng(1).standard_normal(N)
    return np.stack([random, vectors[:, 3] - 2 * vectors[:, -1], np.zeros(N)])


def eager_roots(operator, rows, forward=False, rtol=1e-9, max_steps=N):
    floor, ceiling = (jnp.asarray(value, rows.dtype) for value in (NOISE, N * (1 + NOISE)))
    return square_root(
        operator, rows, floor, ceiling, forward=forward, rtol=rtol, max_steps=max_steps
    )


roots = jax.jit(eager_roots, static_argnames=("forward", "rtol", "max_steps"))


@pytest.mark.parametrize("forward", [False, True], ids=["inverse root", "root"])
def test_roots_match_the_dense_ones(forward, dtype):
    operator = as_operator(jnp.asarray(matrix()[1], dtype))
    rows = rows_of_interest()
    rtol = 1e-4 if dtype == jnp.float32 else 1e-9
    values = np.asarray(roots(operator, jnp.asarray(rows, dtype), forward, rtol), np.float64)
    exact = rows @ power(0.5 if forward else -0.5)
    errors, lengths = (np.linalg.norm(array, axis=1) for array in (values - exact, exact))
    assert np.all(errors <= 2 * rtol * lengths)


def test_an_early_end_keeps_the_tolerance_and_never_lengthens(dtype):
    operator = as_operator(jnp.asarray(matrix()[1], dtype))
    rows = np.random.default_rng(2).standard_normal((20, N))
    rows[:10] = rows[:10] @ power(1)  # smooth ones: nearly all their length is seen early
    values = np.asarray(roots(operator, jnp.asarray(rows, dtype), False, 0.03), np.float64)
    exact = rows @ power(-0.5)
    errors, lengths = (np.linalg.norm(array, axis=1) for array in (values - exact, exact))
    assert np.all(errors <= 0.03 * lengths)
    assert np.max(errors / lengths) > 1e-4  # it did end early
    rounding = 100 * float(jnp.finfo(dtype).eps)
    assert np.all(np.linalg.norm(values, axis=1) <= lengths * (1 + rounding))


def test_too_few_steps_are_an_error(dtype):
    operator = as_operator(jnp.asarray(matrix()[1], dtype))
    rows = jnp.asarray(rows_of_interest(), dtype)
    with pytest.raises(PnkrylovError, match=r"rtol=1e-05 within max_steps=3"):
        eager_roots(operator, rows, False, 1e-5, 3)
    failed = np.isnan(np.asarray(roots(operator, rows, False, 1e-5, 3))).all(axis=1)
    np.testing.assert_array_equal(failed, [True, False, False])  # two are simple enough


def test_an_indefinite_matrix_is_an_error(dtype):
    # One negative eigenvalue, which the rows hardly touch: the quadrature stays positive.
    dense = np.diag(np.linspace(1.0, 2.0, N))
    dense[0, 0] = -0.5
    rows = np.random.default_rng(6).standard_normal((1, N))
    rows[0, 0] = 0.01
    rows = jnp.asarray(np.repeat(rows, 3, axis=0), dtype)
    with pytest.raises(PnkrylovError, match="check that the kernel is positive semidefinite"):
        eager_roots(as_operator(jnp.asarray(dense, dtype)), rows)


def test_batches_run_as_one_block_and_operators_one_by_one(dtype):
    dense = jnp.asarray(matrix()[1], dtype)
    rows = jnp.asarray(rows_of_interest(), dtype)
    operator = as_operator(dense)
    rtol = 1e-4 if dtype == jnp.float32 else 1e-9
    one_by_one = jax.vmap(lambda row: roots(operator, row[None], False, rtol)[0])
    exact = rows_of_interest() @ power(-0.5)
    np.testing.assert_allclose(one_by_one(rows), exact, rtol=20 * rtol, atol=20 * rtol)
    shapes = set(all_shapes(jax.make_jaxpr(one_by_one)(rows).jaxpr))
    assert (N, 3, N) in shapes and (3, N, 1, N) not in shapes

    def scaled(scale):
        return roots(as_operator(scale * dense), rows, False, rtol)

    scales = jnp.asarray([1.0, 4.0], dtype)
    both = jax.vmap(scaled)(scales)
    np.testing.assert_allclose(both, np.stack([exact, exact / 2]), rtol=20 * rtol, atol=20 * rtol)


def make(hyper, dtype, **options):
    lengthscale, variance, noise = hyper
    X = jnp.asarray(matrix()[0], dtype)
    kernel = RBF(lengthscale, variance)
    return factor(kernel, X, jnp.full((N,), noise, dtype), key=jax.random.key(3), **options)


def dense_covariance(hyper, dtype):
    lengthscale, variance, noise = hyper
    X = jnp.asarray(matrix()[0], dtype)
    squares = jnp.sum((X[:, None] - X[None]) ** 2, axis=-1)
    return variance * jnp.exp(-squares / (2 * lengthscale**2)) + noise * jnp.eye(N, dtype=dtype)


HYPER = (0.4, 1.3, 0.05)


@pytest.mark.one_precision
@pytest.mark.parametrize("num_steps", [8, pytest.param(N, marks=pytest.mark.slow)])
def test_derivatives_are_those_of_the_dense_formulas(num_steps):
    dtype = jnp.dtype(jnp.float64)
    y, w = (jnp.asarray(row, dtype) for row in np.random.default_rng(5).standard_normal((2, N)))
    hyper = tuple(jnp.asarray(value, dtype) for value in HYPER)
    signs = jnp.sqrt(jnp.asarray(N, dtype)) * jnp.eye(N, dtype=dtype)
    mixture = jnp.asarray([1.0, 0.03, -0.1, 2.0], dtype)  # comparable derivatives

    def mine(hyper, y):
        made = make(hyper, dtype, num_steps=num_steps)
        # With n orthogonal probes the estimate of the trace has no error, whatever is resolved.
        made = eqx.tree_at(lambda made: made.probes, made, signs)
        white = made.inverse_root(y[None], transpose=False)
        weights = made.inverse_root(white, transpose=True)[0]
        columns = made.root(jnp.eye(N, dtype=dtype))  # sum_j (w.L e_j)^2 = w.A w
        values = (made.half_logdet(), jnp.sum(white**2), weights @ w, jnp.sum((columns @ w) ** 2))
        return mixture @ jnp.stack(values), (jnp.stack(values), made.belief.logdet())

    def dense(hyper, y):
        A = dense_covariance(hyper, dtype)
        solved = jnp.linalg.solve(A, y)
        values = (jnp.linalg.slogdet(A)[1] / 2, y @ solved, solved @ w, w @ A @ w)
        return mixture @ jnp.stack(values), jnp.stack(values)

    with_derivatives = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    (_, (values, logdet)), derivatives = jax.jit(with_derivatives(mine))(hyper, y)
    (_, expected), expected_derivatives = jax.jit(with_derivatives(dense))(hyper, y)
    np.testing.assert_allclose(values[1:], expected[1:], rtol=1e-8)
    np.testing.assert_allclose(values[0], logdet.value / 2)
    assert abs(values[0] - expected[0]) <= 2 * logdet.standard_error + 1e-9
    for found, wanted in zip(
        jax.tree.leaves(derivatives), jax.tree.leaves(expected_derivatives), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_the_noise_must_be_positive_and_of_the_same_dtype(dtype):
    with pytest.raises(NotPositiveDefiniteError, match="noise must be positive; entry 0"):
        make((0.4, 1.0, 0.0), dtype)
    with pytest.raises(TypeError, match="noise has dtype float16"):
        factor(RBF(), jnp.zeros((3, 1), dtype), jnp.ones((3,), jnp.float16))
