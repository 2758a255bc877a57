"""Gaussian processes that report mathematical and computational uncertainty apart.

kernels -> operator (`K(X, X)`, matrix-free) -> data (noise and mean taken care of) -> remainder
(probes along kernel rows) -> measured (run and probes) -> prediction, evidence, pathwise (views of
it, at no product) -> regression (`condition`) -> fitting, storage
"""

from pnkrylov.gp.fitting import Fitted, fit
from pnkrylov.gp.kernels import (
    RBF,
    Kernel,
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
)
from pnkrylov.gp.operator import KernelOperator, kernel_operator
from pnkrylov.gp.prediction import Prediction
from pnkrylov.gp.regression import GPBelief, condition
from pnkrylov.gp.storage import load, save

__all__ = [
    "RBF",
    "Fitted",
    "GPBelief",
    "Kernel",
    "KernelOperator",
    "Matern12",
    "Matern32",
    "Matern52",
    "Prediction",
    "RationalQuadratic",
    "condition",
    "fit",
    "kernel_operator",
    "load",
    "save",
]
