"""Contour-integral quadrature: products with `K^{-1/2}` and samples, exact up to a tolerance.

elliptic functions -> quadrature -> msMINRES (or Lanczos-FA) -> square-root products -> sampler
"""

from pnkrylov.ciq.elliptic import ellipj, ellipjm1, ellipk, ellipkm1
from pnkrylov.ciq.msminres import ShiftedSolution, msminres
from pnkrylov.ciq.quadrature import Quadrature, quadrature
from pnkrylov.ciq.results import CIQ_RESULTS, SquareRootSolution, ToleranceNotMetError
from pnkrylov.ciq.sampler import CIQSampler
from pnkrylov.ciq.spectrum import SpectralBounds, spectral_bounds
from pnkrylov.ciq.square_root import inv_sqrt_matvec, sqrt_matvec

__all__ = [
    "CIQ_RESULTS",
    "CIQSampler",
    "Quadrature",
    "ShiftedSolution",
    "SpectralBounds",
    "SquareRootSolution",
    "ToleranceNotMetError",
    "ellipj",
    "ellipjm1",
    "ellipk",
    "ellipkm1",
    "inv_sqrt_matvec",
    "msminres",
    "quadrature",
    "spectral_bounds",
    "sqrt_matvec",
]
