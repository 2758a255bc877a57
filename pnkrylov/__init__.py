"""Gaussian beliefs about `A^-1 v` and `A^-1` from one Lanczos run.

The flow, which is also the order of imports:

    operators     anything operator-like -> one SPD operator on a flat vector
    basis         the vectors of a Lanczos run, and one step
    krylov        a Lanczos run -> its basis, to the end, a time limit or from a checkpoint
    tridiagonal   the small T of a run, factored
    lookahead     how far the mean is from the answer, seen by the steps that follow
    looking_ahead those steps, taken until that is seen
    probes, pslq  what is left unknown: random probes, the boundary coupling, traces
    covariance    resolved + coupling + bulk as one operator
    calibration   a run -> mean, covariance, scale, and their price
    beliefs       SolveBelief, InverseBelief: sample, push, shift, refine
    budgets       numbers of products: checked, and split between run and probes
    solve         the front door to beliefs about A^-1 v
    inverse       the front door to beliefs about A^-1

and what is built on it: `pnkrylov.block` (several vectors at once), `pnkrylov.trace`,
`pnkrylov.ciq`, `pnkrylov.preconditioners`, `pnkrylov.laplace`, `pnkrylov.gp`, `pnkrylov.hmc`,
`pnkrylov.plotting`, `pnkrylov.interop`.

Notation: A is symmetric positive definite, d x d; m
steps give the basis Q (rows are vectors in memory), the tridiagonal T and the coupling beta_m to
q_{m+1}; S is the Schur complement of T_m in A; q_par, q_perp and u span the coupling; omega is the
variance of the bulk; nu is the scale of a solve belief.
"""

from pnkrylov import _jaxlib as _jaxlib  # first: it may have to set a flag before JAX runs
from pnkrylov.beliefs import InverseBelief, SolveBelief
from pnkrylov.block import BlockInverseBelief, BlockSolveBelief
from pnkrylov.covariance import KrylovCovariance
from pnkrylov.diagnostics import (
    regime,
    s_statistic,
    simulation_based_calibration,
    z_statistic,
)
from pnkrylov.errors import (
    NotFiniteError,
    NotPositiveDefiniteError,
    NotSymmetricError,
    PnkrylovError,
)
from pnkrylov.estimate import Estimate
from pnkrylov.gaussian import DenseGaussian, GaussianBelief
from pnkrylov.inverse import inverse
from pnkrylov.krylov import KrylovBasis, continue_run, lanczos
from pnkrylov.operators import SPDOperator, as_operator
from pnkrylov.results import RESULTS
from pnkrylov.solve import solve
from pnkrylov.storage import load

__version__ = "0.1.0"

__all__ = [
    "RESULTS",
    "BlockInverseBelief",
    "BlockSolveBelief",
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
    "regime",
    "s_statistic",
    "simulation_based_calibration",
    "solve",
    "z_statistic",
]
