"""Beliefs about `A^-1` from block runs: the dense oracle, the single belief, shifts, refusals."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pnkrylov as pk
from block_cases import BLOCKS, COUNT, SIZE, basis, matrix, split
from harness import no_type_checker
from pnkrylov.block import inverse_block
from pnkrylov.block.inverse import block_inverse_belief
from pnkrylov.block.runs import BlockRun
from pnkrylov.operators import as_operator
from pnkrylov.probes import run_probes
from pnkrylov.results import RESULTS

KEY = jax.random.key(5)
LEVEL, SHIFT = 2, 0.3
# Nine directions are left to the bulk; the probes do not span them.
PARTIAL = {"block_size": COUNT, "num_steps": 3, "lookahead": 2, "num_probes": 4}


def same(a, b, rtol=1e-8):
    scale = float(np.max(np.abs(b), initial=0))
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


@functools.cache
def complete(kind, dtype="float64"):
    """A run that exhausts the space, with probes that span the complement of level 2."""
    run, level = basis(kind, dtype=dtype), jnp.asarray(LEVEL, jnp.int32)
    operator = as_operator(matrix().astype(dtype))
    return BlockRun(
        basis=run,
        level=level,
        asymmetry=jnp.asarray(-1, dtype),
        num_matvecs=jnp.asarray(COUNT * BLOCKS, jnp.int32),
        structure=operator.structure,
        probes=run_probes(operator, run, level, KEY, SIZE, SIZE),
    )


def of(run, layout, shift=0.0):
    dtype = run.basis.dtype
    return block_inverse_belief(run, jnp.zeros(SIZE, dtype), jnp.asarray(shift, dtype), layout)


@functools.cache
def partial():
    return pk.inverse(matrix(), key=KEY, **PARTIAL)


@pytest.mark.parametrize("kind", ["independent", "dependent"])
def test_the_papers_layout_is_the_dense_sigma(kind, dtype):
    belief = of(complete(kind, dtype.name), "paper")
    oracle = split(kind, "power-law-1", LEVEL, dtype.name)
    tolerance = 1e-9 if dtype == jnp.float64 else 1e-3
    exact = np.linalg.inv(oracle.matrix)
    same(belief.covariance.as_matrix(), oracle.sigma(), rtol=tolerance)
    same(belief.covariance.diagonal(), np.diag(oracle.sigma()), rtol=tolerance)
    same(belief.trace().value, np.trace(exact), rtol=tolerance)
    same(belief.logdet().value, np.linalg.slogdet(oracle.matrix)[1], rtol=tolerance)
    assert float(belief.trace().standard_error) <= tolerance * np.trace(exact)


def test_a_complete_run_resolves_the_inverse_itself():
    belief = of(complete("independent"), "resolve-all")
    same(belief.covariance.as_matrix(), np.linalg.inv(matrix()), rtol=1e-9)
    assert int(belief.covariance.bulk_dimension()) == 0


@pytest.mark.parametrize("layout", [pytest.param("paper", marks=pytest.mark.slow), "resolve-all"])
def test_blocks_of_one_give_the_single_belief(layout):
    options = {"key": KEY, "num_steps": 5, "lookahead": 4, "num_probes": 4, "layout": layout}
    block = inverse_block(matrix(), block_size=1, **options)
    single = pk.inverse(matrix(), **options)
    same(block.covariance.as_matrix(), single.covariance.as_matrix())
    for name in ("trace", "logdet"):
        ours, theirs = getattr(block, name)(), getattr(single, name)()
        for part in ("value", "standard_error", "quadrature_lower", "quadrature_upper"):
            same(getattr(ours, part), getattr(theirs, part), rtol=1e-7)
    for name in ("num_matvecs", "num_steps", "lookahead", "num_probes", "kappa_s", "coupling_norm"):
        same(getattr(block.stats, name), getattr(single.stats, name), rtol=1e-7)


def test_a_partial_run_shares_its_trace_out(dtype):
    belief = pk.inverse(matrix().astype(dtype.name), key=KEY, **PARTIAL)
    tolerance = 1e-9 if dtype == jnp.float64 else 1e-4
    dense = np.asarray(belief.covariance.as_matrix(), np.float64)
    rows = np.asarray(belief.run.basis.vectors, np.float64)
    given = matrix().astype(dtype.name).astype(np.float64)
    # Resolved: T^-1 over all fifteen vectors; the bulk: a multiple of the identity beside them.
    T = rows @ given @ rows.T
    omega = (np.trace(dense) - np.trace(np.linalg.inv(T))) / (SIZE - len(rows))
    bulk = omega * (np.eye(SIZE) - rows.T @ rows)
    same(dense, rows.T @ np.linalg.inv(T) @ rows + bulk, rtol=tolerance)
    same(belief.stats.bulk_variance, omega, rtol=tolerance)
    same(belief.variance(), np.diag(dense), rtol=tolerance)
    vector = jnp.arange(1.0, SIZE + 1, dtype=dtype)
    same(belief.matvec(vector).value, dense @ np.asarray(vector), rtol=tolerance)
    same(belief.push(jnp.eye(SIZE, dtype=dtype)[:3]).covariance, dense[:3, :3], rtol=tolerance)


def test_given_start_vectors_span_the_first_block():
    rows = np.random.default_rng(3).standard_normal((2, SIZE))
    rows[1] = 3 * rows[0]  # a lost direction is no error
    tree = {"b": jnp.asarray(rows[:, 20:]), "a": jnp.asarray(rows[:, :20])}
    operator = as_operator(
        lambda v: pieces(matrix() @ jnp.concatenate([v["a"], v["b"]])), like=pieces(matrix()[0])
    )
    options = {"key": KEY, "block_size": 2, "num_steps": 3, "lookahead": 2, "num_probes": 4}
    belief = pk.inverse(operator, start=tree, **options)
    first = np.asarray(belief.run.basis.vectors)[:2]
    same(np.abs(first[0] @ rows[0]), np.linalg.norm(rows[0]))
    same(first[1], np.zeros(SIZE))
    with pytest.raises(pk.NotFiniteError, match="start"):
        pk.inverse(matrix(), start=np.full((2, SIZE), np.nan), **options)


def pieces(flat):
    return {"a": jnp.asarray(flat[:20]), "b": jnp.asarray(flat[20:])}


def test_draws_have_the_covariance():
    belief, count = of(complete("dependent"), "paper"), 40_000
    dense = np.asarray(belief.covariance.as_matrix())
    found = np.cov(np.asarray(belief.sample(KEY, count)), rowvar=False, bias=True)
    # Each entry of a sample covariance has this standard error; five of them over 300 entries.
    variances = np.diag(dense)
    error = np.sqrt((variances[:, None] * variances[None, :] + dense**2) / count)
    assert np.all(np.abs(found - dense) <= 5 * error)


def test_a_shift_is_the_belief_about_the_shifted_operator():
    shifted = partial().shift(SHIFT)
    direct = pk.inverse(matrix() + SHIFT * np.eye(SIZE), key=KEY, **PARTIAL)
    assert int(shifted.stats.num_matvecs) == int(partial().stats.num_matvecs)
    # The probes may stop at another depth: compare what does not depend on them.
    same(shifted.run.basis.vectors, direct.run.basis.vectors, rtol=1e-6)
    same(shifted.stats.ritz_min, direct.stats.ritz_min)
    whole = of(complete("independent"), "paper", SHIFT)
    shifted_matrix = matrix() + SHIFT * np.eye(SIZE)
    same(whole.trace().value, np.trace(np.linalg.inv(shifted_matrix)))
    same(whole.logdet().value, np.linalg.slogdet(shifted_matrix)[1])


@pytest.mark.slow
@pytest.mark.one_precision
def test_traces_are_unbiased_under_jit_and_vmap():
    @eqx.filter_jit
    @eqx.filter_vmap
    def estimates(key):
        belief = inverse_block(matrix(), key=key, check_symmetric=False, **PARTIAL)
        return belief, belief.trace().value, belief.logdet().value

    beliefs, traces, logdets = estimates(jax.random.split(KEY, 100))
    assert "blocks of 3" in str(beliefs)
    for found, exact in (
        (traces, np.trace(np.linalg.inv(matrix()))),
        (logdets, np.linalg.slogdet(matrix())[1]),
    ):
        assert abs(np.mean(found) - exact) <= 4 * np.std(found) / 10


def test_a_budget_is_spent_and_not_exceeded():
    belief = pk.inverse(matrix(), key=KEY, block_size=2, budget=26)
    assert 24 <= int(belief.stats.num_matvecs) <= 26
    assert "blocks of 2" in str(belief)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block_size": 0}, ValueError, "block_size=0 must be at least 1"),
        ({"block_size": 2.0}, TypeError, r"block_size=2\.0 must be an int"),
        ({"block_size": 25}, ValueError, "block_size=25 exceeds the size of A, 24"),
        (
            {"block_size": 2, "start": jnp.ones(24)},
            ValueError,
            "leading axis of length block_size=2",
        ),
        ({"block_size": 2, "start": jnp.ones((2, 23))}, ValueError, "start.*23"),
        ({"block_size": 9, "budget": 12}, ValueError, "budget=12 is too small"),
        ({"block_size": 2, "layout": "other"}, ValueError, "layout='other' is unknown"),
        ({"block_size": 2, "num_steps": 25}, ValueError, "num_steps=25"),
        ({"block_size": 2, "mean": jnp.ones(3)}, ValueError, "length 24, but"),
        ({"block_size": 2, "key": None}, TypeError, "key is missing"),
    ],
)
def test_what_is_refused(options, error, message):
    with no_type_checker(), pytest.raises(error, match=message):
        pk.inverse(matrix(), **({"key": KEY} | options))


def test_failures_raise_or_carry_a_code():
    with pytest.raises(pk.NotPositiveDefiniteError, match="Ritz value"):
        partial().shift(-200.0)
    failed = pk.inverse(-matrix(), key=KEY, throw=False, **PARTIAL)
    assert failed.result == RESULTS.not_positive_definite
    assert np.all(np.isnan(failed.std())) and np.isnan(failed.trace().value)
