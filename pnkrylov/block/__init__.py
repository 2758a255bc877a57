"""Several vectors at once: one joint block Krylov basis, for right-hand sides or for `A^-1`.

The flow is that of the package with k x k blocks for scalars (METHOD.md section 14): right-hand
sides -> block basis (`krylov`) -> block tridiagonal factor (`tridiagonal`) -> coupling of rank k
(`coupling`) -> covariance (`covariance`) and its scale (`lookahead`, `calibration`) -> belief
(`beliefs`), through the front door `solve_block`. A belief about `A^-1` starts at random blocks and
measures what is left by probes (`complement`), through `inverse_block`.
"""

from pnkrylov.block.beliefs import BlockSolveBelief, MatrixGaussian
from pnkrylov.block.inverse import BlockInverseBelief, inverse_block
from pnkrylov.block.krylov import BlockKrylovBasis, block_lanczos
from pnkrylov.block.solve import solve_block

__all__ = [
    "BlockInverseBelief",
    "BlockKrylovBasis",
    "BlockSolveBelief",
    "MatrixGaussian",
    "block_lanczos",
    "inverse_block",
    "solve_block",
]
