"""The dense GGN of a small network over all of its data, accumulated once and kept on disk.

The reference of the second FashionMNIST experiment: 11,878^2 numbers, 60,000 images. Rows
`L_i^T J_i` in float32, their products by SYRK in float32 for a thousand images at a time, sums in
float64. Run the same command again after an interruption.

    python benchmarks/experiments/full_ggn.py --cache ~/.cache/pnkrylov
"""

import argparse
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from fashion_network import accuracy, apply, load
from images import FASHION, fashion_mnist
from jax.flatten_util import ravel_pytree
from scipy.linalg.blas import ssyrk
from tqdm import tqdm

from pnkrylov.laplace import Categorical, ggn

# Images whose rows are made at a time, and whose rows are multiplied at a time.
SMALL, LARGE = 50, 1000


@jax.jit
def root_rows(params, images):
    """Rows `L_i^T J_i` of the GGN, (n (K - 1), p), with `L_i L_i^T` the Hessian of the loss."""
    flat, unravel = ravel_pytree(params)
    roots = Categorical().hessian_sqrt(apply(params, images), None)

    def of_image(image, root):
        _, pull = jax.vjp(lambda flat: apply(unravel(flat), image[None])[0], flat)
        return jax.vmap(lambda cotangent: pull(cotangent)[0])(root.T)

    return jax.vmap(of_image)(images, roots).reshape(-1, flat.shape[0])


def accumulate(params, images, cache, *, save_every=10):
    """The sum over all images, (p, p), float64; read from the cache when it is there.

    Args:
        params: of the network.
        images: all of them.
        cache: folder for `fashion_ggn.npy`, and for what is done of it.
        save_every: steps of a thousand images between two writes.
    """
    cache = pathlib.Path(cache)
    final, partial = cache / "fashion_ggn.npy", cache / "fashion_ggn_partial.npz"
    if final.exists():
        return np.load(final)
    size = ravel_pytree(params)[0].size
    total, done = np.zeros((size, size), order="F"), 0
    if partial.exists():
        with np.load(partial) as stored:
            total, done = np.asfortranarray(stored["total"]), int(stored["done"])
    bar = tqdm(total=len(images), initial=done, desc="GGN", unit="image", mininterval=10)
    while done < len(images):
        block = images[done : done + LARGE]
        starts = range(0, len(block), SMALL)
        rows = [np.asarray(root_rows(params, jnp.asarray(block[s : s + SMALL]))) for s in starts]
        # The transpose of row-major rows is the column-major matrix that BLAS wants.
        total += ssyrk(1.0, np.concatenate(rows).T, trans=0, lower=1)
        done += len(block)
        bar.update(len(block))
        if done // LARGE % save_every == 0 and done < len(images):
            _write(partial, np.savez, total=total, done=done)
    lower = np.tril(total)
    lower += np.tril(total, -1).T
    _write(final, np.save, lower)
    partial.unlink(missing_ok=True)
    return lower


def check_products(matrix, options):
    """A matrix-free product over all of the data against one with the accumulated matrix."""
    (images, labels), _ = fashion_mnist(options.data)
    params = load(options.cache / "fashion_seed0.npz")
    operator = ggn(apply, params, (images, labels), Categorical(), batch_size=LARGE)
    vector = np.random.default_rng(0).standard_normal(len(matrix)).astype(np.float32)
    seconds = []
    for _ in range(2):
        started = time.process_time()
        product = np.asarray(operator.mv(jnp.asarray(vector)), np.float64)
        seconds.append(time.process_time() - started)
    expected = matrix @ vector
    error = np.linalg.norm(product - expected) / np.linalg.norm(expected)
    return {"product_error": float(error), "product_seconds": min(seconds)}


def _write(path, writer, *content, **named):
    # Renamed when it is whole: an interrupted write leaves the last one.
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        writer(file, *content, **named)
    os.replace(unfinished, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, default=FASHION)
    parser.add_argument("--cache", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the network")
    options = parser.parse_args()
    (images, _), test = fashion_mnist(options.data)
    params = load(options.cache / f"fashion_seed{options.seed}.npz")
    print("test accuracy", accuracy(params, *test))
    matrix = accumulate(params, images, options.cache)
    print("trace", np.trace(matrix))


if __name__ == "__main__":
    main()
