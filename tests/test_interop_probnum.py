"""probnum in and out: the real package where Python allows it, a clear error elsewhere."""

import functools
import subprocess
import sys
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pnkrylov as pk
from oracles import with_spectrum
from pnkrylov.interop import probnum as bridge
from pnkrylov.operators import DenseOperator, HostOperator

old_python = pytest.mark.skipif(sys.version_info >= (3, 12), reason="probnum needs Python < 3.12")


@old_python
def test_from_probnum(dtype):
    linops = bridge.import_probnum().linops
    matrix = with_spectrum(np.geomspace(1, 9, 6), seed=0).astype(dtype)
    dense = bridge.from_probnum(linops.Matrix(matrix))
    assert isinstance(dense, DenseOperator) and dense.dtype == dtype
    np.testing.assert_array_equal(dense.matrix, matrix)
    total = bridge.from_probnum(linops.Matrix(matrix) + linops.Matrix(matrix))
    host = bridge.from_probnum(linops.Scaling(np.arange(1, 7).astype(dtype)))
    assert isinstance(host, HostOperator)
    block = jnp.asarray(np.random.default_rng(1).standard_normal((3, 6)), dtype)
    np.testing.assert_allclose(host.block_mv(block), block * np.arange(1, 7, dtype=dtype)[None, :])
    np.testing.assert_allclose(total.block_mv(block), 2 * block @ matrix, rtol=1e-4, atol=1e-4)


@old_python
def test_only_missing_names_are_restored_and_only_on_use():
    program = """
import numpy as np
before = {name: getattr(np, name, None) for name in ("float_", "Inf", "find_common_type")}
import pnkrylov.interop.probnum as bridge
assert {name: getattr(np, name, None) for name in before} == before
import sys
assert "probnum" not in sys.modules
np.Inf = "someone else's"
bridge.import_probnum()
assert np.Inf == "someone else's" and np.float_ is np.float64
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.parametrize(
    ("arrays", "scalars", "expected"),
    [  # the examples of the NumPy 1 documentation, and both empty cases
        ([], [np.int64, np.float32, complex], np.complex128),
        ([np.int64, np.float32], [], np.float64),
        ([np.float32], [np.int64, np.float64], np.float32),
        ([np.float32], [complex], complex),
        (["f4", "f4", "i4"], ["c8"], np.complex64),
    ],
)
def test_find_common_type_is_the_one_of_numpy_1(arrays, scalars, expected):
    assert bridge._find_common_type(arrays, scalars) == np.dtype(expected)


def test_other_types_are_refused():
    if sys.version_info >= (3, 12):
        pytest.skip("probnum needs Python < 3.12")
    with pytest.raises(TypeError, match=r"linop is of type ndarray.*Use .*as_operator"):
        bridge.from_probnum(np.eye(3))


def test_newer_python_gets_a_clear_error(monkeypatch):
    monkeypatch.setattr(bridge.sys, "version_info", (3, 13, 0))
    with pytest.raises(ImportError, match=r"does not run on Python 3\.13.*Use Python 3\.11"):
        bridge.import_probnum()


@old_python
def test_a_missing_package_gets_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "probnum", None)
    with pytest.raises(ImportError, match=r"needs the package probnum.*pip install"):
        bridge.import_probnum()


SIZE = 12


def belief_of(kind, dtype):
    return _belief_of(kind, jnp.dtype(dtype))


@functools.cache
def _belief_of(kind, dtype):
    A = jnp.asarray(with_spectrum(np.geomspace(1, 9, SIZE), seed=2), dtype)
    v = jnp.asarray(np.random.default_rng(3).standard_normal(SIZE), dtype)
    if kind == "solve":
        return pk.solve(A, v, key=jax.random.key(0), num_steps=4, max_lookahead=4)
    return pk.inverse(
        A, key=jax.random.key(0), mean=v, num_steps=4, lookahead=4, num_probes=3, layout=kind
    )


@pytest.mark.one_precision
@old_python
@pytest.mark.parametrize("kind", ["solve", "paper", "resolve-all"])
def test_to_probnum_is_the_same_gaussian(kind, dtype):
    belief = belief_of(kind, dtype)
    normal = bridge.to_probnum(belief)
    assert isinstance(normal, bridge.import_probnum().randvars.Normal)
    assert normal.shape == (SIZE,) and normal.dtype == np.float64
    np.testing.assert_array_equal(normal.mean, belief.mean)
    np.testing.assert_allclose(normal.std, belief.std(), rtol=1e-5)
    # The covariance goes through a dozen products of at most its norm.
    sigma = np.asarray(belief.covariance.as_matrix(), np.float64)
    bound = 100 * float(jnp.finfo(dtype).eps) * np.linalg.norm(sigma)
    np.testing.assert_allclose(normal.cov @ np.eye(SIZE), sigma, atol=bound)
    np.testing.assert_allclose(normal.cov.T.todense(), sigma, atol=bound)
    np.testing.assert_allclose(normal.cov.trace(), np.trace(sigma), rtol=1e-5)
    root = normal.cov_cholesky.todense().astype(np.float64)
    np.testing.assert_allclose(root @ root.T, sigma, atol=bound)


@old_python
@pytest.mark.parametrize("kind", ["solve", "paper", "resolve-all"])
def test_its_samples_have_the_moments_of_the_belief(kind, dtype):
    belief, number = belief_of(kind, dtype), 20000
    samples = bridge.to_probnum(belief).sample(np.random.default_rng(4), size=number)
    assert samples.shape == (number, SIZE)
    sigma = np.asarray(belief.covariance.as_matrix(), np.float64)
    variances = np.diagonal(sigma)
    error = 5 * np.sqrt(variances / number)
    assert np.all(np.abs(samples.mean(axis=0) - np.asarray(belief.mean)) < error)
    scatter = np.cov(samples.astype(np.float64), rowvar=False)
    error = 5 * np.sqrt((np.outer(variances, variances) + sigma**2) / number)
    assert np.all(np.abs(scatter - sigma) < error)


@old_python
def test_sample_sizes_are_those_of_probnum(dtype):
    normal = bridge.to_probnum(belief_of("solve", dtype))
    for size, shape in [((), (SIZE,)), (1, (1, SIZE)), ((2, 3), (2, 3, SIZE))]:
        assert normal.sample(np.random.default_rng(0), size=size).shape == shape
    one, two = (normal.sample(np.random.default_rng(0)) for _ in range(2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.slow
@old_python
def test_nothing_is_dense_at_20000_dimensions(monkeypatch):
    """A dense covariance is 3.2 GB; the guard allows a two-hundredth of it."""
    size, linops = 20_000, bridge.import_probnum().linops

    def refuse(*_, **__):
        raise AssertionError("something was made dense")

    monkeypatch.setattr(linops.LinearOperator, "todense", refuse)
    monkeypatch.setattr(linops.LambdaLinearOperator, "_todense", refuse)
    diagonal = jnp.linspace(1, 10, size, dtype=jnp.float32)
    v = jnp.ones(size, jnp.float32)
    belief = pk.solve(
        lambda x: diagonal * x, v, key=jax.random.key(0), num_steps=5, max_lookahead=5
    )
    jax.block_until_ready(belief)
    tracemalloc.start()
    try:
        normal = bridge.to_probnum(belief)
        samples = normal.sample(np.random.default_rng(0), size=3)
        products = normal.cov @ samples.T, normal.cov_cholesky @ samples.T, normal.cov.trace()
        deviations = normal.std
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16e6
    assert samples.shape == (3, size) and products[0].shape == (size, 3)
    np.testing.assert_allclose(deviations, belief.std(), rtol=1e-4)
    distance = (samples - np.asarray(belief.mean)) / deviations
    # 60,000 nearly independent standard normal numbers (the coupling ties them weakly).
    assert abs(np.mean(distance**2) - 1) < 5 * np.sqrt(2 / 60000) + 3 / size**0.5


@old_python
def test_to_probnum_refuses_batches_and_tracers(dtype):
    belief = belief_of("solve", dtype)
    batch = jax.tree.map(lambda leaf: leaf[None] if eqx.is_array(leaf) else leaf, belief)
    for call in (
        lambda: bridge.to_probnum(batch),
        lambda: eqx.filter_jit(bridge.to_probnum)(belief),
    ):
        with pytest.raises(ValueError, match="needs one belief with concrete values"):
            call()


def test_to_probnum_on_newer_python_gets_a_clear_error(monkeypatch):
    belief = belief_of("solve", jnp.float32)
    monkeypatch.setattr(bridge.sys, "version_info", (3, 13, 0))
    with pytest.raises(ImportError, match=r"does not run on Python 3\.13"):
        bridge.to_probnum(belief)
