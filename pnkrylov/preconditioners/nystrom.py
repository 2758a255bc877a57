"""Randomised Nystrom approximation: one block product with a random block."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov.operators import SPDOperator, as_operator
from pnkrylov.preconditioners._checks import as_damping, check_rank, refuse
from pnkrylov.preconditioners.low_rank import LowRank


def nystrom(
    A: Any,
    rank: int,
    key: PRNGKeyArray,
    *,
    damping: float | Float[Array, ""] = 0.0,
    alpha: float | Float[Array, ""] | None = None,
    like: PyTree | None = None,
) -> LowRank:
    """`P = Nystrom approximation of (A - damping I) + alpha I`, in the stable (shifted) variant.

    By default alpha is the damping plus the smallest eigenvalue of the approximation, and the
    eigenvalues in its range are those of the approximation plus the damping: P never falls below
    A by more than what the approximation misses.

    Memory: `rank (d + 1) + 1` numbers. Set-up: `rank` products in one block; `O(rank^2 d)`.

    Args:
        A: Anything that `as_operator` takes.
        rank: Number of random vectors, 1 to d.
        key: Random key.
        damping: Known multiple of the identity in A (noise variance, prior precision).
        alpha: Multiple of the identity in P; P is then the approximation plus exactly this.
        like: Example of a vector, as in `as_operator`.

    Returns:
        The preconditioner.

    Raises:
        TypeError, ValueError: As `as_operator`; `rank` is no int from 1 to d.
        NotFiniteError: `damping` or `alpha` is not finite.
        NotPositiveDefiniteError: `A - damping I` is not positive semi-definite on the random
            block, `damping` is negative, or `alpha` is not positive.

    Source:
        Frangella, Tropp and Udell (2021), algorithm 2.1 and section 5.
    """
    operator = as_operator(A, like=like)
    check_rank(rank, operator.size)
    damping = as_damping(damping, operator.dtype)
    rows, shift, smallest = _sketch(operator, damping, key, rank)
    rows = refuse(
        smallest,
        ~(smallest > 0),
        "A - damping I must be positive semi-definite: on the random block, its smallest pivot "
        "over the shift that absorbs rounding must be positive",
        "Pass a damping below the smallest eigenvalue of A (0 always is), and check that A is "
        "positive definite and its products finite.",
        guarding=rows,
    )
    whole = LowRank(rows, 1.0 if alpha is None else alpha, num_products=rank)
    squares = jnp.maximum(whole.squares - shift, 0)
    if alpha is not None:
        return eqx.tree_at(lambda p: p.squares, whole, squares)
    least = jnp.min(jnp.where(squares > 0, squares, jnp.inf))
    least = jnp.where(jnp.isfinite(least), least, 0)
    return eqx.tree_at(
        lambda p: (p.squares, p.alpha),
        whole,
        (jnp.maximum(squares - least, 0), damping + least),
    )


@eqx.filter_jit
def _sketch(
    operator: SPDOperator, damping: Array, key: PRNGKeyArray, rank: int
) -> tuple[Float[Array, "r d"], Float[Array, ""], Float[Array, ""]]:
    """Rows B of the shifted approximation `B^T B`, the shift, and the smallest pivot over it."""
    size, dtype = operator.size, operator.dtype
    block = jnp.linalg.qr(jax.random.normal(key, (size, rank), dtype))[0].T
    images = operator.block_mv(block) - damping * block
    # Absorbs the rounding of the products, so that the Cholesky factor below exists.
    shift = size**0.5 * jnp.finfo(dtype).eps * jnp.linalg.norm(images)
    images = images + shift * block
    inner = jnp.matmul(block, images.T, precision=jax.lax.Precision.HIGHEST)
    smallest = jnp.linalg.eigvalsh((inner + inner.T) / 2)[0] / shift
    factor = jnp.linalg.cholesky((inner + inner.T) / 2)
    return solve_triangular(factor, images, lower=True), shift, smallest
