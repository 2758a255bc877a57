"""The posteriors of bench_hmc.py: log-density, mode, and a product with the precision."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import oracles


class Target:
    """A log-density on flat vectors, its mode, and a product with its (Gauss-Newton) precision."""

    def __init__(self, name, logdensity, product, dimension, functionals=None):
        self.name, self.logdensity, self.product = name, logdensity, product
        self.dimension, self.functionals = dimension, functionals

    def find_mode(self):
        """Limited-memory BFGS from zero; returns the mode and the gradients it took."""
        from scipy.optimize import minimize

        count = 0
        value_and_grad = jax.jit(jax.value_and_grad(lambda x: -self.logdensity(x)))

        def loss(x):
            nonlocal count
            count += 1
            value, gradient = value_and_grad(jnp.asarray(x))
            return float(value), np.asarray(gradient)

        start = np.random.default_rng(0).standard_normal(self.dimension) * 0.1
        options = {"maxiter": 5000, "maxcor": 30, "gtol": 1e-5}
        mode = minimize(loss, start, jac=True, method="L-BFGS-B", options=options).x
        return jnp.asarray(mode), count


def gaussian_target():
    """N(0, Lambda^-1), the bulk+outliers spectrum in 200 dimensions, rotated at random."""
    matrix, _ = oracles.SPECTRA["bulk+outliers"](200)
    precision = jnp.asarray(matrix)
    return Target("gaussian", lambda x: -x @ precision @ x / 2, lambda mode, v: precision @ v, 200)


def _breast_cancer():
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    return jnp.asarray(x), jnp.asarray(y, jnp.float64)


def _logistic(name, x, y, prior):
    design = jnp.concatenate([x, jnp.ones((len(x), 1))], axis=1)

    def logdensity(w):
        logits = design @ w
        return jnp.sum(y * logits - jax.nn.softplus(logits)) - prior * jnp.sum(w**2) / 2

    def product(mode, v):
        p = jax.nn.sigmoid(design @ mode)
        return design.T @ (p * (1 - p) * (design @ v)) + prior * v

    return Target(name, logdensity, product, design.shape[1])


def digits_target():
    """Logistic regression: is a handwritten digit 5 or more (1797 x 64)? Prior N(0, 10)."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return _logistic("digits", jnp.asarray(x / 16), jnp.asarray(y >= 5, jnp.float64), 0.1)


def cancer_target():
    """Logistic regression on breast-cancer (569 x 30, standardised), prior N(0, 100)."""
    x, y = _breast_cancer()
    return _logistic("cancer", x, y, 0.01)


def _network(name, x, y, sizes, num_functionals=100):
    """A tanh network with a softmax, prior N(0, 1); Gauss-Newton plus prior as precision."""
    ins, hidden, outs = sizes
    ends = np.cumsum((ins * hidden, hidden, hidden * outs, outs))
    targets = jax.nn.one_hot(y, outs, dtype=x.dtype)

    def logits(w, x):
        first, bias, second, last = jnp.split(w, ends[:-1])
        inside = jnp.tanh(x @ first.reshape(ins, hidden) + bias)
        return inside @ second.reshape(hidden, outs) + last

    def logdensity(w):
        return jnp.sum(targets * jax.nn.log_softmax(logits(w, x))) - jnp.sum(w**2) / 2

    def product(mode, v):
        f, tangent = jax.jvp(lambda w: logits(w, x), (mode,), (v,))
        p = jax.nn.softmax(f)
        curved = p * tangent - p * jnp.sum(p * tangent, axis=1, keepdims=True)
        _, pull = jax.vjp(lambda w: logits(w, x), mode)
        return pull(curved)[0] + v

    def functionals(draws):
        own = x[:: max(1, len(x) // num_functionals)]
        return jax.lax.map(lambda w: jax.nn.log_softmax(logits(w, own))[:, 0], draws)

    return Target(name, logdensity, product, int(ends[-1]), functionals)


def network_target():
    """8 - 4 - 10 on the digits: 1797 observations for 86 parameters."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x - x.mean(axis=0)) / 16
    scores = x @ np.linalg.svd(x, full_matrices=False)[2][:8].T
    return _network("network", jnp.asarray(scores), jnp.asarray(y), (8, 4, 10))


def weak_network_target():
    """30 - 4 - 2 on half of breast-cancer: 285 observations, 134 parameters, far from Gaussian."""
    x, y = _breast_cancer()
    return _network("weak-network", x[::2], y[::2].astype(jnp.int32), (30, 4, 2))


TARGETS = {
    "gaussian": gaussian_target,
    "digits": digits_target,
    "cancer": cancer_target,
    "network": network_target,
    "weak-network": weak_network_target,
}
