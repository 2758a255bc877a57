"""Every structural mistake, with a message that names the argument, the value and the remedy."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as spla

from pnkrylov._structure import VectorStructure
from pnkrylov.operators import as_operator, check_vector

f32 = jnp.float32
needs_x64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="needs 64-bit floats")
needs_x32 = pytest.mark.skipif(jax.config.jax_enable_x64, reason="needs 64-bit floats off")


def like(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_the_shape_of_a_matrix():
    for wrap in (lambda x: x, jnp.asarray):
        with pytest.raises(ValueError, match=r"A must be square, got shape \(3, 4\).*B\.T @"):
            as_operator(wrap(np.ones((3, 4), np.float32)))
        with pytest.raises(ValueError, match=r"A must be two-dimensional, got shape \(3,\)"):
            as_operator(wrap(np.ones(3, np.float32)))
        with pytest.raises(ValueError, match=r"A is empty: its shape is \(0, 0\)"):
            as_operator(wrap(np.ones((0, 0), np.float32)))
    with pytest.raises(ValueError, match=r"A must be square, got shape \(3, 4\)"):
        as_operator(sp.csr_array(np.ones((3, 4), np.float32)))
    with pytest.raises(ValueError, match=r"A must be square, got shape \(3, 4\)"):
        as_operator(spla.aslinearoperator(np.ones((3, 4), np.float32)))


@pytest.mark.parametrize("wrap", [lambda x: x, jnp.asarray, sp.csr_array, spla.aslinearoperator])
def test_the_dtype_of_a_matrix(wrap):
    with pytest.raises(TypeError, match=r"A has dtype int32; a real floating.*\.astype"):
        as_operator(wrap(np.eye(3, dtype=np.int32)))
    with pytest.raises(TypeError, match=r"A has dtype bool; a real floating"):
        as_operator(wrap(np.eye(3, dtype=bool)))
    with pytest.raises(TypeError, match=r"A has the complex dtype complex64; only real"):
        as_operator(wrap(np.eye(3, dtype=np.complex64)))


def test_half_precision_and_long_double():
    with pytest.raises(TypeError, match=r"A has dtype bfloat16, too coarse.*Cast it to float32"):
        as_operator(jnp.eye(3, dtype=jnp.bfloat16))
    if np.dtype(np.longdouble).itemsize > 8:
        with pytest.raises(TypeError, match=r"A has dtype .*which JAX does not have.*float64"):
            as_operator(np.eye(3, dtype=np.longdouble))


@needs_x32
def test_float64_without_x64_is_not_truncated():
    message = "is float64, but JAX runs without it.*jax_enable_x64.*cast the data to float32"
    for A in (np.eye(3), sp.eye_array(3, format="csr"), spla.aslinearoperator(np.eye(3))):
        with pytest.raises(TypeError, match=r"A " + message):
            as_operator(A)
    with pytest.raises(TypeError, match=r"like " + message):
        as_operator(lambda v: v, like=np.ones(3))
    with pytest.raises(TypeError, match=r"like " + message):
        as_operator(lambda v: v, like=1.0)
    with pytest.raises(TypeError, match=r"v " + message):
        check_vector(as_operator(np.eye(3, dtype=np.float32)), np.ones(3), "v")


@needs_x64
def test_dtypes_of_matrix_and_vector_differ():
    operator = as_operator(np.eye(3))
    with pytest.raises(TypeError, match=r"v has dtype float32, but the operator A needs float64"):
        check_vector(operator, jnp.ones(3, f32), "v")
    message = r"A has dtype float64, but the right-hand side float32\[3\] has dtype float32"
    with pytest.raises(TypeError, match=message):
        as_operator(np.eye(3), like=like(3))
    with pytest.raises(TypeError, match=r"v has dtype int32; a real floating dtype is needed"):
        check_vector(operator, jnp.ones(3, jnp.int32), "v")


def test_lengths_of_matrix_and_vector_differ():
    message = r"A acts on vectors of length 3, but .* float32\[4\] has 4 entries"
    with pytest.raises(ValueError, match=message):
        as_operator(np.eye(3, dtype=np.float32), like=like(4))
    operator = as_operator(np.eye(3, dtype=np.float32))
    message = (
        r"rhs has the wrong shape. rhs: float32\[4\]; expected by the operator A: float32\[3\]"
    )
    with pytest.raises(ValueError, match=message):
        check_vector(operator, jnp.ones(4, f32), "rhs")
    with pytest.raises(ValueError, match=r"float32\[3,1\]; expected .* float32\[3\]"):
        check_vector(operator, jnp.ones((3, 1), f32), "v")
    message = r"v has the wrong pytree structure.*\{'a': float32\[3\]\}; expected .*: float32\[3\]"
    with pytest.raises(ValueError, match=message):
        check_vector(operator, {"a": jnp.ones(3, f32)}, "v")
    with pytest.raises(ValueError, match=r"wrong pytree structure. v: \[float, float, float\]"):
        check_vector(operator, [1.0, 2.0, 3.0], "v")


def test_errors_appear_while_tracing():
    operator = as_operator(np.eye(3, dtype=np.float32))
    with pytest.raises(ValueError, match=r"v has the wrong shape"):
        jax.eval_shape(lambda v: check_vector(operator, v, "v"), like(4))
    with pytest.raises(ValueError, match=r"A must be square"):
        jax.eval_shape(as_operator, like(3, 4))


def test_unknown_kinds():
    for A in ("matrix", None, [[1.0, 0.0], [0.0, 1.0]], 3.0):
        with pytest.raises(TypeError, match=r"which is no known kind of operator. Pass a two-dim"):
            as_operator(A)


def test_a_callable_needs_like():
    with pytest.raises(TypeError, match=r"A is a callable, so its size is unknown: pass like="):
        as_operator(lambda v: v)


def test_like_is_checked():
    with pytest.raises(ValueError, match=r"like is empty: \[\] has no entries"):
        as_operator(lambda v: v, like=[])
    with pytest.raises(ValueError, match=r"like is empty: float32\[0\] has no entries"):
        as_operator(lambda v: v, like=like(0))
    with pytest.raises(TypeError, match=r"like contains 'a' of type str; every leaf must be"):
        as_operator(lambda v: v, like=["a"])
    with pytest.raises(TypeError, match=r"like has dtype int32"):
        as_operator(lambda v: v, like=like(3, dtype=jnp.int32))
    operator = as_operator(np.eye(3, dtype=np.float32))
    with pytest.raises(ValueError, match=r"like has the wrong shape. like: float32\[4\]"):
        as_operator(operator, like=like(4))
    assert as_operator(operator, like=like(3)) is operator


def test_the_output_of_a_callable():
    expected = r"expected by A symmetric operator, whose output looks like its input,: "
    with pytest.raises(ValueError, match=r"A v has the wrong shape.*float32\[2\]; " + expected):
        as_operator(lambda v: v[:2], like=like(3))
    message = r"A v has the wrong pytree structure.*\[float32\[3\], float32\[3\]\]; " + expected
    with pytest.raises(ValueError, match=message + r"float32\[3\]"):
        as_operator(lambda v: [v, v], like=like(3))
    with pytest.raises(TypeError, match=r"A v has dtype float16, but .* needs float32"):
        as_operator(lambda v: v.astype(jnp.float16), like=like(3))
    with pytest.raises(TypeError, match=r"A v contains 'a' of type str; every leaf must be"):
        as_operator(lambda v: [v[0], "a"], like=[like(3), like(3)])


def test_a_numpy_callable_is_told_what_to_do():
    for function in (lambda v: np.asarray(v) * 2, lambda v: v * float(v[0])):
        with pytest.raises(TypeError, match=r"cannot trace.*scipy.sparse.linalg.LinearOperator"):
            as_operator(function, like=like(3))


def test_lineax_operators_are_checked():
    with pytest.raises(ValueError, match=r"A must be square|A\.matrix must be square"):
        as_operator(lx.MatrixLinearOperator(jnp.ones((2, 3), f32)))
    rectangle = lx.FunctionLinearOperator(lambda v: v[:2], like(3))
    with pytest.raises(ValueError, match=r"out_structure\(\) has the wrong shape.*float32\[2\]"):
        as_operator(rectangle)
    with pytest.raises(TypeError, match=r"complex64; only real"):
        as_operator(lx.DiagonalLinearOperator(jnp.ones(3, jnp.complex64)))
    with pytest.raises(ValueError, match=r"expected by the right-hand side: float32\[4\]"):
        as_operator(lx.DiagonalLinearOperator(jnp.ones(3, f32)), like=like(4))


def test_a_host_operator_without_dtype():
    operator = spla.aslinearoperator(np.eye(3, dtype=np.float32))
    operator.dtype = None
    with pytest.raises(TypeError, match=r"A has no dtype. Give it one"):
        as_operator(operator)


def test_python_numbers_in_trees():
    message = "like has dtype int64; a real floating dtype is needed"
    with pytest.raises(TypeError, match=message):
        VectorStructure.of([1, 2], "like")
    if jax.config.jax_enable_x64:
        structure = VectorStructure.of({"a": 1.0, "b": np.ones(2)}, "like")
        assert structure.dtype == jnp.float64 and structure.size == 3
