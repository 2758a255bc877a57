"""Beliefs about `A^-1 V`: errors, shifts, refinement, draws, push-forwards, structure."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracles
import pnkrylov as pk
from block_cases import COUNT, KINDS, SIZE, matrix, right_hand_sides
from harness import CountingOperator, no_type_checker
from pnkrylov.block import BlockSolveBelief, solve_block
from pnkrylov.operators import as_operator

KEY = jax.random.key(7)
STEPS, AHEAD = 3, 10
# One shape for all: with rank two or three, thirteen blocks exhaust the space.
SOLVE = {"key": KEY, "num_steps": STEPS, "max_lookahead": AHEAD}


@functools.cache
def belief(kind="independent", spectrum="power-law-1", dtype="float64"):
    rows = right_hand_sides(kind, spectrum).astype(dtype)
    return solve_block(matrix(spectrum).astype(dtype), rows, **SOLVE)


def errors(own, kind, spectrum="power-law-1", shift=0.0):
    """`X - mean`, in float64."""
    V = right_hand_sides(kind, spectrum).astype(own.mean_flat.dtype).astype(np.float64)
    A = matrix(spectrum).astype(own.mean_flat.dtype).astype(np.float64)
    exact = np.linalg.solve(A + shift * np.eye(SIZE), V.T).T
    return exact - np.asarray(own.mean_flat, np.float64)


def same(a, b, rtol=1e-8):
    scale = float(np.max(np.abs(b), initial=0))
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


def assert_same_belief(a, b):
    same(a.mean_flat, b.mean_flat)
    same(a.std(), b.std())
    same(a.covariance.as_matrix(), b.covariance.as_matrix(), rtol=1e-7)
    same(a.rhs_covariance, b.rhs_covariance, rtol=1e-7)


@pytest.mark.parametrize("bound", [None, pytest.param(0.9, marks=pytest.mark.slow)])
def test_one_right_hand_side_gives_the_single_belief(bound):
    v = right_hand_sides("independent")[0]
    bound = bound and bound * np.linalg.eigvalsh(matrix())[0]
    block = solve_block(matrix(), v[None], lower_bound=bound, **SOLVE)
    single = pk.solve(matrix(), v, lower_bound=bound, **SOLVE)
    same(block.mean[0], single.mean, rtol=1e-12)
    same(block.std()[0], single.std(), rtol=1e-10)
    scale = block.rhs_covariance[0, 0]
    same(scale * block.covariance.as_matrix(), single.covariance.as_matrix(), rtol=1e-10)
    for name in ("error_norm", "energy_norm", "error_norm_upper", "seen"):
        same(getattr(block.error, name)[0], getattr(single.error, name), rtol=1e-10)
    skipped = ("asymmetry", "bulk_standard_error", "driver")
    for name in (n for n in vars(single.stats) if n not in skipped):
        same(getattr(block.stats, name), getattr(single.stats, name), rtol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_complete_look_ahead_knows_the_errors_exactly(kind, dtype):
    """`E^T E`, `E^T A E` and N, against dense algebra; zero and dependent columns included."""
    own = belief(kind, dtype=dtype.name)
    E = errors(own, kind)
    lengths = np.linalg.norm(E, axis=1)
    tolerance = 1e-8 if dtype == jnp.float64 else 2e-3
    # Rounding is part of the prediction; in float32 it is also part of the actual error.
    floor = 20 * float(jnp.finfo(dtype).eps) * np.linalg.norm(np.asarray(own.mean_flat), axis=1)
    assert np.all(np.abs(own.predicted_error - lengths) <= tolerance * lengths + 30 * floor)
    energies = np.sqrt(np.einsum("kd,de,ke->k", E, matrix(), E))
    assert np.all(np.abs(own.error.energy_norm - energies) <= tolerance * energies + 300 * floor)
    products = np.asarray(own.rhs_covariance) * float(own.covariance.trace())
    scale = np.where(lengths > 0, lengths, 1)
    allowed = 2 * tolerance + 100 * floor / scale
    deviation = np.abs(products - E @ E.T) / (scale[:, None] * scale[None, :])
    assert np.all(deviation <= allowed[:, None] + allowed[None, :])
    assert np.linalg.eigvalsh(products)[0] >= -1e-5 * products.max()
    if kind == "zero":
        assert not np.any(own.mean[1]) and not np.any(own.std()[1])
        assert not np.any(own.sample(KEY, 2)[:, 1])


def test_nothing_to_solve():
    own = solve_block(matrix(), np.zeros((COUNT, SIZE)), **SOLVE)
    assert own.result == pk.RESULTS.successful
    assert not np.any(own.mean) and not np.any(own.std()) and not np.any(own.predicted_error)


def test_the_means_are_best_in_the_joint_space():
    """The joint space contains every single Krylov space: each error is smaller in A-norm."""
    own = belief("independent")
    E = errors(own, "independent")
    for e, v in zip(E, right_hand_sides("independent"), strict=True):
        _, alone = oracles.conjugate_gradient_errors(matrix(), v, STEPS)
        assert np.sqrt(e @ matrix() @ e) < 0.7 * alone


def test_jit_and_vmap_give_the_same_beliefs():
    kinds = ("independent", "dependent", "zero")
    batch = jnp.asarray(np.stack([right_hand_sides(kind) for kind in kinds]))
    A = jnp.asarray(matrix())
    solved = eqx.filter_jit(eqx.filter_vmap(lambda V: solve_block(A, V, **SOLVE)))(batch)
    for index, kind in enumerate(kinds):
        one = jax.tree.map(lambda leaf, i=index: leaf[i], solved)
        same(one.mean_flat, belief(kind).mean_flat)
        same(one.predicted_error, belief(kind).predicted_error)
        same(one.rhs_covariance, belief(kind).rhs_covariance, rtol=1e-7)


@pytest.mark.parametrize("alpha", [0.4, 30.0])
def test_a_shifted_belief_is_that_of_a_fresh_run(alpha):
    own = belief("independent")
    shifted = own.shift(alpha)
    assert int(shifted.stats.num_matvecs) == int(own.stats.num_matvecs)
    V = right_hand_sides("independent")
    assert_same_belief(shifted, solve_block(matrix() + alpha * np.eye(SIZE), V, **SOLVE))
    assert_same_belief(shifted, solve_block(matrix(), V, shift=alpha, **SOLVE))
    same(
        shifted.predicted_error, np.linalg.norm(errors(shifted, "independent", shift=alpha), axis=1)
    )
    assert_same_belief(shifted.shift(0.0), own)


def test_products_are_counted_and_refining_is_a_longer_run():
    operator, V = CountingOperator(matrix()), right_hand_sides("independent")
    own = solve_block(operator, V, key=KEY, num_steps=2, max_lookahead=3)
    assert own.stats.driver == "host"
    assert operator.products == int(own.stats.num_matvecs) == 2 + COUNT * 5
    assert (int(own.stats.num_steps), int(own.stats.lookahead)) == (2 * COUNT, 3 * COUNT)
    before = operator.products
    refined = own.refine(operator, num_steps=1, max_lookahead=AHEAD)
    # The third block was there; five blocks complete the eight of the whole space.
    spent = operator.products - before
    assert spent == 3 * COUNT == int(refined.stats.num_matvecs) - int(own.stats.num_matvecs)
    assert_same_belief(refined, belief("independent"))
    # The belief that was refined stays usable: the host loop works in place.
    assert_same_belief(own.shift(0.0), own)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [8, 20, 40])
def test_a_budget_is_never_exceeded(budget):
    operator = CountingOperator(matrix())
    own = solve_block(operator, right_hand_sides("independent"), key=KEY, budget=budget)
    assert operator.products == int(own.stats.num_matvecs) <= budget
    if budget == 40:
        same(own.mean, np.linalg.solve(matrix(), right_hand_sides("independent").T).T)
    else:
        assert budget - int(own.stats.num_matvecs) < COUNT


def test_push_forwards_and_intervals():
    own = belief("independent")
    B = np.random.default_rng(0).standard_normal((4, SIZE))
    pushed = own.push(jnp.asarray(B))
    joint = np.kron(own.rhs_covariance, B @ np.asarray(own.covariance.as_matrix()) @ B.T)
    same(pushed.mean, np.asarray(own.mean) @ B.T)
    same(pushed.joint().covariance, joint, rtol=1e-10)
    same(pushed.joint().mean, (np.asarray(own.mean) @ B.T).reshape(-1))
    same(pushed.std().reshape(-1), np.sqrt(np.diag(joint)))
    one = own.push(jnp.asarray(B[0]))
    same(one.mean[:, 0], pushed.mean[:, 0])
    for view in (own, pushed):
        lower, upper = view.interval(0.9)
        same((upper - lower) / 2, 1.6448536269514722 * np.asarray(view.std()), rtol=1e-6)
        same((upper + lower) / 2, view.mean)
    same(np.asarray(own.variance()), np.asarray(own.std()) ** 2)


@pytest.mark.parametrize("view", ["belief", "push"])
def test_draws_have_the_moments_of_the_belief(view):
    own = belief("independent")
    rows = np.random.default_rng(0).standard_normal((3, SIZE))
    pushed = own.push(jnp.asarray(rows))
    count = 20_000
    if view == "belief":
        draws = np.asarray(own.sample(KEY, count))
        assert draws.shape == (count, COUNT, SIZE)
        draws = draws @ rows.T
    else:
        draws = np.asarray(pushed.sample(KEY, count))
    joint = pushed.joint()
    centred = draws.reshape(count, -1) - np.asarray(joint.mean)
    white = np.linalg.solve(np.linalg.cholesky(joint.covariance), centred.T).T
    # Whitened: means within 4.5 standard errors, covariance eigenvalues as Davidson and Szarek.
    assert np.abs(white.mean(axis=0)).max() <= 4.5 / np.sqrt(count)
    found = np.linalg.eigvalsh(white.T @ white / count)
    width = np.sqrt(white.shape[1] / count) + 4.5 / np.sqrt(count)
    assert (1 - width) ** 2 <= found[0] and found[-1] <= (1 + width) ** 2


@pytest.mark.slow
def test_refining_to_the_end_is_exact():
    V = right_hand_sides("independent")
    last = belief("independent").refine(matrix(), num_steps=5)
    assert int(last.stats.num_matvecs) == int(belief("independent").stats.num_matvecs)
    same(last.mean, np.linalg.solve(matrix(), V.T).T)
    # Nothing is left but rounding.
    assert np.max(last.std()) <= 1e-10 * np.max(np.abs(last.mean))


@pytest.mark.slow
def test_pytrees_with_a_leading_axis():
    V = right_hand_sides("independent")
    tree = {"a": jnp.asarray(V[:, :6].reshape(COUNT, 2, 3)), "b": jnp.asarray(V[:, 6:])}
    A = jnp.asarray(matrix())

    def product(x):
        flat = A @ jnp.concatenate([x["a"].reshape(-1), x["b"]])
        return {"a": flat[:6].reshape(2, 3), "b": flat[6:]}

    own = solve_block(product, tree, driver="compiled", **SOLVE)
    assert own.mean["a"].shape == (COUNT, 2, 3) and own.std()["b"].shape == (COUNT, SIZE - 6)
    same(own.mean_flat, belief("independent").mean_flat)
    same(own.std()["b"], belief("independent").std()[:, 6:])
    assert own.sample(KEY, 4)["a"].shape == (4, COUNT, 2, 3)
    lower, _ = own.interval()
    assert lower["a"].shape == (COUNT, 2, 3)


@pytest.mark.slow
def test_a_lower_bound_brackets_the_errors():
    A, V = matrix("exponential"), right_hand_sides("independent", "exponential")
    smallest = np.linalg.eigvalsh(A)[0]
    own = solve_block(A, V, key=KEY, num_steps=3, max_lookahead=2, lower_bound=0.8 * smallest)
    actual = np.linalg.norm(errors(own, "independent", "exponential"), axis=1)
    upper, seen = np.asarray(own.error.error_norm_upper), np.sqrt(own.error.seen)
    assert np.all(actual <= upper) and np.all(upper < 6 * actual)
    assert np.all(seen * own.predicted_error <= actual)
    assert np.all(own.predicted_error <= upper * (1 + 1e-10))
    with pytest.raises(pk.PnkrylovError, match=r"lower_bound=\d.* is not a lower bound"):
        solve_block(A, V, key=KEY, num_steps=3, max_lookahead=2, lower_bound=1e3 * smallest)


def test_a_failed_run_says_why_and_shows_no_number():
    V = right_hand_sides("independent")
    with pytest.raises(pk.NotPositiveDefiniteError, match=r"Ritz value -\d"):
        solve_block(matrix() - 20 * np.eye(SIZE), V, **SOLVE)
    broken = solve_block(matrix() - 20 * np.eye(SIZE), V, throw=False, **SOLVE)
    assert broken.result == pk.RESULTS.not_positive_definite
    assert np.isnan(broken.mean).all() and np.isnan(broken.std()).all()
    assert np.isnan(broken.predicted_error).all()
    with pytest.raises(pk.NotPositiveDefiniteError, match=r"Ritz value -"):
        belief("independent").shift(-20.0)
    skewed = matrix() + np.triu(np.ones((SIZE, SIZE)), 1)
    with pytest.raises(pk.NotSymmetricError, match=r"not symmetric"):
        solve_block(skewed, V, **SOLVE)
    with pytest.raises(pk.NotFiniteError, match=r"A right-hand side contains NaN"):
        solve_block(matrix(), np.where(V[1, 2] == V, np.nan, V), **SOLVE)
    with pytest.raises(pk.NotFiniteError, match=r"A product A v contains NaN"):
        solve_block(
            np.where(np.eye(SIZE) == 1, np.inf, matrix()), V, check_symmetric=False, **SOLVE
        )


def test_bad_arguments_name_the_remedy():
    A, V = matrix(), right_hand_sides("independent")
    with pytest.raises(ValueError, match=r"V is float64\[\].*leading axis"):
        solve_block(A, np.float64(1.0), **SOLVE)
    with pytest.raises(ValueError, match=r"V is \{'a': float64\[3,6\], 'b': float64\[2,18\]\}"):
        solve_block(A, {"a": V[:, :6], "b": V[:2, 6:]}, **SOLVE)
    with pytest.raises(ValueError, match=r"A acts on vectors of length 24, .* has 23 entries"):
        solve_block(A, V[:, 1:], **SOLVE)
    with pytest.raises(TypeError, match=r"nothing is cast silently"):
        solve_block(A, V.astype(np.float32), **SOLVE)
    with pytest.raises(TypeError, match=r"key is missing"):
        solve_block(A, V)
    with pytest.raises(ValueError, match=r"budget=4 is too small: .* Pass at least 6"):
        solve_block(A, V, key=KEY, budget=4)
    with pytest.raises(ValueError, match=r"budget=6 is too small: one block step takes 9 products"):
        solve_block(A, np.vstack([V, V, V]), key=KEY, budget=6)
    with pytest.raises(ValueError, match=r"num_steps=25 exceeds"):
        solve_block(A, V, key=KEY, num_steps=25)
    with pytest.raises(ValueError, match=r"num_steps=22 after the 3 already taken exceeds"):
        belief("independent").refine(A, num_steps=22)
    with pytest.raises(ValueError, match=r"B has shape \(2, 23\); it needs 24 columns"):
        belief("independent").push(jnp.ones((2, 23)))
    with pytest.raises(ValueError, match=r"num_samples=-1"):
        belief("independent").sample(KEY, -1)
    with pytest.raises(ValueError, match=r"cannot be traced"):
        jax.eval_shape(lambda A: belief("independent").refine(A, num_steps=1).mean, jnp.asarray(A))
    with no_type_checker(), pytest.raises(TypeError, match=r"max_lookahead=2\.5 must be an int"):
        solve_block(A, V, key=KEY, max_lookahead=2.5)  # pyright: ignore


def test_a_person_can_read_it():
    text = str(belief("independent"))
    assert "3 right-hand sides, d = 24, float64" in text
    assert "26 matvecs: 9 resolved, 15 look-ahead" in text
    assert repr(belief("independent")) == text
    assert "BlockSolveBelief(" in repr(jax.tree.map(lambda _: None, belief("independent")))
    assert belief("independent").num_rhs == COUNT


def test_solve_takes_a_matrix_of_right_hand_sides():
    V = right_hand_sides("independent")
    own = pk.solve(matrix(), V, **SOLVE)
    assert isinstance(own, BlockSolveBelief)
    assert_same_belief(own, belief("independent"))
    wrapped = pk.solve(as_operator(matrix()), jnp.asarray(V), **SOLVE)
    assert_same_belief(wrapped, own)
    with pytest.raises(ValueError, match=r"num_probes=.*right-hand sides"):
        pk.solve(matrix(), V, num_probes=4, **SOLVE)


@pytest.mark.slow
def test_a_large_small_matrix_takes_its_extremes_from_runs():
    """More than 256 rows: the ends of the Ritz values come from Lanczos runs, not from LAPACK."""
    A, eigenvalues = oracles.exponential(400)
    V = np.random.default_rng(0).standard_normal((6, 400))
    own = solve_block(A, V, key=KEY, num_steps=30)
    values = np.asarray(own.run.tridiagonal(jnp.zeros(())).eigenvalues())
    assert own.run.basis.present.shape[0] > 256
    np.testing.assert_allclose(own.stats.ritz_min, values[0], rtol=1e-3)
    np.testing.assert_allclose(own.stats.ritz_max, values[-1], rtol=1e-3)
    assert float(own.stats.ritz_min) >= eigenvalues[0]
    E = np.linalg.solve(A, V.T).T - np.asarray(own.mean)
    ratio = own.predicted_error / np.linalg.norm(E, axis=1)
    assert np.all((ratio > 0.7) & (ratio < 1.4))
