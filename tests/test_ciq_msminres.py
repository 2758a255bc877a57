"""msMINRES against dense solves, and its error bound against the error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracles import with_spectrum
from pnkrylov.ciq import msminres, quadrature

SHIFTS = np.array([0.0, 0.1, 2.0])


def problem(dtype, size=24, num_rhs=3, seed=0):
    matrix = with_spectrum(np.geomspace(0.1, 10, size), seed)
    rows = np.random.default_rng(seed).standard_normal((num_rhs, size))
    return jnp.asarray(matrix, dtype), jnp.asarray(rows, dtype)


def dense_solutions(matrix, rows, shifts=SHIFTS):
    matrix, rows = np.asarray(matrix, np.float64), np.asarray(rows, np.float64)
    eye = np.eye(len(matrix))
    return np.stack([np.linalg.solve(matrix + t * eye, rows.T).T for t in shifts])


def test_all_shifts_and_right_hand_sides(dtype):
    matrix, rows = problem(dtype)
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-10
    solved = msminres(matrix, rows, jnp.asarray(SHIFTS, dtype), rtol=tolerance)
    exact = dense_solutions(matrix, rows)
    assert solved.converged.all()
    error = np.linalg.norm(np.asarray(solved.value, np.float64) - exact, axis=2)
    # An error is at most residual / smallest eigenvalue.
    bound = np.asarray(solved.residuals) * np.linalg.norm(rows, axis=1) / (0.1 + SHIFTS)[:, None]
    assert np.all(error <= bound + 1e3 * float(jnp.finfo(dtype).eps) * np.abs(exact).max())


def test_residuals_are_the_minimal_ones():
    # The defining property: the least residual over the Krylov space of each shifted matrix.
    dtype = jnp.zeros(()).dtype
    matrix, rows = problem(dtype, num_rhs=1)
    steps = 6
    solved = msminres(matrix, rows, jnp.asarray(SHIFTS, dtype), rtol=1e-30, max_steps=steps)
    dense, b = np.asarray(matrix, np.float64), np.asarray(rows[0], np.float64)
    powers = np.stack([np.linalg.matrix_power(dense, j) @ b for j in range(steps)])
    basis = np.linalg.qr(powers.T)[0]
    for q, shift in enumerate(SHIFTS):
        shifted = dense + shift * np.eye(len(b))
        best = np.linalg.lstsq(shifted @ basis, b, rcond=None)[0]
        least = np.linalg.norm(b - shifted @ basis @ best) / np.linalg.norm(b)
        actual = np.linalg.norm(b - shifted @ np.asarray(solved.value[q, 0])) / np.linalg.norm(b)
        assert float(solved.residuals[q, 0]) == pytest.approx(least, rel=1e-3)
        assert actual == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize("steps", [3, 8, 15])
@pytest.mark.parametrize("forward", [False, True])
def test_bound_of_the_combined_solution_holds(steps, forward):
    dtype = jnp.zeros(()).dtype
    matrix, rows = problem(dtype)
    rule = quadrature(0.1, 10.0, num_points=12, dtype=dtype)
    solved = msminres(
        matrix,
        rows,
        rule.shifts,
        weights=rule.weights,
        lower=0.1,
        upper=10.0,
        rtol=1e-30,
        max_steps=steps,
        forward=forward,
    )
    values, vectors = np.linalg.eigh(np.asarray(matrix, np.float64))
    power, result = (-0.5, np.asarray(solved.value, np.float64))
    if forward:
        power, result = 0.5, result @ np.asarray(matrix, np.float64)
    exact = np.asarray(rows, np.float64) @ (vectors * values**power) @ vectors.T
    error = np.linalg.norm(result - exact, axis=1) / np.linalg.norm(exact, axis=1)
    bound = np.asarray(solved.error_bound)
    assert np.all(error <= bound * 1.001 + 1e-5)
    # A bound that is off by a factor of thirty would waste iterations.
    assert np.all(bound <= 30 * error)


def test_zero_and_eigenvector_leave_the_others_alone(dtype):
    matrix, rows = problem(dtype)
    eigenvector = jnp.asarray(np.linalg.eigh(np.asarray(matrix, np.float64))[1][:, 3], dtype)
    shifts = jnp.asarray(SHIFTS, dtype)
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-9
    disturbed = jnp.concatenate([jnp.zeros_like(rows[:1]), eigenvector[None], rows])
    alone = msminres(matrix, rows, shifts, rtol=tolerance)
    together = msminres(matrix, disturbed, shifts, rtol=tolerance)
    assert together.converged.all()
    assert np.all(np.asarray(together.value[:, 0]) == 0)
    exact = dense_solutions(matrix, disturbed)
    scale = np.abs(exact).max()
    np.testing.assert_allclose(together.value, exact, atol=200 * tolerance * scale)
    np.testing.assert_allclose(
        together.value[:, 2:], alone.value, atol=200 * float(jnp.finfo(dtype).eps) * scale
    )


def test_stops_per_right_hand_side(dtype):
    # A right-hand side in a small invariant subspace needs as many steps as it has eigenvectors.
    matrix, rows = problem(dtype)
    vectors = np.linalg.eigh(np.asarray(matrix, np.float64))[1]
    easy = jnp.asarray(vectors[:, [2, 20]].sum(axis=1), dtype)
    solved = msminres(
        matrix, jnp.concatenate([easy[None], rows]), jnp.asarray(SHIFTS, dtype), rtol=1e-4
    )
    assert int(solved.iterations[0]) <= 3
    assert np.all(np.asarray(solved.iterations[1:]) > 6)


def test_under_jit_and_vmap(dtype):
    matrix, rows = problem(dtype, num_rhs=4)
    shifts = jnp.asarray(SHIFTS, dtype)
    direct = msminres(matrix, rows, shifts, rtol=1e-3).value
    mapped = jax.jit(jax.vmap(lambda row: msminres(matrix, row[None], shifts, rtol=1e-3).value))
    exact = dense_solutions(matrix, rows)
    for values in (direct, jnp.moveaxis(mapped(rows)[:, :, 0], 0, 1)):
        assert np.max(np.abs(np.asarray(values) - exact)) <= 0.05 * np.abs(exact).max()


def test_one_block_product_per_iteration():
    import pnkrylov

    calls = []
    dtype = jnp.zeros(()).dtype
    matrix, rows = problem(dtype)

    def product(vector):
        jax.debug.callback(lambda: calls.append(1))
        return matrix @ vector

    operator = pnkrylov.as_operator(product, like=rows[0])
    solved = msminres(operator, rows[:1], jnp.asarray(SHIFTS, dtype), rtol=1e-3)
    jax.effects_barrier()
    assert len(calls) == int(solved.num_steps)


def test_bad_arguments():
    dtype = jnp.zeros(()).dtype
    matrix, rows = problem(dtype)
    shifts = jnp.asarray(SHIFTS, dtype)
    with pytest.raises(ValueError, match="max_steps"):
        msminres(matrix, rows, shifts, max_steps=0)
    with pytest.raises(ValueError, match="length 24"):
        msminres(matrix, rows[:, :5], shifts)
    with pytest.raises(TypeError, match="preconditioner"):
        msminres(matrix, rows, shifts, preconditioner=object())
