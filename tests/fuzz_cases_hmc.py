"""Bad input to diagnostics and Hamiltonian Monte Carlo."""

import jax.numpy as jnp
import numpy as np

import pnkrylov as pk
from fuzz_cases import (
    CHOICE,
    FRACTION,
    FUNCTION,
    KEY,
    OPERATOR,
    POSITIVE_COUNT,
    REQUIRED_COUNT,
    RUN_TIME,
    TOLERANCE,
    VECTOR,
    Bad,
    D,
    Target,
    always,
    array,
    matrix,
    random_key,
    rows,
    vector,
    with_names,
    without,
)
from fuzz_cases_core import inverted, solved
from fuzz_cases_preconditioners import positive
from pnkrylov import hmc, sample_diagnostics

NAN, INFINITY = float("nan"), float("inf")

DIAGNOSTICS = [
    Target(
        "pnkrylov.z_statistic",
        pk.z_statistic,
        lambda dtype: {"belief": solved(dtype), "x": vector(dtype)},
        {
            "x": VECTOR,
            "belief": [Bad("is None", always(None)), Bad("is an array", always(np.ones(D)))],
        },
    ),
    Target(
        "pnkrylov.s_statistic",
        pk.s_statistic,
        lambda dtype: {
            "A": matrix(dtype),
            "belief": solved(dtype),
            "x": vector(dtype),
            "key": random_key(),
        },
        {
            "A": OPERATOR,
            "x": VECTOR,
            "belief": [Bad("is None", always(None)), Bad("is an array", always(np.ones(D)))],
            "key": KEY,
            "num_probes": POSITIVE_COUNT,
        },
    ),
    Target(
        "pnkrylov.regime",
        pk.regime,
        lambda dtype: {"belief": inverted(dtype)},
        {
            "belief": [Bad("is None", always(None)), Bad("is an array", always(np.ones(D)))],
            "damping": [Bad("is a string", always("1"))],
        },
    ),
    Target(
        "pnkrylov.simulation_based_calibration",
        pk.simulation_based_calibration,
        lambda dtype: {"problems": [(solved(dtype), vector(dtype))] * 2, "key": random_key()},
        {
            "problems": [
                Bad("is empty", always([])),
                Bad("is None", always(None)),
                Bad(
                    "is a function without num_problems",
                    always(lambda key: None),
                    names=("num_problems",),
                ),
                Bad("holds no pairs", always([1, 2])),
                Bad(
                    "has a truth of another size",
                    lambda right: [(right[0][0], np.ones(3, np.float32))],
                    names=("truth",),
                ),
                Bad("has truth and belief exchanged", lambda right: [right[0][::-1]]),
            ],
            "key": KEY,
            "num_functionals": POSITIVE_COUNT,
            "num_coordinates": POSITIVE_COUNT,
            "levels": [
                Bad("is 95", always((95.0,))),
                Bad("has a zero", always((0.5, 0.0))),
                Bad("is a number", always(0.95)),
                Bad("has NaN", always((NAN,))),
            ],
        },
    ),
    Target(
        "pnkrylov.sample_diagnostics.check_distances",
        sample_diagnostics.check_distances,
        lambda dtype: {"distances": np.linspace(1, 10, 20), "dimension": 4},
        {
            "distances": [
                Bad("is one number", always(np.ones(1))),
                Bad("is a matrix", array(lambda a: a[None])),
                Bad("is negative", array(lambda a: -a)),
                Bad("is a string", always("distances")),
                Bad("is None", always(None)),
            ],
            "dimension": REQUIRED_COUNT,
            "level": FRACTION,
        },
    ),
    Target(
        "pnkrylov.sample_diagnostics.mahalanobis",
        sample_diagnostics.mahalanobis,
        lambda dtype: {"A": matrix(dtype), "samples": rows(dtype, 3), "key": random_key()},
        {
            "A": with_names(OPERATOR, "like"),
            "samples": with_names(
                [
                    Bad("is too short", array(lambda a: a[:, :-1])),
                    Bad("has three axes", array(lambda a: a[None])),
                    Bad("has integers", array(lambda a: a.astype(np.int32))),
                    Bad("is complex", array(lambda a: a.astype(np.complex64))),
                    Bad("is None", always(None)),
                ],
                "like",
                "a row of b",
                "right-hand side",
            ),
            "role": CHOICE,
            "rtol": TOLERANCE,
        },
    ),
    Target(
        "pnkrylov.sample_diagnostics.check_samples",
        sample_diagnostics.check_samples,
        lambda dtype: {"A": matrix(dtype), "samples": rows(dtype, 3), "key": random_key()},
        {
            "A": with_names(OPERATOR, "like"),
            "samples": with_names(
                [
                    Bad("is too short", array(lambda a: a[:, :-1])),
                    Bad("has three axes", array(lambda a: a[None])),
                    Bad("has integers", array(lambda a: a.astype(np.int32))),
                ],
                "like",
                "a row of b",
                "right-hand side",
            ),
            "role": CHOICE,
            "level": FRACTION,
        },
    ),
]

# Scalars of the theory of Hamiltonian Monte Carlo.
HMC_POSITIVE = [
    Bad("is 0", always(0.0)),
    Bad("is -1", always(-1.0)),
    Bad("is NaN", always(NAN)),
    Bad("is a string", always("1")),
    Bad("is complex", always(1j)),
    Bad("is None", always(None)),
]
HMC_FRACTION = [*FRACTION, Bad("is None", always(None)), Bad("is complex", always(0.5j))]


def hmc_scalars(function, right, fractions=()):
    return Target(
        f"pnkrylov.hmc.{function.__name__}",
        function,
        lambda dtype: dict(right),
        {name: HMC_FRACTION if name in fractions else HMC_POSITIVE for name in right},
    )


COVARIANCE = [
    Bad("is not square", array(lambda a: a[:, :-1])),
    Bad("is a vector", array(lambda a: a[0])),
    Bad("is None", always(None)),
    Bad("is a string", always("covariance")),
    Bad("has integers", array(lambda a: a.astype(np.int32))),
    Bad("is complex", array(lambda a: a.astype(np.complex64))),
]
DEFINITE = [
    Bad("is indefinite", array(lambda a: a - 30 * np.eye(D, dtype=a.dtype)), RUN_TIME),
    Bad("is zero", array(lambda a: 0 * a), RUN_TIME),
    Bad("has NaN", array(lambda a: a * NAN), RUN_TIME),
]

HMC = [
    hmc_scalars(
        hmc.expected_acceptance,
        {"step_size": 0.1, "condition_number": 10.0, "sigma_max": 1.0},
    ),
    hmc_scalars(
        hmc.step_size_for,
        {"acceptance": 0.9, "condition_number": 10.0, "sigma_max": 1.0},
        ("acceptance",),
    ),
    hmc_scalars(
        hmc.leapfrog_steps,
        {"acceptance": 0.9, "condition_number": 10.0, "integration_time": 1.0},
        ("acceptance",),
    ),
    hmc_scalars(
        hmc.condition_number_from_acceptance,
        {"step_size": 0.1, "acceptance": 0.9, "sigma_max": 1.0},
        ("acceptance",),
    ),
    hmc_scalars(
        hmc.optimal_burn_in,
        {"kappa0": 100.0, "dimension": 50.0, "final_samples": 1000.0, "efficiency": 1.0},
    ),
    hmc_scalars(hmc.preconditioned_condition_number, {"num_samples": 100.0, "dimension": 50.0}),
    hmc_scalars(hmc.reverse_kl_condition_number, {"num_draws": 100.0, "dimension": 50.0}),
    Target(
        "pnkrylov.hmc.diagonal_preconditioner",
        hmc.diagonal_preconditioner,
        lambda dtype: {"covariance": matrix(dtype)},
        {"covariance": [*COVARIANCE, *DEFINITE], "divergence": CHOICE},
    ),
    Target(
        "pnkrylov.hmc.reverse_kl_preconditioner",
        hmc.reverse_kl_preconditioner,
        lambda dtype: {"covariance": matrix(dtype), "noise": jnp.ones((9, D), dtype)},
        {
            "covariance": [*COVARIANCE, *DEFINITE],
            "noise": [
                Bad("has too few draws", array(lambda a: a[:D])),
                Bad("has another dimension", array(lambda a: a[:, :-1])),
                Bad("is a vector", array(lambda a: a[0])),
                Bad("is None", always(None)),
                Bad("has NaN", array(lambda a: a * NAN), RUN_TIME),
                Bad("is constant", array(lambda a: np.ones_like(a)), RUN_TIME),
            ],
        },
    ),
    Target(
        "pnkrylov.hmc.remaining_covariance",
        hmc.remaining_covariance,
        lambda dtype: {"covariance": matrix(dtype), "factor": matrix(dtype)},
        {
            "covariance": COVARIANCE,
            "factor": [
                Bad("is of another size", array(lambda a: a[:-1, :-1])),
                Bad("is too short", array(lambda a: a[0, :-1])),
                Bad("has three axes", array(lambda a: a[None])),
                Bad("is singular", array(lambda a: 0 * a), RUN_TIME),
                Bad("is a diagonal with a zero", array(lambda a: 0 * a[0]), RUN_TIME),
                Bad("has NaN", array(lambda a: a * NAN), RUN_TIME),
                Bad("is None", always(None)),
            ],
        },
    ),
    Target(
        "pnkrylov.hmc.covariance_root",
        lambda covariance: hmc.covariance_root(covariance),  # it dispatches on its position
        lambda dtype: {"covariance": jnp.asarray(matrix(dtype))},
        {
            "covariance": [
                *COVARIANCE,
                *[
                    Bad(b.what, lambda right, b=b: jnp.asarray(b.make(right)), b.errors)
                    for b in DEFINITE
                ],
            ]
        },
        hmc.covariance_root.__doc__,
    ),
    Target(
        "pnkrylov.hmc.whiten",
        hmc.whiten,
        lambda dtype: {"logdensity": lambda x: -jnp.sum(x**2), "belief": inverted(dtype)},
        {
            "logdensity": FUNCTION,
            "belief": [Bad("is None", always(None)), Bad("is an array", always(np.eye(D)))],
        },
    ),
    Target(
        "pnkrylov.hmc.condition_number",
        hmc.condition_number,
        lambda dtype: {"covariance": matrix(dtype)},
        {
            "covariance": [
                *with_names(without(COVARIANCE, "is None"), "A"),
                *DEFINITE,
                Bad("is missing", always(None), names=("precision",)),
            ],
            "precision": [Bad("is given with covariance", always(np.eye(D)))],
        },
    ),
    Target(
        "pnkrylov.hmc.condition_number (standard deviations)",
        hmc.condition_number,
        lambda dtype: {"standard_deviations": positive(dtype)},
        {
            "standard_deviations": [
                Bad("has a zero", array(lambda a: a - 1)),
                Bad("has NaN", array(lambda a: a * NAN)),
                Bad("is a string", always("one")),
                Bad("is empty", array(lambda a: a[:0])),
                Bad("is a matrix", array(lambda a: a[None])),
            ],
        },
    ),
    Target(
        "pnkrylov.hmc.condition_number (operator)",
        hmc.condition_number,
        lambda dtype: {"precision": lambda v: v, "like": vector(dtype), "key": random_key()},
        {
            "key": KEY,
            "like": [
                Bad("is missing", always(None)),
                Bad("has integers", array(lambda a: a.astype(np.int32))),
            ],
            "rtol": TOLERANCE,
            "max_steps": POSITIVE_COUNT,
            "num_probes": POSITIVE_COUNT,
        },
    ),
]

TARGETS = [*DIAGNOSTICS, *HMC]
