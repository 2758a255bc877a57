"""Likelihoods: what the outputs of a network say about the targets.

Every family is a proper density, so that its negative logarithm, summed over the data, is the loss
of METHOD section 9, and gives the Hessian with respect to the outputs in closed form. Outputs are
`(n, K)` for n examples; nothing here knows the network.
"""

from pnkrylov.laplace.likelihoods._base import Likelihood, TargetError
from pnkrylov.laplace.likelihoods._custom import Custom
from pnkrylov.laplace.likelihoods._discrete import Bernoulli, Categorical, Poisson
from pnkrylov.laplace.likelihoods._regression import Gaussian, HeteroscedasticGaussian

__all__ = [
    "Bernoulli",
    "Categorical",
    "Custom",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "TargetError",
]
