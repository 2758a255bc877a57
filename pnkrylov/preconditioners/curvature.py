"""Preconditioners of `sum_i J_i^T H_i J_i + alpha I` from a gradient or a few observations."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pnkrylov._arguments import check_array, check_counts, check_square
from pnkrylov.preconditioners._checks import as_scalar, check_finite, check_positive, refuse
from pnkrylov.preconditioners.low_rank import LowRank


def fully_linear(gradient: Float[Array, " d"], alpha: float | Float[Array, ""]) -> LowRank:
    """`P = g g^T + alpha I`: the curvature of the likelihood linearised as a whole.

    It can lift one eigenvalue only. Memory: `d + 2` numbers; set-up: one gradient.

    Args:
        gradient: Gradient g of the loss over all data, `(d,)`, at a point where it is not zero.
        alpha: Damping or prior precision, positive.

    Returns:
        The preconditioner.

    Raises:
        TypeError, ValueError: `gradient` is no real floating vector, or `alpha` no real number.
        NotFiniteError, NotPositiveDefiniteError: As `LowRank`.

    Source:
        Thesis, chapter on sampling, "Fully Linear GGN".
    """
    check_array(gradient, "gradient", "d")
    return LowRank(check_finite(gradient, "gradient")[None, :], alpha)


def sub_sampled(
    jacobians: Float[Array, "B O d"],
    hessians: Float[Array, "B O O"],
    *,
    alpha: float | Float[Array, ""],
    num_data: int | None = None,
    weights: Float[Array, " B"] | None = None,
) -> LowRank:
    """`P = sum_i w_i J_i^T H_i J_i + alpha I` over a sample of B of the N observations.

    The weights are `N / B` for a uniform sample. A trained classifier is sure of most of its data,
    whose Hessians nearly vanish: a sample in proportion to the traces of the Hessians, which cost a
    forward pass, is worth several times as many uniform observations (`choose_observations`).

    A sample overestimates the directions of its own observations and misses others. With fewer
    sampled rows `B O` than the curvature has large eigenvalues, it is no help; where it is, an
    alpha of about three times the damping balances the two.

    Memory: `min(B O, d) (d + 1) + 1` numbers. Set-up: `B O` vector-Jacobian products of one
    observation, the work of about `B O / (2 N)` products with the full curvature, and
    `O((B O)^2 d)`.

    Args:
        jacobians: Jacobian of the outputs of each sampled observation, `(B, O, d)`.
        hessians: Hessian of the negative log-likelihood in the outputs, `(B, O, O)`, positive
            semi-definite; identity matrices times the noise precision for a Gaussian.
        alpha: Damping or prior precision, positive, or a multiple of it.
        num_data: N, the number of observations behind the operator, for a uniform sample.
        weights: Or the weight of each observation, `(B,)`, positive: the reciprocal of the
            probability with which it was sampled.

    Returns:
        The preconditioner.

    Raises:
        TypeError: An array is not of a real floating dtype, or `num_data` no int.
        ValueError: Shapes do not agree, `num_data < B`, or not exactly one of `num_data` and
            `weights` is given.
        NotFiniteError: An array is not finite.
        NotPositiveDefiniteError: A Hessian has a negative eigenvalue; `alpha` or a weight is not
            positive.

    Source:
        Thesis, chapter on sampling, "Sub-Sampling the Data"; METHOD.md, section 8. The weights go
        beyond them.
    """
    _check_curvature(jacobians, hessians)
    if num_data is not None:
        check_counts(num_data=num_data)
    count = jacobians.shape[0]
    if (num_data is None) == (weights is None):
        raise ValueError("Pass either num_data (a uniform sample) or weights.")
    if weights is None:
        if num_data is None or num_data < count:
            raise ValueError(
                f"num_data={num_data} is smaller than the {count} sampled observations; pass the "
                "number of observations behind the operator."
            )
        weights = jnp.full((count,), num_data / count, jacobians.dtype)
    if weights.shape != (count,):
        raise ValueError(f"weights has shape {weights.shape}, but {count} observations are given.")
    weights = check_positive(weights, "weights", "Pass reciprocals of sampling probabilities.")
    return LowRank(curvature_rows(jacobians * jnp.sqrt(weights)[:, None, None], hessians), alpha)


def choose_observations(
    scores: Float[Array, " N"], count: int, key: PRNGKeyArray
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """A sample of observations for `sub_sampled`, with probabilities in proportion to scores.

    Systematic sampling without replacement: observation i is included with the probability
    `min(1, c score_i)`, c such that these add up to `count`. The weighted sum over the sample is
    then unbiased for the sum over all data.

    Args:
        scores: Importance of each observation, not negative, `(N,)`: the traces of the Hessians in
            the outputs, `1 - sum_k p_k^2` for a softmax.
        count: B, the size of the sample, at most the number of positive scores.
        key: Random key.

    Returns:
        Indices `(B,)`, ascending, and weights `(B,)`, the reciprocals of the probabilities.

    Raises:
        TypeError, ValueError: `scores` is no real floating vector, or `count` no int between 1 and
            N.
        NotFiniteError: A score is not finite.
        NotPositiveDefiniteError: A score is negative, or fewer than `count` are positive.

    Source:
        Ours (docs/design.md); the preconditioners of METHOD.md section 8 are built from the sample.
    """
    check_array(scores, "scores", "N")
    check_counts(count=count)
    if not 1 <= count <= scores.shape[0]:
        raise ValueError(f"count={count} must lie between 1 and the {scores.shape[0]} scores.")
    scores = check_finite(scores, "scores")
    scores = refuse(scores, scores < 0, "The scores must not be negative", "Pass traces or norms.")
    positive = jnp.sum(scores > 0, dtype=jnp.int32)
    remedy = "Ask for fewer observations, or add a small number to every score."
    rule = f"At least count={count} scores must be positive"
    scores = refuse(positive, positive < count, rule, remedy, guarding=scores)

    def spread(_: Array, probabilities: Array) -> Array:
        # What certain inclusion cuts off goes to the others, in proportion.
        certain = probabilities >= 1
        rest = jnp.sum(jnp.where(certain, 0, probabilities))
        left = count - jnp.sum(certain, dtype=probabilities.dtype)
        factor = left / jnp.where(rest > 0, rest, 1)
        return jnp.where(certain, 1, jnp.minimum(probabilities * factor, 1))

    start = jnp.minimum(scores / jnp.sum(scores) * count, 1)
    probabilities = lax.fori_loop(0, 50, spread, start)
    edges = jnp.cumsum(probabilities)
    edges = edges * (count / edges[-1])
    points = jax.random.uniform(key, (), scores.dtype) + jnp.arange(count, dtype=scores.dtype)
    indices = jnp.searchsorted(edges, points, side="right")
    indices = jnp.minimum(indices, scores.shape[0] - 1).astype(jnp.int32)
    return indices, 1 / probabilities[indices]


def one_observation(
    jacobian: Float[Array, "O d"],
    hessian: Float[Array, "O O"],
    *,
    scale: float | Float[Array, ""],
    alpha: float | Float[Array, ""],
) -> LowRank:
    """`P = scale J^T H J + alpha I` of one observation, by the Woodbury identity in effect.

    Memory: `O (d + 1) + 1` numbers. Set-up: O vector-Jacobian products of one observation.

    Args:
        jacobian: Jacobian of the outputs, `(O, d)`.
        hessian: Hessian of the negative log-likelihood in the outputs, `(O, O)`; unlike in the
            thesis it may be singular, because no inverse of it is formed.
        scale: Positive factor; the number of observations if all were like this one.
        alpha: Damping or prior precision, positive.

    Returns:
        The preconditioner.

    Raises:
        TypeError, ValueError, NotFiniteError, NotPositiveDefiniteError: As `sub_sampled`; `scale`
            must be positive as well.

    Source:
        Thesis, chapter on sampling, "Using the Woodbury Matrix Identity".
    """
    check_array(jacobian, "jacobian", "O", "d")
    check_square(hessian, "hessian", "O")
    if len(jacobian) != len(hessian):
        raise ValueError(
            f"jacobian (O, d) and hessian (O, O) have the shapes {jacobian.shape} and "
            f"{hessian.shape}, which do not agree."
        )
    scale = as_scalar(scale, "scale", jacobian.dtype)
    scale = check_positive(scale, "scale", "Use the number of observations.")
    return LowRank(jnp.sqrt(scale) * curvature_rows(jacobian[None], hessian[None]), alpha)


def curvature_rows(
    jacobians: Float[Array, "B O d"], hessians: Float[Array, "B O O"]
) -> Float[Array, "rows d"]:
    """`H_i^{1/2} J_i` of all observations below each other, `(B O, d)`.

    Raises:
        NotFiniteError: An array is not finite.
        NotPositiveDefiniteError: A Hessian has a negative eigenvalue beyond rounding.
    """
    jacobians = check_finite(jacobians, "jacobians")
    values, vectors = jnp.linalg.eigh(check_finite(hessians, "hessians"))
    rounding = 100 * jnp.finfo(values.dtype).eps * jnp.max(jnp.abs(values))
    values = refuse(
        values,
        values < -rounding,
        "The eigenvalues of hessians must not be negative",
        "Use a likelihood that is log-concave in its outputs, or the Fisher information.",
    )
    roots = jnp.sqrt(jnp.maximum(values, 0))
    half = jnp.einsum("bpo,bo,bqo->bpq", vectors, roots, vectors)
    rows = jnp.einsum("bpo,bod->bpd", half, jacobians, precision=lax.Precision.HIGHEST)
    return rows.reshape(-1, jacobians.shape[2])


def _check_curvature(jacobians: Array, hessians: Array) -> None:
    check_array(jacobians, "jacobians", "B", "O", "d")
    check_array(hessians, "hessians", "B", "O", "O")
    expected = (*jacobians.shape[:2], jacobians.shape[1])
    if hessians.shape != expected:
        raise ValueError(
            f"jacobians (B, O, d) and hessians (B, O, O) have the shapes {jacobians.shape} and "
            f"{hessians.shape}, which do not agree."
        )
