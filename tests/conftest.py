"""Strict JAX, precision by PNKRYLOV_TEST_X64, and the fixtures that every test shares.

Do not import pnkrylov here: pytest reads this file before the jaxtyping import hook is installed,
and a module imported too early is not checked by beartype.
"""

import os

import hypothesis
import jax
import jax.numpy as jnp
import matplotlib
import pytest

X64 = os.environ.get("PNKRYLOV_TEST_X64", "1") != "0"

jax.config.update("jax_enable_x64", X64)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
matplotlib.use("Agg")

# No deadline: the first example compiles. Derandomised in CI: a failure there is the change's own.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items):
    for item in items:
        if "dtype" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.x32)


# Session scope, because hypothesis refuses fixtures that are made anew for every test function.
@pytest.fixture(scope="session", params=["float32", "float64"])
def dtype(request):
    """A JAX floating dtype; the float64 case is skipped when 64-bit floats are switched off."""
    if request.param == "float64" and not X64:
        pytest.skip("float64 needs 64-bit floats, switched off by PNKRYLOV_TEST_X64=0")
    return jnp.dtype(request.param)


@pytest.fixture(scope="session")
def key():
    return jax.random.key(20260910)
