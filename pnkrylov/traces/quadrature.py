"""Quadratic forms `e_1^T f(Theta) e_1` of many small tridiagonals, by Gauss and Gauss-Radau rules.

On the host in float64: the tridiagonals are small, and their shapes follow the data.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from scipy.linalg import eigh_tridiagonal

from pnkrylov.errors import NotFiniteError, NotPositiveDefiniteError

HostArray = np.ndarray


@dataclasses.dataclass(frozen=True)
class SpectralFunction:
    """The f of `tr f(A)`, and what is known about it.

    Attributes:
        name: what error messages call it.
        evaluate: f on a NumPy array of eigenvalues.
        kind: `"inverse"` and `"log"` decouple exactly over a Krylov space and its complement, and
            Gauss quadrature of them is one-sided; `"general"` has neither.
    """

    name: str
    evaluate: Callable[[HostArray], HostArray]
    kind: Literal["inverse", "log", "general"]

    @property
    def gauss_side(self) -> int:
        """1: Gauss quadrature is a lower bound; -1: an upper bound; 0: neither.

        The sign of the even derivatives of f decides (Golub and Meurant 2010, section 6.2).
        """
        return {"inverse": 1, "log": -1, "general": 0}[self.kind]

    def __call__(self, eigenvalues: HostArray) -> HostArray:
        """f of Ritz values.

        Raises:
            NotFiniteError: a Ritz value, or f of one, is not finite.
            NotPositiveDefiniteError: 1/x or log x at a Ritz value <= 0.
        """
        if not np.all(np.isfinite(eigenvalues)):
            raise NotFiniteError(
                "The run holds NaN or infinity: a product A v was not finite. Check A on a random "
                "vector, and its scale against the dtype."
            )
        smallest = float(eigenvalues.min(initial=np.inf))
        if self.kind != "general" and smallest <= 0:
            raise NotPositiveDefiniteError(
                f"{self.name} needs a positive definite A, but the Ritz value {smallest:.6g} "
                "proves that it is not. Add a shift (A + alpha I with a larger alpha), or use "
                "float64 if A is positive definite in exact arithmetic."
            )
        with np.errstate(all="ignore"):
            values = np.asarray(self.evaluate(eigenvalues), np.float64)
        if values.shape != eigenvalues.shape:
            raise ValueError(
                f"{self.name} must act elementwise on eigenvalues: it took shape "
                f"{eigenvalues.shape} and returned shape {values.shape}."
            )
        if not np.all(np.isfinite(values)):
            where = float(eigenvalues[~np.isfinite(values)].flat[0])
            raise ValueError(
                f"{self.name} is not finite at the Ritz value {where:.6g}: the spectrum of A "
                "reaches outside the domain of f. Shift A, or pass an f that is defined there."
            )
        return values


INVERSE = SpectralFunction("trace_inverse", lambda x: 1 / x, "inverse")
LOG = SpectralFunction("logdet", np.log, "log")


def general(function: Callable[..., Any], dtype: np.dtype) -> SpectralFunction:
    """Wraps the user's elementwise JAX (or NumPy) function of an array of eigenvalues."""

    def evaluate(eigenvalues):
        values = function(jnp.asarray(eigenvalues, jax.dtypes.canonicalize_dtype(dtype)))
        if np.iscomplexobj(values):
            raise TypeError("f returns complex numbers; only real functions have a real trace.")
        return np.asarray(values)

    return SpectralFunction("f", evaluate, "general")


def gauss(
    f: SpectralFunction, alpha: Float[HostArray, "n l"], beta: Float[HostArray, "n l"]
) -> Float[HostArray, " n"]:
    """`e_1^T f(Theta_i) e_1` of n tridiagonals with l rows; the last coupling is not used."""
    return _forms(f, *_after_breakdown(alpha, beta[:, :-1]))


def radau(
    f: SpectralFunction,
    alpha: Float[HostArray, "n l"],
    beta: Float[HostArray, "n l"],
    node: float,
) -> Float[HostArray, " n"]:
    """Gauss-Radau with l + 1 nodes, one of them prescribed: exact for one degree more than Gauss.

    Costs no product: it uses the coupling beyond row l, which Gauss discards. `node` must lie
    outside the Ritz values.

    Source:
        Golub and Meurant 2010, section 6.2.
    """
    return _forms(f, *_radau_extension(alpha, beta, node))


def smallest_radau_node(
    alpha: Float[HostArray, "n l"], beta: Float[HostArray, "n l"], node: float
) -> float:
    """The smallest node of all n Gauss-Radau rules with the prescribed `node`."""
    return float(np.linalg.eigvalsh(_dense(*_radau_extension(alpha, beta, node))).min())


def _radau_extension(alpha: HostArray, beta: HostArray, node: float) -> tuple[HostArray, HostArray]:
    alpha, couplings = _after_breakdown(alpha, beta[:, :-1])
    pivot = alpha[:, 0] - node
    for column in range(1, alpha.shape[1]):
        pivot = alpha[:, column] - node - couplings[:, column - 1] ** 2 / pivot
    last = beta[:, -1]
    extended = np.column_stack([alpha, node + last**2 / pivot])
    return extended, np.column_stack([couplings, last])


def ritz_range(
    alpha: Float[HostArray, "n l"], beta: Float[HostArray, "n l"]
) -> tuple[float, float]:
    """Smallest and largest Ritz value of all n tridiagonals."""
    alpha, couplings = _after_breakdown(alpha, beta[:, :-1])
    values = np.linalg.eigvalsh(_dense(alpha, couplings))
    return float(values.min()), float(values.max())


def largest_estimate(alpha: Float[HostArray, "n l"], beta: Float[HostArray, "n l"]) -> float:
    """Top Ritz value plus its residual norm: an interval around each that holds an eigenvalue."""
    diagonal, couplings = _after_breakdown(alpha, beta[:, :-1])
    values, vectors = np.linalg.eigh(_dense(diagonal, couplings))
    return float(np.max(values[:, -1] + beta[:, -1] * np.abs(vectors[:, -1, -1])))


def function_diagonal(
    f: SpectralFunction, alpha: Float[HostArray, " m"], beta: Float[HostArray, " m-1"]
) -> Float[HostArray, " m"]:
    """The diagonal of f(T) for one tridiagonal T."""
    values, vectors = eigh_tridiagonal(alpha, beta)
    return (vectors**2) @ f(values)


def first_entry_moments(
    f: SpectralFunction, alpha: Float[HostArray, " m"], beta: Float[HostArray, " m-1"]
) -> tuple[float, float]:
    """`e_1^T f(T) e_1` and `e_1^T f(T)^2 e_1` of one tridiagonal T."""
    values, vectors = eigh_tridiagonal(alpha, beta)
    weights, images = vectors[0] ** 2, f(values)
    return float(weights @ images), float(weights @ images**2)


def _after_breakdown(alpha: HostArray, couplings: HostArray) -> tuple[HostArray, HostArray]:
    """Rows after a breakdown, which mean nothing, repeat the first diagonal entry."""
    alive = np.cumprod(np.column_stack([np.ones(len(alpha)), couplings != 0]), axis=1) > 0
    return np.where(alive, alpha, alpha[:, :1]), np.where(alive[:, 1:], couplings, 0.0)


def _dense(alpha: HostArray, couplings: HostArray) -> HostArray:
    count, size = alpha.shape
    matrices = np.zeros((count, size, size))
    rows = np.arange(size)
    matrices[:, rows, rows] = alpha
    matrices[:, rows[1:], rows[:-1]] = couplings
    matrices[:, rows[:-1], rows[1:]] = couplings
    return matrices


def _forms(f: SpectralFunction, alpha: HostArray, couplings: HostArray) -> HostArray:
    if not (np.all(np.isfinite(alpha)) and np.all(np.isfinite(couplings))):
        return f(np.full(len(alpha), np.nan))
    values, vectors = np.linalg.eigh(_dense(alpha, couplings))
    return np.sum(vectors[:, 0, :] ** 2 * f(values), axis=1)
