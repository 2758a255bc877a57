"""Hamiltonian Monte Carlo: the condition number that predicts its work, and how to reduce it.

condition number -> acceptance and step size -> burn-in and variational preconditioners -> whitening
by a belief
"""

from pnkrylov.hmc.acceptance import (
    VALID_ACCEPTANCE,
    InferredConditionNumber,
    condition_number_from_acceptance,
    expected_acceptance,
    leapfrog_steps,
    step_size_for,
)
from pnkrylov.hmc.burn_in import BurnIn, optimal_burn_in, preconditioned_condition_number
from pnkrylov.hmc.condition import ConditionNumber, condition_number
from pnkrylov.hmc.variational import (
    diagonal_preconditioner,
    remaining_covariance,
    reverse_kl_condition_number,
    reverse_kl_preconditioner,
)
from pnkrylov.hmc.whitening import CovarianceRoot, WhitenedTarget, covariance_root, whiten

__all__ = [
    "VALID_ACCEPTANCE",
    "BurnIn",
    "ConditionNumber",
    "CovarianceRoot",
    "InferredConditionNumber",
    "WhitenedTarget",
    "condition_number",
    "condition_number_from_acceptance",
    "covariance_root",
    "diagonal_preconditioner",
    "expected_acceptance",
    "leapfrog_steps",
    "optimal_burn_in",
    "preconditioned_condition_number",
    "remaining_covariance",
    "reverse_kl_condition_number",
    "reverse_kl_preconditioner",
    "step_size_for",
    "whiten",
]
