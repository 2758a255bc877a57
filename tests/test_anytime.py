"""Time limits: a run stops after the step in progress, and the belief says how far it came."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pnkrylov as pk
from anytime_cases import MATRIX, START, STEPS, inverse, lanczos, operator, solve
from harness import no_type_checker
from pnkrylov import interruption


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a test moves it."""
    now = types.SimpleNamespace(seconds=0.0, per_reading=0.0)

    def monotonic():
        now.seconds += now.per_reading
        return now.seconds

    monkeypatch.setattr(interruption, "time", types.SimpleNamespace(monotonic=monotonic))

    def product_takes(seconds):
        def tick(_):
            now.seconds += seconds

        return tick

    now.product_takes = product_takes
    return now


def test_a_time_limit_ends_a_run_after_the_step_in_progress(clock, dtype):
    whole = lanczos(dtype)
    basis = lanczos(dtype, clock.product_takes(2.0), max_seconds=9.0)
    assert basis.num_rows == int(basis.filled) == 5
    for name in ("vectors", "alpha", "beta"):
        np.testing.assert_array_equal(getattr(basis, name), getattr(whole, name)[:5])
    np.testing.assert_array_equal(basis.next_vector, whole.vectors[5])
    # One step is always taken, even when the time is up before; and a limit of an earlier call is
    # gone.
    clock.per_reading = 1.0
    assert lanczos(dtype, max_seconds=0.5).num_rows == 1
    clock.per_reading = 0.0
    assert lanczos(dtype, clock.product_takes(2.0)).num_rows == STEPS
    continued = pk.continue_run(basis, operator(dtype), 4, driver="host", max_seconds=100.0)
    assert continued.num_rows == STEPS


@pytest.mark.one_precision
def test_a_time_limit_ends_a_solve_like_an_interruption(clock, dtype):
    # One call checks the symmetry by two products; the limit then leaves 17 of 30 steps, less
    # what it chooses to look ahead: what a budget of as many products gives.
    tick = clock.product_takes(1.0)
    belief = solve(dtype, tick, num_steps=30, max_seconds=18.0)
    assert int(belief.stats.num_matvecs) == 19
    budget = solve(dtype, budget=19, num_steps=None)
    assert int(belief.stats.num_steps) == int(budget.stats.num_steps) < 17
    tolerance = {"float32": 1e-3, "float64": 1e-9}[dtype.name]
    np.testing.assert_allclose(belief.mean, budget.mean, atol=tolerance * np.abs(budget.mean).max())
    assert float(belief.error.error_norm) > 0


@pytest.mark.one_precision
def test_a_time_limit_that_ends_the_lookahead_at_once_still_sees_an_error(clock, dtype):
    tick = clock.product_takes(1.0)
    belief = solve(dtype, tick, num_steps=20, max_seconds=23.0)
    assert int(belief.stats.num_matvecs) == 24
    assert 0 < int(belief.stats.num_steps) < 20
    error = np.linalg.norm(np.linalg.solve(MATRIX, START) - np.asarray(belief.mean, np.float64))
    assert 0.2 < float(belief.error.error_norm) / error < 5


@pytest.mark.one_precision
def test_a_time_limit_keeps_a_quarter_for_the_probes(clock, dtype):
    tick = clock.product_takes(1.0)
    belief = inverse(dtype, tick, num_steps=35, max_seconds=20.0)
    # 15 seconds: the check and 14 steps, of which a fifth looks ahead; the rest for the probes.
    assert int(belief.stats.num_steps) == 14 and int(belief.run.level) == 12
    assert int(belief.stats.probe_depth) == 3
    assert np.isfinite(float(belief.trace().value))


def test_time_limits_need_the_host_and_a_number(dtype):
    start = jnp.asarray(START, dtype)
    for options in ({"max_seconds": 1.0}, {"checkpoint": "here"}):
        with pytest.raises(ValueError, match=r"need concrete values, and so do max_seconds="):
            jax.jit(lambda v, o=options: pk.lanczos(MATRIX.astype(dtype), v, 2, **o))(start)
        with pytest.raises(ValueError, match=r"driver='compiled' is one XLA loop"):
            pk.lanczos(MATRIX.astype(dtype), start, 2, driver="compiled", **options)
    for call in (lanczos, solve, inverse):
        with pytest.raises(ValueError, match=r"max_seconds=0.0 must be positive"):
            call(dtype, max_seconds=0.0)
    with no_type_checker(), pytest.raises(TypeError, match=r"max_seconds='1' must be a number"):
        lanczos(dtype, max_seconds="1")
