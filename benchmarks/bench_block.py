"""Block runs: are their beliefs calibrated, and when do they pay? Beside separate solves.

Calibration: coverage of nominal 95 % intervals on four spectra, d = 600, k in {2, 8}, at equal
products. Time: one block solve against k separate ones, at equal steps and at equal error, on dense
matrices with d = 2000 and a sparse one with d = 19881 (five-point Laplacian). Writes
results/block.json.
"""

import argparse
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from record import save

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import oracles
import pnkrylov as pk
from pnkrylov.block import solve_block

SPECTRA = ("bulk+outliers", "power-law-1", "power-law-2", "exponential")
FUNCTIONALS = 400
NORMAL_95 = 1.959964


def coverage(errors, deviations):
    return float(np.mean(np.abs(errors) <= NORMAL_95 * deviations))


def calibration_case(A, V, exact, steps, seed):
    """One block belief and k separate ones, of equally many steps, against the truth."""
    key, rng = jax.random.key(seed), np.random.default_rng([seed, steps, len(exact)])
    functionals = rng.standard_normal((FUNCTIONALS, len(exact[0])))
    weights = rng.standard_normal((FUNCTIONALS, len(exact)))
    block = solve_block(A, V, key=key, num_steps=steps)
    errors = exact - np.asarray(block.mean)
    lengths = np.linalg.norm(errors, axis=1)
    sigma = np.asarray(block.covariance.block_mv(jnp.asarray(functionals)))
    spread = np.sum(sigma * functionals, axis=1)
    between = np.asarray(block.rhs_covariance)
    along = errors @ functionals.T
    mixed = np.sum(weights.T * along, axis=0)
    mixed_variance = np.einsum("fi,ij,fj->f", weights, between, weights) * spread
    record = {
        "relative_error": float(np.mean(lengths / np.linalg.norm(exact, axis=1))),
        "ratios": (np.asarray(block.predicted_error) / lengths).tolist(),
        "functionals": coverage(along, np.sqrt(np.diag(between)[:, None] * spread[None, :])),
        "coordinates": coverage(errors, np.asarray(block.std())),
        "mixed": coverage(mixed, np.sqrt(mixed_variance)),
        "matvecs": int(block.stats.num_matvecs),
        "lookahead": int(block.stats.lookahead) // len(exact),
        "complete": bool(block.run.basis.exhausted()),
    }
    separate = {"functionals": [], "coordinates": [], "matvecs": 0, "relative_error": []}
    for v, x in zip(V, exact, strict=True):
        one = pk.solve(A, v, key=key, num_steps=steps)
        error = x - np.asarray(one.mean)
        sigma = np.asarray(one.covariance.block_mv(jnp.asarray(functionals)))
        deviations = np.sqrt(np.sum(sigma * functionals, axis=1))
        separate["functionals"].append(coverage(functionals @ error, deviations))
        separate["coordinates"].append(coverage(error, np.asarray(one.std())))
        separate["relative_error"].append(np.linalg.norm(error) / np.linalg.norm(x))
        separate["matvecs"] += int(one.stats.num_matvecs)
    means = {name: float(np.mean(value)) for name, value in separate.items()}
    return record | {"separate": means | {"matvecs": separate["matvecs"]}}


def calibration(seeds, size=600):
    records = []
    for name in SPECTRA:
        for seed in range(seeds):
            matrix, _ = oracles.SPECTRA[name](size, seed)
            A = pk.as_operator(jnp.asarray(matrix))
            for count in (2, 8):
                V = jnp.asarray(np.random.default_rng(seed).standard_normal((count, size)))
                exact = np.linalg.solve(matrix, np.asarray(V).T).T
                for steps in (5, 20):
                    labels = {"spectrum": name, "k": count, "steps": steps, "seed": seed}
                    records.append(labels | calibration_case(A, V, exact, steps, seed))
                    print(records[-1], flush=True)
    return records


def seconds(functions, repeats):
    """Median wall time of each function, compiled before; in turns, so that all see one machine."""
    for function in functions:
        jax.block_until_ready(function())
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function())
            own.append(time.perf_counter() - start)
    return [float(np.median(own)) for own in times]


def laplacian(side=141, damping=0.01):
    """Five-point Laplacian on a square plus a multiple of the identity."""
    line = scipy.sparse.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(side, side))
    one = scipy.sparse.eye_array(side)
    matrix = scipy.sparse.kron(line, one) + scipy.sparse.kron(one, line)
    return (matrix + damping * scipy.sparse.eye_array(side**2)).tocsr()


def steps_to_reach(A, v, exact, target, most=400):
    """Steps of a single run until its relative error is below the target; None if it is not."""
    basis = pk.lanczos(A, v, most)
    Q, T = np.asarray(basis.vectors), np.asarray(basis.tridiagonal())
    for steps in range(10, most + 1, 10):
        first = np.zeros(steps)
        first[0] = float(basis.start_norm)
        x = Q[:steps].T @ np.linalg.solve(T[:steps, :steps], first)
        if np.linalg.norm(exact - x) <= target * np.linalg.norm(exact):
            return steps
    return None


def timing(repeats, steps=50):
    dense, _ = oracles.power_law(2000)
    hard, _ = oracles.exponential(2000)
    sparse = laplacian()
    problems = {
        "power law, dense": (dense, dense),
        "exponential, dense": (hard, hard),
        "Laplacian, sparse": (sparse, None),
    }
    records = []
    for name, (matrix, full) in problems.items():
        A = pk.as_operator(matrix if full is None else jnp.asarray(matrix))
        for count in (2, 8):
            V = jnp.asarray(np.random.default_rng(0).standard_normal((count, A.size)))
            if full is None:
                exact = scipy.sparse.linalg.spsolve(matrix.tocsc(), np.asarray(V).T).T
            else:
                exact = np.linalg.solve(full, np.asarray(V).T).T
            records.append({"problem": name, "d": A.size, "k": count})
            records[-1] |= timed(A, V, exact, steps, repeats)
            print(records[-1], flush=True)
    return records


def timed(A, V, exact, steps, repeats):
    key, size = jax.random.key(0), np.linalg.norm(exact, axis=1)

    def block():
        return solve_block(A, V, key=key, num_steps=steps)

    def separate(number):
        return [pk.solve(A, v, key=key, num_steps=number) for v in V]

    belief, beliefs = block(), separate(steps)
    error = float(np.mean(np.linalg.norm(exact - np.asarray(belief.mean), axis=1) / size))
    means = np.stack([np.asarray(one.mean) for one in beliefs])
    needed = steps_to_reach(A, V[0], exact[0], error)
    runs = [block, lambda: separate(steps), lambda: separate(needed or steps)]
    times = seconds(runs, repeats)
    return {
        "block_seconds": times[0],
        "block_matvecs": int(belief.stats.num_matvecs),
        "block_error": error,
        "separate_seconds": times[1],
        "separate_matvecs": sum(int(one.stats.num_matvecs) for one in beliefs),
        "separate_error": float(np.mean(np.linalg.norm(exact - means, axis=1) / size)),
        # None: 400 steps of a single run do not reach the error of the block run.
        "equal_error_steps": needed,
        "equal_error_seconds": None if needed is None else times[2],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="block", help="name of the result file")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    content = {
        "calibration": calibration(arguments.seeds),
        "timing": timing(arguments.repeats),
    }
    print(save(arguments.name, content))


if __name__ == "__main__":
    main()
