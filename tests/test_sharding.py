"""Runs that are split over devices: the same belief, and a part of the basis on each of them.

JAX chooses its devices once per process, so each case is a program of its own: eight virtual
devices, or two processes with one device each.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pnkrylov as pk
from pnkrylov.basis import row_layout

# What every program begins with: an operator, its start vector, and how a vector is split.
HEAD = """
    import json, sys
    import pnkrylov as pk
    import equinox as eqx, jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    size, rank = 512, 4
    rng = np.random.default_rng(0)
    diagonal = np.geomspace(1, 1e2, size).astype(np.float32)
    columns = rng.standard_normal((rank, size)).astype(np.float32)
    start = rng.standard_normal(size).astype(np.float32)

    def operator(diagonal, columns):
        return lambda v: diagonal * v + jnp.matmul(jnp.matmul(columns, v), columns)

    def split(array, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def make_mesh():
        return jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))

    def difference(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(a - b).max() / np.abs(b).max())
"""

EIGHT = """
    mesh = make_mesh()
    one = operator(diagonal, columns)
    many = operator(split(diagonal, "d"), split(columns, None, "d"))
    v, key = split(start, "d"), jax.random.key(0)
    found = {"devices": jax.device_count()}
    for driver in ("compiled", "host"):
        single = pk.lanczos(one, jnp.asarray(start), 20, driver=driver)
        basis = pk.lanczos(many, v, 20, driver=driver)
        shards = [shard.data.nbytes for shard in basis.vectors.addressable_shards]
        found[driver] = {
            "alpha": difference(basis.alpha, single.alpha),
            "vectors": difference(basis.vectors, single.vectors),
            "share": max(shards) / single.vectors.nbytes,
            "next": basis.next_vector.addressable_shards[0].data.size,
        }
    # What one step sends: sums over the parts of a vector, and never a part of the basis.
    from pnkrylov.krylov import begin_run, host_step, pad, row_layout
    arguments = pk.as_operator(many, like=v), pad(begin_run(v), 32), jnp.zeros((), jnp.int32)
    lowered = eqx.filter_jit(host_step).lower(*arguments, row_layout(v))
    text = lowered.compile().compiled.as_text()
    found["sums"] = text.count(" all-reduce(")
    found["copies"] = sum(text.count(f" {name}(") for name in
        ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"))
    print(json.dumps(found))
"""

# The curvature of a small network: parameters on every device, the data split, vectors split.
BELIEFS = """
    jax.config.update("jax_enable_x64", True)
    mesh = make_mesh()
    inputs = rng.standard_normal((64, 7)).astype(np.float64)
    weights = rng.standard_normal((7, 16)).astype(np.float64), np.ones((16, 1), np.float64) / 4
    count = 7 * 16 + 16

    def ggn(inputs, weights):
        def network(flat):
            first, second = flat[: 7 * 16].reshape(7, 16), flat[7 * 16 :].reshape(16, 1)
            return jnp.tanh(inputs @ first) @ second

        def product(v):
            flat = jnp.concatenate([weights[0].reshape(-1), weights[1].reshape(-1)])
            _, tangents = jax.jvp(network, (flat,), (v,))
            _, transpose = jax.vjp(network, flat)
            return transpose(tangents)[0] + 0.1 * v

        return product

    v, key = np.ones(count, np.float64), jax.random.key(0)
    on_one = ggn(jnp.asarray(inputs), tuple(jnp.asarray(w) for w in weights))
    everywhere = tuple(split(w) for w in weights)
    on_eight = ggn(split(inputs, "d", None), everywhere)
    problems = (on_one, v), (on_eight, split(v, "d"))
    found = {}
    for driver in ("compiled", "host"):
        options = {"key": key, "num_steps": 20, "driver": driver}
        pairs = {
            "solve": [pk.solve(A, x, **options) for A, x in problems],
            "inverse": [pk.inverse(A, start=x, num_probes=4, **options)
                for A, x in problems],
        }
        for name, (single, many) in pairs.items():
            draws = [belief.sample(jax.random.key(1), 2) for belief in (many, single)]
            shards = [s.data.nbytes for s in many.run.basis.vectors.addressable_shards]
            kept = [s.data.nbytes for s in many.covariance.vectors.addressable_shards]
            found[f"{name}, {driver}"] = {
                "std": difference(many.std(), single.std()),
                "draws": difference(*draws),
                "share": max(shards + kept) / single.run.basis.vectors.nbytes,
                "matvecs": int(many.stats.num_matvecs) - int(single.stats.num_matvecs),
            }
        single, many = pairs["inverse"]
        found[f"inverse, {driver}"]["trace"] = difference(many.trace().value, single.trace().value)
        single, many = pairs["solve"]
        found[f"solve, {driver}"]["mean"] = difference(many.mean, single.mean)
    print(json.dumps(found))
"""

TWO_PROCESSES = """
    process, address = int(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, process)
    mesh = make_mesh()
    A, v = operator(split(diagonal, "d"), split(columns, None, "d")), split(start, "d")
    found = {"processes": jax.process_count(), "devices": jax.local_device_count()}
    for driver in ("auto", "compiled", "host"):
        basis = pk.lanczos(A, v, 20, driver=driver)
        own = [shard.data for shard in basis.vectors.addressable_shards]
        found[driver] = [basis.driver, np.asarray(basis.alpha).tolist(), list(own[0].shape)]
    belief = pk.solve(A, v, key=jax.random.key(0), num_steps=20, driver="host")
    found["error"] = float(belief.error.error_norm)
    try:
        pk.lanczos(A, v, 20, max_seconds=1.0)
    except ValueError as error:
        found["refused"] = str(error)
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()
"""


def start_program(body, *arguments, devices=1):
    """Starts a program that sees so many virtual devices."""
    code = textwrap.dedent(HEAD) + textwrap.dedent(body)
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(pathlib.Path(pk.__file__).parents[1]),
    }
    cache = jax.config.jax_compilation_cache_dir
    if cache:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def read(*programs):
    """What they printed last, as JSON."""
    try:
        outputs = [program.communicate(timeout=500)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert all(program.returncode == 0 for program in programs)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_a_basis_split_over_eight_devices():
    (found,) = read(start_program(EIGHT, devices=8))
    assert found["devices"] == 8
    for driver in ("compiled", "host"):
        # Sums are taken in another order: the rounding of 20 float32 steps, amplified by a run.
        assert found[driver]["alpha"] < 1e-4 and found[driver]["vectors"] < 1e-3
        assert found[driver]["share"] == 1 / 8
        assert found[driver]["next"] == 512 // 8
    # One sum each for the product, two passes of Gram-Schmidt and a norm.
    assert 4 <= found["sums"] <= 6 and found["copies"] == 0


@pytest.mark.slow
def test_beliefs_split_over_eight_devices():
    (found,) = read(start_program(BELIEFS, devices=8))
    assert set(found) == {f"{n}, {d}" for n in ("solve", "inverse") for d in ("compiled", "host")}
    for numbers in found.values():
        assert numbers.pop("share") == 1 / 8
        assert numbers.pop("matvecs") == 0
        assert max(numbers.values()) < 1e-6, found


@pytest.mark.slow
def test_two_processes():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    programs = [start_program(TWO_PROCESSES, str(number), address) for number in (0, 1)]
    first, second = read(*programs)
    assert first == second and first["processes"] == 2 and first["devices"] == 1
    # The same run in this process.
    rng = np.random.default_rng(0)
    diagonal = np.geomspace(1, 1e2, 512).astype(np.float32)
    columns = rng.standard_normal((4, 512)).astype(np.float32)
    start = rng.standard_normal(512).astype(np.float32)
    matrix = np.diag(diagonal) + columns.T @ columns
    reference = pk.lanczos(matrix, start, 20)
    for driver in ("auto", "compiled", "host"):
        ran, alpha, shape = first[driver]
        assert ran == ("host" if driver == "auto" else driver) and shape == [20, 256]
        np.testing.assert_allclose(alpha, reference.alpha, rtol=1e-4)
    belief = pk.solve(matrix, start, key=jax.random.key(0), num_steps=20)
    np.testing.assert_allclose(first["error"], float(belief.error.error_norm), rtol=1e-2)
    assert "spread over 2" in first["refused"] and "Stop by num_steps" in first["refused"]


def test_layouts_that_are_none():
    vector = jnp.ones((4,), jnp.float32)
    assert row_layout(vector) is None
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    whole = jax.device_put(vector, NamedSharding(mesh, PartitionSpec()))
    assert row_layout(whole) is None
    # A traced vector does not tell.
    np.testing.assert_array_equal(jax.jit(lambda v: v if row_layout(v) is None else -v)(vector), 1)
