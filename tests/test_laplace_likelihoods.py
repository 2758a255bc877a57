"""Likelihoods against scipy's densities and against derivatives of them by jax.hessian."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from curvature_cases import (
    FAMILIES,
    OUTPUTS,
    PRECISION,
    TANGENTS,
    K,
    N,
    expected_hessian,
    logistic,
    student_t,
)
from pnkrylov.errors import NotFiniteError, NotPositiveDefiniteError
from pnkrylov.laplace.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    TargetError,
)


def log_densities(name, f, y):
    """Log densities (n,) from scipy."""
    if name == "gaussian":
        return scipy.stats.norm.logpdf(y, f, 3.0**-0.5).sum(axis=1)
    if name == "gaussian-vector":
        return scipy.stats.norm.logpdf(y, f, PRECISION**-0.5).sum(axis=1)
    if name == "heteroscedastic":
        return scipy.stats.norm.logpdf(y, f[:, : K // 2], np.exp(f[:, K // 2 :] / 2)).sum(axis=1)
    if name == "categorical":
        return np.log(scipy.special.softmax(f, axis=1))[np.arange(len(y)), y]
    if name == "bernoulli":
        return scipy.stats.bernoulli.logpmf(y, scipy.special.expit(f)).sum(axis=1)
    if name == "poisson":
        return scipy.stats.poisson.logpmf(y, np.exp(f)).sum(axis=1)
    return scipy.stats.logistic.logpdf(y, f).sum(axis=1)


@functools.cache
def computed(name, dtype):
    """Everything that a family computes at the data above, compiled once."""
    likelihood, targets = FAMILIES[name]

    @jax.jit
    def all_of(outputs, tangents, targets):
        single = jax.hessian(lambda f, y: likelihood.negative_log_density(f[None], y[None])[0])
        return {
            "loss": likelihood.negative_log_density(outputs, targets),
            "product": likelihood.hessian_mv(outputs, tangents, targets),
            "root": likelihood.hessian_sqrt(outputs, targets),
            "hessian": expected_hessian(name, single, outputs, targets),
        }

    arrays = jnp.asarray(OUTPUTS, dtype), jnp.asarray(TANGENTS, dtype)
    result = all_of(*arrays, jnp.asarray(targets))
    return {name: np.asarray(value) for name, value in result.items()}


def close(actual, expected, dtype):
    tolerance = {"float32": 2e-5, "float64": 1e-12}[dtype.name]
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_density_is_that_of_scipy(name, dtype):
    close(computed(name, dtype)["loss"], -log_densities(name, OUTPUTS, FAMILIES[name][1]), dtype)
    assert computed(name, dtype)["loss"].dtype == dtype


@pytest.mark.parametrize("name", FAMILIES)
def test_hessian_is_that_of_the_density(name, dtype):
    result = computed(name, dtype)
    close(result["product"], np.einsum("nkl,nl->nk", result["hessian"], TANGENTS), dtype)


@pytest.mark.parametrize("name", FAMILIES)
def test_root_is_a_square_root_of_the_hessian(name, dtype):
    result = computed(name, dtype)
    root = result["root"]
    close(root @ root.transpose(0, 2, 1), result["hessian"], dtype)
    assert root.shape == (N, K, FAMILIES[name][0].root_rank(K))
    assert root.dtype == result["product"].dtype == dtype


def test_root_of_the_categorical_hessian_has_no_row_to_spare():
    assert Categorical().root_rank(K) == K - 1
    hessian = computed("categorical", jnp.dtype("float32"))["hessian"]
    assert np.linalg.matrix_rank(hessian[0], tol=1e-5) == K - 1


@hypothesis.given(st.lists(st.floats(-80, 80, width=32), min_size=3, max_size=3))
@hypothesis.settings(max_examples=30)
def test_categorical_root_holds_for_extreme_logits(logits):
    f = jnp.asarray([logits], jnp.float32)
    root = np.asarray(_categorical_root(f), np.float64)[0]
    p = scipy.special.softmax(np.asarray(f, np.float64)[0])
    np.testing.assert_allclose(root @ root.T, np.diag(p) - np.outer(p, p), atol=1e-6)


_categorical_root = jax.jit(Categorical().hessian_sqrt)


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_have_the_fisher_information(name):
    """`E g = 0` and `E g g^T = E H` for targets drawn from the model, within sampling error."""
    likelihood, _ = FAMILIES[name]
    draws, dtype = 20_000, jnp.dtype("float32")

    @jax.jit
    def gradients(key, output):
        outputs = jnp.broadcast_to(output[None, :], (draws, K))
        targets = likelihood.sample(key, outputs)
        loss = lambda f: jnp.sum(likelihood.negative_log_density(f, targets))  # noqa: E731
        return jax.grad(loss)(outputs), likelihood.hessian_sqrt(outputs, targets)

    g, root = map(np.asarray, gradients(jax.random.key(1), jnp.asarray(OUTPUTS[0], dtype)))
    products = g[:, :, None] * g[:, None, :] - root @ root.transpose(0, 2, 1)
    for statistic in (g, products.reshape(draws, -1)):
        error = statistic.std(axis=0) / draws**0.5
        # 20 statistics in 7 families at 5 standard errors: a false alarm in one of 12,000 seeds.
        assert (np.abs(statistic.mean(axis=0)) <= 5 * error + 1e-5).all()


def test_fitted_precision_is_the_maximum_of_the_likelihood():
    targets = FAMILIES["gaussian"][1]
    fitted = Gaussian.fit(jnp.asarray(OUTPUTS, jnp.float32), targets)
    np.testing.assert_allclose(fitted.precision, 1 / np.mean((OUTPUTS - targets) ** 2), rtol=1e-5)


def test_gaussian_loss_has_a_gradient_in_the_precision():
    outputs, targets = jnp.asarray(OUTPUTS, jnp.float32), FAMILIES["gaussian"][1]

    def loss(precision):
        return jnp.sum(Gaussian(precision).negative_log_density(outputs, targets))

    squares = np.sum((OUTPUTS - targets) ** 2)
    slope = jax.jit(jax.grad(loss))(jnp.asarray(2.0, jnp.float32))
    np.testing.assert_allclose(slope, squares / 2 - N * K / 4, rtol=1e-5)


def test_single_column_targets_may_be_flat():
    outputs = jnp.asarray(OUTPUTS[:, :1], jnp.float32)
    for likelihood, targets in [(Gaussian(), [0.5] * N), (Bernoulli(), [1] * N)]:
        flat, column = np.array(targets), np.array(targets)[:, None]
        likelihood.check(outputs, flat)
        likelihood.check(outputs, column)
        np.testing.assert_array_equal(
            likelihood.negative_log_density(outputs, flat),
            likelihood.negative_log_density(outputs, column),
        )


LABELS = FAMILIES["categorical"][1]
REAL = FAMILIES["gaussian"][1]


def with_entry(array, value):
    array = np.array(array, float if isinstance(value, float) else None)
    array[(2,) + (0,) * (array.ndim - 1)] = value
    return array


BAD = [
    (Categorical(), OUTPUTS, with_entry(LABELS, 4), TargetError, r"example 2 is 4.*0\.\.3"),
    (Categorical(), OUTPUTS, with_entry(LABELS, -1), TargetError, "example 2 is -1"),
    (Categorical(), OUTPUTS, LABELS.astype(float), TypeError, "integer labels"),
    (Categorical(), OUTPUTS, np.eye(K)[LABELS], ValueError, "argmax"),
    (Categorical(), OUTPUTS, LABELS[:3], ValueError, r"\(3,\).*\(6,\)"),
    (Categorical(), OUTPUTS[:, :1], np.zeros(N, int), ValueError, "Bernoulli"),
    (Bernoulli(), OUTPUTS, with_entry(np.zeros((N, K)), 0.5), TargetError, "0 or 1"),
    (Poisson(), OUTPUTS, with_entry(np.zeros((N, K)), -1.0), TargetError, "counts"),
    (Poisson(), OUTPUTS, with_entry(np.zeros((N, K)), 1.5), TargetError, "example 2 is 1.5"),
    (Gaussian(), OUTPUTS, with_entry(REAL, np.nan), NotFiniteError, "target of example 2"),
    (Gaussian(), OUTPUTS, REAL[:, :2], ValueError, r"\(6, 2\).*\(6, 4\)"),
    (Gaussian(), OUTPUTS, REAL + 1j, TypeError, "complex"),
    (Gaussian(np.ones(3)), OUTPUTS, REAL, ValueError, "3 entries.*4 outputs"),
    (Gaussian(), with_entry(OUTPUTS, np.inf), REAL, NotFiniteError, "first that of example 2"),
    (Gaussian(), OUTPUTS[:0], REAL[:0], ValueError, "at least one example"),
    (HeteroscedasticGaussian(), OUTPUTS[:, :3], REAL, ValueError, "even number"),
    (Custom(student_t), OUTPUTS, REAL[:3], ValueError, "one target for each"),
    (Custom(lambda f, y: y - f), OUTPUTS, REAL, ValueError, "must return a scalar"),
    (Custom(lambda f, y: -jnp.exp(300 * jnp.sum(f**2))), OUTPUTS, REAL, NotFiniteError, "loss"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_data_are_refused(case):
    likelihood, outputs, targets, error, message = BAD[case]
    with pytest.raises(error, match=message):
        likelihood.check(jnp.asarray(outputs, jnp.float32), targets)


@pytest.mark.parametrize("name", FAMILIES)
def test_good_data_pass(name):
    likelihood, targets = FAMILIES[name]
    assert likelihood.check(jnp.asarray(OUTPUTS, jnp.float32), targets) is None


def test_checks_of_shapes_work_while_tracing():
    check = jax.jit(lambda f, y: Categorical().check(f, y))
    check(jnp.asarray(OUTPUTS, jnp.float32), jnp.asarray(LABELS))
    with pytest.raises(ValueError, match="shape"):
        check(jnp.asarray(OUTPUTS, jnp.float32), jnp.asarray(LABELS[:2]))


def test_an_indefinite_density_is_refused_with_the_eigenvalue():
    outputs = jnp.asarray(OUTPUTS, jnp.float32)
    Custom(logistic).check_definite(outputs, REAL)
    far = OUTPUTS + 4.0 * (np.arange(N) == 1)[:, None]
    with pytest.raises(NotPositiveDefiniteError, match=r"example 1 .*eigenvalue -0\..*fisher"):
        Custom(student_t).check_definite(outputs, far)


def test_custom_needs_targets_and_a_sampler():
    outputs = jnp.asarray(OUTPUTS, jnp.float32)
    with pytest.raises(TypeError, match="targets=None"):
        Custom(logistic).hessian_mv(outputs, outputs)
    with pytest.raises(TypeError, match="sampler="):
        Custom(logistic).sample(jax.random.key(0), outputs)


@pytest.mark.parametrize("precision", [0.0, -1.0, np.nan, np.inf])
def test_precision_must_be_positive(precision):
    with pytest.raises(ValueError, match="must be positive"):
        Gaussian(precision)
    with pytest.raises(ValueError, match="scalar or one per output"):
        Gaussian(np.ones((2, 2)))
