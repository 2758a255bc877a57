"""Conjugate gradients in what a Lanczos run has left over."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pnkrylov._operator_types import SPDOperator
from pnkrylov.gp.remainder import edge
from pnkrylov.krylov import KrylovBasis
from pnkrylov.tridiagonal import Tridiagonal

_HIGHEST = jax.lax.Precision.HIGHEST


class _Iteration(eqx.Module):
    solution: Float[Array, "N n"]
    residual: Float[Array, "N n"]
    direction: Float[Array, "N n"]
    squares: Float[Array, " N"]
    steps: Int[Array, ""]


def deflated_solves(
    operator: SPDOperator,
    shift: Float[Array, ""],
    basis: KrylovBasis,
    tridiagonal: Tridiagonal,
    rows: Float[Array, "N n"],
    *,
    tolerance: float = 1e-3,
    max_steps: int = 200,
) -> tuple[Float[Array, "N n"], Int[Array, ""]]:
    """`(A^-1 - C) v` for rows v, with `A = operator + shift I` and the run's `C = Q T^-1 Q^T`.

    The residual of `C v` is orthogonal to the basis; conjugate gradients start there, with
    directions that stay A-orthogonal to it. They see the spectrum of the Schur complement only.

    Args:
        operator: what the run is on.
        shift: its shift.
        basis: the run; all of its rows deflate.
        tridiagonal: its T, with that shift.
        rows: right-hand sides, each with its own step lengths, one block product per step.
        tolerance: ends when every residual is this much smaller than that of `C v`.
        max_steps: most steps.

    Returns:
        The solutions, and the number of steps.

    Source:
        Saad, Yeung, Erhel and Guyomarc'h (2000), algorithm 3.3, with Lanczos vectors.
    """
    inside = tridiagonal.rows() < tridiagonal.filled
    vectors, following = basis.vectors, basis.next_vector
    parallel = edge(tridiagonal, tridiagonal.filled)
    along = jnp.matmul(parallel, vectors, precision=_HIGHEST)

    def project(block):
        coordinates = jnp.matmul(block, vectors.T, precision=_HIGHEST)
        return block - jnp.matmul(coordinates, vectors, precision=_HIGHEST)

    def conjugate(block):
        # Q^T A r is beta (q . r) e_m for r orthogonal to the basis: one direction to take out.
        return block - jnp.matmul(block, following, precision=_HIGHEST)[:, None] * along[None, :]

    coordinates = jnp.where(inside[None, :], jnp.matmul(rows, vectors.T, precision=_HIGHEST), 0)
    edges = jnp.matmul(coordinates, parallel, precision=_HIGHEST)
    start = project(project(rows)) - edges[:, None] * following[None, :]
    squares = jnp.sum(start**2, axis=1)
    goal = tolerance**2 * squares

    def unfinished(state):
        return jnp.any(state.squares > goal) & (state.steps < max_steps)

    def advance(state):
        image = operator.block_mv(state.direction) + shift * state.direction
        curvature = jnp.sum(state.direction * image, axis=1)
        going = (curvature > 0) & (state.squares > goal)
        length = jnp.where(going, state.squares / jnp.where(going, curvature, 1), 0)[:, None]
        residual = project(state.residual - length * image)
        squares = jnp.sum(residual**2, axis=1)
        ratio = squares / jnp.where(state.squares > 0, state.squares, 1)
        direction = conjugate(residual) + ratio[:, None] * state.direction
        solution = state.solution + length * state.direction
        return _Iteration(solution, residual, direction, squares, state.steps + 1)

    state = _Iteration(
        jnp.zeros_like(start), start, conjugate(start), squares, jnp.zeros((), jnp.int32)
    )
    state = jax.lax.while_loop(unfinished, advance, state)
    return state.solution, state.steps
