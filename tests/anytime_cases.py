"""Runs on one small operator that can be watched and killed, for time limits and checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pnkrylov as pk
from harness import CountingOperator
from oracles import with_spectrum

SIZE, STEPS = 40, 9
MATRIX = with_spectrum(np.geomspace(1, 1e3, SIZE), 0)
START = np.random.default_rng(0).standard_normal(SIZE)


class Killed(BaseException):
    """Ends a run as abruptly as a signal: nothing in the library catches it."""


@functools.cache
def _operator(dtype):
    return CountingOperator(MATRIX.astype(dtype))


def operator(dtype, before_product=None):
    """One object per dtype: another one would be compiled again."""
    A = _operator(jnp.dtype(dtype))
    A.products, A.before_product = 0, before_product
    return A


def lanczos(dtype, before_product=None, **options):
    start = jnp.asarray(START, dtype)
    return pk.lanczos(operator(dtype, before_product), start, STEPS, driver="host", **options)


def solve(dtype, before_product=None, **options):
    A, v = operator(dtype, before_product), jnp.asarray(START, dtype)
    options = {"num_steps": STEPS, "max_lookahead": 15, "driver": "host"} | options
    return pk.solve(A, v, key=jax.random.key(1), **options)


def inverse(dtype, before_product=None, **options):
    A = operator(dtype, before_product)
    sizes = {"num_steps": STEPS, "lookahead": 5, "num_probes": 2, "probe_depth": 3}
    options = sizes | {"driver": "host"} | options
    return pk.inverse(A, key=jax.random.key(1), **options)


def inverse_of_budget(dtype, before_product=None, **options):
    options = {"num_steps": None, "budget": 36, "num_probes": 2, "probe_depth": 4} | options
    return inverse(dtype, before_product, **options)


def killed_at(product):
    def kill(count):
        if count >= product:
            raise Killed

    return kill


def assert_same(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
