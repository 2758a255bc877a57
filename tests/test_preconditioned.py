"""Preconditioned beliefs: mapped back exactly, and the trace of the original operator."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracles
import pnkrylov as pk
from harness import CountingOperator, count_compilations
from pnkrylov.beliefs import inverse_belief
from pnkrylov.calibration import calibrate_trace
from pnkrylov.preconditioners import Dense, Diagonal, PreconditionedOperator, ScaledIdentity
from pnkrylov.probes import TraceProbes, run_probes
from pnkrylov.trace import logdet, trace_inverse

SIZE = 24
KEY = jax.random.key(3)
INVERSE = {"key": KEY, "num_steps": 6, "lookahead": 4, "num_probes": 5, "probe_depth": 6}


@functools.cache
def problem(dtype="float64"):
    """An exponential spectrum, and a preconditioner that knows it up to a factor of about two."""
    matrix, _ = oracles.exponential(SIZE)
    rng = np.random.default_rng(5)
    factor = np.linalg.cholesky(matrix)
    inside = oracles.with_spectrum(rng.uniform(0.5, 2, SIZE), 8)
    shape = factor @ np.linalg.inv(inside) @ factor.T
    return matrix.astype(dtype), ((shape + shape.T) / 2).astype(dtype)


def root(matrix):
    """The symmetric inverse square root."""
    values, vectors = np.linalg.eigh(matrix.astype(float))
    return (vectors / np.sqrt(values)) @ vectors.T


def pair(dtype="float64"):
    matrix, shape = problem(dtype)
    return jnp.asarray(matrix), Dense(jnp.asarray(shape))


def close(a, b, rtol):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(np.max(np.abs(b))))


# The map back.


@pytest.mark.parametrize("layout", ["resolve-all", "paper"])
def test_an_inverse_belief_is_that_of_the_inside_mapped_back(dtype, layout):
    matrix, preconditioner = pair(dtype.name)
    rtol = 1e-9 if dtype == jnp.float64 else 2e-4
    belief = pk.inverse(matrix, preconditioner=preconditioner, layout=layout, **INVERSE)
    outer = root(problem(dtype.name)[1])
    inside = np.asarray(belief.covariance.inner.as_matrix())
    expected = outer @ inside @ outer
    close(belief.covariance.as_matrix(), expected, rtol)
    close(belief.variance(), np.diag(expected), rtol)
    close(belief.covariance.trace(), np.trace(expected), rtol)
    close(belief.covariance.logdet(), np.linalg.slogdet(expected)[1], rtol)
    rows = np.random.default_rng(0).standard_normal((3, SIZE)).astype(dtype)
    close(belief.push(jnp.asarray(rows)).covariance, rows @ expected @ rows.T, rtol)
    close(belief.matvec(jnp.asarray(rows[0])).value, expected @ rows[0], rtol)
    # The basis is one of P^-1/2 A P^-1/2.
    rows = np.asarray(belief.run.basis.vectors, float)
    close(rows @ outer @ problem()[0] @ outer @ rows.T, belief.run.basis.tridiagonal(), rtol)


@pytest.mark.slow
def test_samples_have_the_mapped_covariance():
    matrix, preconditioner = pair()
    belief = pk.inverse(matrix, preconditioner=preconditioner, **INVERSE)
    count = 4000
    draws = np.asarray(belief.sample(KEY, count))
    sigma = np.asarray(belief.covariance.as_matrix())
    # Whitened, the sample covariance is I up to sampling error: the largest of d^2 deviations.
    white = np.linalg.solve(np.linalg.cholesky(sigma), draws.T)
    deviation = np.abs(white @ white.T / count - np.eye(SIZE)).max()
    assert deviation < 6 * np.sqrt(2 / count)


@pytest.mark.parametrize("steps", [5, SIZE])
def test_a_solve_belief_knows_its_error(dtype, steps):
    matrix, preconditioner = pair(dtype.name)
    rhs = np.random.default_rng(1).standard_normal(SIZE).astype(dtype)
    exact = np.linalg.solve(problem()[0], rhs.astype(float))
    belief = pk.solve(
        matrix, jnp.asarray(rhs), key=KEY, num_steps=steps, preconditioner=preconditioner
    )
    error = exact - np.asarray(belief.mean, float)
    if steps == SIZE:
        close(belief.mean, exact, 1e-9 if dtype == jnp.float64 else 2e-2)
        return
    # The look-ahead sees every later step here, so the prediction has a few digits.
    rtol = 1e-6 if dtype == jnp.float64 else 5e-2
    close(belief.error.error_norm, np.linalg.norm(error), rtol)
    close(belief.error.energy_norm, np.sqrt(error @ problem()[0] @ error), rtol)
    close(belief.covariance.trace(), error @ error, 2 * rtol)
    # A Krylov mean in the coordinates of the inside, without use of the library.
    outer = root(problem()[1])
    inside = outer @ problem()[0] @ outer
    krylov = [outer @ rhs]
    for _ in range(steps - 1):
        krylov.append(inside @ krylov[-1] / np.linalg.norm(krylov[-1]))
    rows = np.linalg.qr(np.array(krylov).T)[0].T
    mean = outer @ rows.T @ np.linalg.solve(rows @ inside @ rows.T, rows @ outer @ rhs)
    close(belief.mean, mean, 1e-8 if dtype == jnp.float64 else 2e-3)


def test_coverage_of_an_ill_conditioned_solve():
    # Errors of coordinates within 95 % intervals over many right-hand sides; without the mapped
    # scale (||e_x|| / ||e_y||) the intervals of this problem are off by orders of magnitude.
    matrix, _ = oracles.SPECTRA["exponential-1e6"](100)
    rng = np.random.default_rng(2)
    factor = np.linalg.cholesky(matrix)
    inside = oracles.with_spectrum(rng.uniform(0.3, 3, 100), 4)
    preconditioner = Dense(jnp.asarray(factor @ inside @ factor.T))
    rhs = rng.standard_normal((60, 100))

    @eqx.filter_jit
    def solved(v):
        belief = pk.solve(
            jnp.asarray(matrix), v, key=KEY, num_steps=8, preconditioner=preconditioner
        )
        return belief.mean, belief.std()

    means, deviations = jax.vmap(solved)(jnp.asarray(rhs))
    errors = np.linalg.solve(matrix, rhs.T).T - np.asarray(means)
    coverage = np.mean(np.abs(errors) <= 1.96 * np.asarray(deviations), axis=1)
    # The errors of one right-hand side are dependent: the spread over right-hand sides counts.
    standard_error = np.std(coverage) / np.sqrt(len(rhs))
    assert abs(coverage.mean() - 0.95) < 4 * standard_error + 0.02


def test_z_and_s_do_not_change_with_the_coordinates():
    matrix, preconditioner = pair()
    rhs = jnp.asarray(np.random.default_rng(1).standard_normal(SIZE))
    belief = pk.solve(matrix, rhs, key=KEY, num_steps=5, preconditioner=preconditioner)
    exact = np.linalg.solve(problem()[0], rhs)
    error = exact - np.asarray(belief.mean)
    sigma = np.asarray(belief.covariance.as_matrix())
    # Sigma is singular along P^-1/2 of the resolved rows: its pseudo-inverse in the inside.
    half = np.linalg.inv(root(problem()[1]))
    inner = np.asarray(belief.covariance.inner.as_matrix())
    z = (half @ error) @ np.linalg.pinv(inner, rcond=1e-10, hermitian=True) @ (half @ error)
    close(pk.z_statistic(belief, jnp.asarray(exact)).value, z, 1e-6)
    found = pk.s_statistic(matrix, belief, jnp.asarray(exact), key=KEY, num_probes=SIZE)
    close(found.value, error @ problem()[0] @ error, 1e-8)
    close(found.expected.value, np.trace(problem()[0] @ sigma), 1e-8)


# Traces and log-determinants of the original operator.


def exhaustive_probes(belief, operator):
    """One probe along every axis, run to its end: the trace without any sampling error."""
    run = belief.run
    level = jnp.minimum(run.level, run.basis.filled)
    rows = np.asarray(run.basis.vectors)[: int(level)]
    starts = np.sqrt(SIZE) * root(problem()[1])
    starts = starts - (starts @ rows.T) @ rows
    starts = jnp.asarray(starts)
    probes = run_probes(operator, run.basis, level, KEY, SIZE, SIZE, starts=starts)
    return TraceProbes(probes, jnp.sum(starts**2, axis=1))


@pytest.mark.parametrize("layout", ["resolve-all", "paper"])
def test_the_trace_of_the_original_operator_is_exact_with_all_probes(layout):
    matrix, preconditioner = pair()
    belief = pk.inverse(matrix, preconditioner=preconditioner, layout=layout, **INVERSE)
    operator = PreconditionedOperator(
        operator=pk.as_operator(matrix),
        preconditioner=preconditioner,
        structure=belief.structure,
    )
    # The coupling is exact only if the look-ahead saw all of it.
    run = pk.inverse(
        matrix,
        preconditioner=preconditioner,
        layout=layout,
        **INVERSE | {"lookahead": SIZE - INVERSE["num_steps"]},
    ).run
    run = eqx.tree_at(lambda r: r.trace_probes, run, exhaustive_probes(belief, operator))
    value, _ = calibrate_trace(run, jnp.zeros(()))
    exact = np.trace(np.linalg.inv(problem()[0]))
    close(value, exact, 1e-8)
    # The trace of the inside is another number.
    inside = belief.covariance.inner.trace()
    assert not np.isclose(inside, exact, rtol=0.5)
    assert inverse_belief(run, belief.mean_flat, jnp.zeros(()), layout).trace().value == value


def test_trace_and_logdet_lie_within_their_errors():
    matrix, preconditioner = pair()
    count = 100

    @eqx.filter_jit
    def estimates(key):
        belief = pk.inverse(matrix, preconditioner=preconditioner, **INVERSE | {"key": key})
        found = belief.trace(), belief.logdet()
        return [(e.value, e.standard_error, e.interval(0.95)) for e in found]

    exact = np.trace(np.linalg.inv(problem()[0])), np.linalg.slogdet(problem()[0])[1]
    found = jax.vmap(estimates)(jax.random.split(KEY, count))
    for (value, error, (lower, upper)), truth in zip(found, exact, strict=True):
        # The mean over runs is within four standard errors of the truth (plus quadrature bias).
        spread = np.std(value) / np.sqrt(count)
        assert abs(np.mean(value) - truth) < 4 * spread + 5e-3 * abs(truth)
        # The standard errors tell the spread: 20 % is four sampling errors of a variance ratio.
        assert 0.6 < np.sqrt(np.mean(np.square(error))) / np.std(value) < 1.6
        covered = (np.asarray(lower) <= truth) & (truth <= np.asarray(upper))
        # Nominal 95 % with five probes (t-distributed: 90 %), less four sampling errors.
        assert covered.mean() > 0.90 - 4 * np.sqrt(0.9 * 0.1 / count)


@pytest.mark.slow
@pytest.mark.parametrize("function", [trace_inverse, logdet])
def test_adaptive_traces_of_the_original_operator(function):
    matrix, _ = oracles.SPECTRA["exponential-1e6"](120)
    rng = np.random.default_rng(2)
    factor = np.linalg.cholesky(matrix)
    inside = oracles.with_spectrum(rng.uniform(0.4, 2.5, 120), 4)
    preconditioner = Dense(jnp.asarray(factor @ np.linalg.inv(inside) @ factor.T), num_products=3)
    truth = {
        trace_inverse: np.trace(np.linalg.inv(matrix)),
        logdet: np.linalg.slogdet(matrix)[1],
    }[function]
    operator = CountingOperator(matrix)
    count, budget = 20, 50
    found = [
        function(operator, key=key, budget=budget, preconditioner=preconditioner)
        for key in jax.random.split(KEY, count)
    ]
    assert operator.products + 3 * count == sum(int(e.num_matvecs) for e in found)
    assert all(int(e.num_matvecs) <= budget for e in found)
    values = np.array([float(e.value) for e in found])
    errors = np.array([float(e.standard_error) for e in found])
    # Without the preconditioner the error at this budget is of the order of the trace itself.
    assert np.sqrt(np.mean((values - truth) ** 2)) < 0.03 * abs(truth)
    assert abs(values.mean() - truth) < 4 * np.sqrt(np.mean(errors**2) / count)
    covered = [float(e.lower) <= truth <= float(e.upper) for e in found]
    # Of 20 intervals of 95 %, fewer than 15 cover with a probability of 3e-4.
    assert sum(covered) >= 15
    whole = function(jnp.asarray(matrix), key=KEY, budget=130, preconditioner=preconditioner)
    close(whole.value, truth, 1e-8)


def test_traces_refuse_what_a_preconditioner_does_not_fit():
    matrix, preconditioner = pair()
    with pytest.raises(ValueError, match="method='pslq'"):
        logdet(matrix, key=KEY, method="slq", preconditioner=preconditioner)
    with pytest.raises(ValueError, match="lower_bound"):
        trace_inverse(matrix, key=KEY, lower_bound=1e-3, preconditioner=preconditioner)
    costly = Dense(jnp.asarray(problem()[1]), num_products=30)
    with pytest.raises(ValueError, match=r"after 30 products.*at least 38"):
        trace_inverse(matrix, key=KEY, budget=32, preconditioner=costly)


def test_a_budget_counts_the_set_up_and_both_kinds_of_probes():
    matrix, shape = problem()
    operator = CountingOperator(matrix)
    preconditioner = Dense(jnp.asarray(shape), num_products=7)
    belief = pk.inverse(operator, key=KEY, budget=40, preconditioner=preconditioner)
    assert operator.products + 7 == int(belief.stats.num_matvecs) <= 40
    assert belief.run.trace_probes is not None


# Refinement, drivers, transformations, refusals.


def test_products_on_the_host_stay_there():
    # A callback inside a compiled loop may hang on CPU: also where the operator is wrapped.
    operator = CountingOperator(problem()[0])
    belief = pk.solve(
        operator, jnp.ones(SIZE), key=KEY, num_steps=3, preconditioner=pair()[1], max_lookahead=0
    )
    assert belief.stats.driver == "host"


@pytest.mark.slow
def test_refinement_equals_a_longer_run():
    matrix, preconditioner = pair()
    rhs = jnp.ones(SIZE)
    options = {"key": KEY, "max_lookahead": 10, "preconditioner": preconditioner}
    short = pk.solve(matrix, rhs, num_steps=4, **options).refine(
        matrix, num_steps=3, max_lookahead=10
    )
    long = pk.solve(matrix, rhs, num_steps=7, **options)
    close(short.mean, long.mean, 1e-8)
    belief = pk.inverse(matrix, preconditioner=preconditioner, **INVERSE)
    refined = belief.refine(matrix, num_steps=3, key=KEY)
    longer = pk.inverse(matrix, preconditioner=preconditioner, **INVERSE | {"num_steps": 9})
    close(refined.run.basis.vectors, longer.run.basis.vectors, 1e-8)
    assert refined.trace().value != belief.trace().value


def test_jit_and_no_recompilation():
    matrix, _ = pair()

    @eqx.filter_jit
    def both(matrix, entries, rhs):
        preconditioner = Diagonal(entries)
        belief = pk.solve(matrix, rhs, key=KEY, num_steps=5, preconditioner=preconditioner)
        inverse = pk.inverse(matrix, preconditioner=preconditioner, **INVERSE)
        return belief.mean, belief.std(), inverse.trace().value, inverse.variance()

    arguments = matrix, jnp.diagonal(matrix), jnp.ones(SIZE)
    first = both(*arguments)
    others = tuple(2 * x for x in arguments)
    with count_compilations() as compiled:
        second = both(*others)
    assert not compiled
    close(second[2], first[2] / 2, 1e-8)  # A and P doubled
    close(second[3], first[3] / 2, 1e-8)


def test_refusals_name_the_argument_and_the_remedy(tmp_path):
    matrix, preconditioner = pair()
    rhs = jnp.ones(SIZE)
    good = {"key": KEY, "num_steps": 3}
    with pytest.raises(ValueError, match=r"size 5.*length 24"):
        pk.solve(matrix, rhs, preconditioner=ScaledIdentity(5), **good)
    with pytest.raises(TypeError, match=r"float32.*float64"):
        pk.solve(matrix, rhs, preconditioner=Diagonal(jnp.ones(SIZE, jnp.float32)), **good)
    with pytest.raises(ValueError, match=r"shift=.*preconditioner"):
        pk.solve(matrix, rhs, shift=0.1, preconditioner=preconditioner, **good)
    with pytest.raises(ValueError, match=r"shift=.*preconditioner"):
        pk.inverse(matrix, shift=0.1, preconditioner=preconditioner, **good)
    with pytest.raises(ValueError, match=r"lower_bound=.*preconditioner"):
        pk.solve(matrix, rhs, lower_bound=0.001, preconditioner=preconditioner, **good)
    belief = pk.solve(matrix, rhs, preconditioner=preconditioner, **good)
    with pytest.raises(ValueError, match="Run again on A"):
        belief.shift(0.1)
    with pytest.raises(ValueError, match="preconditioner"):
        belief.save(tmp_path / "belief.npz")
    broken = eqx.tree_at(lambda p: p.values, preconditioner, preconditioner.values.at[0].set(-1))
    with pytest.raises(pk.NotFiniteError, match="preconditioner"):
        pk.solve(matrix, rhs, preconditioner=broken, **good)
