"""The coupling of rank k and the covariance against the dense oracle (METHOD section 14)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from block_cases import COUNT, SIZE, basis, matrix, split
from harness import relative_tolerance
from pnkrylov._structure import VectorStructure
from pnkrylov.block.coupling import BlockCoupling
from pnkrylov.block.covariance import BlockCovariance
from pnkrylov.block.tridiagonal import BlockTridiagonal

CASES = [
    ("independent", "power-law-1", 1),
    ("independent", "power-law-1", 4),
    ("independent", "exponential", 7),
    ("dependent", "power-law-1", 3),
    ("zero", "bulk+outliers", 2),
    ("scales", "exponential", 4),
    ("eigenvectors", "kernel-5d", 3),
]


@functools.cache
def parts(kind, spectrum, level, dtype="float64"):
    run = basis(kind, spectrum, dtype)
    tridiagonal = BlockTridiagonal.of(run, jnp.zeros((), dtype))
    return run, tridiagonal, _coupling(tridiagonal, jnp.asarray(level, jnp.int32))


_coupling = jax.jit(BlockCoupling.of)


def covariance(kind, spectrum, level, *, resolved, dtype="float64"):
    run, tridiagonal, coupling = parts(kind, spectrum, level, dtype)
    omega = jnp.asarray(split(kind, spectrum, level, dtype).omega, dtype) * tridiagonal.unit
    structure = VectorStructure.flat(SIZE, dtype)
    return BlockCovariance.of(run, tridiagonal, coupling, omega, structure, resolved=resolved)


def close(actual, expected, tolerance):
    expected = np.asarray(expected)
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(("kind", "spectrum", "level"), CASES)
def test_the_oracle_inverts_the_matrix(kind, spectrum, level):
    oracle = split(kind, spectrum, level)
    close(oracle.exact_inverse(), np.linalg.inv(matrix(spectrum)), 1e-10)
    assert np.trace(oracle.sigma()) == pytest.approx(np.trace(np.linalg.inv(matrix(spectrum))))


@pytest.mark.parametrize(("kind", "spectrum", "level"), CASES)
def test_the_coupling_is_that_of_the_oracle(kind, spectrum, level, dtype):
    oracle = split(kind, spectrum, level, dtype.name)
    run, tridiagonal, coupling = parts(kind, spectrum, level, dtype.name)
    unit, tolerance = float(tridiagonal.unit), relative_tolerance(dtype, 1e4)
    present = np.asarray(run.present).reshape(-1, COUNT)[level]
    assert bool(coupling.exists) and int(coupling.num_axes()) == present.sum() == oracle.rank
    inside = np.ix_(present, present)
    for power, found in ((1, coupling.p1), (2, coupling.p2)):
        assert not np.any(np.asarray(found)[~present]) and not np.any(
            np.asarray(found)[:, ~present]
        )
        close(np.asarray(found, np.float64)[inside] / unit**power, oracle.p(power), tolerance)
    close(np.asarray(coupling.gamma, np.float64)[inside] * unit, oracle.gamma, tolerance)
    vectors = np.asarray(run.vectors, np.float64)
    close((vectors.T @ coupling.parallel)[:, present], oracle.q_par, tolerance)
    close((vectors.T @ coupling.perpendicular)[:, present] / unit, oracle.q_perp, tolerance)
    # U is another basis of the same space: what does not depend on it must agree.
    axes = np.asarray(coupling.axes, np.float64) @ vectors
    close(axes.T @ axes, oracle.U @ oracle.U.T, tolerance)
    close(
        axes.T @ coupling.axes_covariance @ axes / unit,
        oracle.U @ oracle.sigma_u @ oracle.U.T,
        tolerance,
    )
    close(axes.T @ coupling.axes_factor[:, present] / unit, oracle.q_perp, tolerance)
    assert float(coupling.trace()) / unit == pytest.approx(
        np.trace(oracle.coupling()), rel=tolerance
    )
    rest = np.linalg.inv(oracle.S) @ oracle.rest @ oracle.U
    u = oracle.rest @ oracle.U
    norm = np.linalg.norm(rest - u @ (u.T @ rest), 2)
    # A difference of squares: half of the digits.
    scale = np.linalg.norm(rest, 2)
    assert float(coupling.norm()) / unit == pytest.approx(norm, abs=10 * tolerance**0.5 * scale)


@pytest.mark.one_precision
@pytest.mark.parametrize("resolved", [True, False])
@pytest.mark.parametrize(("kind", "spectrum", "level"), CASES)
def test_the_covariance_is_the_dense_one(kind, spectrum, level, resolved, dtype):
    expected = split(kind, spectrum, level, dtype.name).sigma(resolved=resolved)
    own = covariance(kind, spectrum, level, resolved=resolved, dtype=dtype.name)
    tolerance = relative_tolerance(dtype, 1e4)
    close(own.block_mv(jnp.eye(SIZE, dtype=dtype)), expected, tolerance)
    close(own.diagonal(), np.diag(expected), tolerance)
    assert float(own.trace()) == pytest.approx(np.trace(expected), rel=tolerance)
    rows = np.random.default_rng(1).standard_normal((4, SIZE)).astype(dtype)
    close(own.push(jnp.asarray(rows)), rows @ expected @ rows.T, tolerance)


@pytest.mark.parametrize("resolved", [True, False])
def test_draws_have_the_covariance(resolved):
    own = covariance("zero", "power-law-1", 2, resolved=resolved)
    expected = np.asarray(own.as_matrix())
    count = 20_000
    draws = np.asarray(own.sample(jax.random.key(0), count))
    # Whitened on its range, the empirical covariance is Wishart: its eigenvalues lie within
    # (1 -+ sqrt(d / n) -+ 4.5 / sqrt(n))^2 but for one run in 1e5 (Davidson and Szarek 2001).
    values, vectors = np.linalg.eigh(expected)
    kept = values > 1e-9 * values[-1]
    # Four resolved directions, of which Q_par couples two.
    assert kept.sum() == SIZE - (0 if resolved else 2)
    white = draws @ vectors[:, kept] / np.sqrt(values[kept])
    found = np.linalg.eigvalsh(white.T @ white / count)
    width = np.sqrt(SIZE / count) + 4.5 / np.sqrt(count)
    assert (1 - width) ** 2 <= found[0] and found[-1] <= (1 + width) ** 2
    assert np.abs(draws @ vectors[:, ~kept]).max(initial=0) <= 1e-6 * np.sqrt(values[-1])


def test_without_a_coupling_there_is_none():
    """At the last level the run is exhausted: nothing is coupled, nothing is left for the bulk."""
    run, tridiagonal, coupling = parts("independent", "power-law-1", 8)
    assert not bool(coupling.exists) and int(coupling.num_axes()) == 0
    own = BlockCovariance.of(
        run,
        tridiagonal,
        coupling,
        jnp.ones(()),
        VectorStructure.flat(SIZE, "float64"),
        resolved=True,
    )
    assert int(own.bulk_dimension()) == 0
    close(own.as_matrix(), np.linalg.inv(matrix()), 1e-10)
