"""Block runs that stop in time, come back from the disk, or are taken further."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pnkrylov as pk
import test_checkpoints
from anytime_cases import MATRIX, SIZE, START, Killed, assert_same, killed_at, operator
from harness import CountingOperator, no_type_checker
from pnkrylov import checkpoints, interruption
from pnkrylov.block import block_lanczos, runs

COUNT, STEPS = 2, 5
ROWS = np.random.default_rng(1).standard_normal((COUNT, SIZE))
KEY = jax.random.key(1)
no_waiting_for_the_disk = test_checkpoints.no_waiting_for_the_disk


def run_blocks(dtype, before_product=None, V=ROWS, **options):
    A = operator(dtype, before_product)
    return block_lanczos(A, jnp.asarray(V, dtype), STEPS, driver="host", **options)


def solve(dtype, before_product=None, **options):
    A, V = operator(dtype, before_product), jnp.asarray(ROWS, dtype)
    options = {"num_steps": STEPS, "max_lookahead": 5, "driver": "host"} | options
    return pk.solve(A, V, key=KEY, **options)


def solve_in_two_parts(dtype, before_product=None, **options):
    """Its look-ahead is judged after ten blocks, and goes on."""
    return solve(dtype, before_product, num_steps=3, max_lookahead=14, **options)


def inverse(dtype, before_product=None, **options):
    sizes = {"num_steps": 4, "lookahead": 3, "num_probes": 2, "probe_depth": 3}
    A, options = operator(dtype, before_product), sizes | {"driver": "host"} | options
    return pk.inverse(A, key=KEY, block_size=COUNT, **options)


def inverse_of_budget(dtype, before_product=None, **options):
    options = {"num_steps": None, "budget": 36, "num_probes": 2, "probe_depth": 4} | options
    return inverse(dtype, before_product, **options)


@pytest.fixture
def clock(monkeypatch):
    """A clock that every block product moves by a second."""
    now = types.SimpleNamespace(seconds=0.0, per_reading=0.0)

    def monotonic():
        now.seconds += now.per_reading
        return now.seconds

    def tick(_):
        now.seconds += 1

    monkeypatch.setattr(interruption, "time", types.SimpleNamespace(monotonic=monotonic))
    tick.now = now
    return tick


def test_a_time_limit_ends_a_run_after_the_block_in_progress(clock, dtype):
    whole = run_blocks(dtype)
    part = run_blocks(dtype, clock, max_seconds=2.5)
    assert part.num_blocks == int(part.filled) == 3
    assert_same(part.vectors, whole.vectors[: 3 * COUNT])
    assert_same(part.coupling, whole.coupling[:3])
    assert_same(part.next_block, whole.vectors[3 * COUNT : 4 * COUNT])
    # One step is always taken; and a limit of an earlier call is gone.
    clock.now.per_reading = 1.0
    assert run_blocks(dtype, max_seconds=0.5).num_blocks == 1
    assert run_blocks(dtype).num_blocks == STEPS


@pytest.mark.slow
def test_a_time_limit_ends_a_solve_like_a_budget(clock, dtype):
    # One call checks the symmetry by two products, seven block steps follow.
    belief = solve(dtype, clock, num_steps=12, max_seconds=8.0)
    budget = solve(dtype, num_steps=None, budget=2 + 7 * COUNT)
    assert int(belief.stats.num_matvecs) == int(budget.stats.num_matvecs) == 2 + 7 * COUNT
    assert int(belief.run.level) == int(budget.run.level) < 7
    tolerance = {"float32": 1e-3, "float64": 1e-9}[dtype.name]
    np.testing.assert_allclose(belief.mean, budget.mean, atol=tolerance * np.abs(budget.mean).max())


@pytest.mark.one_precision
def test_a_time_limit_that_ends_the_lookahead_at_once_lowers_the_level(clock, dtype, monkeypatch):
    monkeypatch.setattr(runs, "best_block_level", lambda *_: jnp.asarray(2, jnp.int32))
    belief = solve(dtype, clock, max_seconds=STEPS + 1.5)
    assert int(belief.stats.num_matvecs) == 2 + (STEPS + 1) * COUNT
    assert int(belief.run.level) == 2
    # A look-ahead that ran to its end keeps it.
    assert int(solve(dtype).run.level) == STEPS


@pytest.mark.slow
def test_a_time_limit_that_ends_the_lookahead_at_once_still_sees_errors(clock, dtype):
    belief = solve(dtype, clock, max_seconds=STEPS + 1.5)
    assert int(belief.stats.num_matvecs) == 2 + (STEPS + 1) * COUNT
    assert 0 < int(belief.run.level) < STEPS
    errors = np.linalg.solve(MATRIX, ROWS.T).T - np.asarray(belief.mean, np.float64)
    ratio = np.asarray(belief.predicted_error) / np.linalg.norm(errors, axis=1)
    assert np.all((ratio > 0.2) & (ratio < 5))


@pytest.mark.slow
def test_a_time_limit_keeps_a_quarter_for_the_probes(clock, dtype):
    belief = inverse(dtype, clock, num_steps=12, probe_depth=5, max_seconds=12.0)
    # Nine seconds: the check and eight blocks, of which a fifth looks ahead; three for the probes.
    assert belief.run.basis.num_blocks == 8 and int(belief.run.level) == 7
    assert int(belief.stats.probe_depth) == 3
    assert np.isfinite(float(belief.trace().value))


ALL = (4, 9, 15, 33)


@pytest.mark.one_precision
@pytest.mark.parametrize(
    ("run", "products"),
    [
        (run_blocks, (4, 9)),
        (solve, (15,)),
        pytest.param(solve, ALL, marks=pytest.mark.slow),
        pytest.param(solve_in_two_parts, ALL, marks=pytest.mark.slow),
        pytest.param(inverse, ALL, marks=pytest.mark.slow),
        pytest.param(inverse_of_budget, ALL, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_and_gives_the_same_answer(run, products, dtype, tmp_path):
    reference = run(dtype)
    for product in products:
        folder = tmp_path / str(product)
        options = {"checkpoint": folder, "checkpoint_seconds": 0.0}
        try:
            run(dtype, killed_at(product), **options)
        except Killed:
            assert_same(run(dtype, **options), reference)
        assert_same(run(dtype, **options), reference)


def test_nothing_is_computed_twice_but_one_step(dtype, tmp_path):
    options = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0.0}
    with pytest.raises(Killed):
        run_blocks(dtype, killed_at(4 * COUNT), **options)
    counts = []
    run_blocks(dtype, counts.append, **options)
    # Three steps were on the disk, of which one is checked.
    assert counts[-1] == COUNT * (1 + STEPS - 3)
    counts.clear()
    run_blocks(dtype, counts.append, **options)
    assert counts[-1] == COUNT
    # With an hour between checkpoints the only one is that of the end.
    options = {"checkpoint": tmp_path / "slow", "checkpoint_seconds": 3600.0}
    with pytest.raises(Killed):
        run_blocks(dtype, killed_at(4 * COUNT), **options)
    assert not options["checkpoint"].exists()


@pytest.mark.one_precision
def test_main_run_and_lookahead_check_the_operator_once(dtype, tmp_path):
    counts = []
    for _ in range(2):
        counts.clear()
        solve(dtype, counts.append, checkpoint=tmp_path / "run")
    assert counts[-1] == 2 + COUNT


def test_lost_directions_come_back_as_such(dtype, tmp_path):
    """A dependent start, and a block that goes on with one vector of two."""
    V = np.stack([ROWS[0], -3 * ROWS[0]])
    reference = run_blocks(dtype, V=V)
    assert np.asarray(reference.present).tolist() == [True, False] * STEPS
    options = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0.0}
    with pytest.raises(Killed):
        run_blocks(dtype, killed_at(4 * COUNT), V=V, **options)
    assert_same(run_blocks(dtype, V=V, **options), reference)


def test_the_checkpoint_of_another_run_is_refused(dtype, tmp_path):
    options = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0.0}
    first = run_blocks(dtype, **options)
    foreign, other_start = (
        r"The checkpoint .*run is of another run: ",
        "it was started from another",
    )
    # Reflected along the first row, the second gives the same first block and the same norms.
    along = (ROWS[1] @ ROWS[0]) / (ROWS[0] @ ROWS[0])
    reflected = np.stack([ROWS[0], ROWS[1] - 2 * along * ROWS[0]])
    for V in (ROWS[::-1], 2 * ROWS, reflected):
        with pytest.raises(ValueError, match=foreign + other_start):
            run_blocks(dtype, V=V, **options)
    A, start = operator(dtype), jnp.asarray(START, dtype)
    with pytest.raises(ValueError, match=foreign + rf"its vectors are {dtype.name}\[2,40\]"):
        block_lanczos(A, start[None], STEPS, **options)
    with pytest.raises(ValueError, match=foreign + rf"its vectors are {dtype.name}\[2,40\]"):
        pk.lanczos(A, start, STEPS, **options)
    other = CountingOperator(1.01 * MATRIX.astype(dtype))
    with pytest.raises(ValueError, match=foreign + "the product of its operator with the last"):
        block_lanczos(other, jnp.asarray(ROWS, dtype), STEPS, **options)
    assert_same(run_blocks(dtype, **options), first)
    single = {"checkpoint": tmp_path / "single"}
    pk.lanczos(A, start, STEPS, **single)
    with pytest.raises(ValueError, match=rf"single is of another run: .* are {dtype.name}\[40\]"):
        block_lanczos(A, start[None], STEPS, **single)


def test_a_run_that_is_continued_must_be_the_one_on_disk(dtype, tmp_path):
    keeper = checkpoints.open_checkpoint(tmp_path / "run", 0.0, checkpoints.BLOCKS)
    basis = run_blocks(dtype, checkpoint=tmp_path / "run")
    changed = dataclasses.replace(basis, diagonal=basis.diagonal + 1)
    with pytest.raises(ValueError, match="the steps that were given are not those on disk"):
        keeper.restore(changed, STEPS, STEPS, lambda basis, _: basis)


def test_a_damaged_checkpoint_is_refused_or_gives_the_same_answer(dtype, tmp_path):
    options = {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0.0}
    reference = run_blocks(dtype, **options)
    rng, refused = np.random.default_rng(0), 0
    for name in ("rows.bin", "state.npz"):
        path = tmp_path / "run" / name
        whole = path.read_bytes()
        damaged = [whole[:size] for size in (0, 1, len(whole) // 2, len(whole) - 1)]
        for at in rng.integers(0, len(whole), 40):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << int(rng.integers(8))
            damaged.append(bytes(flipped))
        # A member that says to be encrypted, or in a newer format than Python reads.
        at = whole.find(b"PK\x01\x02")
        for offset, byte in ((6, 109), (8, 1)) if at > 0 else ():
            damaged.append(whole[: at + offset] + bytes([byte]) + whole[at + offset + 1 :])
        for data in damaged:
            path.write_bytes(data)
            try:
                basis = run_blocks(dtype, **options)
            except ValueError as error:
                refused += 1
                assert "Delete the folder" in str(error) or "Upgrade" in str(error), error
            else:
                assert_same(basis, reference)
        path.write_bytes(whole)
    assert refused > 44


def test_limits_need_the_host_and_a_number(dtype):
    V, A = jnp.asarray(ROWS, dtype), MATRIX.astype(dtype)
    for options in ({"max_seconds": 1.0}, {"checkpoint": "here"}):
        with pytest.raises(ValueError, match=r"need concrete values, and so do max_seconds="):
            jax.eval_shape(lambda V, o=options: block_lanczos(A, V, 2, **o), V)
        with pytest.raises(ValueError, match=r"driver='compiled' is one XLA loop"):
            block_lanczos(A, V, 2, driver="compiled", **options)
    for call in (run_blocks, solve, inverse):
        with pytest.raises(ValueError, match=r"max_seconds=0.0 must be positive"):
            call(dtype, max_seconds=0.0)
        with pytest.raises(ValueError, match=r"checkpoint_seconds=-1.0 must be at least 0"):
            call(dtype, checkpoint_seconds=-1.0)
    with no_type_checker(), pytest.raises(TypeError, match=r"max_seconds='1' must be a number"):
        run_blocks(dtype, max_seconds="1")


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path, monkeypatch):
    """The process of a block solve is killed by SIGKILL again and again."""
    single, block = "np.ones(size, np.float32)", "rng.standard_normal((2, size)).astype(np.float32)"
    assert single in test_checkpoints.PROGRAM
    monkeypatch.setattr(
        test_checkpoints, "PROGRAM", test_checkpoints.PROGRAM.replace(single, block)
    )
    assert test_checkpoints.kill_and_resume(tmp_path, "solve", "yes", 8) == 8
