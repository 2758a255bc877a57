"""Saved block beliefs come back whole; and block beliefs about `A^-1` that are taken further."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pnkrylov as pk
from anytime_cases import MATRIX
from block_cases import COUNT, SIZE, matrix
from pnkrylov import storage
from pnkrylov.block import block_lanczos
from pnkrylov.block.basis import first_blocks

KEY = jax.random.key(5)
# As in test_block_anytime and test_block_inverse: the same programs.
SOLVE = {"key": KEY, "num_steps": 5, "max_lookahead": 5, "driver": "host"}
ROWS = np.random.default_rng(1).standard_normal((2, len(MATRIX)))
DEPENDENT = np.stack([ROWS[0], -3 * ROWS[0]])
# Nine directions are left to the bulk; the probes do not span them.
INVERSE = {"key": KEY, "block_size": COUNT, "num_steps": 3, "lookahead": 2, "num_probes": 4}


def solved(dtype=None, V=ROWS, **options):
    return pk.solve(jnp.asarray(MATRIX, dtype), jnp.asarray(V, dtype), **(SOLVE | options))


def inverted(dtype=None, **options):
    return pk.inverse(jnp.asarray(matrix(), dtype), **(INVERSE | options))


MAKE = {
    "solve": solved,
    "solve, dependent, bound, shift": lambda dtype: solved(
        dtype, DEPENDENT, lower_bound=1e-3, shift=0.5
    ),
    "inverse": inverted,
    "inverse, paper layout, mean, shift": lambda dtype: inverted(
        dtype, layout="paper", mean=jnp.ones(SIZE, dtype), shift=0.5
    ),
    "inverse, host driver": lambda dtype: inverted(dtype, driver="host", check_symmetric=False),
}
EVERYDAY = ("solve", "inverse")
CASES = [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.slow) for name in MAKE]


def assert_same(loaded, saved):
    assert jax.tree.structure(loaded) == jax.tree.structure(saved)
    for path, leaf in jax.tree_util.tree_leaves_with_path(saved):
        other = dict(jax.tree_util.tree_leaves_with_path(loaded))[path]
        assert other.dtype == leaf.dtype, path
        np.testing.assert_array_equal(other, leaf, err_msg=str(path))


@pytest.mark.parametrize("name", CASES)
def test_every_leaf_and_static_field_returns_to_the_bit(name, dtype, tmp_path):
    belief = MAKE[name](dtype)
    belief.save(tmp_path / "belief")
    loaded = pk.load(tmp_path / "belief")
    assert type(loaded) is type(belief)
    assert_same(loaded, belief)
    assert str(loaded) == str(belief)
    storage.save(loaded, tmp_path / "again")
    assert_same(pk.load(tmp_path / "again"), belief)


@pytest.mark.slow
def test_a_loaded_belief_goes_on(dtype, tmp_path):
    for belief, A in ((solved(dtype), MATRIX), (inverted(dtype), matrix())):
        A = jnp.asarray(A, dtype)
        belief.save(tmp_path / "b")
        loaded = pk.load(tmp_path / "b")
        assert int(loaded.stats.num_matvecs) == int(belief.stats.num_matvecs)
        assert_same(loaded.refine(A, num_steps=3), belief.refine(A, num_steps=3))


@pytest.mark.slow
def test_pytrees_need_an_example_of_one_vector(tmp_path):
    rows, A = jnp.asarray(ROWS, jnp.float32), jnp.asarray(MATRIX, jnp.float32)
    V = {"a": rows[:, :20], "b": rows[:, 20:36]}
    A = A[:36, :36]
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), V)

    def product(v):
        flat = A @ jnp.concatenate([v["a"], v["b"]])
        return {"a": flat[:20], "b": flat[20:]}

    belief = pk.solve(pk.as_operator(product, like=one), V, **SOLVE)
    belief.save(tmp_path / "b")
    with pytest.raises(ValueError, match=r"pytree with the leaves \['a'\]: float32\[20\].*like="):
        pk.load(tmp_path / "b")
    loaded = pk.load(tmp_path / "b", like=one)
    assert_same(loaded, belief)
    assert loaded.mean["b"].shape == (2, 16)


@pytest.mark.slow
def test_a_batch_returns_as_a_batch(tmp_path):
    A, options = jnp.asarray(MATRIX, jnp.float32), SOLVE | {"driver": "auto"}
    batch = jnp.asarray(np.stack([ROWS, ROWS[::-1]]), jnp.float32)
    belief = eqx.filter_jit(jax.vmap(lambda V: pk.solve(A, V, throw=False, **options)))(batch)
    belief.save(tmp_path / "b")
    loaded = pk.load(tmp_path / "b")
    assert loaded.mean_flat.shape == (2, *ROWS.shape)
    assert jax.tree.structure(loaded) == jax.tree.structure(belief)
    # XLA may order a batched sum differently.
    for saved, other in zip(jax.tree.leaves(belief), jax.tree.leaves(loaded), strict=True):
        scale = np.max(np.abs(np.asarray(saved, np.float64)), initial=0, where=np.isfinite(saved))
        np.testing.assert_allclose(other, saved, rtol=1e-3, atol=1e-4 * scale)


def test_a_failed_belief_stays_failed(dtype, tmp_path):
    A, V = -jnp.asarray(MATRIX, dtype), jnp.asarray(ROWS, dtype)
    belief = pk.solve(A, V, throw=False, **SOLVE)
    belief.save(tmp_path / "b")
    loaded = pk.load(tmp_path / "b")
    assert bool(loaded.result == pk.RESULTS.not_positive_definite)
    assert np.isnan(loaded.mean).all() and np.isnan(loaded.std()).all()


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """What a good file holds."""
    path = tmp_path_factory.mktemp("saved") / "belief.npz"
    inverted().save(path)
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def rewrite(members, path, *, drop=(), **header):
    members = {name: array for name, array in members.items() if name not in drop}
    old = json.loads(members["header"].item())
    listed = {name: entry for name, entry in old["arrays"].items() if name not in drop}
    members["header"] = np.array(json.dumps(old | {"arrays": listed} | header))
    with open(path, "wb") as file:
        np.savez(file, **members)
    return path


def test_the_file_is_plain_arrays_and_a_readable_header(members):
    header = json.loads(members["header"].item())
    assert header["version"] == 1 and header["library"] == pk.__version__
    assert header["class"] == "BlockInverseBelief" and header["basis"] == "BlockKrylovBasis"
    assert header["static"] == {"layout": "resolve-all"}
    assert not any("covariance" in name or "stats" in name for name in members)


@pytest.mark.parametrize("name", ["basis.present", "basis.coupling", "probes.beta", "field.alpha"])
def test_missing_arrays_are_named(name, members, tmp_path):
    path = rewrite(members, tmp_path / "f", drop=[name])
    with pytest.raises(ValueError, match=rf"is damaged: it lacks the arrays \['{name}'\]"):
        pk.load(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"class": "InverseBelief"}, r"damaged: it lacks the arrays \['basis\.alpha'\]"),
        ({"basis": "KrylovBasis"}, r"damaged: it lacks the arrays \['basis\.alpha', 'basis\.beta'"),
        ({"basis": "OtherBasis"}, "damaged: its header cannot be read"),
        ({"static": {}}, "damaged: its header lacks 'layout'"),
        ({"version": 2, "library": "9.1"}, r"format version 2, written by pnkrylov 9\.1.*Upgrade"),
    ],
)
def test_damaged_and_newer_headers_are_refused(header, message, members, tmp_path):
    with pytest.raises(ValueError, match=message):
        pk.load(rewrite(members, tmp_path / "f", **header))


@pytest.mark.parametrize(("offset", "byte"), [(6, 109), (8, 1)])
def test_members_that_cannot_be_read_are_refused(offset, byte, members, tmp_path):
    """One that says to be in a newer format than Python reads, or encrypted."""
    path = rewrite(members, tmp_path / "f")
    whole = path.read_bytes()
    at = whole.find(b"PK\x01\x02") + offset
    path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
    with pytest.raises(ValueError, match="is damaged: it cannot be read to its end"):
        pk.load(path)


def test_what_cannot_be_saved_says_why(tmp_path):
    belief = solved()
    with pytest.raises(FileNotFoundError, match=r"folder .*nowhere.* does not exist"):
        belief.save(tmp_path / "nowhere" / "b")
    with pytest.raises(ValueError, match="outside jit"):
        eqx.filter_jit(lambda b: b.save(tmp_path / "b"))(belief)


# Taken further.


def test_a_refined_inverse_is_that_of_a_longer_run(dtype):
    whole, A = inverted(dtype), jnp.asarray(matrix(), dtype)
    basis = whole.run.basis
    four = dataclasses.replace(
        first_blocks(basis, 4),
        next_block=basis.vectors[4 * COUNT :],
        next_present=basis.present[4 * COUNT :],
        filled=jnp.asarray(4, jnp.int32),
    )
    belief = dataclasses.replace(whole, run=dataclasses.replace(whole.run, basis=four))
    refined = belief.refine(A, num_steps=1)
    spent = int(refined.stats.num_matvecs) - int(whole.stats.num_matvecs)
    assert spent == COUNT and refined.run.basis.num_blocks == 5
    # The same numbers as if the last block had been there at once, from the same probes.
    assert_same(refined.run.probes, whole.run.probes)
    tolerance = {"float32": 1e-4, "float64": 1e-11}[dtype.name]
    np.testing.assert_allclose(refined.variance(), whole.variance(), rtol=tolerance)
    assert float(refined.stats.bulk_variance) == pytest.approx(
        float(whole.stats.bulk_variance), rel=tolerance
    )


@pytest.mark.slow
def test_a_refined_inverse_is_closer(dtype):
    A, belief = jnp.asarray(matrix(), dtype), inverted(dtype)
    refined = belief.refine(A, num_steps=2)
    spent = int(refined.stats.num_matvecs) - int(belief.stats.num_matvecs)
    assert spent == 2 * COUNT and refined.run.basis.num_blocks == 7
    # No key, no new probes.
    assert_same(refined.run.probes, belief.run.probes)
    starts = belief.run.basis.start_coordinates @ belief.run.basis.vectors[:COUNT]
    longer = block_lanczos(A, starts, 7)
    tolerance = {"float32": 1e-3, "float64": 1e-10}[dtype.name]
    np.testing.assert_allclose(refined.run.basis.vectors, longer.vectors, atol=tolerance)
    trace = refined.trace()
    exact = np.trace(np.linalg.inv(matrix()))
    assert abs(float(trace.value) - exact) <= 5 * float(trace.standard_error)


@pytest.mark.slow
def test_refining_to_the_end_is_exact():
    exact, belief = np.linalg.inv(matrix()), inverted()
    refined = belief.refine(jnp.asarray(matrix()), num_steps=3)
    np.testing.assert_allclose(refined.covariance.as_matrix(), exact, atol=1e-10 * exact.max())
    # Nothing is left to do.
    again = refined.refine(jnp.asarray(matrix()), num_steps=4)
    assert int(again.stats.num_matvecs) == int(refined.stats.num_matvecs)
    assert refined.trace().standard_error == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["paper", "resolve-all"])
def test_new_probes_are_drawn_at_the_new_level(layout):
    A, belief = jnp.asarray(matrix()), inverted(layout=layout, shift=0.3)
    refined = belief.refine(A, num_steps=2, key=jax.random.key(0))
    assert int(belief.run.level) == 3 and int(refined.run.level) == 5
    assert int(refined.run.probes.level) == 5
    # Two blocks, and four probes in the complement of 15 vectors and the three that follow.
    spent = int(refined.stats.num_matvecs) - int(belief.stats.num_matvecs)
    assert spent == 2 * COUNT + 4 * int(refined.run.probes.steps)
    assert int(refined.run.probes.dimension) == SIZE - 6 * COUNT
    trace = np.trace(np.linalg.inv(matrix() + 0.3 * np.eye(SIZE)))
    estimate = refined.trace()
    assert abs(float(estimate.value) - trace) <= 5 * float(estimate.standard_error)


def test_refinements_that_cannot_be():
    A, belief = jnp.asarray(matrix()), dataclasses.replace(inverted(), layout="paper")
    with pytest.raises(TypeError, match="key is missing: the paper's layout needs new probes"):
        belief.refine(A, num_steps=1)
    with pytest.raises(ValueError, match=r"num_steps=20 after the 5 already taken exceeds"):
        belief.refine(A, num_steps=20, key=KEY)
    with pytest.raises(ValueError, match="refine changes shapes"):
        eqx.filter_jit(lambda b: b.refine(A, num_steps=1, key=KEY))(belief)
