"""Hamiltonian Monte Carlo: predicted against observed, and whitening by a belief; issue 9.

One part at a time, each of them one to ten minutes on one core:

    python benchmarks/bench_hmc.py acceptance
    python benchmarks/bench_hmc.py burn-in
    python benchmarks/bench_hmc.py condition
    python benchmarks/bench_hmc.py preconditioners
    python benchmarks/bench_hmc.py whitening --target digits
    python benchmarks/bench_hmc.py whitening --target digits --methods averaged

Every part replaces its own records in results/hmc.json and keeps those of the others. docs/hmc.md
shows them; scripts/plot_hmc.py draws them.
"""

import argparse
import fcntl
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from hmc_leapfrog import acceptance_at_stationarity, chain, condition, inferred, spectrum
from hmc_targets import TARGETS
from record import RESULTS, provenance
from tqdm import tqdm

import pnkrylov as pk
from pnkrylov import hmc

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import oracles

DIMENSIONS = (32, 64, 128, 256, 512)
OVERSAMPLING = (4, 6, 8, 12, 16, 32)


# ---- random spectra: acceptance and inferred kappa ----------------------------------------------


def acceptance_part(repeats):
    """The paper's figure 3: 40 kinds of spectra, two acceptances, all six oversamplings."""
    rng, records = np.random.default_rng(0), []
    cases = [
        (dimension, largest, cutoff, power, target, repeat)
        for dimension in DIMENSIONS
        for largest in (5, 20)
        for cutoff in (0.25, 0.75)
        for power in (2, 6)
        for target in (0.8, 0.85, 0.9, 0.95, 0.97)
        for repeat in range(repeats)
    ]
    for dimension, largest, cutoff, power, target, repeat in tqdm(cases):
        sigma = spectrum(rng, dimension, largest, cutoff, power)
        kappa = condition(sigma)
        h = float(hmc.step_size_for(target, kappa, float(sigma.max())))
        observed, error = acceptance_at_stationarity(rng, sigma, h, 8000)
        record = {
            "dimension": dimension, "largest": largest, "cutoff": cutoff, "power": power,
            "kappa": kappa, "effective": float(np.sum(sigma**-4) ** 2 / np.sum(sigma**-8)),
            "predicted": target, "observed": observed, "observed_error": error,
            "inferred_known": inferred(h, observed, sigma.max()) / kappa,
        }  # fmt: skip
        if target in (0.8, 0.95) and repeat == 0:
            draws, accepted = chain(rng, sigma, h, OVERSAMPLING[-1] * dimension)
            record["chain"] = []
            for ratio in OVERSAMPLING:
                own = draws[: ratio * dimension]
                values = np.linalg.eigvalsh(own.T @ own / len(own))
                mean = accepted[: len(own)].mean()
                plug_in = condition(np.sqrt(np.maximum(values, 1e-300)))
                record["chain"].append({
                    "oversampling": ratio,
                    "plug_in": plug_in / kappa,
                    "inferred": inferred(h, mean, np.sqrt(values[-1])) / kappa,
                    "known": inferred(h, mean, sigma.max()) / kappa,
                })  # fmt: skip
        records.append(record)
    return {"records": records}


# ---- burn-in ------------------------------------------------------------------------------------


def kappas_left(values):
    """By the sample covariance of S draws, and by the reverse divergence with S draws of noise."""
    values = np.atleast_2d(values)
    return (
        values[:, 0] ** -0.5 * np.sum(values**2, axis=1) ** 0.25,
        values[:, -1] ** 0.5 * np.sum(values**-2.0, axis=1) ** 0.25,
    )


def burn_in_part(repeats):
    """Marchenko-Pastur against Wishart matrices, and the optimum against brute force."""
    rng, law, optima = np.random.default_rng(1), [], []
    for dimension in tqdm((32, 50, 64, 128, 256)):
        grid = np.array([1.5, 1.75, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 10, 12, 16])
        runs = max(20, repeats * 64 // dimension)
        left = np.zeros((runs, len(grid), 2))
        for run in range(runs):
            # Nested samples: neighbouring points of the curve share their noise.
            x = rng.standard_normal((int(grid[-1] * dimension), dimension))
            for i, factor in enumerate(grid):
                count = int(factor * dimension)
                values = np.linalg.eigvalsh(x[:count].T @ x[:count] / count)
                left[run, i] = [float(k[0]) for k in kappas_left(values)]
        mean, error = left.mean(axis=0), left.std(axis=0, ddof=1) / np.sqrt(runs)
        for i, factor in enumerate(grid):
            samples = int(factor * dimension)
            law.append({
                "dimension": dimension, "oversampling": float(factor),
                "simulated": mean[i, 0], "simulated_error": error[i, 0],
                "finite_size": float(hmc.preconditioned_condition_number(samples, dimension)),
                "edge": float(hmc.preconditioned_condition_number(
                    samples, dimension, finite_size=False)),
                "divergence_simulated": mean[i, 1], "divergence_error": error[i, 1],
                "divergence": float(hmc.reverse_kl_condition_number(samples + 1, dimension)),
            })  # fmt: skip
        for ratio in (3, 10, 30):
            for final in (10, 40, 160):
                kappa0 = ratio * dimension**0.25
                # The simulated curve, smooth between the grid points: log kappa in log(S/N - 1).
                fine = np.geomspace(1.6, 15.5, 2000)
                log_left = np.polynomial.Polynomial.fit(
                    np.log(grid - 1), np.log(mean[:, 0]), 6, w=1 / (error[:, 0] / mean[:, 0])
                )
                total = fine * kappa0 + final * np.exp(log_left(np.log(fine - 1)))
                best = int(np.argmin(total))
                found = hmc.optimal_burn_in(kappa0, dimension, final * dimension)
                edge = hmc.optimal_burn_in(kappa0, dimension, final * dimension, finite_size=False)
                optima.append({
                    "dimension": dimension, "ratio": ratio, "final": final,
                    "brute_force": float(fine[best]),
                    "brute_force_speedup": float(final * kappa0 / total[best]),
                    "at_the_end": bool(best in (0, len(fine) - 1)),
                    "optimal": float(found.num_samples) / dimension,
                    "speedup": float(found.speedup),
                    "edge": float(edge.num_samples) / dimension,
                    "edge_speedup": float(edge.speedup),
                })  # fmt: skip
    return {"law": law, "optima": optima}


# ---- matrix-free kappa --------------------------------------------------------------------------


def condition_part(size):
    """kappa of all test spectra, from products alone."""
    records = []
    for name, make in tqdm(oracles.SPECTRA.items()):
        matrix, values = make(size)
        operator = pk.as_operator(jnp.asarray(matrix))
        for role, eigenvalues in (("precision", values), ("covariance", 1 / values)):
            if role == "covariance" and name.startswith("exponential"):
                continue
            truth = float(np.sum(eigenvalues**2) ** 0.25 / eigenvalues.min() ** 0.5)
            start = time.perf_counter()
            found = hmc.condition_number(**{role: operator}, key=jax.random.key(1))
            records.append({
                "matrix": name, "size": size, "role": role, "exact": truth,
                "value": float(found.value), "lower": float(found.lower),
                "upper": float(found.upper), "num_matvecs": int(found.num_matvecs),
                "seconds": time.perf_counter() - start,
            })  # fmt: skip
    return {"records": records}


# ---- what preconditioners leave -----------------------------------------------------------------


def preconditioners_part(size):
    """kappa left on Gaussians by each preconditioner; covariances, with precisions as spectra."""
    records, key = [], jax.random.key(0)
    for name in tqdm(("bulk+outliers", "power-law-1", "exponential", "kernel-5d")):
        precision, values = oracles.SPECTRA[name](size)
        covariance = jnp.asarray(np.linalg.inv(precision))
        covariance = (covariance + covariance.T) / 2
        noise = np.random.default_rng(3).standard_normal((4 * size, size))
        root = jnp.linalg.cholesky(covariance)
        draws = np.asarray(root @ noise.T).T
        sample = jnp.asarray(draws.T @ draws / len(draws))

        def left(factor, covariance=covariance):
            remaining = hmc.remaining_covariance(covariance, factor)
            return float(hmc.condition_number(covariance=remaining).value)

        record = {
            "matrix": name, "size": size,
            "none": float(np.sum(values**2) ** 0.25 / values.min() ** 0.5),
            "reverse_diagonal": left(hmc.diagonal_preconditioner(covariance, "reverse")),
            "forward_diagonal": left(hmc.diagonal_preconditioner(covariance, "forward")),
            "reverse_full": left(hmc.reverse_kl_preconditioner(covariance, jnp.asarray(noise))),
            "sample_covariance": left(jnp.linalg.cholesky(sample)),
            "floor": size**0.25,
        }  # fmt: skip
        for products in (20, 40, 80, 160):
            belief = pk.inverse(jnp.asarray(precision), key=key, budget=products)
            white = jax.vmap(hmc.covariance_root(belief.covariance).mv)(jnp.eye(size))
            record[f"belief_{products}"] = left(white.T)
        records.append(record)
    return {"records": records}


# ---- whitening ----------------------------------------------------------------------------------

# Gradients that one product with a Hessian or Gauss-Newton matrix is charged: forward over reverse
# costs two to three.
GRADIENTS_PER_PRODUCT = 3
WINDOW_WARM_UP = 1000  # blackjax's own schedule
STEP_WARM_UP = 200  # step size alone


def adapt_step_size(make, start, num_steps, key):
    """Dual averaging to an acceptance of 0.8; returns step size, last position and gradients."""
    from blackjax.adaptation.step_size import dual_averaging_adaptation

    begin, update, final = dual_averaging_adaptation(0.8)

    def step(carry, key):
        state, adapted = carry
        kernel = make(jnp.exp(adapted.log_step_size))
        state, info = kernel.step(key, state)
        adapted = update(adapted, info.acceptance_rate)
        return (state, adapted), info.num_integration_steps

    @jax.jit
    def run(start, key):
        state = make(0.1).init(start, key)
        (state, adapted), steps = jax.lax.scan(
            step, (state, begin(0.1)), jax.random.split(key, num_steps)
        )
        return final(adapted), state.position, jnp.sum(steps)

    return run(start, key)


def draw(make, step_size, start, num_draws, key):
    @jax.jit
    def run(start, key):
        kernel = make(step_size)

        def step(state, key):
            state, info = kernel.step(key, state)
            return state, (state.position, info.num_integration_steps, info.acceptance_rate)

        keys = jax.random.split(key, num_draws)
        return jax.lax.scan(step, kernel.init(start, key), keys)[1]

    return run(start, key)


def sampler(kind, logdensity, matrix, steps):
    """step size -> kernel with the same `init(position, key)` for both samplers."""
    import blackjax
    from blackjax.base import SamplingAlgorithm

    def make(step_size):
        if kind == "nuts":
            kernel = blackjax.nuts(logdensity, step_size, matrix)
            return SamplingAlgorithm(lambda position, key: kernel.init(position), kernel.step)
        # HMC with a random number of steps around the quarter period of the slowest direction.
        return blackjax.dynamic_hmc(
            logdensity, step_size, matrix,
            integration_steps_fn=lambda key: jax.random.randint(key, (), max(steps // 2, 1), 
                                                                max(3 * steps // 2, 2) + 1),
        )  # fmt: skip

    return make


def effective(values):
    from blackjax.diagnostics import effective_sample_size

    return np.asarray(effective_sample_size(np.asarray(values)[None]))


def window_adaptation(target, start, key):
    """blackjax's diagonal adaptation with NUTS: inverse mass matrix and gradients."""
    import blackjax

    warm_up = blackjax.window_adaptation(blackjax.nuts, target.logdensity)

    @jax.jit
    def run(start, key):
        (state, parameters), info = warm_up.run(key, start, num_steps=WINDOW_WARM_UP)
        return state.position, parameters, jnp.sum(info.info.num_integration_steps)

    return run(start, key)


def belief_about(product, mean):
    """One run of at most 60 steps, and a few probes for the bulk."""
    return pk.inverse(
        product, mean=mean, key=jax.random.key(0), num_steps=min(60, len(mean)), num_probes=4,
        probe_depth=10, driver="compiled",
    )  # fmt: skip


def averaged_belief(target, mode, belief, key, rounds=2, num_draws=100, num_points=20):
    """Beliefs about the precision averaged over draws, the condition of the reverse divergence.

    Each round adapts the step size and draws with the belief so far (100 + 100 transitions), then
    averages the precision over 20 of the draws. Returns belief, product, start and gradients.
    """
    from pnkrylov.interop.blackjax import inverse_mass_matrix

    start, spent = mode, 0
    for round_key in jax.random.split(key, rounds):
        make = sampler("nuts", target.logdensity, inverse_mass_matrix(belief), 1)
        keys = jax.random.split(round_key)
        step_size, start, more = adapt_step_size(make, start, num_draws, keys[0])
        draws, gradients, _ = draw(make, step_size, start, num_draws, keys[1])
        points, start = draws[:: num_draws // num_points], draws[-1]

        def product(v, points=points):
            return jnp.mean(jax.vmap(lambda w: target.product(w, v))(points), axis=0)

        belief = belief_about(product, jnp.mean(draws, axis=0))
        products = GRADIENTS_PER_PRODUCT * num_points * int(belief.stats.num_matvecs)
        spent += int(more) + int(jnp.sum(gradients)) + products
    return belief, product, start, spent


def left_by(belief, covariance):
    """The condition number that a belief leaves of a Gaussian."""
    root = hmc.covariance_root(belief.covariance)
    factor = jax.vmap(root.mv)(jnp.eye(len(covariance))).T
    return hmc.condition_number(covariance=hmc.remaining_covariance(covariance, factor))


def dense_covariance(product, dimension):
    """The inverse of a product: for kappa and principal directions, not charged to anyone."""
    precision = np.asarray(jax.lax.map(product, jnp.eye(dimension)))
    return jnp.asarray(np.linalg.inv((precision + precision.T) / 2))


def whitening_part(name, samplers, methods, seeds, num_draws):
    """Effective samples per gradient: no mass matrix, diagonal adaptation, and the belief."""
    from pnkrylov.interop.blackjax import inverse_mass_matrix

    target = TARGETS[name]()
    mode, mode_cost = target.find_mode()
    belief = belief_about(lambda v: target.product(mode, v), mode)
    products = int(belief.stats.num_matvecs)
    built = mode_cost + GRADIENTS_PER_PRODUCT * products
    covariance = dense_covariance(lambda v: target.product(mode, v), target.dimension)
    axes = np.linalg.eigh(np.asarray(covariance))[1]
    kappa = {
        "none": hmc.condition_number(covariance=covariance),
        "diagonal": hmc.condition_number(
            covariance=hmc.remaining_covariance(
                covariance, hmc.diagonal_preconditioner(covariance, "forward")
            )
        ),
    }
    kappa["belief"] = left_by(belief, covariance)
    sigma_max = {method: float(k.sigma_max) for method, k in kappa.items()}
    kappa = {method: float(k.value) for method, k in kappa.items()}
    print(name, "kappa", kappa, "mode", mode_cost, "products", products, flush=True)
    records = []
    for seed in range(seeds):
        for method in methods:
            keys = jax.random.split(jax.random.key(100 + seed), 3)
            start, spent, window = mode, 0, None
            if method == "none":
                matrix = jnp.ones(target.dimension)
            elif method == "diagonal":
                start, window, spent = window_adaptation(target, mode, keys[0])
                matrix, spent = window["inverse_mass_matrix"], int(spent)
            elif method == "belief":
                matrix, spent = inverse_mass_matrix(belief), built
            else:
                averaged, product, start, more = averaged_belief(target, mode, belief, keys[0])
                matrix, spent = inverse_mass_matrix(averaged), built + more
                own = left_by(averaged, dense_covariance(product, target.dimension))
                kappa[method], sigma_max[method] = float(own.value), float(own.sigma_max)
            for kind in samplers:
                steps = max(1, round(float(hmc.leapfrog_steps(0.8, kappa[method]))))
                make = sampler(kind, target.logdensity, matrix, steps)
                begin = time.perf_counter()
                step_size, position, more = adapt_step_size(make, start, STEP_WARM_UP, keys[1])
                # A quarter period with the step size that was found, not the one predicted.
                steps = max(1, round(np.pi / 2 * sigma_max[method] / float(step_size)))
                make = sampler(kind, target.logdensity, matrix, steps)
                draws, gradients, rate = draw(make, step_size, position, num_draws, keys[2])
                draws = np.asarray(draws)
                record = {
                    "target": name, "dimension": target.dimension, "sampler": kind,
                    "method": method, "seed": seed, "kappa": kappa[method],
                    "step_size": float(step_size), "acceptance": float(jnp.mean(rate)),
                    "mode_gradients": mode_cost if method in ("belief", "averaged") else 0,
                    "products": products if method in ("belief", "averaged") else 0,
                    "building": spent, "warm_up": int(more),
                    "sampling": int(jnp.sum(gradients)), "num_draws": num_draws,
                    "ess_coordinates": float(effective(draws).min()),
                    "ess_directions": float(effective((draws - draws.mean(axis=0)) @ axes).min()),
                    "seconds": time.perf_counter() - begin,
                }  # fmt: skip
                if target.functionals is not None:
                    values = np.asarray(target.functionals(jnp.asarray(draws)))
                    record["ess_functionals"] = float(effective(values).min())
                    record["ess_functionals_median"] = float(np.median(effective(values)))
                records.append(record)
                print(json.dumps(record), flush=True)
    return {"records": records, "kappa": kappa}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "part", choices=("acceptance", "burn-in", "condition", "preconditioners", "whitening")
    )
    parser.add_argument("--target", default="digits", choices=tuple(TARGETS))
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--samplers", nargs="+", default=["nuts", "hmc"])
    parser.add_argument("--methods", nargs="+", default=["none", "diagonal", "belief"])
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    name = options.part
    if name == "acceptance":
        content = acceptance_part(options.repeats)
    elif name == "burn-in":
        content = burn_in_part(options.repeats * 10)
    elif name == "condition":
        content = condition_part(options.size or 2000)
    elif name == "preconditioners":
        content = preconditioners_part(options.size or 400)
    else:
        name = f"whitening {options.target}"
        if options.methods == ["averaged"]:
            name += " averaged"
        content = whitening_part(
            options.target, options.samplers, options.methods, options.seeds, options.draws
        )
    content = {"provenance": provenance(("blackjax",)), **content}
    path = RESULTS / "hmc.json"
    RESULTS.mkdir(exist_ok=True)
    # Parts may run at the same time.
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        parts = json.loads(text)["parts"] if text else {}
        parts[name] = content
        file.seek(0)
        file.truncate()
        file.write(json.dumps({"parts": dict(sorted(parts.items()))}, indent=1) + "\n")


if __name__ == "__main__":
    main()
