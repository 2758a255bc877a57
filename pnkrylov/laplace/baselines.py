"""Cheaper posteriors that others use: for comparison, and for when nothing better is affordable."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PyTree

from pnkrylov._operator_types import SPDOperator
from pnkrylov.laplace.covariances import DiagonalCovariance, LowRankCovariance, PrecisionOperator
from pnkrylov.laplace.models import num_examples, take
from pnkrylov.laplace.network import Network

_HIGHEST = jax.lax.Precision.HIGHEST


def diagonal(
    variances_of: Float[Array, " p"], root: Float[Array, " p"] | None, shift: Float[Array, ""]
) -> DiagonalCovariance:
    """The inverse of the diagonal of the precision.

    Args:
        variances_of: the diagonal of the curvature.
        root: square root of the prior precision's pattern, or None.
        shift: the prior precision of scaled parameters.
    """
    values = variances_of if root is None else variances_of / root**2
    return DiagonalCovariance(values=values, shift=shift, num_matvecs=jnp.zeros((), jnp.int32))


def subspace(
    curvature: SPDOperator,
    diagonal_of_curvature: Float[Array, " p"],
    network: Network,
    inputs: PyTree,
    root: Float[Array, " p"] | None,
    shift: Float[Array, ""],
    *,
    rank: int,
) -> LowRankCovariance:
    """The projection that keeps most predictive variance at some inputs, to first order.

    `P = Psi J^T U` with the leading eigenvectors U of `J Psi J^T`, Psi the inverse diagonal of the
    precision and J the Jacobian at the inputs; the covariance is `P (P^T Lambda P)^-1 P^T`.

    Args:
        curvature: G; `rank` products are spent, in one block.
        diagonal_of_curvature: its diagonal.
        network: the model.
        inputs: training inputs; the first ones are used, until there are twice as many outputs as
            the rank.
        root: square root of the prior precision's pattern, or None.
        shift: the prior precision of scaled parameters.
        rank: dimension of the subspace.

    Raises:
        ValueError: the inputs have fewer outputs than the rank.

    Source:
        Faller and Martin 2025, section 3 (low rank, diagonal surrogate); pslq.md section 6.2.3.
    """
    num_outputs = jax.eval_shape(network.outputs, inputs).shape[1]
    count = min(-(-2 * rank // num_outputs), num_examples(inputs))
    if count * num_outputs < rank:
        raise ValueError(
            f"rank={rank} exceeds the {count * num_outputs} outputs at the inputs, which span the "
            "subspace. Pass a smaller rank or more data."
        )
    chunks = network.jacobian_chunks(take(inputs, slice(0, count)))
    rows = jnp.concatenate([part[:number] for number, part in chunks]).reshape(-1, network.size)
    values = diagonal_of_curvature
    if root is not None:
        rows, values = rows / root[None, :], values / root**2
    basis = _leading_directions(rows, 1 / (values + shift), rank)
    products = PrecisionOperator(curvature, root).block_mv(basis)
    projected = jnp.matmul(basis, products.T, precision=_HIGHEST)
    values, rotation = jnp.linalg.eigh((projected + projected.T) / 2)
    return LowRankCovariance(
        values=jnp.maximum(values, 0),
        vectors=jnp.matmul(rotation.T, basis, precision=_HIGHEST),
        shift=shift,
        num_matvecs=jnp.asarray(rank, jnp.int32),
        rest=False,
    )


@eqx.filter_jit
def _leading_directions(rows: Array, psi: Array, rank: int) -> Array:
    """Orthonormal rows that span `Psi J^T U`."""
    scaled = rows * psi[None, :]
    values, vectors = jnp.linalg.eigh(jnp.matmul(rows, scaled.T, precision=_HIGHEST))
    del values
    spanning = jnp.matmul(vectors[:, -rank:].T, scaled, precision=_HIGHEST)
    orthonormal, _ = jnp.linalg.qr(spanning.T)
    return orthonormal.T


def last_layer_mask(
    apply: Callable[[PyTree, PyTree], Array], params: PyTree, inputs: PyTree
) -> PyTree:
    """Which parameters make up the last layer: those in which the outputs are affine.

    Leaves that share a parent in the pytree are one layer. The test is on outputs, not on names:
    twice the same large step must change the outputs by twice as much.

    Args:
        apply: the model.
        params: its parameters.
        inputs: some inputs; the first few are used.

    Returns:
        A pytree of bools like `params`.

    Raises:
        ValueError: no layer, or more than one, passes the test.
    """
    few = take(inputs, slice(0, 4))
    with_paths, treedef = jtu.tree_flatten_with_path(params)
    arrays = [eqx.is_inexact_array(leaf) or _is_floating(leaf) for _, leaf in with_paths]
    layers: dict[str, list[int]] = {}
    for index, (path, _) in enumerate(with_paths):
        if arrays[index]:
            layers.setdefault(jtu.keystr(path[:-1]), []).append(index)
    found = [
        name
        for name, members in layers.items()
        if _is_affine(apply, [leaf for _, leaf in with_paths], treedef, members, few)
    ]
    if len(found) != 1:
        seen = f"{len(found)} layers ({', '.join(found)})" if found else "no layer"
        raise ValueError(
            f"method='last-layer' looks for the one layer in which the outputs are affine, and "
            f"found {seen} among {', '.join(layers)}. Say which parameters are meant: mask=a "
            "pytree of bools, or a predicate (path, leaf) -> bool."
        )
    chosen = set(layers[found[0]])
    return jtu.tree_unflatten(treedef, [index in chosen for index in range(len(with_paths))])


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and np.issubdtype(leaf.dtype, np.floating)


def _is_affine(
    apply: Callable, leaves: list[Any], treedef: Any, members: list[int], inputs: PyTree
) -> bool:
    def at(step: int) -> np.ndarray:
        # Fixed noise: a layer is affine in every direction or, to a generic one, visibly not.
        generator = np.random.default_rng(0)
        moved = list(leaves)
        for index in members:
            leaf = np.asarray(leaves[index])
            noise = generator.standard_normal(leaf.shape).astype(leaf.dtype)
            size = leaf.std() + 1 / max(leaf.size, 1) ** 0.5
            moved[index] = jnp.asarray(leaf + leaf.dtype.type(step * size) * noise)
        return np.asarray(apply(jtu.tree_unflatten(treedef, moved), inputs), np.float64)

    start, once, twice = at(0), at(1), at(2)
    change = np.abs(once - start).max()
    bend = np.abs(twice - 2 * once + start).max()
    rounding = np.finfo(np.asarray(leaves[members[0]]).dtype).eps
    scale = np.abs(np.stack([start, once, twice])).max()
    return bool(change > 0 and bend <= 1e3 * rounding * (change + scale))
