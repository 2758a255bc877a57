"""Independent dense formulas and test matrices, in NumPy float64. No code of the library is used.

The spectra and right-hand sides are those of METHOD section 4, last paragraph.
"""

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
