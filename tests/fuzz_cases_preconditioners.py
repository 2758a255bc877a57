"""Bad input to preconditioners."""

import jax.numpy as jnp
import numpy as np

import pnkrylov as pk
from fuzz_cases import (
    KEY,
    MATRIX,
    NOT_A_NUMBER,
    OPERATOR,
    POSITIVE_COUNT,
    REQUIRED_COUNT,
    RUN_TIME,
    SCALAR,
    Bad,
    D,
    Target,
    always,
    array,
    constant,
    matrix,
    random_key,
    rows,
    vector,
    with_names,
    without,
)
from pnkrylov import preconditioners

NAN, INFINITY = float("nan"), float("inf")

SCORES = [
    Bad("has NaN", array(lambda a: np.where(np.arange(a.size) == 1, NAN, a)), RUN_TIME),
    Bad("has infinity", array(lambda a: np.where(np.arange(a.size) == 1, INFINITY, a)), RUN_TIME),
]
ENTRIES = [
    *SCORES,
    Bad("has a zero", array(lambda a: np.where(np.arange(a.size) == 1, 0, a)), RUN_TIME),
    Bad("has a negative entry", array(lambda a: np.where(np.arange(a.size) == 1, -1, a)), RUN_TIME),
    Bad("is a matrix", array(lambda a: a[None])),
    Bad("has dtype int32", array(lambda a: np.ones(D, np.int32))),
    Bad("is complex", array(lambda a: a.astype(np.complex64))),
    Bad("is None", always(None)),
    Bad("is a string", always("entries")),
]
POSITIVE = [
    *SCALAR,
    Bad("is 0", always(0.0), RUN_TIME),
    Bad("is -1", always(-1.0), RUN_TIME),
    Bad("is NaN", always(NAN), RUN_TIME),
    Bad("is infinite", always(INFINITY), RUN_TIME),
]
NOT_NEGATIVE = [bad for bad in POSITIVE if bad.what != "is 0"]
RANK = [*REQUIRED_COUNT, Bad("is more than d", always(D + 1))]


@constant
def positive(dtype):
    return jnp.asarray(np.arange(1, D + 1), dtype)


@constant
def low_rank(dtype):
    return preconditioners.LowRank(rows(dtype, 2), 1.0)


VECTORS = [
    Bad("is too short", array(lambda a: a[:-1])),
    Bad("has integers", array(lambda a: a.astype(np.int32))),
    Bad("is None", always(None)),
]

PRECONDITIONERS = [
    Target(
        "pnkrylov.preconditioners.Diagonal",
        preconditioners.Diagonal,
        lambda dtype: {"entries": positive(dtype)},
        {"entries": ENTRIES},
    ),
    Target(
        "pnkrylov.preconditioners.Diagonal.of",
        preconditioners.Diagonal.of,
        lambda dtype: {"A": matrix(dtype)},
        {"A": OPERATOR, "floor": without(NOT_NEGATIVE, "is None", "is -1")},
    ),
    Target(
        "pnkrylov.preconditioners.Diagonal.of (operator)",
        preconditioners.Diagonal.of,
        lambda dtype: {
            "A": lambda v: v,
            "like": vector(dtype),
            "key": random_key(),
            "num_probes": 2,
        },
        {"key": KEY, "num_probes": [*POSITIVE_COUNT, Bad("is 1", always(1))]},
    ),
    Target(
        "pnkrylov.preconditioners.operator_diagonal",
        preconditioners.operator_diagonal,
        lambda dtype: {
            "A": lambda v: v,
            "like": vector(dtype),
            "key": random_key(),
            "num_probes": 2,
        },
        {"key": KEY, "num_probes": [*POSITIVE_COUNT, Bad("is 1", always(1))]},
    ),
    Target(
        "pnkrylov.preconditioners.ScaledIdentity",
        preconditioners.ScaledIdentity,
        lambda dtype: {"size": D, "scale": 1.0},
        {"size": REQUIRED_COUNT, "scale": POSITIVE},
    ),
    Target(
        "pnkrylov.preconditioners.Dense",
        preconditioners.Dense,
        lambda dtype: {"matrix": matrix(dtype)},
        {
            "matrix": [
                *without(MATRIX, "is half precision"),
                Bad("is None", always(None)),
                Bad("has NaN", array(lambda a: a * np.where(a == a[0, 0], NAN, 1)), RUN_TIME),
                Bad("is not symmetric", array(lambda a: a + np.triu(np.ones_like(a))), RUN_TIME),
                Bad("is indefinite", array(lambda a: a - 30 * np.eye(D, dtype=a.dtype)), RUN_TIME),
                Bad("is zero", array(lambda a: 0 * a), RUN_TIME),
            ]
        },
    ),
    Target(
        "pnkrylov.preconditioners.LowRank",
        preconditioners.LowRank,
        lambda dtype: {"rows": rows(dtype, 2), "alpha": 1.0},
        {
            "rows": [
                Bad("is a vector", array(lambda a: a[0])),
                Bad("has three axes", array(lambda a: a[None])),
                Bad("has integers", array(lambda a: a.astype(np.int32))),
                Bad("is complex", array(lambda a: a.astype(np.complex64))),
                Bad("has NaN", array(lambda a: a * NAN), RUN_TIME),
                Bad("is None", always(None)),
                Bad("is empty", array(lambda a: a[:, :0])),
            ],
            "alpha": POSITIVE,
        },
    ),
    Target(
        "pnkrylov.preconditioners.BlockDiagonal",
        preconditioners.BlockDiagonal,
        lambda dtype: {
            "blocks": [preconditioners.ScaledIdentity(2), preconditioners.ScaledIdentity(3)]
        },
        {
            "blocks": [
                Bad("is empty", always([])),
                Bad("is None", always(None)),
                Bad("holds matrices", always([np.eye(2), np.eye(3)])),
                Bad("is one preconditioner", lambda right: right[0]),
                Bad(
                    "has two dtypes",
                    lambda right: [right[0], preconditioners.ScaledIdentity(3, dtype=jnp.float16)],
                ),
            ],
            "indices": [
                Bad("is too short", always([np.arange(2)])),
                Bad("has other lengths", always([np.arange(3), np.arange(3, 5)])),
                Bad("names an entry twice", always([np.array([0, 1]), np.array([1, 2, 3])])),
                Bad("is out of range", always([np.array([0, 1]), np.array([2, 3, 9])])),
                Bad("is negative", always([np.array([0, 1]), np.array([2, 3, -1])])),
            ],
        },
    ),
    *[
        Target(
            f"pnkrylov.preconditioners.{function.__name__}",
            function,
            lambda dtype: {"A": matrix(dtype), "rank": 2, "key": random_key()},
            {
                "A": OPERATOR,
                "rank": RANK,
                "key": KEY,
                "damping": NOT_NEGATIVE,
                "alpha": without(POSITIVE, "is None"),
            },
        )
        for function in (preconditioners.nystrom, preconditioners.randomly_pivoted_cholesky)
    ],
    Target(
        "pnkrylov.preconditioners.pivoted_cholesky",
        preconditioners.pivoted_cholesky,
        lambda dtype: {"A": matrix(dtype), "rank": 2},
        {
            "A": OPERATOR,
            "rank": RANK,
            "damping": NOT_NEGATIVE,
            "alpha": without(POSITIVE, "is None"),
            "diagonal": [
                Bad("is too short", always(np.ones(D - 1, np.float32))),
                Bad("is a string", always("diagonal")),
            ],
        },
    ),
    Target(
        "pnkrylov.preconditioners.fully_linear",
        preconditioners.fully_linear,
        lambda dtype: {"gradient": vector(dtype), "alpha": 1.0},
        {
            "gradient": [
                *SCORES,
                Bad("is a matrix", array(lambda a: a[None])),
                Bad("is a number", always(1.0)),
                Bad("is None", always(None)),
                Bad("has integers", array(lambda a: a.astype(np.int32))),
            ],
            "alpha": POSITIVE,
        },
    ),
    Target(
        "pnkrylov.preconditioners.one_observation",
        preconditioners.one_observation,
        lambda dtype: {
            "jacobian": rows(dtype, 2),
            "hessian": jnp.eye(2, dtype=dtype),
            "scale": 3.0,
            "alpha": 1.0,
        },
        {
            "jacobian": [
                Bad("is a vector", array(lambda a: a[0])),
                Bad("has NaN", array(lambda a: a * NAN), RUN_TIME, ("jacobians",)),
                Bad("is None", always(None)),
            ],
            "hessian": with_names(
                [
                    Bad("is of another size", array(lambda a: np.eye(3, dtype=a.dtype))),
                    Bad("is a vector", array(lambda a: a[0])),
                    Bad("is indefinite", array(lambda a: -a), RUN_TIME),
                    Bad("has NaN", array(lambda a: a * NAN), RUN_TIME),
                ],
                "hessians",
                "Hessian",
            ),
            "scale": POSITIVE,
            "alpha": POSITIVE,
        },
    ),
    Target(
        "pnkrylov.preconditioners.sub_sampled",
        preconditioners.sub_sampled,
        lambda dtype: {
            "jacobians": rows(dtype, 2)[:, None, :],
            "hessians": jnp.ones((2, 1, 1), dtype),
            "alpha": 1.0,
            "num_data": 10,
        },
        {
            "jacobians": [
                Bad("is a matrix", array(lambda a: a[:, 0])),
                Bad("has too few observations", array(lambda a: a[:1])),
                Bad("has NaN", array(lambda a: a * NAN), RUN_TIME),
            ],
            "hessians": with_names(
                [
                    Bad("is a matrix", array(lambda a: a[:, 0])),
                    Bad("is negative", array(lambda a: -a), RUN_TIME),
                    Bad("has NaN", array(lambda a: a * NAN), RUN_TIME),
                ],
                "Hessian",
            ),
            "alpha": POSITIVE,
            "num_data": [
                *NOT_A_NUMBER[:1],
                Bad("is 0", always(0)),
                Bad("is fewer than are given", always(1)),
                Bad("is 2.5", always(2.5)),
                Bad("is missing", always(None)),
            ],
            "weights": [
                Bad("is given with num_data", always(np.ones(2, np.float32))),
            ],
        },
    ),
    Target(
        "pnkrylov.preconditioners.choose_observations",
        preconditioners.choose_observations,
        lambda dtype: {"scores": positive(dtype), "count": 2, "key": random_key()},
        {
            "scores": [
                *SCORES,
                Bad("is negative", array(lambda a: -a), RUN_TIME),
                Bad("is zero but for one", array(lambda a: a * (a == 1)), RUN_TIME),
                Bad("is a matrix", array(lambda a: a[None])),
                Bad("is None", always(None)),
            ],
            "count": RANK,
            "key": KEY,
        },
    ),
    Target(
        "pnkrylov.preconditioners.check_preconditioner",
        preconditioners.check_preconditioner,
        lambda dtype: {"preconditioner": low_rank(dtype), "size": D, "dtype": np.dtype(dtype)},
        {
            "preconditioner": [
                Bad("is a matrix", always(np.eye(D))),
                Bad("is of another size", always(preconditioners.ScaledIdentity(3))),
                Bad(
                    "is of another dtype",
                    always(preconditioners.ScaledIdentity(D, dtype=jnp.float16)),
                ),
            ]
        },
    ),
    Target(
        "pnkrylov.preconditioners.precondition",
        preconditioners.precondition,
        lambda dtype: {
            "operator": pk.as_operator(matrix(dtype)),
            "preconditioner": low_rank(dtype),
        },
        {
            "preconditioner": [
                Bad("is a matrix", always(np.eye(D))),
                Bad("is of another size", always(preconditioners.ScaledIdentity(3))),
            ]
        },
    ),
]

TARGETS = PRECONDITIONERS
