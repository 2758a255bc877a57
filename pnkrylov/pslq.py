"""Projected stochastic Lanczos quadrature (P-SLQ): what truncation left unknown, measured.

The boundary probe is the continuation of the main run: the steps after level m. It gives the
coupling of the resolved and unresolved blocks exactly, up to its depth. Random probes (probes.py)
give traces over the rest of the complement.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pnkrylov.probes import Probes, TraceProbes
from pnkrylov.tridiagonal import Tridiagonal, extreme_eigenvalues

_HIGHEST = jax.lax.Precision.HIGHEST


class Boundary(eqx.Module):
    """The rank-one coupling at level m, by the look-ahead; `k`-th powers in units of unit^-k.

    Attributes:
        exists: whether there is a coupling (no breakdown at level m) that the look-ahead saw.
        gamma: `beta_m^2 (T_m^-1)_mm`, in units of unit.
        parallel: `(n,)`, coordinates of q_par in the basis: `beta_m T_m^-1 e_m`.
        perpendicular: `(n,)`, coordinates of q_perp = `S^-1 e_1` in the look-ahead rows.
        p1, p2, p3, p4: `e_1^T S^-k e_1`.
    """

    exists: Bool[Array, ""]
    gamma: Float[Array, ""]
    parallel: Float[Array, " n"]
    perpendicular: Float[Array, " n"]
    p1: Float[Array, ""]
    p2: Float[Array, ""]
    p3: Float[Array, ""]
    p4: Float[Array, ""]

    @classmethod
    def of(cls, tridiagonal: Tridiagonal, level: Int[Array, ""]) -> "Boundary":
        """Reads the coupling off a factored run (METHOD.md sections 2 to 4)."""
        rows = tridiagonal.rows()
        dtype = tridiagonal.alpha.dtype
        head, tail = tridiagonal.head(level), tridiagonal.tail(level)
        exists = (level > 0) & (level < tridiagonal.filled)
        strength = jnp.where(exists, head.residual, 0)
        last = (rows == level - 1).astype(dtype)
        parallel = strength * head.solve(last)
        first = ((rows == level) & exists).astype(dtype)
        once = tail.solve(first)
        twice = tail.solve(once)
        return cls(
            exists=exists,
            gamma=strength * jnp.sum(last * parallel),
            parallel=parallel,
            perpendicular=once,
            p1=jnp.sum(first * once),
            p2=jnp.sum(once**2),
            p3=jnp.sum(once * twice),
            p4=jnp.sum(twice**2),
        )

    def parallel_square(self) -> Float[Array, ""]:
        """`||q_par||^2`."""
        return jnp.sum(self.parallel**2)

    def direction_variance(self) -> Float[Array, ""]:
        """sigma_u, the variance along u = q_perp / ||q_perp||: `p_3 / p_2`."""
        return self.p3 / jnp.where(self.p2 > 0, self.p2, 1)

    def coupling_norm(self) -> Float[Array, ""]:
        """`||c||`, the cross term that an isotropic bulk cannot represent."""
        safe = jnp.where(self.p2 > 0, self.p2, 1)
        return jnp.sqrt(jnp.maximum(self.p4 / safe - (self.p3 / safe) ** 2, 0))

    def inverse_form(self) -> Float[Array, ""]:
        """a_1, `e_1^T T_perp^-1 e_1`."""
        return self.p1 / (1 + self.gamma * self.p1)

    def ritz_range(self, tridiagonal: Tridiagonal, level: Int[Array, ""]) -> Float[Array, "2"]:
        """Extreme Ritz values of S in the look-ahead, in units of unit; 1 if there is none."""
        tail = tridiagonal.tail(level)
        inside = (tail.rows() >= level) & (tail.rows() < tail.filled)
        # Rows outside hold 1 / sigma_u, a Rayleigh quotient of S: inside the range.
        stand_in = jnp.where(self.exists, self.direction_variance(), 1)
        return extreme_eigenvalues(jnp.where(inside, tail.alpha, 1 / stand_in), tail.off_diagonal)

    def trace_correction(self) -> Float[Array, ""]:
        """`tr S^-1 - tr T_perp^-1`, which is `gamma a_2 / (1 - gamma a_1)`."""
        return self.gamma * self.p2 / (1 + self.gamma * self.p1)


class Complement(eqx.Module):
    """Traces over the complement of level m, in units of 1/unit.

    Attributes:
        trace: estimate of `tr S^-1`.
        standard_error: of that trace, from the spread of the random probes.
        ritz_range: extreme Ritz values of the complement, in units of unit.
    """

    trace: Float[Array, ""]
    standard_error: Float[Array, ""]
    ritz_range: Float[Array, "2"]

    @classmethod
    def of(
        cls,
        tridiagonal: Tridiagonal,
        boundary: Boundary,
        probes: Probes,
        shift: Float[Array, ""],
        rank: Int[Array, ""],
    ) -> "Complement":
        """P-SLQ: random probes for the trace of T_perp^-1, the boundary for the correction.

        `rank` is d - m.
        """
        forms = probes.inverse_forms(shift, tridiagonal.unit)
        trace, error = probes.mean(forms)
        # Without a look-ahead nothing is known of q_{m+1}, which the probes avoid: it counts as
        # one more direction like theirs.
        directions = jnp.maximum(probes.dimension, 1).astype(trace.dtype)
        share = jnp.where(boundary.exists, 1, rank.astype(trace.dtype) / directions)
        trace, error = share * trace, share * error
        # The Schur complement S has the smallest values, T_perp the largest: use both.
        ends = boundary.ritz_range(tridiagonal, probes.level)
        sampled = probes.ritz_range(shift, tridiagonal.unit)
        smallest = jnp.where(boundary.exists, jnp.minimum(ends[0], sampled[0]), sampled[0])
        largest = jnp.where(boundary.exists, jnp.maximum(ends[1], sampled[1]), sampled[1])
        return cls(
            trace=trace + boundary.inverse_form() + boundary.trace_correction(),
            standard_error=error,
            ritz_range=jnp.stack([smallest, largest]),
        )


def original_trace(
    tridiagonal: Tridiagonal,
    boundary: Boundary,
    level: Int[Array, ""],
    rows: Float[Array, "n d"],
    inverse_trace: Float[Array, ""],
    probes: Probes,
    trace_probes: TraceProbes,
    shift: Float[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`tr (P^-1/2 A~^-1 P^-1/2)` and its standard error, in units of 1/unit, for a run on A~.

    The trace of the inside, weighted by P^-1: what is exact (`original_exact_part`), and the trace
    over T_perp by probes of that shape. The mean form of the isotropic probes, drawn
    independently, is a control variate.

    Args:
        tridiagonal: the run.
        boundary: its coupling at `level`.
        level: m.
        rows: `P^-1/2 q` for every basis vector q.
        inverse_trace: `tr P^-1`.
        probes: the isotropic probes.
        trace_probes: those with the shape of `P^-1/2`.
        shift: alpha.

    Source:
        METHOD.md sections 2 and 6; derived in docs/design.md.
    """
    exact, known = original_exact_part(tridiagonal, boundary, level, rows, inverse_trace)
    forms = probes.inverse_forms(shift, tridiagonal.unit)
    dimension = jnp.maximum(probes.dimension, 1).astype(forms.dtype)
    centre = probes.mean(forms)[0] / dimension
    shaped = trace_probes.probes.inverse_forms(shift, tridiagonal.unit)
    mean, error = trace_probes.mean(shaped - centre)
    return exact + centre * known + mean, error


def original_exact_part(
    tridiagonal: Tridiagonal,
    boundary: Boundary,
    level: Int[Array, ""],
    rows: Float[Array, "n d"],
    inverse_trace: Float[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`tr (P^-1/2 A~^-1 P^-1/2)` less the trace over T_perp, in units of 1/unit; exact.

    The resolved block, the coupling (whose cross term no longer vanishes) and the correction from
    T_perp to the Schur complement. Arguments as for `original_trace`.

    Returns:
        That part, and `tr (P^-1/2 P_perp P^-1/2)`.
    """
    resolved = jnp.sum(tridiagonal.head(level).inverse_diagonal_along(rows))
    parallel = jnp.matmul(boundary.parallel, rows, precision=_HIGHEST)
    perpendicular = jnp.matmul(boundary.perpendicular, rows, precision=_HIGHEST)
    correction = boundary.gamma / (1 + boundary.gamma * boundary.p1)
    exact = resolved + boundary.p1 * jnp.sum(parallel**2) - 2 * jnp.sum(parallel * perpendicular)
    exact = exact + correction * jnp.sum(perpendicular**2)
    inside = tridiagonal.rows() < level
    return exact, inverse_trace - jnp.sum(jnp.where(inside[:, None], rows**2, 0))


def log_trace(
    boundary_tridiagonal: Float[Array, "l l"],
    boundary_exists: Bool[Array, ""],
    probes: Probes,
    shift: Float[Array, ""],
    unit: Float[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`tr log(T_perp / unit)` and its standard error, from the same probes (no product)."""

    def form(matrix):
        values, vectors = jnp.linalg.eigh(matrix)
        return jnp.sum(vectors[0] ** 2 * jnp.log(values))

    trace, error = probes.mean(jax.vmap(form)(probes.tridiagonals(shift, unit)))
    return trace + jnp.where(boundary_exists, form(boundary_tridiagonal), 0), error
