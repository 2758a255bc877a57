"""Hyperparameters by maximising the evidence."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from tqdm import tqdm

from pnkrylov._arguments import check_optimizer
from pnkrylov.budgets import check_counts, check_positive_counts
from pnkrylov.errors import NotFiniteError
from pnkrylov.gp.data import observe, shifted_by
from pnkrylov.gp.regression import GPBelief, condition
from pnkrylov.krylov import Interruptible
from pnkrylov.preconditioners import pivoted_cholesky


class Fitted(eqx.Module):
    """The best hyperparameters that were seen, and how they were found.

    Attributes:
        kernel: the kernel with the highest log evidence.
        noise: its noise variance or variances.
        belief: the belief at them.
        log_evidences: `(T,)`, of every iteration.
        standard_errors: `(T,)`, of those.
        gradient_errors: `(T,)`, norm of the gradient's error over norm of the gradient.
        best: the iteration that was best.
        interrupted: whether Ctrl-C ended the search.
    """

    kernel: PyTree
    noise: Float[Array, " *n"]
    belief: GPBelief
    log_evidences: np.ndarray
    standard_errors: np.ndarray
    gradient_errors: np.ndarray
    best: int
    interrupted: bool


def fit(
    kernel: PyTree,
    X: Array | np.ndarray,
    y: Array | np.ndarray,
    noise: float | Float[Array, " *n"],
    *,
    key: PRNGKeyArray,
    num_iterations: int = 50,
    optimizer: Any = None,
    log_scale: bool = True,
    preconditioner_rank: int = 0,
    progress: bool = False,
    **options: Any,
) -> Fitted:
    """Maximises the log evidence over the kernel's hyperparameters and the noise.

    Every iteration conditions anew, with the same random numbers, so that a smooth function is
    maximised: the estimate of the evidence for these probes. Gradients are those of
    `GPBelief.evidence_gradient`, with their errors.

    Args:
        kernel: where the search begins; its floating leaves are the hyperparameters.
        X: inputs, as in `condition`.
        y: targets.
        noise: noise variance at the beginning (zero stays zero); of several, a common factor is
            learnt.
        key: random key.
        num_iterations: steps of the optimiser.
        optimizer: an optax optimiser; `optax.adam(0.1)` by default.
        log_scale: optimise logarithms of the leaves, which must then be positive.
        preconditioner_rank: rank of a pivoted Cholesky preconditioner, made anew in every
            iteration; 0 for none.
        progress: show a progress bar. Ctrl-C ends the search after the iteration in progress; the
            best so far is returned.
        **options: further arguments of `condition`.

    Returns:
        The best iteration, and the history.

    Raises:
        ImportError: optax is not installed, and no optimiser was given.
        TypeError: as `condition`; `optimizer` is none of optax.
        ValueError: as `condition`; a hyperparameter is not positive, or the kernel has
            no hyperparameter.
        NotFiniteError: as `condition`; the evidence of the first iteration is not finite.
        NotPositiveDefiniteError: as `condition`.

    Source:
        METHOD.md section 11.
    """
    check_positive_counts(num_iterations=num_iterations)
    check_counts(preconditioner_rank=preconditioner_rank)
    if optimizer is None:
        optimizer = _default_optimizer()
    check_optimizer(optimizer)
    leaves = _leaves(kernel)
    if not leaves:
        raise ValueError(
            "kernel has no hyperparameters: pass a pytree with floating leaves, such as "
            "pnkrylov.gp.RBF(lengthscale=1.0) or an equinox.Module."
        )
    if log_scale and not all(np.all(np.asarray(leaf) > 0) for leaf in leaves):
        raise ValueError(
            "A hyperparameter of the kernel is not positive, and has no logarithm: pass "
            "log_scale=False, or write the kernel in terms of positive ones."
        )
    # Refused here by its name, not in the middle of a compiled iteration.
    data = observe(kernel, X, y, noise, options.get("mean"), options.get("block_rows"))
    search = _Search(kernel, jnp.asarray(X), jnp.asarray(y), data.noise, key, log_scale)
    search_options = {"preconditioner_rank": preconditioner_rank, **options}
    parameters = search.start()
    state = optimizer.init(parameters)
    history, best, interrupted = [], None, False
    with (
        Interruptible() as interrupt,
        tqdm(total=num_iterations, desc="Evidence", unit="step", disable=not progress) as bar,
    ):
        for iteration in range(num_iterations):
            value, error, gradient, gradient_error = _evaluate(search, parameters, search_options)
            if not np.isfinite(value):
                if best is None:
                    raise NotFiniteError(
                        f"The log evidence at the start is {value}: the kernel matrix plus noise "
                        "is not positive definite. Start with more noise, or use float64."
                    )
                break
            length = _norm(gradient)
            history.append((value, error, _norm(gradient_error) / length if length else np.inf))
            if best is None or value > best[0]:
                best = (value, iteration, parameters)
            bar.set_postfix(log_evidence=value, gradient_error=history[-1][2])
            bar.update()
            if interrupt.requested:
                interrupted = True
                break
            descent = jax.tree.map(jnp.negative, gradient)
            with jax.numpy_dtype_promotion("standard"):  # optax relies on it
                updates, state = optimizer.update(descent, state, parameters)
            parameters = eqx.apply_updates(parameters, updates)
    assert best is not None
    values, errors, gradient_errors = (np.array(column) for column in zip(*history, strict=True))
    kernel, noise = search.natural(best[2])
    return Fitted(
        kernel=kernel,
        noise=noise,
        belief=search.conditioned(best[2], **search_options),
        log_evidences=values,
        standard_errors=errors,
        gradient_errors=gradient_errors,
        best=best[1],
        interrupted=interrupted,
    )


class _Search(eqx.Module):
    """The problem, and what its parameters stand for: leaves of the kernel, a factor of the noise.

    Parameters are logarithms where `log_scale`; that of the noise always is.
    """

    kernel: PyTree
    inputs: Float[Array, " n *p"]
    targets: Float[Array, " n *k"]
    noise: Float[Array, " *n"]
    key: PRNGKeyArray
    log_scale: bool = eqx.field(static=True)

    def start(self) -> tuple[list[Array], Array]:
        """The parameters of the kernel that was given."""
        leaves = _leaves(self.kernel)
        if self.log_scale:
            leaves = [jnp.log(leaf) for leaf in leaves]
        return leaves, jnp.zeros((), self.inputs.dtype)

    def natural(self, parameters: tuple[list[Array], Array]) -> tuple[PyTree, Array]:
        """Kernel and noise."""
        leaves, factor = parameters
        leaves = [jnp.exp(leaf) for leaf in leaves] if self.log_scale else leaves
        own, rest = eqx.partition(self.kernel, eqx.is_inexact_array)
        own = jax.tree.unflatten(jax.tree.structure(own), leaves)
        return eqx.combine(own, rest), self.noise * jnp.exp(factor)

    def conditioned(
        self, parameters: tuple[list[Array], Array], *, preconditioner_rank: int, **options: Any
    ) -> GPBelief:
        """The belief at some parameters."""
        kernel, noise = self.natural(parameters)
        if preconditioner_rank:
            data = observe(kernel, self.inputs, self.targets, noise, None, None)
            matrix, level = data.kernel_matrix(), data.level()
            shifted = shifted_by(matrix, level)
            options["preconditioner"] = pivoted_cholesky(
                shifted, preconditioner_rank, damping=level
            )
        return condition(kernel, self.inputs, self.targets, noise, key=self.key, **options)


@eqx.filter_jit
def _compiled(search: _Search, parameters: tuple[list[Array], Array], options: dict) -> Any:
    # A failed run has the value NaN here.
    options = {**options, "driver": "compiled", "throw": False}
    belief = search.conditioned(parameters, **options)
    evidence, gradient = belief.log_evidence(), belief.evidence_gradient()
    kernel, noise = search.natural(parameters)
    values, errors = gradient.value, gradient.standard_error

    def by_parameter(derivatives):
        leaves = _leaves(derivatives.operator.kernel)
        if not search.log_scale:
            return leaves
        return [leaf * d for leaf, d in zip(_leaves(kernel), leaves, strict=True)]

    slopes = (by_parameter(values), jnp.sum(noise * values.noise))
    deviations = (by_parameter(errors), jnp.linalg.norm((noise * errors.noise).reshape(-1)))
    return evidence.value, evidence.standard_error, slopes, deviations


def _evaluate(
    search: _Search, parameters: tuple[list[Array], Array], options: dict
) -> tuple[float, float, Any, Any]:
    value, error, slopes, deviations = _compiled(search, parameters, options)
    return float(value), float(error), slopes, deviations


def _leaves(tree: PyTree) -> list[Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]


def _norm(tree: PyTree) -> float:
    return float(np.sqrt(sum(np.sum(np.asarray(leaf) ** 2) for leaf in jax.tree.leaves(tree))))


def _default_optimizer() -> Any:
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            "fit needs optax for its default optimizer: install it (pip install optax), or pass "
            "optimizer=, anything with optax's init and update."
        ) from error
    return optax.adam(0.1)
