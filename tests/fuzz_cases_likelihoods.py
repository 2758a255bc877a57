"""Bad input to likelihoods, metrics and plots."""

import jax.numpy as jnp
import numpy as np

from fuzz_cases import (
    FRACTION,
    FUNCTION,
    RUN_TIME,
    Bad,
    Target,
    always,
    array,
    method,
    vector,
    with_names,
)
from fuzz_cases_core import inverted, solved
from fuzz_cases_gp import HYPERPARAMETER
from pnkrylov import gp, laplace, plotting
from pnkrylov.laplace import metrics

NAN, INFINITY = float("nan"), float("inf")
VALUE = (laplace.TargetError, ValueError)

OUTPUTS = [
    Bad("is a vector", array(lambda a: a[:, 0])),
    Bad("is empty", array(lambda a: a[:0])),
    Bad("has three axes", array(lambda a: a[None])),
    Bad("has NaN", lambda right: np.asarray(right) * NAN, RUN_TIME),
]
COLUMNS = [
    Bad("is too short", array(lambda a: a[:-1])),
    Bad("has three axes", array(lambda a: a[..., None, None])),
    Bad("is complex", array(lambda a: a.astype(np.complex64))),
    Bad("is a string", always("targets")),
    Bad("is None", always(None)),
]


def likelihood(instance, targets, bad, columns=3):
    """`check`, which every front door calls with the first batch."""
    name = f"pnkrylov.laplace.{type(instance).__name__}.check"
    return method(
        type(instance),
        name,
        lambda dtype: instance,
        lambda dtype: {"outputs": jnp.ones((5, columns), dtype), "targets": targets(dtype)},
        {"outputs": OUTPUTS, "targets": with_names([*COLUMNS, *bad], "target")},
    )


LIKELIHOODS = [
    likelihood(
        laplace.Categorical(),
        lambda dtype: jnp.asarray([0, 1, 2, 0, 1]),
        [
            Bad("has a label that is too large", always(np.array([0, 1, 2, 3, 0])), VALUE),
            Bad("has a negative label", always(np.array([0, 1, 2, -1, 0])), VALUE),
            Bad("has a floating dtype", always(np.ones(5))),
            Bad("is one-hot", always(np.eye(5, 3, dtype=np.int32))),
        ],
    ),
    likelihood(
        laplace.Bernoulli(),
        lambda dtype: jnp.ones((5, 3), dtype),
        [
            Bad("is 2", always(np.full((5, 3), 2.0)), VALUE),
            Bad("is negative", always(np.full((5, 3), -0.5)), VALUE),
            Bad("has NaN", always(np.full((5, 3), NAN)), RUN_TIME),
        ],
    ),
    likelihood(
        laplace.Poisson(),
        lambda dtype: jnp.ones((5, 3), dtype),
        [
            Bad("is negative", always(np.full((5, 3), -1.0)), VALUE),
            Bad("is a fraction", always(np.full((5, 3), 0.5)), VALUE),
            Bad("has NaN", always(np.full((5, 3), NAN)), RUN_TIME),
        ],
    ),
    likelihood(
        laplace.Gaussian(),
        lambda dtype: jnp.ones((5, 3), dtype),
        [
            Bad("has NaN", always(np.full((5, 3), NAN)), RUN_TIME),
            Bad("has infinity", always(np.full((5, 3), INFINITY)), RUN_TIME),
        ],
    ),
    likelihood(
        laplace.HeteroscedasticGaussian(),
        lambda dtype: jnp.ones((5, 2), dtype),
        [Bad("has NaN", always(np.full((5, 2), NAN)), RUN_TIME)],
        columns=4,
    ),
    method(
        laplace.HeteroscedasticGaussian,
        "pnkrylov.laplace.HeteroscedasticGaussian.check",
        lambda dtype: laplace.HeteroscedasticGaussian(),
        lambda dtype: {"outputs": jnp.ones((5, 4), dtype), "targets": jnp.ones((5, 2), dtype)},
        {"outputs": [Bad("has an odd number of columns", array(lambda a: a[:, :3]))]},
    ),
    Target(
        "pnkrylov.laplace.Gaussian",
        laplace.Gaussian,
        lambda dtype: {},
        {
            "precision": [
                *HYPERPARAMETER,
                Bad("is a matrix", always(np.eye(2))),
                Bad("has a zero", always(np.array([1.0, 0.0]))),
            ]
        },
    ),
    Target(
        "pnkrylov.laplace.Custom",
        lambda log_density: laplace.Custom(log_density).check(jnp.ones((5, 3)), jnp.ones(5)),
        lambda dtype: {"log_density": lambda f, y: -jnp.sum((f - y) ** 2)},
        {
            "log_density": [
                *FUNCTION,
                Bad("returns a vector", always(lambda f, y: f)),
                Bad("returns None", always(lambda f, y: None)),
                Bad("returns a pair", always(lambda f, y: (f[0], f[1]))),
            ]
        },
        "ValueError TypeError NotPositiveDefiniteError",
    ),
    method(
        laplace.Custom,
        "pnkrylov.laplace.Custom.check_definite",
        lambda dtype: laplace.Custom(lambda f, y: jnp.sum(f**2)),
        lambda dtype: {"outputs": jnp.ones((5, 3), dtype), "targets": jnp.ones(5, dtype)},
        {"outputs": [Bad("has a Hessian that is negative", lambda right: right, RUN_TIME)]},
    ),
]

PROBABILITIES = [
    Bad("is a vector", array(lambda a: a[:, 0])),
    Bad("is empty", array(lambda a: a[:0])),
    Bad("is None", always(None)),
]
SCORES = [
    Target(
        f"pnkrylov.laplace.metrics.{function.__name__}",
        function,
        lambda dtype: {
            "probabilities": jnp.full((5, 3), 1 / 3, dtype),
            "labels": jnp.asarray([0, 1, 2, 0, 1]),
        },
        {
            "probabilities": PROBABILITIES,
            "labels": [
                Bad("is too short", array(lambda a: a[:-1])),
                Bad("is a matrix", array(lambda a: a[:, None])),
                Bad("is None", always(None)),
            ],
        },
    )
    for function in (metrics.negative_log_likelihood, metrics.brier_score, metrics.reliability)
]

# Pictures: what they are given is checked before matplotlib sees it.
PICTURES = [
    Target(
        "pnkrylov.plotting.contraction",
        plotting.contraction,
        lambda dtype: {"beliefs": [solved(dtype)], "functional": vector(dtype)},
        {
            "beliefs": [Bad("is empty", always([])), Bad("is None", always(None))],
            "functional": with_names(
                [
                    Bad("is too short", array(lambda a: a[:-1])),
                    Bad("is several", array(lambda a: np.stack([a, a]))),
                    Bad("is None", always(None)),
                ],
                "B",
            ),
            "labels": [Bad("is too short", always([]))],
            "level": FRACTION,
        },
    ),
    Target(
        "pnkrylov.plotting.spectrum",
        plotting.spectrum,
        lambda dtype: {"belief": inverted(dtype)},
        {"belief": [Bad("is None", always(None)), Bad("is a solve belief", lambda right: 3.0)]},
    ),
    Target(
        "pnkrylov.plotting.two_variances",
        plotting.two_variances,
        lambda dtype: {
            "x": np.arange(3.0),
            "prediction": gp.Prediction(*[jnp.ones(3, dtype)] * 5),
        },
        {
            "x": [
                Bad("is too short", array(lambda a: a[:-1])),
                Bad("is a matrix", array(lambda a: a[:, None])),
                Bad("is None", always(None)),
            ],
            "level": FRACTION,
        },
    ),
]

TARGETS = [*LIKELIHOODS, *SCORES, *PICTURES]
