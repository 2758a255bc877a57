"""Leapfrog on Gaussians in closed form, in NumPy: what bench_hmc.py compares predictions with."""

import numpy as np
from scipy.stats import norm


def spectrum(rng, dimension, largest, cutoff, power):
    """Standard deviations in [1, largest]: a low-pass filter of uniform draws, rescaled.

    The paper's function lost its formula in the text at hand; it has a cutoff and a power.
    """
    g = 1 / (1 + (rng.uniform(size=dimension) / cutoff) ** power)
    return 1 + (largest - 1) * (g - g.min()) / (g.max() - g.min())


def condition(sigma):
    return float(np.sum((sigma.max() / sigma) ** 4) ** 0.25)


def trajectory(sigma, h, steps, q, p):
    """Leapfrog in closed form: a rotation by `theta` per step in slightly stretched coordinates."""
    theta = np.arccos(1 - (h / sigma) ** 2 / 2)
    stretch = sigma / np.sqrt(1 - (h / sigma) ** 2 / 4)
    c, s = np.cos(steps * theta), np.sin(steps * theta)
    return q * c + stretch * p * s, p * c - q * s / stretch


def energy(sigma, q, p):
    return np.sum((q / sigma) ** 2 + p**2, axis=-1) / 2


def random_steps(rng, sigma, h, draws):
    time = rng.uniform(0.5, 1.5, draws) * np.pi / 2 * sigma.max()
    return np.maximum(1, np.rint(time / h))[:, None]


def acceptance_at_stationarity(rng, sigma, h, draws):
    """Mean acceptance probability, over starts from the target."""
    found = []
    block = max(1, 1_000_000 // len(sigma))
    for first in range(0, draws, block):
        count = min(block, draws - first)
        q = rng.standard_normal((count, len(sigma))) * sigma
        p = rng.standard_normal((count, len(sigma)))
        moved = trajectory(sigma, h, random_steps(rng, sigma, h, count), q, p)
        found.append(np.minimum(1, np.exp(energy(sigma, q, p) - energy(sigma, *moved))))
    found = np.concatenate(found)
    return found.mean(), found.std(ddof=1) / np.sqrt(draws)


def chain(rng, sigma, h, draws):
    """A chain from the target: its draws, and the acceptance probabilities."""
    q = rng.standard_normal(len(sigma)) * sigma
    steps = random_steps(rng, sigma, h, draws)
    momenta = rng.standard_normal((draws, len(sigma)))
    theta = np.arccos(1 - (h / sigma) ** 2 / 2)
    stretch = sigma / np.sqrt(1 - (h / sigma) ** 2 / 4)
    cosines, sines = np.cos(steps * theta), np.sin(steps * theta)
    positions, accepted = np.empty((draws, len(sigma))), np.empty(draws)
    for i, coin in enumerate(rng.uniform(size=draws)):
        p = momenta[i]
        moved = q * cosines[i] + stretch * p * sines[i], p * cosines[i] - q * sines[i] / stretch
        accepted[i] = min(1.0, np.exp(min(0.0, energy(sigma, q, p) - energy(sigma, *moved))))
        if coin < accepted[i]:
            q = moved[0]
        positions[i] = q
    return positions, accepted


def inferred(h, acceptance, sigma_max):
    return float(sigma_max * np.sqrt(-8 * np.sqrt(2) * norm.ppf(acceptance / 2)) / h)
