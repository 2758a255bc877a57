"""`python -m pnkrylov`: versions, devices, precision, and a check that the numbers are right."""

import os
import platform
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np

import pnkrylov as pk

_SIZE = 200


def main() -> int:
    """Prints a report; the exit status is 0 if the self-check passed."""
    print(f"pnkrylov {pk.__version__} on Python {platform.python_version()}, {platform.platform()}")
    names = ("jax", "jaxlib", "equinox", "lineax", "numpy", "scipy")
    print("  with     " + ", ".join(f"{name} {version(name)}" for name in names))
    devices = ", ".join(f"{device.platform}:{device.device_kind}" for device in jax.devices())
    print(f"  devices  {devices}; XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}")
    dtype = jnp.zeros(()).dtype
    narrow = ' (float64: jax.config.update("jax_enable_x64", True))'
    hint = narrow if dtype == np.float32 else ""
    print(f"  dtype    {dtype}{hint}")
    failures = _self_check(dtype)
    for failure in failures:
        print(f"  FAILED   {failure}")
    if not failures:
        print("  check    passed: solve, inverse and their error bars against dense algebra")
    return 1 if failures else 0


def _self_check(dtype: np.dtype) -> list[str]:
    """What is wrong, in words; the oracle is NumPy in float64."""
    rng = np.random.default_rng(0)
    vectors = np.linalg.qr(rng.standard_normal((_SIZE, _SIZE)))[0]
    eigenvalues = 100.0 / np.arange(1, _SIZE + 1)
    matrix = (vectors * eigenvalues) @ vectors.T
    rhs = rng.standard_normal(_SIZE)
    truth = np.linalg.solve(matrix, rhs)
    A, key = jnp.asarray(matrix.astype(dtype)), jax.random.key(0)
    failures = []
    belief = pk.solve(A, jnp.asarray(rhs.astype(dtype)), key=key, num_steps=20)
    actual = np.linalg.norm(np.asarray(belief.mean, np.float64) - truth)
    predicted = float(jnp.linalg.norm(belief.std()))
    if not 0.5 < actual / predicted < 2:
        failures.append(f"solve: error {actual:.3g}, predicted {predicted:.3g}.")
    trace = pk.inverse(A, key=key, num_steps=40).trace()
    exact = float(np.sum(1 / eigenvalues))
    lower, upper = trace.interval(0.9999)
    if not float(lower) <= exact <= float(upper):
        failures.append(f"inverse: trace {float(trace.value):.6g}, exact {exact:.6g}.")
    full = pk.solve(A, jnp.asarray(rhs.astype(dtype)), key=key, num_steps=_SIZE)
    error = np.linalg.norm(np.asarray(full.mean, np.float64) - truth) / np.linalg.norm(truth)
    if not error < 1e3 * _SIZE * np.finfo(dtype).eps:
        failures.append(f"solve: relative error {error:.3g} after d steps.")
    return failures


if __name__ == "__main__":
    sys.exit(main())
