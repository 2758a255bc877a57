"""Diagonals and rows of an operator: exact where it stores them, else by products."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from pnkrylov._arguments import check_counts
from pnkrylov.estimate import Estimate
from pnkrylov.operators import EntryOperator, SparseOperator, SPDOperator, as_operator


def operator_diagonal(
    A: Any, *, key: PRNGKeyArray | None = None, num_probes: int = 32, like: PyTree | None = None
) -> Estimate:
    """The diagonal of an operator.

    Exact and free for dense and sparse matrices and lineax's diagonal operators; exact by d
    products with unit vectors where `num_probes >= d`. Otherwise the mean of `z * (A z)` over
    random signs z, whose entry i has the variance `sum_{j != i} A_ij^2 / num_probes`; the standard
    error is the sample's.

    Args:
        A: Anything that `as_operator` takes.
        key: Random key, for an operator that is known by products only.
        num_probes: Products to spend on such an operator, in one block.
        like: Example of a vector, as in `as_operator`.

    Returns:
        The flat diagonal `(d,)` as an `Estimate`, with its standard error (zero where exact).

    Raises:
        TypeError, ValueError: As `as_operator`; `key` is missing; `num_probes` is no int
            above 1.

    Source:
        Bekas, Kokiopoulou and Saad (2007), with random signs.
    """
    if isinstance(A, lx.DiagonalLinearOperator):
        return _exact(as_operator(A, like=like).ravel(A.diagonal), 0)
    operator = as_operator(A, like=like)
    check_counts(num_probes=num_probes)
    if stores_diagonal(operator):
        return _exact(stored_diagonal(operator), 0)
    size, dtype = operator.size, operator.dtype
    if num_probes >= size:
        return _exact(jnp.diagonal(operator.as_matrix()), size)
    if num_probes < 2:
        raise ValueError(f"num_probes={num_probes} gives no standard error; use at least 2.")
    if key is None:
        raise ValueError(
            "key is needed: this operator does not store its diagonal, which is estimated with "
            f"random signs. Pass key=, or num_probes={size} for the exact one."
        )
    signs = jax.random.rademacher(key, (num_probes, size), dtype)
    samples = signs * operator.block_mv(signs)
    error = jnp.std(samples, axis=0, ddof=1) / num_probes**0.5
    return Estimate(jnp.mean(samples, axis=0), error, jnp.asarray(num_probes, jnp.int32))


def _exact(diagonal: Array, num_products: int) -> Estimate:
    return Estimate(diagonal, jnp.zeros_like(diagonal), jnp.asarray(num_products, jnp.int32))


def stores_diagonal(operator: SPDOperator) -> bool:
    """Whether the diagonal can be read off without a product."""
    return isinstance(operator, EntryOperator | SparseOperator)


def stored_diagonal(operator: SPDOperator) -> Float[Array, " d"]:
    """The diagonal of an operator that stores it."""
    if isinstance(operator, EntryOperator):
        return operator.diagonal()
    assert isinstance(operator, SparseOperator)
    row, column = operator.coordinates.T
    entries = jnp.where(row == column, operator.entries, 0)
    return jnp.zeros((operator.size,), operator.dtype).at[row].add(entries)


def operator_row(operator: SPDOperator, index: Int[Array, ""]) -> Float[Array, " d"]:
    """Row `index`: read off where entries are known, else by a product with a unit vector."""
    if isinstance(operator, EntryOperator):
        return operator.row(index)
    return operator.mv(jnp.zeros((operator.size,), operator.dtype).at[index].set(1))


def row_cost(operator: SPDOperator) -> int:
    """Products that one row costs."""
    return 0 if isinstance(operator, EntryOperator) else 1


def diagonal_cost(A: Any, operator: SPDOperator, num_probes: int) -> int:
    """Products that `operator_diagonal` spends."""
    if isinstance(A, lx.DiagonalLinearOperator) or stores_diagonal(operator):
        return 0
    check_counts(num_probes=num_probes)
    return min(num_probes, operator.size)
