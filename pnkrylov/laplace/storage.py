"""Loading a posterior: numbers from a file, code from the caller."""

import os
from collections.abc import Callable

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from pnkrylov import _archive
from pnkrylov.laplace.files import read, read_covariance
from pnkrylov.laplace.likelihoods import Likelihood
from pnkrylov.laplace.network import Network
from pnkrylov.laplace.parameters import select_parameters
from pnkrylov.laplace.posterior import LaplacePosterior
from pnkrylov.laplace.prior import Prior


def load(
    path: str | os.PathLike,
    apply: Callable[[PyTree, PyTree], Array],
    params: PyTree,
    likelihood: Likelihood,
) -> LaplacePosterior:
    """Reads a posterior that `LaplacePosterior.save` wrote. No product is spent.

    Args:
        path: the file.
        apply: the model.
        params: an example of its parameters (containers, shapes, dtypes); values are read.
        likelihood: of the same family as that of the saved posterior; its numbers are read.

    Returns:
        The posterior, equal to the saved one to rounding. `refine` needs its curvature again.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is foreign, damaged, of a newer format or no posterior; `params` has
            other leaves, or the likelihood is of another family.
        TypeError: the file is float64 while x64 is off.
    """
    saved = read(path)
    leaves, treedef = jtu.tree_flatten(params)
    values, marks = saved.group("leaf"), saved.group("mask")
    mask = []
    for index, leaf in enumerate(leaves):
        value = values.get(str(index))
        is_array = eqx.is_array(leaf) or isinstance(leaf, np.ndarray)
        given = (tuple(leaf.shape), np.dtype(leaf.dtype)) if is_array else None
        found = None if value is None else (tuple(value.shape), np.dtype(value.dtype))
        if given != found:
            raise ValueError(
                f"params does not fit {path}: leaf {index} is {given}, the file has {found}. Pass "
                "parameters with the containers, shapes and dtypes of those of fit."
            )
        mask.append(np.asarray(marks[str(index)]) if value is not None else False)
    if len(values) != sum(eqx.is_array(leaf) or isinstance(leaf, np.ndarray) for leaf in leaves):
        raise ValueError(
            f"params does not fit {path}: it has {len(leaves)} leaves, the file {len(values)}."
        )
    filled = [values.get(str(index), leaf) for index, leaf in enumerate(leaves)]
    parameters = select_parameters(
        jtu.tree_unflatten(treedef, filled), jtu.tree_unflatten(treedef, mask)
    )
    static, fields = saved.header["static"], saved.group("field")
    if type(likelihood).__name__ != static["likelihood"]:
        raise ValueError(
            f"likelihood is {type(likelihood).__name__}, but that of the posterior in {path} was "
            f"{static['likelihood']}."
        )
    arrays, rest = eqx.partition(likelihood, eqx.is_array)
    numbers = [fields[f"likelihood.{index}"] for index in range(len(jax.tree.leaves(arrays)))]
    arrays = jtu.tree_unflatten(jtu.tree_structure(arrays), numbers)
    try:
        return LaplacePosterior(
            network=Network(apply, parameters),
            likelihood=eqx.combine(arrays, rest),
            prior=Prior(fields["precision"], fields.get("root")),
            covariance=read_covariance(path, saved),
            loss=fields["loss"],
            num_targets=fields["num_targets"],
            curvature_scale=fields["curvature_scale"],
            curvature=None,
            method=static["method"],
            reason=static["reason"],
        )
    except KeyError as error:
        raise _archive.damaged(path, f"it lacks {error}") from error
