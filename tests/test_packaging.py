"""The package as a stranger gets it: version, typing marker, citation, docstrings, light import."""

import importlib.metadata
import importlib.resources
import inspect
import os
import pathlib
import subprocess
import sys

import cffconvert
import jax.numpy as jnp
import pytest
import yaml

import pnkrylov

ROOT = pathlib.Path(__file__).resolve().parent.parent
CITATION = (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_version_is_the_same_everywhere():
    citation = yaml.safe_load(CITATION)
    assert importlib.metadata.version("pnkrylov") == pnkrylov.__version__
    assert citation["version"] == pnkrylov.__version__
    assert citation["preferred-citation"]["version"] == pnkrylov.__version__
    assert pnkrylov.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_typing_marker_is_inside_the_package():
    assert importlib.resources.files("pnkrylov").joinpath("py.typed").is_file()


def test_citation_is_valid():
    cffconvert.Citation(CITATION).validate()


def test_citation_with_an_unknown_key_is_invalid():
    with pytest.raises(Exception, match="titel"):
        cffconvert.Citation(CITATION.replace("\ntitle:", "\ntitel:", 1)).validate()


def test_every_public_name_exists_and_has_a_docstring():
    bare = []
    for name in pnkrylov.__all__:
        value = getattr(pnkrylov, name)
        describable = inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
        # A class inherits its parent's docstring through getdoc; its own is what counts.
        if describable and not (value.__doc__ or "").strip():
            bare.append(name)
    assert not bare, f"public names without a docstring: {bare}"
    assert (pnkrylov.__doc__ or "").strip()


def test_import_loads_no_optional_package():
    optional = "{'probnum', 'matplotlib', 'sklearn', 'torch'}"
    code = f"import sys, pnkrylov; print(*sorted({optional} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.split() == []


def test_annotations_are_checked_while_testing():
    loader = pnkrylov.__spec__.loader
    assert type(loader).__module__.startswith("jaxtyping"), f"loaded by {loader}, not by the hook"


def test_jax_is_strict_about_promotion(dtype):
    other = jnp.zeros(3, dtype="int32")
    with pytest.raises(ValueError, match="promotion"):
        jnp.ones(3, dtype) + other
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3), dtype) + jnp.ones(3, dtype)
    assert jnp.ones(3, dtype).dtype == dtype


def test_importing_avoids_the_wrong_sums_of_jaxlib_0_10_2():
    # jax issue 39103; on other versions the sums are right without a flag.
    program = """
import pnkrylov, jax, jax.numpy as jnp, numpy as np
p, t = np.random.default_rng(0).normal(size=(2, 30, 150, 10)).astype(np.float32)
run = lambda t: p[0] * (t - jnp.sum(p[0] * t, axis=1, keepdims=True))
found = jax.jit(jax.vmap(run))(t)
right = p[0] * (t - (p[0] * t).sum(axis=2, keepdims=True))
np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)
"""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
