"""Krylov methods that the library does not have, in the form of methods.py.

ours_without_probes  all products in the run, which measures the bulk variance itself
ours_along           a bulk variance measured along mixtures of Jacobian rows
"""

import dataclasses

import jax
import jax.numpy as jnp
import methods
import numpy as np
import scipy.linalg

from pnkrylov.probes import PROBE_TOLERANCE, run_probes

# A Ritz pair whose residual is below this part of its value counts as an eigenpair.
CONVERGED = 1e-3
# p times the weight of one eigenvector is chi-square with one degree of freedom: 20 is its quantile
# of 1 - 8e-6.
LARGEST_WEIGHT = 20.0
# Most steps of a probe along given directions.
ALONG_DEPTH = 6


def own_bulk(run: methods.KrylovRun, length, shift) -> float:
    """The mean variance outside of `length` Krylov vectors, from the run alone: no further product.

    The start vector is uniform on the sphere, so that it is a probe of the whole space: the Gauss
    quadrature `e_1^T (T + lambda I)^-1 e_1` estimates `tr A^-1 / p` (stochastic Lanczos quadrature
    with one probe). Converged Ritz pairs are taken out of it and counted exactly, unless they stand
    for an eigenspace of many dimensions, as that of lambda does where G has a null space.
    """
    alpha = np.asarray(run.basis.alpha[:length], np.float64) + shift
    beta = np.asarray(run.basis.beta[:length], np.float64)
    values, vectors = scipy.linalg.eigh_tridiagonal(alpha, beta[:-1])
    weights, residuals = vectors[0] ** 2, beta[-1] * np.abs(vectors[-1])
    size = run.operator.size
    single = (residuals <= CONVERGED * values) & (weights * size <= LARGEST_WEIGHT)
    mean = np.sum(weights[~single] / values[~single]) / np.sum(weights[~single])
    total = np.sum(1 / values[single]) + (size - np.sum(single)) * mean
    return min(float((total - np.sum(1 / values)) / (size - length)), 1 / shift)


def ours_without_probes(run: methods.KrylovRun, length, shift) -> methods.Approximation:
    """All products in the run, in the default layout, with the bulk variance of the run itself.

    A prototype: `pnkrylov.inverse` wants at least one probe.
    """
    length = min(length, run.filled)
    rest = own_bulk(run, length, shift)
    found = methods.krylov_shift(run, length, shift, rest=rest)
    return dataclasses.replace(found, name="ours_without_probes")


def ours_along(run: methods.KrylovRun, total, shift, directions) -> methods.Approximation:
    """All vectors resolved, and the bulk variance measured along given directions.

    An isotropic bulk that makes the trace right is too wide for outputs: their Jacobians lean
    towards what the curvature has seen. So the probes start in mixtures of Jacobian rows instead
    of random directions. A prototype: `pnkrylov.inverse` draws its own probes.

    Args:
        run: the run.
        total: products, probes included.
        shift: lambda.
        directions: (k, p), mixtures of rows of Jacobians.
    """
    level = total - len(directions) * ALONG_DEPTH
    basis = run.beginning(level)
    vectors = np.asarray(basis.vectors[:level])
    starts = np.asarray(directions, vectors.dtype)
    for _ in range(2):
        starts = starts - (starts @ vectors.T) @ vectors
    probes = run_probes(
        run.operator,
        basis,
        jnp.asarray(level, jnp.int32),
        jax.random.key(0),  # not used: nothing is drawn
        len(starts),
        ALONG_DEPTH,
        tolerance=PROBE_TOLERANCE,
        shift=jnp.asarray(shift, basis.dtype),
        starts=jnp.asarray(starts),
        driver=basis.driver,
    )
    forms = probes.inverse_forms(jnp.asarray(shift, basis.dtype), jnp.ones((), basis.dtype))
    squares = np.sum(starts.astype(np.float64) ** 2, axis=1)
    rest = float(np.sum(squares * np.asarray(forms)) / np.sum(squares))
    found = methods.krylov_shift(run, total - len(starts) * int(probes.steps), shift, rest=rest)
    return dataclasses.replace(found, name="ours_along", products=total)
