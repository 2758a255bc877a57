"""What the Krylov methods are compared with, in the same form (see methods.py).

exact           the Gram form (or a dense eigendecomposition)
eigen_shift     exact eigenvectors, 1/lambda outside of their span
eigen_matched   the same with the true mean variance outside
subspace        Faller and Martin 2025: a projection, nothing (or 1/lambda) outside
diagonal, swag
"""

import numpy as np
import scipy.linalg
from methods import Approximation


class GramForm:
    """G = R^T R by its r x r Gram matrix: the exact inverse and exact eigenpairs, r <= p.

    The rows are used as they are (r x p in memory once); everything r x r is float64.
    """

    def __init__(self, rows):
        self.rows = np.asarray(rows)
        values, vectors = np.linalg.eigh(gram(self.rows))
        order = np.argsort(values)[::-1]
        self.values, self.vectors = np.maximum(values[order], 0), vectors[:, order]

    @property
    def size(self):
        return self.rows.shape[1]

    def _inner(self, shift, count):
        values, vectors = self.values[:count], self.vectors[:, :count]
        return -(vectors / (shift * (shift + values))) @ vectors.T

    def exact(self, shift) -> Approximation:
        """`(G + lambda I)^-1` by Woodbury."""
        count = len(self.values)
        inner = self._inner(shift, count)
        return Approximation("exact", self.rows, inner, 1 / shift, count / 2, count)

    def eigen_shift(self, count, shift) -> Approximation:
        """The leading eigenpairs exactly, 1/lambda outside of their span."""
        inner = self._inner(shift, count)
        return Approximation("eigen_shift", self.rows, inner, 1 / shift, np.nan, count)

    def eigen_matched(self, count, shift) -> Approximation:
        """The leading eigenpairs exactly, outside the variance that makes the trace exact."""
        rest = self.mean_rest(count, shift)
        values, vectors = self.values[:count], self.vectors[:, :count]
        safe = np.where(values > 0, values, 1)
        inner = (vectors * ((1 / (shift + values) - rest) / safe)) @ vectors.T
        return Approximation("eigen_matched", self.rows, inner, rest, np.nan, count)

    def mean_rest(self, count, shift):
        """The mean variance outside the span of the leading eigenvectors."""
        others = np.sum(1 / (self.values[count:] + shift))
        others += (self.size - len(self.values)) / shift
        return others / (self.size - count)

    def solve(self, block, shift):
        """`(G + lambda I)^-1 v` for every row v."""
        inner = self._inner(shift, len(self.values)).astype(block.dtype)
        return block / block.dtype.type(shift) + ((block @ self.rows.T) @ inner) @ self.rows

    def mv(self, block):
        """`G v` for every row v."""
        return (block @ self.rows.T) @ self.rows

    def entries(self, index):
        """The rows and columns of G at an index."""
        chosen = self.rows[:, index]
        return chosen.T @ chosen


class DenseForm:
    """The same for a G that is given as a matrix (p x p, float64): FashionMNIST only."""

    def __init__(self, matrix, count, *, iterations=6):
        """Finds the leading `count` eigenpairs, by subspace iteration from a fixed random block."""
        self.matrix = matrix
        self.size = len(matrix)
        self.values, self.rows = _leading_eigenpairs(matrix, min(count, self.size), iterations)
        self._roots = {}

    def exact(self, shift) -> Approximation:
        """`(G + lambda I)^-1 = B^T B` with the inverse B of a Cholesky factor."""
        root = self._inverse_root(shift)
        return Approximation("exact", root, None, 0.0, self.size, self.size)

    def _inverse_root(self, shift):
        if shift not in self._roots:
            shifted = self.matrix + shift * np.eye(self.size)
            lower = scipy.linalg.cholesky(shifted, lower=True, overwrite_a=True)
            inverse, info = scipy.linalg.lapack.dtrtri(lower, lower=1, overwrite_c=1)
            assert info == 0
            self._roots[shift] = np.ascontiguousarray(np.tril(inverse))
        return self._roots[shift]

    def eigen_shift(self, count, shift) -> Approximation:
        """The leading eigenpairs exactly, 1/lambda outside of their span."""
        return self._leading("eigen_shift", count, shift, 1 / shift)

    def eigen_matched(self, count, shift) -> Approximation:
        """The leading eigenpairs exactly, outside the variance that makes the trace exact."""
        total = np.sum(self._inverse_root(shift) ** 2)
        others = total - np.sum(1 / (self.values[:count] + shift))
        return self._leading("eigen_matched", count, shift, others / (self.size - count))

    def _leading(self, name, count, shift, rest):
        inner = np.diag(1 / (self.values[:count] + shift) - rest)
        return Approximation(name, self.rows, inner, rest, np.nan, count)

    def solve(self, block, shift):
        """`(G + lambda I)^-1 v` for every row v."""
        root = self._inverse_root(shift)
        return (block @ root.T) @ root

    def mv(self, block):
        """`G v` for every row v."""
        return block @ self.matrix

    def entries(self, index):
        """The rows and columns of G at an index."""
        return self.matrix[np.ix_(index, index)]


def _leading_eigenpairs(matrix, count, iterations):
    width = min(count + count // 4 + 10, len(matrix))
    single = matrix.astype(np.float32)
    block = np.random.default_rng(0).standard_normal((len(matrix), width)).astype(np.float32)
    for _ in range(iterations):
        block, _ = scipy.linalg.qr(single @ block, mode="economic", check_finite=False)
    block, _ = scipy.linalg.qr(block.astype(np.float64), mode="economic", check_finite=False)
    values, rotation = np.linalg.eigh(block.T @ (matrix @ block))
    leading = np.argsort(values)[::-1][:count]
    return values[leading], np.ascontiguousarray((block @ rotation[:, leading]).T)


def gram(rows, chunk=2**16):
    """`R R^T` in float64, without a float64 copy of the rows."""
    total = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], chunk):
        part = rows[:, start : start + chunk].astype(np.float64)
        total += part @ part.T
    return total


def projection_directions(images, jacobian_rows, count):
    """`Psi J^T U` of Faller and Martin 2025, orthonormal: one array of rows for all sizes.

    The first s rows span the directions of size s, as QR keeps the order of columns.

    Args:
        images: (k, p), `Psi v` for the rows v of J; Psi is close to the posterior covariance.
        jacobian_rows: (k, p), Jacobians at training inputs.
        count: the largest size.
    """
    matrix = np.asarray(images @ jacobian_rows.T, np.float64)
    _, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    leading = vectors[:, ::-1][:, :count].astype(images.dtype)
    columns, _ = scipy.linalg.qr(
        (leading.T @ images).T, mode="economic", overwrite_a=True, check_finite=False
    )
    return np.ascontiguousarray(columns.T)


def projected_curvature(rows, curvature_mv):
    """`B G B^T` for rows B, float64; one product per row."""
    matrix = np.asarray(curvature_mv(rows) @ rows.T, np.float64)
    return (matrix + matrix.T) / 2


def subspace(name, rows, projected, count, shift, *, rest=0.0) -> Approximation:
    """`B^T (B (G + lambda I) B^T)^-1 B + rest (I - B^T B)` over the first `count` rows.

    Args:
        name: of the method.
        rows: orthonormal rows B, or an index of coordinates.
        projected: `B G B^T` for at least `count` rows.
        count: s.
        shift: lambda.
        rest: 0 for the paper's projection, 1/lambda for its shifted form.
    """
    inverse = np.linalg.inv(projected[:count, :count] + shift * np.eye(count))
    inner = inverse - rest * np.eye(count)
    return Approximation(name, rows, inner, rest, count, count)


def largest_parameters(flat, count):
    """Index of the parameters of largest magnitude (subset-Magnitude)."""
    return np.argsort(-np.abs(np.asarray(flat)), kind="stable")[:count]


def diagonal(values, shift) -> Approximation:
    """`1 / (diag G + lambda)`."""
    none = np.zeros((0, len(values)))
    rest = 1 / (np.asarray(values, np.float64) + shift)
    return Approximation("diagonal", none, np.zeros((0, 0)), rest, np.nan, 1)


def swag(snapshots) -> Approximation:
    """SWAG's Gaussian: half the diagonal and half the low-rank covariance of SGD iterates.

    Args:
        snapshots: (K, p), iterates of SGD with a constant rate around the trained weights.

    Source:
        Maddox et al. 2019, equation (1).
    """
    deviations = np.asarray(snapshots, np.float64) - np.mean(snapshots, axis=0, dtype=np.float64)
    count = len(deviations)
    rest = np.mean(deviations**2, axis=0) / 2
    inner = np.eye(count) / (2 * (count - 1))
    return Approximation("swag", deviations, inner, rest, 0, count)
