"""Parts of bench_performance.py against linear_operator, and against scipy's eigsh.

linear_operator (what gpytorch computes with) runs in its own process, under another Python, and
is timed in turns with us. What each side gives is measured as well: residuals, orthogonality, the
error of the inverse, and of the log-determinant over seeds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse.linalg as spla
from bench_trace import oracles
from side_by_side import Peer, against, in_turns

import pnkrylov as pk
from pnkrylov.preconditioners import pivoted_cholesky
from pnkrylov.preconditioners.split import precondition
from pnkrylov.trace import logdet

NOISE = 0.01
RANK = 15  # of the preconditioner: gpytorch's default
SEEDS = 12


def residual(matrix, rhs, solution):
    return float(np.linalg.norm(rhs - matrix @ np.asarray(solution)) / np.linalg.norm(rhs))


def steps_for(A, matrix, v, target, preconditioner=None):
    """The least number of steps whose mean has a residual of at most `target`."""

    def mapped(vectors):
        return vectors if preconditioner is None else preconditioner.inv_sqrt_mv(vectors)

    operator = precondition(A, preconditioner)
    basis = pk.lanczos(operator, mapped(v), min(len(v), 300))
    rows, T = np.asarray(mapped(basis.vectors)), np.asarray(basis.tridiagonal())
    for steps in range(1, len(T) + 1):
        first = np.eye(1, steps)[0] * float(basis.start_norm)
        mean = np.linalg.solve(T[:steps, :steps], first) @ rows[:steps]
        if residual(matrix, np.asarray(v), mean) <= target:
            return steps
    return len(T)


def solve_records(peer, matrix, rhs, rounds):
    """A belief about the solution against preconditioned conjugate gradients, at equal residual."""
    A, v, key = pk.as_operator(jnp.asarray(matrix)), jnp.asarray(rhs), jax.random.key(0)
    P = pivoted_cholesky(A, RANK, damping=NOISE, alpha=NOISE)
    for tolerance in (1e-2, 1e-6):
        target = residual(matrix, rhs, peer.array("solve", tolerance, RANK)["solution"])
        steps = steps_for(A, matrix, v, target, P)

        def solve(steps=steps):
            preconditioner = pivoted_cholesky(A, RANK, damping=NOISE, alpha=NOISE)
            options = {"num_steps": steps, "check_symmetric": False}
            return pk.solve(A, v, key=key, preconditioner=preconditioner, **options)

        belief = solve()
        rows = {
            "pnkrylov": lambda solve=solve: solve().covariance,
            "linear_operator": peer.row("solve", tolerance, RANK),
        }
        exact = np.linalg.solve(matrix, rhs)
        error = np.linalg.norm(exact - np.asarray(belief.mean))
        yield {
            "what": f"solve, preconditioned, tolerance {tolerance:g}",
            "ours": {"residual": residual(matrix, rhs, belief.mean), "steps": steps,
                     "products": int(belief.stats.num_matvecs),
                     "error over predicted": float(error / belief.error.error_norm)},
            "theirs": {"residual": target},
            "rows": against(in_turns(rows, rounds), "pnkrylov"),
        }  # fmt: skip


def orthogonality(rows):
    """Largest entry of Q Q^T - I."""
    rows = np.asarray(rows)
    return float(np.max(np.abs(rows @ rows.T - np.eye(len(rows)))))


def lanczos_record(peer, matrix, rhs, rounds, steps=100):
    """Lanczos with full re-orthogonalisation on both sides, as many steps."""
    A, v = pk.as_operator(jnp.asarray(matrix)), jnp.asarray(rhs)
    made = peer.array("lanczos", steps)
    rows = {
        "pnkrylov": lambda: pk.lanczos(A, v, steps),
        "linear_operator": peer.row("lanczos", steps),
    }
    return {
        "what": "Lanczos",
        "ours": {"steps": steps, "orthogonality": orthogonality(pk.lanczos(A, v, steps).vectors)},
        "theirs": {"steps": made["vectors"].shape[-1],
                   "orthogonality": orthogonality(made["vectors"].reshape(len(rhs), -1).T)},
        "rows": against(in_turns(rows, rounds), "pnkrylov"),
    }  # fmt: skip


def root_record(peer, matrix, rounds, steps=100):
    """A root of the inverse by as many Lanczos steps; ours has a bulk, and probes to scale it."""
    A, key = pk.as_operator(jnp.asarray(matrix)), jax.random.key(0)
    exact = np.linalg.inv(matrix)

    def inverse():
        options = {"num_steps": steps - 20, "lookahead": 20, "check_symmetric": False}
        return pk.inverse(A, key=key, **options)

    def accuracy(approximation):
        difference = np.linalg.norm(exact - approximation) / np.linalg.norm(exact)
        return {"error": float(difference), "trace": float(np.trace(approximation) / trace)}

    trace = np.trace(exact)
    belief = inverse()
    root = peer.array("root of the inverse", steps)["root"]
    covariance = np.asarray(belief.covariance.as_matrix())
    rows = {
        "pnkrylov": lambda: inverse().covariance,
        "linear_operator": peer.row("root of the inverse", steps),
    }
    return {
        "what": "root of the inverse",
        "ours": {"steps": steps, "products": int(belief.stats.num_matvecs)} | accuracy(covariance),
        "theirs": {"steps": root.shape[1]} | accuracy(root @ root.T),
        "rows": against(in_turns(rows, rounds), "pnkrylov"),
    }


def logdet_records(peer, matrix, rounds, budgets=(50, 100, 200)):
    """log det: for each setting of theirs, our least budget whose error is no larger.

    linear_operator's probes are preconditioned, so that only log det P^-1 A is estimated; ours
    are tried with and without the same preconditioner, at every budget.
    """
    A = pk.as_operator(jnp.asarray(matrix))
    exact = float(np.linalg.slogdet(matrix)[1])

    def estimate(budget, seed, preconditioned):
        P = pivoted_cholesky(A, RANK, damping=NOISE, alpha=NOISE) if preconditioned else None
        return logdet(A, key=jax.random.key(seed), budget=budget, preconditioner=P).value

    def error(values):
        return float(np.sqrt(np.mean((np.array(values) - exact) ** 2)) / len(matrix))

    own = {
        (budget, preconditioned): error(
            [float(estimate(budget, seed, preconditioned)) for seed in range(SEEDS)]
        )
        for budget in budgets
        for preconditioned in (False, True)
    }
    for samples, steps in ((10, 20), (40, 20), (160, 20)):
        setting = samples, steps, RANK
        theirs = error([peer.call("logdet", *setting, s)["value"] for s in range(SEEDS)])
        reached = [choice for choice, value in own.items() if value <= theirs]
        budget, preconditioned = min(reached) if reached else max(own)
        rows = {
            "pnkrylov": functools.partial(estimate, budget, 0, preconditioned),
            "linear_operator": peer.row("logdet", *setting, 0),
        }
        yield {
            "what": f"log-determinant, {samples} probes of {steps} steps",
            "reached": bool(reached),
            "ours": {"error": own[budget, preconditioned], "products": budget,
                     "preconditioned": preconditioned},
            "theirs": {"error": theirs, "products": samples * steps},
            "rows": against(in_turns(rows, rounds), "pnkrylov"),
        }  # fmt: skip


def gp_part(rounds, python, size=2000):
    """The rows against linear_operator, on a kernel matrix with noise in float64."""
    matrix = oracles.SPECTRA["kernel-5d"](size)[0]
    rhs = np.random.default_rng(1).standard_normal(size)
    given = {"kernel": matrix - NOISE * np.eye(size), "noise": np.array(NOISE), "rhs": rhs}
    with Peer(python, "peers_gpytorch.py", given) as peer:
        yield from solve_records(peer, matrix, rhs, rounds)
        yield lanczos_record(peer, matrix, rhs, rounds)
        yield root_record(peer, matrix, rounds)
        yield from logdet_records(peer, matrix, rounds)


# --- leading eigenpairs ------------------------------------------------------------------------


def pairs_of(basis, count):
    """The `count` largest Ritz pairs of a run: values, and vectors as rows."""
    values, vectors = np.linalg.eigh(np.asarray(basis.tridiagonal()))
    weights = np.ascontiguousarray(vectors[:, -count:].T)
    return values[-count:], weights @ np.asarray(basis.vectors)


def worst_residual(matvec, values, rows):
    """Largest residual norm of the pairs, relative to the largest value."""
    images = np.stack([matvec(row) for row in rows])
    left = np.linalg.norm(images - values[:, None] * rows, axis=1)
    return float(left.max() / np.abs(values).max())


def steps_for_pairs(operator, start, matvec, count, target, most=600):
    """The least even number of steps at which the leading pairs have residuals below `target`."""
    basis = pk.lanczos(operator, operator.unravel(start), min(most, operator.size))
    T, rows = np.asarray(basis.tridiagonal()), np.asarray(basis.vectors)
    for steps in range(count + 2, len(T) + 1, 2):
        values, vectors = np.linalg.eigh(T[:steps, :steps])
        pairs = values[-count:], vectors[:, -count:].T @ rows[:steps]
        if worst_residual(matvec, *pairs) <= target:
            return steps
    return len(T)


def eigen_part(rounds, size=2000, count=10):
    """Leading eigenpairs by one Lanczos run against ARPACK's restarted one, at equal residual."""
    for name in ("power-law-1", "kernel-5d"):
        matrix = oracles.SPECTRA[name](size)[0]
        matrix = (matrix + matrix.T) / 2
        A = pk.as_operator(jnp.asarray(matrix))
        start = np.random.default_rng(1).standard_normal(size)
        v = jnp.asarray(start)
        for tolerance in (1e-3, 1e-8):

            def arpack(tolerance=tolerance, matrix=matrix, start=start):
                counted = []

                def matvec(vector):
                    counted.append(None)
                    return matrix @ vector

                operator = spla.LinearOperator(matrix.shape, matvec, dtype=matrix.dtype)
                values, vectors = spla.eigsh(operator, count, which="LA", tol=tolerance, v0=start)
                return values, vectors.T, len(counted)

            values, rows, products = arpack()
            target = worst_residual(matrix.__matmul__, values, rows)
            steps = steps_for_pairs(A, v, matrix.__matmul__, count, target)

            def ours(A=A, v=v, steps=steps):
                return pairs_of(pk.lanczos(A, v, steps), count)

            reached = worst_residual(matrix.__matmul__, *ours())
            yield {
                "what": f"{count} leading eigenpairs, {name}, d = {size}",
                "ours": {"residual": reached, "products": steps},
                "theirs": {"residual": target, "products": products},
                "rows": against(in_turns({"pnkrylov": ours, "eigsh": arpack}, rounds), "pnkrylov"),
            }
