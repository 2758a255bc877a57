"""Bad input to every public function: the documented error, or a right answer.

The calls are in `fuzz_cases_<part>.py`; what they say is printed in docs/bad_input.md.
"""

import importlib
import pathlib
import pkgutil
import sys

import jax
import pytest

import fuzz_cases
import fuzz_cases_beliefs
import fuzz_cases_ciq
import fuzz_cases_core
import fuzz_cases_gp
import fuzz_cases_hmc
import fuzz_cases_laplace
import fuzz_cases_likelihoods
import fuzz_cases_preconditioners
import pnkrylov

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import tables_bad_input  # noqa: E402

PARTS = [
    fuzz_cases_core,
    fuzz_cases_beliefs,
    fuzz_cases_ciq,
    fuzz_cases_preconditioners,
    fuzz_cases_hmc,
    fuzz_cases_gp,
    fuzz_cases_laplace,
    fuzz_cases_likelihoods,
]
TARGETS = [target for part in PARTS for target in part.TARGETS]
NAMES = list(dict.fromkeys(target.name for target in TARGETS))

# Public callables without a case, each with the reason.
RESULT = "holds what a function of the library returns; it is not built by users"
ABSTRACT = "abstract: its subclasses have cases"
NO_ARGUMENT = "takes no argument that could be wrong"
ERROR = "an error or a set of messages"
EXEMPT = {
    "pnkrylov.BlockSolveBelief": RESULT,
    "pnkrylov.DenseGaussian": RESULT,
    "pnkrylov.Estimate": RESULT,
    "pnkrylov.GaussianBelief": ABSTRACT,
    "pnkrylov.InverseBelief": RESULT,
    "pnkrylov.KrylovBasis": RESULT,
    "pnkrylov.KrylovCovariance": RESULT,
    "pnkrylov.NotFiniteError": ERROR,
    "pnkrylov.NotPositiveDefiniteError": ERROR,
    "pnkrylov.NotSymmetricError": ERROR,
    "pnkrylov.PnkrylovError": ERROR,
    "pnkrylov.RESULTS": ERROR,
    "pnkrylov.SPDOperator": ABSTRACT,
    "pnkrylov.SolveBelief": RESULT,
    "pnkrylov.block.BlockKrylovBasis": RESULT,
    "pnkrylov.block.BlockSolveBelief": RESULT,
    "pnkrylov.BlockInverseBelief": RESULT,
    "pnkrylov.block.BlockInverseBelief": RESULT,
    "pnkrylov.block.MatrixGaussian": RESULT,
    "pnkrylov.ciq.CIQ_RESULTS": ERROR,
    "pnkrylov.ciq.Quadrature": RESULT,
    "pnkrylov.ciq.ShiftedSolution": RESULT,
    "pnkrylov.ciq.SpectralBounds": RESULT,
    "pnkrylov.ciq.SquareRootSolution": RESULT,
    "pnkrylov.ciq.ToleranceNotMetError": ERROR,
    "pnkrylov.gp.Fitted": RESULT,
    "pnkrylov.gp.GPBelief": RESULT,
    "pnkrylov.gp.Kernel": ABSTRACT,
    "pnkrylov.gp.KernelOperator": RESULT,
    "pnkrylov.gp.Prediction": RESULT,
    "pnkrylov.hmc.BurnIn": RESULT,
    "pnkrylov.hmc.ConditionNumber": RESULT,
    "pnkrylov.hmc.CovarianceRoot": ABSTRACT,
    "pnkrylov.hmc.InferredConditionNumber": RESULT,
    "pnkrylov.hmc.WhitenedTarget": RESULT,
    "pnkrylov.laplace.Curvature": RESULT,
    "pnkrylov.laplace.LaplacePosterior": RESULT,
    "pnkrylov.laplace.Likelihood": ABSTRACT,
    "pnkrylov.laplace.Predictive": RESULT,
    "pnkrylov.laplace.TargetError": ERROR,
    "pnkrylov.laplace.Trained": RESULT,
    "pnkrylov.laplace.Tuned": RESULT,
    "pnkrylov.preconditioners.Preconditioner": ABSTRACT,
    "pnkrylov.preconditioners.PreconditionedOperator": RESULT,
    "pnkrylov.laplace.Bernoulli": NO_ARGUMENT,
    "pnkrylov.laplace.Categorical": NO_ARGUMENT,
    "pnkrylov.laplace.HeteroscedasticGaussian": NO_ARGUMENT,
    "pnkrylov.laplace.Poisson": NO_ARGUMENT,
}


def public_callables():
    """Dotted names of all that the package and its subpackages export, and of the front doors."""
    modules = [pnkrylov]
    for found in pkgutil.iter_modules(pnkrylov.__path__, "pnkrylov."):
        if found.ispkg and not found.name.endswith("interop"):
            modules.append(importlib.import_module(found.name))
    named = [(module, name) for module in modules for name in getattr(module, "__all__", ())]
    trace = importlib.import_module("pnkrylov.trace")
    named += [(trace, name) for name in ("trace_inverse", "logdet", "trace_function")]
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module, name in named
        if callable(getattr(module, name))
    }


def test_every_public_callable_has_cases_or_a_reason_to_have_none():
    covered = {target.name.split(" ")[0] for target in TARGETS}
    # `pnkrylov.laplace.Poisson.check` covers what Poisson takes.
    names = set(public_callables())
    missing = sorted(names - covered - set(EXEMPT))
    assert not missing, f"no bad input for {missing}: add a Target to fuzz_cases_*.py"
    assert not set(EXEMPT) & covered, "exempt, but has cases"
    gone = set(EXEMPT) - names
    assert not gone, f"exempt, but not public: {gone}"


def test_there_are_five_hundred_distinct_bad_inputs():
    cases = [(case.target.name, case.title) for target in TARGETS for case in target.cases()]
    assert len(cases) >= 500
    assert len(set(cases)) == len(cases), "the same case twice"


def outcomes(name, dtype):
    """Every case of one callable, and what the call did."""
    cases = [case for target in TARGETS if target.name == name for case in target.cases()]
    return [(case, fuzz_cases.run(case, dtype)) for case in cases]


@pytest.mark.one_precision
@pytest.mark.parametrize("name", NAMES)
def test_bad_input(name, dtype):
    found = outcomes(name, dtype)
    complaints = [fuzz_cases.complaint(case, outcome) for case, outcome in found]
    complaints = [complaint for complaint in complaints if complaint]
    assert not complaints, "\n".join(complaints)
    undocumented = undocumented_kinds(found)
    assert not undocumented, f"the docstring of {name} does not mention {undocumented}"
    if dtype == tables_bad_input.DTYPE and not jax.config.jax_debug_nans:
        rows = [tables_bad_input.row(*pair) for pair in found]
        assert tables_bad_input.committed(name) == rows, "run scripts/tables_bad_input.py"


def undocumented_kinds(found):
    """Kinds of the errors that were raised as they should be, but that no docstring promises."""
    return {
        type(outcome.error).__name__
        for case, outcome in found
        if not fuzz_cases.documented(case.target, outcome.error)
    }
