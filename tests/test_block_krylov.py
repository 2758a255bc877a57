"""Block Lanczos: the defining equations, lost directions, drivers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from block_cases import BLOCKS, COUNT, KINDS, SIZE, basis, matrix, right_hand_sides
from harness import no_type_checker
from pnkrylov.block import block_lanczos
from pnkrylov.block.krylov import begin_block_run, continue_block_run
from pnkrylov.block.orthonormal import orthonormal_rows
from pnkrylov.block.tridiagonal import BlockTridiagonal
from pnkrylov.krylov import lanczos
from pnkrylov.operators import as_operator


def dense_tridiagonal(run):
    """T from the blocks, by NumPy; the last coupling is not part of it."""
    diagonal, coupling = np.asarray(run.diagonal), np.asarray(run.coupling)
    n, k, _ = diagonal.shape
    T = np.zeros((n * k, n * k))
    for j in range(n):
        T[j * k : j * k + k, j * k : j * k + k] = diagonal[j]
        if j + 1 < int(run.filled):
            T[j * k + k : j * k + 2 * k, j * k : j * k + k] = coupling[j]
            T[j * k : j * k + k, j * k + k : j * k + 2 * k] = coupling[j].T
    return T


def check_relations(run, A, V):
    """Orthonormal rows, `A Q = Q T + rest`, `V = F Q_1`, within a few eps."""
    eps = float(jnp.finfo(run.dtype).eps)
    Q, present = np.asarray(run.vectors, np.float64), np.asarray(run.present)
    np.testing.assert_allclose(Q @ Q.T, np.diag(present * 1.0), atol=20 * eps)
    k, last = run.block_size, int(run.filled) - 1
    following = np.asarray(run.next_block, np.float64)
    T = dense_tridiagonal(run).astype(np.float64)
    residual = Q @ A - T @ Q
    residual[last * k : last * k + k] -= np.asarray(run.coupling, np.float64)[last].T @ following
    # Dropping a direction costs up to ten eps ||A||.
    assert np.abs(residual).max() <= 30 * eps * np.linalg.norm(A, 2)
    np.testing.assert_allclose(following @ Q.T, 0, atol=20 * eps)
    start = np.asarray(run.start_coordinates, np.float64) @ Q[:k]
    start *= np.asarray(run.start_norms, np.float64)[:, None]
    for row, expected in zip(start, V, strict=True):
        np.testing.assert_allclose(row, expected, atol=20 * eps * np.abs(expected).max())
    return int(present.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_the_defining_equations_hold(kind, dtype):
    V = right_hand_sides(kind).astype(dtype).astype(np.float64)
    A = matrix().astype(dtype).astype(np.float64)
    run = basis(kind, dtype=dtype.name)
    rank = check_relations(run, A, V)
    assert bool(run.exhausted())
    assert rank == SIZE
    first = np.asarray(run.present).reshape(-1, COUNT)[0].tolist()
    assert first == [True, kind != "zero", kind != "dependent"]
    assert np.any(np.asarray(run.start_coordinates)[1]) == (kind != "zero")


def test_a_block_goes_on_with_the_columns_that_have_not_converged(dtype):
    A, V = np.zeros((SIZE, SIZE)), right_hand_sides("independent").copy()
    A[:4, :4] = matrix("exponential", 4)
    A[4:, 4:] = matrix("power-law-1", 20)
    V[0, 4:] = 0
    V[1:, :4] = 0
    A, V = A.astype(dtype), V.astype(dtype)
    run = block_lanczos(A, jnp.asarray(V), BLOCKS)
    assert check_relations(run, A.astype(np.float64), V.astype(np.float64)) == SIZE
    counts = np.asarray(run.present).reshape(-1, COUNT).sum(axis=1)
    assert counts.tolist() == [3] * 4 + [2] * 6 + [0] * 14
    assert int(run.filled) == 10 and float(run.residual_norm()) == 0


def test_one_vector_gives_the_single_run(dtype):
    A, v = matrix().astype(dtype), right_hand_sides("independent")[0].astype(dtype)
    single, block = lanczos(A, jnp.asarray(v), 10), block_lanczos(A, jnp.asarray(v[None]), 10)
    tolerance = 100 * float(jnp.finfo(dtype).eps)
    scale = float(np.max(single.alpha))
    np.testing.assert_allclose(block.diagonal[:, 0, 0], single.alpha, atol=tolerance * scale)
    np.testing.assert_allclose(block.coupling[:, 0, 0], single.beta, atol=tolerance * scale)
    np.testing.assert_allclose(block.vectors, single.vectors, atol=100 * tolerance)


def test_the_drivers_and_a_continued_run_agree():
    A, V = matrix(), jnp.asarray(right_hand_sides("independent"))
    whole = block_lanczos(A, V, 6)
    host = block_lanczos(A, V, 6, driver="host")
    assert (whole.driver, host.driver) == ("compiled", "host")
    part = continue_block_run(block_lanczos(A, V, 4, driver="host"), as_operator(A), 2)
    for other in (host, part):
        np.testing.assert_allclose(other.vectors, whole.vectors, atol=1e-12)
        np.testing.assert_allclose(other.coupling, whole.coupling, atol=1e-11)


def test_trim_leaves_the_filled_blocks():
    run = basis("independent")
    assert run.num_blocks == BLOCKS and run.trim().num_blocks == SIZE // COUNT
    assert int(run.trim().num_vectors()) == int(run.num_vectors()) == SIZE
    assert int(run.num_vectors(jnp.asarray(2, jnp.int32))) == 2 * COUNT


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), exponent=st.floats(-14, 0), copies=st.integers(0, 2))
def test_rows_are_orthonormal_however_dependent_they_are(seed, exponent, copies):
    rng = np.random.default_rng(seed)
    block = rng.standard_normal((4, 30)) * rng.choice([1e-3, 1.0, 1e3], 4)[:, None]
    for index in range(copies):
        mix = rng.standard_normal(index + 1)
        block[3 - index] = mix @ block[: index + 1]
        block[3 - index] += 10**exponent * rng.standard_normal(30)
    scale = np.linalg.norm(block, axis=1)
    tolerance = jnp.asarray(1e-12 * scale)
    rows, factor, present = orthonormal_rows(
        jnp.asarray(block), tolerance, jnp.asarray(30, jnp.int32)
    )
    np.testing.assert_allclose(rows @ rows.T, np.diag(np.asarray(present) * 1.0), atol=1e-13)
    error = np.linalg.norm(factor @ rows - block, axis=1)
    assert np.all(error <= 1e-12 * scale + 1e-14 * scale.max())
    assert np.allclose(factor, np.tril(factor))


def test_no_more_rows_than_there_is_room_for():
    block = jnp.asarray(np.random.default_rng(0).standard_normal((4, 30)))
    present = orthonormal_rows(block, jnp.zeros(4), jnp.asarray(2, jnp.int32))[2]
    assert np.asarray(present).tolist() == [True, True, False, False]
    # A NaN is no lost direction.
    broken = orthonormal_rows(block.at[1, 3].set(jnp.nan), jnp.zeros(4), jnp.asarray(9, jnp.int32))
    assert np.isnan(broken[0][1]).all()


@pytest.mark.parametrize("shift", [0.0, 2.5])
@pytest.mark.parametrize("kind", ["independent", "zero"])
def test_the_factored_tridiagonal(kind, shift):
    run = basis(kind)
    present, rows = np.asarray(run.present), len(np.asarray(run.present))
    T = dense_tridiagonal(run) + shift * np.eye(rows)
    t = BlockTridiagonal.of(run, jnp.asarray(shift))
    inside = np.ix_(present, present)
    unit, identity = float(t.unit), jnp.eye(rows)
    inverse = np.linalg.inv(T[inside])
    np.testing.assert_allclose(
        np.asarray(t.multiply(identity))[inside] * unit, T[inside], atol=1e-12
    )
    np.testing.assert_allclose(np.asarray(t.solve(identity))[inside] / unit, inverse, atol=1e-12)
    assert float(t.logdet()) == pytest.approx(np.linalg.slogdet(T[inside])[1], rel=1e-12)
    ends = np.linalg.eigvalsh(T[inside])
    np.testing.assert_allclose(t.ritz_range(), ends[[0, -1]], rtol=1e-10)
    # Beyond some size the ends come from a Lanczos run on T.
    np.testing.assert_allclose(t.extremes_by_runs() * unit, ends[[0, -1]], rtol=1e-6)
    level = jnp.asarray(3, jnp.int32)
    head = np.asarray(t.head_rows(level)) & present
    tail = ~np.asarray(t.head_rows(level)) & present
    schur = T[np.ix_(tail, tail)] - T[np.ix_(tail, head)] @ np.linalg.solve(
        T[np.ix_(head, head)], T[np.ix_(head, tail)]
    )
    s = t.tail(level)
    np.testing.assert_allclose(
        np.asarray(s.multiply(identity))[np.ix_(tail, tail)] * unit, schur, atol=1e-11
    )
    np.testing.assert_allclose(
        np.asarray(s.solve(identity))[np.ix_(tail, tail)] / unit, np.linalg.inv(schur), atol=1e-11
    )
    assert float(s.logdet()) == pytest.approx(np.linalg.slogdet(schur)[1], rel=1e-11)
    vectors = np.random.default_rng(0).standard_normal((rows, 5))
    along = t.inverse_diagonal_along(jnp.asarray(vectors), t.head_rows(level))
    expected = vectors[head].T @ np.linalg.solve(T[np.ix_(head, head)], vectors[head])
    np.testing.assert_allclose(along / unit, np.diag(expected), rtol=1e-10)


def test_refusals():
    A, V = jnp.asarray(matrix()), jnp.asarray(right_hand_sides("independent"))
    with pytest.raises(ValueError, match=r"starts has shape \(3, 23\), but A has size 24"):
        block_lanczos(A, V[:, 1:], 4)
    with pytest.raises(ValueError, match=r"num_steps=25 exceeds the dimension d=24"):
        block_lanczos(A, V, 25)
    with no_type_checker(), pytest.raises(ValueError, match=r"driver='gpu' is unknown"):
        continue_block_run(begin_block_run(V), as_operator(A), 2, driver="gpu")  # pyright: ignore
    with pytest.raises(ValueError, match=r"driver='host' and progress=True need concrete values"):
        jax.eval_shape(lambda V: block_lanczos(A, V, 2, driver="host"), V)


@pytest.mark.slow
@pytest.mark.parametrize("spectrum", oracles.SPECTRA)
@pytest.mark.parametrize("count", [2, 5])
def test_the_defining_equations_hold_on_every_spectrum(spectrum, count, dtype):
    A = matrix(spectrum, 120).astype(dtype)
    for kind in KINDS:
        V = right_hand_sides(kind, spectrum, 120, count).astype(dtype)
        run = block_lanczos(jnp.asarray(A), jnp.asarray(V), 30)
        check_relations(run, A.astype(np.float64), V.astype(np.float64))
