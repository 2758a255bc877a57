"""Random probes of different depth, nested: every deep probe is also a shallow one.

A product is spent on a deeper level only for the few probes that the multilevel mean needs there.
"""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pnkrylov._outside import multiplied
from pnkrylov.krylov import KrylovBasis
from pnkrylov.operators import SPDOperator
from pnkrylov.preconditioners import Preconditioner

_HIGHEST = jax.lax.Precision.HIGHEST
_SHAPE_SAMPLES = 64

ProbeKind = Literal["sphere", "gaussian", "rademacher", "shaped"]


class Boundary(eqx.Module):
    """What re-projection removes in exact arithmetic: `Q^T A v = beta_m (q_{m+1}^T v) e_m`.

    Attributes:
        coupling: beta_m, 0 after a breakdown.
        rows: `(2, d)`: q_m and q_{m+1}.
        norm: about ||A||, by which a step can magnify what rounding left along Q.
    """

    coupling: Float[Array, ""]
    rows: Float[Array, "2 d"]
    norm: Float[Array, ""]

    @classmethod
    def of(cls, basis: KrylovBasis, level: int) -> "Boundary":
        """The boundary of the first `level` rows of a run."""
        filled = int(basis.filled)
        following = basis.vectors[level] if level < filled else basis.next_vector
        return cls(
            coupling=basis.beta[level - 1],
            rows=jnp.stack([basis.vectors[level - 1], following]),
            norm=jnp.max(jnp.abs(basis.alpha) + basis.beta),
        )


class NestedProbes:
    """Lanczos runs from random starts orthogonal to `deflated`, advanced in blocks.

    Attributes:
        kind: `"sphere"`: mutually orthonormal starts, uniform on the sphere, all of weight 1;
            `"gaussian"` and `"rademacher"`: independent starts, weighted by their squared norm
            over the dimension; `"shaped"`: `P^-1/2 z` for Rademacher z, weighted in the same way.
        dimension: D, of the space the starts are drawn from.
        effective_dimension: `(tr C)^2 / tr C^2` for the covariance C of the starts; D but for
            `"shaped"`. The fewer directions the starts favour, the more their forms scatter.
        depths: `(N,)` steps that each probe has taken.
        alpha: `(N, L)` diagonals, float64 on the host.
        beta: `(N, L)`: `beta[:, j]` couples rows j and j + 1.
        weights: `(N,)`; the form times its weight has mean `tr / D`.
        num_matvecs: products spent.
    """

    def __init__(
        self,
        operator: SPDOperator,
        deflated: Float[Array, "k d"],
        projected: Float[Array, "m d"] | None,
        *,
        kind: ProbeKind,
        preconditioner: Preconditioner | None = None,
        boundary: Boundary | None = None,
    ):
        """Makes an empty set.

        Args:
            operator: A.
            deflated: orthonormal rows that the starts are orthogonal to.
            projected: orthonormal rows removed after every step (re-projection), or None.
            kind: distribution of the starts.
            preconditioner: P, for `kind="shaped"`.
            boundary: of the run whose first rows are `projected`. With it a step removes what
                exact arithmetic would, and all of `projected` only before rounding matters;
                without it every step removes all.
        """
        self.kind: ProbeKind = kind
        self.dimension = operator.size - deflated.shape[0]
        self.depths = np.zeros(0, int)
        self.alpha, self.beta = np.zeros((0, 0)), np.zeros((0, 0))
        self.weights = np.zeros(0)
        self.num_matvecs = 0
        self._operator, self._deflated, self._projected = operator, deflated, projected
        self._preconditioner = preconditioner
        self.effective_dimension = float(self.dimension)
        if preconditioner is not None:
            # Starts cost no product: their squared norms scatter by 2 tr C^2.
            _, squares = _independent(
                jax.random.key(0), deflated, _SHAPE_SAMPLES, True, preconditioner
            )
            squares = np.asarray(squares, np.float64)
            scatter = np.var(squares, ddof=1) / np.mean(squares) ** 2
            self.effective_dimension = float(np.clip(2 / scatter, 1, self.dimension))
        # What was drawn, which later starts stay orthogonal to.
        self._starts = jnp.zeros((0, operator.size), operator.dtype)
        # Blocks of rows (current, previous) and the first row of each; rows move on together.
        self._blocks: list[tuple[int, Array, Array]] = []
        self._boundary = boundary
        # Of the block in progress: what may be left along `projected` in the current and the
        # previous rows, and the factor by which a step magnifies it.
        self._losses, self._growth = (0.0, 0.0), 0.0

    @property
    def num_probes(self) -> int:
        """Number of probes N."""
        return len(self.depths)

    def add(self, key: PRNGKeyArray, *sizes: int) -> None:
        """Draws more starts, blocks of these sizes; no product is spent.

        At most D in total for `"sphere"`.
        """
        count = sum(sizes)
        # Starts cost no product: a few more are drawn, so that fewer programs are compiled.
        drawn = count if count <= 8 else -(-count // 8) * 8
        if self.kind == "sphere":
            drawn = min(drawn, self.dimension - self.num_probes)
            rows = _orthonormal(key, self._deflated, self._starts, drawn)
            weights = np.ones(count)
        else:
            gaussian = self.kind == "gaussian"
            rows, squares = _independent(key, self._deflated, drawn, gaussian, self._preconditioner)
            weights = np.asarray(squares, np.float64)[:count] / self.dimension
        first = 0
        for size in sizes:
            block = rows[first : first + size]
            self._blocks.append((self.num_probes + first, block, jnp.zeros_like(block)))
            first += size
        if self.kind == "sphere":
            self._starts = jnp.concatenate([self._starts, rows[:count]])
        self.depths = np.concatenate([self.depths, np.zeros(count, int)])
        self.weights = np.concatenate([self.weights, weights])
        self.alpha = _padded(self.alpha, self.num_probes, self.alpha.shape[1])
        self.beta = _padded(self.beta, self.num_probes, self.beta.shape[1])

    def advance(self, count: int, block: int = -1) -> None:
        """One step of the first `count` probes of a block, by one block product.

        A block takes all its steps before another one does; by default it is the newest.
        """
        first, current, previous = self._blocks[block]
        rows = slice(first, first + count)
        depth = int(self.depths[first])
        if depth == 0:
            self._losses, self._growth = (float(jnp.finfo(current.dtype).eps), 0.0), 0.0
        if depth == self.alpha.shape[1]:
            self.alpha = _padded(self.alpha, self.num_probes, max(2 * depth, 4))
            self.beta = _padded(self.beta, self.num_probes, max(2 * depth, 4))
        couplings = self.beta[rows, depth - 1] if depth else np.zeros(count)
        before, after = self._reprojections()
        current, previous = current[:count], previous[:count]
        reproject = before
        if before and self._projected is not None and self._operator.runs_on_host():
            # A product on the host is made before the step, and so is what comes before it.
            current = _remove(current, self._projected)
            previous, reproject = _remove(previous, self._projected), False
        alpha, beta, following, current = _step(
            multiplied(self._operator, current),
            self._projected,
            self._boundary,
            current,
            previous,
            jnp.asarray(couplings, self._operator.dtype),
            jnp.asarray(reproject),
            jnp.asarray(after),
        )
        self.alpha[rows, depth] = np.asarray(alpha, np.float64)
        self.beta[rows, depth] = np.asarray(beta, np.float64)
        self.depths[rows] += 1
        self._blocks[block] = (first, following, current)
        self.num_matvecs += count
        if self._boundary is not None:
            eps = float(jnp.finfo(current.dtype).eps)
            residuals = self.beta[rows, depth]
            least = float(np.min(residuals, where=residuals > 0, initial=np.inf))
            self._growth = float(self._boundary.norm) / least
            last, before_last = (eps, eps) if before else self._losses
            self._losses = (eps if after else self._growth * (last + before_last + eps), last)

    def _reprojections(self) -> tuple[bool, bool]:
        """Whether the next step removes `projected` before its product, and after it.

        Semi-orthogonality is enough: tridiagonals are right to eps while the rows are orthogonal
        to sqrt(eps). Before means from two rows, since both enter the recurrence (Simon 1984). A
        step multiplies what is left along Q by ||A|| / beta at most.
        """
        if self._projected is None:
            return False, False
        if self._boundary is None:
            return False, True
        eps = float(jnp.finfo(self._operator.dtype).eps)
        if self._growth * eps > eps**0.5:
            return max(self._losses) > eps**0.5, True
        return self._growth * (sum(self._losses) + eps) > eps**0.5, False

    def reached(self, depth: int) -> Bool[np.ndarray, " N"]:
        """Which probes have taken `depth` steps."""
        return self.depths >= depth

    def tridiagonals(
        self, which: Bool[np.ndarray, " N"] | Int[np.ndarray, " n"], depth: int
    ) -> tuple[Float[np.ndarray, "n l"], Float[np.ndarray, "n l"]]:
        """Diagonals and couplings of some probes, cut at `depth`."""
        return self.alpha[which, :depth], self.beta[which, :depth]


def block_sizes(count: int) -> list[int]:
    """`count` as a sum of the sizes 1, 2, 3, 4, 6, 8, 12, 16, 24, ..., the largest first.

    Every size of a block is compiled once, for seconds where the product is a network's: so few
    serve all budgets.
    """
    sizes: list[int] = []
    while count > 0:
        power = 1 << (count.bit_length() - 1)
        sizes.append(power + power // 2 if count >= power + power // 2 else power)
        count -= sizes[-1]
    return sizes


def _padded(matrix: np.ndarray, rows: int, columns: int) -> np.ndarray:
    result = np.zeros((rows, columns))
    result[: matrix.shape[0], : matrix.shape[1]] = matrix
    return result


def _remove(block: Array, rows: Array) -> Array:
    coefficients = jnp.matmul(block, rows.T, precision=_HIGHEST)
    return block - jnp.matmul(coefficients, rows, precision=_HIGHEST)


@eqx.filter_jit
def _orthonormal(key: PRNGKeyArray, deflated: Array, taken: Array, count: int) -> Array:
    size = deflated.shape[1]
    block = jax.random.normal(key, (count, size), deflated.dtype)
    block = _remove(_remove(block, deflated), taken)
    columns, _ = jnp.linalg.qr(block.T)
    if 2 * (deflated.shape[0] + taken.shape[0] + count) > size:
        # Where little is left of a start, or starts nearly depend on each other, what rounding
        # left along the other rows has been magnified.
        columns, _ = jnp.linalg.qr(_remove(_remove(columns.T, deflated), taken).T)
    return columns.T


@eqx.filter_jit
def _independent(
    key: PRNGKeyArray,
    deflated: Array,
    count: int,
    gaussian: bool,
    preconditioner: Preconditioner | None,
) -> tuple[Array, Array]:
    shape, dtype = (count, deflated.shape[1]), deflated.dtype
    if gaussian:
        block = jax.random.normal(key, shape, dtype)
    else:
        block = jax.random.rademacher(key, shape, dtype)
    if preconditioner is not None:
        block = preconditioner.inv_sqrt_mv(block)
    block = _remove(_remove(block, deflated), deflated)
    squares = jnp.sum(block**2, axis=1)
    return block / jnp.sqrt(squares)[:, None], squares


@eqx.filter_jit
def _step(
    operator: SPDOperator,
    projected: Array | None,
    boundary: Boundary | None,
    current: Array,
    previous: Array,
    couplings: Array,
    before: Array,
    after: Array,
) -> tuple[Array, Array, Array, Array]:
    """One Lanczos step of every row: alpha, beta, the next rows, and the rows it started from."""

    def remove_if(wanted, block):
        if projected is None:
            return block
        rows = projected
        return jax.lax.cond(wanted, lambda block: _remove(block, rows), lambda block: block, block)

    current, previous = remove_if(before, current), remove_if(before, previous)
    product = operator.block_mv(current)
    alpha = jnp.sum(product * current, axis=1)
    scale = jnp.max(jnp.abs(product), axis=1)
    product = product - couplings[:, None] * previous - alpha[:, None] * current
    if boundary is not None:
        along = boundary.coupling * jnp.matmul(current, boundary.rows[1], precision=_HIGHEST)
        product = product - along[:, None] * boundary.rows[0][None, :]
    product = remove_if(after, product)
    largest = jnp.max(jnp.abs(product), axis=1)
    safe = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    beta = safe * jnp.sqrt(jnp.sum((product / safe[:, None]) ** 2, axis=1))
    # A residual at rounding level ends the probe; NaN must not look like one. Products are right to
    # a few eps ||A||, however small A is on the complement.
    size = jnp.abs(alpha) + couplings + scale
    if boundary is not None:
        size = jnp.maximum(size, boundary.norm)
    exhausted = beta <= 10 * jnp.finfo(beta.dtype).eps * size
    beta = jnp.where(exhausted, 0, beta)
    following = jnp.where(exhausted[:, None], 0, product / jnp.where(exhausted, 1, beta)[:, None])
    return alpha, beta, following, current
