"""`K + noise` as an exact covariance: square roots and log-determinant that can be differentiated.

What a package that expects a Cholesky factor is given instead of one (`pnkrylov.interop`).
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from pnkrylov._structure import VectorStructure
from pnkrylov.beliefs import InverseBelief
from pnkrylov.gp.operator import KernelOperator, kernel_operator
from pnkrylov.gp.roots import square_root
from pnkrylov.inverse import inverse
from pnkrylov.krylov import is_concrete
from pnkrylov.operators import SPDOperator
from pnkrylov.preconditioners._checks import check_positive
from pnkrylov.tridiagonal import Tridiagonal


class NoisyKernelOperator(SPDOperator):
    """`K(X, X) + diag(noise)`, whose spectrum is bounded by the noise and the trace."""

    bare: KernelOperator
    noise: Float[Array, " n"]
    structure: VectorStructure = eqx.field(static=True)

    def mv(self, vector: Float[Array, " n"]) -> Float[Array, " n"]:
        """Returns `(K + noise) v`."""
        return self.block_mv(vector[None])[0]

    def block_mv(self, block: Float[Array, "k n"]) -> Float[Array, "k n"]:
        """Returns `(K + noise) v` for every row; the kernel is evaluated once for all."""
        return self.bare.block_mv(block) + self.noise[None, :] * block

    def diagonal(self) -> Float[Array, " n"]:
        """The variances `k(x_i, x_i) + noise_i`."""
        return self.bare.diagonal() + self.noise


class Factor(eqx.Module):
    """What stands in for a Cholesky factor of `A = K + noise`.

    Attributes:
        operator: A.
        belief: What one Lanczos run and probes know about its inverse: the log-determinant.
        probes: Random signs for the derivative of the log-determinant.
        rtol: Relative tolerance of square roots.
        max_steps: Most Lanczos steps of a square root.
    """

    operator: NoisyKernelOperator
    belief: InverseBelief
    probes: Float[Array, "N n"]
    rtol: float = eqx.field(static=True)
    max_steps: int = eqx.field(static=True)

    def inverse_root(self, rows: Float[Array, "k n"], *, transpose: bool) -> Float[Array, "k n"]:
        """`A^-1/2 v` for every row, no longer than exact; see `square_root` for errors.

        `transpose` changes derivatives only: with the same value in both calls,
        `inverse_root(inverse_root(v, transpose=False), transpose=True)` is `A^-1 v` and the squared
        norm of `inverse_root(v, transpose=False)` is `v^T A^-1 v`, derivatives included.
        """
        return _inverse_root((self.operator, rows), self.rtol, self.max_steps, transpose)

    def root(self, rows: Float[Array, "k n"]) -> Float[Array, "k n"]:
        """`A^1/2 v` for every row."""
        return _root((self.operator, rows), self.rtol, self.max_steps)

    def half_logdet(self) -> Float[Array, ""]:
        """Half the log-determinant of A, as the belief estimates it.

        Its derivative is exact on the resolved space and estimated by the probes outside it.
        """
        return _half_logdet(self.operator, self.belief, self.probes, self.rtol, self.max_steps)


def factor(
    kernel: Any,
    X: Any,
    noise: Float[Array, " n"],
    *,
    key: PRNGKeyArray | None = None,
    num_steps: int | None = None,
    num_probes: int = 8,
    probe_depth: int = 20,
    rtol: float | None = None,
    max_steps: int = 500,
    block_rows: int | None = None,
) -> Factor:
    """Prepares `K + diag(noise)`: one Lanczos run and probes, for the log-determinant.

    Args:
        kernel: As in `kernel_operator`.
        X: As in `kernel_operator`.
        noise: Noise variances, shape `(n,)`, positive.
        key: Random key of probes and start vectors, `jax.random.key(0)` by default: the same
            arguments give the same numbers.
        num_steps: Lanczos steps of the belief, as in `pnkrylov.inverse`.
        num_probes: Random probes for the log-determinant, and as many for its derivative.
        probe_depth: Most steps of each probe.
        rtol: Relative tolerance of square roots; 1e-9 in float64 and 1e-4 in float32 by default.
        max_steps: Most Lanczos steps of a square root, which keeps as many vectors.
        block_rows: As in `kernel_operator`.

    Returns:
        The stand-in for a Cholesky factor. While JAX traces, failures become NaN.

    Raises:
        TypeError, ValueError: As `kernel_operator` and `pnkrylov.inverse`.
        NotPositiveDefiniteError: A noise variance is not positive.
        PnkrylovError: As `pnkrylov.inverse`.
    """
    bare = kernel_operator(kernel, X, block_rows=block_rows)
    concrete = is_concrete((bare, noise))
    if concrete:
        remedy = "The noise variance bounds the spectrum from below: make it positive."
        noise = check_positive(noise, "noise", remedy)
    else:
        # No `error_if` in a program that also takes roots: see `square_root`.
        noise = jnp.where(noise > 0, noise, jnp.nan)
    if noise.dtype != bare.dtype:
        raise TypeError(f"noise has dtype {noise.dtype}, but X has dtype {bare.dtype}. Cast one.")
    operator = NoisyKernelOperator(bare=bare, noise=noise, structure=bare.structure)
    key = jax.random.key(0) if key is None else key
    belief = inverse(
        jax.lax.stop_gradient(operator),
        key=key,
        num_steps=num_steps,
        num_probes=num_probes,
        probe_depth=probe_depth,
        check_symmetric=False,
        throw=concrete,
    )
    assert isinstance(belief, InverseBelief)  # single vectors
    signs = jax.random.rademacher(key, (min(num_probes, bare.size), bare.size), bare.dtype)
    rtol = (1e-9 if bare.dtype == jnp.float64 else 1e-4) if rtol is None else rtol
    return Factor(operator, belief, signs, rtol, min(max_steps, bare.size))


# Packages ask for some L with L L^T = A, and only products of L with itself or its inverse are ever
# seen: any root does. The value below is the symmetric root. Its derivative would need a Sylvester
# equation; that of L = A_0^1/2 (I + A_0^-1/2 dA A_0^-1/2 / 2), another root of A near A_0 with the
# same value there, does not: d(L^-1 y) = -L^-1 dA A^-1 y / 2. This L is not symmetric, hence
# d(L^-T y) = -A^-1 dA L^-T y / 2 and d(L y) = dA L^-T y / 2.


def _apply_root(
    operator: NoisyKernelOperator, rows: Array, rtol: float, max_steps: int, *, forward: bool
) -> Array:
    floor, ceiling = jnp.min(operator.noise), jnp.sum(operator.diagonal())
    return square_root(
        operator, rows, floor, ceiling, forward=forward, rtol=rtol, max_steps=max_steps
    )


@eqx.filter_custom_vjp
def _inverse_root(inputs: Any, rtol: float, max_steps: int, transpose: bool) -> Array:
    operator, rows = inputs
    return _apply_root(operator, rows, rtol, max_steps, forward=False)


@_inverse_root.def_fwd
def _(perturbed, inputs, rtol, max_steps, transpose):
    solved = _inverse_root(inputs, rtol, max_steps, transpose)
    return solved, solved


@_inverse_root.def_bwd
def _(solved, cotangent, perturbed, inputs, rtol, max_steps, transpose):
    operator, _ = inputs
    if transpose:
        back = _apply_root(operator, cotangent, rtol, max_steps, forward=False)
        left = _apply_root(operator, back, rtol, max_steps, forward=False)
        return _of_quadratic_form(operator, -left / 2, solved), back
    both = jnp.concatenate([cotangent, solved])
    back, right = jnp.split(_apply_root(operator, both, rtol, max_steps, forward=False), 2)
    return _of_quadratic_form(operator, -back / 2, right), back


@eqx.filter_custom_vjp
def _root(inputs: Any, rtol: float, max_steps: int) -> Array:
    operator, rows = inputs
    return _apply_root(operator, rows, rtol, max_steps, forward=True)


@_root.def_fwd
def _(perturbed, inputs, rtol, max_steps):
    return _root(inputs, rtol, max_steps), None


@_root.def_bwd
def _(residuals, cotangent, perturbed, inputs, rtol, max_steps):
    operator, rows = inputs
    solved = _apply_root(operator, rows, rtol, max_steps, forward=False)
    back = _apply_root(operator, cotangent, rtol, max_steps, forward=True)
    return _of_quadratic_form(operator, cotangent / 2, solved), back


@eqx.filter_custom_vjp
def _half_logdet(
    operator: Any, belief: InverseBelief, probes: Array, rtol: float, max_steps: int
) -> Array:
    return belief.logdet().value / 2


@_half_logdet.def_fwd
def _(perturbed, operator, belief, probes, rtol, max_steps):
    return _half_logdet(operator, belief, probes, rtol, max_steps), None


@_half_logdet.def_bwd
def _(residuals, cotangent, perturbed, operator, belief, probes, rtol, max_steps):
    # d logdet = tr(A^-1 dA) = tr(C dA) + E[z^T (A^-1 - C) dA z] with C = Q T^-1 Q^T = R^T R.
    tridiagonal = Tridiagonal.of(belief.run.basis, jnp.zeros_like(belief.alpha))
    resolved = tridiagonal.factor_transpose_mv(belief.run.basis.vectors)
    resolved = resolved / jnp.sqrt(tridiagonal.unit)
    solved = probes
    for _ in range(2):
        solved = _apply_root(operator, solved, rtol, max_steps, forward=False)
    rest = solved - (probes @ resolved.T) @ resolved
    left = jnp.concatenate([resolved, rest / len(probes)])
    right = jnp.concatenate([resolved, probes])
    return _of_quadratic_form(operator, cotangent * left / 2, right)


def _of_quadratic_form(operator: SPDOperator, left: Array, right: Array) -> Any:
    """The derivative of `sum_i left_i^T A right_i` in everything that A depends on."""
    return eqx.filter_grad(lambda operator: jnp.sum(left * operator.block_mv(right)))(operator)
