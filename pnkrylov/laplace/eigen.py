"""From a curvature to the covariances that come out of an eigendecomposition.

Exact, from the rows of a square root (`G = R^T R`) or from the dense matrix, whichever is smaller;
and the leading eigenpairs only, from a Lanczos run.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from pnkrylov._operator_types import SPDOperator
from pnkrylov.errors import NotFiniteError
from pnkrylov.krylov import Driver, lanczos
from pnkrylov.laplace.covariances import LowRankCovariance, PrecisionOperator

_HIGHEST = jax.lax.Precision.HIGHEST

# Columns that are cast to float64 at a time, for square roots in float32.
_CHUNK = 4096
# A Ritz pair is kept when its residual is below this fraction of its value.
_CONVERGED = 1e-2


def exact_from_rows(
    rows: Float[Array, "r p"], root: Float[Array, " p"] | None, shift: Float[Array, ""]
) -> LowRankCovariance:
    """The exact covariance from a square root of the curvature, `G = rows^T rows`, r <= p.

    The eigenpairs of G come from its r x r Gram matrix. That matrix squares the condition number,
    so it is formed in float64 even for rows in float32 (on the host: JAX may run without float64).
    Eigenvalues that are rounding of the largest one count as zero.

    Args:
        rows: the square root; r must not exceed p.
        root: square root of the prior precision's pattern, or None.
        shift: the prior precision of scaled parameters.

    Raises:
        NotFiniteError: a row contains NaN or infinity.

    Source:
        METHOD.md section 9 (the Gram form).
    """
    if root is not None:
        rows = rows / root[None, :]
    multiply = _gram_in_jax if rows.dtype == np.float64 else _gram_on_host
    gram = np.asarray(multiply(rows))
    if not np.isfinite(gram).all():
        raise NotFiniteError(NotFiniteError.message("The Jacobian of the model"))
    values, vectors = np.linalg.eigh(gram)
    # Rounding of the rows themselves moves a singular value by eps times the largest one.
    noise = max(float(jnp.finfo(rows.dtype).eps) ** 2, np.finfo(np.float64).eps * len(values))
    kept = values > noise * values[-1] if values[-1] > 0 else np.zeros(len(values), bool)
    values, vectors = values[kept], vectors[:, kept]
    combine = _combine_in_jax if rows.dtype == np.float64 else _combine_on_host
    directions = combine(vectors / np.sqrt(values)[None, :], rows)
    return LowRankCovariance(
        values=jnp.asarray(values, rows.dtype),
        vectors=directions,
        shift=shift,
        num_matvecs=jnp.zeros((), jnp.int32),
    )


@eqx.filter_jit
def _gram_in_jax(rows: Array) -> Array:
    return jnp.matmul(rows, rows.T, precision=_HIGHEST)


@eqx.filter_jit
def _combine_in_jax(weights: Any, rows: Array) -> Array:
    return jnp.matmul(weights.T, rows, precision=_HIGHEST)


def _gram_on_host(rows: Array) -> np.ndarray:
    given = np.asarray(rows)
    gram = np.zeros((len(given), len(given)))
    for start in range(0, given.shape[1], _CHUNK):
        chunk = given[:, start : start + _CHUNK].astype(np.float64)
        gram += chunk @ chunk.T
    return gram


def _combine_on_host(weights: Any, rows: Array) -> Array:
    given = np.asarray(rows)
    combined = np.empty((weights.shape[1], given.shape[1]), given.dtype)
    for start in range(0, given.shape[1], _CHUNK):
        chunk = given[:, start : start + _CHUNK].astype(np.float64)
        combined[:, start : start + _CHUNK] = weights.T @ chunk
    return jnp.asarray(combined)


def exact_from_matrix(
    matrix: Float[Array, "p p"], root: Float[Array, " p"] | None, shift: Float[Array, ""]
) -> LowRankCovariance:
    """The exact covariance from the dense curvature.

    Args:
        matrix: G; it need not be positive semi-definite as long as the prior lifts it.
        root: square root of the prior precision's pattern, or None.
        shift: the prior precision of scaled parameters.

    Raises:
        NotFiniteError: G contains NaN or infinity.
        NotPositiveDefiniteError: an eigenvalue plus the shift is not positive.
    """
    dense = np.asarray(matrix)
    if not np.isfinite(dense).all():
        raise NotFiniteError(NotFiniteError.message("The curvature"))
    if root is not None:
        scale = np.asarray(root)
        dense = dense / scale[:, None] / scale[None, :]
    values, vectors = np.linalg.eigh((dense + dense.T).astype(np.float64) / 2)
    # Rounding of the entries moves eigenvalues by this much: a zero must not come out negative.
    noise = 10 * float(jnp.finfo(matrix.dtype).eps) * np.abs(values).max(initial=0)
    values = np.where(np.abs(values) <= noise, 0, values)
    return LowRankCovariance(
        values=jnp.asarray(values, matrix.dtype),
        vectors=jnp.asarray(np.ascontiguousarray(vectors.T), matrix.dtype),
        shift=shift,
        num_matvecs=jnp.zeros((), jnp.int32),
    )


def leading(
    curvature: SPDOperator,
    root: Float[Array, " p"] | None,
    shift: Float[Array, ""],
    *,
    key: PRNGKeyArray,
    num_steps: int,
    driver: Driver = "auto",
    progress: bool = False,
) -> LowRankCovariance:
    """The leading eigenpairs that a Lanczos run resolves, and the prior on the rest.

    A Ritz pair is kept only if its residual `beta_m |s_mi|` is below 1 % of its value: an
    unconverged one mixes directions that the data determine with directions that they do not.

    Args:
        curvature: G.
        root: square root of the prior precision's pattern, or None.
        shift: the prior precision of scaled parameters.
        key: random key of the start vector.
        num_steps: Lanczos steps, at most p; about half of the Ritz pairs converge.
        driver: as in `pnkrylov.lanczos`.
        progress: show a progress bar.
    """
    operator = PrecisionOperator(curvature, root)
    start = jax.random.normal(key, (operator.size,), operator.dtype)
    basis = lanczos(operator, start, num_steps, driver=driver, progress=progress).trim()
    values, vectors = np.linalg.eigh(np.asarray(basis.tridiagonal(), np.float64))
    residuals = float(basis.residual_norm()) * np.abs(vectors[-1])
    kept = (values > 0) & (residuals <= _CONVERGED * values)
    weights = jnp.asarray(vectors[:, kept], basis.dtype)
    return LowRankCovariance(
        values=jnp.asarray(values[kept], basis.dtype),
        vectors=_combine_in_jax(weights, basis.vectors),
        shift=shift,
        num_matvecs=jnp.asarray(basis.num_rows, jnp.int32),
    )
