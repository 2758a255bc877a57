"""The log evidence of a run and its gradient, which never differentiates through Lanczos.

`log p(y) = -(r^T Khat^-1 r + log det Khat + n log 2 pi) / 2` for the residuals r of every output.
With `a = Khat^-1 r` and `Khat^-1 = C + D`, its derivative is
`a^T dKhat a / 2 - a^T dr - (tr(C dKhat) + tr(D dKhat)) / 2`. The trace over C takes the rows of a
root of C; the trace over the rest takes random probes z and the solves `D z`, by conjugate
gradients that the run deflates.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pnkrylov.calibration import calibrate_logdet
from pnkrylov.estimate import Estimate
from pnkrylov.gp.data import Observations, frozen, run_operator
from pnkrylov.gp.deflation import deflated_solves
from pnkrylov.gp.measured import Measured
from pnkrylov.krylov import KrylovBasis, begin_run, continue_run
from pnkrylov.lookahead import lookahead_error
from pnkrylov.traces.bracket import quadrature_change
from pnkrylov.tridiagonal import Tridiagonal

_HIGHEST = jax.lax.Precision.HIGHEST


class Fit(eqx.Module):
    """How well the prior explains the targets: `r^T Khat^-1 r` and `Khat^-1 r`, per output.

    Attributes:
        forms: `(k,)`, by Gauss quadrature: lower bounds.
        unseen: `(k,)`, what is estimated to be missing of them.
        weights: `(k, n)`, `Khat^-1 r` after all steps of a run from r.
        earlier: `(k, n)`, the same before the look-ahead: the difference shows the error.
        num_products: products that were spent on it.
    """

    forms: Float[Array, " k"]
    unseen: Float[Array, " k"]
    weights: Float[Array, "k n"]
    earlier: Float[Array, "k n"]
    num_products: int = eqx.field(static=True)


def data_fit(measured: Measured) -> Fit:
    """The fit of every output: of the run itself where it began at the targets, else of new runs.

    New runs are as long as the main one: `k (m + l)` products.
    """
    if measured.start == "data":
        return _fit_of(measured, measured.run.basis, 0)
    data, preconditioner = measured.data, measured.run.preconditioner
    operator = run_operator(data, data.kernel_matrix(), preconditioner)
    length, rows = measured.run.basis.num_rows, measured.into(data.residuals)
    bases = [continue_run(begin_run(row), operator, length, driver="compiled") for row in rows]
    fits = [_fit_of(measured, basis, length) for basis in bases]
    return Fit(
        forms=jnp.concatenate([fit.forms for fit in fits]),
        unseen=jnp.concatenate([fit.unseen for fit in fits]),
        weights=jnp.concatenate([fit.weights for fit in fits]),
        earlier=jnp.concatenate([fit.earlier for fit in fits]),
        num_products=len(fits) * length,
    )


@eqx.filter_jit
def _fit_of(measured: Measured, basis: KrylovBasis, num_products: int) -> Fit:
    """The fit of the output whose run this is."""
    shift, plain = measured.shift(), measured.run.preconditioner is None
    tridiagonal = Tridiagonal.of(basis, shift)
    filled, unit = tridiagonal.filled, tridiagonal.unit
    first = (tridiagonal.rows() == 0).astype(unit.dtype)
    coordinates = jnp.where(tridiagonal.rows() < filled, tridiagonal.solve(first), 0)
    level = jnp.minimum(measured.level(), filled)
    earlier = tridiagonal.head(level).solve(first)
    earlier = jnp.where(tridiagonal.rows() < level, earlier, 0)
    both = basis.start_norm / unit * jnp.stack([coordinates, earlier])
    both = measured.out_of(jnp.matmul(both, basis.vectors, precision=_HIGHEST))
    form = basis.start_norm**2 * coordinates[0] / unit
    ahead = lookahead_error(tridiagonal, filled, measured.data.level() if plain else None)
    unseen = (basis.start_norm * ahead.energy_norm) ** 2 / unit
    return Fit(form[None], unseen[None], both[:1], both[1:], num_products)


def log_evidence_of(measured: Measured) -> Estimate:
    """`log p(y)`, summed over outputs, its standard error and the bracket of its bias.

    The determinant comes from the probes of the run, the fit from a run that begins at the
    targets: the run itself where it does, else one more run per output. `jax.grad` of the value
    with respect to kernel, inputs, noise, targets and prior mean is that of `gradient_of`, and
    has its price.

    Returns:
        An `Estimate`: the standard error is that of the determinant's probes; the bracket is what
        exact quadrature could change.

    Source:
        METHOD.md sections 2 and 11.
    """
    fixed = frozen(measured)
    fit = data_fit(fixed)
    determinant, error = calibrate_logdet(fixed.run, fixed.shift())
    change = quadrature_change(fixed.run, fixed.shift(), "log")
    value, above, below = _assemble(fixed, fit, determinant, change)
    spent = fixed.run.num_matvecs + fit.num_products
    return Estimate(
        _with_gradient(measured.data, value, fixed, fit),
        fixed.data.num_outputs * error / 2,
        spent,
        value - below,
        value + above,
        bracket="estimated",
    )


@eqx.filter_jit
def _assemble(
    measured: Measured, fit: Fit, determinant: Float[Array, ""], change: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """The log evidence, and by how much exact quadrature could raise and lower it."""
    data, weights = measured.data, measured.data.weights()
    if weights is not None:
        determinant = determinant - 2 * jnp.sum(jnp.log(weights))
    unseen = jnp.sum(fit.unseen)
    constant = data.size * data.num_outputs * math.log(2 * math.pi)
    value = -(jnp.sum(fit.forms) + unseen + data.num_outputs * determinant + constant) / 2
    # Gauss quadrature bounds the fit from below and the determinant from above.
    return value, (unseen - data.num_outputs * change) / 2, unseen / 2


def gradient_of(measured: Measured) -> Estimate:
    """The gradient of the log evidence, and the error of every entry of it.

    Spends one deflated solve per probe and, on kernel evaluations with derivatives, one pass over
    all pairs of inputs per probe and two more.

    Returns:
        An `Estimate` whose value is an `Observations` of derivatives: `value.operator.kernel`,
        `value.operator.inputs`, `value.noise` and `value.residuals` (the derivative with respect
        to the targets). The standard error adds that of the trace probes to how much the look-ahead
        moved the fit's part, in quadrature.
    """
    measured = frozen(measured)
    fit = data_fit(measured)
    assert measured.run.probes is not None
    num_probes = measured.run.probes.num_probes
    value, error, steps = _gradient_and_error(measured, fit)
    spent = fit.num_products + num_probes * steps
    return Estimate(value, error, measured.run.num_matvecs + spent)


class _Vectors(eqx.Module):
    """Rows whose products with dKhat make up the gradient.

    `P_perp = I - Q Q^T` is a control variate: a multiple of it is near D, and its traces are known
    exactly. Derivatives of the kernel weigh directions as K does, that of the noise weighs all
    alike, so each has its own multiple. For a preconditioned run, whose `P_perp` has no such
    traces, both are zero.

    Attributes:
        fit: `(k, n)`, `Khat^-1 r`.
        root: `(m, n)`, rows R with `R^T R = C`.
        basis: `(m, n)`, the rows of the basis, mapped back.
        weights: `(n,)`, the squares of W.
        probes: `(N, n)`, z.
        kernel_solves: `(N, n)`, `D z - kernel_share P_perp z`.
        noise_solves: `(N, n)`, `D z - noise_share P_perp z`.
        kernel_share: the multiple for derivatives of the kernel.
        noise_share: that for the noise.
        steps: steps of the solves.
    """

    fit: Float[Array, "k n"]
    root: Float[Array, "m n"]
    basis: Float[Array, "m n"]
    weights: Float[Array, " n"]
    probes: Float[Array, "N n"]
    kernel_solves: Float[Array, "N n"]
    noise_solves: Float[Array, "N n"]
    kernel_share: Float[Array, ""]
    noise_share: Float[Array, ""]
    steps: Int[Array, ""]

    @classmethod
    def of(cls, measured: Measured, fit: Fit) -> "_Vectors":
        """Draws the probes and solves for them, in the complement of all rows of the run."""
        data, run, tridiagonal = measured.data, measured.run, measured.tridiagonal()
        kernel_matrix = data.kernel_matrix()
        operator = run_operator(data, kernel_matrix, run.preconditioner)
        assert run.probes is not None
        shape = (run.probes.num_probes, data.size)
        probes = jax.random.rademacher(measured.key, shape, operator.dtype)
        solves, steps = deflated_solves(operator, measured.shift(), run.basis, tridiagonal, probes)
        vectors = jnp.where(run.basis.mask()[:, None], run.basis.vectors, 0)
        root = tridiagonal.factor_transpose_mv(vectors) / jnp.sqrt(tridiagonal.unit)
        along = jnp.matmul(probes, vectors.T, precision=_HIGHEST)
        outside = probes - jnp.matmul(along, vectors, precision=_HIGHEST)
        kernel_share = noise_share = jnp.zeros((), operator.dtype)
        if run.preconditioner is None:
            kernel_share = _share(kernel_matrix.block_mv(solves), kernel_matrix.block_mv(outside))
            noise_share = _share(solves, outside)
        return cls(
            fit=fit.weights,
            root=measured.out_of(root),
            basis=measured.out_of(vectors),
            weights=data.weighted(data.weighted(jnp.ones_like(fit.weights[0]))),
            probes=measured.out_of(probes),
            kernel_solves=measured.out_of(solves - kernel_share * outside),
            noise_solves=measured.out_of(solves - noise_share * outside),
            kernel_share=kernel_share,
            noise_share=noise_share,
            steps=steps,
        )


def _share(solves: Float[Array, "N n"], outside: Float[Array, "N n"]) -> Float[Array, ""]:
    """The multiple of `outside` that is nearest to `solves`."""
    squares = jnp.sum(outside**2)
    return jnp.sum(solves * outside) / jnp.where(squares > 0, squares, 1)


def _forms(data: Observations, rows: Float[Array, "N n"]) -> Float[Array, " N"]:
    """`v^T Khat v` for all rows: what is differentiated, at fixed rows."""
    noise = data.noise if data.noise.ndim == 0 else data.noise[None, :]
    return jnp.sum(rows * (data.operator.block_mv(rows) + noise * rows), axis=1)


def _fit_part(data: Observations, weights: Float[Array, "k n"]) -> Float[Array, ""]:
    """Has the derivative of `-r^T Khat^-1 r / 2` at fixed `Khat^-1 r`."""
    return jnp.sum(_forms(data, weights)) / 2 - jnp.sum(weights * data.residuals)


def _known_part(data: Observations, vectors: _Vectors) -> Float[Array, ""]:
    """What `tr(C Khat)` and the traces of the control variates contribute, at fixed rows."""
    noise = data.noise if data.noise.ndim == 0 else data.noise[None, :]
    count = len(vectors.root)
    images = data.operator.block_mv(jnp.concatenate([vectors.root, vectors.basis]))
    resolved = jnp.sum(vectors.root * (images[:count] + noise * vectors.root))
    kernel = jnp.sum(vectors.weights * data.operator.diagonal())
    kernel = kernel - jnp.sum(vectors.basis * images[count:])
    white = jnp.sum(vectors.weights * data.noise) - jnp.sum(vectors.basis**2 * noise)
    return resolved + vectors.kernel_share * kernel + vectors.noise_share * white


def _probe_parts(
    data: Observations,
    probes: Float[Array, "N n"],
    kernel_solves: Float[Array, "N n"],
    noise_solves: Float[Array, "N n"],
) -> Float[Array, " N"]:
    """What every probe says of the rest of the trace, at fixed rows."""
    noise = data.noise if data.noise.ndim == 0 else data.noise[None, :]
    images = data.operator.block_mv(probes)
    return jnp.sum(kernel_solves * images + noise_solves * noise * probes, axis=1)


def _surrogate(data: Observations, vectors: _Vectors) -> Float[Array, ""]:
    """Has the derivative of the log evidence, at fixed rows."""
    each = _probe_parts(data, vectors.probes, vectors.kernel_solves, vectors.noise_solves)
    trace = _known_part(data, vectors) + jnp.mean(each)
    return _fit_part(data, vectors.fit) - len(vectors.fit) * trace / 2


@eqx.filter_jit
def _gradient_and_error(
    measured: Measured, fit: Fit
) -> tuple[Observations, Observations, Int[Array, ""]]:
    data, vectors = measured.data, _Vectors.of(measured, fit)

    def of_probe(rows):
        rows = jax.tree.map(lambda row: row[None], rows)
        return eqx.filter_grad(lambda data: _probe_parts(data, *rows)[0])(data)

    rows = (vectors.probes, vectors.kernel_solves, vectors.noise_solves)
    each = jax.lax.map(of_probe, rows)
    value = eqx.filter_grad(_surrogate)(data, vectors)
    late = eqx.filter_grad(_fit_part)(data, fit.weights)
    early = eqx.filter_grad(_fit_part)(data, fit.earlier)
    count, outputs = vectors.probes.shape[0], data.num_outputs

    def error(samples, late, early):
        chance = jnp.full_like(late, jnp.inf)
        if count > 1:
            chance = jnp.std(samples, axis=0, ddof=1) / count**0.5 * outputs / 2
        return jnp.hypot(chance, late - early)

    return value, jax.tree.map(error, each, late, early), vectors.steps


@eqx.filter_custom_vjp
def _with_gradient(
    data: Observations, value: Float[Array, ""], measured: Measured, fit: Fit
) -> Float[Array, ""]:
    """The value, with the derivative of the log evidence with respect to `data`."""
    return value


@_with_gradient.def_fwd
def _value_and_gradient(perturbed, data, value, measured, fit):
    return value, _gradient(eqx.filter(data, perturbed), measured, fit)


@_with_gradient.def_bwd
def _scaled(gradient, cotangent, perturbed, data, value, measured, fit):
    return jax.tree.map(lambda leaf: cotangent * leaf, gradient)


@eqx.filter_jit
def _gradient(wanted: Any, measured: Measured, fit: Fit) -> Any:
    """The gradient with respect to the leaves that are wanted."""
    vectors = _Vectors.of(measured, fit)
    others = jax.tree.map(
        lambda want, leaf: None if want is not None else leaf,
        wanted,
        measured.data,
        is_leaf=lambda leaf: leaf is None,
    )
    return jax.grad(lambda wanted: _surrogate(eqx.combine(wanted, others), vectors))(wanted)
