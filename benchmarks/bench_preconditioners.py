"""What each preconditioner is worth: KL of the InverseBelief to the truth, and msMINRES iterations.

Two problems: the exponential spectrum of METHOD section 4 (condition number 1e6, d = 1000), given
as a dense matrix and as data rows, and the GGN of a small network trained on scikit-learn's digits.
All runs spend the same number of products; set-up is counted. Writes results/preconditioners.json.

    python benchmarks/bench_preconditioners.py [--quick]
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from record import RESULTS, provenance, save
from tqdm import tqdm

import pnkrylov as pk
from pnkrylov.ciq import inv_sqrt_matvec
from pnkrylov.krylov import KrylovBasis
from pnkrylov.operators import as_operator
from pnkrylov.preconditioners import (
    BlockDiagonal,
    Dense,
    Diagonal,
    LowRank,
    Preconditioner,
    choose_observations,
    fully_linear,
    nystrom,
    one_observation,
    pivoted_cholesky,
    randomly_pivoted_cholesky,
    sub_sampled,
)

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from digits_network import ggn
from oracles import exponential

# Products for the bulk, the same for all: 4 probes of at most 10 steps, and 20 steps ahead.
PROBES = 40
CIQ_STEPS = 1000
RUN: dict[str, Any] = {"lookahead": 20, "num_probes": 4, "probe_depth": 10}


@dataclasses.dataclass
class Problem:
    """A dense SPD matrix and the families to try on it."""

    name: str
    matrix: np.ndarray
    budget: int
    families: dict[str, Callable[[jax.Array], "Setup"]]


@dataclasses.dataclass
class Setup:
    """A preconditioner, and its set-up in products with A (fractions for work on part of it)."""

    preconditioner: Preconditioner | None
    products: float = 0.0
    flops: float = 0.0


def both_divergences(factor: np.ndarray, covariance: np.ndarray) -> tuple[float, float]:
    """KL(exact || approximate) and KL(approximate || exact) per dimension, both centred.

    `factor` is the Cholesky factor of the exact precision; the first is the convention of
    bench_layout.py.
    """
    ratio = np.linalg.eigvalsh(factor.T @ covariance @ factor)
    logs = np.log(ratio)
    return float(np.mean(1 / ratio - 1 + logs)) / 2, float(np.mean(ratio - 1 - logs)) / 2


def with_exact_trace(basis: KrylovBasis, inner: np.ndarray) -> np.ndarray:
    """The resolved part and an isotropic rest that makes the trace exact: no probe's error."""
    rows = np.asarray(basis.vectors)
    block = np.linalg.inv(np.asarray(basis.tridiagonal()))
    left = np.trace(np.linalg.inv(inner)) - np.trace(block)
    rest = np.eye(len(inner)) - rows.T @ rows
    return rows.T @ block @ rows + left / (len(inner) - len(rows)) * rest


def inner_matrix(problem: Problem, P: Preconditioner | None) -> np.ndarray:
    """`P^-1/2 A P^-1/2`, dense."""
    if P is None:
        return problem.matrix
    root = np.asarray(P.inv_sqrt_mv(jnp.eye(len(problem.matrix))))
    inner = root @ problem.matrix @ root
    return (inner + inner.T) / 2


def products_left(problem: Problem, setup: Setup) -> int:
    """Rounded down to tens, so that few shapes have to be compiled."""
    return int((problem.budget - setup.products) // 10 * 10)


def measure(problem: Problem, family: str, seed: int) -> dict[str, Any]:
    """One record.

    A divergence does not change under the map `P^-1/2`, so the belief about the inner matrix, held
    densely, has the KL of the preconditioned belief, and all families share their compiled runs.
    `front_door` checks that on the real path.
    """
    key = jax.random.key(seed)
    setup = problem.families[family](jax.random.fold_in(key, 1))
    P = setup.preconditioner
    inner = inner_matrix(problem, P)
    values = np.linalg.eigvalsh(inner)
    matrix = as_operator(jnp.asarray(inner))
    left = products_left(problem, setup)
    belief = pk.inverse(matrix, key=key, num_steps=left - 20 - PROBES - 2, **RUN, driver="compiled")
    covariance = np.asarray(belief.covariance.as_matrix())
    factor = np.linalg.cholesky(inner)
    forward, backward = both_divergences(factor, covariance)
    floor = both_divergences(factor, with_exact_trace(belief.run.basis, inner))
    right = jax.random.normal(jax.random.fold_in(key, 2), (1, len(inner)), jnp.float64)
    root = inv_sqrt_matvec(
        matrix,
        right,
        key=key,
        rtol=1e-3,
        method="ciq",
        num_points=12,
        max_steps=CIQ_STEPS,
        throw=False,
    )
    return {
        "problem": problem.name,
        "family": family,
        "seed": seed,
        "budget": problem.budget,
        "setup_products": setup.products,
        "setup_flops": setup.flops,
        "floats": 0 if P is None else P.num_floats,
        "resolved": belief.run.basis.num_rows,
        "matvecs": int(belief.run.num_matvecs),
        "kl_exact_to_belief": forward,
        "kl_belief_to_exact": backward,
        "kl_with_exact_trace": floor[0],
        "kappa": float(values[-1] / values[0]),
        "msminres_iterations": int(np.max(np.asarray(root.iterations))),
        "ciq_products": int(root.num_matvecs),
        "ciq_converged": bool(np.all(np.asarray(root.converged))),
    }


def front_door(problem: Problem, family: str, seed: int) -> dict[str, Any]:
    """The same divergences by `pk.inverse(A, preconditioner=P)`, on the original matrix."""
    key = jax.random.key(seed)
    setup = problem.families[family](jax.random.fold_in(key, 1))
    steps = products_left(problem, setup) - 20 - PROBES - 2
    belief = pk.inverse(
        as_operator(jnp.asarray(problem.matrix)),
        key=key,
        num_steps=steps,
        preconditioner=setup.preconditioner,
        **RUN,
        driver="compiled",
    )
    covariance = np.asarray(belief.covariance.as_matrix())
    forward, backward = both_divergences(np.linalg.cholesky(problem.matrix), covariance)
    exact = float(np.trace(np.linalg.inv(problem.matrix)))
    return {
        "problem": problem.name,
        "family": family,
        "seed": seed,
        "kl_exact_to_belief": forward,
        "kl_belief_to_exact": backward,
        "trace_error": float(np.trace(covariance)) / exact - 1,
        "matvecs": int(belief.run.num_matvecs),
    }


def exponential_problem(size: int, budget: int) -> Problem:
    """Eigenvalues 1e2 exp(-i log(1e6) / d); as data, N = 10 d rows and a damping of 1e-4."""
    matrix, values = exponential(size, condition=1e6)
    damping = float(values[0])
    num_data = 10 * size
    z = np.random.default_rng(0).standard_normal((num_data, size))
    white, vectors = np.linalg.eigh(z.T @ z)
    eigenvalues, basis = np.linalg.eigh(matrix - damping * np.eye(size))
    root = (basis * np.sqrt(np.maximum(eigenvalues, 0))) @ basis.T
    data = z @ ((vectors / np.sqrt(white)) @ vectors.T) @ root  # data^T data = matrix - damping I
    dense = jnp.asarray(matrix)

    def sample(count: int) -> Callable[[jax.Array], Setup]:
        def build(key: jax.Array) -> Setup:
            chosen = np.asarray(jax.random.permutation(key, num_data))[:count]
            rows = jnp.asarray(data[chosen])
            P = sub_sampled(
                rows[:, None, :],
                jnp.ones((count, 1, 1), rows.dtype),
                num_data=num_data,
                alpha=damping,
            )
            rank = min(count, size)
            return Setup(P, count / (2 * num_data), 2.0 * count * rank * size)

        return build

    def by_rows(factor: Any, rank: int) -> Callable[[jax.Array], Setup]:
        def build(key: jax.Array) -> Setup:
            if factor is pivoted_cholesky:
                P = pivoted_cholesky(dense, rank, damping=0.99 * damping, alpha=3 * damping)
            else:
                P = factor(dense, rank, key, damping=0.99 * damping, alpha=3 * damping)
            # `rank` rows of d entries, where a product reads d^2.
            return Setup(P, rank / size, 6.0 * rank**2 * size)

        return build

    def blocks(count: int) -> Callable[[jax.Array], Setup]:
        def build(_: jax.Array) -> Setup:
            parts = np.split(np.arange(size), count)
            P = BlockDiagonal([Dense(dense[np.ix_(part, part)]) for part in parts])
            return Setup(P, 1 / count, 10.0 * count * (size / count) ** 3)

        return build

    def direction(key: jax.Array) -> Setup:
        score = jnp.asarray(root) @ jax.random.normal(key, (size,), jnp.float64)
        return Setup(fully_linear(score, damping), 0.5)

    def one_row(key: jax.Array) -> Setup:
        row = jnp.asarray(data[int(jax.random.randint(key, (), 0, num_data))])[None]
        ones = jnp.ones((1, 1), row.dtype)
        return Setup(one_observation(row, ones, scale=float(num_data), alpha=damping))

    function = as_operator(lambda v: dense @ v, like=dense[0])
    r = size // 10
    families = {
        "none": lambda key: Setup(None),
        "diagonal, exact": lambda key: Setup(Diagonal.of(dense), 0),
        "diagonal, 32 probes": lambda key: Setup(
            Diagonal.of(function, key=key, num_probes=32, floor=damping), 32
        ),
        "fully linear": direction,
        "one observation": one_row,
        f"sub-sampled, {2 * r} of {num_data} rows": sample(2 * r),
        f"sub-sampled, {40 * r} of {num_data} rows": sample(40 * r),
        f"pivoted Cholesky, {r} rows read": by_rows(pivoted_cholesky, r),
        f"pivoted Cholesky, {6 * r} rows read": by_rows(pivoted_cholesky, 6 * r),
        f"randomly pivoted Cholesky, {6 * r} rows read": by_rows(randomly_pivoted_cholesky, 6 * r),
        f"pivoted Cholesky, {r} products": lambda key: Setup(
            pivoted_cholesky(function, r, diagonal=jnp.diagonal(dense)), r
        ),
        f"Nystrom, {r} products": lambda key: Setup(nystrom(function, r, key), r),
        "block-diagonal, 10 dense blocks": blocks(10),
    }
    return Problem("exponential 1e6", matrix, budget, families)


def digits_problem(num_data: int, damping: float, budget: int) -> Problem:
    """The GGN of a 64-16-10 network on all digits, with its weight decay as damping."""
    matrix, jacobians, hessians, gradient, layers = ggn(num_data, damping)
    size, outputs = len(matrix), hessians.shape[1]
    dense = jnp.asarray(matrix)
    function = as_operator(lambda v: dense @ v, like=dense[0])
    traces = jnp.asarray(np.trace(hessians, axis1=1, axis2=2))
    diagonal = jnp.diagonal(dense)

    def weighted(key: jax.Array, count: int) -> tuple[np.ndarray, jax.Array]:
        chosen, weights = choose_observations(traces, count, key)
        return np.asarray(chosen), weights

    def cost(count: int) -> float:
        return count * outputs / (2 * num_data)

    def sample(count: int, *, uniform: bool, factor: float) -> Callable[[jax.Array], Setup]:
        def build(key: jax.Array) -> Setup:
            if uniform:
                chosen = np.asarray(jax.random.permutation(key, num_data))[:count]
                how: dict[str, Any] = {"num_data": num_data}
            else:
                chosen, weights = weighted(key, count)
                how = {"weights": weights}
            J, H = jnp.asarray(jacobians[chosen]), jnp.asarray(hessians[chosen])
            P = sub_sampled(J, H, alpha=factor * damping, **how)
            # Choosing by Hessians takes a forward pass, a quarter of a product.
            rows = count * outputs
            work = 2.0 * rows * min(rows, size) * size
            return Setup(P, cost(count) + (0 if uniform else 0.25), work)

        return build

    def sampled_rows(key: jax.Array, count: int) -> jax.Array:
        chosen, weights = weighted(key, count)
        values, vectors = np.linalg.eigh(hessians[chosen])
        half = np.einsum("bpo,bo->bop", vectors, np.sqrt(np.maximum(values, 0)))
        rows = np.einsum("bop,bpd->bod", half, jacobians[chosen])
        return jnp.asarray(rows * np.sqrt(np.asarray(weights))[:, None, None]).reshape(-1, size)

    def nystrom_of_sample(count: int, rank: int) -> Callable[[jax.Array], Setup]:
        def build(key: jax.Array) -> Setup:
            rows = sampled_rows(key, count)
            sampled = as_operator(lambda v: rows.T @ (rows @ v) + damping * v, like=diagonal)
            P = nystrom(sampled, rank, key, damping=0.999 * damping)
            # The sampled rows are computed once; the sketch is dense linear algebra with them.
            work = 4.0 * (count * outputs + rank) * rank * size
            return Setup(_without_products(P), cost(count) + 0.25, work)

        return build

    def layer_blocks(key: jax.Array) -> Setup:
        ends = np.cumsum([0, *layers])
        parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        P = BlockDiagonal([Dense(dense[part, part]) for part in parts])
        # All N O rows once, and the blocks in memory.
        return Setup(P, outputs / 2, 10.0 * sum(n**3 for n in layers))

    def sampled_blocks(count: int) -> Callable[[jax.Array], Setup]:
        def build(key: jax.Array) -> Setup:
            rows = sampled_rows(key, count)
            ends = np.cumsum([0, *layers])
            parts = [rows[:, a:b] for a, b in itertools.pairwise(ends)]
            P = BlockDiagonal([LowRank(part, damping) for part in parts])
            return Setup(P, cost(count) + 0.25, 2.0 * sum(n**3 for n in layers))

        return build

    def one_point(key: jax.Array) -> Setup:
        i = int(jax.random.randint(key, (), 0, num_data))
        J, H = jnp.asarray(jacobians[i]), jnp.asarray(hessians[i])
        return Setup(one_observation(J, H, scale=float(num_data), alpha=damping), cost(1))

    def by_products(factor: Any, rank: int) -> Callable[[jax.Array], Setup]:
        def build(key: jax.Array) -> Setup:
            known = {"damping": 0.999 * damping, "alpha": damping}
            if factor is nystrom:
                return Setup(nystrom(function, rank, key, damping=0.999 * damping), rank)
            known["diagonal"] = diagonal  # from all N O rows once
            if factor is pivoted_cholesky:
                return Setup(pivoted_cholesky(function, rank, **known), rank + outputs / 2)
            return Setup(factor(function, rank, key, **known), rank + outputs / 2)

        return build

    quarter, half = num_data // 16, num_data // 4
    families = {
        "none": lambda key: Setup(None),
        "diagonal, exact": lambda key: Setup(Diagonal(diagonal), outputs / 2),
        "diagonal, 32 probes": lambda key: Setup(
            Diagonal.of(function, key=key, num_probes=32, floor=damping), 32
        ),
        "fully linear": lambda key: Setup(fully_linear(jnp.asarray(gradient), damping), 0.5),
        "one observation": one_point,
        f"sub-sampled, {quarter} uniform": sample(quarter, uniform=True, factor=3.0),
        f"sub-sampled, {quarter} by Hessian": sample(quarter, uniform=False, factor=3.0),
        f"sub-sampled, {half} uniform": sample(half, uniform=True, factor=1.0),
        f"sub-sampled, {half} by Hessian": sample(half, uniform=False, factor=1.0),
        "pivoted Cholesky, 50 products": by_products(pivoted_cholesky, 50),
        "randomly pivoted Cholesky, 50 products": by_products(randomly_pivoted_cholesky, 50),
        "Nystrom, 50 products": by_products(nystrom, 50),
        f"Nystrom of the sampled curvature, {half} by Hessian, rank 600": nystrom_of_sample(
            half, 600
        ),
        "block-diagonal, layers": layer_blocks,
        f"block-diagonal, {half} by Hessian": sampled_blocks(half),
    }
    return Problem(f"GGN digits, damping {damping:g}", matrix, budget, families)


def _without_products(P: LowRank) -> LowRank:
    """Its products were with the sampled curvature, not with A."""
    return LowRank(jnp.sqrt(P.squares)[:, None] * P.vectors, P.alpha)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing is written")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="part of a family's name; replaces its records")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if arguments.quick:
        problems = [exponential_problem(100, 90), digits_problem(200, 1.0, 90)]
    else:
        problems = [exponential_problem(1000, 200), digits_problem(1797, 1.0, 200)]
    jobs = [
        (problem, family, seed)
        for problem in problems
        for family in problem.families
        for seed in range(arguments.seeds)
        if arguments.only in family
    ]
    records = []
    for problem, family, seed in tqdm(jobs, desc="preconditioners"):
        records.append(measure(problem, family, seed))
        r = records[-1]
        tqdm.write(
            f"{r['problem']}, {family}, seed {seed}: KL {r['kl_exact_to_belief']:.3g} and "
            f"{r['kl_belief_to_exact']:.3g} (exact trace {r['kl_with_exact_trace']:.3g}), "
            f"kappa {r['kappa']:.3g}, resolved {r['resolved']}, "
            f"msMINRES {r['msminres_iterations']}, CIQ {r['ciq_products']}"
        )
    checks = []
    for problem in problems:
        own = [r for r in records if r["problem"] == problem.name and r["seed"] == 0]
        if not own:
            continue
        best = min(own, key=lambda r: r["kl_exact_to_belief"])
        checks.append(front_door(problem, best["family"], 0))
        print(checks[-1])
    if not arguments.quick:
        print(write(records, checks))


def write(records: list[dict[str, Any]], checks: list[dict[str, Any]]) -> pathlib.Path:
    """Adds the records to the file, in place of older ones of the same problem, family and seed."""
    path = RESULTS / "preconditioners.json"
    old = json.loads(path.read_text()) if path.exists() else {"records": [], "front_door": []}

    def merged(name: str, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
        def identity(r: dict[str, Any]) -> tuple[Any, ...]:
            return r["problem"], r["family"], r["seed"]

        return list(({identity(r): r for r in old[name]} | {identity(r): r for r in new}).values())

    first = "python benchmarks/bench_preconditioners.py --seeds 1"
    commands = [*old.get("commands", [first]), provenance()["command"]]
    content = {
        "commands": list(dict.fromkeys(commands)),
        "records": merged("records", records),
        "front_door": merged("front_door", checks),
    }
    return save("preconditioners", content, packages=("scikit-learn", "lineax"))


if __name__ == "__main__":
    main()
