"""Laplace posteriors of neural networks: exact where they can be, beliefs where they cannot.

likelihoods -> curvature (GGN, Hessian, Fisher as operators) -> covariances -> posterior (draws,
predictions, evidence) -> evidence (tuning), marglik (training), metrics
"""

from pnkrylov.laplace.curvature import (
    Curvature,
    empirical_fisher,
    fisher,
    fully_linear,
    ggn,
    gradient,
    hessian,
    loss,
)
from pnkrylov.laplace.evidence import Tuned, tune_by_evidence, tune_by_validation
from pnkrylov.laplace.fitting import fit
from pnkrylov.laplace.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    TargetError,
)
from pnkrylov.laplace.marglik import Trained, marglik_train
from pnkrylov.laplace.posterior import LaplacePosterior
from pnkrylov.laplace.predictive import Predictive
from pnkrylov.laplace.storage import load

__all__ = [
    "Bernoulli",
    "Categorical",
    "Curvature",
    "Custom",
    "Gaussian",
    "HeteroscedasticGaussian",
    "LaplacePosterior",
    "Likelihood",
    "Poisson",
    "Predictive",
    "TargetError",
    "Trained",
    "Tuned",
    "empirical_fisher",
    "fisher",
    "fit",
    "fully_linear",
    "ggn",
    "gradient",
    "hessian",
    "load",
    "loss",
    "marglik_train",
    "tune_by_evidence",
    "tune_by_validation",
]
