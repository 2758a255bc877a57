"""Pivoted Cholesky, greedy or random: a low-rank factor from a few rows of the operator."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._arguments import check_array
from pnkrylov.operators import SPDOperator, as_operator
from pnkrylov.preconditioners._checks import as_damping, check_rank, refuse
from pnkrylov.preconditioners.entries import (
    diagonal_cost,
    operator_diagonal,
    operator_row,
    row_cost,
)
from pnkrylov.preconditioners.low_rank import LowRank

_INDEFINITE = "The pivots of A - damping I must not be negative beyond rounding"
_INDEFINITE_REMEDY = "Pass a damping below the smallest eigenvalue of A (0 always is)."


def pivoted_cholesky(
    A: Any,
    rank: int,
    *,
    damping: float | Float[Array, ""] = 0.0,
    alpha: float | Float[Array, ""] | None = None,
    diagonal: Float[Array, " d"] | None = None,
    key: PRNGKeyArray | None = None,
    num_probes: int = 32,
    like: PyTree | None = None,
) -> LowRank:
    """`P = R^T R + alpha I`, `R^T R` the Cholesky factorisation of `A - damping I` to a rank.

    Pivots are the largest diagonal entries of what is left. Memory: `rank (d + 1) + 1` numbers.
    Set-up: `rank` rows of A, which cost nothing but reading where A is a dense matrix and one
    product each otherwise; the diagonal (`operator_diagonal`); `O(rank^2 d)`.

    Args:
        A: Anything that `as_operator` takes.
        rank: Number of pivots, 1 to d.
        damping: Known multiple of the identity in A (noise variance, prior precision).
        alpha: Multiple of the identity in P. By default the damping plus the mean of the diagonal
            that is left, which makes the traces of P and A agree.
        diagonal: Diagonal of A, if known; else `operator_diagonal` finds or estimates it. An
            estimate only guides the choice of pivots; their values are those of the rows.
        key: Random key for the estimate.
        num_probes: Products for the estimate.
        like: Example of a vector, as in `as_operator`.

    Returns:
        The preconditioner.

    Raises:
        TypeError, ValueError: As `as_operator`; `rank` is no int from 1 to d, or a key is needed.
        NotFiniteError: A row or the diagonal is not finite.
        NotPositiveDefiniteError: A pivot is negative beyond rounding, `damping` is negative, or
            `alpha` is not positive.

    Source:
        Harbrecht, Peters and Schneider (2012); thesis, chapter on sampling, "Pivoted Cholesky".
    """
    operator, diagonal, exact, spent = _prepare(A, rank, diagonal, key, num_probes, like)
    damping = as_damping(damping, operator.dtype)
    rows, left, worst = _factor(operator, diagonal, damping, None, rank, exact)
    return _preconditioner(rows, left, worst, damping, alpha, spent)


def randomly_pivoted_cholesky(
    A: Any,
    rank: int,
    key: PRNGKeyArray,
    *,
    damping: float | Float[Array, ""] = 0.0,
    alpha: float | Float[Array, ""] | None = None,
    diagonal: Float[Array, " d"] | None = None,
    num_probes: int = 32,
    like: PyTree | None = None,
) -> LowRank:
    """As `pivoted_cholesky`, with pivots drawn in proportion to the diagonal that is left.

    Greedy pivots can be fooled by outliers on the diagonal; random ones come close to the best
    approximation of their rank in expectation.

    Args:
        A: As in `pivoted_cholesky`.
        rank: As in `pivoted_cholesky`.
        key: Random key of the pivots (and of the diagonal's estimate).
        damping: As in `pivoted_cholesky`.
        alpha: As in `pivoted_cholesky`.
        diagonal: As in `pivoted_cholesky`.
        num_probes: As in `pivoted_cholesky`.
        like: As in `pivoted_cholesky`.

    Returns:
        The preconditioner.

    Raises:
        TypeError, ValueError, NotFiniteError, NotPositiveDefiniteError: As `pivoted_cholesky`.

    Source:
        Chen, Epperly, Tropp and Webber (2023).
    """
    diagonal_key, pivot_key = jax.random.split(key)
    operator, diagonal, exact, spent = _prepare(A, rank, diagonal, diagonal_key, num_probes, like)
    damping = as_damping(damping, operator.dtype)
    rows, left, worst = _factor(operator, diagonal, damping, pivot_key, rank, exact)
    return _preconditioner(rows, left, worst, damping, alpha, spent)


def _prepare(
    A: Any,
    rank: int,
    diagonal: Array | None,
    key: PRNGKeyArray | None,
    num_probes: int,
    like: PyTree | None,
) -> tuple[SPDOperator, Array, bool, int]:
    """The operator, its diagonal, whether that is exact, and what it and the rows cost."""
    operator = as_operator(A, like=like)
    check_rank(rank, operator.size)
    spent = rank * row_cost(operator)
    if diagonal is not None:
        check_array(diagonal, "diagonal", "d")
    if diagonal is None:
        estimate = operator_diagonal(A, key=key, num_probes=num_probes, like=like)
        cost = diagonal_cost(A, operator, num_probes)
        return operator, estimate.value, cost in (0, operator.size), spent + cost
    if diagonal.shape != (operator.size,):
        raise ValueError(f"diagonal has shape {diagonal.shape}, expected ({operator.size},).")
    return operator, diagonal, False, spent


@eqx.filter_jit
def _factor(
    operator: SPDOperator,
    diagonal: Float[Array, " d"],
    damping: Float[Array, ""],
    key: PRNGKeyArray | None,
    rank: int,
    exact: bool,
) -> tuple[Float[Array, "r d"], Float[Array, " d"], Float[Array, ""]]:
    """The factor, the diagonal that is left, and the most negative pivot over the largest one."""
    largest = jnp.max(jnp.abs(diagonal))
    rounding = 10 * rank * jnp.finfo(diagonal.dtype).eps * largest

    def add_row(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        rows, left, worst = carry
        pivot = _choose(left, key, index)
        row = operator_row(operator, pivot).at[pivot].add(-damping)
        row = row - jnp.matmul(rows[:, pivot], rows, precision=jax.lax.Precision.HIGHEST)
        value = row[pivot]
        # Below rounding nothing is left at this pivot: its row stays zero.
        usable = ~(value <= rounding)
        row = jnp.where(usable, row / jnp.sqrt(jnp.where(usable, value, 1)), 0)
        left = jnp.maximum(left - row**2, 0).at[pivot].set(0)
        return rows.at[index].set(row), left, jnp.minimum(worst, value / rounding)

    start = jnp.zeros((rank, diagonal.shape[0]), diagonal.dtype)
    left = jnp.maximum(diagonal - damping, 0)
    # An estimated entry may be negative by chance, and would never be a pivot.
    worst = jnp.min(diagonal - damping) / rounding if exact else jnp.zeros_like(rounding)
    return jax.lax.fori_loop(0, rank, add_row, (start, left, worst))


def _choose(left: Array, key: PRNGKeyArray | None, index: Array) -> Array:
    if key is None:
        return jnp.argmax(left)
    return jax.random.categorical(jax.random.fold_in(key, index), jnp.log(left))


def _preconditioner(
    rows: Array,
    left: Array,
    worst: Array,
    damping: Array,
    alpha: float | Float[Array, ""] | None,
    num_products: int,
) -> LowRank:
    rows = refuse(worst, worst < -1, _INDEFINITE, _INDEFINITE_REMEDY, guarding=rows)
    if alpha is None:
        # A complete factorisation leaves nothing, but is no more exact than rounding.
        rounding = jnp.finfo(rows.dtype).eps * jnp.max(jnp.sum(rows**2, axis=0))
        alpha = damping + jnp.maximum(jnp.mean(left), rounding)
    return LowRank(rows, alpha, num_products=num_products)
