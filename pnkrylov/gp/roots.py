"""Square roots of `K + noise`, with an error that the noise level proves.

For `x^-1/2 = (2/pi) integral of (t^2 + x)^-1 dt`, m Lanczos steps from v leave
`||A^-1/2 v - ||v|| Q T^-1/2 e_1|| <= lambda_min^-1/2 ||r||`, r the residual of conjugate gradients
for `A x = v`: those of the shifted systems are smaller. The variance of the noise is a lower bound
of the spectrum, and the Gauss quadrature `||v||^2 e_1^T T^-1 e_1 <= ||A^-1/2 v||^2` makes the bound
relative. Unlike `pnkrylov.ciq`, nothing has to be found out about the spectrum, and the result is
never longer than the exact one.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pnkrylov.errors import PnkrylovError
from pnkrylov.krylov import is_concrete
from pnkrylov.operators import SPDOperator

_NOT_MET = (
    "The square root of K + noise was not found to the relative tolerance rtol={rtol} within "
    "max_steps={max_steps} Lanczos steps. Raise max_steps or rtol, or the noise variance, and "
    "check that the kernel is positive semidefinite."
)


class _Runs(eqx.Module):
    """k Lanczos runs side by side: vectors as rows, one run per column of the coefficients."""

    step: Int[Array, ""]
    basis: Float[Array, "m k n"]
    alpha: Float[Array, "m k"]
    beta: Float[Array, "m k"]
    pivot: Float[Array, " k"]
    residual: Float[Array, " k"]  # of conjugate gradients, over ||v||
    gauss: Float[Array, " k"]  # e_1^T T^-1 e_1
    alive: Bool[Array, " k"]


def square_root(
    operator: SPDOperator,
    rows: Float[Array, "k n"],
    floor: Float[Array, ""],
    ceiling: Float[Array, ""],
    *,
    forward: bool,
    rtol: float,
    max_steps: int,
) -> Float[Array, "k n"]:
    """`A^1/2 v` or `A^-1/2 v` for every row v, to a relative tolerance.

    Args:
        operator: A.
        rows: The vectors v, shape `(k, n)`. All k runs share their products; under `jax.vmap` over
            rows the whole batch does.
        floor: A positive lower bound of the spectrum of A.
        ceiling: An upper bound of it; only `forward` uses it.
        forward: `A^1/2` instead of `A^-1/2`.
        rtol: Largest error of each row, relative to its result.
        max_steps: Most Lanczos steps; the bases take `max_steps k n` numbers.

    Returns:
        The roots applied to the rows, shape `(k, n)`; inside `jit`, NaN where it failed. With
        `forward=False` no row is longer than the exact one. Both hold up to rounding, which may be
        `eps` times the condition number.

    Raises:
        PnkrylovError: The tolerance is not met, or A is not positive definite (outside `jit`).

    Source:
        Druskin and Knizhnerman (1991) for the method; Hestenes and Stiefel (1952) for the sums.
    """
    arrays, static = eqx.partition((operator, floor, ceiling), eqx.is_array)

    @jax.custom_batching.custom_vmap
    def run(arrays: Any, rows: Array) -> Array:
        operator, floor, ceiling = eqx.combine(arrays, static)
        return _square_root(operator, rows, floor, ceiling, forward, rtol, max_steps)

    @run.def_vmap
    def batched(size: int, is_batched: Any, arrays: Any, rows: Array) -> tuple[Array, bool]:
        if not any(jax.tree.leaves(is_batched[0])):
            return run(arrays, rows.reshape(-1, rows.shape[-1])).reshape(rows.shape), True
        mapped, fixed = eqx.partition((arrays, rows), tuple(is_batched))
        return jax.lax.map(lambda part: run(*eqx.combine(part, fixed)), mapped), True

    values = run(arrays, rows)
    if is_concrete(values) and np.any(np.isnan(np.asarray(values))):
        raise PnkrylovError(_NOT_MET.format(rtol=rtol, max_steps=max_steps))
    return values


@eqx.filter_jit
def _square_root(
    operator: SPDOperator,
    rows: Array,
    floor: Array,
    ceiling: Array,
    forward: bool,
    rtol: float,
    max_steps: int,
) -> Array:
    norms = jnp.linalg.norm(rows, axis=1)
    start = rows / jnp.where(norms > 0, norms, 1)[:, None]

    def error(runs: _Runs) -> Array:
        if forward:  # ||A^1/2 v||^2 is the first diagonal entry of T
            return runs.residual * jnp.sqrt(ceiling / runs.alpha[0])
        return runs.residual / jnp.sqrt(floor * runs.gauss)

    def unfinished(runs: _Runs) -> Array:
        met = (runs.step > 0) & jnp.all(error(runs) <= rtol)
        return ~met & (runs.step < max_steps)

    begun = _begin(start, max_steps)
    runs = jax.lax.while_loop(unfinished, lambda runs: _advance(operator, runs), begun)
    coefficients = _root_of_tridiagonal(runs.alpha, runs.beta, runs.step, floor, forward)
    values = jnp.einsum("km,mkn->kn", coefficients, runs.basis, precision=jax.lax.Precision.HIGHEST)
    # No `error_if`: several of its host callbacks in one program were seen to lock up XLA on CPU.
    return jnp.where((error(runs) <= rtol)[:, None], norms[:, None] * values, jnp.nan)


def _begin(start: Float[Array, "k n"], max_steps: int) -> _Runs:
    count, dtype = len(start), start.dtype
    ones = jnp.ones((count,), dtype)
    return _Runs(
        step=jnp.zeros((), jnp.int32),
        basis=jnp.zeros((max_steps, *start.shape), dtype).at[0].set(start),
        alpha=jnp.zeros((max_steps, count), dtype),
        beta=jnp.zeros((max_steps, count), dtype),
        pivot=ones,
        residual=ones,
        gauss=jnp.zeros((count,), dtype),
        alive=jnp.any(start != 0, axis=1),
    )


def _advance(operator: SPDOperator, runs: _Runs) -> _Runs:
    step, highest = runs.step, jax.lax.Precision.HIGHEST
    current = runs.basis[step]
    product = operator.block_mv(current)
    # A run that has ended continues as a decoupled 1 on the diagonal.
    alpha = jnp.where(runs.alive, jnp.sum(current * product, axis=1), 1)
    for _ in range(2):  # two Gram-Schmidt passes; rows to come are zero
        inside = jnp.einsum("mkn,kn->mk", runs.basis, product, precision=highest)
        product = product - jnp.einsum("mk,mkn->kn", inside, runs.basis, precision=highest)
    beta = jnp.linalg.norm(product, axis=1)
    before = jnp.where(step > 0, runs.beta[jnp.maximum(step - 1, 0)], 0)
    pivot = alpha - before**2 / runs.pivot
    diagonal = runs.alpha.at[step].set(alpha)
    alive = runs.alive & (beta > 10 * jnp.finfo(beta.dtype).eps * jnp.max(diagonal, axis=0))
    beta = jnp.where(alive, beta, 0)
    following = product / jnp.where(alive, beta, 1)[:, None]
    following = jnp.where(alive[:, None], following, 0)
    return _Runs(
        step=step + 1,
        basis=runs.basis.at[step + 1].set(following, mode="drop"),
        alpha=diagonal,
        beta=runs.beta.at[step].set(beta),
        pivot=pivot,
        # NaN, which never meets a tolerance, where A turns out not to be positive definite.
        residual=jnp.where(pivot > 0, runs.residual * beta / pivot, jnp.nan),
        gauss=runs.gauss + runs.residual**2 / pivot,
        alive=alive,
    )


def _root_of_tridiagonal(
    alpha: Float[Array, "m k"], beta: Float[Array, "m k"], steps: Array, floor: Array, forward: bool
) -> Float[Array, "k m"]:
    """`T^1/2 e_1` or `T^-1/2 e_1` of k tridiagonals, of which `steps` rows are filled."""
    rows = jnp.arange(len(alpha), dtype=jnp.int32)
    alpha = jnp.where((rows < steps)[:, None], alpha, 1)
    off_diagonal = jnp.where((rows < steps - 1)[:, None], beta, 0)[:-1]

    def root(alpha: Array, off_diagonal: Array) -> Array:
        matrix = jnp.diag(alpha) + jnp.diag(off_diagonal, 1) + jnp.diag(off_diagonal, -1)
        eigenvalues, vectors = jnp.linalg.eigh(matrix)
        # Ritz values lie above the floor; rounding may push them below.
        powers = jnp.sqrt(jnp.maximum(eigenvalues, floor))
        powers = powers if forward else 1 / powers
        return jnp.matmul(vectors, powers * vectors[0], precision=jax.lax.Precision.HIGHEST)

    return jax.vmap(root, in_axes=1)(alpha, off_diagonal)
