"""Others' posteriors for the FashionMNIST network: laplace-torch's KFAC and ELLA, and SWAG."""

import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
from fashion_network import BATCH, apply
from fashion_problem import FULL, SUBSET
from images import fashion_mnist
from jax.flatten_util import ravel_pytree
from tqdm import tqdm

# Nystrom points of ELLA: at most as many as there are training points.
ELLA_POINTS = SUBSET
# Training points whose Jacobian rows KFAC's covariance is applied to.
ROWS_FOR = 200


def to_torch(params):
    """The parameters by the names and in the layout of `laplace_torch_peers.network`, in order."""
    made = {}
    for index, name in ((0, "conv0"), (3, "conv1"), (6, "conv2")):
        weight = np.asarray(params[name]["weight"])
        weight = weight.reshape(3, 3, -1, weight.shape[1]).transpose(3, 2, 0, 1)
        made[f"{index}.weight"] = np.ascontiguousarray(weight)
        made[f"{index}.bias"] = np.asarray(params[name]["bias"])
    # Our images are flattened pixel by pixel, torch's channel by channel.
    weight = np.asarray(params["dense0"]["weight"])
    weight = weight.reshape(3, 3, 32, -1).transpose(3, 2, 0, 1)
    made["10.weight"] = np.ascontiguousarray(weight.reshape(len(weight), -1))
    made["10.bias"] = np.asarray(params["dense0"]["bias"])
    made["12.weight"] = np.ascontiguousarray(np.asarray(params["dense1"]["weight"]).T)
    made["12.bias"] = np.asarray(params["dense1"]["bias"])
    return made


def permutation(params):
    """Index that takes a flat vector of ours to torch's order."""
    flat, unravel = ravel_pytree(params)
    numbered = unravel(jnp.arange(flat.size, dtype=jnp.float32))
    return np.concatenate([part.ravel() for part in to_torch(numbered).values()]).astype(int)


def compare(problem, judge, options, factors):
    """Judges KFAC and ELLA; gives KFAC's covariance times the Jacobian rows, by prior factor."""
    target = options.cache / f"fashion_peers_{options.points}.npz"
    if not target.exists() and not options.peers:
        print("No --peers: KFAC and ELLA are left out.")
        return {}
    order = permutation(problem.params)
    if not target.exists():
        source = options.cache / "fashion_peers_in.npz"
        state = {f"state/{name}": part for name, part in to_torch(problem.params).items()}
        np.savez(
            source,
            **state,
            images=problem.images.transpose(0, 3, 1, 2),
            labels=problem.labels,
            test=problem.test_images[: options.points].transpose(0, 3, 1, 2),
            rows=problem.train_jacobians(ROWS_FOR)[:, order],
            prior_precision=problem.prior_precision,
            num_data=FULL,
            ella=ELLA_POINTS,
            factors=np.array(factors),
        )
        script = pathlib.Path(__file__).with_name("laplace_torch_peers.py")
        subprocess.run([options.peers, str(script), str(source), str(target)], check=True)
    with np.load(target) as found:
        np.testing.assert_allclose(found["logits"], judge.logits, atol=1e-3)
        images = {}
        for factor in factors:
            for method, stored in (("KFAC", "kfac"), ("ELLA", "ella")):
                seconds = float(found[f"{stored}_seconds{factor:g}"])
                covariance = found[f"{stored}{factor:g}"]
                judge.record(method, factor, None, None, covariance, seconds=seconds, rest=np.nan)
            images[factor] = found[f"kfac_rows{factor:g}"][:, np.argsort(order)]
    return images


def snapshots(problem, options, *, count=20, rate=0.01, seed=0):
    """SWAG's iterates: SGD with momentum and a constant rate, kept every quarter of an epoch."""
    path = options.cache / "fashion_swag.npy"
    if path.exists():
        return np.load(path)
    (images, labels), _ = fashion_mnist(options.data)
    rule = optax.sgd(rate, momentum=0.9)
    params = problem.params
    state, kept = rule.init(params), []
    rng = np.random.default_rng(seed)

    @jax.jit
    def step(params, state, x, y):
        def loss(params):
            logits = apply(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        updates, state = rule.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    quarter = len(images) // BATCH // 4
    for _ in tqdm(range(count), desc="SWAG", unit="snapshot"):
        for _ in range(quarter):
            chosen = rng.choice(len(images), BATCH, replace=False)
            params, state = step(params, state, images[chosen], labels[chosen])
        kept.append(np.asarray(ravel_pytree(params)[0]))
    np.save(path, np.stack(kept))
    return np.stack(kept)
