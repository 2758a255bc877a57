"""How far the combined solution `sum_q w_q (t_q I + K)^-1 b` is from `K^{-1/2} b`: scalars only.

For one right-hand side with MINRES residuals `r_q` of the shifted systems,

    || sum_q w_q c_q - sum_q w_q (t_q I + K)^-1 b ||  <=  sum_q w_q ||r_q|| / (t_q + lambda_min),

because each error is `(t_q I + K)^-1 r_q`. The same bound holds for the Galerkin solutions of
Lanczos-FA: their errors are at most those of MINRES in the 2-norm (Hestenes and Stiefel 1952,
theorem 7:5). It is relative to `||K^{-1/2} b||`, whose square is at least the Gauss quadrature
`||b||^2 e_1^T T^-1 e_1`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pnkrylov.ciq.quadrature import Quadrature
from pnkrylov.ciq.recurrence import Pivots, RotatedColumn, Rotations, rotate

# Shares of the tolerance: the quadrature converges fast, the iteration gets the rest.
QUADRATURE_SHARE = 0.1
SOLVER_SHARE = 1 - QUADRATURE_SHARE


class Progress(eqx.Module):
    """Factorisations of the shifted tridiagonals of `k` right-hand sides, step by step."""

    rotations: Rotations
    inside: Pivots
    mirrored: Pivots

    @staticmethod
    def initial(rule: Quadrature, alive: Bool[Array, " k"]) -> "Progress":
        """Before the first product; rows that are not alive are zero right-hand sides."""
        return Progress(
            rotations=Rotations.initial(rule.shifts, alive),
            inside=Pivots.initial(jnp.zeros((2,), rule.shifts.dtype), alive),
            mirrored=Pivots.initial(jnp.zeros((1,), rule.shifts.dtype), alive),
        )

    def extend(
        self,
        rule: Quadrature,
        lower: Float[Array, ""],
        upper: Float[Array, ""],
        alpha: Float[Array, " k"],
        beta_before: Float[Array, " k"],
        beta: Float[Array, " k"],
    ) -> tuple["Progress", RotatedColumn]:
        """Adds one Lanczos step."""
        rotations, column = rotate(self.rotations, rule.shifts, alpha, beta_before, beta)
        # Bounds that are eigenvalues are right, and Ritz values reach them up to rounding.
        rounding = 10 * jnp.finfo(lower.dtype).eps * jnp.where(jnp.isfinite(upper), upper, 0)
        points = jnp.stack([jnp.zeros_like(lower), lower - rounding])
        inside = self.inside.extend(points, alpha, beta_before, beta)
        mirrored = self.mirrored.extend(-(upper + rounding)[None], -alpha, beta_before, beta)
        return Progress(rotations, inside, mirrored), column

    def error_bound(self, rule: Quadrature, lower: Float[Array, ""]) -> Float[Array, " k"]:
        """Bound of the error of the combined solution, relative to `||K^{-1/2} b||`."""
        energy = self.inside.gauss[0]
        return self._relative(rule.weights / (rule.shifts + lower), energy)

    def forward_error_bound(
        self, rule: Quadrature, upper: Float[Array, ""], energy: Float[Array, " k"]
    ) -> Float[Array, " k"]:
        """The same after a product with K, relative to `||K^{1/2} b||`.

        `energy` is `b^T K b / ||b||^2`, the first diagonal entry of the tridiagonal. The product
        tames the error: `||K (t I + K)^-1|| <= lambda_max / (t + lambda_max)`.
        """
        energy = jnp.where(self.inside.gauss[0] > 0, energy, 0)
        return self._relative(rule.weights * upper / (rule.shifts + upper), energy)

    def _relative(self, factors: Array, energy: Array) -> Array:
        absolute = jnp.sum(factors[:, None] * jnp.abs(self.rotations.residual), axis=0)
        # Zero right-hand sides have neither error nor norm.
        return jnp.where(energy > 0, absolute / jnp.sqrt(jnp.where(energy > 0, energy, 1)), 0)

    def positive_definite(self) -> Bool[Array, ""]:
        """Whether every tridiagonal has been positive definite."""
        return jnp.all(self.inside.positive[0])

    def bracketed(self) -> Bool[Array, ""]:
        """Whether all Ritz values lie between the bounds, up to rounding."""
        return jnp.all(self.inside.positive[1]) & jnp.all(self.mirrored.positive)


def replay(
    rule: Quadrature,
    lower: Float[Array, ""],
    upper: Float[Array, ""],
    alpha: Float[Array, "n k"],
    beta: Float[Array, "n k"],
    steps: Int[Array, ""],
    alive: Bool[Array, " k"],
) -> Progress:
    """The progress after `steps` rows of `k` tridiagonals, for shifts chosen only now."""

    def extend(j: Array, progress: Progress) -> Progress:
        before = jnp.where(j > 0, beta[jnp.maximum(j - 1, 0)], jnp.zeros_like(beta[0]))
        return progress.extend(rule, lower, upper, alpha[j], before, beta[j])[0]

    return jax.lax.fori_loop(0, steps, extend, Progress.initial(rule, alive))


def galerkin_coefficients(
    rule: Quadrature,
    alpha: Float[Array, "n k"],
    beta: Float[Array, "n k"],
    steps: Int[Array, ""],
    alive: Bool[Array, " k"],
) -> Float[Array, "n k"]:
    """`sum_q w_q (T + t_q I)^-1 e_1` of `k` tridiagonals: coordinates in the Lanczos basis."""
    rows = jnp.arange(alpha.shape[0], dtype=jnp.int32)
    beta = jnp.where((rows < steps - 1)[:, None], beta, 0)
    alpha = jnp.where((rows < steps)[:, None], alpha, 1)
    before = jnp.concatenate([jnp.zeros_like(beta[:1]), beta[:-1]])

    def eliminate(pivots: Pivots, row: tuple[Array, ...]) -> tuple[Pivots, tuple[Array, Array]]:
        alpha, before, beta = row
        following = pivots.extend(-rule.shifts, alpha, before, beta)
        ratio = beta[None, :] / following.pivot
        return following, (pivots.entry / following.pivot, ratio)

    def substitute(below: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        entry, ratio = row
        value = entry - ratio * below
        return value, jnp.sum(rule.weights[:, None] * value, axis=0)

    start = Pivots.initial(-rule.shifts, alive)
    _, eliminated = jax.lax.scan(eliminate, start, (alpha, before, beta))
    _, coefficients = jax.lax.scan(
        substitute, jnp.zeros_like(start.entry), eliminated, reverse=True
    )
    return coefficients
