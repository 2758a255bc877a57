"""What several test modules share: counters, exact runs, the cases of the identities."""

import contextlib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import scipy.sparse.linalg as spla

from oracles import SPECTRA, split
from pnkrylov._structure import VectorStructure
from pnkrylov.krylov import lanczos
from pnkrylov.operators import as_operator
from pnkrylov.probes import run_probes
from pnkrylov.runs import Run

_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def count_compilations():
    """Yields a list that grows by one entry for every XLA compilation inside the block."""
    compiled = []

    def listen(event, _duration, **_):
        if event == _COMPILED:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def no_type_checker():
    """Lets wrong types through to the library's own checks, as for a user without beartype."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


class CountingOperator(spla.LinearOperator):
    """A host operator that counts the vectors it was multiplied with."""

    def __init__(self, matrix, before_product=None):
        self.matrix = np.asarray(matrix)
        self.products = 0
        self.before_product = before_product
        super().__init__(self.matrix.dtype, self.matrix.shape)

    def _matvec(self, x):
        return self._matmat(np.reshape(x, (-1, 1)))[:, 0]

    def _matmat(self, X):
        self.products += X.shape[1]
        if self.before_product is not None:
            self.before_product(self.products)
        return self.matrix @ X


def start_vector(size, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(size), dtype)


@functools.cache
def exact_run(spectrum, size, dtype, level, depth=60):
    """A run to the end with a full look-ahead and probes that span the complement of `level`.

    Probes are not re-orthogonalised, which delays their quadrature: for a wide complement the
    depth must exceed its dimension before the trace is exact.

    Returns:
        The dense matrix (as the run saw it, in float64) and the `Run`.
    """
    matrix = SPECTRA[spectrum](size)[0].astype(dtype)
    start, key = start_vector(size, dtype), jax.random.key(size)
    basis, probes = _probed(matrix, start, jnp.asarray(level, jnp.int32), key, depth)
    return matrix.astype(np.float64), make_run(basis, level, probes)


@eqx.filter_jit
def _probed(matrix, start, level, key, depth):
    operator, size = as_operator(matrix), matrix.shape[0]
    basis = lanczos(operator, start, size)
    return basis, run_probes(operator, basis, level, key, size, depth)


def make_run(basis, level, probes=None):
    """A `Run` from its parts; nothing in it was counted."""
    return Run(
        basis=basis,
        level=jnp.asarray(level, jnp.int32),
        probes=probes,
        asymmetry=jnp.asarray(-1, basis.dtype),
        num_matvecs=jnp.asarray(0, jnp.int32),
        structure=VectorStructure.flat(basis.size, basis.dtype),
    )


def split_of(matrix, run):
    """The dense oracle at the level of a run, fed with the run's own Lanczos vectors."""
    level = min(int(run.level), int(run.basis.filled))
    rows = np.asarray(run.basis.vectors, np.float64)
    exists = level < int(run.basis.filled)
    return split(matrix, rows[:level], rows[level] if exists else None)


def relative_tolerance(dtype, condition):
    """1e-10 in float64 and 1e-4 in float32, where eps times the condition number allows."""
    target = {"float32": 1e-4, "float64": 1e-10}[jnp.dtype(dtype).name]
    return max(target, 20 * float(jnp.finfo(dtype).eps) * condition)


# Levels per size at which the identities are checked: first, middle, last but one, last.
LEVELS = [
    *((2, m) for m in (1, 2)),
    *((3, m) for m in (1, 2, 3)),
    *((20, m) for m in (1, 4, 10, 19, 20)),
    *((200, m) for m in (1, 100, 199, 200)),
]
MAIN_SPECTRA = ("bulk+outliers", "power-law-1", "exponential", "kernel-5d")


def identity_cases():
    """(spectrum, size, level, probe depth); most of d = 200 is marked slow."""
    cases = []
    for spectrum in MAIN_SPECTRA:
        for size, level in LEVELS:
            # Every probe explores its complement. In the widest one the loss of orthogonality
            # delays the quadrature of the exponential most.
            depth = {(200, 1): 200, (200, 100): 100}.get((size, level), 60 if size < 200 else 4)
            depth = 1000 if (spectrum, size, level) == ("exponential", 200, 1) else depth
            everyday = size < 200 or (depth < 100 and spectrum == "exponential")
            marks = [] if everyday else [pytest.mark.slow]
            cases.append(pytest.param(spectrum, size, level, depth, marks=marks))
    return cases
