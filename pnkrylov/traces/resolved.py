"""What one Lanczos run contributes to `tr f(A)` without any random probe."""

import dataclasses

import numpy as np
from jaxtyping import Array

from pnkrylov.krylov import KrylovBasis
from pnkrylov.traces.multilevel import Convergence, convergence, plug_in_variance
from pnkrylov.traces.quadrature import (
    INVERSE,
    SpectralFunction,
    first_entry_moments,
    function_diagonal,
    largest_estimate,
)

# The run after the level only looks ahead: a tenth of it, at most this many, sees the coupling.
_MAX_LOOKAHEAD = 20


@dataclasses.dataclass(frozen=True)
class Tridiagonal:
    """T of a run on the host, in float64.

    Attributes:
        alpha: `(n,)` the diagonal.
        beta: `(n,)` the couplings; the last one is that to the next vector, 0 after a breakdown.
    """

    alpha: np.ndarray
    beta: np.ndarray

    @classmethod
    def of(cls, basis: KrylovBasis) -> "Tridiagonal":
        """The filled rows of a run."""
        filled = int(basis.filled)
        alpha, beta = np.asarray(basis.alpha, np.float64), np.asarray(basis.beta, np.float64)
        return cls(alpha[:filled], beta[:filled])

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.alpha)

    @property
    def exhausted(self) -> bool:
        """Whether the Krylov space is invariant."""
        return bool(self.beta[-1] == 0)

    def part(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Diagonal and couplings inside the rows `first..last-1`."""
        return self.alpha[first:last], self.beta[first : last - 1]

    def largest_after(self, level: int) -> float:
        """About the largest eigenvalue of `T_perp`, which the look-ahead finds first."""
        if level == self.size:
            return -np.inf
        return largest_estimate(self.alpha[None, level:], self.beta[None, level:])

    def level(self) -> int:
        """m: the rows that count as resolved; the rest is look-ahead."""
        if self.exhausted:
            return self.size
        return max(self.size - min(max(self.size // 10, 2), _MAX_LOOKAHEAD), 1)


def deflated_rows(basis: KrylovBasis, level: int) -> tuple[Array, Array]:
    """The first `level` basis vectors, and the same with q_{level+1}, whose form the run knows."""
    filled = int(basis.filled)
    return basis.vectors[:level], basis.vectors[: min(level + 1, filled)]


def resolved_trace(f: SpectralFunction, run: Tridiagonal, level: int) -> float:
    """`tr f(A)` less the sum of forms over the space orthogonal to q_1..q_{level+1}.

    For 1/x and log the forms are those of `T_perp` (re-projected probes), and the correction from
    `T_perp` to the Schur complement is in here; else they are those of A.

    Source:
        METHOD.md section 2; for a general f, Chen and Hallman 2023.
    """
    whole = run.part(0, run.size)
    if level == run.size:
        return float(np.sum(function_diagonal(f, *whole)))
    if f.kind == "general":
        return float(np.sum(function_diagonal(f, *whole)[: level + 1]))
    head, tail = run.part(0, level), run.part(level, run.size)
    inverse = dataclasses.replace(INVERSE, name=f.name)
    coupling = run.beta[level - 1] ** 2
    gamma = coupling * function_diagonal(inverse, *head)[-1]
    first, second = first_entry_moments(inverse, *tail)
    rest = 1 - gamma * first
    if f.kind == "log":
        along = first_entry_moments(f, *tail)[0]
        return float(np.sum(function_diagonal(f, *head)) + along + np.log(rest))
    inside = np.sum(function_diagonal(inverse, *whole)[:level])
    return float(inside + first + gamma * second / rest)


@dataclasses.dataclass(frozen=True)
class StartProbe:
    """The main run itself as one probe of the whole space: its start was random."""

    value: float
    variance: float
    convergence: Convergence


def start_probe(f: SpectralFunction, run: Tridiagonal, size: int) -> StartProbe:
    """`d e_1^T f(T) e_1`, an estimate of `tr f(A)` from the start vector alone."""

    def limit_of(f, least=0.0):
        def form_at(depth):
            return np.zeros(1, int), np.array([first_entry_moments(f, *run.part(0, depth))[0]])

        return convergence(run.size, form_at, least)

    mean, mean_square = first_entry_moments(f, *run.part(0, run.size))
    if run.exhausted:
        limit = Convergence(0.0, 0.0, 0.0)
    else:
        limit = limit_of(f, limit_of(INVERSE).ratio if f.kind == "log" else 0.0)
    return StartProbe(size * mean, size**2 * plug_in_variance(mean, mean_square, size), limit)
