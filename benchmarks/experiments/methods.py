"""Approximations of `(G + lambda I)^-1`, as covariances of outputs: one form for all of them.

G is the curvature (p x p, never formed here), lambda the prior precision. Every approximation is
`diag + B^T N B` with a scalar or a vector on the diagonal, shared rows B (r x p: a Krylov basis,
square-root rows of G, or rows of a projection) and a small matrix N. The covariance of the outputs
whose Jacobian is J then needs `J J^T` (or `J D J^T`) and `J B^T` only, so that all sizes and all
prior precisions over the same rows share the expensive products with them.

    sigma_m         the papers' layout: s resolved vectors, coupling, isotropic bulk
    ours            the same run and probes in the library's default layout, `pnkrylov.inverse(A,
                    num_steps=s)`: the look-ahead vectors are resolved as well
    ours_budget     `pnkrylov.inverse(A, budget=)` with as many products as sigma_m
    krylov_shift    Krylov vectors, 1/lambda outside of their span
    ours_from       a block run from given directions, `pnkrylov.inverse(A, block_size=, start=)`

What is not in the library is in prototypes.py, everything that is no Krylov method in baselines.py.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pnkrylov.beliefs import InverseBelief, inverse_belief
from pnkrylov.budgets import split_budget
from pnkrylov.inverse import inverse
from pnkrylov.krylov import KrylovBasis, lanczos
from pnkrylov.operators import SPDOperator, as_operator
from pnkrylov.probes import PROBE_TOLERANCE, Probes, run_probes
from pnkrylov.runs import Run

# The defaults of `pnkrylov.inverse`.
LOOKAHEAD, NUM_PROBES, PROBE_DEPTH = 20, 8, 20
# Blocks of a run from given directions.
FROM_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class Approximation:
    """`diag(rest) + B^T N B`, and what it cost.

    Attributes:
        name: of the method.
        rows: B; the first `len(inner)` of these rows, or an index of coordinates of the space.
        inner: N, float64; None for the identity.
        rest: a number, or a vector (p,).
        products: products with G that were spent (a row of a Jacobian counts as half of one).
        stored: vectors of length p that are kept.
    """

    name: str
    rows: np.ndarray
    inner: np.ndarray | None
    rest: float | np.ndarray
    products: float
    stored: int


def covariances(approximations, chunks, report=lambda: None):
    """Output covariances at test points.

    Args:
        approximations: any number of them; rows that are one array are multiplied once.
        chunks: Jacobians of test points (n, K, p), in chunks.
        report: called after every chunk.

    Returns:
        One array (n, K, K), float64, per approximation.
    """
    parts = [[] for _ in approximations]
    cast: dict[int, np.ndarray] = {}
    for jacobian in chunks:
        jacobian = np.ascontiguousarray(jacobian)
        shared = {}
        for approximation, found in zip(approximations, parts, strict=True):
            rows = approximation.rows
            if id(rows) not in cast:
                # An index of coordinates stays one.
                dtype = jacobian.dtype if rows.ndim == 2 else rows.dtype
                cast[id(rows)] = rows.astype(dtype, copy=False)
            found.append(_covariance(approximation, jacobian, cast[id(rows)], shared))
        report()
    return [np.concatenate(found) for found in parts]


def _covariance(approximation, jacobian, rows, shared):
    inner, rest = approximation.inner, approximation.rest
    if id(rest) not in shared and isinstance(rest, np.ndarray):
        shared[id(rest)] = _outer(jacobian * rest.astype(jacobian.dtype), jacobian)
    if "gram" not in shared and not isinstance(rest, np.ndarray) and rest:
        shared["gram"] = _outer(jacobian, jacobian)
    used = inner is None or len(inner) > 0
    if id(rows) not in shared and used:
        shared[id(rows)] = coordinates(jacobian, rows).astype(np.float64)
    total = shared[id(rest)] if isinstance(rest, np.ndarray) else 0.0
    if not isinstance(rest, np.ndarray) and rest:
        total = rest * shared["gram"]
    if used:
        along = shared[id(rows)] if inner is None else shared[id(rows)][:, :, : len(inner)]
        total = total + _outer(along if inner is None else _times(along, inner), along)
    return (total + total.transpose(0, 2, 1)) / 2


def coordinates(jacobian, rows):
    """`J B^T`, for rows or for an index of coordinates: (n, K, r)."""
    return jacobian[:, :, rows] if rows.ndim == 1 else _times(jacobian, rows.T)


def _times(block, matrix):
    """One large product: NumPy would multiply a stack of small ones."""
    flat = block.reshape(-1, block.shape[-1]) @ matrix
    return flat.reshape(*block.shape[:-1], -1)


def _outer(left, right):
    return np.matmul(left, right.transpose(0, 2, 1)).astype(np.float64)


def rows_operator(rows) -> SPDOperator:
    """`G = R^T R` from stored rows R."""
    product = jax.tree_util.Partial(_rows_product, jnp.asarray(rows))
    return as_operator(product, like=jnp.zeros(rows.shape[1], rows.dtype))


def _rows_product(rows, vector):
    return (rows @ vector) @ rows


def matrix_operator(matrix) -> SPDOperator:
    """A stored matrix."""
    return as_operator(jnp.asarray(matrix))


class KrylovRun:
    """One Lanczos run, whose beginnings serve every s, and every lambda as a shift.

    `belief` and `belief_with_budget` give what `pnkrylov.inverse` gives with the same key, without
    its check of symmetry, and without its steps being taken again for every s. All of them have
    the shapes of the whole run, so that everything is compiled once.

    Args:
        operator: G, anything that `as_operator` takes.
        key: random key.
        num_steps: length of the run: as many as the largest method needs.
        like: example of a vector, for callables.
        driver: see `pnkrylov.lanczos`.
        progress: show a progress bar (host driver).
        basis: the run if it was made before, with the same key.
    """

    def __init__(
        self, operator, key, num_steps, *, like=None, driver="auto", progress=False, basis=None
    ):
        self.operator: SPDOperator = as_operator(operator, like=like)
        start_key, _, self._probe_key = jax.random.split(key, 3)
        size, dtype = self.operator.size, self.operator.dtype
        if basis is None:
            start = self.operator.structure.unravel(jax.random.normal(start_key, (size,), dtype))
            steps = min(num_steps, size)
            basis = lanczos(self.operator, start, steps, driver=driver, progress=progress)
        self.basis: KrylovBasis = basis
        self.rows = np.asarray(basis.vectors)
        self._probes: dict[tuple, Probes] = {}

    @property
    def filled(self):
        """Lanczos vectors that there are: fewer than steps after a breakdown."""
        return int(self.basis.filled)

    def belief(self, level, shift, *, layout="resolve-all", num_probes=NUM_PROBES) -> InverseBelief:
        """`inverse(G, num_steps=level, shift=shift, layout=layout, check_symmetric=False)`."""
        length = min(level + LOOKAHEAD, self.operator.size)
        probes = self.probes(level, length, shift, num_probes, PROBE_DEPTH)
        return self._belief(length, level, shift, probes, layout)

    def belief_with_budget(self, budget, shift, *, num_probes=NUM_PROBES) -> InverseBelief:
        """`inverse(G, budget=budget, shift=shift, check_symmetric=False)`."""
        size = self.operator.size
        steps, count, depth = split_budget(budget, num_probes, PROBE_DEPTH, size, 1)
        probes = self.probes(steps, steps, shift, count, depth)
        length = min(budget - count * int(probes.steps), size)
        return self._belief(length, steps, shift, probes, "resolve-all")

    def probes(self, level, length, shift, count, depth) -> Probes:
        """The random probes of a call of `inverse` whose run has `length` steps."""
        name = (level, length, float(shift), count, depth)
        if name not in self._probes:
            basis = self.beginning(length)
            self._probes[name] = run_probes(
                self.operator,
                basis,
                jnp.asarray(level, jnp.int32),
                self._probe_key,
                count,
                depth,
                # Probes that span the complement have no error but that of their depth.
                tolerance=0.0 if 0 < self.operator.size - length <= count else PROBE_TOLERANCE,
                shift=jnp.asarray(shift, basis.dtype),
                driver=basis.driver,
            )
        return self._probes[name]

    def _belief(self, length, level, shift, probes, layout):
        basis = self.beginning(length)
        if length > basis.num_rows:
            raise ValueError(f"{length} steps are needed, and the run has {basis.num_rows}.")
        run = Run(
            basis=basis,
            level=jnp.asarray(level, jnp.int32),
            probes=probes,
            asymmetry=jnp.asarray(-1, basis.dtype),
            num_matvecs=length + probes.num_probes * probes.steps,
            structure=self.operator.structure,
        )
        centre = jnp.zeros((self.operator.size,), basis.dtype)
        return inverse_belief(run, centre, jnp.asarray(shift, basis.dtype), layout)

    def beginning(self, length) -> KrylovBasis:
        """The first `length` steps; later rows stay where they are and count as not filled."""
        basis = self.basis
        inside = np.arange(basis.num_rows) < length
        following = basis.vectors[length] if length < basis.num_rows else basis.next_vector
        return dataclasses.replace(
            basis,
            alpha=jnp.where(inside, basis.alpha, 0),
            beta=jnp.where(inside, basis.beta, 0),
            next_vector=following,
            filled=jnp.minimum(basis.filled, length),
        )

    def inverse(self, length, shift) -> np.ndarray:
        """`(T + lambda I)^-1` of the first `length` steps, float64."""
        alpha = np.asarray(self.basis.alpha[:length], np.float64) + shift
        beta = np.asarray(self.basis.beta[: length - 1], np.float64)
        return np.linalg.inv(np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1))


@eqx.filter_jit
def _over_its_basis(covariance):
    # Over its own basis the same formulas give the matrix of the resolved part and the coupling.
    unit = jnp.eye(covariance.vectors.shape[0], dtype=covariance.dtype)
    return eqx.tree_at(lambda c: c.vectors, covariance, unit).push(unit)


def of_belief(name, run: KrylovRun, belief: InverseBelief, *, rest=None) -> Approximation:
    """The covariance of a belief over the rows of its run.

    Args:
        name: of the method.
        run: the run.
        belief: a belief that it made.
        rest: a variance to put into the bulk instead of the measured one.
    """
    covariance = belief.covariance
    rest = float(belief.stats.bulk_variance) if rest is None else rest
    deviation = jnp.asarray(rest**0.5, covariance.dtype)
    covariance = eqx.tree_at(lambda c: c.bulk_deviation, covariance, deviation)
    count = int(belief.run.basis.filled)
    inside = np.asarray(_over_its_basis(covariance), np.float64)[:count, :count]
    # A vector u of its own is kept with the coupling; resolved look-ahead vectors are rows.
    stored = int(belief.stats.num_steps) + int(covariance.has_u)
    products = int(belief.stats.num_matvecs)
    return Approximation(name, run.rows, inside - rest * np.eye(count), rest, products, stored)


def sigma_m(run: KrylovRun, level, shift, **options) -> Approximation:
    """The papers' Sigma_m with m = s (pslq.md section 4; METHOD.md section 3)."""
    return of_belief("sigma_m", run, run.belief(level, shift, layout="paper", **options))


def probe_steps(run: KrylovRun, level, shift, num_probes=NUM_PROBES) -> int:
    """Steps that probes at this level take until their quadrature has converged."""
    length = level + LOOKAHEAD
    return int(run.probes(level, length, shift, num_probes, PROBE_DEPTH).steps)


def ours(run: KrylovRun, level, shift, **options) -> Approximation:
    """The same products as `sigma_m` in the default layout."""
    return of_belief("ours", run, run.belief(level, shift, **options))


def ours_budget(run: KrylovRun, budget, shift, *, num_probes=NUM_PROBES) -> Approximation:
    """As many products as are given, split between run and probes by the library."""
    belief = run.belief_with_budget(budget, shift, num_probes=num_probes)
    return of_belief("ours_budget", run, belief)


def krylov_shift(run: KrylovRun, length, shift, *, rest=None) -> Approximation:
    """`Q T^-1 Q^T + (I - Q Q^T) / lambda` over `length` Krylov vectors, one product each.

    `rest` is another variance outside of their span.
    """
    count = min(length, run.filled)
    rest = 1 / shift if rest is None else rest
    inner = run.inverse(count, shift) - rest * np.eye(count)
    return Approximation("krylov_shift", run.rows, inner, rest, length, count)


def sigma_m_prior_bulk(run: KrylovRun, level, shift) -> Approximation:
    """Sigma_m with the variance 1/lambda, instead of the measured one, in its bulk."""
    belief = run.belief(level, shift, layout="paper")
    return of_belief("sigma_m_prior_bulk", run, belief, rest=1 / shift)


def sigma_m_uncoupled(run: KrylovRun, level, shift) -> Approximation:
    """Sigma_m with beta_m = 0: resolved block and bulk, as if the Krylov space were invariant.

    The bulk has the trace of T_perp^-1, which the random probes and the boundary probe give.
    """
    belief = run.belief(level, shift, layout="paper")
    unit = belief.run.tridiagonal(belief.alpha).unit
    probes = belief.run.probes
    total = float(probes.mean(probes.inverse_forms(belief.alpha, unit))[0] / unit)
    # The boundary probe: e_1^T T_perp^-1 e_1 from the steps after level m.
    alpha, beta = (np.asarray(x, np.float64) for x in (run.basis.alpha, run.basis.beta))
    pivot = np.inf
    for index in reversed(range(level, level + LOOKAHEAD)):
        pivot = alpha[index] + shift - beta[index] ** 2 / pivot
    rest = (total + 1 / pivot) / (run.operator.size - level)
    products = int(belief.stats.num_matvecs)
    inner = run.inverse(level, shift) - rest * np.eye(level)
    return Approximation("sigma_m_uncoupled", run.rows, inner, rest, products, level)


def principal_directions(rows, count):
    """The leading right singular vectors (count, p) of Jacobian rows, by their Gram matrix."""
    squares, vectors = np.linalg.eigh(np.asarray(rows @ rows.T, np.float64))
    leading = vectors[:, ::-1][:, :count] / np.sqrt(squares[::-1][:count])
    return np.ascontiguousarray(leading.T.astype(rows.dtype) @ rows)


def ours_from(operator, key, directions, total, shift) -> Approximation:
    """A block run that starts in given directions, and one random probe for its bulk.

    A quarter of the products are start vectors: three blocks are resolved, a fourth looks ahead.

    Args:
        operator: G.
        key: random key, of the probe.
        directions: (k, p), at least a quarter of `total`.
        total: products, probe included.
        shift: lambda.
    """
    count = (total - PROBE_DEPTH) // FROM_BLOCKS
    dtype = operator.dtype
    belief = inverse(
        operator,
        key=key,
        block_size=count,
        start=jnp.asarray(directions[:count], dtype),
        num_steps=FROM_BLOCKS - 1,
        lookahead=1,
        num_probes=1,
        probe_depth=PROBE_DEPTH,
        shift=jnp.asarray(shift, dtype),
        check_symmetric=False,
        driver="compiled",
    )
    rest = float(belief.stats.bulk_variance)
    tridiagonal = belief.run.tridiagonal(belief.alpha)
    size = FROM_BLOCKS * count
    inner = np.asarray(tridiagonal.solve(jnp.eye(size, dtype=dtype)) / tridiagonal.unit, np.float64)
    present = np.asarray(belief.run.basis.present)
    inner = np.where(present[:, None] & present[None, :], inner - rest * np.eye(size), 0)
    rows, products = np.asarray(belief.run.basis.vectors), int(belief.stats.num_matvecs)
    return Approximation("ours_from", rows, inner, rest, products, size)
