"""Models from Equinox and Flax, and those in training mode, which are refused."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pnkrylov.laplace import curvature
from pnkrylov.laplace.likelihoods import Categorical, Gaussian
from pnkrylov.laplace.models import check_model

F32 = jnp.dtype("float32")
X = jnp.asarray(np.random.default_rng(0).standard_normal((6, 3)), F32)
LABELS = np.array([0, 1, 2, 2, 1, 0])
KEY = jax.random.key(0)


def dense_ggn(flat_outputs, flat):
    """From the explicit Jacobian `(n, K, p)` of the outputs at a flat vector."""
    outputs = np.asarray(flat_outputs(flat), np.float64)
    J = np.asarray(jax.jacrev(flat_outputs)(flat), np.float64)
    p = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    H = np.einsum("nk,kl->nkl", p, np.eye(3)) - p[:, :, None] * p[:, None, :]
    return np.einsum("nkp,nkl,nlq->pq", J, H, J)


def check_against_dense(apply, params, trainable):
    """Compares the GGN with one from jax.flatten_util on the trainable part."""
    flat, unravel = jax.flatten_util.ravel_pytree(trainable)

    def outputs(flat):
        return apply(eqx.combine(unravel(flat), params), X)

    matrix = dense_ggn(outputs, flat)
    operator = curvature.ggn(apply, params, (X, LABELS), Categorical())
    assert operator.size == flat.size
    np.testing.assert_allclose(operator.as_matrix(), matrix, atol=1e-4 * np.abs(matrix).max())
    return operator


def over_batch(model, x):
    return jax.vmap(model)(x)


@pytest.mark.parametrize("whole", [True, False])
def test_equinox_module_whole_or_partitioned(whole):
    model = eqx.nn.MLP(3, 3, 4, 1, activation=jnp.tanh, dtype=F32, key=KEY)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    apply = over_batch if whole else lambda params, x: over_batch(eqx.combine(params, static), x)
    operator = check_against_dense(apply, model if whole else params, params)
    moved = operator.parameters.combine(operator.parameters.flat() * 2)
    np.testing.assert_allclose(moved.layers[0].weight, 2 * model.layers[0].weight)
    assert not whole or moved.activation is model.activation


def test_a_filter_of_an_equinox_convolution():
    model = eqx.nn.Sequential(
        [eqx.nn.Conv1d(1, 2, 2, dtype=F32, key=KEY), eqx.nn.Lambda(lambda h: h.reshape(-1)[:3])]
    )

    def apply(model, x):
        return jax.vmap(model)(x[:, None, :])

    chosen = np.zeros((2, 1, 2), bool)
    chosen[0] = True  # one filter
    mask = jax.tree.map(lambda _: False, model)
    mask = eqx.tree_at(lambda m: m.layers[0].weight, mask, chosen)
    whole = curvature.ggn(apply, model, (X, LABELS), Categorical())
    part = curvature.ggn(apply, model, (X, LABELS), Categorical(), mask=mask)
    assert (whole.size, part.size) == (6, 2)
    np.testing.assert_allclose(part.as_matrix(), whole.as_matrix()[:2, :2], rtol=1e-5)


def test_flax_linen():
    linen = pytest.importorskip("flax.linen")
    model = linen.Sequential([linen.Dense(4), linen.tanh, linen.Dense(3)])
    variables = model.init(KEY, X)
    check_against_dense(model.apply, variables, variables)


def test_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer, nnx.Param)
    operator = curvature.ggn(
        lambda state, x: nnx.merge(graph, state)(x), state, (X, LABELS), Categorical()
    )
    # A linear layer: its Jacobian is the input, whatever its parameters are.
    flat, unravel = jax.flatten_util.ravel_pytree(state)
    matrix = dense_ggn(lambda flat: nnx.merge(graph, unravel(flat))(X), flat)
    np.testing.assert_allclose(operator.as_matrix(), matrix, atol=1e-5 * matrix.max())


def test_outputs_without_an_axis_of_their_own():
    w = jnp.ones(3, F32)
    operator = curvature.ggn(lambda w, x: x @ w, w, (X, np.zeros(6)), Gaussian(2.0))
    np.testing.assert_allclose(operator.as_matrix(), 2 * np.asarray(X.T @ X), rtol=1e-5)


def test_inputs_may_be_a_pytree():
    w = jnp.ones((3, 3), F32)
    data = ({"left": X, "right": [X, np.ones(6, np.float32)]}, LABELS)

    def apply(w, x):
        return (x["left"] + x["right"][0]) @ w * x["right"][1][:, None]

    z = 2 * np.asarray(X, np.float64)
    p = np.exp(z @ np.ones((3, 3)))
    p /= p.sum(axis=1, keepdims=True)
    H = np.einsum("nk,kl->nkl", p, np.eye(3)) - p[:, :, None] * p[:, None, :]
    matrix = np.einsum("na,nb,nkl->akbl", z, z, H).reshape(9, 9)
    for batch_size in (None, 3):
        operator = curvature.ggn(apply, w, data, Categorical(), batch_size=batch_size)
        np.testing.assert_allclose(operator.as_matrix(), matrix, rtol=1e-4, atol=1e-5)


# --- training mode


class Net(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self):
        self.linear = eqx.nn.Linear(3, 3, dtype=F32, key=KEY)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x):
        return self.dropout(self.linear(x), key=jax.random.key(7))


def refused(apply, params, message):
    with pytest.raises(ValueError, match=message):
        curvature.ggn(apply, params, (X, LABELS), Categorical())


def test_equinox_dropout_in_training_mode():
    model = Net()
    remedy = "Dropout in training mode.*inference_mode"
    refused(over_batch, model, remedy)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    refused(lambda p, x: over_batch(eqx.combine(p, static), x), params, remedy)
    refused(
        functools.partial(lambda s, p, x: over_batch(eqx.combine(p, s), x), static), params, remedy
    )
    curvature.ggn(over_batch, eqx.nn.inference_mode(model), (X, LABELS), Categorical())


def test_equinox_batch_norm_in_training_mode():
    norm, _ = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    parameters = curvature.select_parameters({"norm": norm, "w": X})
    with pytest.raises(ValueError, match="BatchNorm in training mode"):
        check_model(lambda params, x: x, parameters, {"norm": norm, "w": X}, X)


def test_batch_statistics_are_noticed_by_what_they_do():
    linen = pytest.importorskip("flax.linen")

    def make(running):
        return linen.Sequential([linen.Dense(3), linen.BatchNorm(use_running_average=running)])

    variables = make(True).init(KEY, X)
    params, statistics = variables["params"], variables["batch_stats"]

    def apply(running, params, x):
        collections = {"params": params, "batch_stats": statistics}
        return make(running).apply(collections, x, mutable=["batch_stats"])[0]

    refused(functools.partial(apply, False), params, "depends on the other examples.*use_running")
    curvature.ggn(functools.partial(apply, True), params, (X, LABELS), Categorical())


def test_batch_statistics_that_make_one_example_nan_are_noticed():
    def apply(w, x):
        y = x @ w
        return (y - y.mean(axis=0)[None, :]) / y.std(axis=0)[None, :]

    refused(apply, jnp.eye(3, dtype=F32), "depends on the other examples")


def test_random_models_are_noticed_by_what_they_do():
    random = np.random.default_rng(0)

    def apply(w, x):
        return x @ w * jnp.asarray(random.uniform(size=(1, 3)), F32)

    refused(apply, jnp.ones((3, 3), F32), "is random.*train=False")


def test_dropout_with_one_key_for_the_batch_is_noticed_by_what_it_does():
    def apply(w, x):
        return x @ w * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape).astype(F32)

    refused(apply, jnp.ones((3, 3), F32), "depends on the other examples")


def test_a_network_with_rounding_passes():
    """Sums in another order, amplified by weights of 30: still one function of the example."""
    w = 30 * jax.random.normal(KEY, (3, 3), F32)
    curvature.ggn(lambda w, x: jnp.tanh(x @ w) @ w, w, (X, LABELS), Categorical())
