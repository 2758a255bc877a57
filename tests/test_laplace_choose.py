"""What `method="auto"` chooses, and that its predictions are in the right order."""

import functools

import jax.numpy as jnp
import pytest

import laplace_cases as cases
from pnkrylov import laplace
from pnkrylov.laplace import choose as choosing

N = 8


@functools.cache
def curvature(kind="ggn"):
    make = {"ggn": laplace.ggn, "hessian": laplace.hessian}[kind]
    params = cases.tree_of(cases.flat_params())
    x, y = cases.data("categorical", N, jnp.float64)
    return make(cases.apply, params, (x, y), laplace.Categorical())


def choose(max_bytes=2**31, kind="ggn", num_steps=10, has_key=True):
    return choosing.choose(curvature(kind), num_steps, 8, max_bytes, has_key=has_key)


def test_small_problems_are_exact_without_a_measurement(monkeypatch):
    monkeypatch.setattr(choosing, "_product_seconds", None)
    method, reason = choose()
    assert method == "exact"
    assert "only" in reason


def test_memory_decides_first():
    exact = choosing.exact_bytes(curvature())
    # 16 rows of 38 numbers and the eigenvectors, and Gram matrices in double precision.
    assert exact == 2 * 16 * 38 * 8 + 3 * 16**2 * 8
    assert choosing.krylov_bytes(curvature(), 1) == 2 * 21 * 38 * 8
    assert choosing.krylov_bytes(curvature(), 30) == 2 * 38 * 38 * 8  # at most p rows
    assert choose(exact)[0] == "exact"
    method, reason = choose(exact - 1, num_steps=1)
    assert method == "krylov"
    assert "exact form would take" in reason
    assert choose(1000)[0] == "ciq"
    dense = choosing.exact_bytes(curvature("hessian"))
    assert dense == 38 * 38 * (2 * 8 + 3 * 8)
    assert choose(dense, "hessian")[0] == "exact"
    assert choose(dense - 1, "hessian")[0] == "krylov"


@pytest.mark.parametrize(("krylov", "exact", "best"), [(2.0, 1.0, "exact"), (1.0, 2.0, "krylov")])
def test_predicted_seconds_decide_next(monkeypatch, krylov, exact, best):
    monkeypatch.setattr(choosing, "_SMALL", 0)
    monkeypatch.setattr(choosing, "_krylov_seconds", lambda *_: krylov)
    monkeypatch.setattr(choosing, "_exact_seconds", lambda *_: exact)
    method, reason = choose()
    assert method == best
    assert "1 s" in reason
    assert "2 s" in reason


def test_without_a_key_the_exact_form_is_taken_where_it_fits(monkeypatch):
    monkeypatch.setattr(choosing, "_SMALL", 0)
    method, reason = choose(has_key=False)
    assert method == "exact"
    assert "no random key" in reason
    with pytest.raises(TypeError, match="key is missing: method='ciq'"):
        cases.fit("categorical", N, jnp.float64, max_bytes=1000)


def test_predictions_grow_with_the_work(monkeypatch):
    rate = 1e9
    monkeypatch.setattr(choosing, "_product_seconds", lambda _: 1e-3)
    short, long = (choosing._krylov_seconds(curvature(), steps, 8, rate) for steps in (2, 12))
    assert long - short == pytest.approx(10e-3, rel=0.1)
    # Algebra alone exceeds what the run is worth: rows are not measured.
    monkeypatch.setattr(laplace.Curvature, "row_chunks", None)
    slow = choosing._exact_seconds(curvature(), 1.0, 1.0)
    expected = 2 * 16 * 16 * 38 * 2 + 25 * 16**3
    assert slow == pytest.approx(expected)


def test_the_choice_is_carried_out_and_reported():
    posterior = cases.fit(
        "categorical", N, jnp.float64, max_bytes=choosing.exact_bytes(curvature()), method="auto"
    )
    assert posterior.method == "exact"
    assert posterior.reason in repr(posterior)
    seconds = choosing._exact_seconds(curvature(), 1e12, 1.0)
    assert 0 <= seconds < 10  # measured on 16 rows
    assert choosing._operations_per_second(jnp.dtype("float32")) > 1e6
    assert choosing._product_seconds(curvature()) < 10
