"""blackjax: a belief as the inverse mass matrix of its samplers."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from pnkrylov.hmc.whitening import SymmetricRoot, covariance_root


def import_metrics() -> ModuleType:
    """Imports `blackjax.mcmc.metrics`.

    Raises:
        ImportError: blackjax is not installed, or too old to know low-rank mass matrices.
    """
    try:
        from blackjax.mcmc import metrics
    except ModuleNotFoundError as error:
        raise ImportError(
            "The blackjax bridge needs the package blackjax, which could not be imported "
            f"({error}). Install it with: pip install 'blackjax>=1.7'."
        ) from error
    if not hasattr(metrics, "LowRankInverseMassMatrix"):
        raise ImportError(
            "This blackjax has no low-rank mass matrices. Install a newer one with: pip install "
            "'blackjax>=1.7'."
        )
    return metrics


def inverse_mass_matrix(belief: Any) -> Any:
    """The belief's covariance as blackjax's low-rank inverse mass matrix, a pytree of arrays.

    Every sampler of blackjax that takes `inverse_mass_matrix=` takes it, also under `vmap`.
    Positions keep the user's coordinates and structure; a leapfrog step costs O(n d) on top of the
    gradient. The dynamics are those on the target of `pnkrylov.hmc.whiten`.

    Args:
        belief: as in `pnkrylov.hmc.whiten`; without a preconditioner (use `metric` with one).

    Returns:
        `blackjax.mcmc.metrics.LowRankInverseMassMatrix(sigma, U, lam)`: `sigma^2` is the bulk
        variance, `lam` the variances along the columns of U in units of it.

    Raises:
        ImportError: see `import_metrics`.
        TypeError: the belief has a preconditioner.
        TypeError, ValueError, NotPositiveDefiniteError: see `pnkrylov.hmc.covariance_root`.
    """
    metrics, root = import_metrics(), covariance_root(belief.covariance)
    if not isinstance(root, SymmetricRoot):
        raise TypeError(
            "The covariance of a preconditioned belief is not low rank plus a multiple of the "
            "identity: pass pnkrylov.interop.blackjax.metric(belief) as inverse_mass_matrix."
        )
    sigma = jnp.full((root.vectors.shape[1],), root.bulk_deviation)
    variances = (root.deviations / root.bulk_deviation) ** 2
    return metrics.LowRankInverseMassMatrix(sigma, root.vectors.T, variances)


def metric(belief: Any) -> Any:
    """The belief's covariance as blackjax's `Metric`, for any covariance that can be whitened.

    Args:
        belief: as in `pnkrylov.hmc.whiten`.

    Returns:
        `blackjax.mcmc.metrics.Metric`, a tuple of functions: momentum draws, kinetic energy, U-turn
        check and scaling. Samplers take it as `inverse_mass_matrix=`.

    Raises:
        ImportError: see `import_metrics`.
        TypeError, ValueError, NotPositiveDefiniteError: see `pnkrylov.hmc.covariance_root`.
    """
    metrics, root = import_metrics(), covariance_root(belief.covariance)
    structure = belief.structure
    ravel, unravel = structure.ravel, structure.unravel

    def sample_momentum(key: PRNGKeyArray, position: PyTree) -> PyTree:
        del position
        noise = jax.random.normal(key, (structure.size,), structure.dtype)
        return unravel(root.inverse_transpose_mv(noise))

    def kinetic_energy(momentum: PyTree, position: PyTree | None = None) -> Array:
        del position
        return jnp.sum(root.transpose_mv(ravel(momentum)) ** 2) / 2

    def check_turning(
        momentum_left: PyTree,
        momentum_right: PyTree,
        momentum_sum: PyTree,
        position_left: PyTree | None = None,
        position_right: PyTree | None = None,
    ) -> Array:
        del position_left, position_right
        # In white coordinates velocity and momentum are the same vector.
        left, right, total = (
            root.transpose_mv(ravel(momentum))
            for momentum in (momentum_left, momentum_right, momentum_sum)
        )
        between = total - (left + right) / 2
        return (jnp.vdot(left, between) <= 0) | (jnp.vdot(right, between) <= 0)

    def scale(position: PyTree, element: PyTree, *, inv: bool, trans: bool) -> PyTree:
        """With M = F^-T F^-1: M^{1/2} = F^-T, and its inverse F^T."""
        del position
        if inv:
            product = root.mv if trans else root.transpose_mv
        else:
            product = root.inverse_mv if trans else root.inverse_transpose_mv
        return unravel(product(ravel(element)))

    return metrics.Metric(sample_momentum, kinetic_energy, check_turning, scale)
