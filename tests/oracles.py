"""Independent dense formulas and test matrices, in NumPy float64. No code of the library is used.

The spectra and right-hand sides are those of METHOD section 4, last paragraph.
"""

import dataclasses

import numpy as np


def random_orthogonal(size, seed):
    """A Haar-distributed orthogonal matrix (the signs of R fixed, else QR is not Haar)."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))
    return q * np.sign(np.diagonal(r))


def with_spectrum(eigenvalues, seed):
    """A dense SPD matrix with these eigenvalues and random orthogonal eigenvectors."""
    vectors = random_orthogonal(len(eigenvalues), seed)
    matrix = (vectors * eigenvalues) @ vectors.T
    return (matrix + matrix.T) / 2


def bulk_and_outliers(size, seed=0):
    """10 outliers in [1e2, 1e4] (at most a third of the size), the rest uniform in [0.5, 2]."""
    outliers = np.geomspace(1e4, 1e2, min(10, max(1, size // 3)))
    bulk = np.random.default_rng(seed + 1).uniform(0.5, 2, size - len(outliers))
    eigenvalues = np.concatenate([outliers, bulk])
    return with_spectrum(eigenvalues, seed), np.sort(eigenvalues)


def power_law(size, seed=0, *, power=1):
    """Eigenvalues 1e2 i^-power."""
    eigenvalues = 1e2 * np.arange(1.0, size + 1) ** -power
    return with_spectrum(eigenvalues, seed), np.sort(eigenvalues)


def exponential(size, seed=0, *, condition=2.2e4):
    """Eigenvalues 1e2 exp(-log(condition) i / size); 2.2e4 is exp(10), the milder of the two."""
    eigenvalues = 1e2 * np.exp(-np.log(condition) * np.arange(1, size + 1) / size)
    return with_spectrum(eigenvalues, seed), np.sort(eigenvalues)


def kernel_5d(size, seed=0):
    """exp(-|x - x'| / (0.3 sqrt 5)) + 0.01 I for uniform x in the five-dimensional unit cube."""
    x = np.random.default_rng(seed).uniform(size=(size, 5))
    distance = np.sqrt(((x[:, None, :] - x[None, :, :]) ** 2).sum(axis=-1))
    matrix = np.exp(-distance / (0.3 * np.sqrt(5))) + 0.01 * np.eye(size)
    return matrix, np.linalg.eigvalsh(matrix)


SPECTRA = {
    "bulk+outliers": bulk_and_outliers,
    "power-law-1": power_law,
    "power-law-2": lambda size, seed=0: power_law(size, seed, power=2),
    "exponential": exponential,
    "exponential-1e6": lambda size, seed=0: exponential(size, seed, condition=1e6),
    "kernel-5d": kernel_5d,
}
"""Name -> function (size, seed=0) -> (dense SPD matrix, ascending eigenvalues)."""


def right_hand_side(matrix, kind, seed=0):
    """`normal`: N(0, I); `prior`: N(0, A); `smooth`: A N(0, I)."""
    z = np.random.default_rng(seed + 1000).standard_normal(len(matrix))
    if kind == "normal":
        return z
    if kind == "prior":
        return np.linalg.cholesky(matrix) @ z
    if kind == "smooth":
        return matrix @ z
    raise ValueError(f"kind is {kind!r}; use 'normal', 'prior' or 'smooth'.")


RIGHT_HAND_SIDES = ("normal", "prior", "smooth")


@dataclasses.dataclass(frozen=True)
class Split:
    """The exact block inverse of METHOD section 2 at one level, by dense algebra.

    `rows` are the m basis vectors, `rest` the orthonormal complement with q_{m+1} first (rows),
    `T`, `T_perp`, `S` the blocks; `q_par` and `q_perp` vectors of length d, zero at a breakdown.
    """

    matrix: np.ndarray
    rows: np.ndarray
    rest: np.ndarray
    beta: float
    gamma: float
    T: np.ndarray
    T_perp: np.ndarray
    S: np.ndarray
    q_par: np.ndarray
    q_perp: np.ndarray

    def p(self, k):
        """`p_k = e_1^T S^-k e_1`."""
        return float(np.linalg.matrix_power(np.linalg.inv(self.S), k)[0, 0])

    @property
    def exists(self):
        return self.beta != 0

    @property
    def sigma_u(self):
        return self.p(3) / self.p(2)

    @property
    def c_norm(self):
        """`||c||`, c = (I - e e^T) (S^-1 along u): what is left of S^-1 u beside sigma_u u."""
        u = self.rest @ self.q_perp / np.linalg.norm(self.q_perp)
        image = np.linalg.solve(self.S, u)
        return float(np.linalg.norm(image - (u @ image) * u))

    @property
    def kappa_S(self):
        values = np.linalg.eigvalsh(self.S)
        return float(values[-1] / values[0])

    @property
    def omega(self):
        """Bulk variance: the trace of S^-1 without u, shared out over what is left."""
        trace = np.trace(np.linalg.inv(self.S))
        size = len(self.rest)
        if not self.exists:
            return float(trace / size) if size else 0.0
        return float((trace - self.sigma_u) / (size - 1)) if size > 1 else 0.0

    def coupling_block(self):
        """C_2 in the basis [q_par / ||q_par||, u]."""
        parallel, perpendicular = np.linalg.norm(self.q_par), np.linalg.norm(self.q_perp)
        cross = -parallel * perpendicular
        return np.array([[self.p(1) * parallel**2, cross], [cross, self.sigma_u]])

    def parts(self):
        """Dense resolved, coupling and bulk parts of Sigma_m (METHOD section 3)."""
        size = len(self.matrix)
        resolved = self.rows.T @ np.linalg.inv(self.T) @ self.rows
        bulk = np.eye(size) - self.rows.T @ self.rows
        coupling = np.zeros((size, size))
        if self.exists:
            u = self.q_perp / np.linalg.norm(self.q_perp)
            plane = np.stack([self.q_par / np.linalg.norm(self.q_par), u], axis=1)
            coupling = plane @ self.coupling_block() @ plane.T
            bulk = bulk - np.outer(u, u)
        return {"resolved": resolved, "coupling": coupling, "bulk": self.omega * bulk}

    def sigma(self):
        """Sigma_m, dense."""
        return sum(self.parts().values())

    def exact_inverse(self):
        """A^-1 by the five terms of METHOD section 2."""
        cross = np.outer(self.q_par, self.q_perp)
        s11 = self.p(1) if self.exists else 0.0
        return (
            self.rows.T @ np.linalg.inv(self.T) @ self.rows
            + s11 * np.outer(self.q_par, self.q_par)
            - cross
            - cross.T
            + self.rest.T @ np.linalg.inv(self.S) @ self.rest
        )


def split(matrix, rows, following=None):
    """Splits a dense matrix at orthonormal Lanczos vectors `rows` and the next one, if any."""
    matrix, rows = np.asarray(matrix, np.float64), np.asarray(rows, np.float64)
    size, level = len(matrix), len(rows)
    if level == size or (following is not None and not np.any(following)):
        following = None
    known = rows if following is None else np.vstack([rows, np.asarray(following, np.float64)])
    complete = np.linalg.qr(known.T, mode="complete")[0].T
    rest = complete[len(known) :]
    if following is not None:
        rest = np.vstack([np.asarray(following, np.float64), rest])
    T = rows @ matrix @ rows.T
    T_perp = rest @ matrix @ rest.T
    beta, gamma = 0.0, 0.0
    S, q_par, q_perp = T_perp.copy(), np.zeros(size), np.zeros(size)
    if following is not None:
        last, first = np.eye(level)[-1], np.eye(len(rest))[0]
        beta = float(following @ matrix @ rows[-1])
        gamma = float(beta**2 * np.linalg.inv(T)[-1, -1])
        S = T_perp - gamma * np.outer(first, first)
        q_par = beta * rows.T @ np.linalg.solve(T, last)
        q_perp = rest.T @ np.linalg.solve(S, first)
    return Split(matrix, rows, rest, beta, gamma, T, T_perp, S, q_par, q_perp)


def tridiagonal(alpha, beta):
    """The dense symmetric tridiagonal matrix."""
    alpha, beta = np.asarray(alpha, np.float64), np.asarray(beta, np.float64)
    return np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1)


def conjugate_gradient_errors(matrix, rhs, level):
    """True `||x - x_m||_2` and `||x - x_m||_A` of the best approximation in a Krylov space.

    The space is built by Arnoldi with repeated Gram-Schmidt, the solution by dense algebra.
    """
    vectors, w = [], rhs / np.linalg.norm(rhs)
    for _ in range(level):
        vectors.append(w / np.linalg.norm(w))
        w, basis = matrix @ vectors[-1], np.stack(vectors)
        for _ in range(3):
            w = w - basis.T @ (basis @ w)
    basis = np.stack(vectors) if vectors else np.zeros((0, len(rhs)))
    best = basis.T @ np.linalg.solve(basis @ matrix @ basis.T, basis @ rhs)
    error = np.linalg.solve(matrix, rhs) - best
    return np.linalg.norm(error), np.sqrt(error @ matrix @ error)
