"""Preconditioned sampling: the covariance stays exact for every family, and products are saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pnkrylov.ciq import inv_sqrt_matvec, msminres, quadrature
from pnkrylov.operators import as_operator
from pnkrylov.preconditioners import (
    choose_observations,
    fully_linear,
    precondition,
    sub_sampled,
)
from test_preconditioners import MATRIX, NAMES, SIZE, family

KEY = jax.random.key(5)
EVERYDAY = ("low rank",)


def assert_root_of_inverse(name, method):
    dtype = jnp.zeros(()).dtype
    matrix, eye = jnp.asarray(MATRIX, dtype), jnp.eye(SIZE, dtype=dtype)
    rtol = 1e-5 if dtype == jnp.float64 else 1e-2
    options = {"key": KEY, "rtol": rtol, "method": method}
    preconditioner = family(name, dtype)[0]
    # The columns of the root, if eps is standard normal, make its covariance root root^T.
    root = inv_sqrt_matvec(matrix, eye, preconditioner=preconditioner, **options).value
    root = np.asarray(root, np.float64).T
    inverse = np.linalg.inv(MATRIX)
    # Each of d columns of the inner root has a relative error below rtol: at most 2 sqrt(d) rtol of
    # the inner inverse, which the outer root amplifies by at most the condition number of P.
    condition = np.linalg.cond(family(name, dtype)[1])
    bound = 2 * np.sqrt(SIZE) * rtol * condition
    assert np.linalg.norm(root @ root.T - inverse, 2) <= bound * np.linalg.norm(inverse, 2)


@pytest.mark.parametrize("name", EVERYDAY)
def test_covariance_is_the_inverse(name):
    assert_root_of_inverse(name, "lanczos")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in EVERYDAY])
def test_covariance_is_the_inverse_for_every_family(name):
    assert_root_of_inverse(name, "lanczos")


@pytest.mark.slow
def test_covariance_is_the_inverse_by_msminres():
    assert_root_of_inverse("scattered blocks", "ciq")


def msminres_steps(matrix, preconditioner, rtol=1e-3):
    """Iterations for samples of N(0, A^-1): all shifts of a rule for the exact interval."""
    operator = precondition(matrix, preconditioner)
    values = np.linalg.eigvalsh(np.asarray(operator.as_matrix(), np.float64))
    dtype = operator.dtype
    lower, upper = jnp.asarray(values[0], dtype), jnp.asarray(values[-1], dtype)
    rule = quadrature(lower, upper, num_points=12)
    rhs = jnp.asarray(np.random.default_rng(0).standard_normal((4, operator.size)), dtype)
    solution = msminres(
        matrix,
        rhs,
        rule.shifts,
        weights=rule.weights,
        lower=lower,
        rtol=rtol,
        preconditioner=preconditioner,
    )
    return int(solution.num_steps), values[-1] / values[0]


@pytest.mark.slow
def test_sub_sampled_curvature_cuts_msminres_iterations_to_a_third():
    # The thesis's setting: the GGN of a classifier, preconditioned by that of a sample of the data.
    pytest.importorskip("sklearn")
    from digits_network import ggn

    damping, num_data = 0.1, 1797
    dense, jacobians, hessians, gradient, _ = ggn(num_data, damping)
    matrix = as_operator(jnp.asarray(dense))
    plain, condition = msminres_steps(matrix, None)

    def sampled(chosen, **weights):
        J, H = jnp.asarray(jacobians[chosen]), jnp.asarray(hessians[chosen])
        return sub_sampled(J, H, alpha=3 * damping, **weights)

    uniform = sampled(np.arange(400), num_data=num_data)
    better, inner_condition = msminres_steps(matrix, uniform)
    assert inner_condition < condition / 9
    assert 3 * better <= plain
    # A third of the observations does as well if they are chosen by their Hessians.
    scores = jnp.asarray(np.trace(hessians, axis1=1, axis2=2))
    chosen, weights = choose_observations(scores, 130, KEY)
    best, _ = msminres_steps(matrix, sampled(np.asarray(chosen), weights=weights))
    assert 3 * best <= plain
    # One direction is not enough, as the thesis says.
    linear, _ = msminres_steps(matrix, fully_linear(jnp.asarray(gradient), damping))
    assert 2 * linear > plain
