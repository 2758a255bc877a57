"""The factored tridiagonal against dense NumPy: solves, roots, blocks, logdet, Ritz values."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracles
from pnkrylov.krylov import KrylovBasis
from pnkrylov.tridiagonal import Tridiagonal, extreme_eigenvalues

ROWS = 7


def coefficients(seed, spread=1.0):
    """alpha, beta of a random SPD tridiagonal, diagonally dominant, over `spread` decades."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-spread, spread, ROWS)
    beta = rng.uniform(0.2, 0.45, ROWS) * np.sqrt(scale * np.roll(scale, -1))
    return scale, beta


def basis_of(alpha, beta, dtype, filled=ROWS):
    inside = np.arange(ROWS) < filled
    return KrylovBasis(
        vectors=jnp.zeros((ROWS, 9), dtype),
        alpha=jnp.asarray(np.where(inside, alpha, 0), dtype),
        beta=jnp.asarray(np.where(inside, beta, 0), dtype),
        next_vector=jnp.zeros(9, dtype),
        filled=jnp.asarray(filled, jnp.int32),
        start_norm=jnp.ones((), dtype),
    )


@eqx.filter_jit
def everything(basis, shift, level, rhs, block):
    """All operations, in the user's units, compiled once."""
    T = Tridiagonal.of(basis, shift)
    head, tail, root = T.head(level), T.tail(level), jnp.sqrt(T.unit)
    identity = jnp.eye(ROWS, dtype=rhs.dtype)
    return {
        "solve": T.solve(rhs) / T.unit,
        "block": T.solve(block) / T.unit,
        "root": T.factor_mv(identity) / root,
        "root transposed": T.factor_transpose_mv(identity) / root,
        "diagonal": T.inverse_diagonal() / T.unit,
        "logdet": T.logdet(),
        "ritz": T.ritz_range(),
        "residual": T.residual * T.unit,
        "head": head.solve(identity) / T.unit,
        "head diagonal": head.inverse_diagonal() / T.unit,
        "head logdet": head.logdet(),
        "head residual": head.residual * T.unit,
        "head filled": head.filled,
        "tail": tail.solve(identity) / T.unit,
        "tail alpha": tail.alpha * T.unit,
        "tail diagonal": tail.inverse_diagonal() / T.unit,
    }


def compute(dtype, seed, shift, level, filled, spread=1.0):
    alpha, beta = coefficients(seed, spread)
    rng = np.random.default_rng(seed + 1)
    rhs, block = rng.standard_normal(ROWS), rng.standard_normal((ROWS, 3))
    basis = basis_of(alpha, beta, dtype, filled)
    level_array = jnp.asarray(level, jnp.int32)
    to_array = lambda x: jnp.asarray(x, dtype)  # noqa: E731
    found = everything(basis, to_array(shift), level_array, to_array(rhs), to_array(block))
    found = {name: np.asarray(value, np.float64) for name, value in found.items()}
    dense = oracles.tridiagonal(alpha, beta[:-1])[:filled, :filled] + shift * np.eye(filled)
    return found, dense, rhs, block, beta


@pytest.mark.parametrize("filled", [1, 4, ROWS])
@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_against_dense_algebra(filled, shift, dtype):
    """Diagonally dominant, so the factorisation is as accurate as the dtype: 100 eps."""
    tolerance = 100 * float(jnp.finfo(dtype).eps)
    for seed in range(3):
        for level in range(filled + 1):
            found, dense, rhs, block, beta = compute(dtype, seed, shift, level, filled)
            inverse = np.linalg.inv(dense)

            def same(name, expected, found=found):
                scale = np.abs(expected).max() if np.size(expected) else 1
                actual = found[name][tuple(slice(n) for n in np.shape(expected))]
                np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)

            same("solve", inverse @ rhs[:filled])
            same("block", inverse @ block[:filled])
            root = found["root"][:filled, :filled]
            np.testing.assert_allclose(root @ root.T, inverse, atol=tolerance * inverse.max())
            np.testing.assert_allclose(found["root transposed"], found["root"].T, atol=tolerance)
            same("diagonal", np.diag(inverse))
            assert not found["diagonal"][filled:].any()
            same("logdet", np.linalg.slogdet(dense)[1])
            same("ritz", np.linalg.eigvalsh(dense)[[0, -1]])
            same("residual", beta[filled - 1])
            # The leading block, and what is eliminated when it is.
            head = np.linalg.inv(dense[:level, :level])
            same("head", head)
            same("head diagonal", np.diag(head))
            assert not found["head diagonal"][level:].any()
            np.testing.assert_allclose(
                found["head logdet"], np.linalg.slogdet(dense[:level, :level])[1], atol=tolerance
            )
            assert found["head filled"] == level
            same("head residual", beta[level - 1] if level else 0.0)
            right, below = dense[:level, level:], dense[level:, level:]
            schur = below - right.T @ head @ right
            tail = found["tail"][level:filled, level:filled]
            expected = np.linalg.inv(schur)
            np.testing.assert_allclose(tail, expected, atol=tolerance * inverse.max())
            np.testing.assert_allclose(
                found["tail diagonal"][level:filled],
                np.diag(expected),
                atol=tolerance * inverse.max(),
            )
            assert not found["tail"][:level, level:].any()
            np.testing.assert_allclose(
                found["tail alpha"][level:filled], np.diag(schur), rtol=tolerance
            )


@given(seed=st.integers(0, 10_000), shift=st.floats(0, 100), level=st.integers(0, ROWS))
def test_any_tridiagonal(dtype, seed, shift, level):
    """Entries over eight decades: the inverse is a sum of positive terms, relatively accurate."""
    found, dense, *_ = compute(dtype, seed, shift, level, ROWS, spread=4.0)
    tolerance = 1000 * float(jnp.finfo(dtype).eps)
    inverse = np.linalg.inv(dense)
    np.testing.assert_allclose(found["diagonal"], np.diag(inverse), rtol=tolerance)
    logdet = np.linalg.slogdet(dense)[1]
    np.testing.assert_allclose(found["logdet"], logdet, rtol=tolerance, atol=100 * tolerance)
    values = np.linalg.eigvalsh(dense)
    atol = tolerance * values[-1]
    np.testing.assert_allclose(found["ritz"], values[[0, -1]], rtol=0, atol=atol)


def test_extreme_scales(dtype):
    """Nothing under- or overflows at 1e+-30, where squares leave float32."""
    alpha, beta = coefficients(0, spread=0.3)
    dense = oracles.tridiagonal(alpha, beta[:-1])
    for scale in (1e-30, 1e30):
        basis = basis_of(alpha * scale, beta * scale, dtype)
        T = Tridiagonal.of(basis, jnp.zeros((), dtype))
        expected = np.diag(np.linalg.inv(dense))
        np.testing.assert_allclose(
            np.asarray(T.inverse_diagonal() / T.unit, np.float64) * scale, expected, rtol=1e-5
        )
        logdet = np.linalg.slogdet(dense)[1] + ROWS * np.log(scale)
        np.testing.assert_allclose(T.logdet(), logdet, rtol=1e-5)
        values = np.linalg.eigvalsh(dense)[[0, -1]]
        found = np.asarray(T.ritz_range(), np.float64) / scale
        np.testing.assert_allclose(found, values, rtol=1e-4)


def test_minus_factors_anew(dtype):
    alpha, beta = coefficients(2, spread=0.2)
    basis = basis_of(alpha, beta, dtype, filled=5)
    dense = oracles.tridiagonal(alpha, beta[:-1])[:5, :5]
    amount = 0.5 * np.linalg.eigvalsh(dense)[0]
    T = Tridiagonal.of(basis, jnp.zeros((), dtype))
    less = T.minus(jnp.asarray(amount, dtype) / T.unit)
    expected = np.linalg.inv(dense - amount * np.eye(5))
    identity = jnp.eye(ROWS, dtype=dtype)
    found = np.asarray(less.solve(identity) / T.unit, np.float64)[:5, :5]
    tolerance = 200 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(found, expected, atol=tolerance * expected.max())


def test_an_indefinite_tridiagonal_shows_its_negative_ritz_value(dtype):
    dense = np.array([[1.0, 2, 0], [2, 1, 0.5], [0, 0.5, 3]])
    ends = extreme_eigenvalues(jnp.asarray([1, 1, 3], dtype), jnp.asarray([2, 0.5], dtype))
    np.testing.assert_allclose(ends, np.linalg.eigvalsh(dense)[[0, -1]], rtol=1e-5)
    assert float(ends[0]) < 0


def test_an_empty_run(dtype):
    """A zero start vector fills no row; nothing divides by zero."""
    basis = basis_of(np.zeros(ROWS), np.zeros(ROWS), dtype, filled=0)
    T = Tridiagonal.of(basis, jnp.zeros((), dtype))
    assert float(T.logdet()) == 0 and float(T.residual) == 0
    assert not np.any(T.inverse_diagonal())
    assert np.all(np.isfinite(T.solve(jnp.ones(ROWS, dtype))))


def test_vmap_over_shifts_equals_a_loop(dtype):
    alpha, beta = coefficients(3)
    basis, shifts = basis_of(alpha, beta, dtype), jnp.asarray([0.0, 0.5, 2.0], dtype)
    batch = jax.vmap(lambda shift: Tridiagonal.of(basis, shift).logdet())(shifts)
    for shift, found in zip(shifts, batch, strict=True):
        dense = oracles.tridiagonal(alpha, beta[:-1]) + float(shift) * np.eye(ROWS)
        np.testing.assert_allclose(found, np.linalg.slogdet(dense)[1], rtol=1e-4)
