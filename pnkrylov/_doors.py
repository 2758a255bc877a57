"""What the front doors `solve` and `inverse`, and the beliefs they return, check alike."""

from typing import Any, Literal

from jaxtyping import PRNGKeyArray

from pnkrylov._archive import SavedRun
from pnkrylov.basis import is_concrete
from pnkrylov.operators import SPDOperator, as_operator
from pnkrylov.preconditioners import Preconditioner, precondition
from pnkrylov.runs import Run

# After a refinement, probes of an older level are kept while they know omega this well.
KEEP_PROBES = 0.05


def require_key(key: PRNGKeyArray | None) -> PRNGKeyArray:
    """The key, which has no default."""
    if key is None:
        raise TypeError("key is missing: pass a random key, for example key=jax.random.key(0).")
    return key


def without_probes(max_seconds: float | None, num_probes: int) -> float | None:
    """The part of a time limit for everything but the probes: three quarters if there are any."""
    return max_seconds if max_seconds is None or num_probes == 0 else 0.75 * max_seconds


def check_compatible(preconditioner: Preconditioner | None, **others: Any) -> None:
    """Nothing that names the spectrum of A goes with a preconditioner, which changes it."""
    if preconditioner is None:
        return
    for name, value in others.items():
        if value is not None and not (is_concrete(value) and value == 0):
            raise ValueError(
                f"{name}={value} and preconditioner= do not go together: the run is on "
                "P^-1/2 A P^-1/2, whose spectrum is another. Pass the shifted operator as A, and "
                "a preconditioner built for it."
            )


def require_plain(run: Run) -> None:
    """Refuses a shift of a preconditioned run."""
    if run.preconditioner is not None:
        raise ValueError(
            "shift: a preconditioned run knows one operator only, because P^-1/2 (A + alpha I) "
            "P^-1/2 is no shift of P^-1/2 A P^-1/2. Run again on A + alpha I."
        )


def same_operator(A: Any, run: SavedRun) -> SPDOperator:
    """The operator that a run goes on with, preconditioned like it; not under `jit`."""
    # Block runs have no preconditioner.
    preconditioner = getattr(run, "preconditioner", None)
    operator = precondition(as_operator(A, like=run.structure.tree), preconditioner)
    if not is_concrete((operator, run)):
        raise ValueError(
            "refine changes shapes with the values of the run, so it cannot be traced: call it "
            "outside jit/vmap/grad."
        )
    return operator


def refining_driver(progress: bool, driver: str) -> Literal["compiled", "host"]:
    """The loop that a run goes on in."""
    return "host" if progress or driver == "host" else "compiled"
