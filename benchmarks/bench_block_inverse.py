"""Block starts of `inverse`: what k start vectors cost and gain beside one, at equal products.

Dense matrices with d = 2000, where a block product costs little more than a single one, and
diagonal operators, whose products cost nothing. 120 resolved vectors and the same probes each; the
divergence is between N(0, A^-1) and N(0, Sigma), per dimension. Writes results/block_inverse.json.
"""

import argparse
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from bench_block import seconds
from record import save

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import oracles
import pnkrylov as pk

SIZE, VECTORS = 2000, 120
BLOCKS = (1, 2, 4, 8)
SPECTRA = ("bulk+outliers", "power-law-1", "power-law-2", "exponential")


def divergence(values, vectors, covariance):
    """KL(N(0, A^-1) || N(0, Sigma)) over d."""
    rotated = vectors.T @ (np.asarray(covariance.as_matrix()) @ vectors)
    # In the eigenvectors of A: tr(Sigma^-1 A^-1) - d + log det(Sigma A).
    inverse = np.linalg.inv((rotated + rotated.T) / 2)
    mismatch = np.sum(np.diag(inverse) / values) - len(values)
    logdet = np.linalg.slogdet(rotated)[1] + np.sum(np.log(values))
    return 0.5 * (mismatch + logdet) / len(values)


def options(block_size):
    """Two thirds of the blocks first, the others as a look-ahead; all of them are resolved."""
    blocks = VECTORS // block_size
    ahead = blocks // 3
    return {"block_size": block_size, "num_steps": blocks - ahead, "lookahead": ahead}


def deviation(operator, block_size):
    """One number of a belief, so that it is waited for."""
    belief = pk.inverse(operator, key=jax.random.key(0), driver="compiled", **options(block_size))
    return belief.covariance.bulk_deviation


def case(name, seeds, repeats):
    matrix, _ = oracles.SPECTRA[name](SIZE, 0)
    values, vectors = np.linalg.eigh(matrix)
    exact = float(np.sum(1 / values))
    dense = pk.as_operator(jnp.asarray(matrix))
    diagonal = jnp.asarray(values)
    cheap = pk.as_operator(lambda x: diagonal * x, like=diagonal)
    records = []
    for block_size in BLOCKS:
        given = options(block_size)
        beliefs = [pk.inverse(dense, key=jax.random.key(seed), **given) for seed in range(seeds)]
        traces = [float(belief.trace().value) for belief in beliefs]
        records.append(
            {
                "spectrum": name,
                "k": block_size,
                "kl": [divergence(values, vectors, belief.covariance) for belief in beliefs],
                "trace_error": float(np.sqrt(np.mean((np.array(traces) / exact - 1) ** 2))),
                "matvecs": float(np.mean([int(belief.stats.num_matvecs) for belief in beliefs])),
            }
        )
        print(records[-1], flush=True)
    for label, operator in (("dense", dense), ("diagonal", cheap)):
        runs = [functools.partial(deviation, operator, block_size) for block_size in BLOCKS]
        for record, measured in zip(records, seconds(runs, repeats), strict=True):
            record[f"{label}_seconds"] = measured
    return records


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    records = []
    for name in SPECTRA:
        records += case(name, arguments.seeds, arguments.repeats)
    print(save("block_inverse", {"size": SIZE, "vectors": VECTORS, "records": records}))


if __name__ == "__main__":
    main()
