"""A run: everything that was paid for, kept so that nothing is computed twice.

Beliefs are views of a run. Shifting, refining, saving and re-scaling start from it.
"""

import dataclasses
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pnkrylov._arguments import check_reals
from pnkrylov._structure import VectorStructure
from pnkrylov.basis import KrylovBasis, is_concrete
from pnkrylov.errors import (
    NotFiniteError,
    NotPositiveDefiniteError,
    NotSymmetricError,
    PnkrylovError,
)
from pnkrylov.operators import SPDOperator, check_symmetric, symmetry_tolerance
from pnkrylov.preconditioners import PreconditionedOperator, Preconditioner
from pnkrylov.probes import PROBE_TOLERANCE, Probes, TraceProbes, run_trace_probes
from pnkrylov.results import RESULTS
from pnkrylov.tridiagonal import Tridiagonal


class Run(eqx.Module):
    """One Lanczos run, its probes, and their price.

    Attributes:
        basis: the Lanczos basis, look-ahead included, of the unshifted operator.
        level: m, where the look-ahead begins and where the probes were projected.
        probes: random probes in the complement of level m, or None.
        asymmetry: what the symmetry probe measured, or -1.
        num_matvecs: all products that were spent.
        structure: the user's vectors.
        preconditioner: P if the run was on `P^-1/2 A P^-1/2`, or None.
        trace_probes: with a preconditioner, probes for the trace of the original A^-1, or None.
    """

    basis: KrylovBasis
    level: Int[Array, ""]
    probes: Probes | None
    asymmetry: Float[Array, ""]
    num_matvecs: Int[Array, ""]
    structure: VectorStructure = eqx.field(static=True)
    preconditioner: Preconditioner | None = None
    trace_probes: TraceProbes | None = None

    def map(self, vectors: Float[Array, "..."]) -> Float[Array, "..."]:
        """`P^-1/2 v` for a vector or for rows: a right-hand side inwards, a solution outwards."""
        return vectors if self.preconditioner is None else self.preconditioner.inv_sqrt_mv(vectors)

    def tridiagonal(self, shift: Float[Array, ""]) -> Tridiagonal:
        """The factored T, shifted."""
        return Tridiagonal.of(self.basis, shift)

    def result(
        self,
        rhs: Float[Array, " d"],
        shift: Float[Array, ""],
        lower_bound: Float[Array, ""] | None,
        ritz_range: Float[Array, "2"],
    ) -> RESULTS:
        """The result code: the first thing that is wrong, in the order of cause and effect.

        `ritz_range` is that of everything that was run, probes included.
        """
        finite = jnp.all(jnp.isfinite(self.basis.alpha)) & jnp.all(jnp.isfinite(self.basis.beta))
        if self.probes is not None:
            finite = finite & jnp.all(jnp.isfinite(self.probes.alpha))
        return first_failure(
            given=jnp.all(jnp.isfinite(rhs)),
            finite=finite,
            symmetric=~(self.asymmetry > symmetry_tolerance(self.structure)),
            nothing=self.basis.filled == 0,
            ritz_range=ritz_range,
            lower_bound=None if lower_bound is None else lower_bound + shift,
        )

    def _smallest_of_probes(self, shift: Array) -> Array:
        if self.probes is None:
            return jnp.asarray(jnp.inf, self.basis.dtype)
        return self.probes.ritz_range(shift, jnp.ones_like(shift))[0]

    def raise_unless(self, result: RESULTS, shift: Array, lower_bound: Array | None) -> None:
        """Raises the error of a failed run, with the measured value (concrete values only)."""
        if bool(jnp.all(result == RESULTS.successful)):
            return
        smallest, largest = (float(x) for x in self.tridiagonal(shift).ritz_range())
        smallest = min(smallest, float(self._smallest_of_probes(shift)))
        raise_failure(
            result,
            given="The mean, right-hand side or start vector",
            asymmetry=self.asymmetry,
            structure=self.structure,
            ritz_range=(smallest, largest),
            lower_bound=lower_bound,
            shift=shift,
        )


def first_failure(
    *,
    given: Array,
    finite: Array,
    symmetric: Array,
    nothing: Array,
    ritz_range: Array,
    lower_bound: Array | None,
) -> RESULTS:
    """The result code: the first thing that is wrong, in the order of cause and effect.

    Args:
        given: whether what the user gave is finite.
        finite: whether the coefficients are.
        symmetric: whether the symmetry check passed.
        nothing: whether there was nothing to run on.
        ritz_range: smallest and largest Ritz value, shift included.
        lower_bound: of the spectrum, shift included, or None.
    """
    smallest, largest = ritz_range
    eps = jnp.finfo(ritz_range.dtype).eps
    # Ritz values carry errors of a few eps ||A||: below that A may as well be singular.
    definite = (smallest > 10 * eps * largest) | nothing
    result = RESULTS.successful
    if lower_bound is not None:
        # A Ritz value may touch the spectrum's edge; rounding must not refuse it.
        fine = (lower_bound > 0) & (lower_bound <= smallest + 10 * eps * largest) | nothing
        result = RESULTS.where(fine, result, RESULTS.bad_lower_bound)
    result = RESULTS.where(definite, result, RESULTS.not_positive_definite)
    result = RESULTS.where(symmetric, result, RESULTS.not_symmetric)
    result = RESULTS.where(finite, result, RESULTS.nonfinite_product)
    return RESULTS.where(given, result, RESULTS.nonfinite_input)


def raise_failure(
    result: RESULTS,
    *,
    given: str,
    asymmetry: Array,
    structure: VectorStructure,
    ritz_range: tuple[float, float],
    lower_bound: Array | None,
    shift: Array,
) -> NoReturn:
    """Raises the error of a failed run, with the measured values.

    Args:
        result: its code, not a success.
        given: what the message calls the user's vectors.
        asymmetry: what the symmetry check measured.
        structure: the user's vectors.
        ritz_range: smallest and largest Ritz value, shift included.
        lower_bound: of the spectrum, unshifted, or None.
        shift: alpha.
    """
    smallest, largest = ritz_range
    if bool(result == RESULTS.nonfinite_input):
        raise NotFiniteError(NotFiniteError.message(given))
    if bool(result == RESULTS.nonfinite_product):
        raise NotFiniteError(NotFiniteError.message("A product A v"))
    if bool(result == RESULTS.not_symmetric):
        tolerance = symmetry_tolerance(structure)
        raise NotSymmetricError(NotSymmetricError.message(float(asymmetry), tolerance))
    if bool(result == RESULTS.not_positive_definite):
        raise NotPositiveDefiniteError(
            NotPositiveDefiniteError.message(f"{smallest:.6g} (the largest is {largest:.6g})")
        )
    assert lower_bound is not None
    raise PnkrylovError(
        f"lower_bound={float(lower_bound):.6g} (plus shift {float(shift):.6g}) is not a lower "
        f"bound of the spectrum: it must be positive, and the smallest Ritz value is "
        f"{smallest:.6g}. Pass a smaller one, or none."
    )


def finish(belief: Any, *, throw: bool) -> Any:
    """Throws for a failed run, or hides its numbers: a failed run returns no plausible one."""
    if throw:
        if is_concrete(belief):
            bound = getattr(belief, "lower_bound", None)
            belief.run.raise_unless(belief.result, belief.alpha, bound)
            return belief
        return belief.result.error_if(belief, belief.result != RESULTS.successful)
    good = belief.result == RESULTS.successful

    def hide(leaf):
        return jnp.where(good, leaf, jnp.nan) if eqx.is_inexact_array(leaf) else leaf

    # Everything else that a belief computes is read off the run at its shift alpha.
    parts = ("mean_flat", "covariance", "rhs_covariance", "alpha", "error")
    names = [name for name in parts if hasattr(belief, name)]
    # Who looks for NaN by jax_debug_nans asked for a result code here, not for an exception.
    with jax.debug_nans(False):
        hidden = {name: jax.tree.map(hide, getattr(belief, name)) for name in names}
    return dataclasses.replace(belief, **hidden)


def probe_symmetry(
    operator: SPDOperator, key: PRNGKeyArray, *, wanted: bool
) -> tuple[Float[Array, ""], int]:
    """The asymmetry that two products show (-1 if not wanted), and the products spent."""
    if not wanted:
        return jnp.asarray(-1, operator.dtype), 0
    # Not inside of a program where a product leaves it (see `_outside`).
    outside = operator.runs_on_host() and is_concrete((operator, key))
    return (_asymmetry if outside else _compiled_asymmetry)(operator, key), 2


def _asymmetry(operator: SPDOperator, key: PRNGKeyArray) -> Float[Array, ""]:
    return check_symmetric(operator, key)[0]


_compiled_asymmetry = eqx.filter_jit(_asymmetry)


def with_trace_probes(
    operator: SPDOperator,
    run: Run,
    key: PRNGKeyArray,
    shift: Float[Array, ""],
    progress: bool,
) -> Run:
    """Adds what the trace of the original operator needs; nothing without a preconditioner."""
    if not isinstance(operator, PreconditionedOperator):
        return run
    assert run.probes is not None
    count = run.probes.num_probes
    trace_probes = run_trace_probes(
        operator,
        run.basis,
        run.level,
        key,
        count,
        run.probes.depth,
        tolerance=PROBE_TOLERANCE,
        shift=shift,
        driver=run.basis.driver,
        progress=progress,
    )
    spent = run.num_matvecs + count * trace_probes.probes.steps
    return dataclasses.replace(run, trace_probes=trace_probes, num_matvecs=spent)


def scalar(value: Any, name: str, dtype: np.dtype) -> Float[Array, ""]:
    """A user's real number as an array of the working dtype."""
    check_reals(**{name: value})
    if jnp.ndim(value) != 0:
        raise TypeError(f"{name} has shape {jnp.shape(value)}; it must be a single real number.")
    return jnp.asarray(value).astype(dtype)
