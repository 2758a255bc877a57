"""linear_operator's side of performance_gp.py and performance_ciq.py: gpytorch computes with it."""

import contextlib
import sys

import numpy as np
import torch
from linear_operator import operators, settings
from linear_operator.utils.contour_integral_quad import contour_integral_quad
from linear_operator.utils.lanczos import lanczos_tridiag
from peers_serve import serve


class CountingOperator(operators.DenseLinearOperator):
    """Counts products with single vectors."""

    products = 0

    def _matmul(self, rhs):
        CountingOperator.products += rhs.shape[-1]
        return super()._matmul(rhs)


def inverse_square_root(kernel, block):
    """`K^{-1/2} b` for rows b, by contour-integral quadrature."""

    def row(lanczos_steps, points, tolerance):
        CountingOperator.products = 0
        with settings.minres_tolerance(tolerance), settings.max_cg_iterations(1000):
            solves, weights, _, _ = contour_integral_quad(
                CountingOperator(kernel),
                block.T.contiguous(),
                inverse=True,
                max_lanczos_iter=lanczos_steps,
                num_contour_quadrature=points,
            )
        return {"value": (solves * weights).sum(0).T, "products": CountingOperator.products}

    return row


def rows_of(kernel, noise, rhs):
    """Rows on `K + noise I`; every call builds its operator anew, since results are cached."""
    size = len(rhs)

    def operator():
        return operators.AddedDiagLinearOperator(
            operators.DenseLinearOperator(kernel),
            operators.ConstantDiagLinearOperator(noise[None], size),
        )

    def iterative(rank):
        """No Cholesky decomposition, and a preconditioner of that rank (0: none)."""
        return (
            settings.max_cholesky_size(0),
            settings.min_preconditioning_size(0),
            settings.max_preconditioner_size(rank),
        )

    def solve(tolerance, rank):
        first, second, third = iterative(rank)
        with first, second, third, settings.cg_tolerance(tolerance):
            return {"solution": operator().solve(rhs[:, None])[:, 0]}

    def lanczos(steps):
        vectors, tridiagonal = lanczos_tridiag(
            operator().matmul, steps, kernel.dtype, kernel.device, kernel.shape,
            init_vecs=rhs[:, None],
        )  # fmt: skip
        return {"vectors": vectors, "tridiagonal": tridiagonal}

    def root_of_inverse(steps):
        with settings.max_root_decomposition_size(steps):
            found = operator().root_inv_decomposition(method="lanczos")
        return {"root": found.root.to_dense()}

    def logdet(samples, steps, rank, seed):
        torch.manual_seed(seed)
        quadrature = (
            settings.num_trace_samples(samples),
            settings.max_lanczos_quadrature_iterations(steps),
            settings.max_cg_iterations(steps),
            settings.cg_tolerance(1e-10),
        )
        with contextlib.ExitStack() as stack:
            for setting in (*iterative(rank), *quadrature):
                stack.enter_context(setting)
            return float(operator().logdet())

    return {
        "solve": solve,
        "lanczos": lanczos,
        "root of the inverse": root_of_inverse,
        "logdet": logdet,
    }


def main(source):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    given = {name: torch.from_numpy(array) for name, array in np.load(source).items()}
    rows = rows_of(given["kernel"], given["noise"], given["rhs"])
    if "block" in given:
        rows["inverse square root"] = inverse_square_root(given["kernel"], given["block"])
    serve(rows, ("gpytorch", "linear_operator"))


if __name__ == "__main__":
    main(*sys.argv[1:])
