"""Gaussian beliefs about `A^-1 v` and `A^-1` from one Lanczos run.

The flow, which is also the order of imports:

    operators -> krylov -> tridiagonal -> lookahead, pslq -> covariance -> calibration -> beliefs
    anything     Lanczos   the small T    how far from    what     resolved +  mean, scale   sample,
    operator-    basis     factored       the answer      is left  coupling +  and their     push,
    like                                                  unknown  bulk        price         refine

with `solve` and `inverse` in front of it. Notation: A is symmetric positive definite, d x d; m
steps give the basis Q (rows are vectors in memory), the tridiagonal T and the coupling beta_m to
q_{m+1}; S is the Schur complement of T_m in A; q_par, q_perp and u span the coupling; omega is the
variance of the bulk; nu is the scale of a solve belief.
"""

from pnkrylov.beliefs import InverseBelief, SolveBelief
from pnkrylov.covariance import KrylovCovariance
from pnkrylov.errors import (
    NotFiniteError,
    NotPositiveDefiniteError,
    NotSymmetricError,
    PnkrylovError,
)
from pnkrylov.estimate import Estimate
from pnkrylov.gaussian import DenseGaussian, GaussianBelief
from pnkrylov.krylov import KrylovBasis, continue_run, lanczos
from pnkrylov.operators import SPDOperator, as_operator
from pnkrylov.results import RESULTS
from pnkrylov.solve import inverse, solve
from pnkrylov.storage import load

__version__ = "0.1.0"

__all__ = [
    "RESULTS",
    "DenseGaussian",
    "Estimate",
    "GaussianBelief",
    "InverseBelief",
    "KrylovBasis",
    "KrylovCovariance",
    "NotFiniteError",
    "NotPositiveDefiniteError",
    "NotSymmetricError",
    "PnkrylovError",
    "SPDOperator",
    "SolveBelief",
    "as_operator",
    "continue_run",
    "inverse",
    "lanczos",
    "load",
    "solve",
]
