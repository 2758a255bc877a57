"""Strict JAX, precision by PNKRYLOV_TEST_X64, and the fixtures that every test shares.

Do not import pnkrylov here: pytest reads this file before the jaxtyping import hook is installed,
and a module imported too early is not checked by beartype.
"""

import gc
import os
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import jaxlib
import matplotlib
import pytest

X64 = os.environ.get("PNKRYLOV_TEST_X64", "1") != "0"
# `make test-slow` runs what is slow, and both precisions in one JAX.
SLOW = os.environ.get("PNKRYLOV_TEST_DTYPES") == "all"

flags = os.environ.get("XLA_FLAGS", "").split()
# What importing pnkrylov does (see pnkrylov/_jaxlib.py), for tests that use JAX before it.
if jaxlib.__version__ == "0.10.2":
    flags.append("--xla_cpu_experimental_ynn_fusion_type=")
# Everyday tests compile for minutes what runs for moments: XLA's own passes stay, LLVM's do not.
# The slow tests, the notebooks and the demo run what users run.
if not SLOW:
    flags.append("--xla_backend_optimization_level=0")
# One core for each of two workers. Without it XLA 0.10.2 was seen to wait for ever, all threads
# idle, in a program with two `error_if`s.
flags.append("--xla_cpu_multi_thread_eigen=false")
os.environ["XLA_FLAGS"] = " ".join(flags)

# What one worker, or an earlier run, has compiled is read instead of compiled again.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = Path(__file__).resolve().parent.parent / "build" / "jax-cache"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_enable_x64", X64)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
matplotlib.use("Agg")

# No deadline: the first example compiles. Derandomised in CI: a failure there is the change's own.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


# XLA maps the code of every kernel that it compiles into memory of its own, and Linux grants a
# process 65530 maps: beyond, the compiler crashes. A few dozen of our tests compile that much.
MAX_MAPS = 20_000


def memory_maps() -> int:
    """Number of memory maps of this process; 0 where the system does not tell."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def pytest_runtest_logfinish():
    if memory_maps() > MAX_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items):
    for item in items:
        if "dtype" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.x32)


# `make test` runs float32 as most users run JAX, without 64-bit floats, and then float64;
# `make test-slow` adds float32 in a JAX that has 64-bit floats.
DTYPES = ["float64"] if X64 else ["float32"]
if SLOW:
    DTYPES = ["float32", "float64"]


# Session scope, because hypothesis refuses fixtures that are made anew for every test function.
@pytest.fixture(scope="session", params=DTYPES)
def dtype(request):
    """A JAX floating dtype; the float64 case is skipped when 64-bit floats are switched off."""
    if request.param == "float64" and not X64:
        pytest.skip("float64 needs 64-bit floats, switched off by PNKRYLOV_TEST_X64=0")
    return jnp.dtype(request.param)


@pytest.fixture(scope="session")
def key():
    return jax.random.key(20260910)
