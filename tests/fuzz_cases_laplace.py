"""Bad input to curvatures and Laplace posteriors."""

import jax.numpy as jnp
import numpy as np
import optax

from fuzz_cases import (
    CHOICE,
    COUNT,
    FUNCTION,
    KEY,
    POSITIVE_COUNT,
    REQUIRED_COUNT,
    RUN_TIME,
    TOLERANCE,
    Bad,
    Target,
    always,
    array,
    constant,
    method,
    random_key,
    with_names,
    without,
)
from fuzz_cases_beliefs import sample
from fuzz_cases_core import FILE, TO_FILE, folder
from fuzz_cases_gp import points
from pnkrylov import laplace

NAN, INFINITY = float("nan"), float("inf")
VALUE = (laplace.TargetError, ValueError)


def model(params, x):
    return x @ params["w"] + params["b"][None, :]


@constant
def network(dtype):
    w = jnp.asarray(np.random.default_rng(5).standard_normal((2, 3)), dtype)
    x, y = points(dtype, 5, 6), jnp.asarray([0, 1, 2, 0, 1])
    return {
        "apply": model,
        "params": {"w": w, "b": jnp.zeros(3, dtype)},
        "data": (x, y),
        "likelihood": laplace.Categorical(),
    }


@constant
def posterior(dtype):
    return laplace.fit(**network(dtype), method="exact")


APPLY = [
    *FUNCTION,
    Bad("returns a vector", always(lambda params, x: x[:, 0]), names=("model",)),
    Bad("returns a pair", always(lambda params, x: (x, x))),
    Bad("returns None", always(lambda params, x: None)),
    Bad("returns integers", always(lambda params, x: jnp.ones((len(x), 3), jnp.int32))),
    Bad("returns one row too few", always(lambda params, x: model(params, x)[:-1])),
    Bad("takes one argument", always(lambda x: x), names=("positional argument",)),
]
PARAMS = [
    Bad("is None", always(None)),
    Bad("is empty", always({})),
    Bad("has no arrays", always({"w": "weights"})),
    Bad("has integers only", lambda right: {"w": jnp.ones((2, 3), jnp.int32)}),
]
DATA = with_names(
    [
        Bad("is None", always(None)),
        Bad("is one array", lambda right: right[0]),
        Bad("is a triple", lambda right: (*right, right[1])),
        Bad("is an empty list", always([])),
        Bad("has no example", lambda right: (right[0][:0], right[1][:0])),
        Bad("has too few targets", lambda right: (right[0], right[1][:-1])),
        Bad("is a string", always("data")),
        Bad("is a list of arrays", lambda right: [right[0]]),
    ],
    "x",
    "y",
)
LABELS = with_names(
    [
        Bad(
            "has a label that is too large",
            lambda right: (right[0], np.asarray(right[1]) + 1),
            VALUE,
        ),
        Bad("has a negative label", lambda right: (right[0], np.asarray(right[1]) - 1), VALUE),
        Bad("has labels of a floating dtype", lambda right: (right[0], np.ones(5))),
        Bad("has NaN in x", lambda right: (np.asarray(right[0]) * NAN, right[1]), RUN_TIME),
    ],
    "target",
    "targets",
    "outputs",
    "curvature",
)
LIKELIHOOD = [
    Bad("is None", always(None)),
    Bad("is a string", always("categorical")),
    Bad("is a class", always(laplace.Categorical)),
]
MASK = [
    Bad("has other containers", always([True])),
    Bad("is a string", always("w")),
    Bad("selects nothing", always({"w": False, "b": False}), names=("params",)),
    Bad("has a leaf of another shape", always({"w": np.ones((3, 3), bool), "b": True})),
    Bad("has a leaf that is no bool", always({"w": 1.5, "b": True})),
]
NETWORK = {
    "apply": APPLY,
    "params": with_names(PARAMS, "apply"),
    "data": [*DATA, *LABELS],
    "likelihood": LIKELIHOOD,
    "batch_size": POSITIVE_COUNT,
    "num_data": POSITIVE_COUNT,
    "mask": MASK,
}
PRIOR = [
    Bad("is 0", always(0.0)),
    Bad("is -1", always(-1.0)),
    Bad("is NaN", always(NAN)),
    Bad("is infinite", always(INFINITY)),
    Bad("is a string", always("1")),
    Bad("is complex", always(1j)),
    Bad("is None", always(None)),
    Bad("has other containers", always([1.0, 2.0, 3.0])),
    Bad("has a leaf of another shape", always({"w": np.ones(2, np.float32), "b": 1.0})),
]

CURVATURES = [
    Target(f"pnkrylov.laplace.{function.__name__}", function, network, NETWORK)
    for function in (laplace.ggn, laplace.hessian, laplace.empirical_fisher, laplace.gradient)
] + [
    Target(
        "pnkrylov.laplace.fully_linear",
        laplace.fully_linear,
        network,
        {
            name: bad
            for name, bad in NETWORK.items()
            if name in ("apply", "params", "likelihood", "mask")
        },
    ),
    Target(
        "pnkrylov.laplace.loss",
        laplace.loss,
        network,
        {name: bad for name, bad in NETWORK.items() if name != "mask"},
    ),
    Target(
        "pnkrylov.laplace.fisher",
        laplace.fisher,
        lambda dtype: {**network(dtype), "key": random_key()},
        {"key": KEY, "num_samples": POSITIVE_COUNT, "likelihood": LIKELIHOOD},
    ),
]

KINDS = [*CHOICE]

POSTERIORS = [
    Target(
        "pnkrylov.laplace.fit",
        laplace.fit,
        network,
        {
            **NETWORK,
            "prior_precision": PRIOR,
            "method": CHOICE,
            "curvature": CHOICE,
            "num_steps": POSITIVE_COUNT,
            "rank": POSITIVE_COUNT,
            "num_draws": POSITIVE_COUNT,
        },
    ),
    Target(
        "pnkrylov.laplace.fit (method='krylov')",
        laplace.fit,
        lambda dtype: {**network(dtype), "method": "krylov", "key": random_key()},
        {
            "key": KEY,
            "num_steps": [*POSITIVE_COUNT, Bad("is more than p", always(10))],
            "num_probes": POSITIVE_COUNT,
            "driver": CHOICE,
        },
    ),
    Target(
        "pnkrylov.laplace.fit (method='ciq')",
        laplace.fit,
        lambda dtype: {**network(dtype), "method": "ciq", "key": random_key()},
        {"key": KEY, "rtol": [*TOLERANCE, Bad("is 1", always(1.0))], "num_draws": POSITIVE_COUNT},
    ),
    Target(
        "pnkrylov.laplace.marglik_train",
        laplace.marglik_train,
        lambda dtype: {
            **network(dtype),
            "optimizer": optax.sgd(0.1),
            "num_epochs": 1,
            "batch_size": 5,
            "key": random_key(),
        },
        {
            "apply": APPLY,
            "data": without(DATA, "is an empty list", "is a list of arrays"),
            "likelihood": LIKELIHOOD,
            "optimizer": [Bad("is None", always(None)), Bad("is a string", always("sgd"))],
            "num_epochs": REQUIRED_COUNT,
            "batch_size": [*REQUIRED_COUNT, Bad("is more than n", always(6))],
            "key": KEY,
            "evidence_every": POSITIVE_COUNT,
            "burn_in": COUNT,
            "prior_precision": PRIOR[:6],
            "method": CHOICE,
        },
    ),
    Target(
        "pnkrylov.laplace.tune_by_evidence",
        laplace.tune_by_evidence,
        lambda dtype: {"posterior": posterior(dtype)},
        {
            "posterior": [Bad("is None", always(None)), Bad("is a belief", lambda right: 3.0)],
            "noise": [Bad("is for a Gaussian only", always(True))],
        },
    ),
    Target(
        "pnkrylov.laplace.tune_by_validation",
        laplace.tune_by_validation,
        lambda dtype: {"posterior": posterior(dtype), "data": network(dtype)["data"]},
        {
            "posterior": [Bad("is None", always(None))],
            "data": without(DATA, "is an empty list", "is a list of arrays"),
            "kind": KINDS,
            "num_samples": POSITIVE_COUNT,
        },
    ),
    sample(laplace.LaplacePosterior, "pnkrylov.laplace.LaplacePosterior", posterior),
    method(
        laplace.LaplacePosterior,
        "pnkrylov.laplace.LaplacePosterior.draws",
        posterior,
        lambda dtype: {"key": random_key(), "num_samples": 2},
        {"key": KEY, "num_samples": [*COUNT, Bad("is missing", always(None))]},
    ),
    method(
        laplace.LaplacePosterior,
        "pnkrylov.laplace.LaplacePosterior.predictive",
        posterior,
        lambda dtype: {"x": points(dtype, 3, 7)},
        {
            "x": [
                Bad("has too few columns", array(lambda a: a[:, :1]), names=("contracting",)),
                Bad("is empty", array(lambda a: a[:0])),
                Bad("is None", always(None)),
                Bad("is a number", always(1.0)),
            ],
            "kind": KINDS,
        },
    ),
    method(
        laplace.LaplacePosterior,
        "pnkrylov.laplace.LaplacePosterior.predictive (kind='mc')",
        posterior,
        lambda dtype: {"x": points(dtype, 3, 7), "kind": "mc", "key": random_key()},
        {"key": KEY, "num_samples": POSITIVE_COUNT},
    ),
    *[
        method(
            laplace.LaplacePosterior,
            f"pnkrylov.laplace.LaplacePosterior.{name}",
            posterior,
            lambda dtype: {"x": points(dtype, 3, 7)},
            {
                "x": [
                    Bad("is empty", array(lambda a: a[:0])),
                    Bad("is None", always(None)),
                    Bad("is a number", always(1.0)),
                ]
            },
        )
        for name in ("functional", "functional_joint")
    ],
    method(
        laplace.LaplacePosterior,
        "pnkrylov.laplace.LaplacePosterior.push",
        posterior,
        lambda dtype: {"rows": jnp.ones((2, 9), dtype)},
        {
            "rows": [
                Bad("is too short", array(lambda a: a[:, :-1])),
                Bad("is a vector", array(lambda a: a[0])),
                Bad("is None", always(None)),
                Bad("has integers", array(lambda a: a.astype(np.int32))),
            ]
        },
    ),
    method(
        laplace.LaplacePosterior,
        "pnkrylov.laplace.LaplacePosterior.refine",
        posterior,
        lambda dtype: {"num_steps": 1},
        {"num_steps": with_names(REQUIRED_COUNT, "method")},
    ),
    method(
        laplace.LaplacePosterior,
        "pnkrylov.laplace.LaplacePosterior.with_precision",
        posterior,
        lambda dtype: {"precision": 2.0},
        {"precision": PRIOR[:7]},
    ),
    method(
        laplace.LaplacePosterior,
        "pnkrylov.laplace.LaplacePosterior.with_prior_precision",
        posterior,
        lambda dtype: {"prior_precision": 2.0},
        {"prior_precision": PRIOR},
    ),
    method(
        laplace.LaplacePosterior,
        "pnkrylov.laplace.LaplacePosterior.with_noise_precision",
        posterior,
        lambda dtype: {"noise_precision": 2.0},
        {
            "noise_precision": [
                Bad("is for a Gaussian only", always(2.0), names=("noise precision",))
            ]
        },
    ),
    method(
        laplace.LaplacePosterior,
        "pnkrylov.laplace.LaplacePosterior.save",
        posterior,
        lambda dtype: {"path": folder() / "laplace.npz"},
        {"path": TO_FILE},
    ),
    Target(
        "pnkrylov.laplace.load",
        laplace.load,
        lambda dtype: {
            "path": None,
            **{name: network(dtype)[name] for name in ("apply", "params", "likelihood")},
        },
        {"path": FILE},
    ),
]

TARGETS = [*CURVATURES, *POSTERIORS]
