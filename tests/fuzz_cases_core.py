"""Bad input to the front doors, files and operators."""

import functools
import pathlib
import tempfile

import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse

import pnkrylov as pk
from fuzz_cases import (
    CHOICE,
    COUNT,
    KEY,
    OPERATOR,
    POSITIVE_COUNT,
    PRECONDITIONER,
    REQUIRED_COUNT,
    ROWS,
    SCALAR,
    SECONDS,
    STEPS,
    VECTOR,
    Bad,
    D,
    Target,
    always,
    array,
    constant,
    matrix,
    random_key,
    rows,
    stand_in,
    vector,
    with_names,
    without,
)


@stand_in
def solved(dtype):
    return pk.solve(matrix(dtype), vector(dtype), key=random_key(), num_steps=3, max_lookahead=2)


@stand_in
def inverted(dtype):
    return pk.inverse(
        matrix(dtype), key=random_key(), num_steps=3, lookahead=1, num_probes=2, probe_depth=2
    )


@stand_in
def solved_block(dtype):
    return pk.solve(matrix(dtype), rows(dtype, 2), key=random_key(), num_steps=2, max_lookahead=1)


@constant
def basis(dtype):
    return pk.lanczos(matrix(dtype), vector(dtype), 3)


@functools.cache
def folder():
    path = pathlib.Path(tempfile.mkdtemp()) / "files"
    path.mkdir()
    return path


@functools.cache
def file_of(kind):
    """A file that holds no belief of ours."""
    path = folder() / kind
    if kind == "text":
        path.write_text("no belief")
    elif kind == "foreign.npz":
        np.savez(path, a=np.zeros(2))
    elif kind == "pickle.npz":
        np.savez(path, header=np.array([{"format": "pnkrylov belief"}], dtype=object))
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut":
        solved(jnp.dtype("float32")).save(path)
        path.write_bytes(path.read_bytes()[:-200])
    return path


FILE = [
    Bad("is a text file", lambda _: file_of("text"), (ValueError,), ("belief",)),
    Bad("is empty", lambda _: file_of("empty"), (ValueError,), ("belief",)),
    Bad("is a foreign .npz", lambda _: file_of("foreign.npz"), (ValueError,), ("belief",)),
    Bad("holds pickled objects", lambda _: file_of("pickle.npz"), (ValueError,), ("belief",)),
    Bad("was cut short", lambda _: file_of("cut"), (ValueError,), ("damaged",)),
    Bad("does not exist", lambda _: folder() / "none", (OSError,), ("none'",)),
    Bad("is a folder", lambda _: folder(), (OSError,), ("directory",)),
]
TO_FILE = [
    Bad("is in no folder", lambda _: folder() / "none" / "b.npz", (OSError,), ("none/b.npz",)),
    Bad("is a folder", lambda _: folder(), (OSError,), ("directory",)),
]


def problem(dtype):
    return {"A": matrix(dtype), "v": vector(dtype), "key": random_key(), "num_steps": 3}


RUN = {"driver": CHOICE, "max_seconds": SECONDS, "checkpoint_seconds": SECONDS}
# A right-hand side with two axes means several of them.
# A dictionary of the right size is a right-hand side like any other.
RHS = with_names(without(VECTOR, "is a column", "is a dictionary"), "like", "right-hand side")

LIKE = with_names(without(VECTOR, "is a column", "is a dictionary"), "right-hand side")

FRONT_DOORS = [
    Target(
        "pnkrylov.solve",
        pk.solve,
        problem,
        {
            "A": with_names(OPERATOR, "like"),
            "v": RHS,
            "key": KEY,
            "num_steps": STEPS,
            "budget": COUNT,
            "max_lookahead": COUNT,
            "num_probes": COUNT,
            "scale": CHOICE[:1] + SCALAR,
            "lower_bound": without(SCALAR, "is None"),
            "shift": SCALAR,
            "preconditioner": PRECONDITIONER,
            **RUN,
        },
    ),
    Target(
        "pnkrylov.solve",
        pk.solve,
        lambda dtype: {**problem(dtype), "start": vector(dtype), "scale": "prior", "num_probes": 1},
        {
            "start": VECTOR,
            "scale": [Bad("needs a run that starts at v", always("lookahead"))],
            "num_probes": [Bad("is 0 with a start of its own", always(0))],
            "probe_depth": POSITIVE_COUNT,
        },
    ),
    Target(
        "pnkrylov.inverse",
        pk.inverse,
        lambda dtype: {
            "A": matrix(dtype),
            "key": random_key(),
            "num_steps": 3,
            "like": vector(dtype),
        },
        {
            "A": OPERATOR,
            "key": KEY,
            "like": LIKE,
            "num_steps": STEPS,
            "budget": COUNT,
            "lookahead": POSITIVE_COUNT,
            "num_probes": POSITIVE_COUNT,
            "probe_depth": POSITIVE_COUNT,
            "layout": CHOICE,
            "shift": SCALAR,
            "preconditioner": PRECONDITIONER,
            **RUN,
        },
    ),
    Target(
        "pnkrylov.block.solve_block",
        pk.block.solve_block,
        lambda dtype: {
            "A": matrix(dtype),
            "V": rows(dtype, 2),
            "key": random_key(),
            "num_steps": 2,
        },
        {
            "A": OPERATOR,
            "V": with_names(ROWS, "right-hand side"),
            "key": KEY,
            "num_steps": STEPS,
            "budget": COUNT,
            "max_lookahead": COUNT,
            "lower_bound": without(SCALAR, "is None"),
            "shift": SCALAR,
            **RUN,
        },
    ),
    Target(
        "pnkrylov.block.inverse_block",
        pk.block.inverse_block,
        lambda dtype: {
            "A": matrix(dtype),
            "block_size": 2,
            "key": random_key(),
            "num_steps": 2,
            "like": vector(dtype),
        },
        {
            "A": OPERATOR,
            "block_size": [*REQUIRED_COUNT, Bad("is more than d", always(D + 1))],
            "key": KEY,
            "like": LIKE,
            "num_steps": STEPS,
            "budget": COUNT,
            "lookahead": POSITIVE_COUNT,
            "num_probes": POSITIVE_COUNT,
            "probe_depth": POSITIVE_COUNT,
            "layout": CHOICE,
            "shift": SCALAR,
            **RUN,
        },
    ),
    Target(
        "pnkrylov.block.block_lanczos",
        pk.block.block_lanczos,
        lambda dtype: {"A": matrix(dtype), "starts": rows(dtype, 2), "num_steps": 2},
        {"A": OPERATOR, "starts": ROWS, "num_steps": STEPS, **RUN},
    ),
    Target(
        "pnkrylov.lanczos",
        pk.lanczos,
        lambda dtype: {"A": matrix(dtype), "start": vector(dtype), "num_steps": 3},
        {
            "A": with_names(OPERATOR, "like"),
            "start": RHS,
            "num_steps": STEPS,
            **RUN,
        },
    ),
    Target(
        "pnkrylov.continue_run",
        pk.continue_run,
        lambda dtype: {"basis": basis(dtype), "A": matrix(dtype), "num_steps": 1},
        {
            "basis": [
                Bad("is None", always(None)),
                Bad("is an array", array(lambda a: a)),
            ],
            "A": [
                *OPERATOR,
                Bad("is of another size", array(lambda a: a[:4, :4])),
            ],
            "num_steps": [*COUNT, Bad("is more than is left", always(D))],
            **RUN,
        },
    ),
    Target(
        "pnkrylov.as_operator",
        pk.as_operator,
        lambda dtype: {"A": matrix(dtype), "like": vector(dtype)},
        {
            "A": [
                *OPERATOR,
                Bad("is a number", always(3.0)),
                Bad("is sparse and not square", array(lambda a: scipy.sparse.csr_array(a[:, :-1]))),
                Bad(
                    "is sparse with integers",
                    array(lambda a: scipy.sparse.csr_array(a.astype(np.int64))),
                ),
                Bad(
                    "is a lineax operator that is not square",
                    array(lambda a: lx.MatrixLinearOperator(jnp.asarray(a[:, :-1]))),
                ),
                Bad(
                    "is a host operator that is not square",
                    array(lambda a: scipy.sparse.linalg.aslinearoperator(a[:, :-1])),
                ),
                Bad(
                    "is a host operator without a dtype",
                    always(scipy.sparse.linalg.LinearOperator((D, D), matvec=lambda v: v)),
                ),
            ],
            "like": LIKE,
        },
    ),
    Target(
        "pnkrylov.as_operator (callable)",
        pk.as_operator,
        lambda dtype: {"A": lambda v: v, "like": vector(dtype)},
        {
            "A": [
                Bad("returns too few entries", always(lambda v: v[:-1])),
                Bad("returns a column", always(lambda v: v[:, None])),
                Bad("returns a pair", always(lambda v: (v, v))),
                Bad("returns None", always(lambda v: None)),
                Bad("returns integers", always(lambda v: v.astype(jnp.int32))),
                Bad("returns complex numbers", always(lambda v: v.astype(jnp.complex64))),
                Bad("returns half precision", always(lambda v: v.astype(jnp.float16))),
                Bad("uses NumPy", always(lambda v: np.asarray(v))),
                Bad("branches on numbers", always(lambda v: v if v[0] > 0 else -v)),
            ],
            "like": [
                Bad("is an empty tuple", always(())),
                Bad("is a string", always("v")),
                Bad("has a leaf that is a string", lambda v: {"a": v, "b": "name"}),
                Bad("has an integer leaf", lambda v: {"a": v, "b": np.zeros(2, np.int32)}),
                Bad("has a complex leaf", lambda v: {"a": v, "b": np.zeros(2, np.complex64)}),
                Bad("is a number", always(3)),
            ],
        },
    ),
    Target(
        "pnkrylov.load",
        pk.load,
        lambda dtype: {"path": None},
        {"path": FILE},
    ),
]

TARGETS = FRONT_DOORS
