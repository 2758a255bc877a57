"""The file of a saved posterior: named arrays and a JSON header in one .npz, without pickle.

It holds numbers: the parameters, the prior, the curvature's knowledge. The model's code and its
containers do not belong there; whoever loads the file passes them again.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pnkrylov import _archive
from pnkrylov._structure import VectorStructure
from pnkrylov.beliefs import inverse_belief
from pnkrylov.krylov import is_concrete
from pnkrylov.laplace.covariances import (
    BeliefCovariance,
    DiagonalCovariance,
    LowRankCovariance,
    PosteriorCovariance,
)
from pnkrylov.laplace.parameters import Parameters

CLASS = "LaplacePosterior"


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a file holds.

    Attributes:
        header: its JSON header.
        arrays: all arrays by name.
    """

    header: dict[str, Any]
    arrays: dict[str, Array]

    def group(self, prefix: str) -> dict[str, Array]:
        """The arrays whose names begin with `prefix` and a dot, without that beginning."""
        start = prefix + "."
        return {
            name.removeprefix(start): array
            for name, array in self.arrays.items()
            if name.startswith(start)
        }


def write(
    path: str | os.PathLike,
    static: Mapping[str, str],
    parameters: Parameters,
    fields: Mapping[str, Array | None],
    covariance: PosteriorCovariance,
) -> None:
    """Writes a posterior. An older file at `path` stays whole until the end.

    Args:
        path: file to write, used as it is; its folder must exist.
        static: strings that belong to the posterior.
        parameters: the parameters and their selection.
        fields: further arrays by name; None is left out.
        covariance: any but a sampled one.

    Raises:
        TypeError: the covariance is made of draws and an operator, which a file cannot hold.
        ValueError: the posterior is traced (under `jit`).
        FileNotFoundError: the folder does not exist.
    """
    kind, held = _covariance_arrays(covariance)
    named: dict[str, Any] = {
        f"field.{name}": array for name, array in fields.items() if array is not None
    }
    named |= {f"covariance.{name}": array for name, array in held.items()}
    for index, leaf in enumerate(parameters.leaves):
        if leaf is not None:
            named[f"leaf.{index}"] = leaf
            named[f"mask.{index}"] = _marks(parameters, index)
    if not is_concrete(named):
        raise ValueError("save writes numbers: call it outside jit/vmap/grad.")
    arrays = {name: np.asarray(array) for name, array in named.items()}
    header = {
        "format": _archive.FORMAT,
        "version": _archive.VERSION,
        # The package is loaded by now, but its __init__ does not import this one.
        "library": sys.modules["pnkrylov"].__version__,
        "class": CLASS,
        "covariance": kind,
        "static": dict(static),
        "arrays": {name: [list(a.shape), a.dtype.name] for name, a in arrays.items()},
    }
    _archive._write_atomically(path, {"header": np.array(json.dumps(header))} | arrays)


def read(path: str | os.PathLike) -> Saved:
    """Reads what `write` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is foreign, of a newer format, damaged, or no posterior.
        TypeError: the file is float64 while x64 is off.
    """
    header, arrays = _archive._read_file(path)
    if header.get("class") != CLASS:
        raise ValueError(
            f"{path} holds a {header.get('class')}, not a Laplace posterior: use pnkrylov.load."
        )
    for name, array in arrays.items():
        if array.dtype == np.float64 and not jax.config.jax_enable_x64:  # pyright: ignore
            raise TypeError(
                f"{name} in {path} is float64, but JAX runs without it (x64 is off). Enable it "
                "with jax.config.update('jax_enable_x64', True)."
            )
    return Saved(header, {name: jnp.asarray(array) for name, array in arrays.items()})


def read_covariance(path: str | os.PathLike, saved: Saved) -> PosteriorCovariance:
    """The covariance in a file.

    Raises:
        ValueError: arrays are missing.
    """
    kind, arrays = saved.header.get("covariance"), saved.group("covariance")
    try:
        if kind == "low-rank":
            rest = bool(arrays.pop("rest"))
            return LowRankCovariance(**arrays, rest=rest)
        if kind == "diagonal":
            return DiagonalCovariance(**arrays)
        driver, layout = saved.header["static"]["driver"], saved.header["static"]["layout"]
        size = arrays["basis.vectors"].shape[-1]
        archive = _archive.Archive(
            class_name="InverseBelief",
            arrays=arrays,
            static={},
            driver=driver,
            structure=VectorStructure.flat(size, arrays["basis.vectors"].dtype),
        )
        belief = inverse_belief(
            archive.run(arrays), arrays["field.mean_flat"], arrays["field.alpha"], layout
        )
        return BeliefCovariance.of(belief)
    except (KeyError, TypeError) as error:
        raise _archive.damaged(path, f"its covariance cannot be read ({error!r})") from error


def belief_statics(covariance: PosteriorCovariance) -> dict[str, str]:
    """The strings that belong to a belief; none for other covariances."""
    if not isinstance(covariance, BeliefCovariance):
        return {}
    belief = covariance.belief
    return {"driver": belief.run.basis.driver, "layout": belief.layout}


def _covariance_arrays(covariance: PosteriorCovariance) -> tuple[str, dict[str, Array]]:
    if isinstance(covariance, LowRankCovariance):
        names = ("values", "vectors", "shift", "num_matvecs")
        held = {name: getattr(covariance, name) for name in names}
        return "low-rank", held | {"rest": jnp.asarray(covariance.rest)}
    if isinstance(covariance, DiagonalCovariance):
        names = ("values", "shift", "num_matvecs")
        return "diagonal", {name: getattr(covariance, name) for name in names}
    if isinstance(covariance, BeliefCovariance):
        belief = covariance.belief
        fields = {"field.mean_flat": belief.mean_flat, "field.alpha": belief.alpha}
        return "belief", _archive._run_arrays(belief.run) | fields
    raise TypeError(
        "A posterior by method='ciq' draws with its operator, which a file cannot hold. Save draws "
        "(posterior.draws(key, n)), or fit with method='krylov' or 'exact'."
    )


def _marks(parameters: Parameters, index: int) -> np.ndarray:
    """Which entries of a leaf are selected."""
    leaf, chosen = parameters.leaves[index], parameters.chosen[index]
    if chosen is None:
        return np.full(leaf.shape, parameters._selected[index])
    marks = np.zeros(leaf.size, bool)
    marks[np.asarray(chosen)] = True
    return marks.reshape(leaf.shape)
