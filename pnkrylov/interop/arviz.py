"""arviz: draws of a posterior as `InferenceData`, for its summaries, plots and comparisons.

arviz below 1.0 (all there is for Python 3.11) has its own `InferenceData`; from 1.0 on, the same
call returns an `xarray.DataTree` with the same groups and variables.
"""

import sys
import warnings
from types import ModuleType
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from pnkrylov._arguments import check_positive_counts


def import_arviz() -> ModuleType:
    """Imports arviz.

    Raises:
        ImportError: arviz is not installed.
    """
    try:
        with warnings.catch_warnings():
            # arviz 0.23 announces its own future whenever it is imported.
            warnings.simplefilter("ignore", FutureWarning)
            import arviz
    except ModuleNotFoundError as error:
        raise ImportError(
            "The arviz bridge needs the package arviz, which could not be imported "
            f"({error}). Install it with: pip install 'arviz>=0.23'."
        ) from error
    return arviz


def from_samples(
    samples: PyTree,
    *,
    num_chains: int = 1,
    name: str = "x",
    dims: dict[str, list[str]] | None = None,
    coords: dict[str, Any] | None = None,
) -> Any:
    """Draws as the group `posterior`, one variable for every array.

    Args:
        samples: arrays or pytrees with a leading axis of N draws, as `sample` of a belief, a
            `CIQSampler`, a `LaplacePosterior` or a `GPBelief` returns them. Variables of a pytree
            are named by their path, `hidden.w` for `{"hidden": {"w": ...}}`; leaves that are no
            arrays of numbers are left out.
        num_chains: the N draws are split into so many chains of equal length. The draws of this
            library are independent, so that any split is right; two or more let arviz compute
            R-hat.
        name: name of the variable, where the samples are a single array.
        dims: names of the axes of a variable, without chain and draw.
        coords: labels along the axes.

    Returns:
        `arviz.InferenceData`, or an `xarray.DataTree` from arviz 1.0 on. Its attributes name this
        library and its version.

    Raises:
        ImportError: arviz is not installed.
        TypeError: `num_chains` is no int.
        ValueError: there are no draws, arrays have different numbers of them, or that number is no
            multiple of `num_chains`.
    """
    arviz = import_arviz()
    check_positive_counts(num_chains=num_chains)
    draws = _named(samples, name)
    counts = sorted({len(values) for values in draws.values()})
    if len(counts) != 1 or counts[0] == 0:
        raise ValueError(
            f"samples has arrays with {counts} draws: every one needs a leading axis of the same, "
            "positive number of draws."
        )
    if counts[0] % num_chains:
        raise ValueError(f"num_chains={num_chains} does not divide the {counts[0]} draws.")
    chains = {
        key: values.reshape(num_chains, -1, *values.shape[1:]) for key, values in draws.items()
    }
    attributes = {
        "inference_library": "pnkrylov",
        "inference_library_version": sys.modules["pnkrylov"].__version__,
    }
    options = {"dims": dims, "coords": coords}
    # Not by hasattr: arviz 1 warns when it is asked for InferenceData.
    if int(arviz.__version__.split(".")[0]) < 1:
        return arviz.from_dict(posterior=chains, posterior_attrs=attributes, **options)
    return arviz.from_dict({"posterior": chains}, attrs={"posterior": attributes}, **options)


def from_posterior(
    posterior: Any, key: PRNGKeyArray, num_samples: int, *, num_chains: int = 4, **options: Any
) -> Any:
    """Draws from a posterior as the group `posterior`.

    Args:
        posterior: anything with `sample(key, num_samples)`: a belief, a `CIQSampler`, a
            `LaplacePosterior`.
        key: random key; the same key gives the same draws.
        num_samples: draws in all.
        num_chains: as in `from_samples`.
        **options: `name`, `dims` and `coords` of `from_samples`.

    Returns:
        As `from_samples`.

    Raises:
        ImportError: arviz is not installed.
        TypeError: `posterior` has no `sample`, or a count is no int.
        ValueError: as `from_samples`.
    """
    if not hasattr(posterior, "sample"):
        raise TypeError(
            f"posterior is of type {type(posterior).__name__}, which has no sample(key, N)."
        )
    check_positive_counts(num_samples=num_samples, num_chains=num_chains)
    return from_samples(posterior.sample(key, num_samples), num_chains=num_chains, **options)


def _named(samples: PyTree, name: str) -> dict[str, np.ndarray]:
    """The arrays of a pytree by their path."""
    found = {}
    for path, leaf in jtu.tree_leaves_with_path(samples):
        if isinstance(leaf, jax.Array | np.ndarray) and leaf.dtype.kind in "fiub" and leaf.ndim:
            found[jtu.keystr(path, simple=True, separator=".") or name] = np.asarray(leaf)
    if not found:
        raise ValueError("samples holds no array of draws.")
    return found
