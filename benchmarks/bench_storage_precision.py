"""A prototype that is not in the library: Krylov vectors stored in 16 bits, recurrence in float32.

    taskset -c 1 python benchmarks/bench_storage_precision.py

Operators with a known spectrum and dense eigenvectors, A = H diag(lambda) H with the orthonormal
Hartley transform H (one FFT), so that A^-1, its trace and its determinant are known in closed form.
Memory is what the compiled run allocates, as XLA counts it: the basis and temporary arrays.

A stored row is q + delta with ||delta|| about 2^-9 (bfloat16) or 2^-12 (float16, scaled by sqrt d).
`plain` re-orthogonalises as the library does, all coefficients against stored rows: what is
subtracted is then wrong by ||A|| ||delta||. `compensated` subtracts the three-term recurrence in
float32 first, from the last two vectors, which are kept in float32; stored rows only take out what
rounding left, and delta enters by <delta, p>, about ||delta|| ||p|| / sqrt d.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from record import save

# Columns that are converted to float32 at a time.
WIDTH = 8192
STORED = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
CASES = (
    ("float32", "plain"),
    ("float32", "compensated"),
    ("bfloat16", "plain"),
    ("bfloat16", "compensated"),
    ("float16", "compensated"),
)


def spectrum(name, size):
    """Eigenvalues in an order that has nothing to do with frequencies."""
    rng = np.random.default_rng(0)
    if name == "GGN-like":
        values = rng.uniform(0.5, 1.5, size)
        values[:500] += 1e4 * np.arange(1, 501) ** -1.2
    else:
        values = 1 + 1e3 / np.arange(1, size + 1)
    return rng.permutation(values)


def hartley(vector, module):
    transformed = module.fft.fft(vector)
    return (transformed.real - transformed.imag) / np.sqrt(vector.shape[-1])


def multiply(values, vector):
    return hartley(values * hartley(vector, jnp), jnp)


@functools.partial(jax.jit, static_argnames=("steps", "kind", "stored"))
def run(values, start, *, steps, kind, stored):
    """Lanczos; rows are stored in column blocks, `(blocks, steps, WIDTH)`."""
    size = start.shape[0]
    blocks = size // WIDTH
    # Entries are about 1 / sqrt d, which float16 holds only with a loss.
    scale = jnp.float32(np.sqrt(size) if stored == "float16" else 1.0)
    storage = jnp.zeros((blocks, steps, WIDTH), STORED[stored])

    def rows(storage, index):
        block = jax.lax.dynamic_index_in_dim(storage, index, keepdims=False)
        return block.astype(jnp.float32) / scale

    def remove(storage, p):
        """`p` less its components along stored rows, and these components."""
        p = p.reshape(blocks, WIDTH)

        def add(index, total):
            return total + rows(storage, index) @ p[index]

        along = jax.lax.fori_loop(0, blocks, add, jnp.zeros(steps, jnp.float32))

        def subtract(index, p):
            left = p[index] - along @ rows(storage, index)
            return jax.lax.dynamic_update_index_in_dim(p, left, index, 0)

        return jax.lax.fori_loop(0, blocks, subtract, p).reshape(size), along

    def step(index, state):
        storage, current, previous, alpha, beta = state
        row = (scale * current).astype(STORED[stored]).reshape(blocks, 1, WIDTH)
        storage = jax.lax.dynamic_update_slice(storage, row, (0, index, 0))
        p = multiply(values, current)
        if kind == "plain":
            p, first = remove(storage, p)
            p, second = remove(storage, p)
            diagonal = (first + second)[index]
        else:
            diagonal = current @ p
            before = jnp.where(index > 0, beta[jnp.maximum(index - 1, 0)], 0)
            p = p - diagonal * current - before * previous
            left = current @ p
            p, diagonal = p - left * current, diagonal + left
            p, _ = remove(storage, p)
        norm = jnp.linalg.norm(p)
        alpha, beta = alpha.at[index].set(diagonal), beta.at[index].set(norm)
        return storage, p / norm, current, alpha, beta

    zeros = jnp.zeros(steps, jnp.float32)
    begin = (storage, start / jnp.linalg.norm(start), jnp.zeros_like(start), zeros, zeros)
    storage, _, _, alpha, beta = jax.lax.fori_loop(0, steps, step, begin)
    return storage, alpha, beta


def stored_rows(storage, stored):
    """Float64 rows, as they are stored."""
    blocks, steps, width = storage.shape
    scale = np.sqrt(blocks * width) if stored == "float16" else 1.0
    for index in range(steps):
        yield np.asarray(storage[:, index].astype(jnp.float32), np.float64).ravel() / scale


def accuracy(storage, stored, alpha, beta, eigenvalues, rhs):
    """Orthogonality, the error of the mean, and the divergence of the inverse belief."""
    steps, size = len(alpha), len(rhs)
    rows = np.stack(list(stored_rows(storage, stored)))
    gram = rows @ rows.T
    T = np.diag(np.asarray(alpha, np.float64))
    T += np.diag(np.asarray(beta, np.float64)[:-1], 1) + np.diag(np.asarray(beta)[:-1], -1)
    exact = hartley(hartley(rhs, np) / eigenvalues, np)
    mean = np.linalg.solve(T, np.eye(steps)[0] * np.linalg.norm(rhs)) @ rows
    # The belief about A^-1: Sigma = omega I + Q^T M Q, with the omega that makes its trace right.
    inverse = np.linalg.inv(T)
    omega = (np.sum(1 / eigenvalues) - np.trace(inverse)) / (size - steps)
    M = inverse - omega * np.eye(steps)
    # Sigma^-1 = (I - Q^T W Q) / omega, W = (omega M^-1 + Q Q^T)^-1.
    W = np.linalg.inv(omega * np.linalg.inv(M) + gram)
    images = np.stack([hartley(row, np) for row in rows])
    along = (images / eigenvalues) @ images.T
    trace = (np.sum(1 / eigenvalues) - np.sum(W * along)) / omega
    logdet = size * np.log(omega) + np.linalg.slogdet(np.eye(steps) + M @ gram / omega)[1]
    return {
        "off-diagonal": float(np.max(np.abs(gram - np.diag(np.diag(gram))))),
        "mean error": float(np.linalg.norm(mean - exact) / np.linalg.norm(exact)),
        "divergence": float(0.5 * (trace - size + logdet + np.sum(np.log(eigenvalues)))),
        "smallest Ritz": float(np.linalg.eigvalsh(T)[0]),
        "largest Ritz": float(np.linalg.eigvalsh(T)[-1] / eigenvalues.max()),
    }


def measure(name, size, steps, stored, kind, repeats):
    """One case."""
    eigenvalues = spectrum(name, size)
    rhs = np.random.default_rng(1).standard_normal(size)
    values, start = jnp.asarray(eigenvalues, jnp.float32), jnp.asarray(rhs, jnp.float32)
    compiled = run.lower(values, start, steps=steps, kind=kind, stored=stored).compile()
    memory, seconds = compiled.memory_analysis(), []
    for _ in range(repeats + 1):
        storage = alpha = beta = None  # not two of them at a time
        started = time.perf_counter()
        storage, alpha, beta = jax.block_until_ready(compiled(values, start))
        seconds.append(time.perf_counter() - started)
    return {
        "operator": name, "size": size, "steps": steps, "stored": stored, "kind": kind,
        "seconds": float(np.median(seconds[1:])),
        "memory": memory.temp_size_in_bytes + memory.output_size_in_bytes,
        "basis": storage.size * storage.dtype.itemsize,
    } | accuracy(storage, stored, alpha, beta, eigenvalues, rhs)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**17, 2**20])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    records = []
    for size in arguments.sizes:
        for name in ("GGN-like", "power law"):
            for stored, kind in CASES:
                records.append(
                    measure(name, size, arguments.steps, stored, kind, arguments.repeats)
                )
                print(records[-1], flush=True)
                save("storage_precision", {"records": records})


if __name__ == "__main__":
    main()
