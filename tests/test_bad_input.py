"""Bad input to the two front doors: each its own clear error, and never a plausible number."""

import os
import pathlib
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracles
import pnkrylov as pk
from harness import no_type_checker, start_vector

SIZE = 12
KEY = jax.random.key(0)
ROOT = pathlib.Path(pk.__file__).parents[1]


def matrix_of(dtype):
    return oracles.with_spectrum(np.geomspace(1, 20, SIZE), 0).astype(dtype)


def indefinite(dtype):
    eigenvalues = np.concatenate([[-1.5], np.geomspace(1, 20, SIZE - 1)])
    return oracles.with_spectrum(eigenvalues, 0).astype(dtype)


def singular(dtype):
    return oracles.with_spectrum(np.concatenate([[0.0], np.ones(5), 2 * np.ones(6)]), 0).astype(
        dtype
    )


def not_symmetric(dtype):
    matrix = matrix_of(dtype)
    matrix[0, 1] += 1
    return matrix


def solve(A, v=None, **options):
    options.setdefault("key", KEY)
    return pk.solve(A, start_vector(SIZE, A.dtype) if v is None else v, **options)


def inverse(A, **options):
    options.setdefault("key", KEY)
    return pk.inverse(A, **options)


both = pytest.mark.parametrize("run", [solve, inverse])


# Found while tracing: ValueError and TypeError.


def test_shapes_and_dtypes(dtype):
    A, v = matrix_of(dtype), start_vector(SIZE, dtype)
    for run in (lambda A: pk.solve(A, v, key=KEY), lambda A: pk.inverse(A, key=KEY)):
        with pytest.raises(ValueError, match=r"A must be square, got shape \(12, 11\)"):
            run(A[:, :-1])
        with pytest.raises(TypeError, match=r"A has dtype int32; a real floating.*\.astype"):
            run(A.astype(np.int32))
        with pytest.raises(TypeError, match=r"A has the complex dtype complex64; only real"):
            run(A.astype(np.complex64))
    with pytest.raises(ValueError, match=r"A acts on vectors of length 12.* has 11 entries"):
        pk.solve(A, v[:-1], key=KEY)
    with pytest.raises(TypeError, match=r"like has dtype int32; a real floating dtype is needed"):
        pk.solve(A, v.astype(jnp.int32), key=KEY)
    for name in ("mean", "start"):
        with pytest.raises(ValueError, match=r"length 12, but the right-hand side .* 11 entries"):
            pk.inverse(A, key=KEY, **{name: v[:-1]})
    with pytest.raises(ValueError, match=r"start has the wrong shape"):
        pk.solve(A, v, key=KEY, start=v[:-1], scale="prior")


def test_float64_without_x64():
    """Neither cast nor truncated behind the user's back: a message with the remedy."""
    program = """
import numpy as np, jax, pnkrylov as pk
key = jax.random.key(0)
A = np.eye(3)
for run in (lambda: pk.solve(A, np.ones(3), key=key), lambda: pk.inverse(A, key=key)):
    try:
        run()
    except TypeError as error:
        print(error)
"""
    environment = os.environ | {"JAX_ENABLE_X64": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 2, done.stderr
    for line in lines:
        assert "float64, but JAX runs without it" in line and "jax_enable_x64" in line


@both
def test_sizes(run):
    A = matrix_of(np.float32)
    with pytest.raises(ValueError, match=r"num_steps=0 must be at least 1"):
        run(A, num_steps=0)
    with pytest.raises(ValueError, match=r"num_steps=13 exceeds the dimension d=12.*at most 12"):
        run(A, num_steps=13)
    with pytest.raises(TypeError, match=r"num_steps=True must be an int, not bool"):
        run(A, num_steps=True)
    with no_type_checker(), pytest.raises(TypeError, match=r"num_steps=5.0 must be an int, not fl"):
        run(A, num_steps=5.0)
    with pytest.raises(TypeError, match=r"key is missing: pass a random key"):
        run(A, key=None)
    with pytest.raises(ValueError, match=r"budget=3 is too small: .*Pass at least 6"):
        run(A, budget=3)
    with pytest.raises(TypeError, match=r"budget=True must be an int"):
        run(A, budget=True)
    with pytest.raises(ValueError, match=r"Pass num_steps or budget, not both"):
        run(A, budget=30, num_steps=5)
    with no_type_checker(), pytest.raises(ValueError, match=r"driver='fast' is unknown"):
        run(A, driver="fast")
    for shift in (1j, "1"):
        with no_type_checker(), pytest.raises(TypeError, match=r"shift=.*real number|valid JAX"):
            run(A, shift=shift)


def test_options_of_solve():
    A = matrix_of(np.float32)
    v = start_vector(SIZE, np.float32)
    with no_type_checker(), pytest.raises(ValueError, match=r"scale='big' is unknown: use 'look"):
        solve(A, scale="big")
    for scale in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"scale=(-1.0|nan) must not be negative or NaN"):
            solve(A, scale=scale)
    with pytest.raises(ValueError, match=r"scale='lookahead' needs a run that starts at v"):
        solve(A, start=v)
    with pytest.raises(ValueError, match=r"max_lookahead=-1 must not be negative"):
        solve(A, max_lookahead=-1)
    with pytest.raises(ValueError, match=r"probe_depth=0 must be at least 1"):
        solve(A, scale="prior", probe_depth=0)
    with pytest.raises(ValueError, match=r"num_probes=0 needs a run that starts at v"):
        solve(A, scale="prior", start=v, num_probes=0)


def test_options_of_inverse():
    A = matrix_of(np.float32)
    with no_type_checker(), pytest.raises(ValueError, match=r"layout='all' is unknown: use 'res"):
        inverse(A, layout="all")
    for name in ("lookahead", "num_probes", "probe_depth"):
        with pytest.raises(ValueError, match=rf"{name}=0 must be at least 1"):
            inverse(A, **{name: 0})
    with pytest.raises(ValueError, match=r"budget= chooses shapes .* not under jit/vmap/grad"):
        jax.jit(lambda A: inverse(A, budget=30).trace().value)(jnp.asarray(A))


# Found in the numbers: PnkrylovError with the value, or a result code.


def failures(dtype):
    v = start_vector(SIZE, dtype)
    nan_matrix = matrix_of(dtype)
    nan_matrix[3, 4] = nan_matrix[4, 3] = np.nan
    infinite = matrix_of(dtype)
    infinite[2, 2] = np.inf
    return [
        ("NaN in v", matrix_of(dtype), v.at[2].set(jnp.nan), "nonfinite_input"),
        ("inf in v", matrix_of(dtype), v.at[2].set(jnp.inf), "nonfinite_input"),
        ("NaN in A", nan_matrix, v, "nonfinite_product"),
        ("inf in A", infinite, v, "nonfinite_product"),
        ("not symmetric", not_symmetric(dtype), v, "not_symmetric"),
        ("indefinite", indefinite(dtype), v, "not_positive_definite"),
        ("singular", singular(dtype), v, "not_positive_definite"),
    ]


ERRORS = {
    "nonfinite_input": (pk.NotFiniteError, r"right-hand side or start vector contains NaN or"),
    "nonfinite_product": (pk.NotFiniteError, r"A product A v contains NaN or infinity. Check the"),
    "not_symmetric": (pk.NotSymmetricError, r"is not symmetric: .* check_symmetric=False"),
    "not_positive_definite": (pk.NotPositiveDefiniteError, r"found the Ritz value .* Add a"),
}
NAMES = [name for name, *_ in failures(np.float32)]
RUNS = {
    "solve": lambda A, v, **options: pk.solve(A, v, key=KEY, num_steps=SIZE, **options),
    "inverse": lambda A, v, **options: pk.inverse(A, key=KEY, num_steps=SIZE, **options),
}
# An inverse belief has no right-hand side that could be bad.
CASES = [(run, i) for run in RUNS for i in range(len(NAMES)) if run == "solve" or i > 1]
every_failure = pytest.mark.parametrize(
    ("run", "index"), CASES, ids=[f"{run}: {NAMES[i]}" for run, i in CASES]
)


@every_failure
def test_the_error(run, index, dtype):
    _, A, v, code = failures(dtype)[index]
    error, message = ERRORS[code]
    with pytest.raises(error, match=message):
        RUNS[run](A, v)
    assert issubclass(error, pk.PnkrylovError)


@every_failure
def test_no_plausible_number_without_throw(run, index, dtype):
    _, A, v, code = failures(dtype)[index]
    belief = RUNS[run](A, v, throw=False)
    assert bool(belief.result == getattr(pk.RESULTS, code))
    assert np.isnan(belief.mean).all()
    assert np.isnan(belief.std()).all() and np.isnan(belief.covariance.as_matrix()).all()
    assert np.isnan(belief.sample(KEY, 2)).all()
    assert np.isnan(belief.push(np.ones(SIZE, dtype)).covariance).all()


@pytest.mark.parametrize("index", [4, 5])
def test_no_plausible_estimate_without_throw(index):
    _, A, v, _ = failures(np.float32)[index]
    assert np.isnan(RUNS["inverse"](A, v, throw=False).logdet().value)
    assert np.isnan(RUNS["solve"](A, v, throw=False).error.error_norm)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("index", [0, 2, 4, 5])
def test_the_error_under_jit(run, index):
    _, A, v, code = failures(np.float32)[index]
    if run == "inverse" and code == "nonfinite_input":
        return
    words = {
        "nonfinite_input": "contains NaN or infinity",
        "nonfinite_product": "contains NaN or infinity",
        "not_symmetric": "not symmetric",
        "not_positive_definite": "not positive definite",
    }[code]
    with pytest.raises(RuntimeError, match=words):
        _jitted(run, jnp.asarray(A), v)


@eqx.filter_jit
def _jitted(run, A, v):
    return RUNS[run](A, v).std()


def test_the_ritz_value_is_named():
    """All twelve steps are taken, so that the Ritz value is the eigenvalue itself."""
    for run in RUNS.values():
        with pytest.raises(pk.NotPositiveDefiniteError, match=r"-1\.5 \(the largest is 20\)"):
            run(indefinite(np.float64), start_vector(SIZE, np.float64))
    # A shift that lifts it is the remedy that the message promises.
    exact = np.linalg.inv(indefinite(np.float64) + 2 * np.eye(SIZE))
    lifted = RUNS["inverse"](indefinite(np.float64), None, shift=2.0)
    np.testing.assert_allclose(lifted.covariance.as_matrix(), exact, atol=1e-10)
    lifted = RUNS["solve"](singular(np.float64), start_vector(SIZE, np.float64), shift=1e-3)
    assert bool(lifted.result == pk.RESULTS.successful)


def test_a_negative_ritz_value_of_a_probe_is_proof_enough():
    """The main run breaks down in a positive subspace; the probes see the rest."""
    A = np.diag(np.concatenate([[-3.0], np.linspace(1, 2, SIZE - 1)]))
    start = np.zeros(SIZE)
    start[5] = 1
    with pytest.raises(pk.NotPositiveDefiniteError, match=r"Ritz value -3"):
        pk.inverse(A, key=KEY, start=start, num_probes=SIZE)


def test_a_start_with_nan_is_called_by_its_name():
    start = np.ones(SIZE)
    start[1] = np.nan
    with pytest.raises(pk.NotFiniteError, match=r"start vector contains NaN"):
        pk.inverse(matrix_of(np.float64), key=KEY, start=start)


def test_a_mean_with_nan_is_refused():
    mean = np.ones(SIZE)
    mean[1] = np.nan
    with pytest.raises(pk.NotFiniteError):
        pk.inverse(matrix_of(np.float64), key=KEY, mean=mean)


@both
def test_the_symmetry_check_can_be_switched_off(run, dtype):
    belief = run(not_symmetric(dtype), check_symmetric=False, throw=False)
    assert not bool(belief.result == pk.RESULTS.not_symmetric)
    assert belief.stats.asymmetry == -1
    checked = run(matrix_of(dtype))
    assert int(checked.stats.num_matvecs) >= 2 and float(checked.stats.asymmetry) < 1e-3
    unchecked = run(matrix_of(dtype), check_symmetric=False)
    assert int(unchecked.stats.num_matvecs) == int(checked.stats.num_matvecs) - 2
    np.testing.assert_allclose(unchecked.std(), checked.std(), rtol=1e-3, atol=1e-6)


@pytest.mark.one_precision
def test_the_symmetry_check_does_not_cry_wolf(dtype):
    """Symmetric up to rounding, as real products are: 30 keys, no alarm."""
    matrix = jnp.asarray(matrix_of(dtype))
    noisy = matrix * (1 + jnp.finfo(dtype).eps * start_vector(SIZE * SIZE, dtype).reshape(SIZE, -1))
    run = lambda key: pk.solve(noisy, matrix[0], key=key, num_steps=4).stats.asymmetry  # noqa: E731
    found = np.asarray(jax.vmap(run)(jax.random.split(KEY, 30)))
    # It saw rounding, of a few eps, and did not call it asymmetry (the error would be NaN).
    assert 0 < np.max(found) < 100 * float(jnp.finfo(dtype).eps)


def test_a_bad_lower_bound(dtype):
    A = matrix_of(dtype)
    for bound in (1.5, 0.0, -1.0):
        with pytest.raises(pk.PnkrylovError, match=rf"lower_bound={bound:g} \(plus shift 0\) is "):
            solve(A, num_steps=SIZE, lower_bound=bound)
        failed = solve(A, num_steps=SIZE, lower_bound=bound, throw=False)
        assert bool(failed.result == pk.RESULTS.bad_lower_bound) and np.isnan(failed.mean).all()
    # With the shift it may be negative, as long as the sum is a bound.
    assert np.all(np.isfinite(solve(A, num_steps=5, lower_bound=-0.5, shift=1.0).mean))
    assert np.all(np.isfinite(solve(A, num_steps=5, lower_bound=0.9).mean))


def test_the_smallest_eigenvalue_itself_is_a_lower_bound():
    A, eigenvalues = oracles.SPECTRA["exponential"](30)
    rhs = oracles.right_hand_side(A, "normal")
    belief = pk.solve(A, rhs, key=KEY, num_steps=30, lower_bound=eigenvalues[0])
    np.testing.assert_allclose(belief.mean, np.linalg.solve(A, rhs), rtol=1e-8)


def test_every_result_code_has_a_remedy():
    for code in ("nonfinite_input", "nonfinite_product", "not_symmetric", "not_positive_definite"):
        assert "." in pk.RESULTS[getattr(pk.RESULTS, code)]


def test_a_zero_right_hand_side_is_no_mistake(dtype):
    belief = solve(matrix_of(dtype), jnp.zeros(SIZE, dtype), num_steps=5)
    assert bool(belief.result == pk.RESULTS.successful)
    np.testing.assert_array_equal(belief.mean, np.zeros(SIZE, dtype))
    np.testing.assert_array_equal(belief.std(), np.zeros(SIZE, dtype))
    assert float(belief.error.error_norm) == 0
