"""Observations as a run sees them: noise that is a multiple of the identity, and zero mean."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pnkrylov._arguments import check_reals
from pnkrylov._operator_types import DenseOperator, EntryOperator, SPDOperator
from pnkrylov._structure import VectorStructure, check_dtype
from pnkrylov.gp.operator import KernelOperator, kernel_operator
from pnkrylov.preconditioners import Preconditioner, precondition
from pnkrylov.preconditioners._checks import as_scalar, check_finite, refuse

# Up to here the kernel matrix is stored (128 MB in float64): a product then reads it instead of
# evaluating the kernel, which is about ten times as fast.
_STORE_UP_TO = 4096


class Observations(eqx.Module):
    """`y = mean(X) + f(X) + noise`, for one or several outputs that share inputs and noise.

    Noise variances that differ are divided out, exactly: with W = sqrt(level / noise) all work is
    on `W K W + level I`, where `level` is their geometric mean. One noise variance is W = I.

    Attributes:
        operator: `K(X, X)`.
        noise: variance of the noise, `()` or one per observation `(n,)`.
        residuals: `(k, n)`, targets less their prior mean, one row per output.
        mean: prior mean, a function of one point, or None for zero (or for one that is known at
            the inputs only).
        mean_is_array: whether the prior mean was given at the inputs only.
        single: whether the targets had the shape `(n,)`.
    """

    operator: KernelOperator
    noise: Float[Array, "*n"]
    residuals: Float[Array, "k n"]
    mean: Callable[..., Any] | None
    mean_is_array: bool = eqx.field(static=True)
    single: bool = eqx.field(static=True)

    @property
    def size(self) -> int:
        """Number of observations n."""
        return self.operator.size

    @property
    def num_outputs(self) -> int:
        """Number of outputs k."""
        return self.residuals.shape[0]

    def level(self) -> Float[Array, ""]:
        """The noise variance, or the geometric mean of the noise variances."""
        return self.noise if self.noise.ndim == 0 else jnp.exp(jnp.mean(jnp.log(self.noise)))

    def weights(self) -> Float[Array, " n"] | None:
        """The diagonal of W, or None for W = I."""
        return None if self.noise.ndim == 0 else jnp.sqrt(self.level() / self.noise)

    def noise_of(self, indices: Array) -> Array:
        """Noise variances of some observations."""
        return self.noise if self.noise.ndim == 0 else self.noise[indices]

    def weighted(self, rows: Float[Array, "*k n"]) -> Float[Array, "*k n"]:
        """`W v` for one vector or for rows."""
        weights = self.weights()
        if weights is None:
            return rows
        return rows * (weights if rows.ndim == 1 else weights[None, :])

    def kernel_matrix(self) -> EntryOperator:
        """`W K W`, positive semi-definite: stored where it is small, else matrix-free."""
        weights, structure = self.weights(), self.operator.structure
        if weights is None:
            return stored(self.operator)
        if self.size > _STORE_UP_TO:
            return WeightedOperator(operator=self.operator, weights=weights, structure=structure)
        matrix = weights[:, None] * self.operator.as_matrix() * weights[None, :]
        return DenseOperator(matrix=matrix, structure=structure)

    def prior_mean(self, points: Float[Array, " s *p"], given: Any) -> Float[Array, "k s"]:
        """The prior mean at other points, one row per output.

        Raises:
            ValueError: it is known at the inputs only, and not given; or has a wrong shape.
        """
        if given is None and self.mean_is_array:
            raise ValueError(
                "mean was an array at the inputs: pass mean=, its values at the new points, or "
                "condition on a function of one point."
            )
        if given is None and self.mean is None:
            return jnp.zeros((self.num_outputs, len(points)), self.residuals.dtype)
        values = jax.vmap(self.mean)(points) if given is None else _as_array(given, "mean")  # pyright: ignore
        return _as_rows(values, "mean", len(points), self.num_outputs, self.residuals.dtype)


def stored(operator: KernelOperator) -> EntryOperator:
    """The kernel matrix, dense where it is small."""
    if operator.size > _STORE_UP_TO:
        return operator
    return DenseOperator(matrix=operator.as_matrix(), structure=operator.structure)


class Constant(eqx.Module):
    """A prior mean that is a number."""

    value: Float[Array, ""]

    def __call__(self, point: Float[Array, "*p"]) -> Float[Array, ""]:
        """The number."""
        return self.value


class WeightedOperator(EntryOperator):
    """`W K W` for a diagonal W."""

    operator: EntryOperator
    weights: Float[Array, " n"]
    structure: VectorStructure = eqx.field(static=True)

    def mv(self, vector: Float[Array, " n"]) -> Float[Array, " n"]:
        """Returns `W K W v`."""
        return self.weights * self.operator.mv(self.weights * vector)

    def block_mv(self, block: Float[Array, "k n"]) -> Float[Array, "k n"]:
        """Returns `W K W v` for every row."""
        return self.weights[None, :] * self.operator.block_mv(self.weights[None, :] * block)

    def diagonal(self) -> Float[Array, " n"]:
        """The diagonal."""
        return self.weights**2 * self.operator.diagonal()

    def row(self, index: Int[Array, ""]) -> Float[Array, " n"]:
        """Row `index`."""
        return self.weights[index] * self.weights * self.operator.row(index)


class ShiftedOperator(EntryOperator):
    """`A + shift I`."""

    operator: EntryOperator
    shift: Float[Array, ""]
    structure: VectorStructure = eqx.field(static=True)

    def mv(self, vector: Float[Array, " n"]) -> Float[Array, " n"]:
        """Returns `A v + shift v`."""
        return self.operator.mv(vector) + self.shift * vector

    def block_mv(self, block: Float[Array, "k n"]) -> Float[Array, "k n"]:
        """Returns `A v + shift v` for every row."""
        return self.operator.block_mv(block) + self.shift * block

    def diagonal(self) -> Float[Array, " n"]:
        """The diagonal."""
        return self.operator.diagonal() + self.shift

    def row(self, index: Int[Array, ""]) -> Float[Array, " n"]:
        """Row `index`."""
        return self.operator.row(index).at[index].add(self.shift)


def shifted_by(operator: EntryOperator, shift: Float[Array, ""]) -> ShiftedOperator:
    """`A + shift I`."""
    return ShiftedOperator(operator=operator, shift=shift, structure=operator.structure)


def observe(
    kernel: Any, X: Any, y: Any, noise: Any, mean: Any, block_rows: int | None
) -> Observations:
    """Checks a data set (see `condition`) and brings it into the form above.

    Raises:
        TypeError, ValueError: wrong shapes or dtypes.
        NotFiniteError: NaN or infinity in inputs, targets, noise or mean.
        NotPositiveDefiniteError: negative noise, or zero among several variances.
    """
    operator = kernel_operator(kernel, X, block_rows=block_rows)
    size, dtype = operator.size, operator.dtype
    if check_dtype(getattr(y, "dtype", None), "y") != dtype:
        raise TypeError(
            f"y has dtype {y.dtype}, but X has dtype {dtype}; nothing is cast silently. Cast one "
            "of the two with .astype."
        )
    if y.ndim not in (1, 2) or y.shape[0] != size or 0 in y.shape:
        raise ValueError(
            f"y has shape {y.shape}; for {size} inputs it must be ({size},) or ({size}, k)."
        )
    targets = jnp.asarray(y)
    targets = check_finite(targets[None, :] if targets.ndim == 1 else targets.T, "y")
    check_reals(noise=noise)
    noise = jnp.asarray(noise).astype(dtype)
    if noise.shape not in ((), (size,)):
        raise ValueError(
            f"noise has shape {noise.shape}; pass one variance, or one for each of the {size} "
            "observations."
        )
    noise = check_finite(noise, "noise")
    bad = noise < 0 if noise.ndim == 0 else noise <= 0
    what = "not be negative" if noise.ndim == 0 else "be positive where variances differ"
    noise = refuse(noise, bad, f"noise must {what}", "It is a variance, not a deviation.")
    if mean is not None and not callable(mean) and jnp.ndim(mean) == 0:
        mean = Constant(as_scalar(mean, "mean", dtype))
    data = Observations(
        operator=operator,
        noise=noise,
        residuals=targets,
        mean=mean if callable(mean) else None,
        mean_is_array=mean is not None and not callable(mean),
        single=y.ndim == 1,
    )
    if mean is None:
        return data
    prior = data.prior_mean(operator.inputs, None if callable(mean) else mean)
    return eqx.tree_at(lambda d: d.residuals, data, targets - check_finite(prior, "mean"))


def _as_array(values: Any, name: str) -> Array:
    check_reals(**{name: values})
    return jnp.asarray(values)


def _as_rows(values: Array, name: str, count: int, num_outputs: int, dtype: Any) -> Array:
    check_reals(**{name: values})
    values = values.astype(dtype)
    if values.ndim == 0:
        return jnp.broadcast_to(values, (num_outputs, count))
    if values.shape == (count,):
        return jnp.broadcast_to(values[None, :], (num_outputs, count))
    if values.shape == (count, num_outputs):
        return values.T
    raise ValueError(
        f"{name} has values of shape {values.shape} for {count} points and {num_outputs} outputs: "
        f"it must be a number, ({count},) or ({count}, {num_outputs})."
    )


def frozen(tree: Any) -> Any:
    """The same tree, through whose arrays no derivative goes."""
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if eqx.is_array(x) else x, tree)


def into(
    data: Observations, preconditioner: Preconditioner | None, rows: Float[Array, "*k n"]
) -> Float[Array, "*k n"]:
    """Right-hand sides (or rows of kernel values) as the run sees them: `P^-1/2 W v`."""
    rows = data.weighted(rows)
    return rows if preconditioner is None else preconditioner.inv_sqrt_mv(rows)


def out_of(
    data: Observations, preconditioner: Preconditioner | None, rows: Float[Array, "*k n"]
) -> Float[Array, "*k n"]:
    """Solutions of the run, mapped back: `W P^-1/2 v`."""
    return data.weighted(rows if preconditioner is None else preconditioner.inv_sqrt_mv(rows))


def run_operator(
    data: Observations, kernel_matrix: EntryOperator, preconditioner: Preconditioner | None
) -> SPDOperator:
    """What a run is on: `W K W`, or `P^-1/2 (W K W + s I) P^-1/2`."""
    if preconditioner is None:
        return kernel_matrix
    shifted = shifted_by(kernel_matrix, data.level())
    return precondition(shifted, preconditioner)
