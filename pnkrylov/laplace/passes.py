"""A checked pass through the data: the loss, its gradient, and everything that can be wrong."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from pnkrylov.errors import NotFiniteError
from pnkrylov.krylov import is_concrete
from pnkrylov.laplace.batches import Batches, as_batches
from pnkrylov.laplace.kinds import Kind, Problem, loss_and_gradient, outputs_at
from pnkrylov.laplace.likelihoods import Likelihood
from pnkrylov.laplace.likelihoods._base import losses_of
from pnkrylov.laplace.models import check_model, num_examples
from pnkrylov.laplace.parameters import Mask, select_parameters

Apply = Callable[[PyTree, PyTree], Array]


def make_problem(
    apply: Apply, params: PyTree, data: Any, kind: Kind, batch_size: int | None, mask: Mask
) -> tuple[Problem, Batches]:
    """Puts the user's arguments in order; the first argument checks."""
    if not callable(apply):
        raise TypeError(f"apply={apply!r} must be a function (params, x) -> outputs.")
    if not isinstance(kind.likelihood, Likelihood):
        raise TypeError(
            f"likelihood={kind.likelihood!r} must be a Likelihood, for example Categorical() for "
            "logits or Gaussian(precision) for regression."
        )
    return Problem(apply, select_parameters(params, mask), kind), as_batches(data, batch_size)


def scale_of(num_data: int | None, n: int) -> float:
    """What the sum over n examples is multiplied by to stand for `num_data`."""
    if num_data is None:
        return 1.0
    if isinstance(num_data, bool) or not isinstance(num_data, int | np.integer):
        raise TypeError(f"num_data={num_data!r} must be an int.")
    if num_data < 1:
        raise ValueError(f"num_data={num_data} must be at least 1: it counts training examples.")
    return int(num_data) / n


def checked_batches(
    problem: Problem, batches: Batches, params: PyTree
) -> Iterator[tuple[PyTree, Any, Array]]:
    """Goes through the data once, checking model, outputs and targets; yields batches, outputs."""
    traced = not is_concrete((problem, params))
    if traced and batches.in_memory is None:
        raise ValueError(
            "Data in batches need concrete parameters: call this outside jit/vmap/grad, or pass "
            "(x, y) without batch_size."
        )
    num_outputs, seen = None, False
    for _, inputs, targets in batches:
        outputs = outputs_at(problem.apply, problem.parameters, inputs)
        if not seen:
            check_model(problem.apply, problem.parameters, params, inputs)
        seen = True
        problem.kind.check(outputs, targets)
        if num_outputs not in (None, outputs.shape[1]):
            raise ValueError(
                f"The model has {outputs.shape[1]} outputs for one batch and {num_outputs} for "
                "another."
            )
        num_outputs = outputs.shape[1]
        yield inputs, targets, outputs
    if not seen:
        raise ValueError("data is empty: it has no batch.")


def check_pass(
    problem: Problem, batches: Batches, params: PyTree
) -> tuple[Float[Array, ""], int, int]:
    """Loss, number of examples and number of outputs, from one checked pass over the data."""
    total = jnp.zeros((), problem.parameters.structure.dtype)
    n = num_outputs = 0
    for inputs, targets, outputs in checked_batches(problem, batches, params):
        total = total + jnp.sum(losses_of(problem.kind.likelihood, outputs, targets))
        n, num_outputs = n + num_examples(inputs), outputs.shape[1]
    return _finite(total, "The loss"), n, num_outputs


def total_loss_and_gradient(
    problem: Problem, batches: Batches, params: PyTree
) -> tuple[Float[Array, ""], Float[Array, " p"], int, int]:
    """Loss, gradient, number of examples and of outputs, from one checked pass."""
    structure = problem.parameters.structure
    total, slope = jnp.zeros((), structure.dtype), jnp.zeros(structure.size, structure.dtype)
    n = num_outputs = 0
    for inputs, targets, outputs in checked_batches(problem, batches, params):
        value, direction = loss_and_gradient(problem, inputs, targets)
        total, slope = total + value, slope + direction
        n, num_outputs = n + num_examples(inputs), outputs.shape[1]
    return _finite(total, "The loss"), _finite(slope, "The gradient of the loss"), n, num_outputs


def _finite(value: Array, name: str) -> Array:
    if is_concrete(value) and not np.isfinite(np.asarray(value)).all():
        raise NotFiniteError(NotFiniteError.message(name))
    return value
