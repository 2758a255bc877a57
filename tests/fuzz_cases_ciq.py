"""Bad input to square roots and traces."""

import jax.numpy as jnp
import numpy as np

from fuzz_cases import (
    CHOICE,
    COUNT,
    FRACTION,
    FUNCTION,
    KEY,
    NOT_A_NUMBER,
    OPERATOR,
    OPTIONAL_KEY,
    POSITIVE_COUNT,
    PRECONDITIONER,
    TOLERANCE,
    VECTOR,
    Bad,
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
from fuzz_cases_beliefs import sample
from pnkrylov import ciq, trace

NAN, INFINITY = float("nan"), float("inf")


def bounds(dtype):
    return ciq.SpectralBounds.known(1.0, 50.0, dtype)


SQUARE_ROOT = {
    "A": with_names(OPERATOR, "like"),
    "b": with_names(without(VECTOR, "is a column", "is a dictionary"), "like", "right-hand side"),
    "key": KEY,
    "rtol": [*TOLERANCE, Bad("is 1", always(1.0))],
    "method": CHOICE,
    "preconditioner": PRECONDITIONER,
    "bounds": [Bad("is a pair", always((1.0, 2.0)))],
    "num_points": POSITIVE_COUNT,
    "max_steps": POSITIVE_COUNT,
    "max_basis_bytes": COUNT,
}


def square_root_problem(dtype):
    return {"A": matrix(dtype), "b": vector(dtype), "key": random_key()}


@constant
def sampler(dtype):
    return ciq.CIQSampler(matrix(dtype), bounds=bounds(dtype))


PARAMETER = [
    Bad("is a string", always("1")),
    Bad("is complex", always(1j)),
    Bad("is None", always(None)),
]

CIQ = [
    Target("pnkrylov.ciq.inv_sqrt_matvec", ciq.inv_sqrt_matvec, square_root_problem, SQUARE_ROOT),
    Target(
        "pnkrylov.ciq.sqrt_matvec",
        ciq.sqrt_matvec,
        square_root_problem,
        {**SQUARE_ROOT, "no_such_option": [Bad("is unknown", always(1))]},
    ),
    Target(
        "pnkrylov.ciq.msminres",
        ciq.msminres,
        lambda dtype: {
            "A": matrix(dtype),
            "B": rows(dtype, 2),
            "shifts": jnp.ones(3, dtype),
            "weights": jnp.ones(3, dtype),
        },
        {
            "A": with_names(OPERATOR, "like"),
            "B": with_names(
                [
                    Bad("has rows that are too short", array(lambda a: a[:, :-1])),
                    Bad("is a vector", array(lambda a: a[0])),
                    Bad("has three axes", array(lambda a: a[None])),
                    Bad("has integers", array(lambda a: a.astype(np.int32))),
                    Bad("is complex", array(lambda a: a.astype(np.complex64))),
                    Bad("is None", always(None)),
                ],
                "like",
                "right-hand side",
            ),
            "shifts": [
                Bad("is a matrix", array(lambda a: a[None])),
                Bad("has integers", array(lambda a: a.astype(np.int32))),
                Bad("is None", always(None)),
            ],
            "weights": [
                Bad("is too short", array(lambda a: a[:-1])),
                Bad("is a matrix", array(lambda a: a[None])),
            ],
            "max_steps": POSITIVE_COUNT,
            "preconditioner": PRECONDITIONER,
        },
    ),
    Target(
        "pnkrylov.ciq.quadrature",
        ciq.quadrature,
        lambda dtype: {"lmin": 1.0, "lmax": 10.0},
        {
            "lmin": [
                Bad("is 0", always(0.0)),
                Bad("is -1", always(-1.0)),
                Bad("is NaN", always(NAN)),
                Bad("is above lmax", always(11.0)),
                Bad("is None", always(None)),
                Bad("is a string", always("1")),
                Bad("is complex", always(1j)),
                Bad("is a vector", always(np.ones(2))),
            ],
            "lmax": [
                Bad("is below lmin", always(0.5)),
                Bad("is NaN", always(NAN)),
                Bad("is infinite", always(INFINITY)),
                Bad("is None", always(None)),
                Bad("is a vector", always(np.ones(2))),
            ],
            "rtol": [*TOLERANCE, Bad("is 1", always(1.0))],
            "num_points": POSITIVE_COUNT,
        },
    ),
    Target(
        "pnkrylov.ciq.spectral_bounds",
        ciq.spectral_bounds,
        lambda dtype: {"A": matrix(dtype), "key": random_key()},
        {
            "A": OPERATOR,
            "key": KEY,
            "failure_probability": FRACTION,
            "max_steps": POSITIVE_COUNT,
        },
    ),
    Target(
        "pnkrylov.ciq.SpectralBounds.known",
        ciq.SpectralBounds.known,
        lambda dtype: {"lower": 1.0, "upper": 2.0},
        {
            "lower": with_names(
                [
                    Bad("is 0", always(0.0)),
                    Bad("is NaN", always(NAN)),
                    Bad("is above upper", always(3.0)),
                    Bad("is None", always(None)),
                    Bad("is a string", always("1")),
                ],
                "bounds",
            ),
            "upper": [
                Bad("is infinite", always(INFINITY)),
                Bad("is NaN", always(NAN)),
                Bad("is None", always(None)),
            ],
        },
    ),
    Target(
        "pnkrylov.ciq.CIQSampler",
        ciq.CIQSampler,
        lambda dtype: {"A": matrix(dtype), "mean": vector(dtype)},
        {
            "A": with_names(OPERATOR, "like"),
            "mean": with_names(
                without(VECTOR, "is a column", "is a dictionary"), "like", "right-hand side"
            ),
            "rtol": [*TOLERANCE, Bad("is 1", always(1.0))],
            "method": CHOICE,
            "role": CHOICE,
            "preconditioner": PRECONDITIONER,
            "max_steps": POSITIVE_COUNT,
            "key": OPTIONAL_KEY,
        },
    ),
    sample(ciq.CIQSampler, "pnkrylov.ciq.CIQSampler", sampler),
    Target("pnkrylov.ciq.ellipk", ciq.ellipk, lambda dtype: {}, {"m": PARAMETER}),
    Target("pnkrylov.ciq.ellipkm1", ciq.ellipkm1, lambda dtype: {}, {"p": PARAMETER}),
    Target(
        "pnkrylov.ciq.ellipj",
        ciq.ellipj,
        lambda dtype: {"u": 1.0, "m": 0.5},
        {"u": PARAMETER, "m": PARAMETER},
    ),
    Target(
        "pnkrylov.ciq.ellipjm1",
        ciq.ellipjm1,
        lambda dtype: {"u": 1.0, "p": 0.5},
        {"u": PARAMETER, "p": PARAMETER},
    ),
]

TRACE = {
    "A": OPERATOR,
    "key": KEY,
    "budget": [*COUNT, Bad("is too small", always(2))],
    "rtol": TOLERANCE,
    "method": CHOICE,
    "probes": CHOICE,
    "preconditioner": PRECONDITIONER,
    "driver": CHOICE,
}


def trace_problem(dtype):
    return {"A": matrix(dtype), "key": random_key()}


TRACES = [
    Target(
        "pnkrylov.trace.trace_inverse",
        trace.trace_inverse,
        trace_problem,
        {**TRACE, "lower_bound": NOT_A_NUMBER},
    ),
    Target(
        "pnkrylov.trace.logdet", trace.logdet, trace_problem, {**TRACE, "lower_bound": NOT_A_NUMBER}
    ),
    Target(
        "pnkrylov.trace.trace_function",
        trace.trace_function,
        lambda dtype: {**trace_problem(dtype), "f": jnp.sqrt},
        {
            **{name: bad for name, bad in TRACE.items() if name != "preconditioner"},
            "f": [
                *FUNCTION,
                Bad("returns a scalar", always(lambda x: jnp.sum(x))),
                Bad("returns a pair", always(lambda x: (x, x))),
                Bad("returns None", always(lambda x: None)),
                Bad("returns complex numbers", always(lambda x: x.astype(jnp.complex64))),
            ],
        },
    ),
    *[
        Target(
            f"pnkrylov.trace.{function.__name__} (method='slq')",
            function,
            lambda dtype: {**trace_problem(dtype), "method": "slq", "budget": 20},
            {"depth": POSITIVE_COUNT, "budget": COUNT, "rtol": [Bad("is given", always(0.1))]},
        )
        for function in (trace.trace_inverse, trace.logdet)
    ],
]

TARGETS = [*CIQ, *TRACES]
