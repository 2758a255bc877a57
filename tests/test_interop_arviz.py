"""arviz: draws as InferenceData (or, from arviz 1.0 on, a DataTree), variable by variable."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pnkrylov
from pnkrylov.interop.arviz import from_posterior, from_samples, import_arviz

pytest.importorskip("xarray", reason="arviz is not installed")
KEY = jax.random.key(0)


class Posterior:
    """Draws of a pytree, as a LaplacePosterior gives them."""

    def sample(self, key, num_samples):
        w = jax.random.normal(key, (num_samples, 2, 3))
        return {"hidden": {"w": w, "b": w[:, 0]}, "name": "model"}


def group(data):
    return data["posterior"]


def test_arrays_are_variables_by_their_path():
    draws = Posterior().sample(KEY, 8)
    data = from_posterior(Posterior(), KEY, 8, num_chains=2)
    assert set(group(data).data_vars) == {"hidden.w", "hidden.b"}
    w = group(data)["hidden.w"]
    assert w.dims[:2] == ("chain", "draw") and w.shape == (2, 4, 2, 3)
    np.testing.assert_array_equal(w.to_numpy().reshape(8, 2, 3), draws["hidden"]["w"])
    assert group(data).attrs["inference_library"] == "pnkrylov"
    assert group(data).attrs["inference_library_version"] == pnkrylov.__version__


def test_one_array_has_the_given_name_and_dimensions():
    draws = np.arange(12.0).reshape(6, 2)
    data = from_samples(
        draws, name="f", num_chains=2, dims={"f": ["place"]}, coords={"place": ["left", "right"]}
    )
    f = group(data)["f"]
    assert f.dims == ("chain", "draw", "place") and list(f["place"].to_numpy()) == ["left", "right"]
    np.testing.assert_array_equal(f.to_numpy().reshape(6, 2), draws)


def test_arviz_summarises_independent_draws():
    arviz = import_arviz()
    draws = np.random.default_rng(0).normal(3, 2, size=4000)
    table = arviz.summary(from_samples(draws, num_chains=4), round_to="none")
    row = table.loc["x"]
    # Four standard errors: 4 * 2 / sqrt(4000).
    assert abs(float(row["mean"]) - 3) < 0.13 and abs(float(row["sd"]) - 2) < 0.1
    assert abs(float(row["r_hat"]) - 1) < 0.01
    assert float(row["ess_bulk"]) > 3000


def test_refusals():
    with pytest.raises(ValueError, match="num_chains=3 does not divide the 8 draws"):
        from_samples(np.zeros(8), num_chains=3)
    with pytest.raises(ValueError, match=r"arrays with \[2, 3\] draws"):
        from_samples({"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(ValueError, match="no array of draws"):
        from_samples({"a": "text"})
    with pytest.raises(ValueError, match=r"\[0\] draws"):
        from_samples(jnp.zeros((0, 2)))
    with pytest.raises(TypeError, match="float, which has no sample"):
        from_posterior(1.0, KEY, 4)
    with pytest.raises(ValueError, match="num_chains=0"):
        from_samples(np.zeros(8), num_chains=0)


def test_without_arviz_there_is_an_installation_hint(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match="pip install 'arviz"):
        from_samples(np.zeros(8))
