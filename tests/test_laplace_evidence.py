"""Tuning by evidence and by validation, and saving."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import laplace_cases as cases
from harness import no_type_checker
from pnkrylov import laplace

KEY = jax.random.key(3)
N = 40


@functools.cache
def posterior(family, method="exact"):
    options = {"krylov": {"key": KEY, "num_steps": 2}, "subspace": {"rank": 10}}.get(method, {})
    return cases.fit(family, N, jnp.float64, prior_precision=0.7, method=method, **options)


def dense_evidence(family, precision):
    _, _, curvature, loss = cases.problem(family, N)
    return cases.log_evidence(curvature, loss, np.full(cases.SIZE, precision))


def test_the_evidence_is_maximal_at_the_tuned_prior():
    tuned = laplace.tune_by_evidence(posterior("categorical"))
    best = scipy.optimize.minimize_scalar(
        lambda log: -dense_evidence("categorical", np.exp(log)), bounds=(-6, 6), method="bounded"
    )
    found = float(tuned.posterior.prior_precision)
    # The search ends at 1 % in the precision; the optimum is flat to second order.
    assert abs(np.log(found) - best.x) < 1.1e-2
    assert float(tuned.posterior.log_evidence().value) > -best.fun - 1e-4
    np.testing.assert_allclose(
        tuned.scores,
        [dense_evidence("categorical", precision) for precision in tuned.precisions],
        rtol=1e-8,
    )
    # MacKay's fixed point holds at the optimum: precision * ||theta||^2 is the determined number.
    energy = found * np.sum(cases.flat_params() ** 2)
    np.testing.assert_allclose(tuned.posterior.effective_dimension(), energy, rtol=2e-2)


@pytest.mark.slow
def test_a_belief_is_tuned_as_well_without_a_product():
    belief = posterior("categorical", "krylov")
    tuned = laplace.tune_by_evidence(belief)
    assert tuned.posterior.num_matvecs == belief.num_matvecs
    exactly = laplace.tune_by_evidence(posterior("categorical")).posterior.prior_precision
    # At the belief's optimum the true evidence lies within the belief's error bar of the best.
    lost = dense_evidence("categorical", float(exactly)) - dense_evidence(
        "categorical", float(tuned.posterior.prior_precision)
    )
    assert 0 <= lost + 1e-6 < 2 * float(tuned.posterior.log_evidence().standard_error) + 1e-3


def test_prior_and_noise_precision_are_tuned_together():
    tuned = laplace.tune_by_evidence(posterior("gaussian"), noise=True)
    _, _, curvature, loss = cases.problem("gaussian", N)
    squares = 2 * (loss + 1.5 * N * np.log(2.5 / 2 / np.pi)) / 2.5

    def negative(logs):
        prior, noise = np.exp(logs)
        moved = 0.5 * noise * squares - 1.5 * N * np.log(noise / 2 / np.pi)
        return -cases.log_evidence(curvature * noise / 2.5, moved, np.full(cases.SIZE, prior))

    best = scipy.optimize.minimize(negative, np.zeros(2), method="Nelder-Mead", tol=1e-8)
    found = tuned.posterior
    logs = np.log([float(found.prior_precision), float(found.likelihood.precision)])
    np.testing.assert_allclose(logs, best.x, atol=2e-2)
    assert float(found.log_evidence().value) > -best.fun - 1e-4


@pytest.mark.parametrize("method", ["exact", pytest.param("krylov", marks=pytest.mark.slow)])
def test_the_evidence_has_a_gradient_in_the_prior_precision(method):
    given = posterior("categorical", method)

    def evidence(precision):
        return given.with_prior_precision(precision).log_evidence().value

    slope = jax.jit(jax.grad(evidence))(0.9)
    # MacKay: half the determined number over the precision, minus half the energy.
    moved = given.with_prior_precision(0.9)
    energy = np.sum(cases.flat_params() ** 2)
    expected = 0.5 * float(moved.effective_dimension()) / 0.9 - 0.5 * energy
    # Trace and log-determinant of a belief are two estimates, each with its error.
    np.testing.assert_allclose(slope, expected, rtol=1e-8 if method == "exact" else 2e-2)


@pytest.mark.slow
def test_validation_finds_the_best_density_of_held_out_targets():
    x, y = cases.data("categorical", N, jnp.float64)
    tuned = laplace.tune_by_validation(posterior("categorical"), (x, y), kind="probit")
    scores = tuned.scores
    assert scores.max() == pytest.approx(
        float(jnp.mean(tuned.posterior.predictive(x, "probit").log_density(y)))
    )
    for factor in (0.9, 1.1):
        moved = tuned.posterior.with_prior_precision(factor * tuned.posterior.prior_precision)
        assert float(jnp.mean(moved.predictive(x, "probit").log_density(y))) < scores.max()


def test_a_search_without_a_maximum_says_so():
    # Parameters of zero have no energy: the evidence grows with the precision for ever.
    params = jax.tree.map(jnp.zeros_like, cases.tree_of(cases.flat_params()))
    x, y = cases.data("categorical", N, jnp.float64)
    origin = laplace.fit(
        cases.apply, params, (x, y), likelihood=laplace.Categorical(), method="exact"
    )
    with pytest.raises(ValueError, match="largest prior precision"):
        laplace.tune_by_evidence(origin)
    with pytest.raises(TypeError, match="noise=True needs a Gaussian"):
        laplace.tune_by_evidence(posterior("categorical"), noise=True)


@pytest.mark.parametrize(
    "method",
    ["exact", pytest.param("krylov", marks=pytest.mark.slow), "subspace", "diagonal"],
)
def test_a_saved_posterior_comes_back(method, tmp_path):
    before = posterior("categorical", method).with_prior_precision(2.0)
    before.save(tmp_path / "posterior.npz")
    zeros = jax.tree.map(jnp.zeros_like, cases.tree_of(cases.flat_params()))
    after = laplace.load(tmp_path / "posterior.npz", cases.apply, zeros, laplace.Categorical())
    x = cases.inputs_for_test(jnp.float64)
    for old, new in zip(before.functional(x), after.functional(x), strict=True):
        np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(before.draws(KEY, 2), after.draws(KEY, 2))
    assert after.log_evidence().value == before.log_evidence().value
    assert after.log_evidence().standard_error == before.log_evidence().standard_error
    assert (after.method, after.num_matvecs) == (before.method, before.num_matvecs)
    if method == "krylov":
        with pytest.raises(ValueError, match="loaded from a file"):
            after.refine(num_steps=3)
        refined = after.refine(num_steps=5, curvature=before.curvature)
        assert refined.num_matvecs == before.num_matvecs + 5


def test_masks_patterns_and_noise_are_saved(tmp_path):
    marks = jax.tree.map(lambda leaf: np.ones(leaf.shape, bool), cases.tree_of(cases.flat_params()))
    marks["hidden"]["w"][0, :2] = False
    marks["last"] = False
    before = cases.fit(
        "gaussian", 8, jnp.float64, method="exact", mask=marks,
        prior_precision={"hidden": {"b": 0.3, "w": 2.0}, "last": None},
    ).with_noise_precision(0.9)  # fmt: skip
    assert before.size == cases.HIDDEN * (cases.INPUTS + 1) - 2
    before.save(tmp_path / "posterior.npz")
    after = laplace.load(
        tmp_path / "posterior.npz", cases.apply, cases.tree_of(cases.flat_params()),
        laplace.Gaussian(1.0),
    )  # fmt: skip
    assert after.likelihood.precision == 0.9
    draws = [p.sample(KEY, 2) for p in (before, after)]
    jax.tree.map(np.testing.assert_array_equal, *draws)
    np.testing.assert_array_equal(
        draws[0]["hidden"]["w"][:, 0, 0], draws[0]["hidden"]["w"][0, 0, 0]
    )
    assert after.log_evidence().value == before.log_evidence().value


def test_files_that_cannot_be_used_are_refused(tmp_path):
    params, family = cases.tree_of(cases.flat_params()), laplace.Categorical()
    path = tmp_path / "posterior.npz"
    posterior("categorical").save(path)

    def refused(message, path=path, params=params, family=family):
        with pytest.raises(ValueError, match=message):
            laplace.load(path, cases.apply, params, family)

    refused("likelihood is Bernoulli", family=laplace.Bernoulli())
    refused("leaf 0 is", params={"hidden": params["last"], "last": params["hidden"]})
    refused("other|leaves|leaf", params={"hidden": params["hidden"]})
    posterior("categorical", "krylov").covariance.belief.save(tmp_path / "belief.npz")
    refused("not a Laplace posterior: use pnkrylov.load", path=tmp_path / "belief.npz")
    with np.load(path) as archive:
        arrays = dict(archive)
    header = json.loads(arrays["header"].item())
    for name in ("covariance.values", "field.loss"):
        kept = {k: v for k, v in arrays.items() if k != name}
        shortened = {k: v for k, v in header["arrays"].items() if k != name}
        kept["header"] = np.array(json.dumps(header | {"arrays": shortened}))
        np.savez(tmp_path / "damaged.npz", **kept)
        refused("damaged", path=tmp_path / "damaged.npz")
    (tmp_path / "text").write_text("text")
    refused("not a belief saved by pnkrylov", path=tmp_path / "text")
    with pytest.raises(FileNotFoundError), no_type_checker():
        laplace.load(tmp_path / "none", cases.apply, params, family)
