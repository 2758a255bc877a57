"""Bad input to curvature operators gets an error that names it and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvature_cases import FAMILIES, INPUTS, OUTPUTS, data_of, network, params_in, student_t
from harness import no_type_checker
from pnkrylov.errors import NotFiniteError, NotPositiveDefiniteError
from pnkrylov.laplace import curvature
from pnkrylov.laplace.likelihoods import Categorical, Custom, Gaussian, TargetError

F32 = jnp.dtype("float32")
X, Y = np.asarray(INPUTS, F32), FAMILIES["categorical"][1]
REAL = FAMILIES["gaussian"][1]


def call(data=(X, Y), likelihood=None, apply=network, params=None, **arguments):
    likelihood = Categorical() if likelihood is None else likelihood
    params = params_in(F32) if params is None else params
    return curvature.ggn(apply, params, data, likelihood, **arguments)


def nan_params():
    return {**params_in(F32), "bias": jnp.full(4, jnp.nan, F32)}


CASES = {
    "empty": (dict(data=(X[:0], Y[:0])), ValueError, "no example"),
    "no batch": (dict(data=[]), ValueError, "no batch"),
    "empty batch": (dict(data=[(X, Y), (X[:0], Y[:0])]), ValueError, "no example"),
    "lengths": (dict(data=(X, Y[:3])), ValueError, r"6 examples, but y has shape \(3,\)"),
    "ragged x": (dict(data=((X, X[:3]), Y)), ValueError, "different numbers of examples"),
    "label": (dict(data=(X, Y + 1)), TargetError, r"example 1 is 4"),
    "label in a batch": (dict(data=(X, Y + 1), batch_size=1), TargetError, "is 4"),
    "target shape": (
        dict(data=(X, REAL[:, :2]), likelihood=Gaussian()),
        ValueError,
        r"\(6, 2\).*needs \(6, 4\)",
    ),
    "nan target": (
        dict(data=(X, REAL * np.nan), likelihood=Gaussian()),
        NotFiniteError,
        "target of example 0",
    ),
    "nan outputs": (dict(params=nan_params()), NotFiniteError, "outputs of 6 of 6 examples"),
    "iterator": (dict(data=iter([(X, Y)])), TypeError, "only once"),
    "array": (dict(data=X), TypeError, r"a tuple \(x, y\)"),
    "no pair": (dict(data=[X, Y]), TypeError, r"a pair \(x, y\) is needed"),
    "batch size": (dict(batch_size=0), ValueError, "batch_size=0"),
    "batch size of a list": (dict(data=[(X, Y)], batch_size=2), ValueError, "batches of its own"),
    "num_data": (dict(num_data=0), ValueError, "num_data=0"),
    "num_data of another type": (dict(num_data=2.5), TypeError, "num_data=2.5"),
    "mask selects nothing": (dict(mask=lambda path, leaf: False), ValueError, "selects nothing"),
    "mask of other containers": (dict(mask={"inner": True}), ValueError, "does not match params"),
    "mask of numbers": (dict(mask=1.0), TypeError, "True, False or a boolean array"),
    "mask of another shape": (
        dict(mask={"bias": np.ones(3, bool), "inner": False, "outer": False}),
        ValueError,
        r"\['bias'\] has shape \(3,\).*\(4,\)",
    ),
    "no parameters": (dict(params={"n": np.arange(3)}), ValueError, "no floating array"),
    "one example at a time": (
        dict(apply=lambda p, x: network(p, x)[0]),
        ValueError,
        r"shape \(4,\) for 6 examples.*vmap",
    ),
    "state": (dict(apply=lambda p, x: (network(p, x), 0)), TypeError, r"\[0\]"),
    "likelihood": (dict(likelihood="categorical"), TypeError, "must be a Likelihood"),
    "indefinite": (
        dict(data=(X, OUTPUTS + 9), likelihood=Custom(student_t)),
        NotPositiveDefiniteError,
        r"fisher\(\.\.\.\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_is_refused(name):
    arguments, error, message = CASES[name]
    with no_type_checker(), pytest.raises(error, match=message):
        call(**arguments)


def test_widths_of_the_outputs_must_agree():
    def apply(p, x):
        return network(p, x["x"])[:, : 1 + len(x)]

    with pytest.raises(ValueError, match="3 outputs for one batch and 2"):
        call(data=[({"x": X}, Y * 0), ({"x": X, "more": X}, Y * 0)], apply=apply)


def test_a_stream_that_changes_its_length_is_noticed():
    passes = []

    def batches():
        passes.append(1)
        yield X[:2], Y[:2]
        if len(passes) == 1:
            yield X[2:4], Y[2:4]

    operator = call(data=batches)
    with pytest.raises(ValueError, match="2 examples, but 4 in the first pass"):
        operator.mv(jnp.ones(operator.size, F32))


def test_a_stream_needs_concrete_parameters():
    def traced(params):
        return call(params=params, batch_size=2).mv(jnp.ones(32, F32))

    with pytest.raises(ValueError, match="concrete parameters"):
        jax.jit(traced)(params_in(F32))


def test_number_of_draws():
    with pytest.raises(ValueError, match="num_samples=0"):
        curvature.fisher(
            network, params_in(F32), (X, Y), Categorical(), key=jax.random.key(0), num_samples=0
        )


def test_a_loss_that_overflows():
    params = {**params_in(F32), "outer": jnp.full((4, 4), 1e30, F32)}
    with pytest.raises(NotFiniteError, match="loss"):
        curvature.loss(network, params, data_of("gaussian", F32), Gaussian())
