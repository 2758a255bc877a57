"""`tr A^-1` of the original operator, from a run on `P^-1/2 A P^-1/2`: a weighted trace inside."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pnkrylov.krylov import KrylovBasis
from pnkrylov.preconditioners import Preconditioner
from pnkrylov.pslq import Boundary, original_exact_part
from pnkrylov.traces.probes import NestedProbes
from pnkrylov.traces.quadrature import INVERSE, SpectralFunction, gauss
from pnkrylov.tridiagonal import Tridiagonal


def exact_part(
    preconditioner: Preconditioner, basis: KrylovBasis, level: int
) -> tuple[float, float]:
    """`tr A^-1` less the trace over `T_perp`, and `tr (P^-1/2 P_perp P^-1/2)`; all of it at d."""
    value, known = _exact_part(preconditioner, basis, jnp.asarray(level, jnp.int32))
    return float(value), float(known)


@eqx.filter_jit
def _exact_part(
    preconditioner: Preconditioner, basis: KrylovBasis, level: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    tridiagonal = Tridiagonal.of(basis, jnp.zeros((), basis.dtype))
    value, known = original_exact_part(
        tridiagonal,
        Boundary.of(tridiagonal, level),
        level,
        preconditioner.inv_sqrt_mv(basis.vectors),
        jnp.sum(preconditioner.inv_diagonal()),
    )
    return value / tridiagonal.unit, known


def centred(probes: NestedProbes) -> tuple[SpectralFunction, float]:
    """`1/x - c` and c, the weighted mean form: what is left varies little if P is close to A.

    The trace of the start covariance is known, so c times it is exact and only the rest is
    estimated: a regression estimator, whose bias is of order 1/N where its error is 1/sqrt(N).
    """
    total = 0.0
    for depth in sorted(set(probes.depths.tolist()) - {0}):
        which = probes.depths == depth
        forms = gauss(INVERSE, *probes.tridiagonals(which, depth))
        total += float(np.sum(probes.weights[which] * forms))
    centre = total / float(np.sum(probes.weights[probes.depths > 0]))
    return less(centre), centre


def less(centre: float) -> SpectralFunction:
    """`1/x - centre`, with the quadrature side of 1/x."""
    return dataclasses.replace(INVERSE, evaluate=lambda x: 1 / x - centre)
