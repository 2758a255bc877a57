"""Every kind of operator against its dense twin; vectors; the symmetry probe."""

import equinox as eqx
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as spla

from pnkrylov._structure import VectorStructure
from pnkrylov.errors import NotFiniteError, NotPositiveDefiniteError, NotSymmetricError
from pnkrylov.operators import (
    DenseOperator,
    HostOperator,
    SparseOperator,
    SPDOperator,
    as_operator,
    check_symmetric,
    check_vector,
    symmetry_tolerance,
)
from zoo import SIZE, ZOO, assert_products, dense_matrix, make, vectors


@pytest.fixture(params=ZOO, ids=lambda species: species.name)
def species(request):
    return request.param


# --- products


def test_products_match_the_dense_twin(species, dtype):
    operator, dense = make(species, dtype)
    block = vectors(3, dtype)
    assert isinstance(operator, SPDOperator)
    assert operator.size == SIZE and operator.dtype == dtype
    for mv in (operator.mv, eqx.filter_jit(operator.mv)):
        product = mv(jnp.asarray(block[0]))
        assert product.dtype == dtype
        assert_products(product, dense @ block[0].astype(np.float64), species)
    for block_mv in (operator.block_mv, eqx.filter_jit(operator.block_mv), jax.vmap(operator.mv)):
        products = block_mv(jnp.asarray(block))
        assert products.dtype == dtype and products.shape == (3, SIZE)
        assert_products(products, block.astype(np.float64) @ dense, species)
    assert_products(operator.as_matrix(), dense, species)


def test_blocks_of_one_row_and_nested_vmap(species, dtype):
    operator, dense = make(species, dtype)
    block = vectors(4, dtype)
    one = operator.block_mv(jnp.asarray(block[:1]))
    assert_products(one, block[:1].astype(np.float64) @ dense, species)
    nested = jax.vmap(operator.block_mv)(jnp.asarray(block.reshape(2, 2, SIZE)))
    expected = block.astype(np.float64) @ dense
    assert_products(nested.reshape(4, SIZE), expected, species)


def test_products_inside_a_compiled_loop(species, dtype):
    operator, dense = make(species, dtype)
    start = vectors(1, dtype)[0]

    @eqx.filter_jit
    def power(operator, vector):
        return jax.lax.fori_loop(0, 3, lambda _, v: operator.mv(v), vector)

    expected = np.linalg.matrix_power(dense, 3) @ start.astype(np.float64)
    assert_products(power(operator, jnp.asarray(start)), expected, species, scale=10)


def test_derivatives_with_respect_to_the_vector(species, dtype):
    operator, dense = make(species, dtype)
    primal, tangent = vectors(2, dtype)
    _, product = jax.jvp(operator.mv, (jnp.asarray(primal),), (jnp.asarray(tangent),))
    assert_products(product, dense @ tangent.astype(np.float64), species)
    gradient = jax.grad(lambda v: jnp.vdot(v, operator.mv(v)))(jnp.asarray(primal))
    assert_products(gradient, 2 * dense @ primal.astype(np.float64), species)
    assert_products(jax.jacrev(operator.mv)(jnp.asarray(primal)), dense, species)


def test_derivatives_with_respect_to_a_matrix(dtype):
    matrix = jnp.asarray(dense_matrix(dtype))
    x, y = jnp.asarray(vectors(2, dtype))

    def through(make):
        return jax.grad(lambda matrix: jnp.vdot(x, make(matrix).mv(y)))(matrix)

    like = jax.ShapeDtypeStruct((SIZE,), dtype)
    expected = np.outer(x, y)
    makers = [
        as_operator,
        lambda A: as_operator(lambda v: A @ v, like=like),
        lambda A: as_operator(jax.jit(lambda v: A @ v), like=like),
        lambda A: as_operator(jax.tree_util.Partial(jnp.matmul, A), like=like),
        lambda A: as_operator(lx.MatrixLinearOperator(A)),
        lambda A: as_operator(lx.TaggedLinearOperator(lx.MatrixLinearOperator(A), ())),
    ]
    for maker in makers:
        np.testing.assert_allclose(through(maker), expected, rtol=1e-6)


def test_sparse_entries_are_differentiable(dtype):
    operator = as_operator(sp.diags_array([2.0, 1.0, 1.0], shape=(3, 3), dtype=dtype).tocsr())
    x = jnp.asarray([1, 2, 3], dtype)

    @eqx.filter_grad
    def gradient(operator, product):
        return jnp.sum(x * product(operator))

    by_vector = gradient(operator, lambda operator: operator.mv(x))
    by_block = gradient(operator, lambda operator: operator.block_mv(jnp.stack([x, x]))[1])
    np.testing.assert_allclose(by_vector.entries, x**2, rtol=1e-6)
    np.testing.assert_allclose(by_block.entries, x**2, rtol=1e-6)


def test_dense_product_is_the_bare_product(dtype):
    """Nothing but one dot_general may stand between the caller and the matrix."""
    operator = as_operator(jnp.asarray(dense_matrix(dtype)))
    for product, shape in ((operator.mv, (SIZE,)), (operator.block_mv, (3, SIZE))):
        jaxpr = jax.make_jaxpr(product)(jax.ShapeDtypeStruct(shape, dtype))
        assert [equation.primitive.name for equation in jaxpr.eqns] == ["dot_general"]


# --- kinds


def test_kinds_become_the_efficient_class(dtype):
    dense = dense_matrix(dtype)
    assert isinstance(as_operator(dense), DenseOperator)
    assert isinstance(as_operator(lx.MatrixLinearOperator(jnp.asarray(dense))), DenseOperator)
    assert isinstance(as_operator(sp.csr_array(dense)), SparseOperator)
    assert isinstance(as_operator(spla.aslinearoperator(dense)), HostOperator)
    operator = as_operator(dense)
    assert as_operator(operator) is operator


def test_scipy_input_is_left_alone(dtype):
    unsorted = sp.csr_array(
        (np.array([1, 1, 4, 3], dtype), np.array([1, 1, 0, 1]), np.array([0, 3, 4])), (2, 2)
    )
    before = unsorted.indices.copy(), unsorted.data.copy()
    operator = as_operator(unsorted)
    np.testing.assert_array_equal(unsorted.indices, before[0])
    np.testing.assert_array_equal(unsorted.data, before[1])
    # The JAX matrices are declared sorted and free of duplicates, so they must be.
    np.testing.assert_array_equal(operator.coordinates, [[0, 0], [0, 1], [1, 1]])
    np.testing.assert_array_equal(operator.row_starts, [0, 2, 3])
    np.testing.assert_array_equal(operator.as_matrix(), [[4, 2], [0, 3]])
    np.testing.assert_array_equal(operator.block_mv(jnp.eye(2, dtype=dtype)).T, [[4, 2], [0, 3]])


def test_a_lineax_jacobian_is_linearised_once(dtype):
    jacobian = lx.JacobianLinearOperator(lambda x, _: jnp.sin(x), jnp.ones(3, dtype))
    operator = as_operator(jacobian)
    primitives = [e.primitive.name for e in jax.make_jaxpr(operator.mv)(jnp.ones(3, dtype)).eqns]
    assert "mul" in primitives and not {"sin", "cos"} & set(primitives)


class CountingOperator(spla.LinearOperator):
    """A host operator that counts its calls."""

    def __init__(self, matrix):
        super().__init__(matrix.dtype, matrix.shape)
        self.matrix = matrix
        self.matvecs, self.matmats = 0, 0

    def _matvec(self, x):
        self.matvecs += 1
        return self.matrix @ x

    def _matmat(self, X):
        self.matmats += 1
        return self.matrix @ X


def test_a_host_batch_is_one_matmat(dtype):
    counting = CountingOperator(dense_matrix(dtype))
    operator = as_operator(counting)
    block = jnp.asarray(vectors(5, dtype))
    jax.block_until_ready(operator.mv(block[0]))
    assert (counting.matvecs, counting.matmats) == (1, 0)
    jax.block_until_ready(eqx.filter_jit(jax.vmap(operator.mv))(block))
    jax.block_until_ready(operator.block_mv(block))
    assert (counting.matvecs, counting.matmats) == (1, 2)


def test_lineax_sees_a_symmetric_positive_operator(species, dtype):
    operator, dense = make(species, dtype)
    assert lx.is_symmetric(operator) and lx.is_positive_semidefinite(operator)
    for denied in (
        lx.is_negative_semidefinite,
        lx.is_diagonal,
        lx.is_tridiagonal,
        lx.is_lower_triangular,
        lx.is_upper_triangular,
        lx.has_unit_diagonal,
    ):
        assert denied(operator) is False
    flat = jax.ShapeDtypeStruct((SIZE,), dtype)
    assert operator.in_structure() == flat and operator.out_structure() == flat
    assert operator.T is operator and lx.conj(operator) is operator
    assert lx.linearise(operator) is operator
    assert_products(lx.materialise(operator).as_matrix(), dense, species)
    assert_products(lx.diagonal(operator), np.diagonal(dense), species, scale=SIZE)
    for actual, offset in zip(lx.tridiagonal(operator), (0, -1, 1), strict=True):
        scale = 10 * SIZE  # the bound is relative to the norm of a part of the matrix
        np.testing.assert_allclose(
            np.asarray(actual, np.float64),
            np.diagonal(dense, offset),
            atol=scale * float(jnp.finfo(jnp.bfloat16 if species.coarse else dtype).eps),
        )
    assert_products((operator + operator).mv(jnp.ones(SIZE, dtype)), 2 * dense.sum(1), species)


def test_lineax_solves_with_our_operators(dtype):
    dense = dense_matrix(dtype)
    operator = as_operator(jax.tree_util.Partial(jnp.matmul, jnp.asarray(dense)), like=dense[0])
    v = jnp.asarray(vectors(1, dtype)[0])
    exact = np.linalg.solve(dense.astype(np.float64), np.asarray(v, np.float64))
    tolerance = 1e3 * float(jnp.finfo(dtype).eps)
    for solver in (lx.Cholesky(), lx.CG(rtol=tolerance / 50, atol=tolerance / 50)):
        solution = lx.linear_solve(operator, v, solver).value
        np.testing.assert_allclose(solution, exact, rtol=0, atol=tolerance)


# --- vectors


@pytest.mark.parametrize("tree_species", [s for s in ZOO if s.on_tree], ids=lambda s: s.name)
def test_pytrees_come_back_with_structure_and_dtypes(tree_species, dtype):
    animal = tree_species.make(dtype)
    operator = as_operator(animal.A, like=animal.like)
    tree = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 3, leaf.dtype), animal.like)
    back = operator.unravel(check_vector(operator, tree, "v"))
    assert eqx.tree_equal(back, tree)


leaf_dtypes = st.sampled_from([jnp.float16, jnp.bfloat16, jnp.float32])
leaves = st.builds(
    lambda dtype, shape, seed: jnp.asarray(
        np.random.default_rng(seed).standard_normal(shape)
    ).astype(dtype),
    leaf_dtypes,
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    st.integers(0, 99),
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.tuples(inner, st.none())
    ),
    max_leaves=5,
)


@hypothesis.given(trees)
@hypothesis.settings(max_examples=60)
def test_ravel_and_unravel_are_inverse(tree):
    sizes = [leaf.size for leaf in jax.tree.leaves(tree)]
    if sum(sizes) == 0:
        with pytest.raises(ValueError, match="v is empty"):
            VectorStructure.of(tree, "v")
        return
    structure = VectorStructure.of(tree, "v")
    flat = structure.ravel(tree)
    assert flat.dtype == jnp.float32 and flat.shape == (sum(sizes),) == (structure.size,)
    expected = np.concatenate(
        [np.asarray(leaf, np.float32).ravel() for leaf in jax.tree.leaves(tree)]
    )
    np.testing.assert_array_equal(flat, expected)
    assert eqx.tree_equal(structure.unravel(flat), tree)
    assert VectorStructure.of(structure.tree) == structure
    assert hash(VectorStructure.of(structure.tree)) == hash(structure)


def test_the_widest_leaf_dtype_wins():
    half = VectorStructure.of([jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float16)])
    assert half.dtype == jnp.float32
    assert half.epsilon == float(jnp.finfo(jnp.bfloat16).eps)
    assert VectorStructure.of(jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32
    if jax.config.jax_enable_x64:
        wide = VectorStructure.of([jnp.ones(2, jnp.float32), jnp.ones(2, jnp.float64)])
        assert wide.dtype == jnp.float64


# --- symmetry


def test_symmetric_operators_pass_the_probe(species, dtype, key):
    operator, _ = make(species, dtype)
    asymmetry, ok = jax.jit(lambda key: check_symmetric(operator, key))(key)
    assert bool(ok) and float(asymmetry) <= symmetry_tolerance(operator.structure)


@pytest.mark.parametrize("relative", [1e-2, 1.0])
def test_a_non_symmetric_operator_is_caught(relative, dtype, key):
    """The asymmetry is |z| ||A - A.T||_F / ||A||_F, so its mean square over keys is known.

    For independent normal x and y, x.(A - A.T)y has variance ||A - A.T||_F^2. The denominator is
    the norm of the image of a normal vector, close to ||A||_F for a matrix of flat spectrum.
    """
    d, keys = 400, jax.random.split(key, 200)
    skew = np.random.default_rng(0).standard_normal((d, d))
    skew = (skew - skew.T) / np.linalg.norm(skew - skew.T)
    matrix = (np.eye(d) / np.sqrt(d) + relative * skew).astype(dtype)
    operator = as_operator(matrix)
    asymmetry, ok = jax.jit(jax.vmap(lambda key: check_symmetric(operator, key)))(keys)
    # Missed only when |z| < tolerance / (2 relative): 2.4e-4 / 2e-2 in float32, or 1 % of keys.
    assert np.mean(np.asarray(ok)) <= 0.05
    expected = 2 * relative / np.sqrt(1 + relative**2)
    mean_square = float(np.mean(np.asarray(asymmetry, np.float64) ** 2))
    # Mean of 200 squared normals: relative standard error sqrt(2/200) = 0.1.
    assert abs(mean_square / expected**2 - 1) < 5 * 0.1


def test_the_tolerance_can_be_given(dtype, key):
    matrix = dense_matrix(dtype)
    matrix[0, 1] += 1
    operator = as_operator(matrix)
    asymmetry, ok = check_symmetric(operator, key)
    assert not ok
    assert check_symmetric(operator, key, tolerance=float(asymmetry) * 1.01)[1]
    assert not check_symmetric(operator, key, tolerance=float(asymmetry) * 0.99)[1]


def test_zero_and_non_finite_operators_are_no_symmetry_finding(dtype, key):
    asymmetry, ok = check_symmetric(as_operator(np.zeros((4, 4), dtype)), key)
    assert asymmetry == 0 and ok
    asymmetry, ok = check_symmetric(as_operator(np.full((4, 4), np.nan, dtype)), key)
    assert np.isnan(asymmetry) and ok


def test_messages_name_value_and_remedy():
    message = NotSymmetricError.message(0.25, 1e-6)
    assert "0.25" in message and "1e-06" in message
    assert "check_symmetric=False" in message and "(A + A.T)/2" in message
    message = NotPositiveDefiniteError.message(-0.5)
    assert "-0.5" in message and "multiple of the identity" in message
    message = NotFiniteError.message("v")
    assert message.startswith("v contains NaN") and "float64" in message
