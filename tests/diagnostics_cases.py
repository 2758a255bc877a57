"""Beliefs whose covariance is known, for the tests of diagnostics."""

import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pnkrylov as pk
from oracles import with_spectrum

SIZE, LEVEL = 20, 6
EIGENVALUES = np.geomspace(0.5, 30, SIZE)
MATRIX = with_spectrum(EIGENVALUES, seed=0)
SHIFT = 0.25


@functools.cache
def solve(dtype, **options):
    dtype = jnp.dtype(dtype)
    rhs = jnp.asarray(np.random.default_rng(1).standard_normal(SIZE), dtype)
    sizes = {"num_steps": LEVEL, "max_lookahead": 10, "check_symmetric": False}
    A = jnp.asarray(MATRIX, dtype)
    return pk.solve(A, rhs, key=jax.random.key(3), shift=SHIFT, **(sizes | options))


@functools.cache
def inverse(dtype, layout="paper", eigenvalues=None, **options):
    A = jnp.asarray(MATRIX if eigenvalues is None else np.diag(eigenvalues), dtype)
    sizes = {"num_steps": LEVEL, "lookahead": 5, "num_probes": 4, "probe_depth": SIZE}
    # Zero tolerance: the probes do not stop before their quadrature is exact.
    with mock.patch.object(sys.modules["pnkrylov.probes"], "PROBE_TOLERANCE", 0.0):
        return pk.inverse(
            A,
            key=jax.random.key(3),
            layout=layout,
            shift=SHIFT,
            check_symmetric=False,
            **(sizes | options),
        )


# A full look-ahead, and as many probes as directions: every trace is exact.
FULL = {"lookahead": SIZE - LEVEL, "num_probes": SIZE - LEVEL - 1}
# What needs only one precision is compiled only for the best one.
BEST = jnp.dtype("float64" if jax.config.jax_enable_x64 else "float32")


def dense(belief):
    return np.asarray(belief.covariance.as_matrix(), np.float64)


def moved(belief, error):
    return belief.mean_flat + jnp.asarray(error, belief.mean_flat.dtype)
