"""Likelihoods with data, a small network, and its dense curvature from explicit derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pnkrylov.laplace.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
)

N, K = 6, 4
RNG = np.random.default_rng(0)
OUTPUTS = RNG.standard_normal((N, K))
TANGENTS = RNG.standard_normal((N, K))
PRECISION = np.array([0.5, 1.0, 2.0, 4.0])


def student_t(output, target):
    """A density that is not log-concave far from its centre."""
    return -jnp.sum(2.5 * jnp.log1p((target - output) ** 2 / 4))


def logistic(output, target):
    """A log-concave density with a Hessian that depends on the target."""
    return jnp.sum(jax.nn.log_sigmoid(target - output) + jax.nn.log_sigmoid(output - target))


def sample_logistic(key, output):
    return output + jax.random.logistic(key, output.shape, output.dtype)


FAMILIES = {
    "gaussian": (Gaussian(3.0), RNG.standard_normal((N, K))),
    "gaussian-vector": (Gaussian(PRECISION), RNG.standard_normal((N, K))),
    "heteroscedastic": (HeteroscedasticGaussian(), RNG.standard_normal((N, K // 2))),
    "categorical": (Categorical(), np.array([0, 3, 1, 2, 3, 1])),
    "bernoulli": (Bernoulli(), RNG.integers(0, 2, (N, K))),
    "poisson": (Poisson(), RNG.integers(0, 6, (N, K))),
    "custom": (Custom(logistic, sample_logistic), RNG.standard_normal((N, K))),
}


def expected_hessian(name, single, outputs, targets):
    """Output Hessians of all examples; `single` is the Hessian of one."""
    if name != "heteroscedastic":
        return jax.vmap(single)(outputs, targets)
    # The Hessian is quadratic in the residual, so two points replace the expectation over it.
    means, deviation = outputs[:, : K // 2], jnp.exp(outputs[:, K // 2 :] / 2)
    upper = jax.vmap(single)(outputs, means + deviation)
    lower = jax.vmap(single)(outputs, means - deviation)
    return (upper + lower) / 2


INPUTS = RNG.standard_normal((N, 3))
PARAMS = {
    "bias": 0.1 * RNG.standard_normal(4),
    "inner": RNG.standard_normal((3, 4)),
    "outer": 0.5 * RNG.standard_normal((4, K)),
}
SIZE = 32


def network(params, x):
    return jnp.tanh(x @ params["inner"] + params["bias"][None, :]) @ params["outer"]


def params_in(dtype):
    return {name: jnp.asarray(value, dtype) for name, value in PARAMS.items()}


def data_of(name, dtype):
    """(x, y), the inputs in a dtype."""
    return jnp.asarray(INPUTS, dtype), jnp.asarray(FAMILIES[name][1])


def network_on_flat(flat, x):
    """The network again, of the flat vector: independent of how the library flattens."""
    inner, outer = flat[4:16].reshape(3, 4), flat[16:].reshape(4, K)
    return jnp.tanh(x @ inner + flat[:4]) @ outer


@functools.cache
def dense(name):
    """Dense matrices of a family, from explicit Jacobians and jax.hessian, example by example."""
    likelihood, targets = FAMILIES[name]
    flat = jnp.concatenate([jnp.asarray(PARAMS[key]).reshape(-1) for key in sorted(PARAMS)])

    def loss_of_output(f, y):
        return likelihood.negative_log_density(f[None], y[None])[0]

    def loss(flat, x, y):
        return loss_of_output(network_on_flat(flat, x), y)

    @jax.jit
    def everything(flat, inputs, targets):
        outputs = jax.vmap(network_on_flat, (None, 0))(flat, inputs)
        return {
            "jacobian": jax.vmap(jax.jacrev(network_on_flat), (None, 0))(flat, inputs),
            "H": expected_hessian(name, jax.hessian(loss_of_output), outputs, targets),
            "hessian": jnp.sum(jax.vmap(jax.hessian(loss), (None, 0, 0))(flat, inputs, targets), 0),
            "gradients": jax.vmap(jax.grad(loss), (None, 0, 0))(flat, inputs, targets),
            "loss": jnp.sum(jax.vmap(loss, (None, 0, 0))(flat, inputs, targets)),
        }

    found = everything(flat, jnp.asarray(INPUTS), jnp.asarray(targets))
    found = {name: np.asarray(value, np.float64) for name, value in found.items()}
    found["ggn"] = np.einsum("nkp,nkl,nlq->pq", found["jacobian"], found["H"], found["jacobian"])
    found["gradient"] = found["gradients"].sum(axis=0)
    found["empirical"] = found["gradients"].T @ found["gradients"]
    found["linear"] = np.outer(found["gradient"], found["gradient"])
    return found
