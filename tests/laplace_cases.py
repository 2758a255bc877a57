"""A small network with a Jacobian written by hand, and the dense Laplace posterior in NumPy."""

import functools

import jax.numpy as jnp
import numpy as np

from pnkrylov import laplace

INPUTS, HIDDEN, OUTPUTS = 3, 5, 3
SIZE = HIDDEN * (INPUTS + 1) + OUTPUTS * (HIDDEN + 1)
NUM_TEST = 6


def apply(params, x):
    """One hidden layer; parameters flatten as hidden.b, hidden.w, last.b, last.w."""
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"][None, :])
    return hidden @ params["last"]["w"] + params["last"]["b"][None, :]


@functools.cache
def arrays():
    """Parameters and 40 inputs, in float64 NumPy."""
    rng = np.random.default_rng(6)
    params = {
        "hidden": {"b": rng.normal(size=HIDDEN), "w": rng.normal(size=(INPUTS, HIDDEN))},
        "last": {"b": rng.normal(size=OUTPUTS), "w": rng.normal(size=(HIDDEN, OUTPUTS))},
    }
    return params, rng.normal(size=(40, INPUTS)), rng.normal(size=(NUM_TEST, INPUTS))


def outputs_and_jacobian(x):
    """NumPy outputs `(n, K)` and Jacobian `(n, K, p)`, by hand."""
    params, _, _ = arrays()
    hidden = np.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    outputs = hidden @ params["last"]["w"] + params["last"]["b"]
    slope = 1 - hidden**2
    n, identity = len(x), np.eye(OUTPUTS)
    through = slope[:, None, :] * params["last"]["w"].T[None, :, :]  # (n, K, hidden)
    parts = [
        through,
        (x[:, None, :, None] * through[:, :, None, :]).reshape(n, OUTPUTS, -1),
        np.broadcast_to(identity, (n, OUTPUTS, OUTPUTS)),
        (hidden[:, None, :, None] * identity[None, :, None, :]).reshape(n, OUTPUTS, -1),
    ]
    return outputs, np.concatenate(parts, axis=2)


def softmax(outputs):
    exponentials = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def problem(family, n):
    """Targets, the library's likelihood, dense curvature and loss of the first n examples."""
    _, inputs, _ = arrays()
    outputs, jacobian = outputs_and_jacobian(inputs[:n])
    rng = np.random.default_rng(7)
    if family == "categorical":
        targets = rng.integers(0, OUTPUTS, size=n)
        p = softmax(outputs)
        hessians = p[:, :, None] * np.eye(OUTPUTS) - p[:, :, None] * p[:, None, :]
        loss = -np.log(p[np.arange(n), targets]).sum()
        likelihood = laplace.Categorical()
    elif family == "gaussian":
        targets = outputs + rng.normal(size=outputs.shape)
        hessians = np.broadcast_to(2.5 * np.eye(OUTPUTS), (n, OUTPUTS, OUTPUTS))
        loss = 1.25 * ((targets - outputs) ** 2).sum() - 0.5 * targets.size * np.log(
            2.5 / 2 / np.pi
        )
        likelihood = laplace.Gaussian(2.5)
    elif family == "bernoulli":
        targets = rng.integers(0, 2, size=outputs.shape).astype(float)
        p = 1 / (1 + np.exp(-outputs))
        hessians = (p * (1 - p))[:, :, None] * np.eye(OUTPUTS)
        loss = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum()
        likelihood = laplace.Bernoulli()
    else:
        raise ValueError(family)
    curvature = np.einsum("nkp,nkl,nlq->pq", jacobian, hessians, jacobian)
    return targets, likelihood, curvature, loss


def flat_params():
    params, _, _ = arrays()
    layers = (params["hidden"], params["last"])
    return np.concatenate([layer[name].reshape(-1) for layer in layers for name in ("b", "w")])


def log_evidence(curvature, loss, precisions):
    """`log p(y)` with every factor written out; precisions `(p,)`."""
    theta = flat_params()
    log_prior = -0.5 * precisions @ theta**2 + 0.5 * np.log(precisions / (2 * np.pi)).sum()
    log_volume = 0.5 * len(theta) * np.log(2 * np.pi)
    log_det = np.linalg.slogdet(curvature + np.diag(precisions))[1]
    return -loss + log_prior + log_volume - 0.5 * log_det


def functional_covariance(covariance):
    """`J Sigma J^T` at the test inputs, `(n, K, K)`."""
    _, _, test = arrays()
    _, jacobian = outputs_and_jacobian(test)
    return np.einsum("nkp,pq,nlq->nkl", jacobian, covariance, jacobian)


def tree_of(flat, dtype=jnp.float64):
    """A flat vector in the structure of the parameters."""
    pieces, start = {}, 0
    for layer, name, shape in (
        ("hidden", "b", (HIDDEN,)),
        ("hidden", "w", (INPUTS, HIDDEN)),
        ("last", "b", (OUTPUTS,)),
        ("last", "w", (HIDDEN, OUTPUTS)),
    ):
        size = int(np.prod(shape))
        piece = jnp.asarray(flat[start : start + size].reshape(shape), dtype)
        pieces.setdefault(layer, {})[name] = piece
        start += size
    return pieces


def data(family, n, dtype):
    """Inputs and targets for the library."""
    _, inputs, _ = arrays()
    targets = problem(family, n)[0]
    if family == "categorical":
        return jnp.asarray(inputs[:n], dtype), jnp.asarray(targets)
    return jnp.asarray(inputs[:n], dtype), jnp.asarray(targets, dtype)


def fit(family, n, dtype, **options):
    """`laplace.fit` on the small network."""
    params = tree_of(flat_params(), dtype)
    likelihood = problem(family, n)[1]
    return laplace.fit(apply, params, data(family, n, dtype), likelihood=likelihood, **options)


def inputs_for_test(dtype):
    return jnp.asarray(arrays()[2], dtype)


def flatten(tree):
    """A pytree of the parameters' structure as one NumPy vector."""
    layers = (tree["hidden"], tree["last"])
    return np.concatenate(
        [np.asarray(layer[name]).reshape(-1) for layer in layers for name in ("b", "w")]
    )
