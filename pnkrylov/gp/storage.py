"""Gaussian process beliefs on disk: numbers only, so the kernel is passed again on loading."""

import os
from typing import Any

import jax
import jax.numpy as jnp

from pnkrylov._archive import damaged, read, write
from pnkrylov.gp.data import Observations
from pnkrylov.gp.measured import Measured, checked
from pnkrylov.gp.operator import kernel_operator
from pnkrylov.gp.regression import GPBelief
from pnkrylov.gp.remainder import RowProbes
from pnkrylov.probes import Probes

_CLASS = "GPBelief"
_PROBES = ("alpha", "beta", "valid", "level", "dimension", "steps")
_ROWS = ("norms", "along", "coordinates", "points")


def save(belief: GPBelief, path: str | os.PathLike) -> None:
    """Writes a belief to one file; an older file there is replaced only at the end.

    Args:
        belief: the belief.
        path: the file, used as it is; its folder must exist.

    Raises:
        TypeError: `belief` is no `GPBelief`.
        ValueError: the run was preconditioned, or the belief is traced (under `jit`).
        FileNotFoundError: the folder does not exist.
    """
    if not isinstance(belief, GPBelief):
        raise TypeError(
            f"belief is of type {type(belief).__name__}: pass what pnkrylov.gp.condition returned."
        )
    data, rows = belief.data, belief.measured.row_probes
    fields = {"inputs": data.operator.inputs, "noise": data.noise, "residuals": data.residuals}
    fields |= {f"rows.{name}": getattr(rows, name) for name in _ROWS}
    fields |= {f"rows.{name}": getattr(rows.probes, name) for name in _PROBES}
    # An archive holds no unsigned integers.
    fields["key"] = jnp.asarray(jax.random.key_data(belief.measured.key)).view(jnp.int32)
    static = {
        "start": belief.start,
        "single": data.single,
        "mean_is_array": data.mean_is_array,
        "block_rows": data.operator.block_rows,
    }
    write(path, _CLASS, belief.run, fields, static)


def load(path: str | os.PathLike, kernel: Any, *, mean: Any = None) -> GPBelief:
    """Reads a belief that `save` wrote. No product is spent.

    Args:
        path: the file.
        kernel: the kernel that the belief was made with.
        mean: its prior mean, if that was a function.

    Raises:
        FileNotFoundError, ValueError, TypeError: as `pnkrylov.load`.
    """
    archive = read(path, like=None)
    if archive.class_name != _CLASS:
        raise ValueError(
            f"{path} holds a belief of class {archive.class_name}: read it with pnkrylov.load."
        )
    arrays, static = archive.arrays, archive.static
    wanted = {f"field.rows.{name}" for name in (*_ROWS, *_PROBES)}
    wanted |= {"field.inputs", "field.noise", "field.residuals", "field.key"}
    if missing := sorted(wanted - set(arrays)):
        raise damaged(path, f"it lacks the arrays {missing}")
    operator = kernel_operator(kernel, arrays["field.inputs"], block_rows=static["block_rows"])
    data = Observations(
        operator=operator,
        noise=arrays["field.noise"],
        residuals=arrays["field.residuals"],
        mean=mean,
        mean_is_array=static["mean_is_array"],
        single=static["single"],
    )
    probes = Probes(**{name: arrays[f"field.rows.{name}"] for name in _PROBES})
    rows = RowProbes(probes, **{name: arrays[f"field.rows.{name}"] for name in _ROWS})
    key = jax.random.wrap_key_data(arrays["field.key"].view(jnp.uint32))
    measured = Measured(data, archive.run(arrays), rows, key, static["start"])
    return GPBelief(checked(measured, throw=False))
