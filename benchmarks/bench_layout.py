"""What resolving the look-ahead vectors is worth: predictive KL of both layouts at equal products.

A spectrum like that of a GGN of a small CNN (METHOD section 13) in its eigenbasis, d = 4000, with a
damping of a tenth, once and ten times the fitted one. Writes results/layout.json.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from record import save
from tqdm import tqdm

import pnkrylov as pk

POINTS, OUTPUTS = 20, 10


def spectrum(size):
    """Eigenvalues of the bare GGN: those that METHOD section 13 gives, log-log interpolated."""
    index = np.log(np.arange(1, size + 1))
    knots = np.log([1, 10, 50, 100, 200, 500, 2000, size])
    values = np.log([13015, 656, 81, 20, 2.8, 0.05, 1e-6, 1e-9])
    return np.where(np.arange(size) < 2000, np.exp(np.interp(index, knots, values)), 0)


def jacobians(bare, rng):
    """Output Jacobians of test points: large along stiff directions, as those of a network."""
    stiff = np.sqrt(bare / bare.sum())
    soft = np.sqrt(np.sqrt(bare) / np.sqrt(bare).sum())
    shape = (POINTS, OUTPUTS, len(bare))
    return 3 * stiff * rng.standard_normal(shape) + soft * rng.standard_normal(shape)


def divergence(exact, approximate):
    """KL(N(0, exact) || N(0, approximate))."""
    ratio = np.linalg.solve(approximate, exact)
    return 0.5 * (np.trace(ratio) - len(exact) - np.linalg.slogdet(ratio)[1])


def mean_divergence(covariance_of, rows, eigenvalues):
    """Mean over the test points, of a function (outputs, d) -> (outputs, outputs)."""
    return float(
        np.mean([divergence((J / eigenvalues) @ J.T, np.asarray(covariance_of(J))) for J in rows])
    )


def low_rank_plus(basis, block, variance):
    """`Q^T block Q + variance (I - Q^T Q)` for orthonormal rows, as a push-forward."""

    def push(J):
        inside = J @ basis.T
        return inside @ block @ inside.T + variance * (J @ J.T - inside @ inside.T)

    return push


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4000)
    parser.add_argument("--steps", type=int, nargs="+", default=[120, 230, 450])
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    bare = spectrum(arguments.size)
    records = []
    jobs = [
        (damping, steps, seed)
        for damping in (0.14, 1.4, 14.0)
        for steps in arguments.steps
        for seed in range(arguments.seeds)
    ]
    for damping, steps, seed in tqdm(jobs, desc="layouts"):
        eigenvalues = bare + damping
        rows = jacobians(bare, np.random.default_rng(seed))
        operator = jax.tree_util.Partial(jnp.multiply, jnp.asarray(eigenvalues))
        record = {"damping": damping, "steps": steps, "lookahead": 20, "seed": seed}
        for layout in ("paper", "resolve-all"):
            belief = pk.inverse(
                operator,
                like=jnp.asarray(eigenvalues),
                key=jax.random.key(seed),
                num_steps=steps,
                lookahead=20,
                layout=layout,
                driver="compiled",
            )
            push = belief.covariance.push
            record[layout] = mean_divergence(
                lambda J, push=push: push(jnp.asarray(J)), rows, eigenvalues
            )
        basis = np.asarray(belief.run.basis.vectors)
        block = np.linalg.inv(np.asarray(belief.run.basis.tridiagonal()))
        krylov = low_rank_plus(basis, block, 1 / damping)
        record["krylov + 1/damping"] = mean_divergence(krylov, rows, eigenvalues)
        count = len(basis)
        eigen = low_rank_plus(
            np.eye(count, len(bare)), np.diag(1 / eigenvalues[:count]), 1 / damping
        )
        record["eigen + 1/damping"] = mean_divergence(eigen, rows, eigenvalues)
        records.append(record)
    for damping, steps, _ in jobs[:: arguments.seeds]:
        own = [r for r in records if (r["damping"], r["steps"]) == (damping, steps)]
        means = {
            name: np.mean([r[name] for r in own])
            for name in ("paper", "resolve-all", "krylov + 1/damping", "eigen + 1/damping")
        }
        print(damping, steps, {name: f"{value:.3g}" for name, value in means.items()})
    print(save("layout", {"size": arguments.size, "records": records}))


if __name__ == "__main__":
    main()
