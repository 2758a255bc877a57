"""Outcome of a square-root product: what went wrong, and the remedy."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from pnkrylov.ciq.spectrum import SpectralBounds
from pnkrylov.errors import NotFiniteError, NotPositiveDefiniteError, PnkrylovError
from pnkrylov.krylov import is_concrete


class ToleranceNotMetError(PnkrylovError):
    """Raised when a square-root product could not meet its tolerance, or cannot promise it."""


class CIQ_RESULTS(eqx.Enumeration):
    """Outcome of a square-root product."""

    successful = ""
    nonfinite = (
        "The right-hand side or a product A v contains NaN or infinity. Check the data behind "
        "them; if the operator overflows, scale it or use float64."
    )
    not_positive_definite = (
        "The operator is not positive definite: a Ritz value is not positive. Add a multiple of "
        "the identity that lifts the spectrum above zero (noise variance, damping, prior "
        "precision), or check the sign and the curvature that defines the operator."
    )
    bounds_violated = (
        "A Ritz value lies outside the bounds that were passed. Pass wider bounds, or none."
    )
    precision = (
        "The tolerance is below what rounding allows at this condition number. Use float64, a "
        "larger rtol, or a preconditioner."
    )
    bounds_not_certified = (
        "The smallest eigenvalue could not be bounded away from zero within the steps allowed. "
        "Raise max_steps (and max_basis_bytes for method='lanczos'), pass bounds= if you know them "
        "(a noise variance or a damping is a lower bound), use a preconditioner, or use float64."
    )
    not_converged = (
        "The error bound did not reach the tolerance within the steps allowed. Raise max_steps "
        "(and max_basis_bytes for method='lanczos'), use a preconditioner, or a larger rtol."
    )


class SquareRootSolution(eqx.Module):
    """A product with `K^{-1/2}` or `K^{1/2}`, and what is known about its error.

    Attributes:
        value: The product, structured like the right-hand sides.
        error_bound: `(k,)`, upper bound of the error in the 2-norm, relative to the exact product,
            quadrature included and rounding apart; infinite where nothing is known. (With a
            preconditioner: of `A~^{-1/2} b` with `A~ = L^-1 A L^-1`.)
        rounding: Relative error that rounding may add at this condition number (`attainable`).
        converged: `(k,)`, whether the tolerance is met for each right-hand side.
        iterations: `(k,)`, products after which each right-hand side met it; 0 if it did not.
        num_matvecs: Products with single vectors in all, probes and bounding run included.
        num_passes: Block products in all: how often the operator was applied.
        bounds: The interval that contains the spectrum.
        result: The outcome as a code.
        method: `"lanczos"` or `"ciq"`, the one that produced the value.
    """

    value: PyTree
    error_bound: Float[Array, " k"]
    rounding: Float[Array, ""]
    converged: Bool[Array, " k"]
    iterations: Int[Array, " k"]
    num_matvecs: Int[Array, ""]
    num_passes: Int[Array, ""]
    bounds: SpectralBounds
    result: CIQ_RESULTS
    method: str = eqx.field(static=True)


def attainable(bounds: SpectralBounds) -> Float[Array, ""]:
    """Relative error that rounding leaves in `K^{-1/2} b`, from the Ritz values.

    Products round at `eps ||K||`. That perturbs the smallest eigenvalue by a random part of
    `eps ||K||`, and its inverse square root by half of the relative change; the constant covers
    the roundings of the sum itself.
    """
    eps = jnp.finfo(bounds.upper.dtype).eps
    return eps * (10 + bounds.ritz_max / jnp.maximum(bounds.ritz_min, eps * bounds.upper) / 4)


def judge(
    *,
    finite: Bool[Array, ""],
    positive_definite: Bool[Array, ""],
    bracketed: Bool[Array, ""],
    precise: Bool[Array, ""],
    certified: Bool[Array, ""],
    converged: Bool[Array, ""],
) -> CIQ_RESULTS:
    """The first thing that went wrong, in order of severity."""
    result = CIQ_RESULTS.successful
    for fine, code in (
        (converged, CIQ_RESULTS.not_converged),
        (certified, CIQ_RESULTS.bounds_not_certified),
        (precise, CIQ_RESULTS.precision),
        (bracketed, CIQ_RESULTS.bounds_violated),
        (positive_definite, CIQ_RESULTS.not_positive_definite),
        (finite, CIQ_RESULTS.nonfinite),
    ):
        result = CIQ_RESULTS.where(fine, result, code)
    return result


def raise_unless_successful(solution: SquareRootSolution, rtol: float) -> SquareRootSolution:
    """Raises what the code says, naming the numbers; inside `jit`, when the value is computed."""
    failed = solution.result != CIQ_RESULTS.successful
    if not is_concrete(failed):
        checked = solution.result.error_if(solution.value, failed)
        return eqx.tree_at(lambda s: s.value, solution, checked)
    if not failed:
        return solution
    bounds = solution.bounds
    if solution.result == CIQ_RESULTS.nonfinite:
        raise NotFiniteError(NotFiniteError.message("b or a product A v"))
    if solution.result == CIQ_RESULTS.not_positive_definite:
        raise NotPositiveDefiniteError(NotPositiveDefiniteError.message(float(bounds.ritz_min)))
    raise ToleranceNotMetError(
        f"rtol={rtol:g} was not met: {CIQ_RESULTS[solution.result]} "
        f"Error bound {_worst(solution.error_bound)}, Ritz values {float(bounds.ritz_min):.3g} to "
        f"{float(bounds.ritz_max):.3g}, rounding allows {float(solution.rounding):.1e} in "
        f"{bounds.upper.dtype}, {int(solution.num_passes)} block products, "
        f"method={solution.method!r}."
    )


def _worst(error_bound: Any) -> str:
    worst = float(jnp.max(error_bound))
    return f"{worst:.2e}" if worst < float("inf") else "unknown"
