"""Jitted code that takes an operator compiles once, whatever the values; arrays are arguments."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg as spla

from pnkrylov.operators import as_operator
from zoo import SIZE, ZOO, assert_products, dense_matrix, make, vectors


def counted(function):
    """A jitted copy of `function` whose attribute `traces` counts how often it was traced."""

    def traced(*args):
        counter.traces += 1
        return function(*args)

    def counter(*args):
        return jitted(*args)

    counter.traces = 0
    jitted = eqx.filter_jit(traced)
    return counter


@pytest.mark.parametrize("species", [s for s in ZOO if not s.on_host], ids=lambda s: s.name)
def test_new_values_do_not_recompile(species, dtype):
    multiply = counted(lambda operator, v: operator.mv(v))
    for seed in range(3):
        operator, dense = make(species, dtype, seed)
        v = np.random.default_rng(seed).standard_normal(SIZE).astype(dtype)
        product = multiply(operator, jnp.asarray(v))
        assert_products(product, dense @ v.astype(np.float64), species)
    assert multiply.traces == 1


def test_the_same_host_operator_does_not_recompile(dtype):
    host = spla.aslinearoperator(dense_matrix(dtype))
    multiply = counted(lambda operator, v: operator.mv(v))
    for v in jnp.asarray(vectors(3, dtype)):
        multiply(as_operator(host), v)
    assert multiply.traces == 1
    multiply(as_operator(spla.aslinearoperator(dense_matrix(dtype))), v)
    assert multiply.traces == 2


def hessian_of_a_network(parameters, x):
    """A Hessian product through relu: functions with derivative rules of their own in its trace."""

    def loss(parameters):
        return jnp.sum(jax.nn.softplus(jax.nn.relu(x @ parameters)) ** 2)

    return lambda v: jax.jvp(jax.grad(loss), (parameters,), (v,))[1] + v


def test_a_hessian_product_through_relu_does_not_recompile(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, SIZE)), dtype)
    multiply = counted(lambda operator, v: operator.mv(v))
    v = jnp.asarray(rng.standard_normal(SIZE), dtype)
    for _ in range(3):
        product = hessian_of_a_network(jnp.asarray(rng.standard_normal(SIZE), dtype), x)
        ours = multiply(as_operator(product, like=v), v)
        np.testing.assert_allclose(ours, product(v), rtol=1e-5)
    assert multiply.traces == 1


def test_a_function_is_read_anew_every_time(dtype):
    """The arrays that a function closes over now, not those of an earlier trace."""
    held = {"A": jnp.asarray(dense_matrix(dtype, 0))}

    def product(v):
        return held["A"] @ v

    v = jnp.asarray(vectors(1, dtype)[0])
    as_operator(product, like=v)
    held["A"] = jnp.asarray(dense_matrix(dtype, 1))
    np.testing.assert_array_equal(as_operator(product, like=v).mv(v), held["A"] @ v)


@pytest.mark.parametrize("kind", ["scalar", "branch", "inner jit", "callback"])
def test_different_programs_are_kept_apart(kind, dtype):
    """Functions from the same line of code whose difference is not in an array."""

    def make(number):
        if kind == "scalar":
            return lambda v: v * number
        if kind == "branch":
            return lambda v: jax.lax.cond(v[0] > 0, lambda u: u * number, lambda u: u, v)
        if kind == "inner jit":
            return jax.jit(lambda v: v * number)
        return lambda v: jax.pure_callback(
            lambda u: (np.asarray(u) * number).astype(u.dtype), v, v, vmap_method="broadcast_all"
        )

    multiply = counted(lambda operator, v: operator.mv(v))
    v = jnp.ones(3, dtype)
    for number in (2.0, 3.0, 3.0000002):
        product = multiply(as_operator(make(number), like=v), v)
        np.testing.assert_array_equal(product, np.full(3, number, dtype))


def test_large_arrays_are_arguments_and_not_constants():
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((300, 300)), jnp.float32)
    inner = jax.jit(lambda v: matrix @ v)
    for function in (lambda v: matrix @ v, lambda v: inner(v) + v, inner, eqx.filter_jit(inner)):
        operator = as_operator(function, like=matrix[0])
        dynamic, static = eqx.partition(operator, eqx.is_array)
        assert any(leaf.shape == (300, 300) for leaf in jax.tree.leaves(dynamic))
        lowered = jax.jit(lambda dynamic, v, static=static: eqx.combine(dynamic, static).mv(v))
        text = lowered.lower(dynamic, matrix[0]).as_text()
        assert len(text) < 20_000  # as a constant, the matrix alone takes 720,000 characters
