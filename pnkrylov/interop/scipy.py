"""scipy: operators and covariances out. (In: `pnkrylov.as_operator` takes what scipy has.)"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.sparse.linalg import LinearOperator

from pnkrylov.operators import SPDOperator, as_operator


def linear_operator(A: Any, *, like: Any = None) -> LinearOperator:
    """An operator as `scipy.sparse.linalg.LinearOperator`, on flat NumPy vectors.

    The covariance of an `InverseBelief` is an approximate inverse: passed as `M` to
    `scipy.sparse.linalg.cg`, it is the preconditioner.

    Args:
        A: anything `as_operator` takes, among it the `covariance` of a belief.
        like: example of a vector, as in `as_operator`.

    Returns:
        The operator, `(d, d)`, of the dtype of A. Products are converted to NumPy and back. It is
        symmetric: its adjoint is itself.

    Raises:
        TypeError, ValueError: as `as_operator`.
    """
    return _OnHost(as_operator(A, like=like))


class _OnHost(LinearOperator):
    def __init__(self, operator: SPDOperator):
        self.operator = operator
        super().__init__(np.dtype(operator.dtype), (operator.size, operator.size))

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(self.operator.mv(jnp.asarray(np.ravel(x), self.operator.dtype)))

    def _matmat(self, X: np.ndarray) -> np.ndarray:
        return np.asarray(self.operator.block_mv(jnp.asarray(X.T, self.operator.dtype))).T

    def _adjoint(self) -> "_OnHost":
        return self
