"""Preconditioners read the entries of a kernel matrix instead of multiplying for them."""

import jax.numpy as jnp
import numpy as np
import pytest

from pnkrylov.gp.data import observe, shifted_by
from pnkrylov.gp.kernels import Matern32
from pnkrylov.gp.operator import kernel_operator
from pnkrylov.preconditioners import pivoted_cholesky
from pnkrylov.preconditioners.entries import operator_diagonal


@pytest.fixture(scope="module")
def points():
    return np.random.default_rng(0).uniform(size=(40, 2))


def test_pivoted_cholesky_of_a_kernel_matrix_costs_no_product(points, dtype):
    operator = kernel_operator(Matern32(0.7, 1.5), jnp.asarray(points, dtype), block_rows=16)
    estimate = operator_diagonal(operator)
    np.testing.assert_array_equal(estimate.value, np.full(40, 1.5, dtype))
    assert estimate.num_matvecs == 0
    found = pivoted_cholesky(operator, 10, alpha=0.1)
    wanted = pivoted_cholesky(operator.as_matrix(), 10, alpha=0.1)
    assert found.num_products == 0
    vector = jnp.ones((40,), dtype)
    np.testing.assert_allclose(found.mv(vector), wanted.mv(vector), rtol=1e-4)


def test_noise_and_its_weights_know_their_entries(points, dtype):
    noise = jnp.asarray(np.linspace(0.1, 0.4, 40), dtype)
    inputs, targets = jnp.asarray(points, dtype), jnp.zeros(40, dtype)
    data = observe(Matern32(0.7, 1.5), inputs, targets, noise, None, None)
    shifted = shifted_by(data.kernel_matrix(), data.level())
    matrix = np.asarray(shifted.block_mv(jnp.eye(40, dtype=dtype)))
    rounding = 1e2 * np.finfo(dtype).eps
    np.testing.assert_allclose(shifted.diagonal(), np.diag(matrix), rtol=rounding)
    row = shifted.row(jnp.asarray(3, jnp.int32))
    np.testing.assert_allclose(row, matrix[3], rtol=rounding, atol=rounding)
