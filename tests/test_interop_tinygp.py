"""tinygp's own GaussianProcess with our solver, against its DirectSolver."""

import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tinygp

import pnkrylov.interop
from pnkrylov.errors import NotPositiveDefiniteError
from pnkrylov.gp.operator import kernel_operator
from pnkrylov.interop.tinygp import KrylovSolver

N, S = 30, 6


@pytest.fixture(autouse=True)
def tinygp_promotes_dtypes_and_ranks():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def data(dtype):
    generator = np.random.default_rng(0)
    X, Xs = generator.uniform(size=(N, 2)), generator.uniform(size=(S, 2))
    y = np.sin(5 * X[:, 0]) + X[:, 1] + 0.1 * generator.standard_normal(N)
    return tuple(jnp.asarray(array, dtype) for array in (X, y, Xs))


def parameters(dtype):
    """Log variance, log lengthscales, log noise, mean."""
    return jnp.asarray([0.1, -0.5, -0.2, -3.0, 0.3], dtype)


def build(parameters, X, **options):
    l2 = tinygp.kernels.distance.L2Distance()
    base = tinygp.kernels.Matern32(scale=jnp.ones((), X.dtype), distance=l2)
    scaled = tinygp.transforms.Linear(jnp.exp(-parameters[1:3]), base)
    kernel = jnp.exp(parameters[0]) * scaled
    noise, mean = jnp.exp(parameters[3]), parameters[4]
    return tinygp.GaussianProcess(kernel, X, diag=noise, mean=mean, **options)


def krylov(num_steps=N, **options):
    return {"solver": KrylovSolver, "num_steps": num_steps, **options}


@pytest.mark.one_precision
def test_a_process_conditions_as_with_the_direct_solver(dtype):
    X, y, Xs = data(dtype)
    mine, direct = build(parameters(dtype), X, **krylov()), build(parameters(dtype), X)
    found, wanted = mine.condition(y, Xs), direct.condition(y, Xs)
    close = dict(rtol=3e-3, atol=3e-4) if dtype == jnp.float32 else dict(rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(found.log_probability, wanted.log_probability, **close)
    np.testing.assert_allclose(found.gp.loc, wanted.gp.loc, **close)
    np.testing.assert_allclose(found.gp.covariance, wanted.gp.covariance, **close)
    np.testing.assert_allclose(found.gp.variance, wanted.gp.variance, **close)
    np.testing.assert_allclose(mine.variance, direct.variance, **close)
    np.testing.assert_allclose(mine.covariance, direct.covariance, **close)
    assert mine.solver.logdet().standard_error < 1e-3  # all N steps were taken
    again = build(parameters(dtype), X, **krylov())
    np.testing.assert_array_equal(again.solver.normalization(), mine.solver.normalization())


@pytest.mark.slow
def test_few_steps_report_the_error_of_the_log_determinant(dtype):
    X, y, _ = data(dtype)
    direct = build(parameters(dtype), X)
    exact = np.linalg.slogdet(np.asarray(direct.covariance, np.float64))[1]
    misses = []
    for seed in range(8):
        options = krylov(5, num_probes=4, key=jax.random.key(seed))
        estimate = build(parameters(dtype), X, **options).solver.logdet()
        misses.append(float((estimate.value - exact) / estimate.standard_error))
    # Student's t with 3 degrees of freedom: 8 draws beyond 12 have probability 1 %.
    assert np.max(np.abs(misses)) < 12 and np.min(np.abs(misses)) > 0
    quadratic = direct.log_probability(y) + direct.solver.normalization()
    mine = build(parameters(dtype), X, **krylov(5))
    np.testing.assert_allclose(
        mine.log_probability(y) + mine.solver.normalization(), quadratic, rtol=1e-3
    )


@pytest.mark.slow
@pytest.mark.one_precision
def test_gradients_are_those_of_the_direct_solver():
    dtype = jnp.dtype(jnp.float64)
    X, y, Xs = data(dtype)

    def objective(parameters, options):
        process = build(parameters, X, **options)
        log_probability, conditioned = process.condition(y, Xs)
        return (
            log_probability + 3 * jnp.sum(jnp.sin(conditioned.loc)) + conditioned.covariance[0, 1]
        )

    found = jax.jit(jax.grad(lambda p: objective(p, krylov())))(parameters(dtype))
    wanted = jax.jit(jax.grad(lambda p: objective(p, {})))(parameters(dtype))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_samples_have_the_covariance_of_the_process(dtype):
    X, _, _ = data(dtype)
    process = build(parameters(dtype), X, **krylov())
    units = process.solver.dot_triangular(jnp.eye(N, dtype=dtype))
    tolerance = 2e-3 if dtype == jnp.float32 else 1e-7
    np.testing.assert_allclose(units @ units.T, process.covariance, rtol=tolerance, atol=tolerance)
    assert process.sample(jax.random.key(1), (2, 3)).shape == (2, 3, N)


@pytest.mark.parametrize("shape", [(N,), (N, 2)], ids=["scalars", "vectors"])
def test_kernels_are_accepted_as_they_are(shape, dtype):
    X = jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype)
    scale = jnp.asarray(0.8, dtype)
    kernel = tinygp.kernels.ExpSquared(scale) * tinygp.kernels.DotProduct()
    kernel = kernel + tinygp.kernels.Matern52(scale)
    operator = kernel_operator(kernel, X, block_rows=7)
    block = jnp.asarray(np.random.default_rng(2).standard_normal((2, N)), dtype)
    tolerance = 1e-4 if dtype == jnp.float32 else 1e-12
    np.testing.assert_allclose(
        operator.block_mv(block), block @ kernel(X, X), rtol=tolerance, atol=tolerance
    )


def test_errors(dtype):
    X, _, _ = data(dtype)
    kernel = tinygp.kernels.ExpSquared(jnp.asarray(0.8, dtype))
    with pytest.raises(NotPositiveDefiniteError, match="noise must be positive"):
        tinygp.GaussianProcess(kernel, X, diag=jnp.zeros((), dtype), solver=KrylovSolver)
    dense = tinygp.noise.Dense(jnp.eye(N, dtype=dtype))
    with pytest.raises(TypeError, match="noise is Dense"):
        tinygp.GaussianProcess(kernel, X, noise=dense, solver=KrylovSolver)
    with pytest.raises(ValueError, match="never looks at a matrix"):
        tinygp.GaussianProcess(
            kernel, X, solver=KrylovSolver, covariance_value=jnp.eye(N, dtype=dtype)
        )


def test_without_tinygp_the_import_tells_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tinygp.noise", None)
    with pytest.raises(ImportError, match=r"pip install 'tinygp>=0.3.1'"):
        runpy.run_path(pnkrylov.interop.__path__[0] + "/tinygp.py")
