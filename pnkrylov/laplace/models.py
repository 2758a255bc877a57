"""A user's model as a function from parameters and inputs to outputs, and what is refused."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from pnkrylov._structure import describe
from pnkrylov.krylov import is_concrete
from pnkrylov.laplace.parameters import Parameters

_EVALUATION_REMEDY = (
    "Use the model in evaluation mode: eqx.nn.inference_mode(model) for Equinox, train=False / "
    "deterministic=True / use_running_average=True for Flax."
)


def outputs_of(
    apply: Callable[[PyTree, PyTree], Array], parameters: Parameters, flat: Array, inputs: PyTree
) -> Array:
    """Evaluates the model: outputs `(n, K)` for selected parameters `(p,)`.

    Raises:
        ValueError: The model does not return one row of outputs per example.
        TypeError: It returns something else than a floating array.
    """
    outputs = apply(parameters.combine(flat), inputs)
    if not hasattr(outputs, "shape") or not jnp.issubdtype(outputs.dtype, jnp.floating):
        raise TypeError(
            f"apply(params, x) returned {describe(outputs)}, but an array (n, K) of a floating "
            "dtype is needed. If it also returns state or statistics, wrap it: "
            "lambda params, x: apply(params, x)[0]."
        )
    n = num_examples(inputs)
    if outputs.ndim not in (1, 2) or outputs.shape[0] != n:
        raise ValueError(
            f"apply(params, x) returned shape {tuple(outputs.shape)} for {n} examples, but (n, K) "
            "is needed. If the model takes one example, wrap it: "
            "lambda params, x: jax.vmap(functools.partial(model, params))(x)."
        )
    # Outputs share the dtype of the flat parameters, as tangents and cotangents do.
    return outputs.reshape(n, -1).astype(flat.dtype)


def num_examples(inputs: PyTree, name: str = "x") -> int:
    """The common length of the first axis of all leaves.

    Raises:
        ValueError: There is no array, one has no axis, or lengths differ.
    """
    shapes = [np.shape(leaf) for leaf in jtu.tree_leaves(inputs)]
    if not shapes or any(len(shape) == 0 for shape in shapes):
        raise ValueError(f"{name} is {describe(inputs)}; arrays with examples first are needed.")
    lengths = {shape[0] for shape in shapes}
    if len(lengths) > 1:
        raise ValueError(
            f"The arrays of {name} hold different numbers of examples: {describe(inputs)}."
        )
    return lengths.pop()


def take(inputs: PyTree, rows: Any) -> PyTree:
    """The examples in `rows` (a slice or indices) of every array."""
    return jtu.tree_map(lambda leaf: leaf[rows], inputs)


def check_model(
    apply: Callable[[PyTree, PyTree], Array], parameters: Parameters, params: PyTree, inputs: PyTree
) -> None:
    """Refuses models that are in training mode, as far as that can be seen.

    Equinox layers are looked for in `params`, in `apply` and in what it closes over. Beyond that,
    the outputs of a few examples must not change when the model is called again, in another order
    or for one example alone. A mask of dropout that is the same for every example and every call
    cannot be told from a smaller network.

    Raises:
        ValueError: A layer is in training mode, outputs are random, or the output of an example
            depends on the other examples.
    """
    _check_layers(apply, params)
    if not is_concrete((parameters, inputs)):
        return
    n = num_examples(inputs)
    few = take(inputs, np.unique([0, n // 2, n - 1]))
    once, again, backwards, alone = map(np.asarray, _probe(apply, parameters, few))
    if not np.array_equal(once, again, equal_nan=True):
        raise ValueError(
            "apply(params, x) is random: two calls with the same arguments gave outputs that "
            f"differ by {np.nanmax(np.abs(once - again)):.3g} (dropout?). {_EVALUATION_REMEDY}"
        )
    # Another batch size may sum in another order: rounding, which a network amplifies somewhat.
    tolerance = float(jnp.finfo(once.dtype).eps) ** 0.5 * max(1.0, float(np.abs(once).max()))
    difference = max(np.abs(backwards - once).max(), np.abs(alone - once[:1]).max())
    # Statistics of a batch of one may be NaN; NaN in the data is NaN either way.
    undefined = np.isnan(alone) & ~np.isnan(once[:1])
    if difference > tolerance or np.any(undefined):
        raise ValueError(
            "The output of an example depends on the other examples of its batch: it changed by "
            f"{difference:.3g} (BatchNorm or dropout in training mode?). {_EVALUATION_REMEDY}"
        )


@eqx.filter_jit
def _probe(apply: Callable, parameters: Parameters, few: PyTree) -> tuple[Array, ...]:
    evaluate = functools.partial(outputs_of, apply, parameters, parameters.flat())
    backwards = take(few, slice(None, None, -1))
    return evaluate(few), evaluate(few), evaluate(backwards)[::-1], evaluate(take(few, slice(1)))


def _check_layers(apply: Callable, params: PyTree) -> None:
    """Looks for Equinox layers in training mode."""

    def is_layer(node):
        return isinstance(node, (eqx.nn.Dropout, eqx.nn.BatchNorm))

    for layer in jtu.tree_leaves([params, *_reachable(apply)], is_leaf=is_layer):
        # A partitioned module holds None; its other half says how it is used.
        inactive = isinstance(layer, eqx.nn.Dropout) and layer.p == 0
        if is_layer(layer) and layer.inference is False and not inactive:
            raise ValueError(
                f"The model contains {type(layer).__name__} in training mode. {_EVALUATION_REMEDY}"
            )


def _reachable(apply: Any) -> list[Any]:
    """The pytrees that a function visibly carries: itself, bound arguments and closed-over ones."""
    if isinstance(apply, functools.partial):
        return [*_reachable(apply.func), *apply.args, *apply.keywords.values()]
    if inspect.ismethod(apply):
        return [apply.__self__, *_reachable(apply.__func__)]
    if inspect.isfunction(apply):
        names = inspect.getclosurevars(apply)
        captured = [*names.nonlocals.values(), *names.globals.values()]
        return [value for value in captured if isinstance(value, eqx.Module)]
    return [apply] if isinstance(apply, eqx.Module) else []
