"""Which matrix stands for the curvature of the loss, and its product at one batch of data.

All but the Hessian have the form `sum_i J_i^T W_i J_i` with output weights `W_i = L_i L_i^T`: the
products linearise the model, the square-root rows `L_i^T J_i` give Gram and dense forms.
"""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov.laplace.likelihoods import Custom, Likelihood
from pnkrylov.laplace.models import num_examples, outputs_of, take
from pnkrylov.laplace.parameters import Parameters


class OutputWeights(eqx.Module):
    """The positive semi-definite K x K matrices `W_i`, one per example."""

    @abc.abstractmethod
    def mv(self, tangents: Float[Array, "n K"]) -> Float[Array, "n K"]:
        """Returns `W_i t_i`."""

    @abc.abstractmethod
    def root(self) -> Float[Array, "n K R"]:
        """Returns `L_i` with `L_i L_i^T = W_i`."""


class HessianWeights(OutputWeights):
    """The output Hessians of a likelihood."""

    likelihood: Likelihood
    outputs: Float[Array, "n K"]
    targets: Any

    def mv(self, tangents: Float[Array, "n K"]) -> Float[Array, "n K"]:
        """Returns `H_i t_i`."""
        return self.likelihood.hessian_mv(self.outputs, tangents, self.targets)

    def root(self) -> Float[Array, "n K R"]:
        """The closed-form square roots."""
        return self.likelihood.hessian_sqrt(self.outputs, self.targets)


class OuterProducts(OutputWeights):
    """Sums of outer products of stored vectors."""

    factors: Float[Array, "n K R"]

    def mv(self, tangents: Float[Array, "n K"]) -> Float[Array, "n K"]:
        """Returns `L_i (L_i^T t_i)`."""
        inner = jnp.sum(self.factors * tangents[:, :, None], axis=1)
        return jnp.sum(self.factors * inner[:, None, :], axis=2)

    def root(self) -> Float[Array, "n K R"]:
        """The vectors themselves."""
        return self.factors


class Kind(eqx.Module):
    """A choice of curvature matrix."""

    likelihood: eqx.AbstractVar[Likelihood]

    @abc.abstractmethod
    def weights(
        self, outputs: Float[Array, "n K"], targets: Any, offset: Array
    ) -> OutputWeights | None:
        """The output weights of a batch whose first example is number `offset`; None: Hessian."""

    @abc.abstractmethod
    def rank(self, num_outputs: int) -> int | None:
        """Number of square-root rows per example, or None if there are none."""

    def check(self, outputs: Float[Array, "n K"], targets: Any) -> None:
        """Checks outputs and targets of a batch (see `Likelihood.check`)."""
        self.likelihood.check(outputs, targets)


class GaussNewton(Kind):
    """`W_i = H_i`: the generalised Gauss-Newton matrix."""

    likelihood: Likelihood

    def weights(self, outputs: Float[Array, "n K"], targets: Any, offset: Array) -> HessianWeights:
        """The output Hessians."""
        return HessianWeights(self.likelihood, outputs, targets)

    def rank(self, num_outputs: int) -> int:
        """The rank of the output Hessians."""
        return self.likelihood.root_rank(num_outputs)

    def check(self, outputs: Float[Array, "n K"], targets: Any) -> None:
        """Refuses indefinite output Hessians too."""
        self.likelihood.check(outputs, targets)
        if isinstance(self.likelihood, Custom):
            self.likelihood.check_definite(outputs, targets)


class SampledFisher(Kind):
    """`W_i`: the mean of `g g^T` over targets drawn from the model, `g = d(-log p)/df`."""

    likelihood: Likelihood
    key: PRNGKeyArray
    num_samples: int = eqx.field(static=True)

    def weights(self, outputs: Float[Array, "n K"], targets: Any, offset: Array) -> OuterProducts:
        """Draws targets, one key per example: the same whatever the batches are."""

        def of_example(index, output):
            def gradient(key):
                target = self.likelihood.sample(key, output[None, :])
                return output_gradients(self.likelihood, output[None, :], target)[0]

            keys = jax.random.split(jax.random.fold_in(self.key, index), self.num_samples)
            return jax.vmap(gradient, out_axes=1)(keys)

        indices = offset + jnp.arange(outputs.shape[0], dtype=jnp.int32)
        return OuterProducts(jax.vmap(of_example)(indices, outputs) / self.num_samples**0.5)

    def rank(self, num_outputs: int) -> int:
        """One row per draw."""
        return self.num_samples


class EmpiricalFisher(Kind):
    """`W_i = g_i g_i^T` at the observed targets."""

    likelihood: Likelihood

    def weights(self, outputs: Float[Array, "n K"], targets: Any, offset: Array) -> OuterProducts:
        """The gradients of the losses."""
        return OuterProducts(output_gradients(self.likelihood, outputs, targets)[:, :, None])

    def rank(self, num_outputs: int) -> int:
        """One row per example."""
        return 1


class ExactHessian(Kind):
    """The Hessian of the loss, which may be indefinite."""

    likelihood: Likelihood

    def weights(self, outputs: Float[Array, "n K"], targets: Any, offset: Array) -> None:
        """There are none: the curvature of the model counts too."""

    def rank(self, num_outputs: int) -> None:
        """There are no square-root rows."""


def output_gradients(
    likelihood: Likelihood, outputs: Float[Array, "n K"], targets: Any
) -> Float[Array, "n K"]:
    """Gradients of `-log p(y_i | f_i)` with respect to `f_i`."""
    return jax.grad(lambda f: jnp.sum(likelihood.negative_log_density(f, targets)))(outputs)


class Problem(eqx.Module):
    """A model at its parameters, and the kind of curvature that is wanted."""

    apply: Callable[[PyTree, PyTree], Array]
    parameters: Parameters
    kind: Kind

    def evaluate(self, flat: Float[Array, " p"], inputs: PyTree) -> Float[Array, "n K"]:
        """Outputs of the model."""
        return outputs_of(self.apply, self.parameters, flat, inputs)

    def loss(self, flat: Float[Array, " p"], inputs: PyTree, targets: Any) -> Float[Array, ""]:
        """Negative log-likelihood, summed over a batch."""
        outputs = self.evaluate(flat, inputs)
        return jnp.sum(self.kind.likelihood.negative_log_density(outputs, targets))


class LinearMap(eqx.Module):
    """The curvature of one batch as a linear map, with everything that does not change stored.

    Residuals are leaves (of a `jax.tree_util.Partial`): closed over, XLA would fold them into the
    program (METHOD section 13).
    """

    tangent: Callable[[Array], Array]
    weights: OutputWeights | None

    def mv(self, vector: Float[Array, " p"]) -> Float[Array, " p"]:
        """Returns the product with one vector."""
        image = self.tangent(vector)
        if self.weights is None:
            return image
        (product,) = jax.linear_transpose(self.tangent, vector)(self.weights.mv(image))
        return product


def linear_map(problem: Problem, inputs: PyTree, targets: Any, offset: Array) -> LinearMap:
    """Linearises a problem at a batch.

    Args:
        problem: The problem.
        inputs: Inputs of the batch.
        targets: Its targets.
        offset: Number of its first example, int32 scalar.

    Returns:
        The map `v -> J^T W J v`, or `v -> H v`.
    """
    flat = problem.parameters.flat()
    if isinstance(problem.kind, ExactHessian):
        gradient = jax.grad(problem.loss)
        _, tangent = jax.linearize(lambda flat: gradient(flat, inputs, targets), flat)
        return LinearMap(tangent, None)
    outputs, tangent = jax.linearize(lambda flat: problem.evaluate(flat, inputs), flat)
    return LinearMap(tangent, problem.kind.weights(outputs, targets, offset))


linearise = eqx.filter_jit(linear_map)


@eqx.filter_jit
def outputs_at(apply: Callable, parameters: Parameters, inputs: PyTree) -> Float[Array, "n K"]:
    """Outputs of the model at its parameters; compiled once for all kinds and likelihoods."""
    return outputs_of(apply, parameters, parameters.flat(), inputs)


@eqx.filter_jit
def loss_and_gradient(
    problem: Problem, inputs: PyTree, targets: Any
) -> tuple[Float[Array, ""], Float[Array, " p"]]:
    """Summed loss of a batch and its gradient."""
    flat = problem.parameters.flat()
    return jax.value_and_grad(lambda flat: problem.loss(flat, inputs, targets))(flat)


@eqx.filter_jit
def map_product(linear: LinearMap, vectors: Float[Array, "*k p"]) -> Float[Array, "*k p"]:
    """The product with one vector `(p,)` or with the rows of `(k, p)`."""
    return linear.mv(vectors) if vectors.ndim == 1 else jax.vmap(linear.mv)(vectors)


@eqx.filter_jit
def batch_product(
    problem: Problem,
    inputs: PyTree,
    targets: Any,
    offset: Array,
    vectors: Float[Array, "*k p"],
) -> Float[Array, "*k p"]:
    """Linearises at a batch, multiplies with all vectors, and forgets the linearisation."""
    return map_product(linear_map(problem, inputs, targets, offset), vectors)


@eqx.filter_jit
def batch_rows(
    problem: Problem, inputs: PyTree, targets: Any, offset: Array
) -> Float[Array, "n R p"]:
    """Square-root rows `L_i^T J_i` of a batch: R vector-Jacobian products per example."""
    flat = problem.parameters.flat()
    weights = problem.kind.weights(problem.evaluate(flat, inputs), targets, offset)
    assert weights is not None

    def of_example(example, root):
        alone = jax.tree.map(lambda leaf: leaf[None], example)
        _, pull = jax.vjp(lambda flat: problem.evaluate(flat, alone)[0], flat)
        return jax.vmap(lambda cotangent: pull(cotangent)[0])(root.T)

    return jax.vmap(of_example)(inputs, weights.root())


# Rows are made for so many bytes of examples at a time. Measured by METHOD section 13: 200 images
# at once took 18 times as long as in chunks of 20, and 21 GB.
_CHUNK_BYTES = 2**25


def row_chunks(problem: Problem, inputs: PyTree, targets: Any, offset: int, num_outputs: int):
    """Yields the rows `(k R, p)` of a batch, chunk by chunk.

    The last chunk reaches back instead of being shorter, so that one program serves all; what it
    repeats is cut off.
    """
    n, size = num_examples(inputs), problem.parameters.size
    rank = problem.kind.rank(num_outputs)
    assert rank is not None
    row_bytes = rank * size * problem.parameters.structure.dtype.itemsize
    length = max(1, min(n, _CHUNK_BYTES // row_bytes))
    for start in range(0, n, length):
        begin = min(start, n - length)
        window = slice(begin, begin + length)
        index = jnp.asarray(offset + begin, jnp.int32)
        rows = batch_rows(problem, take(inputs, window), take(targets, window), index)
        yield rows[start - begin :].reshape(-1, size)
