"""Diagonals of operators: exact where there is one, else estimated with an error."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse as sp

from oracles import with_spectrum
from pnkrylov.operators import as_operator
from pnkrylov.preconditioners import (
    Diagonal,
    operator_diagonal,
)

SIZE = 12
KEY = jax.random.key(3)


def test_exact_diagonals(dtype):
    dense = np.diag(np.geomspace(1, 9, SIZE)) + np.diag(np.full(SIZE - 1, 0.3), 1)
    dense = ((dense + dense.T) / 2).astype(dtype)
    matrix = jnp.asarray(dense)
    diagonal = lx.DiagonalLinearOperator(jnp.diagonal(matrix))
    function = as_operator(lambda v: matrix @ v, like=matrix[0])
    for A, spent in [(matrix, 0), (sp.csr_array(dense), 0), (diagonal, 0), (function, SIZE)]:
        estimate = operator_diagonal(A, num_probes=SIZE)
        tolerance = 4 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(estimate.value, np.diag(dense), rtol=tolerance)
        assert not np.any(estimate.standard_error)
        assert int(estimate.num_matvecs) == spent
        assert np.array_equal(Diagonal.of(A, num_probes=SIZE).entries, estimate.value)


def test_estimated_diagonal_and_its_error(dtype):
    count = 6
    matrix = jnp.asarray(with_spectrum(np.geomspace(1, 9, SIZE), 4), dtype)
    function = as_operator(lambda v: matrix @ v, like=matrix[0])

    def estimate(key):
        found = operator_diagonal(function, key=key, num_probes=count)
        return found.value, found.standard_error

    repeats = 400
    values, errors = jax.jit(jax.vmap(estimate))(jax.random.split(KEY, repeats))
    values, errors = np.asarray(values, np.float64), np.asarray(errors, np.float64)
    dense = np.asarray(matrix, np.float64)
    variance = (np.sum(dense**2, axis=1) - np.diag(dense) ** 2) / count
    # Means of 400 repeats: normal, five standard errors.
    assert np.all(np.abs(values.mean(axis=0) - np.diag(dense)) < 5 * np.sqrt(variance / repeats))
    # The variance is estimated without bias; a sample variance has a relative deviation of at most
    # sqrt(2 / (count - 1)) here (sums of signs have lighter tails than normals).
    bound = 5 * np.sqrt(2 / (count - 1) / repeats)
    assert np.all(np.abs((errors**2).mean(axis=0) / variance - 1) < bound)
