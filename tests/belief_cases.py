"""The problem, its sizes and the comparisons that the tests of beliefs share."""

import functools

import jax
import numpy as np

import oracles
from harness import CountingOperator

SIZE, STEPS, AHEAD = 24, 8, 10
KEY = jax.random.key(7)
SOLVE = {"key": KEY, "num_steps": STEPS, "max_lookahead": AHEAD}
INVERSE = {"key": KEY, "num_steps": STEPS, "lookahead": 4, "num_probes": 5, "probe_depth": 6}


@functools.cache
def problem(spectrum="power-law-1", size=SIZE):
    matrix, _ = oracles.SPECTRA[spectrum](size)
    return matrix, oracles.right_hand_side(matrix, "normal")


@functools.cache
def counting(dtype="float64"):
    """One operator for all tests that count: a new one would be a new program."""
    return CountingOperator(problem()[0].astype(dtype))


def counted(run):
    """The result of `run(operator)` and the products that it spent."""
    operator = counting()
    before = operator.products
    return run(operator), operator.products - before


def same(a, b, rtol=1e-8):
    scale = float(np.max(np.abs(b), initial=0))
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


def assert_same_belief(a, b):
    same(a.mean, b.mean)
    same(a.covariance.as_matrix(), b.covariance.as_matrix(), rtol=1e-7)
