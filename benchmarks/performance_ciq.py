"""The part of bench_performance.py about `K^{-1/2} b`: CIQ against that of linear_operator.

The short form of ciq_vs_linear_operator.py (which wants both libraries in one environment): for
each of our settings the peer's knobs are searched for the run with the fewest products whose error
is at most ours, and the two are timed in turns.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from side_by_side import Peer, against, in_turns

from pnkrylov.ciq import inv_sqrt_matvec, spectral_bounds

# The peer's knobs: Lanczos steps for its bounds, quadrature points, tolerance.
KNOBS = tuple(itertools.product((20,), (7, 10, 15, 20), (1e-3, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6, 1e-7)))


def problem(size, condition, count):
    """Matrix with log-uniform eigenvalues, right-hand sides as rows, and the exact results."""
    rng = np.random.default_rng(0)
    vectors, _ = np.linalg.qr(rng.standard_normal((size, size)))
    values = np.geomspace(1 / condition, 1, size)
    matrix = (vectors * values) @ vectors.T
    rows = rng.standard_normal((count, size))
    return (matrix + matrix.T) / 2, rows, (rows @ vectors * values**-0.5) @ vectors.T


def largest_error(value, exact):
    difference = np.linalg.norm(np.asarray(value) - exact, axis=1)
    return float(np.max(difference / np.linalg.norm(exact, axis=1)))


def run_peer(peer, exact, knobs):
    """Products and error of one run of the peer."""
    made = peer.array("inverse square root", *knobs)
    return int(made["products"]), largest_error(made["value"], exact)


def cheapest(peer, exact, found, error):
    """The knobs with the fewest products whose error is at most `error`, and their run; or None.

    `found` may be that of another number of right-hand sides: it only orders the candidates.
    """
    for knobs, (_, expected) in sorted(found.items(), key=lambda item: (item[1][0], item[0])):
        if expected <= 1.5 * error:
            run = run_peer(peer, exact, knobs)
            if run[1] <= error:
                return knobs, run
    return None


def settings(A):
    """The ways to call us: as the sampler does, for any right-hand side, with bounds at hand."""
    return {
        "samples": {"random_rhs": True},
        "any right-hand side": {"key": jax.random.key(1)},
        "bounds known": {"bounds": spectral_bounds(A, key=jax.random.key(2))},
    }


def ciq_part(rounds, python, size=2000, condition=1e3):
    """One and 32 right-hand sides; where the peer is nowhere as exact, only our error is kept."""
    found = {}
    for count in (1, 32):
        matrix, rows, exact = problem(size, condition, count)
        A, b = jnp.asarray(matrix), jnp.asarray(rows)
        given = {"kernel": matrix, "noise": np.zeros(()), "rhs": rows[0], "block": rows}
        with Peer(python, "peers_gpytorch.py", given) as peer:
            found = found or {knobs: run_peer(peer, exact, knobs) for knobs in KNOBS}
            for what, options in settings(A).items():
                solve = functools.partial(inv_sqrt_matvec, A, b, rtol=1e-4, **options)
                solution = solve()
                error = largest_error(solution.value, exact)
                own = {"error": error, "products": int(solution.num_matvecs)}
                record = {"what": what, "rows of b": count, "ours": own}
                match = cheapest(peer, exact, found, error)
                if match is not None:
                    knobs, (products, reached) = match
                    both = {
                        "pnkrylov": lambda solve=solve: solve().value,
                        "linear_operator": peer.row("inverse square root", *knobs),
                    }
                    record["theirs"] = {"error": reached, "products": products, "knobs": knobs}
                    record["rows"] = against(in_turns(both, rounds), "pnkrylov")
                yield record
