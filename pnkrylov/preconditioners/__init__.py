"""Preconditioners: SPD matrices whose symmetric powers are closed form.

entries (diagonals and rows of an operator) -> one family per file -> split (`L^-1 A L^-1`)
"""

from pnkrylov.preconditioners.base import Preconditioner
from pnkrylov.preconditioners.block_diagonal import BlockDiagonal
from pnkrylov.preconditioners.curvature import (
    choose_observations,
    fully_linear,
    one_observation,
    sub_sampled,
)
from pnkrylov.preconditioners.dense import Dense
from pnkrylov.preconditioners.diagonal import Diagonal, ScaledIdentity
from pnkrylov.preconditioners.entries import operator_diagonal
from pnkrylov.preconditioners.low_rank import LowRank
from pnkrylov.preconditioners.nystrom import nystrom
from pnkrylov.preconditioners.pivoted_cholesky import (
    pivoted_cholesky,
    randomly_pivoted_cholesky,
)
from pnkrylov.preconditioners.split import (
    PreconditionedOperator,
    check_preconditioner,
    precondition,
)

__all__ = [
    "BlockDiagonal",
    "Dense",
    "Diagonal",
    "LowRank",
    "PreconditionedOperator",
    "Preconditioner",
    "ScaledIdentity",
    "check_preconditioner",
    "choose_observations",
    "fully_linear",
    "nystrom",
    "one_observation",
    "operator_diagonal",
    "pivoted_cholesky",
    "precondition",
    "randomly_pivoted_cholesky",
    "sub_sampled",
]
