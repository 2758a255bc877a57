"""Posteriors against the dense Gaussian, computed by hand in NumPy."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import laplace_cases as cases
from pnkrylov import laplace
from pnkrylov.errors import NotPositiveDefiniteError
from pnkrylov.laplace import covariances

KEY = jax.random.key(1)
# Fewer rows than parameters (Gram form) and more (dense form).
SIZES = FEW, MANY = 8, 40


def pattern(kind):
    """A prior precision as the user writes it, and as one number per parameter."""
    hidden = cases.HIDDEN * (cases.INPUTS + 1)
    if kind == "scalar":
        return 0.7, np.full(cases.SIZE, 0.7)
    if kind == "layers":
        precisions = np.where(np.arange(cases.SIZE) < hidden, 0.3, 4.0)
        return {"hidden": 0.3, "last": 4.0}, precisions
    precisions = np.geomspace(0.1, 10, cases.SIZE)
    return cases.tree_of(precisions), precisions


@functools.cache
def krylov():
    """An incomplete run: 22 of 38 directions are resolved, look-ahead included."""
    return cases.fit(
        "categorical", MANY, jnp.float64, prior_precision=0.7, method="krylov", key=KEY, num_steps=2
    )


@functools.cache
def exact(n=MANY):
    return cases.fit("categorical", n, jnp.float64, prior_precision=0.7, method="exact")


def dense(n=MANY, precision=0.7, family="categorical"):
    curvature = cases.problem(family, n)[2]
    return np.linalg.inv(curvature + precision * np.eye(cases.SIZE))


@pytest.mark.parametrize(
    ("family", "kind", "n"),
    [
        *(("categorical", kind, n) for kind in ("scalar", "layers", "parameters") for n in SIZES),
        ("gaussian", "layers", FEW),
        ("bernoulli", "scalar", MANY),
    ],
)
def test_exact_posterior_is_the_dense_one(family, kind, n):
    written, precisions = pattern(kind)
    posterior = cases.fit(family, n, jnp.float64, prior_precision=written, method="exact")
    _, _, curvature, loss = cases.problem(family, n)
    covariance = np.linalg.inv(curvature + np.diag(precisions))
    mean, blocks = posterior.functional(cases.inputs_for_test(jnp.float64))
    expected = cases.functional_covariance(covariance)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(blocks, expected, rtol=1e-8, atol=1e-10 * scale)
    np.testing.assert_allclose(
        mean, cases.outputs_and_jacobian(cases.arrays()[2])[0], rtol=1e-12, atol=1e-12
    )
    np.testing.assert_allclose(
        cases.flatten(posterior.variance()), np.diagonal(covariance), rtol=1e-8
    )
    evidence = posterior.log_evidence()
    np.testing.assert_allclose(
        evidence.value, cases.log_evidence(curvature, loss, precisions), rtol=1e-8
    )
    assert evidence.standard_error == 0
    determined = cases.SIZE - np.trace(covariance @ np.diag(precisions))
    np.testing.assert_allclose(posterior.effective_dimension(), determined, rtol=1e-8)


@pytest.mark.parametrize("n", [FEW, MANY])
def test_exact_posterior_in_single_precision(n):
    posterior = cases.fit("categorical", n, jnp.float32, prior_precision=0.7, method="exact")
    _, blocks = posterior.functional(cases.inputs_for_test(jnp.float32))
    assert blocks.dtype == jnp.float32
    expected = cases.functional_covariance(dense(n))
    # Single precision keeps seven digits; the condition number is about a hundred.
    np.testing.assert_allclose(blocks, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    evidence = cases.log_evidence(*cases.problem("categorical", n)[2:], np.full(cases.SIZE, 0.7))
    np.testing.assert_allclose(posterior.log_evidence().value, evidence, rtol=1e-5)


def test_exact_form_in_single_precision_sees_what_a_single_precision_gram_matrix_would_lose():
    # Singular values down to 1e-5: their squares are below eps of the largest in float32.
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    right, _ = np.linalg.qr(rng.normal(size=(20, 6)))
    singular = np.array([100.0, 10, 1, 1e-1, 1e-2, 1e-2])
    rows = jnp.asarray((left * singular) @ right.T, jnp.float32)
    from pnkrylov.laplace.eigen import exact_from_rows

    found = exact_from_rows(rows, None, jnp.asarray(1e-4, jnp.float32))
    covariance = np.linalg.inv(
        np.asarray(rows, np.float64).T @ np.asarray(rows, np.float64) + 1e-4 * np.eye(20)
    )
    # eps times the condition number of the rows.
    np.testing.assert_allclose(found.diagonal(), np.diagonal(covariance), rtol=1e-3)
    weak = np.asarray(right.T[-1:], np.float32)
    np.testing.assert_allclose(
        found.push(jnp.asarray(weak))[0, 0], weak[0] @ covariance @ weak[0], rtol=2e-2
    )


@pytest.mark.slow
def test_a_full_lanczos_run_is_exact_too():
    posterior = cases.fit(
        "categorical", MANY, jnp.float64, prior_precision=0.7, method="krylov", key=KEY,
        num_steps=cases.SIZE,
    )  # fmt: skip
    _, blocks = posterior.functional(cases.inputs_for_test(jnp.float64))
    np.testing.assert_allclose(blocks, cases.functional_covariance(dense()), rtol=1e-8, atol=1e-9)


def test_krylov_evidence_is_within_its_error_bar():
    _, _, curvature, loss = cases.problem("categorical", MANY)
    expected = cases.log_evidence(curvature, loss, np.full(cases.SIZE, 0.7))
    # Four standard errors for chance, and the bracket of the quadrature.
    lower, upper = krylov().log_evidence().interval(0.99994)
    assert lower <= expected <= upper
    assert krylov().log_evidence().standard_error > 0


def test_krylov_total_variance_is_calibrated():
    estimate = krylov().covariance.belief.trace()
    lower, upper = estimate.interval(0.99994)
    assert lower <= np.trace(dense()) <= upper


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_another_prior_precision_costs_no_product_and_equals_a_new_fit(method, monkeypatch):
    posterior = exact() if method == "exact" else krylov()
    for name in ("mv", "block_mv", "row_chunks"):
        monkeypatch.setattr(laplace.Curvature, name, None)
        monkeypatch.setattr(type(krylov().curvature), name, None)
    moved = posterior.with_prior_precision(5.0)
    assert moved.num_matvecs == posterior.num_matvecs
    _, _, curvature, loss = cases.problem("categorical", MANY)
    expected = cases.log_evidence(curvature, loss, np.full(cases.SIZE, 5.0))
    lower, upper = moved.log_evidence().interval(0.99994)
    slack = 1e-8 * abs(expected)
    assert lower - slack <= expected <= upper + slack
    mean_variance = np.mean(cases.flatten(moved.variance()))
    exactly = np.trace(dense(precision=5.0)) / cases.SIZE
    np.testing.assert_allclose(mean_variance, exactly, rtol=1e-8 if method == "exact" else 0.05)


def test_a_pattern_of_prior_precisions_can_be_scaled_but_not_changed():
    posterior = cases.fit(
        "categorical", MANY, jnp.float64, prior_precision={"hidden": 0.3, "last": 4.0},
        method="exact",
    )  # fmt: skip
    moved = posterior.with_prior_precision({"hidden": 0.6, "last": 8.0})
    precisions = 2 * pattern("layers")[1]
    _, _, curvature, loss = cases.problem("categorical", MANY)
    np.testing.assert_allclose(
        moved.log_evidence().value, cases.log_evidence(curvature, loss, precisions), rtol=1e-8
    )
    with pytest.raises(ValueError, match="another pattern"):
        posterior.with_prior_precision(1.0)


@pytest.mark.parametrize("method", ["exact", pytest.param("krylov", marks=pytest.mark.slow)])
def test_another_noise_precision_equals_a_new_fit(method):
    options = {"key": KEY, "num_steps": cases.SIZE} if method == "krylov" else {}
    posterior = cases.fit(
        "gaussian", MANY, jnp.float64, prior_precision=0.7, method=method, **options
    ).with_noise_precision(0.8)
    _, _, curvature, loss = cases.problem("gaussian", MANY)
    squares = 2 * (loss + 1.5 * MANY * np.log(2.5 / 2 / np.pi)) / 2.5
    curvature = curvature * 0.8 / 2.5
    loss = 0.4 * squares - 1.5 * MANY * np.log(0.8 / 2 / np.pi)
    expected = cases.log_evidence(curvature, loss, np.full(cases.SIZE, 0.7))
    np.testing.assert_allclose(posterior.log_evidence().value, expected, rtol=1e-8)
    covariance = np.linalg.inv(curvature + 0.7 * np.eye(cases.SIZE))
    _, blocks = posterior.functional(cases.inputs_for_test(jnp.float64))
    np.testing.assert_allclose(blocks, cases.functional_covariance(covariance), rtol=1e-8)


@pytest.mark.parametrize(
    "method",
    [
        "exact-gram",
        "exact-dense",
        "krylov",
        pytest.param("ciq", marks=pytest.mark.slow),
        pytest.param("eigen", marks=pytest.mark.slow),
    ],
)
def test_draws_have_the_covariance_of_the_posterior(method):
    count, n = 1000, FEW if method in ("exact-gram", "ciq", "eigen") else MANY
    if method == "krylov":
        posterior = krylov()
    elif method in ("ciq", "eigen"):
        posterior = cases.fit(
            "categorical", n, jnp.float64, prior_precision=0.7, method=method, key=KEY,
            num_steps=cases.SIZE, num_draws=8,
        )  # fmt: skip
    else:
        posterior = exact(n)
    draws = np.asarray(posterior.draws(jax.random.key(5), count)) - cases.flat_params()[None, :]
    covariance = dense(n)
    if method == "krylov":  # its draws have the covariance that it says it has
        covariance = np.asarray(posterior.push(jnp.eye(cases.SIZE)))
    values, vectors = np.linalg.eigh(covariance)
    white = draws @ vectors / np.sqrt(values)
    # Mean squares of N normal numbers: 1 with standard deviation sqrt(2 / N); means: 1 / sqrt(N).
    # Five standard deviations in each of 38 directions: a false alarm in 20,000 runs.
    assert np.abs(np.mean(white**2, axis=0) - 1).max() < 5 * (2 / count) ** 0.5
    assert np.abs(np.mean(white, axis=0)).max() < 5 / count**0.5
    correlations = white.T @ white / count - np.eye(cases.SIZE)
    np.fill_diagonal(correlations, 0)
    assert np.abs(correlations).max() < 5.5 / count**0.5


def test_a_key_fixes_one_function_per_draw():
    posterior, x = exact(), cases.inputs_for_test(jnp.float64)
    draws = posterior.sample(KEY, 3)
    assert draws["hidden"]["w"].shape == (3, cases.INPUTS, cases.HIDDEN)
    evaluate = eqx.filter_jit(eqx.filter_vmap(cases.apply, in_axes=(0, None)))
    everywhere = evaluate(draws, x)
    again = evaluate(posterior.sample(KEY, 3), x[:2])
    np.testing.assert_allclose(everywhere[:, :2], again, rtol=1e-12)
    predicted = posterior.predictive(x, "mc", key=KEY, num_samples=3)
    np.testing.assert_allclose(predicted.draws, everywhere, rtol=1e-12)


@pytest.mark.slow
def test_cheaper_methods_bound_the_exact_covariance_from_the_side_they_claim():
    covariance = dense(FEW)

    def of(method, **options):
        posterior = cases.fit(
            "categorical", FEW, jnp.float64, prior_precision=0.7, method=method, key=KEY, **options
        )
        return posterior, np.asarray(posterior.push(jnp.eye(posterior.size)))

    _, leading = of("eigen", num_steps=12)
    assert np.linalg.eigvalsh(leading - covariance).min() > -1e-3 * covariance.max()
    assert np.trace(leading) > 1.001 * np.trace(covariance)
    _, projected = of("subspace", rank=10)
    assert np.linalg.eigvalsh(covariance - projected).min() > -1e-10
    assert np.linalg.matrix_rank(projected, tol=1e-8) == 10
    _, alone = of("diagonal")
    curvature = cases.problem("categorical", FEW)[2]
    np.testing.assert_allclose(alone, np.diag(1 / (np.diagonal(curvature) + 0.7)), rtol=1e-10)
    last, block = of("last-layer")
    chosen = slice(cases.HIDDEN * (cases.INPUTS + 1), cases.SIZE)
    assert last.size == cases.OUTPUTS * (cases.HIDDEN + 1)
    np.testing.assert_allclose(
        block, np.linalg.inv(curvature[chosen, chosen] + 0.7 * np.eye(last.size)), rtol=1e-8
    )
    # The layers before are fixed: draws repeat them.
    draws = last.sample(KEY, 2)
    np.testing.assert_array_equal(draws["hidden"]["w"][0], cases.arrays()[0]["hidden"]["w"])
    assert last.variance()["hidden"] == {"b": None, "w": None}


def test_a_subset_of_the_data_is_scaled():
    scaled = cases.fit("categorical", FEW, jnp.float64, method="exact", num_data=10 * FEW)
    _, _, curvature, loss = cases.problem("categorical", FEW)
    expected = cases.log_evidence(10 * curvature, 10 * loss, np.ones(cases.SIZE))
    np.testing.assert_allclose(scaled.log_evidence().value, expected, rtol=1e-8)


def test_large_blocks_of_products_are_those_of_single_vectors():
    # XLA:CPU of jaxlib 0.10.2 gets sum(p * t) wrong under jit and vmap beyond 32768 entries of
    # float32 (jax issue 39103), here from row 21 on. CIQ then saw a Ritz value of -2202.
    rng = np.random.default_rng(0)
    outputs = jnp.asarray(rng.normal(size=(150, 10)), jnp.float32)
    tangents = jnp.asarray(rng.normal(size=(40, 150, 10)), jnp.float32)
    product = functools.partial(laplace.Categorical().hessian_mv, outputs)
    found = jax.jit(jax.vmap(product))(tangents)
    p, t = cases.softmax(np.asarray(outputs)), np.asarray(tangents)
    expected = p * (t - np.sum(p * t, axis=-1, keepdims=True))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["exact", pytest.param("krylov", marks=pytest.mark.slow)])
def test_streamed_batches_give_the_posterior_of_the_data_in_memory(method):
    x, y = cases.data("categorical", FEW, jnp.float64)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    options = {"key": KEY, "num_steps": 10} if method == "krylov" else {}

    def blocks(data):
        posterior = laplace.fit(
            cases.apply, cases.tree_of(cases.flat_params()), data,
            likelihood=laplace.Categorical(), prior_precision=0.7, method=method, **options,
        )  # fmt: skip
        return posterior.functional(cases.inputs_for_test(jnp.float64))[1]

    found, expected = blocks(batches), blocks((x, y))
    # Rounding decides at which step probes count as converged, which they do to 2e-3.
    tolerance = 1e-10 if method == "exact" else 2e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_equinox_modules_are_parameters_too():
    model = eqx.nn.MLP(cases.INPUTS, cases.OUTPUTS, 4, 1, key=KEY)  # holds functions as well
    x, y = cases.data("categorical", FEW, jnp.float64)
    model = jax.tree.map(lambda a: a.astype(jnp.float64) if eqx.is_array(a) else a, model)
    posterior = laplace.fit(
        evaluate_module, model, (x, y), likelihood=laplace.Categorical(), method="exact"
    )
    draws = posterior.sample(KEY, 3)
    outputs = eqx.filter_vmap(evaluate_module, in_axes=(eqx.if_array(0), None))(draws, x)
    assert outputs.shape == (3, FEW, cases.OUTPUTS)
    sampled = posterior.predictive(x, "mc", key=KEY, num_samples=3)
    np.testing.assert_allclose(outputs, sampled.draws, rtol=1e-10)


def evaluate_module(model, x):
    return jax.vmap(model)(x)


@pytest.mark.slow
def test_refinement_continues_the_run():
    refined = krylov().refine(num_steps=5)
    assert refined.num_matvecs == krylov().num_matvecs + 5
    before, after = krylov().covariance.belief.run.basis, refined.covariance.belief.run.basis
    assert after.num_rows == before.num_rows + 5
    np.testing.assert_array_equal(after.vectors[: before.num_rows], before.vectors)
    # The rows are Lanczos vectors of the curvature: T is its projection.
    rows = np.asarray(after.vectors)
    curvature = cases.problem("categorical", MANY)[2]
    np.testing.assert_allclose(rows @ curvature @ rows.T, after.tridiagonal(), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="nothing to refine"):
        exact().refine(num_steps=3)


def test_an_indefinite_hessian_is_refused_with_its_eigenvalue_and_a_strong_prior_lifts_it():
    with pytest.raises(NotPositiveDefiniteError, match=r"eigenvalue -.*curvature='ggn'"):
        cases.fit(
            "categorical", FEW, jnp.float64, prior_precision=1e-3, method="exact",
            curvature="hessian",
        )  # fmt: skip
    lifted = cases.fit(
        "categorical", FEW, jnp.float64, prior_precision=100.0, method="exact", curvature="hessian"
    )
    assert np.all(cases.flatten(lifted.variance()) > 0)
    with pytest.raises(NotPositiveDefiniteError, match=r"prior precision adds 0\.001"):
        lifted.with_prior_precision(1e-3)


def test_posteriors_print_what_a_reader_wants_to_know():
    text = repr(krylov())
    assert f"over {cases.SIZE} parameters, method 'krylov'" in text
    assert f"spent      {krylov().num_matvecs} products" in text
    assert "calibrated" in text
    assert "chosen" in repr(cases.fit("categorical", MANY, jnp.float64))
    assert isinstance(krylov().covariance, covariances.BeliefCovariance)
