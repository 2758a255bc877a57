"""The part of bench_performance.py against laplace-torch and curvlinops: Laplace approximations.

The same trained weights and data in torch and in JAX, float32: a multilayer perceptron and a small
convolutional network on scikit-learn's digits. Products are checked against each other before
anything is timed. Covariances of the outputs are compared with the exact ones.
"""

import bench_ggn
import jax
import jax.numpy as jnp
import numpy as np
from performance_gp import pairs_of, steps_for_pairs, worst_residual
from side_by_side import Peer, against, in_turns
from sklearn.datasets import load_digits

import pnkrylov as pk
from pnkrylov.laplace import curvature, fit
from pnkrylov.laplace.likelihoods import Categorical

PRIOR_PRECISION = 10.0
NUM_NEW = 50
# What each side offers, theirs against ours. We have no KFAC: our Krylov belief stands against it.
PAIRS = (("full", "exact"), ("diag", "diagonal"), ("kron", "krylov"), ("kron", "exact"))
BACKENDS = ("curvlinops", "BackPACK")


def perceptron(params, x):
    """One hidden layer."""
    (w, b), (v, c) = params
    return jnp.tanh(x @ w + b[None, :]) @ v + c[None, :]


def perceptron_parameters(key, hidden=20):
    keys = jax.random.split(key, 2)
    first = jax.random.normal(keys[0], (64, hidden), jnp.float32) / 8
    last = jax.random.normal(keys[1], (hidden, 10), jnp.float32) / hidden**0.5
    return [(first, jnp.zeros(hidden, jnp.float32)), (last, jnp.zeros(10, jnp.float32))]


def digits(count, side):
    """Images and labels, as they are or enlarged from 8 x 8 to 28 x 28."""
    x, y = load_digits(return_X_y=True)
    x = x.astype(np.float32) / 16
    if side == 28:
        x = np.kron(x.reshape(-1, 8, 8), np.ones((1, 3, 3), np.float32))
        x = np.pad(x, ((0, 0), (2, 2), (2, 2)))[..., None]
    new = slice(count, count + NUM_NEW)
    return (jnp.asarray(x[:count]), jnp.asarray(y[:count])), jnp.asarray(x[new])


def trained(apply, params, data, steps=200, rate=0.3):
    """Gradient descent on the mean loss."""
    x, y = data

    def loss(params):
        logits = jax.nn.log_softmax(apply(params, x))
        return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))

    @jax.jit
    def step(params):
        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params))

    for _ in range(steps):
        params = step(params)
    return jax.block_until_ready(params)


def in_torch(params):
    """Weights and biases in torch's layout and order; of parameters, or of a vector like them."""
    if isinstance(params, list):
        layers = [(np.asarray(w).T, np.asarray(b)) for w, b in params]
    else:
        layers = []
        for name in ("conv1", "conv2", "hidden", "last"):
            w, b = (np.asarray(params[name][kind]) for kind in ("w", "b"))
            if w.ndim == 4:
                w = w.transpose(3, 2, 0, 1)
            elif name == "hidden":  # the image that it reads is (h, w, c) here, (c, h, w) there
                channels, side = 16, round((len(w) / 16) ** 0.5)
                w = w.reshape(side, side, channels, -1).transpose(2, 0, 1, 3)
                w = w.reshape(side * side * channels, -1).T
            else:
                w = w.T
            layers.append((w, b))
    return [tuple(np.ascontiguousarray(part) for part in layer) for layer in layers]


def flat(layers):
    return np.concatenate([part.ravel() for layer in layers for part in layer])


def product_records(name, peer, operator, block, rounds):
    """One product, and sixteen at once."""
    theirs = peer.array("products", len(block))["products"]
    ours = np.stack([flat(in_torch(operator.unravel(row))) for row in operator.block_mv(block)])
    difference = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    assert difference < 1e-4, difference
    rows = {
        "one": (lambda: bench_ggn.product(operator, block[0]), 1),
        "sixteen": (lambda: bench_ggn.block_product(operator, block), 16),
    }
    for what, (ours, count) in rows.items():
        both = {"pnkrylov": ours, "curvlinops": peer.row("products", count)}
        yield {"network": name, "what": f"GGN, products: {what}", "difference": float(difference),
               "rows": against(in_turns(both, rounds), "pnkrylov")}  # fmt: skip


def eigen_record(name, peer, operator, start, rounds, count=10, tolerance=1e-2):
    """Leading eigenpairs: one Lanczos run against eigsh on curvlinops' GGN, at equal residual."""
    their_products = int(peer.array("eigenpairs", count, tolerance)["products"])
    target = peer.call("residual of the pairs")["value"]

    def matvec(row):
        return np.asarray(bench_ggn.product(operator, jnp.asarray(row, jnp.float32)))

    steps = steps_for_pairs(operator, start, matvec, count, target, most=100)

    def ours():
        return pairs_of(pk.lanczos(operator, operator.unravel(start), steps), count)

    both = {"pnkrylov": ours, "curvlinops": peer.row("eigenpairs", count, tolerance)}
    return {
        "network": name,
        "what": f"GGN, {count} leading eigenpairs",
        "ours": {"residual": worst_residual(matvec, *ours()), "products": steps},
        "theirs": {"residual": target, "products": their_products},
        "rows": against(in_turns(both, rounds), "pnkrylov"),
    }


def covariance_records(name, peer, problem, structures, rounds):
    """Fit, and covariances of the outputs at new inputs, for each pair of approximations."""
    apply, params, data, new = problem

    def ours(method):
        return fit(
            apply, params, data, likelihood=Categorical(), prior_precision=PRIOR_PRECISION,
            method=method, num_steps=100, key=jax.random.key(0),
        )  # fmt: skip

    exact = np.asarray(ours("exact").functional(new)[1], np.float64)

    def accuracy(covariance):
        """Median relative error over the inputs, and the total variance over the exact one."""
        covariance = np.asarray(covariance, np.float64)
        errors = np.linalg.norm(covariance - exact, axis=(1, 2))
        errors = errors / np.linalg.norm(exact, axis=(1, 2))
        ratio = np.einsum("nii->", covariance) / np.einsum("nii->", exact)
        return {"error": float(np.median(errors)), "variance": float(ratio)}

    for structure, method in PAIRS:
        if structure not in structures:
            continue
        posterior = ours(method)
        backend = faster_backend(peer, structure, structures[structure])
        peer.call("fit", structure, backend)
        their_covariance = peer.array("functional", structure)["covariance"]
        gives = {
            "ours": {"kind": method} | accuracy(posterior.functional(new)[1]),
            "theirs": {"kind": structure, "backend": backend} | accuracy(their_covariance),
        }
        fits = {
            "pnkrylov": lambda method=method: ours(method).covariance,
            "laplace-torch": peer.row("fit", structure, backend),
        }
        functional = {
            "pnkrylov": lambda posterior=posterior: posterior.functional(new),
            "laplace-torch": peer.row("functional", structure),
        }
        for what, both in (("fit", fits), ("covariance of outputs", functional)):
            yield {"network": name, "what": what, **gives,
                   "rows": against(in_turns(both, rounds), "pnkrylov")}  # fmt: skip


def faster_backend(peer, structure, backends):
    """The backend whose fit and covariance of outputs take less time together, warmed up."""
    seconds = {}
    for backend in backends:
        for _ in range(2):
            calls = peer.call("fit", structure, backend), peer.call("functional", structure)
            seconds[backend] = sum(call["seconds"] for call in calls)
    return min(seconds, key=seconds.get)


def networks():
    """Name, (apply, trained parameters, data, new inputs), and structures with their backends.

    laplace-torch's full covariance of the convolutional network would be 11,126 squared, and its
    diagonal through curvlinops does not fit into 24 GiB with all images in one batch.
    """
    data, new = digits(500, side=8)
    params = trained(perceptron, perceptron_parameters(jax.random.key(0)), data)
    structures = dict.fromkeys(("full", "diag", "kron"), BACKENDS)
    yield "perceptron", (perceptron, params, data, new), structures
    data, new = digits(200, side=28)
    params = bench_ggn.cnn_parameters(jax.random.key(0), 28, (6, 16), jnp.float32)
    params = trained(bench_ggn.cnn, params, data, steps=100)
    structures = {"diag": ("BackPACK",), "kron": BACKENDS}
    yield "convolutional", (bench_ggn.cnn, params, data, new), structures


def laplace_part(rounds, python):
    """All rows against laplace-torch and curvlinops."""
    for name, problem, structures in networks():
        apply, params, (x, y), new = problem
        operator = curvature.ggn(apply, params, (x, y), Categorical())
        block = jax.random.normal(jax.random.key(1), (16, operator.size), jnp.float32)
        layers = in_torch(params)
        images = (x, new) if x.ndim == 2 else (np.moveaxis(part, 3, 1) for part in (x, new))
        given = dict(zip(("x", "new"), map(np.asarray, images), strict=True))
        given |= {f"weight{i}": w for i, (w, _) in enumerate(layers)}
        given |= {f"bias{i}": b for i, (_, b) in enumerate(layers)}
        given |= {"y": np.asarray(y, np.int64), "prior_precision": np.array(PRIOR_PRECISION)}
        given["vectors"] = np.stack([flat(in_torch(operator.unravel(row))) for row in block])
        with Peer(python, "peers_laplace.py", given) as peer:
            yield {"network": name, "parameters": operator.size, "examples": len(x)}
            yield from product_records(name, peer, operator, block, rounds)
            yield eigen_record(name, peer, operator, block[0], rounds)
            yield from covariance_records(name, peer, problem, structures, max(rounds // 2, 3))
