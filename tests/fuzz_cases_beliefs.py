"""Bad input to the methods of beliefs."""

import numpy as np

import pnkrylov as pk
from fuzz_cases import (
    COUNT,
    FRACTION,
    KEY,
    OPERATOR,
    REQUIRED_COUNT,
    SCALAR,
    VECTOR,
    Bad,
    D,
    always,
    array,
    matrix,
    method,
    random_key,
    rows,
    stand_in,
    vector,
)
from fuzz_cases_core import TO_FILE, folder, inverted, solved, solved_block


def sample(owner, name, build):
    return method(
        owner,
        f"{name}.sample",
        build,
        lambda dtype: {"key": random_key(), "num_samples": 2},
        {"key": KEY, "num_samples": [*COUNT, Bad("is missing", always(None))]},
    )


def interval(owner, name, build):
    return method(owner, f"{name}.interval", build, lambda dtype: {}, {"level": FRACTION})


MAP = [
    Bad("has too few columns", array(lambda a: a[:, :-1])),
    Bad("has three axes", array(lambda a: a[None])),
    Bad("is too short", array(lambda a: a[0, :-1])),
    Bad("is a number", always(2.0)),
    Bad("is None", always(None)),
    Bad("is a string", always("B")),
    Bad("is complex", array(lambda a: a.astype(np.complex64))),
]


def push(owner, name, build):
    return method(owner, f"{name}.push", build, lambda dtype: {"B": rows(dtype, 2)}, {"B": MAP})


def shift(owner, name, build):
    return method(owner, f"{name}.shift", build, lambda dtype: {"alpha": 0.1}, {"alpha": SCALAR})


def save(owner, name, build):
    return method(
        owner, f"{name}.save", build, lambda dtype: {"path": folder() / "b.npz"}, {"path": TO_FILE}
    )


def refine(owner, name, build, **others):
    return method(
        owner,
        f"{name}.refine",
        build,
        lambda dtype: {"A": matrix(dtype), "num_steps": 1},
        {
            "A": [*OPERATOR, Bad("is of another size", array(lambda a: a[:4, :4]))],
            "num_steps": [*REQUIRED_COUNT, Bad("is more than d", always(D + 1))],
            **others,
        },
    )


@stand_in
def inverted_by_blocks(dtype):
    return pk.inverse(
        matrix(dtype), block_size=2, key=random_key(), num_steps=2, lookahead=1, num_probes=1
    )


def dense(dtype):
    return solved(dtype).push(rows(dtype, 2))


def estimate(dtype):
    return inverted(dtype).trace()


def matrix_gaussian(dtype):
    return solved_block(dtype).push(rows(dtype, 2))


def covariance(dtype):
    return solved(dtype).covariance


OWNERS = [
    (pk.SolveBelief, "pnkrylov.SolveBelief", solved),
    (pk.InverseBelief, "pnkrylov.InverseBelief", inverted),
]
SOLVE, INVERSE = OWNERS
BLOCK = (pk.BlockSolveBelief, "pnkrylov.BlockSolveBelief", solved_block)
BLOCK_INVERSE = (pk.BlockInverseBelief, "pnkrylov.BlockInverseBelief", inverted_by_blocks)
DENSE = (pk.DenseGaussian, "pnkrylov.DenseGaussian", dense)
MATRIX_GAUSSIAN = (pk.block.MatrixGaussian, "pnkrylov.block.MatrixGaussian", matrix_gaussian)

BELIEFS = [
    *[make(*owner) for owner in OWNERS for make in (sample, interval, push, shift, save)],
    refine(*SOLVE, max_lookahead=COUNT),
    refine(*INVERSE),
    *[
        method(
            pk.InverseBelief,
            f"pnkrylov.InverseBelief.{name}",
            inverted,
            lambda dtype: {"v": vector(dtype)},
            {"v": VECTOR},
        )
        for name in ("matvec", "solve")
    ],
    *[make(*BLOCK) for make in (sample, interval, push, shift, save)],
    refine(*BLOCK, max_lookahead=COUNT),
    *[make(*BLOCK_INVERSE) for make in (shift, save)],
    refine(*BLOCK_INVERSE),
    sample(*DENSE),
    interval(*DENSE),
    interval(pk.Estimate, "pnkrylov.Estimate", estimate),
    sample(*MATRIX_GAUSSIAN),
    interval(*MATRIX_GAUSSIAN),
    sample(pk.KrylovCovariance, "pnkrylov.KrylovCovariance", covariance),
]

TARGETS = BELIEFS
