"""The front door, `fit`: a trained network and its data -> a Laplace posterior."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from pnkrylov._arguments import check_positive_counts
from pnkrylov.beliefs import InverseBelief
from pnkrylov.inverse import inverse
from pnkrylov.krylov import Driver
from pnkrylov.laplace import baselines, eigen
from pnkrylov.laplace.batches import as_batches
from pnkrylov.laplace.choose import choose
from pnkrylov.laplace.covariances import (
    BeliefCovariance,
    PosteriorCovariance,
    PrecisionOperator,
    SampledCovariance,
)
from pnkrylov.laplace.curvature import (
    Curvature,
    empirical_fisher,
    fisher,
    fully_linear,
    ggn,
    hessian,
)
from pnkrylov.laplace.likelihoods import Likelihood
from pnkrylov.laplace.network import Network
from pnkrylov.laplace.operators import StreamedCurvature
from pnkrylov.laplace.parameters import Mask
from pnkrylov.laplace.posterior import LaplacePosterior
from pnkrylov.laplace.prior import Prior

Method = Literal["auto", "exact", "krylov", "ciq", "diagonal", "last-layer", "eigen", "subspace"]
METHODS = ("auto", "exact", "krylov", "ciq", "diagonal", "last-layer", "eigen", "subspace")
CURVATURES = {
    "ggn": ggn,
    "hessian": hessian,
    "fisher": fisher,
    "empirical-fisher": empirical_fisher,
    "fully-linear": fully_linear,
}


def fit(
    apply: Callable[[PyTree, PyTree], Array],
    params: PyTree,
    data: Any,
    *,
    likelihood: Likelihood,
    prior_precision: Any = 1.0,
    method: Method = "auto",
    curvature: str = "ggn",
    key: PRNGKeyArray | None = None,
    batch_size: int | None = None,
    num_data: int | None = None,
    mask: Mask = None,
    num_steps: int | None = None,
    num_probes: int = 8,
    rank: int = 100,
    rtol: float = 1e-3,
    num_draws: int = 256,
    max_bytes: int = 2**31,
    driver: Driver = "auto",
    progress: bool = False,
) -> LaplacePosterior:
    """The Laplace approximation of the posterior of a network's parameters.

    A Gaussian around `params` with the precision `G + prior precision`, where G is the curvature
    of the negative log-likelihood, summed over the data.

    Args:
        apply: the model, `(params, x) -> (n, K)`, in evaluation mode. Pass the same function
            again (not a new lambda) to reuse what was compiled for it.
        params: its trained parameters, any pytree of floating arrays (and constants).
        data: `(x, y)`, or batches of them (see `curvature.ggn`).
        likelihood: what the outputs say about y, for example `Categorical()`.
        prior_precision: 1 / variance of the Gaussian prior around zero: a positive number, or a
            pytree of numbers or arrays like `params` (or its outer part, one number per layer).
            If the network was trained with weight decay w on the *mean* loss, this is n w.
        method: how the covariance is made. `"exact"` needs the square root of the curvature in
            memory; `"krylov"` a Lanczos run; `"ciq"` draws by contour-integral quadrature;
            `"eigen"` the leading eigenpairs; `"diagonal"`, `"last-layer"` and `"subspace"` (Faller
            and Martin 2025) are cheaper approximations. `"auto"` takes exact, krylov or ciq by
            memory and predicted time, and says why in `reason`.
        curvature: `"ggn"`, `"hessian"` (may be indefinite), `"fisher"`, `"empirical-fisher"` or
            `"fully-linear"`.
        key: random key; needed by `"krylov"`, `"ciq"` and `"eigen"`. Without one, `"auto"` takes
            the exact form wherever it fits.
        batch_size: see `curvature.ggn`.
        num_data: number of examples that the data stand for; loss and curvature are scaled.
        mask: which parameters are uncertain (see `select_parameters`); the others stay fixed.
        num_steps: Lanczos steps of `"krylov"` and `"eigen"`; `min(p, 200)` by default.
        num_probes: random probes of `"krylov"`.
        rank: dimension of `"subspace"`.
        rtol: largest relative error of a draw by `"ciq"`.
        num_draws: draws by `"ciq"` that stand for its covariance.
        max_bytes: most memory that `"auto"` may plan with.
        driver: loop of the Lanczos runs (see `pnkrylov.lanczos`).
        progress: show progress bars.

    Returns:
        A `LaplacePosterior`.

    Raises:
        ValueError, TypeError: unknown or missing arguments; data, model and likelihood that do not
            fit; a prior precision that is not positive.
        NotFiniteError: outputs, loss or curvature are NaN or infinite.
        NotPositiveDefiniteError: the precision is indefinite (curvature `"hessian"`): train to a
            minimum, raise the prior precision, or use the GGN.

    Source:
        METHOD.md sections 9 and 12; thesis, chapter "The Laplace Approximation".
    """
    _check(method, curvature, num_steps, rank, num_draws)
    if method == "last-layer" and mask is None:
        mask = baselines.last_layer_mask(apply, params, _first_inputs(data))
    options = {"key": _needed(key, "curvature='fisher'")} if curvature == "fisher" else {}
    operator = CURVATURES[curvature](
        apply, params, data, likelihood,
        batch_size=batch_size, num_data=num_data, mask=mask, **options,
    )  # fmt: skip
    network = Network(apply, operator.parameters)
    prior = Prior.of(prior_precision, operator.parameters)
    steps = min(operator.size, 200) if num_steps is None else num_steps
    found, reason = method, ""
    if method == "auto":
        found, reason = choose(operator, steps, num_probes, max_bytes, has_key=key is not None)
    request = _Request(
        operator=operator,
        network=network,
        prior=prior,
        data=data,
        key=key,
        num_steps=steps,
        num_probes=num_probes,
        rank=rank,
        rtol=rtol,
        num_draws=num_draws,
        driver=driver,
        progress=progress,
    )
    examples = operator.num_examples if num_data is None else num_data
    return LaplacePosterior(
        network=network,
        likelihood=likelihood,
        prior=prior,
        covariance=_BUILDERS[found](request),
        loss=operator.loss,
        num_targets=jnp.asarray(examples * operator.num_outputs, operator.dtype),
        curvature_scale=jnp.ones((), operator.dtype),
        curvature=operator if found == "krylov" else None,
        method=found,
        reason=reason,
    )


@dataclasses.dataclass(frozen=True)
class _Request:
    """Everything that a covariance may be made from."""

    operator: Curvature
    network: Network
    prior: Prior
    data: Any
    key: PRNGKeyArray | None
    num_steps: int
    num_probes: int
    rank: int
    rtol: float
    num_draws: int
    driver: Driver
    progress: bool

    def required_key(self, method: str) -> PRNGKeyArray:
        return _needed(self.key, f"method={method!r}")


def _exact(request: _Request) -> PosteriorCovariance:
    operator, prior = request.operator, request.prior
    if operator.num_rows is not None and operator.num_rows < operator.size:
        rows = operator.square_root_rows()
        return eigen.exact_from_rows(rows, prior.root, prior.precision)
    return eigen.exact_from_matrix(operator.as_matrix(), prior.root, prior.precision)


def _krylov(request: _Request) -> PosteriorCovariance:
    prior = request.prior
    belief = inverse(
        PrecisionOperator(request.operator, prior.root),
        key=request.required_key("krylov"),
        num_steps=request.num_steps,
        num_probes=request.num_probes,
        shift=prior.precision,
        driver=_driver(request),
        progress=request.progress,
    )
    assert isinstance(belief, InverseBelief)  # single vectors
    return BeliefCovariance.of(belief)


def _ciq(request: _Request) -> PosteriorCovariance:
    prior, key = request.prior, request.required_key("ciq")
    precision = PrecisionOperator(request.operator, prior.root, prior.precision)
    return SampledCovariance.of(precision, key, request.num_draws, request.rtol)


def _eigen(request: _Request) -> PosteriorCovariance:
    return eigen.leading(
        request.operator,
        request.prior.root,
        request.prior.precision,
        key=request.required_key("eigen"),
        num_steps=request.num_steps,
        driver=_driver(request),
        progress=request.progress,
    )


def _diagonal(request: _Request) -> PosteriorCovariance:
    prior = request.prior
    return baselines.diagonal(request.operator.diagonal(), prior.root, prior.precision)


def _subspace(request: _Request) -> PosteriorCovariance:
    return baselines.subspace(
        request.operator,
        request.operator.diagonal(),
        request.network,
        _first_inputs(request.data),
        request.prior.root,
        request.prior.precision,
        rank=request.rank,
    )


_BUILDERS = {
    "exact": _exact,
    "last-layer": _exact,
    "krylov": _krylov,
    "ciq": _ciq,
    "diagonal": _diagonal,
    "eigen": _eigen,
    "subspace": _subspace,
}


def _driver(request: _Request) -> Driver:
    # A stream goes through its batches in Python: there is nothing for XLA to compile a loop of.
    if request.driver == "auto" and isinstance(request.operator, StreamedCurvature):
        return "host"
    return request.driver


def _first_inputs(data: Any) -> PyTree:
    """The inputs of the first batch; all of them, where data are in memory."""
    for _, inputs, _ in as_batches(data):
        return inputs
    raise ValueError("data is empty: it has no batch.")


def _check(method: str, curvature: str, num_steps: int | None, rank: int, num_draws: int) -> None:
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown: use one of {', '.join(METHODS)}.")
    if curvature not in CURVATURES:
        names = ", ".join(CURVATURES)
        raise ValueError(f"curvature={curvature!r} is unknown: use one of {names}.")
    for name, value in (("num_steps", num_steps), ("rank", rank), ("num_draws", num_draws)):
        if value is not None:
            check_positive_counts(**{name: value})


def _needed(key: PRNGKeyArray | None, what: str) -> PRNGKeyArray:
    if key is None:
        raise TypeError(
            f"key is missing: {what} is random. Pass, for example, key=jax.random.key(0)."
        )
    return key
