"""The error that the look-ahead sees, against the true error of the best Krylov approximation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from pnkrylov.krylov import lanczos
from pnkrylov.lookahead import BRACKET, UNSEEN, lookahead_error
from pnkrylov.tridiagonal import Tridiagonal

SIZE = 20


@eqx.filter_jit
def errors(matrix, rhs, steps, lower_bound=None):
    """Errors of every level 0..steps of a run of `steps` steps, in the user's units."""
    basis = lanczos(matrix, rhs, steps)
    tridiagonal = Tridiagonal.of(basis, jnp.zeros((), rhs.dtype))
    levels = jnp.arange(steps + 1, dtype=jnp.int32)
    found = jax.vmap(lambda level: lookahead_error(tridiagonal, level, lower_bound))(levels)
    norm, energy = (
        basis.start_norm / tridiagonal.unit,
        basis.start_norm / jnp.sqrt(tridiagonal.unit),
    )
    return {
        "norm": found.norm * norm,
        "norm seen": found.norm_seen * norm,
        "norm upper": found.norm_upper * norm,
        "energy": found.energy_norm * energy,
        "energy seen": found.energy_norm_seen * energy,
        "share": found.seen(),
        "sufficient": found.sufficient(),
    }


def run(matrix, rhs, steps, lower_bound=None, dtype=jnp.float64):
    bound = None if lower_bound is None else jnp.asarray(lower_bound, dtype)
    found = errors(jnp.asarray(matrix, dtype), jnp.asarray(rhs, dtype), steps, bound)
    return {name: np.asarray(value, np.float64) for name, value in found.items()}


def truth(matrix, rhs, levels):
    pairs = [oracles.conjugate_gradient_errors(matrix, rhs, level) for level in levels]
    return np.array(pairs).T


@pytest.mark.parametrize("kind", oracles.RIGHT_HAND_SIDES)
@pytest.mark.parametrize("spectrum", oracles.SPECTRA)
def test_an_exhausted_run_has_seen_the_true_error(spectrum, kind, dtype):
    """Hestenes and Stiefel's sums are exact; rounding leaves about eps kappa of the first error."""
    matrix, eigenvalues = oracles.SPECTRA[spectrum](SIZE)
    kappa = eigenvalues[-1] / eigenvalues[0]
    eps = float(jnp.finfo(dtype).eps)
    if eps * kappa > 1e-2:
        pytest.skip("nothing of the small eigenvalues is left in float32")
    rhs = oracles.right_hand_side(matrix, kind)
    matrix, rhs = (np.asarray(x, dtype).astype(np.float64) for x in (matrix, rhs))
    found = run(matrix, rhs, SIZE, dtype=dtype)
    norm, energy = truth(matrix, rhs, range(SIZE))
    tolerance = max({"float32": 1e-4, "float64": 1e-10}[dtype.name], 10 * eps * kappa)
    assert tolerance < 1e-9 or dtype == jnp.float32 or kappa > 1e5
    for name in ("norm", "norm seen"):
        np.testing.assert_allclose(
            found[name][:SIZE], norm, rtol=tolerance, atol=tolerance * norm[0]
        )
    for name in ("energy", "energy seen"):
        np.testing.assert_allclose(
            found[name][:SIZE], energy, rtol=tolerance, atol=tolerance * energy[0]
        )
    # At the end nothing is left, exactly.
    for name in ("norm", "norm upper", "energy"):
        assert found[name][SIZE] == 0 or name == "norm upper"
    assert np.all(found["share"] == 1) and np.all(found["sufficient"])


@pytest.mark.parametrize("spectrum", ["bulk+outliers", "power-law-1", "exponential", "kernel-5d"])
def test_what_is_seen_grows_with_the_look_ahead_and_never_exceeds_the_truth(spectrum):
    matrix, _ = oracles.SPECTRA[spectrum](SIZE)
    rhs = oracles.right_hand_side(matrix, "normal")
    level = 3
    (norm,), (energy,) = truth(matrix, rhs, [level])
    before_norm = before_energy = 0.0
    for steps in (3, 4, 6, 10, 15, 20):
        found = run(matrix, rhs, steps)
        seen, seen_energy = found["norm seen"][level], found["energy seen"][level]
        assert before_norm < seen <= norm * (1 + 1e-9) or (steps == 3 and seen == 0)
        assert before_energy < seen_energy <= energy * (1 + 1e-9) or (steps == 3 and seen == 0)
        # The estimate adds to what was seen, and the share says how much.
        assert found["norm"][level] >= seen
        np.testing.assert_allclose(found["share"][level], (seen / found["norm"][level]) ** 2)
        before_norm, before_energy = seen, seen_energy
    np.testing.assert_allclose(before_norm, norm, rtol=1e-9)


@settings(max_examples=40)
@given(
    gaps=st.lists(st.floats(1e-3, 0.7), min_size=12, max_size=12),
    share=st.floats(0.01, 1.0),
    seed=st.integers(0, 1000),
    level=st.integers(0, 8),
)
def test_gauss_radau_bounds_the_error(gaps, share, seed, level):
    """`lower_bound <= lambda_min` is a proof: the true error is never above the upper bound."""
    eigenvalues = 10.0 ** (np.cumsum(gaps) - 3)
    matrix = oracles.with_spectrum(eigenvalues, seed)
    rhs = oracles.right_hand_side(matrix, "normal", seed)
    found = run(matrix, rhs, 8, lower_bound=share * eigenvalues[0] * (1 - 1e-9))
    (norm,), (energy,) = truth(matrix, rhs, [level])
    rounding = 1e-9 * truth(matrix, rhs, [0])[0, 0]
    assert found["norm upper"][level] >= norm - rounding
    assert found["norm seen"][level] <= norm + rounding
    assert found["norm seen"][level] - rounding <= found["norm"][level]
    assert found["norm"][level] <= found["norm upper"][level] + rounding
    assert found["energy seen"][level] <= energy + rounding * eigenvalues[-1] ** 0.5
    if found["norm upper"][level] ** 2 <= BRACKET * found["norm seen"][level] ** 2:
        assert bool(found["sufficient"][level])
        # Within a factor 2 of the square, by proof.
        ratio = (found["norm"][level] / max(norm, 1e-300)) ** 2
        assert 0.5 - 1e-6 <= ratio <= 2 + 1e-6 or norm <= 1e3 * rounding


def test_the_bound_is_tight_when_it_is_the_smallest_eigenvalue():
    """Late in the run the smallest Ritz value has converged, and Radau with lambda_min is equal."""
    matrix, eigenvalues = oracles.SPECTRA["power-law-1"](SIZE)
    rhs = oracles.right_hand_side(matrix, "normal")
    (norm,), _ = truth(matrix, rhs, [4])
    exact, half = (
        run(matrix, rhs, 16, lower_bound=share * eigenvalues[0] * (1 - 1e-12)) for share in (1, 0.5)
    )
    np.testing.assert_allclose(exact["norm upper"][4], norm, rtol=1e-3)
    assert exact["norm upper"][4] <= half["norm upper"][4]
    # At its own last level the bound has no look-ahead to help it, and is still useful.
    (last,), _ = truth(matrix, rhs, [16])
    assert last <= exact["norm upper"][16] <= 10 * last
    assert exact["norm upper"][16] <= half["norm upper"][16]


def test_the_estimate_without_a_bound():
    """The extrapolated error is right within a factor 2 where a quarter of it was seen."""
    for spectrum in ("bulk+outliers", "power-law-1", "kernel-5d"):
        matrix, _ = oracles.SPECTRA[spectrum](60)
        rhs = oracles.right_hand_side(matrix, "normal")
        found = run(matrix, rhs, 30)
        levels = range(5, 21, 5)
        norm, _ = truth(matrix, rhs, levels)
        for level, true in zip(levels, norm, strict=True):
            if found["share"][level] > 0.25:
                assert 0.5 <= (found["norm"][level] / true) ** 2 <= 2
        assert np.isinf(found["norm upper"]).all()
        judged = (found["share"] >= 1 - UNSEEN) == (found["sufficient"] == 1)
        assert judged.all()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_extreme_scales(scale, dtype):
    matrix = oracles.with_spectrum(np.geomspace(1, 30, SIZE), 0)
    rhs = oracles.right_hand_side(matrix, "normal")
    reference = run(matrix, rhs, 10, lower_bound=0.9, dtype=dtype)
    scaled = run(matrix * scale, rhs, 10, lower_bound=0.9 * scale, dtype=dtype)
    for name in ("norm", "norm seen", "norm upper"):
        np.testing.assert_allclose(scaled[name] * scale, reference[name], rtol=1e-3)
    np.testing.assert_allclose(scaled["energy"] * scale**0.5, reference["energy"], rtol=1e-3)
