"""Wrong arguments and data of a Laplace fit are refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import laplace_cases as cases
from harness import no_type_checker
from pnkrylov import laplace
from pnkrylov.errors import NotFiniteError

KEY = jax.random.key(1)
# Fewer rows than parameters (Gram form) and more (dense form).
SIZES = FEW, MANY = 8, 40


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prior_precision": -1.0}, ValueError, "prior_precision contains -1.0"),
        ({"prior_precision": 0.0}, ValueError, "positive and finite"),
        ({"prior_precision": np.nan}, ValueError, "positive and finite"),
        ({"prior_precision": {"hidden": 1.0}}, ValueError, "does not match the parameters"),
        ({"prior_precision": "weak"}, TypeError, "must be a positive number"),
        (
            {"prior_precision": {"hidden": jnp.ones(2), "last": 1.0}},
            ValueError,
            "leaf of shape \\(2,\\)",
        ),
        ({"method": "best"}, ValueError, "method='best' is unknown"),
        ({"curvature": "fish"}, ValueError, "curvature='fish' is unknown"),
        ({"method": "krylov"}, TypeError, "key is missing: method='krylov'"),
        ({"curvature": "fisher"}, TypeError, "key is missing: curvature='fisher'"),
        ({"method": "krylov", "num_steps": 0, "key": KEY}, ValueError, "num_steps=0"),
        ({"method": "subspace", "rank": 1000}, ValueError, "rank=1000 exceeds"),
    ],
)
def test_wrong_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message), no_type_checker():
        cases.fit("categorical", FEW, jnp.float64, **options)


def test_wrong_data_are_named():
    params, likelihood = cases.tree_of(cases.flat_params()), laplace.Categorical()
    x, y = cases.data("categorical", FEW, jnp.float64)

    def refused(error, message, params=params, x=x, y=y):
        with pytest.raises(error, match=message):
            laplace.fit(cases.apply, params, (x, y), likelihood=likelihood, method="exact")

    refused(ValueError, "data is empty", x=x[:0], y=y[:0])
    refused(ValueError, "one target per example", y=y[:-1])
    refused(laplace.TargetError, "labels must lie in 0..2", y=y + 1)
    refused(NotFiniteError, "NaN", x=x.at[0, 0].set(jnp.nan))
    refused(NotFiniteError, "NaN", params=jax.tree.map(lambda leaf: leaf * jnp.nan, params))


def test_a_last_layer_that_cannot_be_told_is_asked_for():
    def product(params, x):  # linear in either factor
        return x @ params["left"]["w"] @ params["right"]["w"]

    params = {"left": {"w": jnp.ones((3, 2))}, "right": {"w": jnp.ones((2, 3))}}
    x, y = cases.data("categorical", FEW, jnp.float64)
    with pytest.raises(ValueError, match=r"found 2 layers \(.*mask="):
        laplace.fit(product, params, (x, y), likelihood=laplace.Categorical(), method="last-layer")
