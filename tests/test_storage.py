"""Saved beliefs come back whole, and whatever is not a whole belief is refused by name."""

import dataclasses
import functools
import io
import json
import os
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pnkrylov as pk
from oracles import bulk_and_outliers
from pnkrylov import beliefs, storage
from pnkrylov._structure import VectorStructure

SIZE = 12
MATRIX = bulk_and_outliers(SIZE, seed=3)[0]


def rhs(dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(SIZE), dtype)


def solve_belief(dtype, **options):
    A = jnp.asarray(MATRIX, dtype)
    return pk.solve(A, rhs(dtype), key=jax.random.key(1), num_steps=4, max_lookahead=4, **options)


def inverse_belief(dtype, **options):
    A = jnp.asarray(MATRIX, dtype)
    sizes = {"num_steps": 3, "lookahead": 3, "num_probes": 2, "probe_depth": 3}
    return pk.inverse(A, key=jax.random.key(1), **(sizes | options))


MAKE = {
    "solve": solve_belief,
    "solve with probes, bound, shift": lambda dtype: solve_belief(
        dtype, scale="prior", lower_bound=0.4, shift=0.5, probe_depth=3, num_probes=2
    ),
    "solve from another start, host driver": lambda dtype: solve_belief(
        dtype, scale=2.0, start=rhs(dtype, 5), driver="host", check_symmetric=False
    ),
    "inverse": inverse_belief,
    "inverse, paper layout, mean, shift": lambda dtype: inverse_belief(
        dtype, layout="paper", mean=rhs(dtype), shift=0.5
    ),
}


def tree_operator(like):
    """MATRIX on pytrees with the structure of `like`."""
    leaves, treedef = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]

    def product(tree):
        parts = [leaf.reshape(-1).astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
        pieces = jnp.split(jnp.asarray(MATRIX, jnp.float32) @ jnp.concatenate(parts), ends)
        return jax.tree.unflatten(
            treedef,
            [p.reshape(x.shape).astype(x.dtype) for p, x in zip(pieces, leaves, strict=True)],
        )

    return product


def tree_rhs():
    flat = rhs(jnp.float32)
    return {"w": (flat[:6].reshape(2, 3), flat[6:9].astype(jnp.bfloat16)), "b": flat[9:]}


def assert_same(loaded, saved):
    assert jax.tree.structure(loaded) == jax.tree.structure(saved)
    for path, leaf in jax.tree_util.tree_leaves_with_path(saved):
        other = dict(jax.tree_util.tree_leaves_with_path(loaded))[path]
        assert other.dtype == leaf.dtype, path
        np.testing.assert_array_equal(other, leaf, err_msg=str(path))


CASES = [(name, "float32") for name in MAKE] + [(name, "float64") for name in ("solve", "inverse")]


@pytest.mark.one_precision
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_leaf_and_static_field_returns_to_the_bit(name, dtype, tmp_path):
    if dtype == "float64" and not jax.config.jax_enable_x64:
        pytest.skip("float64 needs 64-bit floats")
    belief = MAKE[name](dtype)
    belief.save(tmp_path / "belief")
    loaded = pk.load(tmp_path / "belief")
    assert type(loaded) is type(belief)
    assert_same(loaded, belief)
    assert str(loaded) == str(belief)
    storage.save(loaded, tmp_path / "again")
    assert_same(pk.load(str(tmp_path / "again")), belief)


def test_loading_spends_no_product_and_the_belief_can_go_on(tmp_path):
    A = jnp.asarray(MATRIX, jnp.float32)
    belief = inverse_belief(jnp.float32)
    belief.save(tmp_path / "b.npz")
    loaded = pk.load(tmp_path / "b.npz")
    assert int(loaded.stats.num_matvecs) == int(belief.stats.num_matvecs)
    assert_same(loaded.refine(A, num_steps=2), belief.refine(A, num_steps=2))
    assert_same(loaded.shift(1.0), belief.shift(1.0))


def test_pytrees_need_an_example_and_bfloat16_leaves_return(tmp_path):
    v = tree_rhs()
    belief = pk.solve(
        tree_operator(v),
        v,
        key=jax.random.key(0),
        num_steps=4,
        max_lookahead=4,
        check_symmetric=False,
    )
    belief.save(tmp_path / "tree.npz")
    loaded = pk.load(tmp_path / "tree.npz", like=v)
    assert_same(loaded, belief)
    assert loaded.mean["w"][1].dtype == jnp.bfloat16 and loaded.mean["w"][0].shape == (2, 3)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), v)
    assert_same(pk.load(tmp_path / "tree.npz", like=shapes), belief)

    with pytest.raises(ValueError, match=r"pytree with the leaves \['b'\]: float32\[3\].*like="):
        pk.load(tmp_path / "tree.npz")
    with pytest.raises(ValueError, match=r"like has 1 leaves, but .* has 3"):
        pk.load(tmp_path / "tree.npz", like=rhs(jnp.float32))
    renamed = {"b": v["b"], "kernel": v["w"]}
    with pytest.raises(ValueError, match=r"\['kernel'\]\[0\].* where the file has \['w'\]\[0\]"):
        pk.load(tmp_path / "tree.npz", like=renamed)
    reshaped = v | {"w": (v["w"][0].T, v["w"][1])}
    with pytest.raises(ValueError, match=r"float32\[3,2\] where the file has .*float32\[2,3\]"):
        pk.load(tmp_path / "tree.npz", like=reshaped)
    widened = v | {"w": (v["w"][0], v["w"][1].astype(jnp.float32))}
    with pytest.raises(TypeError, match=r"float32\[3\] where the file has .*bfloat16\[3\]"):
        pk.load(tmp_path / "tree.npz", like=widened)


def test_an_array_of_another_shape_keeps_it_and_checks_like(tmp_path):
    v, flat = rhs(jnp.float32).reshape(3, 4), solve_belief(jnp.float32)
    run = dataclasses.replace(flat.run, structure=VectorStructure.of(v))
    belief = beliefs.solve_belief(run, flat.rhs, flat.alpha, flat.fixed_scale, None, True)
    belief.save(tmp_path / "b")
    assert pk.load(tmp_path / "b").mean.shape == (3, 4)
    assert_same(pk.load(tmp_path / "b", like=v), belief)
    with pytest.raises(ValueError, match=r"float32\[12\] where the file has .*float32\[3,4\]"):
        pk.load(tmp_path / "b", like=v.reshape(-1))


@functools.cache
def batch_of(dtype):
    A = jnp.asarray(MATRIX, dtype)
    keys = jax.random.split(jax.random.key(2), 6).reshape(2, 3)
    vs = jax.random.normal(jax.random.key(3), (2, 3, SIZE), dtype)

    def one(v, key):
        return pk.solve(A, v, key=key, num_steps=4, max_lookahead=4)

    return jax.vmap(jax.vmap(one))(vs, keys)


def test_a_batch_returns_as_a_batch(tmp_path):
    dtype, batch = jnp.float32, batch_of(jnp.float32)
    batch.save(tmp_path / "batch.npz")
    loaded = pk.load(tmp_path / "batch.npz")
    assert loaded.mean.shape == (2, 3, SIZE)
    assert jax.tree.structure(loaded) == jax.tree.structure(batch)
    # XLA may order a batched sum differently: a few roundings per operation, 12 entries.
    tolerance = 1e3 * float(jnp.finfo(dtype).eps)
    for saved, other in zip(jax.tree.leaves(batch), jax.tree.leaves(loaded), strict=True):
        assert saved.dtype == other.dtype
        np.testing.assert_allclose(other, saved, rtol=tolerance, atol=tolerance)


def test_a_half_batched_belief_is_refused(tmp_path):
    batch = batch_of(jnp.float32)
    uneven = eqx.tree_at(lambda b: b.alpha, batch, batch.alpha[0, 0])
    with pytest.raises(
        ValueError, match=r"batch axes \[2, 3\], but its array field.alpha .*out_axes"
    ):
        uneven.save(tmp_path / "b")
    assert os.listdir(tmp_path) == []


def test_a_failed_belief_stays_failed(tmp_path):
    A = jnp.asarray(MATRIX - 5 * np.eye(SIZE), jnp.float32)
    belief = pk.solve(A, rhs(jnp.float32), key=jax.random.key(0), num_steps=8, throw=False)
    assert bool(belief.result == pk.RESULTS.not_positive_definite)
    belief.save(tmp_path / "b")
    loaded = pk.load(tmp_path / "b")
    assert bool(loaded.result == pk.RESULTS.not_positive_definite)
    assert np.isnan(loaded.mean).all()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A good file, as its path and its members."""
    path = tmp_path_factory.mktemp("saved") / "belief.npz"
    inverse_belief(jnp.float32).save(path)
    with np.load(path, allow_pickle=False) as archive:
        return path, dict(archive)


def rewrite(saved, path, *, drop=(), header=None, **arrays):
    members = {name: array for name, array in saved[1].items() if name not in drop} | arrays
    old = json.loads(members["header"].item())
    members["header"] = np.array(json.dumps(old | (header or {})))
    with open(path, "wb") as file:
        np.savez(file, **members)
    return path


def test_the_file_is_plain_arrays_and_a_readable_header(saved):
    header = json.loads(saved[1]["header"].item())
    assert header["version"] == 1 and header["library"] == pk.__version__
    assert header["class"] == "InverseBelief" and header["static"] == {"layout": "resolve-all"}
    assert header["structure"] == [["", [SIZE], "float32"]]
    assert not any("covariance" in name or "stats" in name for name in saved[1])
    assert all(array.dtype.kind in "fibU" for array in saved[1].values())


@pytest.mark.parametrize("content", [b"", b"hello", b"\x93NUMPY\x01\x00"])
def test_foreign_bytes_are_refused(content, tmp_path):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ValueError, match="is not a belief saved by pnkrylov"):
        pk.load(tmp_path / "f")


@pytest.mark.parametrize(
    "members",
    [{"x": np.arange(3)}, {"header": np.arange(3)}, {"header": np.array('{"format": "else"}')}],
)
def test_foreign_archives_are_refused(members, tmp_path):
    np.savez(tmp_path / "f.npz", **members)
    with pytest.raises(ValueError, match="is not a belief saved by pnkrylov"):
        pk.load(tmp_path / "f.npz")


def test_a_pickle_in_the_file_is_not_run(saved, tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    path = rewrite(saved, tmp_path / "f")
    buffer = io.BytesIO()
    np.save(buffer, np.array(Trap(), dtype=object), allow_pickle=True)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("field.extra.npy", buffer.getvalue())
    with pytest.raises(ValueError, match=r"is damaged: its array field\.extra cannot"):
        pk.load(path)
    assert not (tmp_path / "sprung").exists()


def test_newer_formats_are_refused(saved, tmp_path):
    path = rewrite(saved, tmp_path / "f", header={"version": 2, "library": "9.1"})
    with pytest.raises(ValueError, match=r"version 2, written by pnkrylov 9\.1.*Upgrade"):
        pk.load(path)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_cut_files_are_refused(share, saved, tmp_path):
    whole = saved[0].read_bytes()
    (tmp_path / "f").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="is damaged: it cannot be read to its end"):
        pk.load(tmp_path / "f")


def test_flipped_bits_are_refused(saved, tmp_path):
    content = bytearray(saved[0].read_bytes())
    at = bytes(content).index(saved[1]["basis.vectors"].tobytes()[:32])
    content[at + 5] ^= 0x10
    (tmp_path / "f").write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"is damaged: .*CRC"):
        pk.load(tmp_path / "f")


@pytest.mark.parametrize("name", ["basis.vectors", "probes.beta", "run.level", "field.alpha"])
def test_missing_arrays_are_named(name, saved, tmp_path):
    path = rewrite(saved, tmp_path / "f", drop=[name])
    with pytest.raises(ValueError, match=rf"is damaged: it lacks the arrays \['{name}'\]"):
        pk.load(path)
    # Missing from the header's list as well: the belief cannot be made without it.
    listed = json.loads(saved[1]["header"].item())["arrays"]
    listed.pop(name)
    path = rewrite(saved, tmp_path / "f", drop=[name], header={"arrays": listed})
    with pytest.raises(ValueError, match=rf"is damaged: it lacks .*{name.split('.')[1]}"):
        pk.load(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"class": "OtherBelief"}, "its class is 'OtherBelief'"),
        ({"version": 0}, "its format version is 0"),
        ({"static": {}}, r"its header lacks 'layout'"),
        ({"structure": [["", [5], "float32"]]}, r"its basis is .*its vectors are float32\[5\]"),
        ({"structure": [["", 5]]}, "its header cannot be read"),
        ({"dtype": "float99"}, "its header cannot be read"),
    ],
)
def test_damaged_headers_are_refused(header, message, saved, tmp_path):
    path = rewrite(saved, tmp_path / "f", header=header)
    with pytest.raises(ValueError, match=f"is damaged: {message}"):
        pk.load(path)


def test_swapped_arrays_are_refused(saved, tmp_path):
    swapped = saved[1]["basis.alpha"][:-1]
    path = rewrite(saved, tmp_path / "f", **{"basis.alpha": swapped})
    with pytest.raises(ValueError, match=r"its array basis\.alpha is not what its header says"):
        pk.load(path)


def test_double_precision_needs_x64(saved, tmp_path):
    vectors = saved[1]["basis.vectors"].astype(np.float64)
    header = {"dtype": "float64", "structure": [["", [SIZE], "float64"]]}
    listed = json.loads(saved[1]["header"].item())["arrays"]
    header["arrays"] = listed | {"basis.vectors": [list(vectors.shape), "float64"]}
    path = rewrite(saved, tmp_path / "f", header=header, **{"basis.vectors": vectors})
    with (
        jax.enable_x64(False),
        pytest.raises(TypeError, match=r"belief in .* is float64, but .*jax_enable_x64"),
    ):
        pk.load(path)


def test_an_interrupted_save_leaves_the_older_file(saved, tmp_path, monkeypatch):
    path = tmp_path / "b"
    path.write_bytes(saved[0].read_bytes())
    belief = pk.load(path)

    def cut(file, array, allow_pickle):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(np.lib.format, "write_array", cut)
    with pytest.raises(KeyboardInterrupt):
        belief.shift(1.0).save(path)
    assert path.read_bytes() == saved[0].read_bytes()
    assert os.listdir(tmp_path) == ["b"]


def test_save_replaces_the_target_of_a_link_and_honours_the_umask(saved, tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    belief = pk.load(saved[0])
    belief.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same(pk.load(tmp_path / "target"), belief)
    (tmp_path / "plain").touch()
    modes = [(tmp_path / name).stat().st_mode for name in ("target", "plain")]
    assert modes[0] == modes[1]


def test_what_cannot_be_saved_says_why(saved, tmp_path):
    belief = pk.load(saved[0])
    with pytest.raises(TypeError, match="belief is of type dict"):
        storage.save({}, tmp_path / "b")
    with pytest.raises(FileNotFoundError, match=r"folder .*nowhere.* does not exist"):
        belief.save(tmp_path / "nowhere" / "b")
    with pytest.raises(ValueError, match="outside jit"):
        eqx.filter_jit(lambda b: b.save(tmp_path / "b"))(belief)
    with pytest.raises(FileNotFoundError):
        pk.load(tmp_path / "nothing")
