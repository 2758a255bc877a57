"""The trained ResNet-9 of train_cifar10.py as a JAX function, and its Jacobians.

Convolutions are shifted slices and one matrix product (see fashion_network.py); weights stay in
torch's layout.
"""

import jax
import jax.numpy as jnp
import numpy as np
from fashion_network import patches
from images import standardised
from jax.flatten_util import ravel_pytree

CHUNK = 5


def load(path):
    """The weights by torch's names, float32, in torch's order, and what is said about them."""
    with np.load(path, allow_pickle=False) as stored:
        about = str(stored["about"])
        return {name: jnp.asarray(stored[name]) for name in stored.files if name != "about"}, about


def apply(params, images):
    """Logits (n, 10) of standardised images (n, 32, 32, 3)."""
    x = jax.nn.relu(_conv(params, "0", images))
    x = jax.nn.relu(_conv(params, "2", x, stride=2))
    x = _residual(params, "4", x)
    x = jax.nn.relu(_conv(params, "5", x, stride=2))
    x = _residual(params, "7", x)
    x = jax.nn.relu(_conv(params, "8", x, stride=2))
    x = x.mean(axis=(1, 2))
    return x @ params["12.weight"].T + params["12.bias"][None, :]


def _residual(params, name, x):
    inside = jax.nn.relu(_conv(params, f"{name}.first", x))
    return jax.nn.relu(x + _conv(params, f"{name}.second", inside))


def _conv(params, name, x, stride=1):
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    # torch: (out, in, 3, 3); patches: nine positions, each with all channels.
    matrix = weight.transpose(2, 3, 1, 0).reshape(-1, weight.shape[0])
    return patches(x)[:, ::stride, ::stride] @ matrix + bias[None, None, None, :]


def outputs(params, images, size=500):
    """Logits of uint8 images, (n, 10), float32."""
    parts = [
        np.asarray(_outputs(params, standardised(images[start : start + size])))
        for start in range(0, len(images), size)
    ]
    return np.concatenate(parts)


_outputs = jax.jit(apply)


def jacobians(params, images):
    """Yields Jacobians (n, 10, p) of uint8 images in chunks of five, float32."""
    assert len(images) % CHUNK == 0
    for start in range(0, len(images), CHUNK):
        yield np.asarray(_jacobian(params, standardised(images[start : start + CHUNK])))


@jax.jit
def _jacobian(params, images):
    flat, unravel = ravel_pytree(params)

    # One image after the other: their patches would not fit into the cache together.
    def of_image(image):
        logits, pull_back = jax.vjp(lambda flat: apply(unravel(flat), image[None])[0], flat)
        return jax.vmap(pull_back)(jnp.eye(len(logits), dtype=logits.dtype))[0]

    return jax.lax.map(of_image, images)


def mixtures(params, images, weights):
    """`sum_ik weights[c, i, k] grad f_k(image_i)`, (count, p), float32."""
    flat, unravel = ravel_pytree(params)
    inputs = jnp.asarray(standardised(images))
    _, pull_back = jax.vjp(lambda flat: apply(unravel(flat), inputs), flat)
    return np.stack([np.asarray(pull_back(jnp.asarray(part))[0]) for part in weights])
