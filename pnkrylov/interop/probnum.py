"""probnum: its linear operators in.

probnum 0.1.25, the last release, needs Python < 3.12 and NumPy names that NumPy 2 removed.
"""

import sys
from types import ModuleType
from typing import Any

import numpy as np

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
