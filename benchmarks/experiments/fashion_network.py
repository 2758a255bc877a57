"""The network of the FashionMNIST experiment: three convolutions, 11,878 parameters; its training.

Convolutions are nine shifted slices and a matrix product: on a CPU, under `vmap` and inside XLA
loops that is several times as fast as XLA's convolutions (METHOD.md section 13).
"""

import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

CHANNELS, HIDDEN, CLASSES = (1, 8, 16, 32), 20, 10
SIDE = 28
BATCH = 128


def initial(key, channels=CHANNELS, hidden=HIDDEN, classes=CLASSES, side=SIDE):
    """He-normal weights and zero biases, float32; convolutions as (9 x channels in, out)."""
    shapes = [(9 * a, b) for a, b in itertools.pairwise(channels)]
    features = channels[-1] * (side // 2 ** len(shapes)) ** 2
    shapes += [(features, hidden), (hidden, classes)]
    names = [f"conv{i}" for i in range(len(channels) - 1)] + ["dense0", "dense1"]
    keys = jax.random.split(key, len(shapes))
    return {
        name: {
            "weight": jax.random.normal(key, shape, jnp.float32) * (2 / shape[0]) ** 0.5,
            "bias": jnp.zeros((shape[1],), jnp.float32),
        }
        for name, shape, key in zip(names, shapes, keys, strict=True)
    }


def apply(params, images):
    """Logits (n, classes) of images (n, side, side, channels)."""
    x = images
    for name in sorted(name for name in params if name.startswith("conv")):
        x = _pooled(jax.nn.relu(_affine(patches(x), params[name])))
    x = x.reshape(x.shape[0], -1)
    return _affine(jax.nn.relu(_affine(x, params["dense0"])), params["dense1"])


def _affine(x, layer):
    return x @ layer["weight"] + layer["bias"].reshape((1,) * (x.ndim - 1) + (-1,))


def patches(x):
    """The 3 x 3 neighbourhood of every pixel, padded by zeros: (n, h, w, 9 c)."""
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jnp.concatenate(
        [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)], axis=-1
    )


def _pooled(x):
    """2 x 2 max pooling; an odd last row and column are left out."""
    n, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def save(path, params, **extra):
    flat = {
        f"{name}/{kind}": leaf for name, layer in params.items() for kind, leaf in layer.items()
    }
    np.savez(path, **jax.tree.map(np.asarray, flat), **extra)


def load(path):
    """Parameters as `save` wrote them."""
    params = {}
    with np.load(path, allow_pickle=False) as stored:
        for key in stored.files:
            if "/" in key:
                name, kind = key.split("/")
                params.setdefault(name, {})[kind] = jnp.asarray(stored[key])
    return params


@jax.jit
def accuracy_of(params, images, labels):
    return jnp.mean(jnp.argmax(apply(params, images), axis=1) == labels)


def accuracy(params, images, labels, size=1000):
    hits = [
        float(accuracy_of(params, images[start : start + size], labels[start : start + size]))
        for start in range(0, len(images), size)
    ]
    return float(np.mean(hits))


def optimiser(steps, rate, decay):
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps)
    return optax.adamw(schedule, weight_decay=decay)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _step(rule, params, state, images, labels):
    def loss(params):
        logits = apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, slope = jax.value_and_grad(loss)(params)
    updates, state = rule.update(slope, state, params)
    return optax.apply_updates(params, updates), state, value


def train(train_set, test_set, cache, *, epochs=15, rate=3e-3, decay=1e-3, seed=0):
    """Trains, or reads what was trained; one checkpoint an epoch, so that it can go on.

    Returns:
        Parameters, and their test accuracy.
    """
    final = pathlib.Path(cache) / f"fashion_seed{seed}.npz"
    if final.exists():
        return load(final), float(np.load(final)["accuracy"])
    images, labels = train_set
    batches = len(images) // BATCH
    rule = optimiser(epochs * batches, rate, decay)
    params = initial(jax.random.key(seed))
    state, done = rule.init(params), 0
    checkpoint = final.with_suffix(".training.npz")
    if checkpoint.exists():
        with np.load(checkpoint, allow_pickle=False) as stored:
            tree = jax.tree.structure((params, state))
            leaves = [jnp.asarray(stored[f"leaf{i}"]) for i in range(tree.num_leaves)]
            (params, state), done = jax.tree.unflatten(tree, leaves), int(stored["done"])
    for epoch in range(done, epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(images))
        bar = tqdm(range(batches), desc=f"epoch {epoch + 1}/{epochs}", mininterval=5)
        for index in bar:
            chosen = order[index * BATCH : (index + 1) * BATCH]
            params, state, value = _step(rule, params, state, images[chosen], labels[chosen])
        print(f"epoch {epoch + 1}: loss {float(value):.3f}, {accuracy(params, *test_set):.4f}")
        leaves = jax.tree.leaves((params, state))
        named = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        np.savez(checkpoint, **named, done=epoch + 1)
    found = accuracy(params, *test_set)
    save(final, params, accuracy=found)
    checkpoint.unlink(missing_ok=True)
    return params, found
