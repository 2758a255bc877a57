"""The regime report against the exact complement."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pnkrylov as pk
from diagnostics_cases import FULL, LEVEL, MATRIX, SHIFT, SIZE, inverse, solve
from oracles import split


def exact_split(belief):
    basis = belief.run.basis
    rows = np.asarray(basis.vectors, np.float64)
    return split(MATRIX + SHIFT * np.eye(SIZE), rows[:LEVEL], rows[LEVEL])


def test_the_regime_is_that_of_the_exact_complement(dtype):
    belief = inverse(dtype, **FULL)
    report, exact = pk.regime(belief, 0.5), exact_split(belief)
    # The library takes the largest value of T_perp, which is at least that of S.
    kappa = np.linalg.eigvalsh(exact.T_perp)[-1] / np.linalg.eigvalsh(exact.S)[0]
    expected = (kappa, exact.c_norm, exact.omega)
    assert kappa >= exact.kappa_S
    found = (report.kappa_s, report.coupling_norm, report.bulk_variance)
    # The probes run without re-orthogonalisation; their extreme values are still good to this.
    tolerance = float(np.sqrt(jnp.finfo(dtype).eps))
    assert found == pytest.approx(expected, rel=tolerance)
    assert report.num_directions == SIZE - LEVEL - 1
    assert report.damping_times_omega == pytest.approx(0.5 * exact.omega, rel=tolerance)
    assert report.kl_per_direction == pytest.approx((kappa - 1) ** 2 / 2, rel=tolerance)
    bound = exact.c_norm + exact.omega * (kappa - 1)
    assert report.operator_error == pytest.approx(bound, rel=tolerance)
    error = np.linalg.norm(exact.sigma() - exact.exact_inverse(), 2)
    assert exact.c_norm <= error * (1 + 1e-10) and error <= report.operator_error
    for line in ("Regime of the bulk, 13 directions", "kappa_S", "lambda omega", report.verdict):
        assert line in str(report)


def test_all_resolved_reports_its_own_omega_and_the_bound_of_the_level(dtype):
    belief, paper = inverse(dtype, "resolve-all"), inverse(dtype)
    report, reference = pk.regime(belief), pk.regime(paper)
    assert report.operator_error == pytest.approx(reference.operator_error, rel=1e-5)
    assert report.bulk_variance == float(belief.stats.bulk_variance) != reference.bulk_variance
    assert report.num_directions == SIZE - LEVEL - 5
    assert report.damping_times_omega is None and "lambda" not in str(report)


def test_the_regime_of_a_solve_belief_sees_the_schur_complement(dtype):
    belief = solve(dtype, max_lookahead=SIZE - LEVEL, scale="prior", num_probes=0)
    exact, report = exact_split(belief), pk.regime(belief)
    # All Ritz values lie between the extreme eigenvalues of S.
    assert 1 < report.kappa_s <= exact.kappa_S * (1 + 1e-4)
    assert report.coupling_norm == pytest.approx(exact.c_norm, rel=0.1)
    assert np.isinf(report.relative_error) and "no random probes" in str(report)


def of_condition(condition, **options):
    """The complement of a geometric spectrum is about as badly conditioned as the whole."""
    eigenvalues = np.geomspace(1, condition, SIZE) - SHIFT
    return inverse(jnp.float32, eigenvalues=tuple(eigenvalues), **options)


def of_outliers():
    """Five outliers over copies of 1.25 (shift included): six steps leave nothing but these."""
    eigenvalues = (1.0,) * 15 + (5.0, 10.0, 20.0, 30.0, 50.0)
    return inverse(jnp.float32, eigenvalues=eigenvalues, **FULL)


@pytest.mark.parametrize(
    ("make", "damping", "verdict"),
    [
        (lambda: of_condition(5, **FULL), None, r"Isotropic enough.*factor of"),
        (of_outliers, None, r"Isotropic enough.*factor of"),
        (of_outliers, 1.25, r"bulk is the prior"),
        (lambda: of_condition(60, **FULL), None, r"more steps: .*factor of"),
        (lambda: of_condition(1e4, **FULL), None, r"Use a preconditioner"),
        (lambda: of_condition(1e4), None, r"Probes uncertain: .*num_probes"),
        (lambda: solve(jnp.float32, scale="prior", num_probes=0), None, r"Probes uncertain"),
        (lambda: solve(jnp.float32, num_steps=SIZE), None, r"Exact"),
        (lambda: solve(jnp.float32, max_lookahead=1), None, r"saw only .*max_lookahead"),
    ],
)
def test_the_verdict_names_the_remedy(make, damping, verdict):
    found = pk.regime(make(), damping).verdict
    import re

    assert re.search(verdict, found), found


def test_the_regime_refuses_what_it_cannot_judge():
    belief = solve(jnp.float32)
    for bad in (0.0, -1.0, float("nan"), 40.0):
        with pytest.raises(ValueError, match=rf"damping={bad} must be positive and at most"):
            pk.regime(belief, bad)
    batch = jax.tree.map(lambda leaf: leaf[None] if eqx.is_array(leaf) else leaf, belief)
    with pytest.raises(ValueError, match="needs one belief with concrete values"):
        pk.regime(batch)
    with pytest.raises(ValueError, match="outside jit"):
        eqx.filter_jit(pk.regime)(belief)
    A = jnp.asarray(MATRIX - 5 * np.eye(SIZE), jnp.float32)
    failed = pk.solve(A, belief.mean, key=jax.random.key(0), num_steps=8, throw=False)
    with pytest.raises(pk.NotPositiveDefiniteError, match="Ritz value"):
        pk.regime(failed)
