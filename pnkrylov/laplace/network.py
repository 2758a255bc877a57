"""A network as a function of its uncertain parameters: outputs, Jacobians, outputs of draws."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from pnkrylov.laplace.models import num_examples, outputs_of, take
from pnkrylov.laplace.parameters import Parameters

# Rows of a Jacobian that are held at a time take about this much memory.
_CHUNK_BYTES = 2**27
_CHUNK_ROWS = 256
# Draws that are pushed through the network side by side.
_DRAWS_AT_ONCE = 8


class Network(eqx.Module):
    """`apply(params, x)`, of which the selected parameters are uncertain.

    Attributes:
        apply: the user's function, from all parameters and inputs `(n, ...)` to outputs `(n, K)`.
        parameters: all parameters and the selection.
    """

    apply: Callable[[PyTree, PyTree], Array] = eqx.field(static=True)
    parameters: Parameters

    @property
    def size(self) -> int:
        """Number p of uncertain parameters."""
        return self.parameters.size

    def outputs(self, x: PyTree) -> Float[Array, "n K"]:
        """The outputs at the estimate of the parameters.

        Raises:
            ValueError: there is no example, or leaves of x disagree about their number.
        """
        _some_examples(x)
        return _outputs(self, x)

    def jacobian_chunks(self, x: PyTree) -> Iterator[tuple[int, Float[Array, "c K p"]]]:
        """Jacobians of consecutive examples with their number, as many at a time as fit.

        All chunks have one shape, so that one program serves them: the last one is padded with
        copies of the last example.
        """
        total, parameters = _some_examples(x), self.parameters
        num_outputs = jax.eval_shape(_outputs, self, x).shape[1]
        row_bytes = parameters.size * parameters.structure.dtype.itemsize
        rows = min(_CHUNK_BYTES // row_bytes, _CHUNK_ROWS)
        chunk = min(max(rows // num_outputs, 1), total)
        for start in range(0, total, chunk):
            part = take(x, np.minimum(np.arange(start, start + chunk), total - 1))
            yield min(chunk, total - start), _jacobian(self, part)

    def linear_outputs(self, x: PyTree, draws: Float[Array, "S p"]) -> Float[Array, "S n K"]:
        """Outputs of the network linearised at the estimate, for draws of the parameters."""
        blocks = [_linear_outputs(self, x, block) for block in _blocks(draws)]
        return jnp.concatenate(blocks)[: draws.shape[0]]

    def outputs_of_draws(self, x: PyTree, draws: Float[Array, "S p"]) -> Float[Array, "S n K"]:
        """Outputs of the network itself, for draws of the parameters."""
        blocks = [_outputs_of_draws(self, x, block) for block in _blocks(draws)]
        return jnp.concatenate(blocks)[: draws.shape[0]]


def _some_examples(x: PyTree) -> int:
    total = num_examples(x)
    if total == 0:
        raise ValueError("x holds no example; pass at least one.")
    return total


def _blocks(draws: Array) -> list[Array]:
    """Draws in blocks of one shape; the last one is padded."""
    size = min(_DRAWS_AT_ONCE, draws.shape[0])
    padded = jnp.concatenate([draws, draws[: -draws.shape[0] % size]])
    return [padded[start : start + size] for start in range(0, len(padded), size)]


@eqx.filter_jit
def _outputs(network: Network, x: PyTree) -> Array:
    return outputs_of(network.apply, network.parameters, network.parameters.flat(), x)


@eqx.filter_jit
def _jacobian(network: Network, x: PyTree) -> Array:
    def one(flat: Array, example: Any) -> Array:
        batch = jax.tree.map(lambda leaf: leaf[None], example)
        return outputs_of(network.apply, network.parameters, flat, batch)[0]

    return jax.vmap(jax.jacrev(one), in_axes=(None, 0))(network.parameters.flat(), x)


@eqx.filter_jit
def _linear_outputs(network: Network, x: PyTree, draws: Array) -> Array:
    flat = network.parameters.flat()

    def evaluate(flat):
        return outputs_of(network.apply, network.parameters, flat, x)

    value, push = jax.linearize(evaluate, flat)
    return value[None, :, :] + jax.vmap(push)(draws - flat[None, :])


@eqx.filter_jit
def _outputs_of_draws(network: Network, x: PyTree, draws: Array) -> Array:
    def evaluate(flat):
        return outputs_of(network.apply, network.parameters, flat, x)

    return jax.vmap(evaluate)(draws)
