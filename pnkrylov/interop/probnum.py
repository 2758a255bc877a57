"""probnum: its linear operators in, beliefs out as random variables.

probnum 0.1.25, the last release, needs Python < 3.12 and NumPy names that NumPy 2 removed.
"""

import functools
import sys
from types import ModuleType
from typing import Any

import numpy as np

from pnkrylov.covariance import KrylovCovariance
from pnkrylov.gaussian import GaussianBelief
from pnkrylov.krylov import is_concrete
from pnkrylov.operators import SPDOperator, as_operator


def import_probnum() -> ModuleType:
    """Imports probnum, restoring the NumPy names that it needs where they are missing.

    NumPy 2 removed `float_`, `Inf` and `find_common_type`. They are set on the `numpy` module, with
    their old meaning, when this function is called, and only those that are missing.

    Returns:
        The module `probnum`.

    Raises:
        ImportError: Python is 3.12 or newer, or probnum is not installed.
    """
    major, minor = sys.version_info[:2]
    if (major, minor) >= (3, 12):
        raise ImportError(
            f"probnum does not run on Python {major}.{minor}: its last release needs Python < 3.12."
            " Use Python 3.11 for this bridge."
        )
    _restore_numpy_names()
    try:
        import probnum
    except ModuleNotFoundError as error:
        raise ImportError(
            "The probnum bridge needs the package probnum, which could not be imported "
            f"({error}). Install it with: pip install 'probnum==0.1.25'."
        ) from error
    return probnum


def _restore_numpy_names() -> None:
    old_names = {"float_": np.float64, "Inf": np.inf, "find_common_type": _find_common_type}
    for name, value in old_names.items():
        if not hasattr(np, name):
            setattr(np, name, value)


def _find_common_type(array_types: Any, scalar_types: Any) -> np.dtype:
    """The common dtype of arrays and scalars, as NumPy 1 had it.

    Scalars only count when they are of a higher kind (float over integer, complex over float).
    """
    arrays = [np.dtype(item) for item in array_types]
    scalars = [np.dtype(item) for item in scalar_types]
    if not arrays or not scalars:
        return np.result_type(*arrays, *scalars)
    array, scalar = np.result_type(*arrays), np.result_type(*scalars)
    kinds = "buifc"
    return scalar if kinds.index(scalar.kind) > kinds.index(array.kind) else array


def from_probnum(linop: Any) -> SPDOperator:
    """Adapts a probnum linear operator.

    Args:
        linop: Square `probnum.linops.LinearOperator` of a real floating dtype. A `Matrix` becomes
            JAX arrays (dense or sparse); the products of all others run on the host.

    Returns:
        The operator, on vectors of shape `(d,)`.

    Raises:
        ImportError: See `import_probnum`.
        TypeError: `linop` is not a probnum linear operator, or has another dtype.
        ValueError: `linop` is not square or empty.
    """
    linops = import_probnum().linops
    if not isinstance(linop, linops.LinearOperator):
        raise TypeError(
            f"linop is of type {type(linop).__name__}, not a probnum.linops.LinearOperator. "
            "Use pnkrylov.operators.as_operator for everything else."
        )
    return as_operator(linop)


def to_probnum(belief: GaussianBelief) -> Any:
    """The belief as a probnum random variable, with a covariance that is never dense.

    Sampling, `cov @ x`, `cov.trace()`, `cov_cholesky @ x`, `var` and `std` cost O(n d) for a basis
    of n vectors. What probnum itself computes from a dense covariance (`pdf`, `entropy`, indexing,
    sums of random variables) still does.

    Args:
        belief: a SolveBelief or an InverseBelief (not a batch).

    Returns:
        A `probnum.randvars.Normal` over flat vectors, shape `(d,)`, always in float64 (NumPy's,
        whatever JAX runs in): probnum cannot tell the mean of a float32 one. Its `cov_cholesky`
        is the symmetric square root of the covariance: a square root, but not triangular.

    Raises:
        ImportError: See `import_probnum`.
        ValueError: `belief` is a batch, traced (under `jit`), or of a preconditioned run.
    """
    if belief.mean_flat.ndim != 1 or not is_concrete(belief):
        raise ValueError(
            "to_probnum needs one belief with concrete values: call it outside jit/vmap/grad, and "
            "for a batch on each, jax.tree.map(lambda leaf: leaf[i], belief)."
        )
    import_probnum()
    covariance = belief.covariance
    if not isinstance(covariance, KrylovCovariance):
        raise ValueError(
            "to_probnum: the covariance of a preconditioned run has no symmetric square root in "
            "closed form. Make the belief without preconditioner=, or use its own sample and push."
        )
    rows = _double(covariance.vectors)
    # Between the basis vectors the covariance is a small matrix, outside it is a multiple of I.
    small = _double(covariance.push(covariance.vectors))
    deviation = float(covariance.bulk_deviation)
    variances, axes = np.linalg.eigh(small)
    # A zero variance may come out negative by rounding.
    root = (axes * np.sqrt(np.maximum(variances, 0))) @ axes.T
    trace, diagonal = _double(covariance.trace())[()], _double(covariance.diagonal())
    return _normal_class()(
        _double(belief.mean_flat),
        _small_plus_scalar(rows, small, deviation**2, trace=trace),
        cov_cholesky=_small_plus_scalar(rows, root, deviation),
        marginal_variances=diagonal,
    )


def _double(array: Any) -> np.ndarray:
    return np.array(array, np.float64)


def _small_plus_scalar(
    rows: np.ndarray, small: np.ndarray, scalar: float, *, trace: Any = None
) -> Any:
    """The symmetric operator `Q^T small Q + scalar (I - Q^T Q)` on columns."""
    inner = small - scalar * np.eye(len(small))

    def matmul(columns: np.ndarray) -> np.ndarray:
        return scalar * columns + rows.T @ (inner @ (rows @ columns))

    operator = import_probnum().linops.LambdaLinearOperator(
        shape=(rows.shape[1],) * 2,
        dtype=rows.dtype,
        matmul=matmul,
        trace=None if trace is None else lambda: trace,
    )
    operator.is_symmetric = True
    return operator


@functools.cache
def _normal_class() -> type:
    """The random variable; made on first use, because its base class is probnum's."""
    randvars = import_probnum().randvars

    class KrylovNormal(randvars.Normal):
        """A normal random variable that samples and tells its variances without a dense matrix."""

        def __init__(self, mean, cov, cov_cholesky, marginal_variances):
            self._marginal_variances = marginal_variances
            super().__init__(mean, cov, cov_cholesky)

        # probnum calls both by these names; its own versions make the covariance dense.
        def _dense_sample(self, rng, size=()):
            noise = rng.standard_normal((*size, self.size))
            return self.mean + self.cov_cholesky(noise)

        def _dense_var(self):
            return self._marginal_variances

    return KrylovNormal
