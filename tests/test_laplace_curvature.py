"""Curvature operators against dense matrices from explicit Jacobians and jax.hessian."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import pnkrylov as pk
from curvature_cases import FAMILIES, INPUTS, PARAMS, SIZE, K, N, data_of, dense, network, params_in
from harness import count_compilations
from pnkrylov.errors import NotPositiveDefiniteError
from pnkrylov.laplace import curvature
from pnkrylov.laplace.likelihoods import Categorical, Gaussian

VECTORS = np.random.default_rng(1).standard_normal((3, SIZE))
FISHER = {"key": jax.random.key(3), "num_samples": 2000}
CATEGORICAL = FAMILIES["categorical"][0]


def close(actual, expected, dtype=None):
    """Relative to the largest entry: 1e-10 in float64, 1e-4 in float32."""
    dtype = jnp.asarray(actual).dtype if dtype is None else dtype
    tolerance = {"float32": 1e-4, "float64": 1e-10}[dtype.name]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)


def families(slow):
    """All families; those that differ least from another one are left to the slow tests."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in FAMILIES]


@pytest.fixture
def wide():
    """float64, or float32 while that is switched off."""
    return jnp.asarray(0.0).dtype


def make(kind, name, dtype, **arguments):
    arguments.setdefault("data", data_of(name, dtype))
    data = arguments.pop("data")
    return getattr(curvature, kind)(network, params_in(dtype), data, FAMILIES[name][0], **arguments)


@jax.jit
def products(operator, vectors):
    return operator.mv(vectors[0]), operator.block_mv(vectors)


def check_all_forms(operator, matrix):
    """Products, dense, diagonal, rows and Gram form of an operator against a dense matrix."""
    vectors = jnp.asarray(VECTORS, operator.dtype)
    one, block = products(operator, vectors)
    close(one, matrix @ VECTORS[0])
    close(block, VECTORS @ matrix)
    close(operator.as_matrix(), matrix)
    close(lx.diagonal(operator), np.diag(matrix))
    rows = operator.square_root_rows()
    assert rows.shape == (operator.num_rows, operator.size)
    assert operator.row_bytes == rows.nbytes
    close(rows.T @ rows, matrix)
    close(operator.gram(), rows @ rows.T)


@pytest.mark.parametrize("name", families(slow=("gaussian",)))
def test_ggn_of_every_likelihood(name, wide):
    operator = make("ggn", name, wide)
    check_all_forms(operator, dense(name)["ggn"])
    close(operator.loss, dense(name)["loss"])
    assert (operator.size, operator.num_outputs, operator.num_examples) == (SIZE, K, N)


def test_both_precisions(dtype):
    operator = make("ggn", "poisson", dtype)
    assert operator.dtype == dtype
    one, block = products(operator, jnp.asarray(VECTORS, dtype))
    close(one, dense("poisson")["ggn"] @ VECTORS[0], dtype)
    close(block, VECTORS @ dense("poisson")["ggn"], dtype)
    close(operator.square_root_rows(), reference_rows("poisson"), dtype)


def reference_rows(name):
    """Square roots of diagonal output Hessians times the Jacobians."""
    result = dense(name)
    roots = np.sqrt(np.einsum("nkk->nk", result["H"]))
    return (roots[:, :, None] * result["jacobian"]).reshape(-1, SIZE)


@pytest.mark.parametrize("name", families(slow=("gaussian", "gaussian-vector", "bernoulli")))
def test_hessian_of_every_likelihood(name, wide):
    operator = make("hessian", name, wide)
    close(operator.as_matrix(), dense(name)["hessian"])


def test_hessian_has_a_diagonal_but_no_rows(wide):
    operator = make("hessian", "categorical", wide)
    close(operator.diagonal(), np.diag(dense("categorical")["hessian"]))
    close(operator.mv(jnp.asarray(VECTORS[0])), dense("categorical")["hessian"] @ VECTORS[0])
    assert operator.num_rows is None
    assert operator.row_bytes is None
    for form in (operator.square_root_rows, operator.gram, operator.stored):
        with pytest.raises(TypeError, match="no square root"):
            form()


def test_unit_vectors_in_chunks(wide, monkeypatch):
    monkeypatch.setattr("pnkrylov.laplace.operators._BLOCK", 12)  # 32 = 12 + 12 + 8
    operator = make("hessian", "categorical", wide)
    close(operator.as_matrix(), dense("categorical")["hessian"])
    close(operator.diagonal(), np.diag(dense("categorical")["hessian"]))


def test_rows_in_chunks(wide, monkeypatch):
    # Four examples at a time: the last chunk reaches back by two.
    monkeypatch.setattr("pnkrylov.laplace.kinds._CHUNK_BYTES", 4 * (K - 1) * SIZE * wide.itemsize)
    operator = make("ggn", "categorical", wide)
    chunks = [len(rows) for rows in operator.row_chunks()]
    assert chunks == [4 * (K - 1), 2 * (K - 1)]
    check_all_forms(operator, dense("categorical")["ggn"])


@pytest.mark.parametrize(
    ("kind", "name"), [("empirical_fisher", "heteroscedastic"), ("fully_linear", "categorical")]
)
def test_forms_made_of_gradients(kind, name, wide):
    matrix = dense(name)[{"empirical_fisher": "empirical", "fully_linear": "linear"}[kind]]
    check_all_forms(make(kind, name, wide), matrix)


def test_stored_rows_are_the_same_operator(wide):
    check_all_forms(make("ggn", "categorical", wide).stored(), dense("categorical")["ggn"])


def test_a_subset_is_scaled_to_all_data(wide):
    check_all_forms(make("ggn", "categorical", wide, num_data=12), 2 * dense("categorical")["ggn"])
    scaled = make("fully_linear", "categorical", wide, num_data=12)
    check_all_forms(scaled, 4 * dense("categorical")["linear"])
    close(scaled.loss, 2 * dense("categorical")["loss"])


def test_sampled_fisher_estimates_the_ggn(wide):
    """Entry by entry within the sampling error that the draws themselves show."""
    operator = make("fisher", "categorical", wide, **FISHER)
    rows = np.asarray(operator.square_root_rows(), np.float64).reshape(N, 2000, SIZE)
    terms = 2000 * rows[:, :, :, None] * rows[:, :, None, :]  # each has the mean J^T H J
    error = (terms.var(axis=1) / 2000).sum(axis=0) ** 0.5
    deviation = np.abs(
        rows.reshape(-1, SIZE).T @ rows.reshape(-1, SIZE) - dense("categorical")["ggn"]
    )
    # About 500 entries, far from independent, at 5 standard errors: 3e-4 of all seeds fail.
    assert (deviation <= 5 * error + 1e-9).all()
    stacked = rows.reshape(-1, SIZE)
    close(operator.mv(jnp.asarray(VECTORS[0])), stacked.T @ (stacked @ VECTORS[0]))


def data_in_batches(form, dtype):
    """Keyword arguments that pass the categorical data in batches of three, or of four and two."""
    x, y = data_of("categorical", dtype)
    if form == "batch_size":
        return {"batch_size": 3}
    pieces = [(x[:4], y[:4]), (x[4:], y[4:])]
    if form == "numpy":
        pieces = [(np.asarray(a), np.asarray(b)) for a, b in pieces]
    return {"data": (lambda: iter(pieces)) if form == "generator" else pieces}


@pytest.mark.parametrize("form", ["batch_size", "list", "generator", "numpy"])
def test_batches_change_nothing(form, wide):
    operator = make("ggn", "categorical", wide, **data_in_batches(form, wide), num_data=12)
    vectors = jnp.asarray(VECTORS, wide)
    matrix = 2 * dense("categorical")["ggn"]
    close(operator.mv(vectors[0]), matrix @ VECTORS[0])
    close(operator.block_mv(vectors), VECTORS @ matrix)
    close(operator.loss, 2 * dense("categorical")["loss"])
    if form == "batch_size":
        check_all_forms(operator, matrix)


@pytest.mark.parametrize("kind", ["hessian", "empirical_fisher", "fisher", "fully_linear"])
def test_batches_change_no_other_kind(kind, wide):
    extra = FISHER if kind == "fisher" else {}
    whole = make(kind, "categorical", wide, **extra)
    parts = make(kind, "categorical", wide, batch_size=3, **extra)
    close(parts.mv(jnp.asarray(VECTORS[0])), whole.mv(jnp.asarray(VECTORS[0])))
    if kind in ("empirical_fisher", "fully_linear"):
        close(parts.square_root_rows(), whole.square_root_rows())


def test_loss_and_gradient(wide):
    for arguments in ({}, data_in_batches("batch_size", wide)):
        value = make("loss", "categorical", wide, **arguments, num_data=18)
        slope = make("gradient", "categorical", wide, **arguments, num_data=18)
        close(value, 3 * dense("categorical")["loss"])
        flat = np.concatenate([np.ravel(slope[key]) for key in sorted(PARAMS)])
        close(flat, 3 * dense("categorical")["gradient"], wide)
        assert slope["inner"].shape == (3, 4)


def test_loss_can_be_differentiated_under_jit(wide):
    data = data_of("categorical", wide)
    slope = jax.jit(jax.grad(lambda p: curvature.loss(network, p, data, CATEGORICAL)))(
        params_in(wide)
    )
    flat = np.concatenate([np.ravel(slope[key]) for key in sorted(PARAMS)])
    close(flat, dense("categorical")["gradient"], wide)


def test_made_under_jit_and_differentiated_in_the_noise(wide):
    x, y = data_of("gaussian", wide)

    @jax.jit
    @jax.value_and_grad
    def quadratic_form(precision, params, vector):
        operator = curvature.ggn(network, params, (x, y), Gaussian(precision))
        return vector @ operator.mv(vector)

    value, slope = quadratic_form(
        jnp.asarray(3.0, wide), params_in(wide), jnp.asarray(VECTORS[0], wide)
    )
    expected = VECTORS[0] @ dense("gaussian")["ggn"] @ VECTORS[0]
    close(value, expected)
    close(slope, expected / 3)


def test_products_under_vmap(wide):
    vectors = jnp.asarray(VECTORS, wide)
    for arguments in ({}, {"batch_size": 3}):
        operator = make("ggn", "categorical", wide, **arguments)
        close(jax.jit(jax.vmap(operator.mv))(vectors), VECTORS @ dense("categorical")["ggn"])


@functools.cache
def symmetric_cases():
    wide = jnp.asarray(0.0).dtype
    return make("ggn", "custom", wide), make("empirical_fisher", "categorical", wide)


@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(-6, 6))
@hypothesis.settings(max_examples=20)
def test_symmetric_and_semi_definite(seed, exponent):
    vectors = np.random.default_rng(seed).standard_normal((3, SIZE)) * 10.0**exponent
    for operator in symmetric_cases():
        vectors = jnp.asarray(vectors, operator.dtype)
        form = np.asarray(vectors, np.float64) @ np.asarray(products(operator, vectors)[1]).T
        tolerance = 1e3 * float(jnp.finfo(operator.dtype).eps) * np.abs(form).max()
        np.testing.assert_allclose(form, form.T, rtol=0, atol=tolerance)
        assert np.linalg.eigvalsh((form + form.T) / 2).min() >= -tolerance


# --- parameters


FLAT_LEAVES = {"bias": slice(0, 4), "inner": slice(4, 16), "outer": slice(16, 32)}
SOME = np.array([[True, False, False, True]] * 3)
MASKS = {
    "last layer": ({"bias": False, "inner": False, "outer": True}, range(16, 32)),
    "predicate": (lambda path, leaf: "outer" not in path and leaf.ndim == 1, range(4)),
    "entries": (
        {"bias": True, "inner": SOME, "outer": False},
        [0, 1, 2, 3, *(4 + np.flatnonzero(SOME))],
    ),
    "all": (True, range(32)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masked_curvature_is_a_submatrix(name, wide):
    mask, kept = MASKS[name]
    operator = make("ggn", "categorical", wide, mask=mask)
    submatrix = dense("categorical")["ggn"][np.ix_(list(kept), list(kept))]
    assert operator.size == len(kept)
    close(operator.as_matrix(), submatrix)
    if name == "entries":
        close(operator.block_mv(jnp.eye(len(kept), dtype=wide)), submatrix)
        slope = make("gradient", "categorical", wide, mask=mask)
        close(operator.ravel(slope), dense("categorical")["gradient"][list(kept)])


def test_parameters_go_back_where_they_came_from(wide):
    params = params_in(wide)
    chosen = curvature.select_parameters(params, MASKS["entries"][0])
    assert {name: part.shape for name, part in chosen.subset().items() if part is not None} == {
        "bias": (4,),
        "inner": (6,),
    }
    again = chosen.combine(chosen.flat())
    jax.tree.map(np.testing.assert_array_equal, again, params)
    moved = chosen.combine(chosen.flat() + 1)
    np.testing.assert_array_equal(moved["outer"], params["outer"])
    np.testing.assert_array_equal(moved["inner"], params["inner"] + SOME.astype(wide))
    draws = jax.vmap(chosen.combine)(jnp.zeros((7, chosen.size), wide))
    assert draws["inner"].shape == (7, 3, 4)


@pytest.mark.slow
def test_half_precision_parameters_are_computed_with_in_float32():
    params = {name: jnp.asarray(value, jnp.bfloat16) for name, value in PARAMS.items()}
    data = (jnp.asarray(INPUTS, jnp.bfloat16), data_of("categorical", jnp.float32)[1])
    operator = curvature.ggn(network, params, data, CATEGORICAL)
    assert operator.dtype == jnp.float32
    # bfloat16 keeps 8 bits, in parameters, activations and tangents.
    product = operator.mv(jnp.asarray(VECTORS[0], jnp.float32))
    expected = dense("categorical")["ggn"] @ VECTORS[0]
    np.testing.assert_allclose(product, expected, atol=0.1 * np.abs(expected).max())


# --- in a run


def test_belief_from_a_stream_is_that_from_memory(wide):
    matrix = dense("categorical")["ggn"] + np.eye(SIZE)
    for arguments in ({}, {"batch_size": 3}):
        operator = make("ggn", "categorical", wide, **arguments)
        start = operator.unravel(jnp.asarray(VECTORS[0], wide))
        basis = pk.krylov.lanczos(operator, start, 6, driver="host")
        rows = np.asarray(basis.vectors, np.float64)
        projected = rows @ (matrix - np.eye(SIZE)) @ rows.T
        tridiagonal = (
            np.diag(basis.alpha) + np.diag(basis.beta[:-1], 1) + np.diag(basis.beta[:-1], -1)
        )
        close(projected, tridiagonal, wide)


@pytest.mark.slow
def test_a_run_on_an_indefinite_hessian_says_so(wide):
    operator = make("hessian", "categorical", wide)
    assert np.linalg.eigvalsh(dense("categorical")["hessian"]).min() < -0.01
    with pytest.raises(NotPositiveDefiniteError, match="Ritz value -"):
        pk.inverse(operator, key=jax.random.key(0), num_steps=20, shift=1e-3)


def test_other_parameters_compile_nothing_new(wide):
    data = data_of("categorical", wide)
    vector = jnp.asarray(VECTORS[0], wide)

    def product(shift):
        params = jax.tree.map(lambda leaf: leaf + shift, params_in(wide))
        operator = curvature.ggn(network, params, data, Categorical())
        return products(operator, vector[None, :])[0]

    first = product(0.0)
    with count_compilations() as compiled:
        second = product(0.1)
    assert not compiled
    assert not np.allclose(first, second)
