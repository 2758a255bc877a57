"""Several right-hand sides at once: one joint block Krylov basis, one matrix-normal belief.

The flow is that of the package with k x k blocks for scalars (METHOD.md section 14): right-hand
sides -> block basis (`krylov`) -> block tridiagonal factor (`tridiagonal`) -> coupling of rank k
(`coupling`) -> covariance (`covariance`) and its scale (`lookahead`, `calibration`) -> belief
(`beliefs`), through the front door `solve_block`.
"""

from pnkrylov.block.beliefs import BlockSolveBelief, MatrixGaussian
from pnkrylov.block.krylov import BlockKrylovBasis, block_lanczos
from pnkrylov.block.solve import solve_block

__all__ = [
    "BlockKrylovBasis",
    "BlockSolveBelief",
    "MatrixGaussian",
    "block_lanczos",
    "solve_block",
]
