"""Training with the evidence: parameters by an optimiser, prior and noise precision by MacKay."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree
from tqdm import tqdm

from pnkrylov._arguments import check_optimizer
from pnkrylov.budgets import check_counts, check_positive_counts
from pnkrylov.errors import NotFiniteError
from pnkrylov.laplace.batches import as_batch
from pnkrylov.laplace.fitting import Method, fit
from pnkrylov.laplace.kinds import ExactHessian
from pnkrylov.laplace.likelihoods import Gaussian, Likelihood
from pnkrylov.laplace.models import num_examples, take
from pnkrylov.laplace.passes import checked_batches, make_problem
from pnkrylov.laplace.posterior import LaplacePosterior
from pnkrylov.laplace.prior import check_precision


class Trained(eqx.Module):
    """What `marglik_train` returns.

    Attributes:
        params: the parameters with the highest log evidence that was seen.
        posterior: their posterior, prior and noise precision included.
        epochs: `(T,)`, after which the evidence was estimated.
        log_evidences: `(T,)`, the estimates.
        prior_precisions: `(T,)`, scalar prior precisions (geometric means) behind them.
        losses: `(E,)`, mean negative log-likelihood of each epoch's batches, per example.
    """

    params: PyTree
    posterior: LaplacePosterior
    epochs: np.ndarray
    log_evidences: np.ndarray
    prior_precisions: np.ndarray
    losses: np.ndarray


def marglik_train(
    apply: Callable[[PyTree, PyTree], Array],
    params: PyTree,
    data: tuple[PyTree, Any],
    *,
    likelihood: Likelihood,
    optimizer: Any,
    num_epochs: int,
    batch_size: int,
    key: PRNGKeyArray,
    evidence_every: int = 5,
    burn_in: int = 0,
    prior_precision: float = 1.0,
    per_layer: bool = False,
    method: Method = "auto",
    progress: bool = False,
    **options: Any,
) -> Trained:
    """Trains a network and, every few epochs, its prior and noise precision by the evidence.

    The parameters descend on `-log p(y | theta) + sum precision theta^2 / 2`. Every
    `evidence_every` epochs the posterior is fitted at the current parameters, and MacKay's
    fixed-point step moves the precisions: with `g_i = 1 - precision Var(theta_i)`, how far the
    data determine a parameter, `precision = sum g_i / sum theta_i^2` and, for Gaussian noise,
    `noise precision = (number of targets - sum g_i) / sum of squared residuals`.

    Args:
        apply: the model, as in `fit`.
        params: where training begins; leaves that are not floating arrays stay as they are.
        data: `(x, y)` in memory.
        likelihood: what the outputs say about y. The scalar precision of a `Gaussian` is learnt.
        optimizer: an optax optimiser (anything with `init(params)` and `update(gradient, state,
            params)`), for the loss per example.
        num_epochs: passes over the data.
        batch_size: examples per step; a shorter last batch is left out of its (shuffled) epoch.
        key: random key, for the order of the data and the posteriors.
        evidence_every: epochs between two estimates of the evidence; one is made at the end.
        burn_in: epochs before the first estimate.
        prior_precision: where its training begins.
        per_layer: learn one prior precision for each leaf of the parameters.
        method: how posteriors are made, as in `fit`.
        progress: show a progress bar.
        **options: further arguments of `fit`.

    Returns:
        The parameters and posterior with the highest evidence, and the history.

    Raises:
        TypeError, ValueError: as `fit`; a count is not positive, `optimizer` is none of optax, or
            there are fewer examples than `batch_size`.
        NotFiniteError: the loss of an epoch is not finite.

    Source:
        Immer et al. 2021 (online marginal likelihood); MacKay 1992 (the fixed point).
    """
    check_positive_counts(
        num_epochs=num_epochs, batch_size=batch_size, evidence_every=evidence_every
    )
    check_counts(burn_in=burn_in)
    check_optimizer(optimizer)
    check_precision(prior_precision, "prior_precision")
    x, y = jax.tree.map(jnp.asarray, as_batch(data))
    total = num_examples(x)
    if batch_size > total:
        raise ValueError(f"batch_size={batch_size} exceeds the {total} examples of the data.")
    # The checks of model, outputs and targets, before anything is trained.
    first = np.arange(batch_size)
    problem, batches = make_problem(
        apply, params, (take(x, first), y[first]), ExactHessian(likelihood), None, None
    )
    next(checked_batches(problem, batches, params))
    trainable, constant = eqx.partition(params, eqx.is_inexact_array)
    state = optimizer.init(trainable)
    precisions = jax.tree.map(
        lambda leaf: jnp.asarray(prior_precision, leaf.dtype), trainable
    )  # one per leaf; all alike unless per_layer
    history: list[tuple[int, float, float]] = []
    losses, best = [], None
    with tqdm(total=num_epochs, desc="Training", unit="epoch", disable=not progress) as bar:
        for epoch in range(num_epochs):
            order_key, fit_key = jax.random.split(jax.random.fold_in(key, epoch))
            order = np.asarray(jax.random.permutation(order_key, total))
            epoch_losses = []
            for start in range(0, total - batch_size + 1, batch_size):
                rows = order[start : start + batch_size]
                trainable, state, value = _step(
                    apply, constant, optimizer, trainable, state,
                    take(x, rows), y[rows], likelihood, precisions, total,
                )  # fmt: skip
                epoch_losses.append(value)
            losses.append(float(jnp.mean(jnp.stack(epoch_losses))))
            if not np.isfinite(losses[-1]):
                raise NotFiniteError(
                    f"The loss of epoch {epoch} is {losses[-1]}. Lower the learning rate, or check "
                    "the data for NaN."
                )
            bar.update()
            due = epoch >= burn_in and (epoch - burn_in) % evidence_every == evidence_every - 1
            if not due and epoch + 1 < num_epochs:
                continue
            posterior = fit(
                apply, eqx.combine(trainable, constant), (x, y), likelihood=likelihood,
                prior_precision=precisions if per_layer else jax.tree.leaves(precisions)[0],
                method=method, key=fit_key, **options,
            )  # fmt: skip
            evidence = float(posterior.log_evidence().value)
            history.append((epoch, evidence, float(posterior.prior_precision)))
            bar.set_postfix(loss=losses[-1], log_evidence=evidence)
            if best is None or evidence > best[0]:
                best = (evidence, posterior)
            precisions, likelihood = _fixed_point(posterior, trainable, precisions, per_layer)
    assert best is not None
    epochs, evidences, scalars = zip(*history, strict=True)
    return Trained(
        params=best[1].mean,
        posterior=best[1],
        epochs=np.array(epochs),
        log_evidences=np.array(evidences),
        prior_precisions=np.array(scalars),
        losses=np.array(losses),
    )


@eqx.filter_jit
def _step(
    apply: Callable,
    constant: PyTree,
    optimizer: Any,
    trainable: PyTree,
    state: PyTree,
    x: PyTree,
    y: Any,
    likelihood: Likelihood,
    precisions: PyTree,
    total: int,
) -> tuple[PyTree, PyTree, Array]:
    """One optimiser step on the negative log posterior per example."""

    def objective(trainable):
        outputs = apply(eqx.combine(trainable, constant), x)
        outputs = outputs.reshape(outputs.shape[0], -1)
        fit = jnp.mean(likelihood.negative_log_density(outputs, y))
        weights = jax.tree.map(lambda p, leaf: p * jnp.sum(leaf**2), precisions, trainable)
        prior = sum(jax.tree.leaves(weights)) / (2 * total)
        return fit + jnp.asarray(prior, fit.dtype), fit

    gradient, value = jax.grad(objective, has_aux=True)(trainable)
    updates, state = optimizer.update(gradient, state, trainable)
    return eqx.apply_updates(trainable, updates), state, value


def _fixed_point(
    posterior: LaplacePosterior, trainable: PyTree, precisions: PyTree, per_layer: bool
) -> tuple[PyTree, Likelihood]:
    """MacKay's step for the prior precisions and for scalar Gaussian noise."""
    determined = jax.tree.map(
        lambda precision, variance: jnp.maximum(jnp.sum(1 - precision * variance), 0),
        precisions,
        posterior.variance(),
    )
    energies = jax.tree.map(lambda leaf: jnp.sum(leaf**2), trainable)
    everything = sum(float(g) for g in jax.tree.leaves(determined))
    if per_layer:
        moved = jax.tree.map(_ratio, determined, energies)
    else:
        energy = sum(float(e) for e in jax.tree.leaves(energies))
        common = _ratio(np.asarray(everything), np.asarray(energy))
        moved = jax.tree.map(lambda p: jnp.asarray(common, p.dtype), precisions)
    likelihood = posterior.likelihood
    if isinstance(likelihood, Gaussian) and likelihood.precision.ndim == 0:
        free = float(posterior.num_targets) - everything
        squares = float(posterior.squared_error())
        if free > 0 and squares > 0:
            likelihood = Gaussian(jnp.asarray(free / squares, likelihood.precision.dtype))
    return moved, likelihood


def _ratio(determined: Any, energy: Any) -> Any:
    """`determined / energy`, kept where a layer of zeros or without data would leave no scale."""
    limits = 1e-6, 1e6
    safe = jnp.where(energy > 0, energy, 1)
    return jnp.clip(jnp.where(energy > 0, determined / safe, limits[1]), *limits)
