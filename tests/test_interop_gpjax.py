"""gpjax's own models with our conditioning, against its exact posterior."""

import runpy
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import pnkrylov.interop
from pnkrylov.gp.operator import kernel_operator

N, S = 30, 6

# gpjax's own use of numpyro, and its advice against float32.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use numpyro:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:. is not of type float64:UserWarning"),
]


@pytest.fixture(scope="module")
def gpx():
    """gpjax, imported with its own promotion of dtypes and without warnings as errors."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        import gpjax

        return gpjax


@pytest.fixture(autouse=True)
def gpjax_promotes_dtypes_and_ranks():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def data(gpx, dtype):
    generator = np.random.default_rng(0)
    X, Xs = generator.uniform(size=(N, 2)), generator.uniform(size=(S, 2))
    y = np.sin(5 * X[:, :1]) + X[:, 1:] + 0.1 * generator.standard_normal((N, 1))
    X, y, Xs = (jnp.asarray(array, dtype) for array in (X, y, Xs))
    return gpx.Dataset(X=X, y=y), Xs


def exact_model(gpx, dtype):
    kernel = gpx.kernels.Matern32(
        lengthscale=jnp.asarray([0.5, 0.7], dtype), variance=jnp.asarray(1.2, dtype)
    )
    mean = gpx.mean_functions.Constant(jnp.asarray(0.3, dtype))
    likelihood = gpx.likelihoods.Gaussian(obs_stddev=jnp.asarray(0.2, dtype))
    return gpx.gps.Prior(kernel=kernel, mean_function=mean) * likelihood


def krylov_model(model, **options):
    from pnkrylov.interop.gpjax import KrylovModel

    return KrylovModel(model, num_steps=N, **options)


def tolerance(dtype):
    return dict(rtol=3e-3, atol=3e-4) if dtype == jnp.float32 else dict(rtol=1e-7, atol=1e-8)


@pytest.mark.slow
@pytest.mark.one_precision
def test_a_posterior_predicts_as_the_exact_one(gpx, dtype):
    train, Xs = data(gpx, dtype)
    exact = exact_model(gpx, dtype)
    mine, theirs = krylov_model(exact) | train, exact | train
    close = tolerance(dtype)
    np.testing.assert_allclose(
        mine.log_marginal_likelihood, theirs.log_marginal_likelihood, **close
    )
    found, wanted = mine(Xs), theirs.predict(Xs)
    np.testing.assert_allclose(found.mean, wanted.mean, **close)
    np.testing.assert_allclose(found.covariance(), wanted.covariance(), **close)
    marginal = mine.predict(Xs, covariance="diagonal")
    np.testing.assert_allclose(marginal.variance, wanted.variance, **close)
    for scale in (found.scale, marginal.scale):
        assert isinstance(scale, lx.AbstractLinearOperator)
        assert lx.is_positive_semidefinite(scale)
    assert found.sample(jax.random.key(0), (2,)).shape == (2, S)
    assert mine.logdet().standard_error < 1e-3


@pytest.mark.slow
def test_variances_are_not_negative_where_the_data_say_everything(gpx, dtype):
    # Points within the data and nearly no noise: the exact variance is lost in rounding.
    X = jnp.broadcast_to(jnp.linspace(0, 0.1, N, dtype=dtype)[:, None], (N, 2))
    exact = exact_model(gpx, dtype)
    model = exact.prior * gpx.likelihoods.Gaussian(obs_stddev=jnp.asarray(1e-2, dtype))
    posterior = krylov_model(model) | gpx.Dataset(X=X, y=jnp.sin(X[:, :1]))
    Xs = X[:S]
    jitter = model.prior.jitter
    assert jnp.min(posterior(Xs, covariance="diagonal").variance) >= jitter
    eigenvalues = np.linalg.eigvalsh(np.asarray(posterior(Xs).covariance(), np.float64))
    assert eigenvalues.min() > -10 * float(jnp.finfo(dtype).eps)


@pytest.mark.slow
@pytest.mark.one_precision
def test_gradients_and_fits_are_those_of_the_exact_model(gpx):
    import optax

    dtype = jnp.dtype(jnp.float64)
    train, _ = data(gpx, dtype)
    exact = exact_model(gpx, dtype)

    def objective(model, train):
        return -gpx.objectives.conjugate_mll(model, train)

    gradient = eqx.filter_jit(eqx.filter_grad(objective))
    found, wanted = gradient(krylov_model(exact), train), gradient(exact, train)
    found = jax.tree.leaves(eqx.filter(found, eqx.is_inexact_array))
    wanted = jax.tree.leaves(eqx.filter(wanted, eqx.is_inexact_array))
    assert len(found) == 4  # two for the kernel, the mean, the noise
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    histories = [
        gpx.fit(
            model=model,
            objective=objective,
            train_data=train,
            optim=optax.adam(0.1),
            num_iters=5,
            verbose=False,
        )[1]
        for model in (krylov_model(exact), exact)
    ]
    np.testing.assert_allclose(histories[0], histories[1], rtol=1e-6)


@pytest.mark.parametrize("shape", [(N,), (N, 2)], ids=["scalars", "vectors"])
def test_kernels_are_accepted_as_they_are(gpx, shape, dtype):
    X = jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype)
    scale = jnp.asarray(0.8, dtype)
    kernel = gpx.kernels.RBF(lengthscale=scale) * gpx.kernels.Matern12(lengthscale=scale)
    operator = kernel_operator(kernel, X, block_rows=7)
    block = jnp.asarray(np.random.default_rng(2).standard_normal((2, N)), dtype)
    matrix = kernel.cross_covariance(X.reshape(N, -1), X.reshape(N, -1))
    rounding = 1e-4 if dtype == jnp.float32 else 1e-12
    np.testing.assert_allclose(
        operator.block_mv(block), block @ matrix, rtol=rounding, atol=rounding
    )


def test_errors(gpx, dtype):
    train, Xs = data(gpx, dtype)
    from pnkrylov.interop.gpjax import KrylovPosterior

    model = exact_model(gpx, dtype)
    with pytest.raises(TypeError, match="likelihood is Bernoulli"):
        KrylovPosterior(model.prior, gpx.likelihoods.Bernoulli(), train)
    two = gpx.Dataset(X=train.X, y=jnp.concatenate([train.y, train.y], axis=1))
    with pytest.raises(ValueError, match=r"y has shape \(30, 2\)"):
        KrylovPosterior(model.prior, model.likelihood, two)
    with pytest.raises(ValueError, match="covariance='full' must be"):
        (krylov_model(model) | train)(Xs, covariance="full")


def test_without_gpjax_the_import_tells_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpjax.conditioning", None)
    with pytest.raises(ImportError, match=r"pip install 'gpjax>=1.0'"):
        runpy.run_path(pnkrylov.interop.__path__[0] + "/gpjax.py")
