"""Products with `K^{-1/2}` and `K^{1/2}`: the front doors of CIQ."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from pnkrylov.ciq.drivers import Method, Options, by_ciq, by_lanczos
from pnkrylov.ciq.results import SquareRootSolution, raise_unless_successful
from pnkrylov.ciq.spectrum import SpectralBounds
from pnkrylov.operators import SPDOperator, as_operator, check_vector
from pnkrylov.preconditioners import Preconditioner, precondition


def inv_sqrt_matvec(
    A: Any,
    b: PyTree,
    *,
    key: PRNGKeyArray | None = None,
    rtol: float = 1e-4,
    method: Method = "auto",
    preconditioner: Preconditioner | None = None,
    bounds: SpectralBounds | None = None,
    random_rhs: bool = False,
    num_points: int | None = None,
    max_steps: int | None = None,
    max_basis_bytes: int = 2**30,
    throw: bool = True,
) -> SquareRootSolution:
    """Computes `K^{-1/2} b` to a relative tolerance, for one or many right-hand sides.

    `method="lanczos"` stores the Krylov basis (`steps x k x d` numbers). It needs no bounds
    beforehand and no more products than a solve. `method="ciq"` (msMINRES) stores two vectors per
    quadrature point, and a separate run bounds the spectrum first. `"auto"` takes Lanczos and
    changes to CIQ when the steps that the condition number demands, `sqrt(kappa)/2
    log(2 sqrt(kappa)/rtol)` (at most d where the basis is kept orthogonal, d <= 1024), would not
    fit into `max_basis_bytes`. Inside `jit`, where the condition number is unknown, `"auto"` is
    Lanczos if `max_steps` (default d for d <= 1024) vectors fit, else CIQ.

    Args:
        A: Anything that `as_operator` takes; symmetric positive definite.
        b: Right-hand side like the operator's vectors, or many with one more leading axis on
            every leaf.
        key: Random key of the probe that bounds the spectrum; not needed with `bounds` or
            `random_rhs`.
        rtol: Largest relative error in the 2-norm, per right-hand side.
        method: `"auto"`, `"lanczos"` or `"ciq"`.
        preconditioner: A `pnkrylov.preconditioners.Preconditioner` P, with `L = P^{1/2}`
            symmetric. The result is then `L^-1 (L^-1 K L^-1)^{-1/2} b`: a rotation of
            `K^{-1/2} b`, so a standard normal b gives the covariance `K^-1` exactly all the same.
            The tolerance is on `(L^-1 K L^-1)^{-1/2} b`.
        bounds: Spectral bounds of the (preconditioned) operator, if known.
        random_rhs: Whether b is standard normal. Lanczos then needs no probe of its own.
        num_points: Quadrature points; by default from the bounds, or inside `jit` enough for the
            largest condition number of the dtype.
        max_steps: Largest number of iterations.
        max_basis_bytes: Largest basis that may be stored.
        throw: Raise when the tolerance is not met; otherwise see `result` and `converged`.

    Returns:
        A `SquareRootSolution`; the product is its `value`.

    Raises:
        ToleranceNotMetError: The tolerance was not met, or rounding does not allow it.
        NotPositiveDefiniteError: A Ritz value is not positive; the message names it.
        NotFiniteError: A product is not finite.
        TypeError, ValueError: An argument is out of its range, of a wrong type or shape, or a key
            is needed.

    Source:
        METHOD.md, section 7; Pleiss et al. (2020); Druskin and Knizhnerman (1991) for Lanczos-FA
        without re-orthogonalisation. Beyond them: the error bound of the combined solution, and
        bounds that are certified by the random start.
    """
    options = Options(
        forward=False,
        rtol=rtol,
        method=method,
        preconditioner=preconditioner,
        bounds=bounds,
        random_rhs=random_rhs,
        num_points=num_points,
        max_steps=max_steps,
        max_basis_bytes=max_basis_bytes,
    )
    return _on_trees(A, b, key, options, throw)


def sqrt_matvec(
    A: Any,
    b: PyTree,
    *,
    key: PRNGKeyArray | None = None,
    throw: bool = True,
    **options: Any,
) -> SquareRootSolution:
    """Computes `K^{1/2} b = K (K^{-1/2} b)` to a relative tolerance.

    Args:
        A: As in `inv_sqrt_matvec`.
        b: As in `inv_sqrt_matvec`.
        key: As in `inv_sqrt_matvec`.
        throw: As in `inv_sqrt_matvec`.
        **options: The other keyword arguments of `inv_sqrt_matvec`. With a preconditioner the
            result is `L (L^-1 K L^-1)^{1/2} b`, a rotation of `K^{1/2} b`.

    Returns:
        A `SquareRootSolution`; its error bound is relative to `K^{1/2} b`.

    Raises:
        TypeError: An argument is unknown.
        ToleranceNotMetError, ValueError: And the others of `inv_sqrt_matvec`.

    Source:
        As `inv_sqrt_matvec`: METHOD.md section 7.
    """
    return _on_trees(A, b, key, Options(forward=True, **options), throw)


def _on_trees(
    A: Any, b: PyTree, key: PRNGKeyArray | None, options: Options, throw: bool
) -> SquareRootSolution:
    operator, rows, unravel = _as_rows(A, b)
    solution = square_root_rows(operator, rows, key, options)
    if throw:
        solution = raise_unless_successful(solution, options.rtol)
    return eqx.tree_at(lambda s: s.value, solution, unravel(solution.value))


def square_root_rows(
    operator: SPDOperator, rows: Float[Array, "k d"], key: PRNGKeyArray | None, options: Options
) -> SquareRootSolution:
    """The square-root products of flat right-hand sides; nothing is raised for bad numbers.

    Raises:
        ValueError: A key is needed and missing.
    """
    needs_key = options.bounds is None and not (options.random_rhs and options.method != "ciq")
    if key is None and needs_key:
        raise ValueError("key is needed to bound the spectrum; pass key= or bounds=.")
    if key is None:
        # Not used unless random right-hand sides, which are their own probes, fall back to CIQ.
        key = jax.random.key(0)
    inner = precondition(operator, options.preconditioner)
    solution = None
    if options.method != "ciq":
        solution = by_lanczos(inner, rows, key, options)
    if solution is None:
        solution = by_ciq(inner, rows, key, options)
    values = solution.value
    if options.preconditioner is not None:
        values = options.preconditioner.inv_sqrt_mv(values)
    if not options.forward:
        return eqx.tree_at(lambda s: s.value, solution, values)
    return eqx.tree_at(
        lambda s: (s.value, s.num_matvecs, s.num_passes),
        solution,
        (
            operator.block_mv(values),
            solution.num_matvecs + rows.shape[0],
            solution.num_passes + 1,
        ),
    )


def _as_rows(A: Any, b: PyTree) -> tuple[SPDOperator, Array, Any]:
    """The operator, the right-hand sides as rows, and the way back to the user's structure."""
    is_matrix = hasattr(A, "shape") or isinstance(A, lx.AbstractLinearOperator)
    operator = as_operator(A) if is_matrix and hasattr(b, "ndim") else as_operator(A, like=b)
    expected = jax.tree.leaves(operator.structure.tree)
    leaves = jax.tree.leaves(b)
    many = len(leaves) == len(expected) and all(
        jnp.ndim(leaf) == len(like.shape) + 1 for leaf, like in zip(leaves, expected, strict=True)
    )
    if not many:
        row = check_vector(operator, b, "b")
        return operator, row[None, :], lambda values: operator.unravel(values[0])
    check_vector(operator, jax.tree.map(lambda leaf: leaf[0], b), "a row of b")
    counts = {leaf.shape[0] for leaf in leaves}
    if len(counts) != 1:
        raise ValueError(f"The leading axes of b differ between leaves: {sorted(counts)}.")
    return operator, jax.vmap(operator.ravel)(b), jax.vmap(operator.unravel)
