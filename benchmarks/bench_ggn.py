"""Products with the GGN of a small CNN against a hand-written linearised product.

`python benchmarks/bench_ggn.py` writes results/ggn.json: seconds per product, the least of many
interleaved repetitions, so that a busy machine disturbs all alike.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import record

from pnkrylov.laplace import curvature
from pnkrylov.laplace.likelihoods import Categorical


def cnn_parameters(key, side, channels, dtype):
    """Two 5x5 convolutions with 2x2 pooling, a hidden layer of 32, ten classes."""
    keys = iter(jax.random.split(key, 8))
    first, second = channels
    flat = (((side - 4) // 2 - 4) // 2) ** 2 * second

    def weights(*shape, fan_in):
        return (jax.random.normal(next(keys), shape) / fan_in**0.5).astype(dtype)

    return {
        "conv1": {"w": weights(5, 5, 1, first, fan_in=25), "b": jnp.zeros(first, dtype)},
        "conv2": {
            "w": weights(5, 5, first, second, fan_in=25 * first),
            "b": jnp.zeros(second, dtype),
        },
        "hidden": {"w": weights(flat, 32, fan_in=flat), "b": jnp.zeros(32, dtype)},
        "last": {"w": weights(32, 10, fan_in=32), "b": jnp.zeros(10, dtype)},
    }


def cnn(params, images):
    h = images
    for name in ("conv1", "conv2"):
        dimensions = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(
            h, params[name]["w"], (1, 1), "VALID", dimension_numbers=dimensions
        )
        h = jnp.tanh(h + params[name]["b"])
        n, height, width, c = h.shape
        # A reshape and a maximum: half the price of a pooling window under differentiation.
        h = jnp.max(h.reshape(n, height // 2, 2, width // 2, 2, c), axis=(2, 4))
    h = jnp.tanh(h.reshape(h.shape[0], -1) @ params["hidden"]["w"] + params["hidden"]["b"])
    return h @ params["last"]["w"] + params["last"]["b"]


def mlp_parameters(key, side, width, dtype):
    a, b = jax.random.split(key)
    return {
        "hidden": (jax.random.normal(a, (side * side, width)) / side).astype(dtype),
        "last": (jax.random.normal(b, (width, 10)) / width**0.5).astype(dtype),
    }


def mlp(params, images):
    return jnp.tanh(images.reshape(images.shape[0], -1) @ params["hidden"]) @ params["last"]


def hand_written(apply, params, images):
    """What a careful user writes: linearise once, residuals as arguments, softmax Hessian."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)

    @eqx.filter_jit
    def linearise(flat, images):
        return jax.linearize(lambda flat: apply(unravel(flat), images), flat)

    outputs, tangent = linearise(flat, images)
    p = jax.nn.softmax(outputs, axis=1)

    @jax.jit
    def product(tangent, p, vector):
        t = tangent(vector)
        weighted = p * (t - jnp.sum(p * t, axis=1, keepdims=True))
        return jax.linear_transpose(tangent, vector)(weighted)[0]

    @jax.jit
    def relinearised(flat, vector):
        f = lambda flat: apply(unravel(flat), images)  # noqa: E731
        out, t = jax.jvp(f, (flat,), (vector,))
        p = jax.nn.softmax(out, axis=1)
        return jax.vjp(f, flat)[1](p * (t - jnp.sum(p * t, axis=1, keepdims=True)))[0]

    return (lambda v: product(tangent, p, v)), (lambda v: relinearised(flat, v))


def best_of(functions, repetitions, least_seconds=0.05):
    """Least seconds per call of each function, measured in turns."""
    for function in functions.values():
        jax.block_until_ready(function())
    best = dict.fromkeys(functions, np.inf)
    for _ in range(repetitions):
        for name, function in functions.items():
            begin = time.perf_counter()
            calls = 0
            while calls == 0 or time.perf_counter() - begin < least_seconds:
                one = time.perf_counter()
                jax.block_until_ready(function())
                best[name] = min(best[name], time.perf_counter() - one)
                calls += 1
    return best


product = jax.jit(lambda operator, vector: operator.mv(vector))
block_product = jax.jit(lambda operator, block: operator.block_mv(block))


def measure(name, apply, params, images, labels, repetitions):
    operator = curvature.ggn(apply, params, (images, labels), Categorical())
    streamed = curvature.ggn(
        apply, params, (images, labels), Categorical(), batch_size=len(images) // 4
    )
    jax.block_until_ready(operator.square_root_rows())
    begin = time.perf_counter()
    stored = jax.block_until_ready(operator.stored())
    seconds_rows = time.perf_counter() - begin
    block = jax.random.normal(jax.random.key(1), (16, operator.size), operator.dtype)
    vector = block[0]
    by_hand, relinearised = hand_written(apply, params, images)
    expected = by_hand(vector)
    for other in (operator.mv, streamed.mv, stored.mv):
        error = jnp.linalg.norm(other(vector) - expected) / jnp.linalg.norm(expected)
        assert error < 1e-4, error
    one = best_of(
        {
            "by hand, linearised once": lambda: by_hand(vector),
            "by hand, linearised anew": lambda: relinearised(vector),
            "linearised": lambda: product(operator, vector),
            "stored rows": lambda: product(stored, vector),
            "streamed, 4 batches": lambda: streamed.mv(vector),
        },
        repetitions,
    )
    sixteen = best_of(
        {
            "linearised": lambda: block_product(operator, block),
            "stored rows": lambda: block_product(stored, block),
            "streamed, 4 batches": lambda: streamed.block_mv(block),
        },
        max(1, repetitions // 3),
    )
    result = {
        "model": name,
        "parameters": operator.size,
        "examples": operator.num_examples,
        "dtype": operator.dtype.name,
        "row_megabytes": operator.row_bytes / 1e6,
        "seconds_rows": seconds_rows,
        "one": one,
        "sixteen": sixteen,
        "one_against_hand": one["linearised"] / one["by hand, linearised once"],
        "sixteen_against_sixteen_alone": {k: sixteen[k] / (16 * one[k]) for k in sixteen},
    }
    print(f"{name}: p = {operator.size}, n = {operator.num_examples}")
    print(f"  rows {result['row_megabytes']:.0f} MB in {1e3 * seconds_rows:.0f} ms")
    for kind, seconds in one.items():
        line = f"  {kind:26s} {1e3 * seconds:8.2f} ms"
        if kind in sixteen:
            ratio = result["sixteen_against_sixteen_alone"][kind]
            line += f"   16 at once {1e3 * sixteen[kind]:8.2f} ms ({ratio:.2f} of 16 alone)"
        print(line)
    print(f"  one product against hand-written: {result['one_against_hand']:.2f}")
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    key = jax.random.key(0)
    images = jax.random.normal(key, (arguments.examples, 28, 28, 1), jnp.float32)
    labels = jax.random.randint(key, (arguments.examples,), 0, 10)
    models = {
        "CNN": (cnn, cnn_parameters(key, 28, (8, 16), jnp.float32)),
        "MLP": (mlp, mlp_parameters(key, 28, 64, jnp.float32)),
    }
    results = [
        measure(name, apply, params, images, labels, arguments.repetitions)
        for name, (apply, params) in models.items()
    ]
    print(record.save("ggn", {"results": results}))


if __name__ == "__main__":
    main()
