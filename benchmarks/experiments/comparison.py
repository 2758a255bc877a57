"""Methods are made, judged against the exact posterior at test points, and kept on disk.

What both experiments share: records of scores, Lanczos runs side by side, and the lists of methods.
"""

import json
import time
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import methods
import numpy as np
import prototypes
import scores
from tqdm import tqdm

from pnkrylov.krylov import KrylovBasis, lanczos


class Scored:
    """Scores by name, kept in one JSON file of the cache."""

    def __init__(self, path):
        self.path = path
        self.records = json.loads(path.read_text()) if path.exists() else {}

    def add(self, name, record):
        self.records[name] = record
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.records, indent=1))
        unfinished.replace(self.path)


class Judge:
    """Test points, the exact covariances there, and the record of what was judged."""

    def __init__(self, problem, exact, count, factors, path):
        self.problem, self.count, self.scored = problem, count, Scored(path)
        self.logits = problem.logits(count)
        self.labels = problem.test_labels[:count]
        self.references = {}
        made = self._covariances([exact(factor) for factor in factors], "exact")
        for factor, reference in zip(factors, made, strict=True):
            self.references[factor] = reference
            self.record("exact", factor, None, None, reference, rest=np.nan)
            self.record("map", factor, None, None, 0 * reference, rest=0.0)

    def _covariances(self, approximations, what):
        chunks = self.problem.test_jacobians(self.count)
        with tqdm(total=self.count, desc=what, unit="point", mininterval=5) as bar:
            return methods.covariances(
                approximations, chunks, report=lambda: bar.update(min(50, self.count - bar.n))
            )

    def record(self, method, factor, size, seed, covariance, **costs):
        """Scores covariances, unless that was done."""
        name = self.name((method, factor, size, seed))
        if name in self.scored.records:
            return
        reference = self.references[factor]
        judged = {"method": method, "factor": factor, "s": size, "seed": seed}
        judged |= scores.predictive(self.logits, covariance, self.labels)
        if method == "map":
            judged |= {"kl": np.inf, "kl_over_points": np.nan, "log_trace": -np.inf}
        else:
            judged |= scores.fidelity(reference, covariance)
        self.scored.add(name, judged | costs)

    def judge(self, jobs, what):
        """Scores approximations.

        Args:
            jobs: (method, factor, s, seed) -> a function that makes the approximation.
            what: for the progress bar.
        """
        missing = [job for job in jobs if self.name(job) not in self.scored.records]
        made = []
        for job in tqdm(missing, desc=f"{what}: making", mininterval=5):
            started = time.process_time()
            made.append((job, jobs[job](), time.process_time() - started))
        found = self._covariances([item[1] for item in made], what) if made else []
        for (job, approximation, seconds), covariance in zip(made, found, strict=True):
            rest = approximation.rest
            costs = {
                "products": approximation.products,
                "stored": approximation.stored,
                "seconds": seconds,
                "rest": float(np.mean(rest)),
            }
            self.record(*job, covariance, **costs)

    def name(self, job):
        """The name of a job in the record."""
        method, factor, size, seed = job
        return f"{method} {factor:g} {size} {seed} {self.count}"

    def has_seed(self, seed, sizes):
        """Whether all Krylov methods of a seed were judged at so many sizes, fitted prior."""
        found = [r for r in self.records() if r["seed"] == seed and r["factor"] == 1]
        last = [r for r in found if r["method"] == "krylov alone, s + 20"]
        return len(last) >= sizes

    def records(self):
        """What was judged at these test points."""
        ending = f" {self.count}"
        return [r for name, r in self.scored.records.items() if name.endswith(ending)]


def runs(operator, keys, num_steps, dtype, path):
    """Lanczos runs from several start vectors side by side, so that G is read once for all.

    Returns:
        The bases, and the processor seconds of one run.
    """
    if not path.exists():
        starts = jnp.stack([_start(key, operator.size, dtype) for key in keys])
        started = time.process_time()
        found = jax.block_until_ready(_side_by_side(operator, starts, num_steps))
        seconds = (time.process_time() - started) / len(keys)
        names = ("vectors", "alpha", "beta", "next_vector", "filled", "start_norm")
        arrays = {name: np.asarray(getattr(found, name)) for name in names}
        unfinished = path.with_suffix(".unfinished.npz")
        np.savez(unfinished, **arrays, seconds=seconds)
        unfinished.replace(path)
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    seconds = float(arrays.pop("seconds"))
    bases = [
        KrylovBasis(**{name: jnp.asarray(values[index]) for name, values in arrays.items()})
        for index in range(len(keys))
    ]
    return bases, seconds


@eqx.filter_jit
def _side_by_side(operator, starts, num_steps):
    return jax.vmap(lambda start: lanczos(operator, start, num_steps, driver="compiled"))(starts)


def _start(key, size, dtype):
    # The start vector that `inverse` draws from this key.
    return jax.random.normal(jax.random.split(key, 3)[0], (size,), dtype)


def krylov_jobs(run, seed, factor, shift, sizes, directions=None):
    """All Krylov methods of one seed; every size has one total of products, that of Sigma_m.

    Args:
        run: long enough for the largest total.
        seed, factor: names of the records.
        shift: lambda.
        sizes: every s.
        directions: (k, p), mixtures of output gradients for `ours_along`, or None.
    """
    jobs = {}
    for size in sizes:
        ahead = size + methods.LOOKAHEAD
        total = ahead + methods.NUM_PROBES * methods.probe_steps(run, size, shift)
        single = total - methods.LOOKAHEAD - methods.probe_steps(run, size, shift, 1)
        own = {
            "sigma_m": partial(methods.sigma_m, run, size, shift),
            "ours": partial(methods.ours_budget, run, total, shift, num_probes=1),
            "ours, no probes": partial(prototypes.ours_without_probes, run, total, shift),
            "ours, same run": partial(methods.ours, run, size, shift),
            "krylov + 1/lambda": partial(methods.krylov_shift, run, total, shift),
            "krylov + 1/lambda, s + 20": partial(methods.krylov_shift, run, ahead, shift),
        }
        if factor == 1:
            own |= {
                "sigma_m, 1 probe": partial(methods.sigma_m, run, single, shift, num_probes=1),
                "ours, 8 probes": partial(methods.ours_budget, run, total, shift),
                "sigma_m, no coupling": partial(methods.sigma_m_uncoupled, run, size, shift),
                "sigma_m, 1/lambda bulk": partial(methods.sigma_m_prior_bulk, run, size, shift),
                "krylov + 1/lambda, s": partial(methods.krylov_shift, run, size, shift),
                "krylov alone, s + 20": partial(methods.krylov_shift, run, ahead, shift, rest=0.0),
            }
        if directions is not None:
            own["ours, along"] = partial(prototypes.ours_along, run, total, shift, directions)
        jobs |= {(name, factor, size, seed): make for name, make in own.items()}
    return jobs


def eigen_jobs(form, factor, shift, totals):
    """Eigenvectors: s of them, and as many as the largest Krylov basis of that size has."""
    jobs = {}
    for size, total in totals.items():
        jobs["eigen + 1/lambda", factor, size, None] = partial(form.eigen_shift, size, shift)
        jobs["eigen + trace", factor, size, None] = partial(form.eigen_matched, size, shift)
        jobs["eigen + 1/lambda, all", factor, size, None] = partial(form.eigen_shift, total, shift)
    return jobs
