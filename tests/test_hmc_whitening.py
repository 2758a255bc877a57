"""Square roots of beliefs' covariances, whitened targets, and blackjax's own forms of them."""

import dataclasses
import functools
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import pnkrylov as pk
from harness import no_type_checker
from oracles import SPECTRA, with_spectrum
from pnkrylov import hmc
from pnkrylov._structure import VectorStructure
from pnkrylov.interop import blackjax as bridge
from pnkrylov.preconditioners import Diagonal

SIZE = 40


def tolerance(dtype):
    return 2e-3 if dtype == jnp.float32 else 1e-9


@functools.cache
def belief_of(kind, dtype):
    """A dense precision and a belief about its inverse."""
    matrix, _ = SPECTRA["power-law-1"](SIZE)
    key, options = jax.random.key(0), {"num_steps": 8, "lookahead": 4}
    mean = jnp.asarray(np.linspace(-1, 1, SIZE), dtype)
    if kind == "breakdown":
        matrix = 2 * np.eye(SIZE)  # one step, and eleven rows that stay empty
    if kind == "exact":
        options = {"num_steps": SIZE}
    if kind == "paper":
        options["layout"] = "paper"
    if kind == "preconditioned":
        diagonal = np.linspace(0.5, 2, SIZE) * np.diagonal(matrix)
        options["preconditioner"] = Diagonal(jnp.asarray(diagonal, dtype))
    return matrix, pk.inverse(jnp.asarray(matrix, dtype), mean=mean, key=key, **options)


KINDS = [
    "resolve-all",
    "paper",
    "breakdown",
    "preconditioned",
    pytest.param("exact", marks=pytest.mark.slow),
]


def products(root, dtype):
    """Every product of a root as a dense matrix."""
    names = ("mv", "transpose_mv", "inverse_mv", "inverse_transpose_mv")
    eye = jnp.eye(SIZE, dtype=dtype)
    evaluate = jax.jit(lambda root: [jax.vmap(getattr(root, name))(eye).T for name in names])
    return [np.asarray(matrix, np.float64) for matrix in evaluate(root)]


@pytest.mark.parametrize("kind", KINDS)
def test_root_of_a_belief(kind, dtype):
    if dtype == jnp.float32 and kind != "resolve-all":
        pytest.skip("the same code in float64, and a run less to compile")
    _, belief = belief_of(kind, dtype)
    sigma = np.asarray(belief.covariance.as_matrix(), np.float64)
    root = hmc.covariance_root(belief.covariance)
    forward, transpose, inverse, inverse_transpose = products(root, dtype)
    scale = np.abs(sigma).max()
    np.testing.assert_allclose(forward @ forward.T, sigma, atol=tolerance(dtype) * scale)
    np.testing.assert_allclose(transpose, forward.T, atol=tolerance(dtype) * scale**0.5)
    np.testing.assert_allclose(inverse @ forward, np.eye(SIZE), atol=10 * tolerance(dtype))
    np.testing.assert_allclose(inverse_transpose, inverse.T, atol=10 * tolerance(dtype))
    expected = np.linalg.slogdet(sigma)[1] / 2
    np.testing.assert_allclose(float(root.logdet()), expected, rtol=tolerance(dtype))
    symmetric = np.allclose(forward, forward.T, atol=1e-4 * scale**0.5)
    assert symmetric == (kind != "preconditioned")


def test_root_of_other_covariances(dtype):
    matrix = with_spectrum(np.geomspace(0.1, 10, SIZE), seed=1)
    array = jnp.asarray(matrix, dtype)
    diagonal = jnp.asarray(np.geomspace(0.1, 10, SIZE), dtype)
    for covariance, sigma in (
        (array, matrix),
        (np.asarray(array), matrix),
        (lx.MatrixLinearOperator(array, lx.positive_semidefinite_tag), matrix),
        (lx.DiagonalLinearOperator(diagonal), np.diag(np.geomspace(0.1, 10, SIZE))),
    ):
        root = hmc.covariance_root(covariance)
        forward, _, inverse, _ = products(root, dtype)
        np.testing.assert_allclose(forward @ forward.T, sigma, atol=10 * tolerance(dtype))
        np.testing.assert_allclose(inverse @ forward, np.eye(SIZE), atol=10 * tolerance(dtype))


def gaussian_logdensity(matrix, mean):
    """Normalised, in JAX; the oracle of the whitened one."""
    constant = np.linalg.slogdet(matrix)[1] / 2 - len(matrix) / 2 * np.log(2 * np.pi)
    precision, mean = jnp.asarray(matrix), jnp.asarray(mean)
    return lambda x: constant - (x - mean) @ precision @ (x - mean) / 2


def gaussian_belief(mean, covariance, like):
    """The three attributes that `whiten` asks for."""
    structure = VectorStructure.of(like)
    return types.SimpleNamespace(
        mean_flat=jnp.asarray(mean), structure=structure, covariance=covariance
    )


def test_an_exact_belief_whitens_its_gaussian_to_the_standard_one():
    matrix, mean = SPECTRA["power-law-1"](SIZE)[0], np.linspace(-1, 1, SIZE)
    belief = gaussian_belief(mean, jnp.asarray(np.linalg.inv(matrix)), jnp.zeros(SIZE))
    target = hmc.whiten(gaussian_logdensity(matrix, mean), belief)
    z = np.random.default_rng(0).standard_normal((5, SIZE))
    found = jax.jit(jax.vmap(target))(jnp.asarray(z))
    expected = -SIZE / 2 * np.log(2 * np.pi) - np.sum(z**2, axis=1) / 2
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    x = target.position(jnp.asarray(z[0]))
    np.testing.assert_allclose(target.white(x), z[0], atol=1e-9)


@pytest.mark.parametrize("kind", ["resolve-all", "preconditioned"])
def test_whitening_lowers_the_condition_number(kind):
    matrix, belief = belief_of(kind, jnp.dtype("float64"))
    before = float(hmc.condition_number(precision=jnp.asarray(matrix)).value)
    target = hmc.whiten(gaussian_logdensity(matrix, np.zeros(SIZE)), belief)
    white_precision = -jax.jit(jax.hessian(target))(jnp.zeros(SIZE))
    # Same determinant: nothing was lost in the change of variables.
    sign, logdet = np.linalg.slogdet(white_precision)
    expected = np.linalg.slogdet(matrix)[1] + 2 * float(target.root.logdet())
    assert sign == 1 and logdet == pytest.approx(expected, abs=1e-8)
    after = float(hmc.condition_number(precision=white_precision).value)
    # N^{1/4}, that of the standard normal, is the least there is.
    assert SIZE**0.25 <= after < 0.8 * before


def test_positions_keep_the_users_structure():
    like = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(4)}

    covariance = jnp.asarray(with_spectrum(np.geomspace(1, 5, 10), seed=4))
    # In the order of the leaves: b, then w.
    belief = gaussian_belief(np.concatenate([np.arange(4.0), np.ones(6)]), covariance, like)
    target = hmc.whiten(lambda x: jnp.sum(x["w"]) + jnp.sum(x["b"]), belief)
    x = target.position(jnp.zeros(10))
    assert jax.tree.structure(x) == jax.tree.structure(like)
    np.testing.assert_allclose(x["b"], np.arange(4.0), atol=1e-12)
    moved = jax.tree.map(lambda leaf: leaf + 0.5, x)
    back = target.position(target.white(moved))
    np.testing.assert_allclose(back["w"], moved["w"], atol=1e-9)
    with pytest.raises(ValueError, match="x has the wrong"):
        target.white({"w": jnp.zeros((3, 2))})


def test_what_cannot_be_whitened_is_refused():
    _, belief = belief_of("resolve-all", jnp.dtype("float64"))
    singular = dataclasses.replace(belief.covariance, resolved=None)  # as in a SolveBelief
    solved = dataclasses.replace(belief, covariance=singular)
    with pytest.raises(TypeError, match=r"SolveBelief is singular.*InverseBelief"):
        hmc.whiten(jnp.sum, solved)
    with pytest.raises(TypeError, match="without mean_flat, structure"):
        hmc.whiten(jnp.sum, pk.DenseGaussian(jnp.zeros(2), jnp.eye(2)))
    with no_type_checker(), pytest.raises(TypeError, match="logdensity must be a function"):
        hmc.whiten(3.0, belief)
    with pytest.raises(pk.NotPositiveDefiniteError, match="-1"):
        hmc.covariance_root(jnp.diag(jnp.asarray([1.0, -1.0])))
    with pytest.raises(pk.NotPositiveDefiniteError, match="DiagonalLinearOperator"):
        hmc.covariance_root(lx.DiagonalLinearOperator(jnp.asarray([1.0, 0.0])))
    with pytest.raises(TypeError, match="type list"):
        hmc.covariance_root([1.0])
    large = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((5000,), jnp.float64))
    with pytest.raises(ValueError, match=r"d=5000 is too large"):
        hmc.covariance_root(large)


# ---- blackjax -----------------------------------------------------------------------------------


def metrics_of(kind):
    metrics = pytest.importorskip("blackjax.mcmc.metrics")
    _, belief = belief_of(kind, jnp.dtype("float64"))
    sigma = np.asarray(belief.covariance.as_matrix())
    own = [bridge.metric(belief)]
    if kind != "preconditioned":
        own.append(metrics.default_metric(bridge.inverse_mass_matrix(belief)))
    return sigma, own


@pytest.mark.parametrize("kind", ["resolve-all", "breakdown", "preconditioned"])
def test_metric_against_the_dense_one(kind):
    sigma, own = metrics_of(kind)
    p = np.random.default_rng(0).standard_normal((3, 200, SIZE))
    # Totals from short of half the ends to twice their sum: about as many turn as do not.
    p[2] = np.linspace(0, 1.2, 200)[:, None] * (p[0] + p[1]) + 0.1 * p[2]
    left, right, total = (jnp.asarray(rows) for rows in p)
    between = (p[2] - (p[0] + p[1]) / 2) @ sigma
    turning = (np.sum(p[0] * between, axis=1) <= 0) | (np.sum(p[1] * between, axis=1) <= 0)
    assert 0.2 < np.mean(turning) < 0.9
    mass = np.linalg.inv(sigma)
    for metric in own:
        energy = jax.vmap(metric.kinetic_energy)(left)
        np.testing.assert_allclose(energy, np.sum((p[0] @ sigma) * p[0], axis=1) / 2, rtol=1e-8)
        found = jax.vmap(metric.check_turning)(left, right, total)
        np.testing.assert_array_equal(found, turning)
        # M^{1/2} and its inverse: M = M^{1/2} M^{T/2}.
        eye = jnp.eye(SIZE)

        def scaled(inv, trans, metric=metric, eye=eye):
            rows = jax.vmap(lambda e: metric.scale(e, e, inv=inv, trans=trans))(eye)
            return np.asarray(rows).T

        root = scaled(inv=False, trans=False)
        scale = np.abs(mass).max()
        np.testing.assert_allclose(root @ root.T, mass, atol=1e-8 * scale)
        np.testing.assert_allclose(scaled(inv=False, trans=True), root.T, atol=1e-8 * scale)
        np.testing.assert_allclose(scaled(inv=True, trans=False) @ root, eye, atol=1e-7)
        np.testing.assert_allclose(
            scaled(inv=True, trans=True), scaled(inv=True, trans=False).T, atol=1e-8
        )


@pytest.mark.parametrize("kind", ["resolve-all", "preconditioned"])
def test_momenta_have_the_mass_matrix_as_covariance(kind):
    sigma, own = metrics_of(kind)
    draws = 4000
    for metric in own:
        keys = jax.random.split(jax.random.key(0), draws)
        momenta = jax.vmap(lambda k, m=metric: m.sample_momentum(k, jnp.zeros(SIZE)))(keys)
        # Whitened by the dense root, they are standard normal.
        white = np.asarray(momenta) @ np.linalg.cholesky(sigma)
        covariance = white.T @ white / draws
        # Spectral norm of a Wishart matrix: (1 + sqrt y)^2 - 1, with room for its fluctuation.
        assert np.linalg.norm(covariance - np.eye(SIZE), 2) < 2.5 * np.sqrt(SIZE / draws)


def test_low_rank_form_is_refused_with_a_preconditioner():
    pytest.importorskip("blackjax")
    _, belief = belief_of("preconditioned", jnp.dtype("float64"))
    with pytest.raises(TypeError, match=r"metric\(belief\)"):
        bridge.inverse_mass_matrix(belief)


def test_blackjax_is_only_needed_when_it_is_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "blackjax", None)
    monkeypatch.setitem(sys.modules, "blackjax.mcmc", None)
    _, belief = belief_of("resolve-all", jnp.dtype("float64"))
    with pytest.raises(ImportError, match="pip install 'blackjax"):
        bridge.metric(belief)


def test_hmc_on_the_white_target_and_with_the_metric_are_one_chain():
    blackjax = pytest.importorskip("blackjax")
    matrix, belief = belief_of("resolve-all", jnp.dtype("float64"))
    logdensity = gaussian_logdensity(matrix, np.linspace(-1, 1, SIZE))
    target = hmc.whiten(logdensity, belief)
    step_size, steps, draws = 0.3, 4, 40

    def chain(kernel, start):
        def step(state, key):
            state, info = kernel.step(key, state)
            return state, (state.position, info.acceptance_rate)

        keys = jax.random.split(jax.random.key(1), draws)
        return jax.jit(lambda x: jax.lax.scan(step, kernel.init(x), keys)[1])(start)

    # The same standard normal momenta: blackjax's own noise is mapped by the metric.
    euclidean = blackjax.mcmc.metrics.default_metric(jnp.ones(SIZE))
    metric = bridge.metric(belief)
    same_noise = metric._replace(
        sample_momentum=lambda k, x: target.root.inverse_transpose_mv(
            euclidean.sample_momentum(k, x)
        )
    )
    white, accepted = chain(blackjax.hmc(target, step_size, euclidean, steps), jnp.zeros(SIZE))
    plain, accepted_plain = chain(
        blackjax.hmc(logdensity, step_size, same_noise, steps), target.position(jnp.zeros(SIZE))
    )
    np.testing.assert_allclose(accepted, accepted_plain, atol=1e-8)
    np.testing.assert_allclose(jax.vmap(target.position)(white), plain, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["inverse_mass_matrix", "metric"])
@pytest.mark.parametrize("sampler", ["hmc", "nuts"])
def test_blackjax_samples_the_gaussian(sampler, form):
    blackjax = pytest.importorskip("blackjax")
    matrix, belief = belief_of("resolve-all", jnp.dtype("float64"))
    mean = np.linspace(-1, 1, SIZE)
    options = {"num_integration_steps": 5} if sampler == "hmc" else {}
    kernel = getattr(blackjax, sampler)(
        gaussian_logdensity(matrix, mean), 0.4, getattr(bridge, form)(belief), **options
    )

    def step(state, key):
        state, _ = kernel.step(key, state)
        return state, state.position

    keys = jax.random.split(jax.random.key(2), 4000)
    draws = jax.jit(lambda x: jax.lax.scan(step, kernel.init(x), keys)[1])(jnp.asarray(mean))
    root = np.linalg.cholesky(matrix)
    white = (np.asarray(draws) - mean) @ root
    effective = np.asarray(blackjax.diagnostics.effective_sample_size(white[None]))
    assert effective.min() > 400
    # 40 means and 40 variances, each within five standard errors.
    assert np.all(np.abs(white.mean(axis=0)) < 5 / np.sqrt(effective))
    squares = np.asarray(blackjax.diagnostics.effective_sample_size((white**2)[None]))
    assert np.all(np.abs((white**2).mean(axis=0) - 1) < 5 * np.sqrt(2 / squares))


@pytest.mark.slow
def test_belief_beats_diagonal_adaptation_fivefold_on_logistic_regression():
    pytest.importorskip("blackjax")
    pytest.importorskip("sklearn")
    benchmarks = str(pathlib.Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, benchmarks)
    try:
        import bench_hmc
    finally:
        sys.path.remove(benchmarks)
    # blackjax's window adaptation mixes dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = bench_hmc.whitening_part("digits", ["nuts"], ["diagonal", "belief"], 1, 2000)
    assert found["kappa"]["none"] >= 100
    rates = {
        r["method"]: min(r["ess_coordinates"], r["ess_directions"])
        / (r["building"] + r["warm_up"] + r["sampling"])
        for r in found["records"]
    }
    assert rates["belief"] >= 5 * rates["diagonal"], rates
