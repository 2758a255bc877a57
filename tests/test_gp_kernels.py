"""Kernels against formulas in NumPy, and products of the kernel operator against dense ones."""

import equinox as eqx
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import pnkrylov as pk
from jaxpr_shapes import all_shapes
from pnkrylov.errors import NotFiniteError
from pnkrylov.gp.kernels import (
    RBF,
    Kernel,
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
    squared_distances,
)
from pnkrylov.gp.operator import KernelOperator, kernel_operator

N = 37


def points(shape, dtype, seed=0):
    """Random points, two of them equal."""
    array = np.random.default_rng(seed).standard_normal(shape)
    array[5] = array[20]
    return jnp.asarray(array, dtype)


def scaled_distances(X1, X2, lengthscale):
    """Naive and in float64."""
    X1, X2 = (np.asarray(X, np.float64).reshape(len(X), -1) for X in (X1, X2))
    return np.sqrt((((X1[:, None] - X2[None]) / np.asarray(lengthscale)) ** 2).sum(-1))


def matern(order):
    """The general formula, Rasmussen and Williams (2006) equation 4.14."""

    def formula(r):
        scaled = np.sqrt(2 * order) * np.where(r == 0, 1, r)
        bessel = scipy.special.kv(order, scaled) * scaled**order
        return np.where(r == 0, 1, 2 ** (1 - order) / scipy.special.gamma(order) * bessel)

    return formula


FORMULAS = {
    RBF: lambda r: np.exp(-(r**2) / 2),
    Matern12: matern(0.5),
    Matern32: matern(1.5),
    Matern52: matern(2.5),
    RationalQuadratic: lambda r: (1 + r**2 / 1.4) ** -0.7,
}


def make(family, lengthscale, variance=1.7):
    extra = {"mixture": 0.7} if family is RationalQuadratic else {}
    return family(lengthscale=lengthscale, variance=variance, **extra)


def rounding(dtype):
    return dict(rtol=200 * jnp.finfo(dtype).eps, atol=200 * float(jnp.finfo(dtype).eps))


def dense(operator):
    return np.asarray(operator.as_matrix(), np.float64)


@pytest.mark.parametrize("shape", [(N,), (N, 3), (N, 20)], ids=["scalars", "short", "long"])
@pytest.mark.parametrize("family", FORMULAS, ids=lambda family: family.__name__)
def test_kernels_match_their_formulas(family, shape, dtype):
    lengthscale = np.linspace(0.5, 2, shape[1]) if shape[1:] == (3,) else 1.3
    X, Y = points(shape, dtype), points(shape, dtype, seed=1)[:8]
    kernel = make(family, lengthscale)
    expected = 1.7 * FORMULAS[family](scaled_distances(Y, X, lengthscale))
    matrix, diagonal = kernel.matrix(Y, X), kernel.diagonal(X)
    assert matrix.dtype == diagonal.dtype == dtype
    # Of the kernels here the exponential feels rounding of the squares most, at small distances.
    np.testing.assert_allclose(matrix, expected, **rounding(dtype))
    np.testing.assert_array_equal(diagonal, np.full(N, 1.7, dtype))


@pytest.mark.parametrize("coordinates", [1, 3, 20])
def test_equal_points_are_perfectly_correlated(coordinates, dtype):
    # Far from the origin: there the matrix product cancels.
    X = points((N, coordinates), dtype) + jnp.asarray(30, dtype)
    matrix = np.asarray(Matern12().matrix(X, X))
    np.testing.assert_array_equal(matrix[5, 20], 1)
    np.testing.assert_array_equal(np.diagonal(matrix), 1)
    assert np.sum(matrix == 1) == N + 2


def test_near_points_are_told_apart_in_low_dimension():
    # 1000 points on a line, spacing 1e-3, 1e3 away: |x|^2 eps is a hundred lengthscales there.
    X = (np.arange(1000, dtype=np.float32) / 1024 + 1000).astype(np.float32)
    matrix = Matern12(lengthscale=0.01).matrix(jnp.asarray(X), jnp.asarray(X[:5]))
    expected = np.exp(-scaled_distances(X, X[:5], 0.01))
    np.testing.assert_allclose(matrix, expected, rtol=1e-5, atol=1e-7)


def test_squared_distances_of_long_points(dtype):
    array = np.random.default_rng(0).standard_normal((30, 40)) + 100
    array[1] = array[0] + 1e-4
    X = jnp.asarray(array, dtype)
    squares = squared_distances(X, X, jnp.asarray(2, dtype))
    exact = scaled_distances(X, X, 2) ** 2
    # The promise is rounding of ||x||^2 + ||y||^2 about the mean, which is 40 / 4 + 40 / 4 here
    # (about zero it would be 200,000): 2 sqrt(40) eps from the product, as much from being zero,
    # and twice that because norms vary.
    bound = 8 * np.sqrt(40) * jnp.finfo(dtype).eps * 20
    assert np.max(np.abs(squares - exact)) < bound
    assert np.min(squares) == 0


def test_sums_and_products(dtype):
    X = points((N, 2), dtype)
    first, second = RBF(0.5, 2.0), Matern32(1.5, 0.3)
    a, b = first.matrix(X, X), second.matrix(X, X)
    combined = first * second + first
    np.testing.assert_allclose(combined.matrix(X, X), a * b + a, **rounding(dtype))
    np.testing.assert_allclose(combined.diagonal(X), np.full(N, 2.6), **rounding(dtype))
    np.testing.assert_allclose(combined(X[1], X[2]), (a * b + a)[1, 2], **rounding(dtype))


@pytest.mark.parametrize("block_rows", [1000, 37, 10], ids=["one tile", "exact", "filled up"])
def test_products_match_the_dense_matrix(block_rows, dtype):
    X = points((N, 3), dtype)
    operator = kernel_operator(Matern32(0.8), X, block_rows=block_rows)
    block = jnp.asarray(np.random.default_rng(1).standard_normal((3, N)), dtype)
    expected = np.asarray(block, np.float64) @ dense(operator)
    products = eqx.filter_jit(lambda operator, block: operator.block_mv(block))(operator, block)
    np.testing.assert_allclose(products, expected, **rounding(dtype))
    np.testing.assert_allclose(operator.mv(block[0]), expected[0], **rounding(dtype))


def test_parts_of_the_matrix(dtype):
    X, Y = points((N, 3), dtype), points((N, 3), dtype, seed=2)[:13]
    kernel = Matern52(0.8, 1.5)
    operator = kernel_operator(kernel, X, block_rows=10)
    cross = 1.5 * FORMULAS[Matern52](scaled_distances(Y, X, 0.8))
    block = np.random.default_rng(1).standard_normal((2, N)).astype(dtype)
    indices = jnp.asarray([3, 30, 5], jnp.int32)
    np.testing.assert_allclose(operator.cross(Y), cross, **rounding(dtype))
    products = operator.cross_mv(Y, jnp.asarray(block))
    np.testing.assert_allclose(products, block @ cross.T, **rounding(dtype))
    np.testing.assert_array_equal(operator.columns(indices), operator.as_matrix()[indices])
    np.testing.assert_array_equal(operator.diagonal(), np.diagonal(operator.as_matrix()))


def test_one_point_and_equal_points(dtype):
    one = kernel_operator(RBF(1.0, 2.0), jnp.zeros((1, 2), dtype))
    np.testing.assert_array_equal(one.mv(jnp.asarray([3.0], dtype)), [6.0])
    equal = kernel_operator(RBF(), jnp.ones((8,), dtype), block_rows=3)
    np.testing.assert_allclose(equal.mv(jnp.ones((8,), dtype)), np.full(8, 8.0), **rounding(dtype))


@pytest.mark.slow
def test_a_solve_uses_noise_as_a_shift(dtype, key):
    X = points((N, 3), dtype)
    operator = kernel_operator(RBF(0.8), X, block_rows=16)
    y = jnp.asarray(np.random.default_rng(3).standard_normal(N), dtype)
    belief = pk.solve(operator, y, key=key, num_steps=N, shift=0.5)
    expected = np.linalg.solve(dense(operator) + 0.5 * np.eye(N), np.asarray(y, np.float64))
    np.testing.assert_allclose(belief.mean, expected, rtol=1e-3 if dtype == np.float32 else 1e-9)


@pytest.mark.parametrize("what", ["product", "derivative", "cross product"])
def test_memory_is_a_few_tiles(what, dtype):
    n, tile = 512, 32
    operator = kernel_operator(
        Matern32(jnp.ones(2, dtype)), jnp.zeros((n, 2), dtype), block_rows=tile
    )
    Xs = jnp.zeros((n, 2), dtype)

    def quadratic(operator, block):
        return jnp.vdot(block, operator.block_mv(block))

    run = {
        "product": lambda operator, block: operator.block_mv(block),
        "cross product": lambda operator, block: operator.cross_mv(Xs, block),
        "derivative": eqx.filter_grad(quadratic),
    }[what]
    arrays, static = eqx.partition(operator, eqx.is_array)
    program = jax.make_jaxpr(lambda arrays, block: run(eqx.combine(arrays, static), block))
    sizes = {}
    for k in (1, 6):
        jaxpr = program(arrays, jnp.zeros((k, n), dtype)).jaxpr
        sizes[k] = max(np.prod(shape, dtype=int) for shape in all_shapes(jaxpr))
    # Two coordinates: their differences are kept within one tile while it is differentiated.
    assert sizes[1] <= 2 * tile**2 < n**2 / 100
    # All vectors share the evaluations: nothing of the size of six tiles.
    assert sizes[6] <= max(sizes[1], 6 * n)


def test_derivatives_in_hyperparameters(dtype):
    X = points((N, 3), dtype)
    x, y = (jnp.asarray(row, dtype) for row in np.random.default_rng(4).standard_normal((2, N)))
    kernels = [make(family, jnp.asarray([0.8, 1.0, 1.4], dtype)) for family in FORMULAS]
    total = kernels[0] + kernels[1] + kernels[2] + kernels[3] + kernels[4]

    def tiled(kernel):
        return jnp.vdot(x, kernel_operator(kernel, X, block_rows=10).mv(y))

    def naive(kernel):  # float64 differences in NumPy
        return np.asarray(x, float) @ np.asarray(reference(kernel), float) @ np.asarray(y, float)

    def reference(leaves):
        matrices = []
        for family, (lengthscale, variance, mixture) in zip(FORMULAS, leaves, strict=True):
            r = scaled_distances(X, X, lengthscale)
            if family is RationalQuadratic:
                matrices.append(variance * (1 + r**2 / (2 * mixture)) ** -mixture)
            else:
                matrices.append(variance * FORMULAS[family](r))
        return sum(matrices)

    derivatives = jax.jit(jax.grad(tiled))(total)
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(derivatives)]
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves)
    start = [(np.array([0.8, 1.0, 1.4]), 1.7, 0.7) for _ in FORMULAS]
    expected = []
    for index, family in enumerate(FORMULAS):
        for part in range(3 if family is RationalQuadratic else 2):
            expected.append(central_differences(naive, start, index, part))
    assert len(leaves) == len(expected)
    tolerance = 2e-3 if dtype == np.float32 else 1e-6
    for found, wanted in zip(leaves, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def central_differences(function, start, index, part, step=1e-5):
    """Derivatives of `function(start)` in one hyperparameter, entry by entry."""
    value = np.atleast_1d(np.asarray(start[index][part], float))
    slopes = []
    for entry in range(len(value)):
        values = []
        for sign in (1, -1):
            moved = value.copy()
            moved[entry] += sign * step
            parts = list(start[index])
            parts[part] = moved if np.ndim(start[index][part]) else moved[0]
            values.append(function([*start[:index], tuple(parts), *start[index + 1 :]]))
        slopes.append((values[0] - values[1]) / (2 * step))
    return np.asarray(slopes) if np.ndim(start[index][part]) else slopes[0]


def test_vmap_over_hyperparameters(dtype):
    X = points((N, 3), dtype)
    y = jnp.ones((N,), dtype)
    scales = jnp.asarray([0.5, 1.0, 2.0], dtype)

    def product(scale):
        return kernel_operator(RBF(scale), X, block_rows=10).mv(y)

    together = jax.jit(jax.vmap(product))(scales)
    for scale, found in zip(np.asarray(scales), together, strict=True):
        expected = FORMULAS[RBF](scaled_distances(X, X, scale)).sum(1)
        np.testing.assert_allclose(found, expected, **rounding(dtype))


def test_a_plain_function_gives_its_arrays_as_leaves(dtype):
    X = points((N, 3), dtype)
    y = jnp.ones((N,), dtype)
    compiled = []

    @jax.jit
    def product(operator):
        compiled.append(None)
        return operator.mv(y)

    for scale in (0.5, 2.0):
        rate = jnp.asarray(scale, dtype)

        def k(x, y, rate=None, current=rate):
            return jnp.exp(-current * jnp.sum((x - y) ** 2))

        operator = kernel_operator(k, X, block_rows=10)
        expected = np.exp(-scale * scaled_distances(X, X, 1) ** 2).sum(1)
        np.testing.assert_allclose(product(operator), expected, **rounding(dtype))
    assert len(compiled) == 1

    def of_rate(rate):
        kernel = kernel_operator(lambda x, y: jnp.exp(-rate * jnp.sum((x - y) ** 2)), X)
        return jnp.sum(kernel.mv(y))

    squares = scaled_distances(X, X, 1) ** 2
    slope = -(squares * np.exp(-0.5 * squares)).sum()
    np.testing.assert_allclose(jax.grad(of_rate)(jnp.asarray(0.5, dtype)), slope, rtol=1e-4)


class Periodic(eqx.Module):
    """A user's kernel with a hyperparameter."""

    period: jax.Array

    def __call__(self, x, y):
        return jnp.exp(-2 * jnp.sin(jnp.pi * (x - y) / self.period) ** 2)


def test_a_callable_module_keeps_its_leaves(dtype):
    X = points((N,), dtype)
    operator = kernel_operator(Periodic(jnp.asarray(1.5, dtype)), X, block_rows=10)
    assert [leaf.shape for leaf in jax.tree.leaves(operator.kernel)] == [()]
    difference = np.subtract.outer(np.asarray(X, float), np.asarray(X, float))
    expected = np.exp(-2 * np.sin(np.pi * difference / 1.5) ** 2)
    np.testing.assert_allclose(operator.as_matrix(), expected, **rounding(dtype))


def test_a_kernel_is_a_function_inside_another(dtype):
    X = points((N, 3), dtype)
    kernel = RBF(0.7)
    operator = kernel_operator(lambda x, y: kernel(x, y) * jnp.dot(x, y), X, block_rows=10)
    inner = np.asarray(X, float) @ np.asarray(X, float).T
    expected = FORMULAS[RBF](scaled_distances(X, X, 0.7)) * inner
    np.testing.assert_allclose(operator.as_matrix(), expected, **rounding(dtype))


coordinates = st.floats(-5, 5, width=32)


@hypothesis.given(array=hnp.arrays(np.float32, (12, 2), elements=coordinates))
def test_matrices_are_positive_semidefinite(array, dtype):
    X = jnp.asarray(array, dtype)
    for family in FORMULAS:
        matrix = np.asarray(jitted_matrix(make(family, 0.9), X), np.float64)
        np.testing.assert_allclose(matrix, matrix.T, **rounding(dtype))
        # Entries are off by a few eps; twelve points add them up.
        assert np.linalg.eigvalsh(matrix).min() > -12 * 1.7 * 20 * jnp.finfo(dtype).eps


@jax.jit
def jitted_matrix(kernel: Kernel, X):
    return kernel.matrix(X, X)


X_GOOD = np.zeros((4, 2), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((RBF(), np.zeros((4, 2), np.int32)), TypeError, "X has dtype int32"),
        ((RBF(), np.zeros((2, 2, 2), np.float32)), ValueError, r"X has shape \(2, 2, 2\)"),
        ((RBF(), np.zeros((0, 2), np.float32)), ValueError, r"X has shape \(0, 2\)"),
        ((RBF(), np.full((4, 2), np.nan, np.float32)), NotFiniteError, "X contains NaN"),
        ((3.0, X_GOOD), TypeError, "kernel is of type float"),
        ((lambda x, y: x - y, X_GOOD), ValueError, "must return a scalar"),
        ((lambda x, y: jnp.int32(1), X_GOOD), TypeError, "kernel returns int32"),
        ((RBF(), X_GOOD, 0), ValueError, "block_rows=0"),
    ],
)
def test_errors_of_the_operator(arguments, error, words):
    kernel, X, block_rows = (*arguments, None)[:3]
    with pytest.raises(error, match=words):
        kernel_operator(kernel, X, block_rows=block_rows)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("name", ["lengthscale", "variance"])
def test_errors_of_hyperparameters(name, value):
    with pytest.raises(ValueError, match=rf"{name}=.*must be positive and finite"):
        Matern32(**{name: value})


def test_errors_of_points(dtype):
    operator = kernel_operator(RBF(), jnp.zeros((4, 2), dtype))
    assert isinstance(operator, KernelOperator)
    with pytest.raises(ValueError, match=r"Xs has shape \(3, 3\)"):
        operator.cross(jnp.zeros((3, 3), dtype))
    with pytest.raises(ValueError, match=r"Xs has shape \(3,\)"):
        operator.cross_mv(jnp.zeros((3,), dtype), jnp.zeros((1, 4), dtype))
    with pytest.raises(TypeError, match="Xs has dtype float16"):
        operator.cross(jnp.zeros((3, 2), jnp.float16))
    with pytest.raises(ValueError, match=r"lengthscale has shape \(3,\)"):
        kernel_operator(RBF(jnp.ones(3)), jnp.zeros((4, 2), dtype))
