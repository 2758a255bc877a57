"""Operators whose product is Python code: no callback inside of a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg as spla

import pnkrylov as pk
from oracles import with_spectrum
from pnkrylov.trace import trace_inverse


@pytest.mark.one_precision
def test_products_on_the_host_are_made_outside_of_programs(dtype, monkeypatch):
    """A callback inside of a program may wait for ever for the thread that it runs on."""

    def refused(*_, **__):
        raise AssertionError("a callback inside of a compiled program")

    monkeypatch.setattr(jax, "pure_callback", refused)
    matrix = with_spectrum(np.geomspace(1, 10, 24), 0).astype(dtype)
    operator, key = spla.aslinearoperator(matrix), jax.random.key(0)
    v = np.ones(24, dtype)
    close = {"rtol": 0, "atol": 1e4 * float(jnp.finfo(dtype).eps)}
    belief = pk.solve(operator, v, key=key, num_steps=24)
    np.testing.assert_allclose(belief.mean, np.linalg.solve(matrix, v), **close)
    inverse = pk.inverse(operator, key=key, num_steps=8, num_probes=16, probe_depth=16)
    trace = np.trace(np.linalg.inv(matrix))
    np.testing.assert_allclose(inverse.trace().value, trace, rtol=0.05)
    rows = np.stack([v, np.arange(24, dtype=dtype)])
    blocks = pk.solve(operator, rows, key=key, num_steps=12)
    np.testing.assert_allclose(blocks.mean, np.linalg.solve(matrix, rows.T).T, rtol=0, atol=1e-3)
    # 20 of 24 products: a run and probes, some of which are re-projected before their product.
    estimate = trace_inverse(operator, key=key, budget=20)
    assert estimate.lower <= trace <= estimate.upper
