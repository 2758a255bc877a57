"""Other packages: lineax, scipy, Equinox, Flax and optax, each against a dense answer."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import pytest
import scipy.sparse
import scipy.sparse.linalg as spla
from flax.training.train_state import TrainState

import oracles
import pnkrylov as pk
from pnkrylov import laplace
from pnkrylov.interop.scipy import linear_operator

SIZE = 40
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def problem():
    """A matrix with outliers, a right-hand side, and a belief that has found the outliers."""
    eigenvalues = np.concatenate([np.geomspace(1e2, 1e5, 12), np.linspace(1, 2, SIZE - 12)])
    matrix = oracles.with_spectrum(eigenvalues, 0)
    belief = pk.inverse(matrix, key=KEY, num_steps=20, lookahead=2, num_probes=4, probe_depth=10)
    return matrix, oracles.right_hand_side(matrix, "normal"), belief


def test_a_belief_preconditions_lineax(problem):
    matrix, v, belief = problem
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix), lx.positive_semidefinite_tag)
    solver = lx.CG(rtol=1e-8, atol=1e-8)
    plain = lx.linear_solve(operator, jnp.asarray(v), solver, throw=False)
    options = {"preconditioner": belief.covariance}
    helped = lx.linear_solve(operator, jnp.asarray(v), solver, options=options)
    np.testing.assert_allclose(helped.value, np.linalg.solve(matrix, v), rtol=1e-6)
    assert int(helped.stats["num_steps"]) * 2 < int(plain.stats["num_steps"])


def test_a_belief_preconditions_scipy(problem):
    matrix, v, belief = problem
    steps = {"plain": 0, "helped": 0}

    def count(name):
        def add(_):
            steps[name] += 1

        return add

    spla.cg(matrix, v, rtol=1e-8, callback=count("plain"))
    M = linear_operator(belief.covariance)
    solution, info = spla.cg(matrix, v, rtol=1e-8, M=M, callback=count("helped"))
    assert info == 0 and steps["helped"] * 2 < steps["plain"]
    np.testing.assert_allclose(solution, np.linalg.solve(matrix, v), rtol=1e-6)


def test_operators_go_out_to_scipy_and_come_back(problem):
    matrix, v, _ = problem
    out = linear_operator(matrix)
    assert out.shape == matrix.shape and out.dtype == matrix.dtype
    np.testing.assert_allclose(out @ v, matrix @ v, rtol=1e-12)
    np.testing.assert_allclose(out.H @ v, matrix @ v, rtol=1e-12)
    columns = np.stack([v, 2 * v, -v], axis=1)
    np.testing.assert_allclose(out @ columns, matrix @ columns, rtol=1e-12)
    back = pk.as_operator(out)
    np.testing.assert_allclose(back.mv(jnp.asarray(v)), matrix @ v, rtol=1e-12)
    with pytest.raises(ValueError, match="A must be square"):
        linear_operator(matrix[:, :-1])


@pytest.mark.parametrize("kind", ["array", "sparse", "operator"])
def test_what_numpy_and_scipy_have_comes_in(kind, problem):
    matrix, v, _ = problem
    A = {
        "array": matrix,
        "sparse": scipy.sparse.csr_array(matrix),
        "operator": spla.aslinearoperator(matrix),
    }[kind]
    product = pk.as_operator(A).mv(jnp.asarray(v))
    np.testing.assert_allclose(np.asarray(product), matrix @ v, rtol=1e-12)


# Networks: the posterior is that of the same parameters in a plain function.


def data():
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(12, 3))), jnp.asarray(rng.integers(0, 2, size=12))
    return x, y


def plain(params, x):
    return x @ params["kernel"] + params["bias"][None, :]


def expected(kernel, bias):
    """The dense posterior covariance of a softmax layer, parameters ordered bias, kernel."""
    x = np.asarray(data()[0])
    logits = x @ kernel + bias
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    precision = np.eye(bias.size + kernel.size)
    for row, probabilities in zip(x, p, strict=True):
        jacobian = np.hstack([np.eye(2), np.kron(row[None, :], np.eye(2))])
        hessian = np.diag(probabilities) - np.outer(probabilities, probabilities)
        precision += jacobian.T @ hessian @ jacobian
    return np.linalg.inv(precision)


def test_flax_parameters_of_an_optax_train_state():
    module = nn.Dense(2, param_dtype=jnp.float64)
    x, y = data()
    state = TrainState.create(apply_fn=module.apply, params=module.init(KEY, x), tx=optax.adam(0.1))

    def objective(params):
        logits = state.apply_fn(params, x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        state = state.apply_gradients(grads=jax.grad(objective)(state.params))
    posterior = laplace.fit(
        module.apply, state.params, (x, y), likelihood=laplace.Categorical(), method="exact"
    )
    layer = jax.tree.map(np.asarray, state.params["params"])
    covariance = expected(layer["kernel"], layer["bias"])
    found = posterior.variance()["params"]
    np.testing.assert_allclose(found["bias"], np.diagonal(covariance)[:2], rtol=1e-8)
    kernel = np.diagonal(covariance)[2:].reshape(3, 2)
    np.testing.assert_allclose(found["kernel"], kernel, rtol=1e-8)


def test_equinox_modules_are_parameters():
    layer = eqx.nn.Linear(3, 2, key=KEY, dtype=jnp.float64)
    x, y = data()
    posterior = laplace.fit(
        lambda layer, x: jax.vmap(layer)(x),
        layer,
        (x, y),
        likelihood=laplace.Categorical(),
        method="exact",
    )
    covariance = expected(np.asarray(layer.weight).T, np.asarray(layer.bias))
    found = posterior.variance()
    np.testing.assert_allclose(found.bias, np.diagonal(covariance)[:2], rtol=1e-8)
    kernel = np.diagonal(covariance)[2:].reshape(3, 2)
    np.testing.assert_allclose(found.weight, kernel.T, rtol=1e-8)
    draws = posterior.sample(KEY, 3)
    assert isinstance(draws, eqx.nn.Linear) and draws.weight.shape == (3, 2, 3)
