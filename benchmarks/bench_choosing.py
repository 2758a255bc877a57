"""One question, every method that answers it: time and error, on the curvature of one network.

The GGN of a 64-130-10 network on scikit-learn's digits, d = 9760, float64: of 200 images (the
Jacobian fits, 140 MB) and of all 1797 (it has more rows than columns, 1.3 GB: "exact" is then a
dense Cholesky factor). Each well and ill conditioned, by the prior precision.

CPU seconds of one core, which other work on the machine disturbs least. Run it pinned:
`taskset -c 0 python benchmarks/bench_choosing.py` (about ten minutes; `--images` and `--hidden`
make it smaller). Writes results/choosing.json.
"""

import argparse
import json
import os
import time

# One thread for everybody; before the first import that reads it.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from record import RESULTS, provenance, save
from sklearn.datasets import load_digits

import pnkrylov as pk
from pnkrylov.ciq import SpectralBounds, inv_sqrt_matvec
from pnkrylov.laplace import Categorical, curvature
from pnkrylov.preconditioners import LowRank
from pnkrylov.trace import logdet

FULL_HIDDEN = 130
NUM_DRAWS = 16
SOLVE_RTOL = 1e-6
DRAW_RTOL = 1e-3
ROUGH_STEPS = 10
BUDGETS = (400, 100)
LONGEST = 3000  # steps after which a method counts as not having got there
LONGEST_DRAW = 800
LONGEST_RUN = 1200  # of a belief, whose re-orthogonalisation grows with the square
ONCE = 20.0  # seconds: what takes longer in all is not called again
PRECISIONS = {"well": 10.0, "ill": 1e-3}
KEY = jax.random.key(0)


def apply(params, x):
    (w, b), (v, c) = params
    return jnp.tanh(x @ w + b[None, :]) @ v + c[None, :]


def trained(hidden, count):
    """Parameters after gradient descent on all images, `count` of these, and 40 held-out ones."""
    inputs, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(inputs))
    inputs, labels = jnp.asarray(inputs[order] / 16), jnp.asarray(labels[order])
    rng = np.random.default_rng(1)

    def layer(a, b):
        return jnp.asarray(rng.normal(size=(a, b)) / a**0.5), jnp.zeros(b)

    def loss(params):
        logits = jax.nn.log_softmax(apply(params, inputs))
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))

    @jax.jit
    def step(params):
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, jax.grad(loss)(params))

    params = [layer(64, hidden), layer(hidden, 10)]
    for _ in range(500):
        params = step(params)
    return params, (inputs[:count], labels[:count]), inputs[-40:]


def influence(params, image):
    """The right-hand side: how the parameters move the confidence about one held-out image."""
    gradient = jax.grad(lambda p: jax.nn.logsumexp(apply(p, image)))(params)
    return jax.flatten_util.ravel_pytree(gradient)[0]


class Damped(eqx.Module):
    """`G + alpha I` on flat vectors, one or rows of them, and draws of N(0, G + alpha I)."""

    curvature: curvature.Curvature
    alpha: jax.Array

    def mv(self, v):
        return self.curvature.mv(v) + self.alpha * v

    def block(self, rows):
        return self.curvature.block_mv(rows) + self.alpha * rows


@eqx.filter_jit
def conjugate_gradients(A, rows, rtol):
    """Plain CG on every row at once; returns solutions and the number of steps."""
    goal = rtol**2 * jnp.sum(rows**2, axis=1)

    def unfinished(state):
        *_, square, step = state
        return jnp.any(square > goal) & (step < LONGEST)

    def step(state):
        x, r, p, square, count = state
        image = A.block(p)
        length = square / jnp.maximum(jnp.sum(p * image, axis=1), 1e-300)
        x, r = x + length[:, None] * p, r - length[:, None] * image
        new = jnp.sum(r**2, axis=1)
        p = r + (new / jnp.maximum(square, 1e-300))[:, None] * p
        return x, r, p, new, count + 1

    start = jnp.zeros_like(rows), rows, rows, jnp.sum(rows**2, axis=1), 0
    x, *_, square, count = jax.lax.while_loop(unfinished, step, start)
    return x, count, jnp.all(square <= goal)


def draws_by_solving(A, params, images, key, num):
    """N(0, A^-1) as A^-1 w with w from N(0, A): perturb and solve; needs a root of G."""
    logits, pull = jax.vjp(lambda p: apply(p, images), params)
    roots = jnp.sqrt(jax.nn.softmax(logits))
    noise = jax.random.normal(key, (num, *logits.shape))
    inner = jnp.sum(roots[None] * noise, axis=2, keepdims=True)
    cotangents = roots[None] * (noise - roots[None] * inner)
    rows = jax.vmap(lambda c: jax.flatten_util.ravel_pytree(pull(c)[0])[0])(cotangents)
    white = jax.random.normal(jax.random.fold_in(key, 1), rows.shape)
    return conjugate_gradients(A, rows + jnp.sqrt(A.alpha) * white, DRAW_RTOL)


def timed(function):
    """Result and CPU seconds, the least of up to four calls: the first one compiles."""
    seconds = []
    while len(seconds) < 4 and sum(seconds) < ONCE:
        start = time.process_time()
        result = jax.block_until_ready(function())
        seconds.append(time.process_time() - start)
    return result, min(seconds)


class Exact:
    """The answers: from the Gram matrix of the Jacobian, or from a dense Cholesky factor."""

    def __init__(self, G, alpha, dense):
        self.alpha = alpha
        if dense is None:
            self.low_rank = LowRank(G.square_root_rows(), alpha)
            jax.block_until_ready(self.low_rank)
        else:
            matrix = dense.copy()
            matrix[np.diag_indices_from(matrix)] += alpha
            self.low_rank = None
            self.factor = scipy.linalg.cholesky(matrix, lower=True, overwrite_a=True)

    def solve(self, rows):
        if self.low_rank is not None:
            return np.asarray(self.low_rank.inv_mv(rows))
        return scipy.linalg.cho_solve((self.factor, True), np.asarray(rows).T).T

    def draw(self, key, num, size):
        noise = jax.random.normal(key, (num, size))
        if self.low_rank is not None:
            return self.low_rank.inv_sqrt_mv(noise)
        return scipy.linalg.solve_triangular(self.factor.T, np.asarray(noise).T, lower=False)

    def logdet(self):
        if self.low_rank is not None:
            return float(self.low_rank.logdet())
        return 2 * float(np.sum(np.log(np.diag(self.factor))))


def solves(A, v, exact, setup, note):
    """One solve to a tolerance, and a rough one with an error bar."""
    truth = exact.solve(v[None])
    truth = truth + exact.solve(v[None] - A.block(jnp.asarray(truth)))  # refined once
    truth = truth[0]
    norm = np.linalg.norm(truth)
    _, seconds = timed(lambda: exact.solve(v[None]))
    note("solve", "exact", setup + seconds, error=0.0)
    (x, steps, done), seconds = timed(lambda: conjugate_gradients(A, v[None], SOLVE_RTOL))
    error = np.linalg.norm(np.asarray(x)[0] - truth) / norm
    note("solve", "plain CG", seconds, error=error, products=int(steps), reached=bool(done))
    operator = pk.as_operator(A.mv, like=v)
    for question, needed in (("solve", int(steps)), ("solve with error bar", ROUGH_STEPS)):
        length = min(needed, LONGEST_RUN)
        call = lambda length=length: pk.solve(operator, v, key=KEY, num_steps=length)  # noqa: E731
        belief, seconds = timed(call)
        mistake = np.asarray(belief.mean) - truth
        note(
            question,
            "Krylov belief",
            seconds,
            error=np.linalg.norm(mistake) / norm,
            predicted=float(belief.error.error_norm) / norm,
            covered=float(np.mean(np.abs(mistake) <= 1.96 * np.asarray(belief.std()))),
            products=int(belief.stats.num_matvecs),
            reached=needed <= LONGEST_RUN,
        )
    note("solve with error bar", "exact", setup, error=0.0)


def draws(A, G, params, data, tests, exact, setup, note):
    """S draws from N(0, A^-1), and how wrong the variances of held-out outputs are."""
    size = G.size
    operator = pk.as_operator(A.mv, like=jnp.zeros(size))
    jacobian = jax.jacrev(lambda p: apply(p, tests)[:, 0])(params)
    rows = jax.vmap(lambda tree: jax.flatten_util.ravel_pytree(tree)[0])(jacobian)
    truth = np.sum(np.asarray(rows) * exact.solve(rows), axis=1)
    _, seconds = timed(lambda: exact.draw(KEY, NUM_DRAWS, size))
    note("draws", "exact", setup + seconds, error=0.0)

    for budget in BUDGETS:

        def by_belief(budget=budget):
            belief = pk.inverse(operator, key=KEY, budget=budget)
            return belief, belief.sample(KEY, NUM_DRAWS)

        (belief, _), seconds = timed(by_belief)
        error = np.sqrt(np.mean((np.asarray(belief.push(rows).variance()) / truth - 1) ** 2))
        products = int(belief.stats.num_matvecs)
        note("draws", f"Krylov belief ({budget})", seconds, error=error, products=products)
    run = pk.lanczos(operator, jax.random.normal(KEY, (size,)), 30)
    largest = float(jnp.linalg.eigvalsh(run.tridiagonal())[-1])
    bounds = SpectralBounds.known(float(A.alpha), 1.05 * largest)
    noise = jax.random.normal(KEY, (NUM_DRAWS, size))
    for method, name in (("lanczos", "Lanczos-FA"), ("ciq", "CIQ")):

        def by_root(method=method):
            return inv_sqrt_matvec(
                operator,
                noise,
                bounds=bounds,
                rtol=DRAW_RTOL,
                method=method,
                max_steps=LONGEST_DRAW,
                max_basis_bytes=2**32,
                throw=False,
            )

        solution, seconds = timed(by_root)
        note(
            "draws",
            name,
            seconds,
            error=float(jnp.max(solution.error_bound)),
            products=int(solution.num_matvecs),
            reached=bool(jnp.all(solution.converged)),
        )
    call = lambda: draws_by_solving(A, params, data[0], KEY, NUM_DRAWS)  # noqa: E731
    (_, steps, done), seconds = timed(call)
    products = NUM_DRAWS * int(steps)
    note("draws", "plain CG", seconds, error=DRAW_RTOL, products=products, reached=bool(done))


def log_determinants(A, exact, setup, note):
    """log det A; the error is per eigenvalue."""
    size = A.curvature.size
    truth = exact.logdet()
    note("log-determinant", "exact", setup, error=0.0)
    operator = pk.as_operator(A.mv, like=jnp.zeros(size))
    for name, options in (
        *((f"Krylov belief ({budget})", {"budget": budget}) for budget in BUDGETS),
        (f"SLQ ({BUDGETS[0]})", {"budget": BUDGETS[0], "method": "slq", "depth": 20}),
    ):
        call = lambda options=options: logdet(operator, key=KEY, **options)  # noqa: E731
        found, seconds = timed(call)
        note(
            "log-determinant",
            name,
            seconds,
            error=abs(float(found.value) - truth) / size,
            predicted=float(found.standard_error) / size,
            covered=float(float(found.lower) <= truth <= float(found.upper)),
            products=int(found.num_matvecs),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=FULL_HIDDEN)
    parser.add_argument("--images", type=int, nargs="*", default=[200, 1797])
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    records, cases = [], []
    for count in arguments.images:
        params, data, tests = trained(arguments.hidden, count)
        G = curvature.ggn(apply, params, data, Categorical())
        dense, forming = None, 0.0
        if G.num_rows > G.size:
            start = time.process_time()
            dense = np.array(G.as_matrix())
            forming = time.process_time() - start
        v = influence(params, tests[:1])
        for condition, alpha in PRECISIONS.items():
            exact, setup = timed(lambda alpha=alpha, G=G, dense=dense: Exact(G, alpha, dense))
            setup += forming
            A = Damped(G, jnp.asarray(alpha))
            case = f"{count} images, {condition} conditioned"
            _, product = timed(lambda A=A, v=v: eqx.filter_jit(A.mv)(v))
            largest = pk.lanczos(pk.as_operator(A.mv, like=v), v, 30)
            case_record = {
                "case": case,
                "images": count,
                "condition": condition,
                "alpha": alpha,
                "size": G.size,
                "rows": G.num_rows,
                "row_bytes": G.row_bytes,
                "kappa": float(jnp.linalg.eigvalsh(largest.tridiagonal())[-1]) / alpha,
                "product_seconds": product,
                "exact_setup_seconds": setup,
            }
            cases.append(case_record)
            print(case_record, flush=True)

            def note(question, method, seconds, error, case=case, records=records, **found):
                record = {"case": case, "question": question, "method": method}
                record |= {"seconds": seconds, "error": float(error), **found}
                records.append(record)
                print(record, flush=True)

            solves(A, v, exact, setup, note)
            log_determinants(A, exact, setup, note)
            draws(A, G, params, data, tests, exact, setup, note)
            del exact
        if arguments.hidden == FULL_HIDDEN:
            keep(str(count), cases, records)
        cases, records = [], []


def keep(part, cases, records):
    """Adds one part to the result, with its own provenance."""
    path = RESULTS / "choosing.json"
    content = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    content.pop("provenance", None)
    content["settings"] = {
        "num_draws": NUM_DRAWS, "solve_rtol": SOLVE_RTOL, "draw_rtol": DRAW_RTOL,
        "rough_steps": ROUGH_STEPS, "longest_draw": LONGEST_DRAW, "longest_run": LONGEST_RUN,
    }  # fmt: skip
    own = {"provenance": provenance(), "cases": cases, "records": records}
    content["parts"] = dict(
        sorted((content["parts"] | {part: own}).items(), key=lambda x: len(x[0]))
    )
    print(save("choosing", content))


if __name__ == "__main__":
    main()
