"""Right-hand sides for block runs, and the dense oracle of METHOD section 14."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

import oracles
from pnkrylov.block import block_lanczos

SIZE, COUNT = 24, 3
# Enough blocks for the whole space when one or two of the three right-hand sides are redundant.
BLOCKS = 24
KINDS = ("independent", "dependent", "zero", "scales", "eigenvectors", "nearly")


@functools.cache
def matrix(spectrum="power-law-1", size=SIZE):
    return oracles.SPECTRA[spectrum](size)[0]


@functools.cache
def right_hand_sides(kind, spectrum="power-law-1", size=SIZE, count=COUNT):
    """`(count, size)` rows in float64."""
    rows = np.random.default_rng(3).standard_normal((count, size))
    if kind == "dependent":
        rows[-1] = rows[0] - 2 * rows[1]
    elif kind == "zero":
        rows[1] = 0
    elif kind == "scales":
        rows *= np.geomspace(1e-6, 1e6, count)[:, None]
    elif kind == "nearly":
        rows[-1] = rows[0] + 1e-5 * rows[-1]
    elif kind == "eigenvectors":
        # The first two columns are soon solved exactly, to rounding; the third goes on.
        vectors = np.linalg.eigh(matrix(spectrum, size))[1].T
        rows[0], rows[1] = vectors[[2, 5, 9]].sum(axis=0), vectors[[4, 5, 12]].sum(axis=0)
    return rows


@functools.cache
def basis(kind, spectrum="power-law-1", dtype="float64"):
    """A complete run: the block Krylov space is exhausted."""
    rows = jnp.asarray(right_hand_sides(kind, spectrum), dtype)
    return block_lanczos(matrix(spectrum).astype(dtype), rows, BLOCKS)


@dataclasses.dataclass(frozen=True)
class BlockSplit:
    """The exact block inverse at one level, by dense algebra in an own basis of the complement.

    `rows` are the basis vectors of the first m blocks, `rest` an orthonormal complement whose first
    `rank` rows are the next block.
    """

    matrix: np.ndarray
    rows: np.ndarray
    rest: np.ndarray
    rank: int

    @property
    def T(self):
        return self.rows @ self.matrix @ self.rows.T

    @property
    def strength(self):
        """B, `(rank, number of rows)`: the coupling of the next block to all rows."""
        return self.rest[: self.rank] @ self.matrix @ self.rows.T

    @property
    def gamma(self):
        return self.strength @ np.linalg.solve(self.T, self.strength.T)

    @property
    def S(self):
        S = self.rest @ self.matrix @ self.rest.T
        S[: self.rank, : self.rank] -= self.gamma
        return S

    @property
    def q_par(self):
        return self.rows.T @ np.linalg.solve(self.T, self.strength.T)

    @property
    def q_perp(self):
        return self.rest.T @ np.linalg.inv(self.S)[:, : self.rank]

    def p(self, power):
        inverse = np.linalg.matrix_power(np.linalg.inv(self.S), power)
        return inverse[: self.rank, : self.rank]

    def exact_inverse(self):
        cross = self.q_par @ self.q_perp.T
        return (
            self.rows.T @ np.linalg.inv(self.T) @ self.rows
            + self.q_par @ self.p(1) @ self.q_par.T
            - cross
            - cross.T
            + self.rest.T @ np.linalg.inv(self.S) @ self.rest
        )

    @property
    def roots(self):
        """`P_2^1/2` and `P_2^-1/2`."""
        values, vectors = np.linalg.eigh(self.p(2))
        return (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T

    @property
    def U(self):
        return self.q_perp @ self.roots[1]

    @property
    def sigma_u(self):
        return self.roots[1] @ self.p(3) @ self.roots[1]

    @property
    def omega(self):
        left = len(self.rest) - self.rank
        trace = np.trace(np.linalg.inv(self.S)) - np.trace(self.sigma_u)
        return trace / left if left else 0.0

    def coupling(self):
        """Dense: the coupled part of Sigma_m."""
        root = self.roots[0]
        block = np.block([[self.p(1), -root], [-root, self.sigma_u]])
        directions = np.hstack([self.q_par, self.U])
        return directions @ block @ directions.T

    def sigma(self, *, resolved=True):
        rest = self.rest.T @ self.rest - self.U @ self.U.T
        sigma = self.coupling() + self.omega * rest
        if resolved:
            sigma = sigma + self.rows.T @ np.linalg.inv(self.T) @ self.rows
        return sigma


def split(kind, spectrum, level, dtype="float64"):
    """The oracle at a level of a complete run, fed with the run's own basis vectors."""
    run = basis(kind, spectrum, dtype)
    present = np.asarray(run.present)
    vectors = np.asarray(run.vectors, np.float64)
    block = np.arange(len(present)) // COUNT
    rows, following = (vectors[present & (block < level)], vectors[present & (block == level)])
    known = np.vstack([rows, following])
    rest = np.linalg.qr(known.T, mode="complete")[0].T[len(known) :]
    given = matrix(spectrum).astype(dtype).astype(np.float64)
    return BlockSplit(given, rows, np.vstack([following, rest]), len(following))
