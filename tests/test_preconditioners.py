"""Every family against dense eigendecompositions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles import exponential, with_spectrum
from pnkrylov.operators import as_operator
from pnkrylov.preconditioners import (
    BlockDiagonal,
    Dense,
    Diagonal,
    LowRank,
    PreconditionedOperator,
    ScaledIdentity,
    choose_observations,
    fully_linear,
    nystrom,
    one_observation,
    pivoted_cholesky,
    precondition,
    randomly_pivoted_cholesky,
    sub_sampled,
)

SIZE, RANK = 12, 4
KEY = jax.random.key(3)
EXPONENTS = (1.0, -1.0, 0.5, -0.5, 0.3)
RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((RANK, SIZE)) * np.array([8, 3, 1, 0.5])[:, None]
MANY_ROWS = RNG.standard_normal((SIZE + 2, SIZE))
MATRIX = exponential(SIZE, condition=1e3)[0]
JACOBIANS = RNG.standard_normal((2, 2, SIZE))
_HALF = RNG.standard_normal((2, 2, 2))
HESSIANS = _HALF @ _HALF.transpose(0, 2, 1)
SMALL, LARGE = with_spectrum(np.geomspace(1, 9, 5), 1), with_spectrum(np.geomspace(2, 30, 7), 2)
SCATTERED = np.random.default_rng(1).permutation(SIZE)


def softmax_hessian(probabilities):
    p = np.asarray(probabilities)
    return np.diag(p) - np.outer(p, p)  # singular, as that of every classifier


def naive_pivoted_cholesky(matrix, rank, damping):
    """The definition: eliminate the largest diagonal entry of what is left, `rank` times."""
    left = matrix - damping * np.eye(len(matrix))
    for _ in range(rank):
        i = np.argmax(np.diag(left))
        left = left - np.outer(left[i], left[i]) / left[i, i]
    return matrix - left + (np.trace(left) / len(matrix)) * np.eye(len(matrix))


def naive_nystrom(matrix, rank, damping):
    """`A O (O^T A O)^-1 O^T A` for the block that the same key draws, with the default alpha."""
    block = np.asarray(jax.random.normal(KEY, (len(matrix), rank), jnp.float64))
    shifted = matrix - damping * np.eye(len(matrix))
    image = shifted @ block
    approximation = image @ np.linalg.solve(block.T @ image, image.T)
    values, vectors = np.linalg.eigh(approximation)
    values[: len(matrix) - rank] = values[-rank]
    return (vectors * (values + damping)) @ vectors.T


def embedded(blocks, indices):
    dense = np.zeros((SIZE, SIZE))
    for block, index in zip(blocks, indices, strict=True):
        dense[np.ix_(index, index)] = block
    return dense


def families(dtype):
    """Name -> (preconditioner, dense twin in float64)."""

    def array(values):
        return jnp.asarray(values, dtype)

    eye = np.eye(SIZE)
    repeated = np.stack([ROWS[0], ROWS[0], 0 * ROWS[0], ROWS[1]])
    orthonormal = np.linalg.qr(ROWS.T)[0].T
    curvature = sum(J.T @ H @ J for J, H in zip(JACOBIANS, HESSIANS, strict=True))
    softmax = softmax_hessian([0.5, 0.2, 0.2, 0.1])
    low_rank_block = LowRank(array(ROWS[:, :7]), 0.7)
    dense_block = ROWS[:, :7].T @ ROWS[:, :7] + 0.7 * np.eye(7)
    contiguous = (np.arange(5), np.arange(5, 12))
    scattered = (SCATTERED[:5], SCATTERED[5:])
    parts = [jnp.asarray(part) for part in scattered]
    return {
        "scaled identity": (ScaledIdentity(SIZE, array(2.5)), 2.5 * eye),
        "diagonal": (Diagonal(array(np.geomspace(1, 50, 12))), np.diag(np.geomspace(1, 50, 12))),
        "low rank": (LowRank(array(ROWS), 0.4), ROWS.T @ ROWS + 0.4 * eye),
        "repeated and zero rows": (
            LowRank(array(repeated), 2.0),
            repeated.T @ repeated + 2 * eye,
        ),
        "repeated singular values": (
            LowRank(array(3 * orthonormal), 0.4),
            9 * orthonormal.T @ orthonormal + 0.4 * eye,
        ),
        "more rows than columns": (
            LowRank(array(MANY_ROWS), 0.1),
            MANY_ROWS.T @ MANY_ROWS + 0.1 * eye,
        ),
        "as many rows as columns": (
            LowRank(array(MANY_ROWS[:SIZE]), 0.1),
            MANY_ROWS[:SIZE].T @ MANY_ROWS[:SIZE] + 0.1 * eye,
        ),
        "fully linear": (
            fully_linear(array(ROWS[0]), 0.5),
            np.outer(ROWS[0], ROWS[0]) + 0.5 * eye,
        ),
        "sub-sampled": (
            sub_sampled(array(JACOBIANS), array(HESSIANS), num_data=10, alpha=0.5),
            5 * curvature + 0.5 * eye,
        ),
        "weighted sample": (
            sub_sampled(array(JACOBIANS), array(HESSIANS), weights=array([2.0, 5.0]), alpha=0.5),
            2 * JACOBIANS[0].T @ HESSIANS[0] @ JACOBIANS[0]
            + 5 * JACOBIANS[1].T @ HESSIANS[1] @ JACOBIANS[1]
            + 0.5 * eye,
        ),
        "one observation": (
            one_observation(array(ROWS), array(softmax), scale=7.0, alpha=0.3),
            7 * ROWS.T @ softmax @ ROWS + 0.3 * eye,
        ),
        "dense": (Dense(array(MATRIX)), MATRIX),
        "blocks": (
            BlockDiagonal([Dense(array(SMALL)), low_rank_block]),
            embedded([SMALL, dense_block], contiguous),
        ),
        "scattered blocks": (
            BlockDiagonal([Dense(array(SMALL)), Dense(array(LARGE))], parts),
            embedded([SMALL, LARGE], scattered),
        ),
        "pivoted Cholesky": (
            pivoted_cholesky(array(MATRIX), RANK, damping=0.05),
            naive_pivoted_cholesky(MATRIX, RANK, 0.05),
        ),
        "pivoted Cholesky to the end": (
            pivoted_cholesky(array(MATRIX), SIZE, damping=0.05),
            MATRIX,
        ),
        "Nystrom to the end": (nystrom(array(MATRIX), SIZE, KEY, damping=0.05), MATRIX),
    }


# Built once for each dtype: most of their cost is compilation.
FAMILIES = {}


def family(name, dtype):
    if dtype not in FAMILIES:
        FAMILIES[dtype] = families(dtype)
    return FAMILIES[dtype][name]


NAMES = (
    "scaled identity",
    "diagonal",
    "low rank",
    "repeated and zero rows",
    "repeated singular values",
    "more rows than columns",
    "as many rows as columns",
    "fully linear",
    "sub-sampled",
    "weighted sample",
    "one observation",
    "dense",
    "blocks",
    "scattered blocks",
    "pivoted Cholesky",
    "pivoted Cholesky to the end",
    "Nystrom to the end",
)


def dense_power(matrix, exponent):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * values**exponent) @ vectors.T


def assert_powers(preconditioner, dense, dtype):
    # Both sides know P up to eps ||P||, which its powers amplify by at most the condition number.
    tolerance = 100 * float(jnp.finfo(dtype).eps) * np.linalg.cond(dense)
    assert dtype == jnp.float32 or tolerance < 1e-10
    eye = jnp.eye(SIZE, dtype=dtype)
    for exponent in EXPONENTS:
        expected = dense_power(dense, exponent)
        actual = np.asarray(preconditioner.power_mv(eye, exponent), np.float64)
        assert np.linalg.norm(actual - expected, 2) <= tolerance * np.linalg.norm(expected, 2)
        single = np.asarray(preconditioner.power_mv(eye[1], exponent), np.float64)
        bound = 10 * float(jnp.finfo(dtype).eps) * np.linalg.norm(expected, 2)
        np.testing.assert_allclose(single, actual[1], rtol=0, atol=bound)
    assert abs(float(preconditioner.logdet()) - np.linalg.slogdet(dense)[1]) <= SIZE * tolerance
    inverse = np.diag(np.linalg.inv(dense))
    actual = np.asarray(preconditioner.inv_diagonal(), np.float64)
    np.testing.assert_allclose(actual, inverse, rtol=0, atol=tolerance * inverse.max())


@pytest.mark.parametrize("name", NAMES)
def test_powers_logdet_and_inverse_diagonal(name, dtype):
    preconditioner, dense = family(name, dtype)
    assert preconditioner.size == SIZE
    assert preconditioner.dtype == dtype
    assert_powers(preconditioner, dense, dtype)


@pytest.mark.parametrize("name", ["diagonal", "low rank", "dense", "scattered blocks"])
def test_named_powers(name, dtype):
    preconditioner, _ = family(name, dtype)
    vector = jnp.asarray(ROWS[1], dtype)
    for method, exponent in [
        ("mv", 1.0),
        ("inv_mv", -1.0),
        ("sqrt_mv", 0.5),
        ("inv_sqrt_mv", -0.5),
    ]:
        expected = preconditioner.power_mv(vector, exponent)
        assert np.array_equal(getattr(preconditioner, method)(vector), expected)


def test_nystrom_is_the_formula(dtype):
    if dtype == jnp.float32:
        pytest.skip("the oracle draws the block in float64")
    built = nystrom(jnp.asarray(MATRIX, dtype), RANK, KEY, damping=0.05)
    assert_powers(built, naive_nystrom(MATRIX, RANK, 0.05), dtype)
    plus = nystrom(jnp.asarray(MATRIX, dtype), RANK, KEY, damping=0.05, alpha=0.3)
    lifted = np.asarray(plus.mv(jnp.eye(SIZE, dtype=dtype)))
    block = np.asarray(jax.random.normal(KEY, (SIZE, RANK), dtype))
    image = (MATRIX - 0.05 * np.eye(SIZE)) @ block
    expected = image @ np.linalg.solve(block.T @ image, image.T) + 0.3 * np.eye(SIZE)
    assert np.linalg.norm(lifted - expected) <= 1e-10 * np.linalg.norm(expected)
    assert built.num_products == plus.num_products == RANK


def test_random_pivots_give_the_approximation_of_their_columns(dtype):
    damping = 0.05
    built = randomly_pivoted_cholesky(jnp.asarray(MATRIX, dtype), RANK, KEY, damping=damping)
    part = np.asarray((built.vectors.T * built.squares[None, :]) @ built.vectors, np.float64)
    shifted = MATRIX - damping * np.eye(SIZE)
    left = shifted - part
    pivots = np.argsort(np.diag(left))[:RANK]
    columns = shifted[:, pivots]
    expected = columns @ np.linalg.solve(shifted[np.ix_(pivots, pivots)], columns.T)
    tolerance = 1e4 * float(jnp.finfo(dtype).eps)
    assert np.linalg.norm(part - expected) <= tolerance * np.linalg.norm(expected)
    mean_left = np.trace(shifted - expected) / SIZE
    np.testing.assert_allclose(float(built.alpha), damping + mean_left, rtol=tolerance)


def test_random_pivots_are_drawn_in_proportion_to_the_diagonal():
    weights = np.array([1.0, 2.0, 4.0, 8.0])
    matrix = jnp.diag(jnp.asarray(weights))
    count = 2000

    def first_pivot(key):
        built = randomly_pivoted_cholesky(matrix, 1, key)
        return jnp.argmax(jnp.abs(built.vectors[0]))

    pivots = jax.vmap(first_pivot)(jax.random.split(KEY, count))
    observed = np.bincount(np.asarray(pivots), minlength=4)
    expected = count * weights / weights.sum()
    # Chi-squared with 3 degrees of freedom exceeds 25 with probability 1.5e-5.
    assert np.sum((observed - expected) ** 2 / expected) < 25


def test_products_are_counted(dtype):
    matrix = jnp.asarray(MATRIX, dtype)
    function = as_operator(lambda v: matrix @ v, like=matrix[0])
    assert pivoted_cholesky(matrix, 3).num_products == 0
    assert pivoted_cholesky(function, 3, diagonal=jnp.diagonal(matrix)).num_products == 3
    assert pivoted_cholesky(function, 3, num_probes=5, key=KEY).num_products == 8
    assert randomly_pivoted_cholesky(function, 3, KEY, num_probes=5).num_products == 8
    assert Diagonal.of(matrix).num_products == 0
    assert Diagonal.of(function, num_probes=5, floor=0.1, key=KEY).num_products == 5
    blocks = [Dense(matrix, num_products=2), Diagonal(jnp.diagonal(matrix), num_products=3)]
    assert BlockDiagonal(blocks).num_products == 5


def test_memory_is_what_the_docs_say(dtype):
    assert family("low rank", dtype)[0].num_floats == RANK * (SIZE + 1) + 1
    assert family("diagonal", dtype)[0].num_floats == SIZE
    assert family("dense", dtype)[0].num_floats == SIZE * (SIZE + 1)
    assert family("fully linear", dtype)[0].num_floats == SIZE + 2
    # The indices of scattered blocks are integers.
    assert family("scattered blocks", dtype)[0].num_floats == 5 * 6 + 7 * 8


def test_pivots_of_a_function_are_those_of_its_matrix(dtype):
    matrix = jnp.asarray(MATRIX, dtype)
    function = as_operator(lambda v: matrix @ v, like=matrix[0])
    by_rows = pivoted_cholesky(matrix, RANK, damping=0.05)
    by_products = pivoted_cholesky(function, RANK, damping=0.05, num_probes=SIZE)
    eye = jnp.eye(SIZE, dtype=dtype)
    difference = np.asarray(by_rows.mv(eye) - by_products.mv(eye))
    assert np.abs(difference).max() <= 1e3 * float(jnp.finfo(dtype).eps) * np.abs(MATRIX).max()


def test_observations_are_chosen_in_proportion_to_their_scores(dtype):
    scores, count, repeats = np.array([0.1, 0.2, 0.0, 5.0, 0.3, 0.6, 0.4]), 3, 2000
    # The fourth is certain; two are left for the other five, in proportion.
    expected = np.array([0.125, 0.25, 0, 1, 0.375, 0.75, 0.5])
    array = jnp.asarray(scores, dtype)
    draw = jax.jit(jax.vmap(lambda key: choose_observations(array, count, key)))
    indices, weights = draw(jax.random.split(KEY, repeats))
    indices = np.asarray(indices)
    assert np.all(np.diff(indices, axis=1) > 0)  # without replacement
    np.testing.assert_allclose(weights, 1 / expected[indices], rtol=1e-5)
    shares = np.bincount(indices.reshape(-1), minlength=7) / repeats
    deviation = np.sqrt(expected * (1 - expected) / repeats)
    assert np.all(np.abs(shares - expected) <= 5 * deviation)


def test_under_jit_and_vmap(dtype):
    rows, vector = jnp.asarray(ROWS, dtype), jnp.asarray(ROWS[2], dtype)

    def apply(rows, alpha):
        built = LowRank(rows, alpha)
        return built.inv_sqrt_mv(vector), built.logdet()

    alphas = jnp.asarray([0.4, 1.0], dtype)
    batched = jax.jit(jax.vmap(apply, in_axes=(None, 0)))(rows, alphas)
    expected = apply(rows, 0.4)
    tolerance = 1e3 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(batched[0][0], expected[0], rtol=0, atol=tolerance)
    np.testing.assert_allclose(batched[1][0], expected[1], rtol=tolerance)

    def build(matrix, key):
        greedy = pivoted_cholesky(matrix, RANK, damping=0.05)
        sketch = nystrom(matrix, RANK, key, damping=0.05)
        return greedy.inv_mv(vector), sketch.inv_mv(vector)

    matrix = jnp.asarray(MATRIX, dtype)
    condition_error = 1e5 * float(jnp.finfo(dtype).eps)
    for jitted, eager in zip(eqx.filter_jit(build)(matrix, KEY), build(matrix, KEY), strict=True):
        assert jnp.linalg.norm(jitted - eager) <= condition_error * jnp.linalg.norm(eager)


@given(
    exponents=st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
    singular_values=st.lists(st.sampled_from([0.0, 0.1, 1.0, 7.0]), min_size=RANK, max_size=RANK),
    alpha=st.floats(0.1, 10),
)
def test_powers_add_up(exponents, singular_values, alpha):
    dtype = jnp.zeros(()).dtype
    built = LowRank(jnp.asarray(np.array(singular_values)[:, None] * ROWS, dtype), alpha)
    vector = jnp.asarray(ROWS[3], dtype)
    first, second = exponents
    twice = built.power_mv(built.power_mv(vector, first), second)
    once = built.power_mv(vector, first + second)
    condition = float((alpha + built.squares.max()) / alpha)
    scale = max(float(jnp.linalg.norm(once)), float(jnp.linalg.norm(vector)) * condition)
    assert float(jnp.linalg.norm(twice - once)) <= 100 * float(jnp.finfo(dtype).eps) * scale


def test_preconditioned_operator(dtype):
    preconditioner, dense = family("low rank", dtype)
    operator = as_operator(jnp.asarray(MATRIX, dtype))
    inner = precondition(operator, preconditioner)
    assert isinstance(inner, PreconditionedOperator)
    root = dense_power(dense, -0.5)
    expected = root @ MATRIX @ root
    tolerance = 1e4 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
    np.testing.assert_allclose(inner.as_matrix(), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(
        inner.mv(jnp.eye(SIZE, dtype=dtype)[2]), expected[2], rtol=0, atol=tolerance
    )
    assert precondition(operator, None) is operator
