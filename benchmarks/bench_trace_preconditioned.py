"""Traces with and without a preconditioner, at equal products. Result: trace_preconditioned.json.

An exponential spectrum of condition 1e6, and a P whose eigenvalues relative to A lie in 0.4 to
2.5. No product is charged for P: what it costs to find one is in bench_preconditioners.py.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import record

from pnkrylov.preconditioners import Dense
from pnkrylov.trace import logdet, trace_inverse

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import oracles

SIZE, SEEDS, BUDGETS = 300, 20, (60, 200)


def problem():
    """A, and P within a factor of 2.5 of it in every direction."""
    matrix, _ = oracles.SPECTRA["exponential-1e6"](SIZE)
    inside = oracles.with_spectrum(np.random.default_rng(0).uniform(0.4, 2.5, SIZE), 3)
    factor = np.linalg.cholesky(matrix)
    shape = factor @ np.linalg.inv(inside) @ factor.T
    return matrix, Dense(jnp.asarray((shape + shape.T) / 2))


def measure(estimate, matrix, truth, budget, preconditioner):
    """Root-mean-square relative error, and the coverage of the 95 % intervals."""
    errors, covered = [], 0
    for seed in range(SEEDS):
        found = estimate(
            matrix, key=jax.random.key(seed), budget=budget, preconditioner=preconditioner
        )
        errors.append(float(found.value) / truth - 1)
        covered += bool(float(found.lower) <= truth <= float(found.upper))
    return {"error": float(np.sqrt(np.mean(np.square(errors)))), "coverage": covered / SEEDS}


def main():
    """Both estimates, both budgets, with and without P."""
    jax.config.update("jax_enable_x64", True)
    matrix, preconditioner = problem()
    truths = {
        trace_inverse: float(np.trace(np.linalg.inv(matrix))),
        logdet: float(np.linalg.slogdet(matrix)[1]),
    }
    records = [
        {
            "function": estimate.__name__,
            "budget": budget,
            "plain": measure(estimate, jnp.asarray(matrix), truth, budget, None),
            "preconditioned": measure(estimate, jnp.asarray(matrix), truth, budget, preconditioner),
        }
        for estimate, truth in truths.items()
        for budget in BUDGETS
    ]
    print(record.save("trace_preconditioned", {"seeds": SEEDS, "records": records}))


if __name__ == "__main__":
    main()
