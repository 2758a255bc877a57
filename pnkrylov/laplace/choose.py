"""Which method `"auto"` takes: the exact one where it fits and is no slower than a Lanczos run."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from pnkrylov.laplace.operators import Curvature

# Square roots with fewer entries than this take seconds at worst: nothing is worth measuring.
_SMALL = 5_000_000
# A first run of a new shape compiles its loops and probes for about this many seconds.
_COMPILATION = 5.0
# Steps that follow the level of a Lanczos run, and steps of each random probe.
_LOOKAHEAD = 20
_PROBE_DEPTH = 20
# An eigendecomposition of r rows takes about this many r^3 operations at the speed of products.
_EIGH = 25.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a method is predicted to take.

    Attributes:
        seconds: wall time.
        bytes: memory for what it stores.
    """

    seconds: float
    bytes: int

    def __str__(self) -> str:
        return f"{self.bytes / 2**20:.0f} MB, {self.seconds:.2g} s"


def choose(
    curvature: Curvature, num_steps: int, num_probes: int, max_bytes: int, *, has_key: bool
) -> tuple[str, str]:
    """Chooses between `"exact"`, `"krylov"` and `"ciq"`.

    The exact posterior is taken where it fits into memory and is predicted to be no slower than
    the Lanczos run. Of the run's price, one product is measured; of the exact one, one chunk of
    square-root rows, unless the outcome is clear without.

    Args:
        curvature: G.
        num_steps: Lanczos steps that `"krylov"` would take.
        num_probes: its random probes.
        max_bytes: most memory to plan with.
        has_key: whether there is a random key, which all but the exact form need.

    Returns:
        The method, and the reason in one sentence.
    """
    exact, krylov = exact_bytes(curvature), krylov_bytes(curvature, num_steps)
    budget = f"{max_bytes / 2**20:.0f} MB"
    if curvature.num_rows is None and exact <= max_bytes:
        return "exact", f"the dense Hessian takes {exact / 2**20:.0f} MB of {budget}"
    if exact > max_bytes:
        why = f"the exact form would take {exact / 2**20:.0f} MB of {budget}"
        if krylov <= max_bytes:
            return "krylov", f"{why}, a Lanczos basis takes {krylov / 2**20:.0f} MB"
        return "ciq", f"{why}, and a Lanczos basis {krylov / 2**20:.0f} MB"
    assert curvature.num_rows is not None
    if curvature.num_rows * curvature.size <= _SMALL:
        return "exact", f"the exact form takes only {exact / 2**20:.0f} MB"
    if not has_key:
        return "exact", f"it takes {exact / 2**20:.0f} MB of {budget}, and there is no random key"
    if krylov > max_bytes:
        return "exact", f"it takes {exact / 2**20:.0f} MB of {budget}, a Lanczos basis more"
    rate = _operations_per_second(np.dtype(curvature.dtype))
    run = Cost(_krylov_seconds(curvature, num_steps, num_probes, rate), krylov)
    form = Cost(_exact_seconds(curvature, rate, run.seconds), exact)
    method = "exact" if form.seconds <= run.seconds else "krylov"
    return method, f"predicted for exact {form}; for krylov {run}"


def exact_bytes(curvature: Curvature) -> int:
    """Memory of the exact form: the square root and the eigenvectors, or the dense matrices."""
    size, itemsize = curvature.size, np.dtype(curvature.dtype).itemsize
    if curvature.num_rows is not None and curvature.num_rows < size:
        # The square root, the eigenvectors of G and, in float64, those of the Gram matrix.
        return 2 * curvature.num_rows * size * itemsize + 3 * curvature.num_rows**2 * 8
    return size * size * (2 * itemsize + 3 * 8)


def krylov_bytes(curvature: Curvature, num_steps: int) -> int:
    """Memory of a Lanczos basis, doubled while it grows."""
    rows = min(num_steps + _LOOKAHEAD, curvature.size)
    return 2 * rows * curvature.size * np.dtype(curvature.dtype).itemsize


def _krylov_seconds(curvature: Curvature, num_steps: int, num_probes: int, rate: float) -> float:
    steps = min(num_steps + _LOOKAHEAD, curvature.size)
    products = steps + num_probes * _PROBE_DEPTH
    # Two Gram-Schmidt passes per step read the basis four times: memory-bound, a quarter the rate.
    orthogonalisation = 4 * 4 * curvature.size * steps * (steps / 2 + num_probes) / rate
    return products * _product_seconds(curvature) + orthogonalisation + _COMPILATION


def _exact_seconds(curvature: Curvature, rate: float, worth: float) -> float:
    """Seconds for the exact form; rows are measured only if the rest does not decide already."""
    rows, size = curvature.num_rows, curvature.size
    assert rows is not None
    rank = min(rows, size)
    algebra = (2 * rows * rank * size + 2 * rank**2 * size + _EIGH * rank**3) / rate
    if algebra > worth:
        return algebra
    chunks = curvature.row_chunks()
    first = jax.block_until_ready(next(chunks))  # compiles
    if first.shape[0] == rows:
        return algebra
    started = time.perf_counter()
    second = jax.block_until_ready(next(chunks))
    seconds = time.perf_counter() - started
    return algebra + seconds * rows / second.shape[0]


def _product_seconds(curvature: Curvature) -> float:
    vector = jnp.ones((curvature.size,), curvature.dtype)
    jax.block_until_ready(curvature.mv(vector))  # compiles
    started = time.perf_counter()
    jax.block_until_ready(curvature.mv(vector))
    return time.perf_counter() - started


def _operations_per_second(dtype: np.dtype) -> float:
    """The speed of a matrix product, by one of a few milliseconds."""
    matrix = jnp.ones((512, 512), dtype)
    jax.block_until_ready(matrix @ matrix)
    started = time.perf_counter()
    jax.block_until_ready(matrix @ matrix)
    return 2 * 512**3 / (time.perf_counter() - started)
