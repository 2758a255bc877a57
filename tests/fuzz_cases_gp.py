"""Bad input to Gaussian processes."""

import jax.numpy as jnp
import numpy as np

from fuzz_cases import (
    CHOICE,
    COUNT,
    KEY,
    POSITIVE_COUNT,
    PRECONDITIONER,
    REQUIRED_COUNT,
    RUN_TIME,
    TOLERANCE,
    Bad,
    D,
    Target,
    always,
    array,
    constant,
    method,
    random_key,
    stand_in,
    vector,
    with_names,
    without,
)
from fuzz_cases_core import FILE, TO_FILE, folder
from pnkrylov import gp
from pnkrylov.gp import Matern32

NAN, INFINITY = float("nan"), float("inf")


@constant
def points(dtype, count=D, seed=3):
    return jnp.asarray(np.random.default_rng(seed).uniform(size=(count, 2)), dtype)


def kernel(dtype):
    return Matern32(jnp.asarray(0.5, dtype), jnp.asarray(1.0, dtype))


def data(dtype):
    return {
        "kernel": kernel(dtype),
        "X": points(dtype),
        "y": vector(dtype),
        "noise": 0.1,
        "key": random_key(),
    }


@stand_in
def conditioned(dtype):
    return gp.condition(
        **data(dtype), num_steps=2, lookahead=1, num_probes=1, probe_depth=2, num_calibration=2
    )


INPUTS = [
    Bad("has three axes", array(lambda a: a[None])),
    Bad("has integers", array(lambda a: a.astype(np.int32))),
    Bad("is complex", array(lambda a: a.astype(np.complex64))),
    Bad("is boolean", array(lambda a: a > 0)),
    Bad("is empty", array(lambda a: a[:0])),
    Bad("has NaN", array(lambda a: a * NAN), RUN_TIME),
    Bad("has infinity", array(lambda a: a * INFINITY), RUN_TIME),
    Bad("is None", always(None)),
    Bad("is a list", array(lambda a: a.tolist())),
]
POINTS = [
    Bad("has too few columns", array(lambda a: a[:, :1])),
    Bad("has one axis", array(lambda a: a[:, 0])),
    Bad("has three axes", array(lambda a: a[None])),
    Bad("has integers", array(lambda a: a.astype(np.int32))),
    Bad("is complex", array(lambda a: a.astype(np.complex64))),
    Bad("is None", always(None)),
    Bad("is a string", always("Xs")),
]
TARGET_VALUES = [
    Bad("is too short", array(lambda a: a[:-1])),
    Bad("has three axes", array(lambda a: a[:, None, None])),
    Bad("has integers", array(lambda a: a.astype(np.int32))),
    Bad("is complex", array(lambda a: a.astype(np.complex64))),
    Bad("is half precision", array(lambda a: a.astype(np.float16))),
    Bad("has NaN", array(lambda a: np.where(np.arange(a.size) == 1, NAN, a)), RUN_TIME),
    Bad("has infinity", array(lambda a: np.where(np.arange(a.size) == 1, INFINITY, a)), RUN_TIME),
    Bad("is None", always(None)),
]
NOISE = [
    Bad("is -1", always(-1.0), RUN_TIME),
    Bad("is NaN", always(NAN), RUN_TIME),
    Bad("is infinite", always(INFINITY), RUN_TIME),
    Bad("is a string", always("0.1")),
    Bad("is complex", always(0.1j)),
    Bad("is None", always(None)),
    Bad("is too short", always(np.ones(D - 1, np.float32))),
    Bad("is a matrix", always(np.eye(D, dtype=np.float32))),
]
HYPERPARAMETER = [
    Bad("is 0", always(0.0)),
    Bad("is -1", always(-1.0)),
    Bad("is NaN", always(NAN)),
    Bad("is infinite", always(INFINITY)),
    Bad("is a string", always("1")),
    Bad("is complex", always(1j)),
    Bad("is None", always(None)),
]
NOT_A_KERNEL = [
    Bad("is None", always(None)),
    Bad("is a number", always(1.0)),
    Bad("is a class", always(Matern32)),
]

KERNELS = [
    *[
        Target(
            f"pnkrylov.gp.{kind.__name__}",
            kind,
            lambda dtype: {},
            {"lengthscale": HYPERPARAMETER, "variance": HYPERPARAMETER},
        )
        for kind in (gp.RBF, gp.Matern12, gp.Matern32, gp.Matern52)
    ],
    Target(
        "pnkrylov.gp.RationalQuadratic",
        gp.RationalQuadratic,
        lambda dtype: {},
        {name: HYPERPARAMETER for name in ("lengthscale", "variance", "mixture")},
    ),
    Target(
        "pnkrylov.gp.kernel_operator",
        gp.kernel_operator,
        lambda dtype: {"kernel": kernel(dtype), "X": points(dtype)},
        {
            "kernel": [
                *NOT_A_KERNEL,
                Bad("returns a vector", always(lambda x, y: x)),
                Bad("returns integers", always(lambda x, y: 1)),
                Bad("takes one point", always(lambda x: 1.0), names=("positional argument",)),
            ],
            "X": INPUTS,
            "block_rows": POSITIVE_COUNT,
        },
    ),
]

PROCESSES = [
    Target(
        "pnkrylov.gp.condition",
        gp.condition,
        data,
        {
            "kernel": NOT_A_KERNEL,
            "X": with_names([*INPUTS, Bad("has too few rows", array(lambda a: a[:-1]))], "inputs"),
            "y": TARGET_VALUES,
            "noise": [
                *NOISE,
                Bad("has a zero", always(np.zeros(D, np.float32)), RUN_TIME),
            ],
            "key": KEY,
            "mean": [
                Bad("is too short", always(np.ones(D - 1, np.float32))),
                Bad("is NaN", always(NAN), RUN_TIME),
                Bad("is a string", always("zero")),
                Bad("is complex", always(1j)),
                Bad("is a function that returns a vector", always(lambda x: x)),
            ],
            "num_steps": [*POSITIVE_COUNT, Bad("is more than n", always(D + 1))],
            "lookahead": POSITIVE_COUNT,
            "start": CHOICE,
            "num_probes": POSITIVE_COUNT,
            "probe_depth": POSITIVE_COUNT,
            "num_calibration": POSITIVE_COUNT,
            "preconditioner": PRECONDITIONER,
            "block_rows": POSITIVE_COUNT,
            "driver": CHOICE,
        },
    ),
    Target(
        "pnkrylov.gp.fit",
        gp.fit,
        lambda dtype: {**data(dtype), "num_iterations": 1},
        {
            "kernel": [
                *NOT_A_KERNEL,
                Bad("has no parameters", always(lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2)))),
            ],
            "X": with_names(INPUTS, "inputs"),
            "y": TARGET_VALUES,
            "noise": NOISE,
            "key": KEY,
            "num_iterations": REQUIRED_COUNT,
            "preconditioner_rank": COUNT,
            "optimizer": [Bad("is a string", always("adam")), Bad("is a number", always(0.1))],
        },
    ),
    method(
        gp.GPBelief,
        "pnkrylov.gp.GPBelief.predict",
        conditioned,
        lambda dtype: {"Xs": points(dtype, 3, 4)},
        {
            "Xs": POINTS,
            "mean": [
                Bad("is too short", always(np.ones(2, np.float32))),
                Bad("is a string", always("mean")),
            ],
        },
    ),
    method(
        gp.GPBelief,
        "pnkrylov.gp.GPBelief.covariance",
        conditioned,
        lambda dtype: {"Xs": points(dtype, 3, 4)},
        {"Xs": POINTS},
    ),
    method(
        gp.GPBelief,
        "pnkrylov.gp.GPBelief.sample",
        conditioned,
        lambda dtype: {"key": random_key(), "Xs": points(dtype, 3, 4), "num_samples": 2},
        {
            "key": KEY,
            "Xs": POINTS,
            "num_samples": [*COUNT, Bad("is missing", always(None))],
            "rtol": [*TOLERANCE, Bad("is 1", always(1.0))],
        },
    ),
    method(
        gp.GPBelief,
        "pnkrylov.gp.GPBelief.refine",
        conditioned,
        lambda dtype: {"num_steps": 1, "key": random_key()},
        {"num_steps": [*REQUIRED_COUNT, Bad("is more than n", always(D + 1))]},
    ),
    method(
        gp.GPBelief,
        "pnkrylov.gp.GPBelief.with_noise",
        conditioned,
        lambda dtype: {"noise": 0.2},
        {"noise": without(NOISE, "is a matrix")},
    ),
    Target(
        "pnkrylov.gp.save",
        gp.save,
        lambda dtype: {"belief": conditioned(dtype), "path": folder() / "gp.npz"},
        {
            "belief": [Bad("is None", always(None)), Bad("is another belief", always(3.0))],
            "path": TO_FILE,
        },
    ),
    Target(
        "pnkrylov.gp.load",
        gp.load,
        lambda dtype: {"path": None, "kernel": kernel(dtype)},
        {"path": FILE},
    ),
]

TARGETS = [*KERNELS, *PROCESSES]
