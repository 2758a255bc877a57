"""Hyperparameters by the evidence."""

import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import gp_cases as cases
from pnkrylov import NotFiniteError, gp


def test_what_cannot_be_fitted_is_refused():
    X, y = jnp.ones((3, 1)), jnp.ones((3,))
    with pytest.raises(ValueError, match="no hyperparameters"):
        gp.fit(lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2)), X, y, 0.1, key=cases.KEY)
    with pytest.raises(ValueError, match="not positive"):
        gp.fit(_Linear(jnp.asarray(-1.0)), X, y, 0.1, key=cases.KEY)


class _Linear(gp.Kernel):
    slope: jnp.ndarray

    def matrix(self, X1, X2):
        return self.slope * jnp.matmul(X1, X2.T)

    def diagonal(self, X):
        return self.slope * jnp.sum(X**2, axis=1)


@pytest.mark.slow
def test_the_evidence_is_maximal_where_the_dense_one_is():
    problem = cases.problem("rbf", 150, 2, 0.05, lengthscale=0.3)
    X, y = jnp.asarray(problem.X), jnp.asarray(problem.y[:, 0])
    fitted = gp.fit(
        gp.RBF(lengthscale=0.6), X, y, 0.2, key=cases.KEY, num_iterations=60, num_steps=60
    )

    def negative(logs):
        lengthscale, variance, noise = np.exp(logs)
        matrix = variance * cases.rbf(problem.X, problem.X, lengthscale)
        values = np.linalg.cholesky(matrix + noise * np.eye(len(y)))
        half = np.linalg.solve(values, problem.y[:, 0])
        return half @ half / 2 + np.log(np.diag(values)).sum() + len(y) / 2 * np.log(2 * np.pi)

    best = scipy.optimize.minimize(negative, np.log([0.3, 1.0, 0.05]))
    found = [fitted.kernel.lengthscale, fitted.kernel.variance, fitted.noise]
    # Adam stops near the optimum; the evidence there is flat to second order.
    assert negative(np.log(np.array(found))) < best.fun + 0.2
    np.testing.assert_allclose(fitted.log_evidences[fitted.best], -best.fun, atol=0.3)
    assert fitted.log_evidences[fitted.best] == fitted.log_evidences.max()
    assert np.all(fitted.gradient_errors[:10] < 0.05)
    np.testing.assert_allclose(fitted.belief.noise, fitted.noise)


@pytest.mark.slow
def test_ctrl_c_returns_the_best_so_far():
    problem = cases.problem("rbf", 60, 2, 0.05)
    X, y = jnp.asarray(problem.X), jnp.asarray(problem.y[:, 0])

    class Interrupting:
        def init(self, parameters):
            return 0

        def update(self, gradient, count, parameters):
            if count == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return [jnp.zeros_like(g) for g in gradient[0]], jnp.zeros(()), count + 1

    class Optimizer(Interrupting):
        def update(self, gradient, count, parameters):
            *updates, count = super().update(gradient, count, parameters)
            return tuple(updates), count

    options = {"key": cases.KEY, "num_steps": 20, "num_iterations": 50, "preconditioner_rank": 5}
    fitted = gp.fit(gp.RBF(), X, y, 0.1, optimizer=Optimizer(), **options)
    assert fitted.interrupted and len(fitted.log_evidences) == 3
    with pytest.raises(NotFiniteError, match="at the start"):
        gp.fit(gp.RBF(), X.at[:].set(0), y, 0.0, key=cases.KEY, num_steps=20)
