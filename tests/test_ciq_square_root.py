"""`inv_sqrt_matvec` and `sqrt_matvec`: the tolerance is met, or it is said that it is not."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from oracles import random_orthogonal, with_spectrum
from pnkrylov.ciq import (
    CIQ_RESULTS,
    SpectralBounds,
    ToleranceNotMetError,
    inv_sqrt_matvec,
    spectral_bounds,
    sqrt_matvec,
)
from pnkrylov.errors import NotFiniteError, NotPositiveDefiniteError
from pnkrylov.preconditioners import Diagonal

KEY = jax.random.key(7)


def power_times(matrix, rows, power):
    """Rows times a power of a symmetric matrix, by eigendecomposition in float64."""
    values, vectors = np.linalg.eigh(np.asarray(matrix, np.float64))
    return np.asarray(rows, np.float64) @ (vectors * values**power) @ vectors.T


def relative_errors(value, exact):
    difference = np.asarray(value, np.float64) - exact
    return np.linalg.norm(difference, axis=-1) / np.linalg.norm(exact, axis=-1)


def problem(dtype, condition=1e3, size=40, num_rhs=3):
    matrix = with_spectrum(np.geomspace(1 / condition, 1, size), 0)
    rows = np.random.default_rng(1).standard_normal((num_rhs, size))
    return jnp.asarray(matrix, dtype), jnp.asarray(rows, dtype)


def meets_or_says_so(solution, exact, rtol):
    errors = relative_errors(solution.value, exact)
    said = np.asarray(solution.converged)
    assert np.all(errors[said] <= rtol), (errors, rtol)
    assert (solution.result == CIQ_RESULTS.successful) == bool(said.all())
    return bool(said.all())


@pytest.mark.parametrize("method", ["lanczos", "ciq"])
@pytest.mark.parametrize("condition", [pytest.param(1e1, marks=pytest.mark.slow), 1e6])
def test_meets_the_tolerance(method, condition, dtype):
    matrix, rows = problem(dtype, condition)
    exact = power_times(matrix, rows, -0.5)
    for rtol in (1e-2, 1e-4):
        solution = inv_sqrt_matvec(matrix, rows, key=KEY, rtol=rtol, method=method, throw=False)
        met = meets_or_says_so(solution, exact, rtol)
        # Where eps times the condition number allows the tolerance, it must be met.
        allowed = float(jnp.finfo(dtype).eps) * (10 + condition) <= rtol / 4
        assert met or not allowed
        if dtype == jnp.float64:
            assert met


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lanczos", "ciq"])
@pytest.mark.parametrize("condition", [1e1, 1e3, 1e6, 1e8])
@pytest.mark.parametrize("rtol", [1e-2, 1e-4, 1e-6, 1e-8])
def test_meets_every_tolerance_at_every_condition_number(method, condition, rtol, dtype):
    # In float64 the eigendecomposition itself errs by eps * condition: mpmath is the oracle.
    matrix, rows = problem(dtype, condition)
    with mpmath.workdps(40):
        exact_matrix = mpmath.matrix(np.asarray(matrix, np.float64).tolist())
        values, vectors = mpmath.eigsy(exact_matrix)
        if min(values) <= 0:
            # Rounded to this dtype the matrix is indefinite: only a refusal is right.
            with pytest.raises((NotPositiveDefiniteError, ToleranceNotMetError)):
                inv_sqrt_matvec(matrix, rows, key=KEY, rtol=rtol, method=method)
            return
        roots = mpmath.diag([1 / mpmath.sqrt(v) for v in values])
        root = vectors * roots * vectors.T
        exact = mpmath.matrix(np.asarray(rows, np.float64).tolist()) * root
        exact = np.array(exact.tolist(), dtype=np.float64)
    solution = inv_sqrt_matvec(matrix, rows, key=KEY, rtol=rtol, method=method, throw=False)
    met = meets_or_says_so(solution, exact, rtol)
    allowed = condition * float(jnp.finfo(dtype).eps) <= rtol / 4 and rtol >= 1e-5
    assert met or not (allowed or dtype == jnp.float64)
    if not met:
        with pytest.raises((ToleranceNotMetError, NotPositiveDefiniteError)):
            inv_sqrt_matvec(matrix, rows, key=KEY, rtol=rtol, method=method)


@pytest.mark.parametrize("method", ["lanczos", "ciq"])
def test_square_root_itself(method, dtype):
    matrix, rows = problem(dtype)
    solution = sqrt_matvec(matrix, rows, key=KEY, rtol=1e-4, method=method)
    assert np.all(relative_errors(solution.value, power_times(matrix, rows, 0.5)) <= 1e-4)
    # Products: those of the inverse square root, and one more for each right-hand side.
    assert int(solution.num_matvecs) >= int(solution.num_passes)


@pytest.mark.one_precision
@pytest.mark.parametrize("method", ["lanczos", "ciq"])
def test_zero_or_eigenvector_first_leaves_the_others_alone(method, dtype):
    matrix, rows = problem(dtype)
    eigenvector = np.linalg.eigh(np.asarray(matrix, np.float64))[1][:, 5]
    for first in (np.zeros_like(eigenvector), eigenvector):
        block = jnp.concatenate([jnp.asarray(first, dtype)[None], rows])
        solution = inv_sqrt_matvec(matrix, block, key=KEY, method=method)
        exact = power_times(matrix, block, -0.5)
        assert np.all(relative_errors(solution.value[1:], exact[1:]) <= 1e-4)
        scale = np.linalg.norm(exact[0])
        assert np.linalg.norm(np.asarray(solution.value[0]) - exact[0]) <= 1e-4 * scale


def test_smooth_right_hand_side_does_not_fool_the_bounds():
    """Almost no component along the small eigenvalues, and still what there is counts."""
    size = 60
    dtype = jnp.zeros(()).dtype
    if dtype != jnp.float64:
        pytest.skip("needs a condition number that float32 does not have")
    eigenvalues = np.geomspace(1e-8, 1, size)
    vectors = random_orthogonal(size, 3)
    matrix = (vectors * eigenvalues) @ vectors.T
    # 1e-6 along the smallest eigenvector becomes 1e-2 of the result.
    b = vectors[:, -5:].sum(axis=1) + 1e-6 * vectors[:, 0]
    exact = vectors @ (eigenvalues**-0.5 * (vectors.T @ b))
    for method in ("lanczos", "ciq"):
        solution = inv_sqrt_matvec(jnp.asarray(matrix), jnp.asarray(b), key=KEY, method=method)
        assert relative_errors(solution.value, exact) <= 1e-4


@pytest.mark.parametrize("method", ["lanczos", "ciq"])
def test_indefinite_operator_names_the_ritz_value(method, dtype):
    matrix = jnp.asarray(with_spectrum(np.linspace(-2, 5, 30), 0), dtype)
    b = jnp.ones(30, dtype)
    with pytest.raises(NotPositiveDefiniteError, match=r"Ritz value -\d"):
        inv_sqrt_matvec(matrix, b, key=KEY, method=method)


@pytest.mark.parametrize("method", ["lanczos", "ciq"])
def test_too_few_steps_are_said(method, dtype):
    matrix, rows = problem(dtype)
    bounds = SpectralBounds.known(9e-4, 1.1, dtype)
    options = {"bounds": bounds, "method": method, "max_steps": 5}
    with pytest.raises(ToleranceNotMetError, match=r"rtol=0\.0001 was not met.*max_steps"):
        inv_sqrt_matvec(matrix, rows, **options)
    solution = inv_sqrt_matvec(matrix, rows, throw=False, **options)
    assert not solution.converged.any()
    assert solution.result == CIQ_RESULTS.not_converged
    errors = relative_errors(solution.value, power_times(matrix, rows, -0.5))
    assert np.all(errors <= np.asarray(solution.error_bound))
    assert np.all(errors > 1e-4)


@pytest.mark.slow
@pytest.mark.one_precision
def test_wrong_bounds_are_noticed(dtype):
    matrix, rows = problem(dtype)
    for wrong in (SpectralBounds.known(0.1, 1.1, dtype), SpectralBounds.known(9e-4, 0.5, dtype)):
        for method in ("lanczos", "ciq"):
            solution = inv_sqrt_matvec(matrix, rows, bounds=wrong, method=method, throw=False)
            assert solution.result == CIQ_RESULTS.bounds_violated
            assert not solution.converged.any()


@pytest.mark.one_precision
def test_bounds_can_be_reused_and_survive(dtype):
    matrix, rows = problem(dtype)
    bounds = spectral_bounds(matrix, key=KEY)
    for _ in range(2):
        solution = inv_sqrt_matvec(matrix, rows, bounds=bounds)
        assert np.all(relative_errors(solution.value, power_times(matrix, rows, -0.5)) <= 1e-4)
    assert float(bounds.lower) > 0
    probed = inv_sqrt_matvec(matrix, rows, key=KEY)
    assert int(solution.num_matvecs) < int(probed.num_matvecs)


def test_precision_is_refused_clearly():
    matrix, rows = problem(jnp.dtype("float32"), condition=1e6)
    with pytest.raises(ToleranceNotMetError, match=r"float64|precision"):
        inv_sqrt_matvec(matrix, rows, key=KEY, rtol=1e-4)


def test_tolerance_below_rounding_is_refused_although_the_bound_meets_it():
    matrix, rows = problem(jnp.dtype("float32"), condition=1e3)
    solution = inv_sqrt_matvec(matrix, rows, key=KEY, rtol=1e-6, throw=False)
    assert solution.result == CIQ_RESULTS.precision
    assert not solution.converged.any()
    assert float(solution.error_bound.max()) <= 1e-6 < float(solution.rounding)
    # And rightly so: the error is what rounding makes it.
    assert relative_errors(solution.value, power_times(matrix, rows, -0.5)).max() > 1e-6


@pytest.mark.one_precision
def test_an_exhausted_krylov_space_ends_the_run(dtype):
    solution = inv_sqrt_matvec(4 * jnp.eye(9, dtype=dtype), jnp.ones((2, 9), dtype), key=KEY)
    assert int(solution.num_passes) == 1
    np.testing.assert_allclose(solution.value, 0.5, rtol=1e-4)


def test_nan_is_reported(dtype):
    matrix, rows = problem(dtype)
    for method in ("lanczos", "ciq"):
        with pytest.raises(NotFiniteError):
            inv_sqrt_matvec(matrix.at[3, 3].set(jnp.nan), rows, key=KEY, method=method)


@pytest.mark.one_precision
def test_auto_changes_to_ciq_when_the_basis_does_not_fit(dtype):
    matrix, rows = problem(dtype)
    small = rows.size * rows.dtype.itemsize * 12
    fits = inv_sqrt_matvec(matrix, rows, key=KEY)
    tight = inv_sqrt_matvec(matrix, rows, key=KEY, max_basis_bytes=small)
    assert (fits.method, tight.method) == ("lanczos", "ciq")
    assert np.all(relative_errors(tight.value, power_times(matrix, rows, -0.5)) <= 1e-4)
    with pytest.raises(ToleranceNotMetError, match="max_basis_bytes"):
        inv_sqrt_matvec(matrix, rows, key=KEY, method="lanczos", max_basis_bytes=small)


@pytest.mark.parametrize("method", ["auto", pytest.param("ciq", marks=pytest.mark.slow)])
def test_under_jit_and_vmap(method, dtype):
    matrix, rows = problem(dtype, size=20)
    exact = power_times(matrix, rows, -0.5)

    def solve(a, b):
        return inv_sqrt_matvec(a, b, key=KEY, method=method, throw=False).value

    assert np.all(relative_errors(jax.jit(solve)(matrix, rows), exact) <= 1e-4)
    mapped = jax.jit(jax.vmap(solve, (None, 0)))(matrix, rows)
    assert np.all(relative_errors(mapped, exact) <= 1e-4)


@pytest.mark.one_precision
@pytest.mark.parametrize("method", ["lanczos", pytest.param("ciq", marks=pytest.mark.slow)])
def test_preconditioned_product_is_a_rotation(method, dtype):
    size = 20
    scales = np.geomspace(1, 300, size)
    matrix = with_spectrum(np.linspace(1, 3, size), 0) * np.sqrt(np.outer(scales, scales))
    matrix, preconditioner = jnp.asarray(matrix, dtype), Diagonal(jnp.asarray(scales, dtype))
    eye = jnp.eye(size, dtype=dtype)
    options = {"key": KEY, "rtol": 1e-4, "preconditioner": preconditioner, "method": method}
    root = np.asarray(inv_sqrt_matvec(matrix, eye, **options).value, np.float64).T
    inverse = np.linalg.inv(np.asarray(matrix, np.float64))
    assert np.linalg.norm(root @ root.T - inverse) <= 3e-4 * np.linalg.norm(inverse)
    symmetric = power_times(matrix, eye, -0.5)
    assert np.linalg.norm(root - symmetric) > 0.01 * np.linalg.norm(symmetric)
    forward = np.asarray(sqrt_matvec(matrix, eye, **options).value, np.float64).T
    dense = np.asarray(matrix, np.float64)
    assert np.linalg.norm(forward @ forward.T - dense) <= 3e-4 * np.linalg.norm(dense)


def test_preconditioner_saves_products():
    dtype = jnp.zeros(()).dtype
    size = 100
    scales = np.geomspace(1, 1e3, size)
    matrix = with_spectrum(np.linspace(1, 3, size), 0) * np.sqrt(np.outer(scales, scales))
    matrix, b = jnp.asarray(matrix, dtype), jnp.ones(size, dtype)
    plain = inv_sqrt_matvec(matrix, b, key=KEY, rtol=1e-3)
    better = inv_sqrt_matvec(
        matrix, b, key=KEY, rtol=1e-3, preconditioner=Diagonal(jnp.asarray(scales, dtype))
    )
    assert int(better.num_matvecs) < int(plain.num_matvecs) / 2


def test_pytrees_and_callables(dtype):
    diagonal = {"a": jnp.asarray([1.0, 4.0], dtype), "b": jnp.asarray([[9.0, 16.0]], dtype)}
    b = jax.tree.map(jnp.ones_like, diagonal)

    def product(tree):
        return jax.tree.map(jnp.multiply, diagonal, tree)

    value = inv_sqrt_matvec(product, b, key=KEY).value
    np.testing.assert_allclose(value["a"], [1, 0.5], rtol=2e-4)
    np.testing.assert_allclose(value["b"], [[1 / 3, 0.25]], rtol=2e-4)


def test_bad_arguments():
    matrix, b = jnp.eye(3), jnp.ones(3)
    with pytest.raises(ValueError, match="rtol"):
        inv_sqrt_matvec(matrix, b, key=KEY, rtol=0.0)
    with pytest.raises(ValueError, match="key is needed"):
        inv_sqrt_matvec(matrix, b)
    with pytest.raises(ValueError, match="max_steps"):
        inv_sqrt_matvec(matrix, b, key=KEY, max_steps=0)
    with pytest.raises(TypeError, match="tolerance"):
        sqrt_matvec(matrix, b, key=KEY, tolerance=1e-3)
