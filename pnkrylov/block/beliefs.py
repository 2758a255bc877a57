"""The belief about `X = A^-1 V` for several right-hand sides at once: a matrix normal."""

import os
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov._archive import write
from pnkrylov._arguments import check_counts, check_reals
from pnkrylov._doors import refining_driver, same_operator
from pnkrylov._structure import VectorStructure
from pnkrylov.block.calibration import calibrate_block
from pnkrylov.block.covariance import BlockCovariance
from pnkrylov.block.krylov import continue_block_run
from pnkrylov.block.runs import BlockRun, block_look_ahead, replaced, seen_enough
from pnkrylov.estimate import normal_interval
from pnkrylov.gaussian import DenseGaussian
from pnkrylov.krylov import check_num_steps
from pnkrylov.results import RESULTS
from pnkrylov.runs import finish, scalar
from pnkrylov.stats import SolveStats, Stats, describe_run, number

_HIGHEST = jax.lax.Precision.HIGHEST


class MatrixGaussian(eqx.Module):
    """A small matrix normal: what is known about `X B^T`, one row for each right-hand side.

    Attributes:
        mean: `(k, p)`.
        rhs_covariance: `(k, k)`, between right-hand sides.
        covariance: `(p, p)`, between outputs; the covariance of entries (i, a) and (j, b) is
            `rhs_covariance[i, j] covariance[a, b]`.
    """

    mean: Float[Array, "k p"]
    rhs_covariance: Float[Array, "k k"]
    covariance: Float[Array, "p p"]

    def variance(self) -> Float[Array, "k p"]:
        """The marginal variances."""
        return jnp.diagonal(self.rhs_covariance)[:, None] * jnp.diagonal(self.covariance)[None, :]

    def std(self) -> Float[Array, "k p"]:
        """The marginal standard deviations."""
        return jnp.sqrt(self.variance())

    def interval(self, level: float = 0.95) -> tuple[Float[Array, "k p"], Float[Array, "k p"]]:
        """Central intervals of probability `level`, entry by entry.

        Raises:
            TypeError, ValueError: `level` is not a number strictly between 0 and 1.
        """
        return normal_interval(self.mean, self.std(), level)

    def sample(self, key: PRNGKeyArray, num_samples: int) -> Float[Array, "N k p"]:
        """Draws; singular covariances are fine.

        Raises:
            TypeError, ValueError: `num_samples` is no int or negative; `key` is no random key.
        """
        check_counts(num_samples=num_samples)
        outputs = DenseGaussian(jnp.zeros_like(self.mean[0]), self.covariance)
        count = self.mean.shape[0]
        draws = outputs.sample(key, num_samples * count).reshape(num_samples, count, -1)
        return self.mean[None] + _mix(self.rhs_covariance, draws)

    def joint(self) -> DenseGaussian:
        """The same as one dense Gaussian over all `k p` entries, row by row."""
        return DenseGaussian(self.mean.reshape(-1), jnp.kron(self.rhs_covariance, self.covariance))


class BlockSolveBelief(eqx.Module):
    """What m block steps know about `X = A^-1 V`: `vec(X) ~ N(vec(mean), N kron Sigma_perp)`.

    Right-hand sides are rows, and so are solutions: arrays `(k, d)`, or the user's pytree with a
    leading axis of length k.

    Attributes:
        mean_flat: `(k, d)`; `mean` gives it in the user's structure.
        covariance: Sigma_perp, one for all right-hand sides; a lineax operator.
        rhs_covariance: `(k, k)`, N: variances and correlations between right-hand sides.
        result: result code.
        stats: what the run spent and learnt; steps are counted in vectors.
        error: what the belief predicts of its own errors, arrays `(k,)`.
        run: the run; other beliefs can be made of it without a product.
        alpha: the shift: the belief is about `(A + alpha I)^-1 V`.
        lower_bound: a lower bound of the spectrum of A without shift, or None.
    """

    mean_flat: Float[Array, "k d"]
    covariance: BlockCovariance
    rhs_covariance: Float[Array, "k k"]
    result: RESULTS
    stats: Stats
    error: SolveStats
    run: BlockRun
    alpha: Float[Array, ""]
    lower_bound: Float[Array, ""] | None

    @property
    def structure(self) -> VectorStructure:
        """The structure of one of the user's vectors."""
        return self.covariance.structure

    @property
    def num_rhs(self) -> int:
        """Number of right-hand sides k."""
        return self.mean_flat.shape[-2]

    @property
    def predicted_error(self) -> Float[Array, " k"]:
        """Predicted `||x_j - mean_j||_2` of every right-hand side."""
        return self.error.error_norm

    @property
    def mean(self) -> PyTree:
        """The means, in the user's structure with a leading axis of length k."""
        return self._unravel(self.mean_flat)

    def variance(self) -> PyTree:
        """The marginal variances, closed form, like `mean`."""
        return self._unravel(self._variance())

    def std(self) -> PyTree:
        """The marginal standard deviations, like `mean`."""
        return self._unravel(jnp.sqrt(self._variance()))

    def interval(self, level: float = 0.95) -> tuple[PyTree, PyTree]:
        """Central intervals of probability `level`, entry by entry.

        Raises:
            TypeError, ValueError: `level` is not a number strictly between 0 and 1.
        """
        lower, upper = normal_interval(self.mean_flat, jnp.sqrt(self._variance()), level)
        return self._unravel(lower), self._unravel(upper)

    def sample(self, key: PRNGKeyArray, num_samples: int) -> PyTree:
        """Draws from the belief.

        Args:
            key: random key; the same key gives the same draws.
            num_samples: number of draws N.

        Returns:
            The user's structure with leading axes N and k: `(N, k, d)` for arrays.

        Raises:
            TypeError, ValueError: `num_samples` is no int or negative; `key` is no random key.
        """
        check_counts(num_samples=num_samples)
        draws = self.covariance.sample(key, num_samples * self.num_rhs)
        draws = draws.reshape(num_samples, self.num_rhs, self.structure.size)
        draws = self.mean_flat[None] + _mix(self.rhs_covariance, draws)
        return jax.vmap(self._unravel)(draws)

    def push(self, B: Float[Array, "p d"] | Float[Array, " d"]) -> MatrixGaussian:
        """What is known about `X B^T`: p outputs for each of the k right-hand sides.

        Args:
            B: an array `(p, d)` acting on flat vectors, or `(d,)` (one functional).

        Raises:
            TypeError: B is no array of real numbers.
            ValueError: B does not have d columns.
        """
        check_reals(B=B)
        rows = jnp.atleast_2d(jnp.asarray(B))
        if rows.ndim != 2 or rows.shape[1] != self.structure.size:
            raise ValueError(
                f"B has shape {jnp.shape(B)}; it needs {self.structure.size} columns, one for each "
                "entry of the flat vector."
            )
        rows = rows.astype(self.mean_flat.dtype)
        return MatrixGaussian(
            mean=jnp.matmul(self.mean_flat, rows.T, precision=_HIGHEST),
            rhs_covariance=self.rhs_covariance,
            covariance=self.covariance.push(rows),
        )

    def shift(self, alpha: float | Float[Array, ""]) -> "BlockSolveBelief":
        """The belief about `(A + alpha I)^-1 V` from the same run; no product is spent.

        Args:
            alpha: replaces the current shift; `A + alpha I` must be positive definite.

        Raises:
            TypeError: `alpha` is no real number.
            NotPositiveDefiniteError: it is not, by a Ritz value.

        Source:
            METHOD.md section 12.
        """
        alpha = scalar(alpha, "alpha", self.mean_flat.dtype)
        return finish(block_solve_belief(self.run, alpha, self.lower_bound), throw=True)

    def refine(
        self, A: Any, *, num_steps: int, max_lookahead: int = 60, progress: bool = False
    ) -> "BlockSolveBelief":
        """More computation, less uncertainty: resolves `num_steps` more blocks of the same run.

        Look-ahead steps that were already taken are resolved first.

        Args:
            A: the operator of the belief, unshifted.
            num_steps: further block steps for the mean, at least 1.
            max_lookahead: longest look-ahead beyond the new level, in block steps.
            progress: show a progress bar (host driver).

        Returns:
            The refined belief.

        Raises:
            TypeError: a count is no int, or A of another kind or dtype.
            ValueError: there would be more than d blocks, or called under `jit` (shapes depend on
                values).
        """
        operator = same_operator(A, self.run)
        check_counts(max_lookahead=max_lookahead)
        run, basis = self.run, self.run.basis.trim()
        level, most = int(run.level), self.structure.size
        check_num_steps(num_steps, most, taken=level)
        level, steps = level + num_steps, 0
        if level > basis.num_blocks and not bool(basis.exhausted()):
            steps = level - basis.num_blocks
            driver = refining_driver(progress, basis.driver)
            basis = continue_block_run(basis, operator, steps, driver=driver, progress=progress)
        target = jnp.asarray(min(level, basis.num_blocks), jnp.int32)
        limit = min(max_lookahead - basis.num_blocks + level, most - basis.num_blocks)
        ahead = jnp.zeros((), jnp.int32)
        seen = bool(seen_enough(basis, target, self.alpha, self.lower_bound))
        if limit > 0 and not seen and not bool(basis.exhausted()):
            basis, ahead = block_look_ahead(
                operator, basis, target, limit, self.alpha, self.lower_bound
            )
        run = replaced(run, basis, target, self.num_rhs * (steps + ahead))
        return finish(block_solve_belief(run, self.alpha, self.lower_bound), throw=True)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the belief to one file, for `pnkrylov.load` (see `pnkrylov.storage`).

        Args:
            path: file to write, used as it is (no suffix is added); its folder must exist.

        Raises:
            ValueError: the belief is traced (under `jit`).
            OSError: the file cannot be written; `FileNotFoundError` if its folder is missing.
        """
        fields = {"alpha": self.alpha, "lower_bound": self.lower_bound}
        write(path, "BlockSolveBelief", self.run, fields, {})

    def _variance(self) -> Array:
        return jnp.diagonal(self.rhs_covariance)[:, None] * self.covariance.diagonal()[None, :]

    def _unravel(self, rows: Array) -> PyTree:
        return jax.vmap(self.structure.unravel)(rows)

    def __str__(self) -> str:
        error, stats = self.error, self.stats
        lines = [
            f"BlockSolveBelief about A^-1 V, {self.num_rhs} right-hand sides, "
            f"d = {self.structure.size}, {self.structure.dtype}",
            f"  errors    ||x - mean||_2 ~ {number(error.error_norm)}, "
            f"||x - mean||_A ~ {number(error.energy_norm)}, "
            f"||mean||_2 = {number(jnp.linalg.norm(self.mean_flat, axis=-1))}",
            f"  scale     look-ahead; it saw {number(100 * error.seen)} % of the squared errors",
            *describe_run(stats),
        ]
        notes = stats.warnings + error.warnings
        return "\n".join(lines + [f"  warning   {note}" for note in notes])

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self)
        # JAX also builds pytrees with leaves that are no arrays: they have no numbers to show.
        whole = leaves and all(eqx.is_array(leaf) for leaf in leaves)
        return str(self) if whole else eqx.tree_pformat(self)


def block_solve_belief(
    run: BlockRun, alpha: Float[Array, ""], lower_bound: Float[Array, ""] | None
) -> BlockSolveBelief:
    """The belief about `(A + alpha I)^-1 V` that a run supports (see `calibrate_block`)."""
    calibrated = calibrate_block(run, alpha, lower_bound)
    return BlockSolveBelief(
        mean_flat=calibrated.mean,
        covariance=calibrated.covariance,
        rhs_covariance=calibrated.rhs_covariance,
        result=calibrated.result,
        stats=calibrated.stats,
        error=calibrated.error,
        run=run,
        alpha=alpha,
        lower_bound=lower_bound,
    )


def _mix(rhs_covariance: Array, draws: Array) -> Array:
    """Draws `(N, k, d)` of independent rows, mixed to have the covariance N between rows."""
    values, vectors = jnp.linalg.eigh(rhs_covariance)
    root = vectors * jnp.sqrt(jnp.maximum(values, 0))[None, :]
    # Eigenvectors are right to rounding, but what is known exactly does not vary at all.
    root = jnp.where(jnp.diagonal(rhs_covariance)[:, None] > 0, root, 0)
    return jnp.einsum("ij,njd->nid", root, draws, precision=_HIGHEST)
