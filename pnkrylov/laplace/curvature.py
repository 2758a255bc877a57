"""Curvature of a network's loss as operators on its parameters: GGN, Fisher, Hessian.

`L(theta) = -sum_i log p(y_i | f(x_i, theta))` is a sum over the data, not a mean, and the prior is
not in it: a run adds it as a shift. Models are any `apply(params, x)`: `params` any pytree, `x` a
batch of inputs, the result `(n, K)`. Passing the same function object again reuses what was
compiled for it; a fresh lambda compiles anew.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._arguments import check_positive_counts
from pnkrylov.laplace.kinds import (
    EmpiricalFisher,
    ExactHessian,
    GaussNewton,
    Kind,
    SampledFisher,
    linearise,
)
from pnkrylov.laplace.likelihoods import Likelihood
from pnkrylov.laplace.operators import (
    Curvature,
    InMemoryCurvature,
    RowsCurvature,
    Split,
    StreamedCurvature,
    StreamedProduct,
)
from pnkrylov.laplace.parameters import Mask, Parameters, select_parameters
from pnkrylov.laplace.passes import (
    Apply,
    check_pass,
    make_problem,
    scale_of,
    total_loss_and_gradient,
)

__all__ = [
    "Curvature",
    "Parameters",
    "empirical_fisher",
    "fisher",
    "fully_linear",
    "ggn",
    "gradient",
    "hessian",
    "loss",
    "select_parameters",
]


def ggn(
    apply: Apply,
    params: PyTree,
    data: Any,
    likelihood: Likelihood,
    *,
    batch_size: int | None = None,
    num_data: int | None = None,
    mask: Mask = None,
) -> Curvature:
    """The generalised Gauss-Newton matrix `sum_i J_i^T H_i J_i`.

    Args:
        apply: The model, `(params, x) -> outputs` with outputs `(n, K)`, or `(n,)` for K = 1. In
            evaluation mode, and independent over examples.
        params: Its parameters, any pytree. Leaves that are not floating arrays are constants.
        data: One of
            - a tuple `(x, y)` of arrays, examples first; x may be a pytree of arrays. The model is
              linearised once, which keeps its activations;
            - an iterable of such batches (a list, a data loader), or a function that starts a new
              pass. Nothing is kept; every product is a pass over the data.
        likelihood: p(y | f), see `pnkrylov.laplace.likelihoods`.
        batch_size: Cut arrays into batches of this size and treat them like a stream: less memory,
            more work per product.
        num_data: Number of examples that the data stand for: the sum is scaled by
            `num_data / n`. None: n itself.
        mask: Selects the parameters to act on (see `select_parameters`); the others are constants.

    Returns:
        A positive semi-definite operator on the flat vector of the selected parameters, `(p,)`.

    Raises:
        ValueError: Data are empty or of other shapes than the model or the likelihood expect; the
            model is in training mode (see `check_model`); `num_data` or `batch_size` is too small.
        TypeError: Dtypes, or kinds of arguments.
        NotFiniteError: An output or the loss is NaN or infinite.
        TargetError: A target lies outside the support of the likelihood.
        NotPositiveDefiniteError: A `Custom` likelihood is not log-concave at the data.

    Source:
        Schraudolph 2002; Martens 2020. Thesis, chapter "The Laplace Approximation".
    """
    return _curvature(apply, params, data, GaussNewton(likelihood), batch_size, num_data, mask)


def hessian(
    apply: Apply,
    params: PyTree,
    data: Any,
    likelihood: Likelihood,
    *,
    batch_size: int | None = None,
    num_data: int | None = None,
    mask: Mask = None,
) -> Curvature:
    """The exact Hessian of the summed loss.

    It is indefinite wherever training has not converged, and often where it has: a Lanczos run on
    it then raises `NotPositiveDefiniteError` with the Ritz value that proves it, unless the prior
    precision (the shift) outweighs the negative curvature. The GGN never does that.

    Args:
        apply: As in `ggn`.
        params: As in `ggn`.
        data: As in `ggn`.
        likelihood: As in `ggn`.
        batch_size: As in `ggn`.
        num_data: As in `ggn`.
        mask: As in `ggn`.

    Returns:
        A symmetric operator without square-root rows. Its dense form costs p products.

    Raises:
        ValueError: As in `ggn`.
        TypeError: As in `ggn`.
        NotFiniteError: As in `ggn`.
        TargetError: As in `ggn`.

    Source:
        METHOD.md section 9.
    """
    return _curvature(apply, params, data, ExactHessian(likelihood), batch_size, num_data, mask)


def fisher(
    apply: Apply,
    params: PyTree,
    data: Any,
    likelihood: Likelihood,
    *,
    key: PRNGKeyArray,
    num_samples: int = 1,
    batch_size: int | None = None,
    num_data: int | None = None,
    mask: Mask = None,
) -> Curvature:
    """The Fisher matrix with targets drawn from the model: an unbiased estimate of the GGN.

    `sum_i mean_s g_is g_is^T`, `g_is` the gradient of `-log p(y_is | f_i)` with `y_is` drawn from
    `p(y | f_i)`. Draws depend on `key` and the number of an example only: batches change nothing,
    but a stream must keep its order.

    Args:
        apply: As in `ggn`.
        params: As in `ggn`.
        data: As in `ggn`; targets are checked, but do not enter the matrix.
        likelihood: As in `ggn`; a `Custom` one needs its sampler.
        key: Random key.
        num_samples: Draws per example, each a square-root row.
        batch_size: As in `ggn`.
        num_data: As in `ggn`.
        mask: As in `ggn`.

    Returns:
        A positive semi-definite operator with `n * num_samples` square-root rows.

    Raises:
        ValueError: As in `ggn`, or `num_samples` is not positive.
        TypeError: As in `ggn`.
        NotFiniteError: As in `ggn`.
        TargetError: As in `ggn`.

    Source:
        Kunstner, Hennig and Balles 2019, equation (3).
    """
    check_positive_counts(num_samples=num_samples)
    kind = SampledFisher(likelihood, key, num_samples)
    return _curvature(apply, params, data, kind, batch_size, num_data, mask)


def empirical_fisher(
    apply: Apply,
    params: PyTree,
    data: Any,
    likelihood: Likelihood,
    *,
    batch_size: int | None = None,
    num_data: int | None = None,
    mask: Mask = None,
) -> Curvature:
    """The sum of outer products of the examples' loss gradients, `sum_i g_i g_i^T`.

    Not an estimate of the GGN: it vanishes where the model fits the data exactly (Kunstner, Hennig
    and Balles 2019).

    Args:
        apply: As in `ggn`.
        params: As in `ggn`.
        data: As in `ggn`.
        likelihood: As in `ggn`.
        batch_size: As in `ggn`.
        num_data: As in `ggn`.
        mask: As in `ggn`.

    Returns:
        A positive semi-definite operator with n square-root rows.

    Raises:
        ValueError: As in `ggn`.
        TypeError: As in `ggn`.
        NotFiniteError: As in `ggn`.
        TargetError: As in `ggn`.

    Source:
        METHOD.md section 9.
    """
    return _curvature(apply, params, data, EmpiricalFisher(likelihood), batch_size, num_data, mask)


def fully_linear(
    apply: Apply,
    params: PyTree,
    data: Any,
    likelihood: Likelihood,
    *,
    batch_size: int | None = None,
    num_data: int | None = None,
    mask: Mask = None,
) -> Curvature:
    """The GGN with the whole likelihood linearised: `g g^T`, g the gradient of the summed loss.

    Rank one, and zero at a maximum-likelihood estimate. With a subset of the data, g is scaled.

    Args:
        apply: As in `ggn`.
        params: As in `ggn`.
        data: As in `ggn`.
        likelihood: As in `ggn`.
        batch_size: As in `ggn`.
        num_data: As in `ggn`.
        mask: As in `ggn`.

    Returns:
        A positive semi-definite operator with one square-root row, `g^T`.

    Raises:
        ValueError: As in `ggn`.
        TypeError: As in `ggn`.
        NotFiniteError: As in `ggn`.
        TargetError: As in `ggn`.

    Source:
        Thesis, section "Practical Considerations for the GGN".
    """
    problem, batches = make_problem(
        apply, params, data, EmpiricalFisher(likelihood), batch_size, mask
    )
    total, slope, n, num_outputs = total_loss_and_gradient(problem, batches, params)
    scale = scale_of(num_data, n)
    return RowsCurvature(
        rows=scale * slope[None, :],
        parameters=problem.parameters,
        loss=scale * total,
        structure=problem.parameters.structure,
        num_outputs=num_outputs,
        num_examples=n,
        num_rows=1,
    )


def loss(
    apply: Apply,
    params: PyTree,
    data: Any,
    likelihood: Likelihood,
    *,
    batch_size: int | None = None,
    num_data: int | None = None,
) -> Float[Array, ""]:
    """The negative log-likelihood, summed over the data.

    Args:
        apply: As in `ggn`.
        params: As in `ggn`.
        data: As in `ggn`.
        likelihood: As in `ggn`.
        batch_size: As in `ggn`.
        num_data: As in `ggn`.

    Returns:
        A scalar. For data in memory, differentiable in the parameters.

    Raises:
        ValueError: As in `ggn`.
        TypeError: As in `ggn`.
        NotFiniteError: As in `ggn`.
        TargetError: As in `ggn`.

    Source:
        METHOD.md section 9.
    """
    problem, batches = make_problem(
        apply, params, data, EmpiricalFisher(likelihood), batch_size, None
    )
    total, n, _ = check_pass(problem, batches, params)
    return scale_of(num_data, n) * total


def gradient(
    apply: Apply,
    params: PyTree,
    data: Any,
    likelihood: Likelihood,
    *,
    batch_size: int | None = None,
    num_data: int | None = None,
    mask: Mask = None,
) -> PyTree:
    """The gradient of the summed negative log-likelihood.

    Args:
        apply: As in `ggn`.
        params: As in `ggn`.
        data: As in `ggn`.
        likelihood: As in `ggn`.
        batch_size: As in `ggn`.
        num_data: As in `ggn`.
        mask: As in `ggn`.

    Returns:
        A pytree with the structure of the selected parameters.

    Raises:
        ValueError: As in `ggn`.
        TypeError: As in `ggn`.
        NotFiniteError: As in `ggn`.
        TargetError: As in `ggn`.

    Source:
        METHOD.md section 9.
    """
    problem, batches = make_problem(
        apply, params, data, EmpiricalFisher(likelihood), batch_size, mask
    )
    _, slope, n, _ = total_loss_and_gradient(problem, batches, params)
    return problem.parameters.structure.unravel(scale_of(num_data, n) * slope)


def _curvature(
    apply: Apply,
    params: PyTree,
    data: Any,
    kind: Kind,
    batch_size: int | None,
    num_data: int | None,
    mask: Mask,
) -> Curvature:
    problem, batches = make_problem(apply, params, data, kind, batch_size, mask)
    total, n, num_outputs = check_pass(problem, batches, params)
    scale, rank = scale_of(num_data, n), kind.rank(num_outputs)
    common = {
        "loss": scale * total,
        "num_outputs": num_outputs,
        "structure": problem.parameters.structure,
        "num_examples": n,
        "num_rows": None if rank is None else n * rank,
    }
    if batches.in_memory is None:
        host = StreamedProduct(problem, batches, n, scale)
        return StreamedCurvature(host=host, **common)
    inputs, targets = batches.in_memory
    return InMemoryCurvature(
        linear=Split.of(linearise(problem, inputs, targets, jnp.zeros((), jnp.int32))),
        problem=Split.of((problem, inputs, targets)),
        parameters=problem.parameters,
        scale=jnp.asarray(scale, problem.parameters.structure.dtype),
        **common,
    )
