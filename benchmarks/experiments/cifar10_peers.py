"""What the CIFAR-10 experiment compares with: diagonal, projections, KFAC; and one real run."""

import pathlib
import subprocess
import time

import baselines
import cifar10_network as network
import cifar10_problem
import jax
import jax.numpy as jnp
import methods
import numpy as np
import scipy.linalg
from cifar10_problem import CLASSES, FULL, SPANNING, SUBSET
from tqdm import tqdm

import pnkrylov as pk
from pnkrylov import laplace


def diagonal(problem, judge, options, factors):
    """The diagonal posterior, the projection made with it, and the largest parameters."""
    stored, shift = problem.stored, problem.prior_precision
    judge.record("diagonal", 1.0, None, None, stored["diagonal_test_gram"], stored=1)
    span = Span(
        gram=stored["diagonal_square"],
        train=stored["diagonal_gram"],
        test=stored["diagonal_test"],
        # J D J^T, whose leading eigenvectors choose the directions.
        images=stored["diagonal_gram"][:, : SPANNING * CLASSES],
    )
    judge_span(problem, judge, options, span, "lowrank-diagonal", factors)
    # The parameters of largest magnitude: coordinates of their own.
    curved = cifar10_problem.times_blocks(
        stored["hessian"] * FULL / SUBSET, stored["largest_train"]
    )
    projected = stored["largest_train"].T @ curved
    for size in options.sizes:
        index = np.arange(size)
        made = baselines.subspace("subset-magnitude", index, projected, size, shift)
        covariance = methods.covariances([made], [stored["largest_test"]])[0]
        judge.record("subset-magnitude", 1.0, size, None, covariance, stored=size)


class Span:
    """Rows Y = J' Psi (1000, p), by their inner products.

    Args:
        gram: `Y Y^T`.
        train: `Y J^T` with all training rows.
        test: `J_test Y^T`.
        images: `J' Psi J'^T`.
    """

    def __init__(self, gram, train, test, images):
        self.gram, self.train, self.test, self.images = gram, train, test, images


def judge_span(problem, judge, options, span, name, factors):
    """Projections onto the leading directions of a span, with nothing or 1/lambda outside.

    The span is that of the fitted prior at every factor: it only chooses directions.
    """
    hessian = problem.stored["hessian"] * FULL / SUBSET
    _, vectors = np.linalg.eigh((span.images + span.images.T) / 2)
    for size in options.sizes:
        leading = vectors[:, ::-1][:, :size]
        # Orthonormal directions, by their Gram matrix.
        lower = np.linalg.cholesky(leading.T @ span.gram @ leading)
        rows = scipy.linalg.solve_triangular(lower, leading.T @ span.train, lower=True)
        curved = rows @ cifar10_problem.times_blocks(hessian, rows.T)
        along = scipy.linalg.solve_triangular(lower, (span.test @ leading).T, lower=True).T
        along = along.reshape(judge.count, CLASSES, size)
        rest = problem.stored["test_gram"] - np.matmul(along, along.transpose(0, 2, 1))
        for factor in factors:
            shift = problem.prior_precision * factor
            inverse = np.linalg.inv(curved + shift * np.eye(size))
            covariance = np.matmul(along @ inverse, along.transpose(0, 2, 1))
            costs = {"stored": size, "products": size}
            judge.record(name, factor, size, None, covariance, **costs)
            covariance = covariance + rest / shift
            judge.record(f"{name} + 1/lambda", factor, size, None, covariance, **costs)


def kfac(problem, judge, options, factors):
    """KFAC by laplace-torch, and the projection made with it: the papers' best shift baseline."""
    target = options.cache / f"cifar10_kfac_{judge.count}.npz"
    if not target.exists():
        if not options.peers:
            print("No --peers: KFAC is left out.")
            return
        (images, labels), (test_images, _), _ = cifar10_problem.training_subset(options.data)
        source = options.cache / "cifar10_kfac_in.npz"
        np.savez(
            source,
            images=network.standardised(images).transpose(0, 3, 1, 2),
            labels=labels,
            test=network.standardised(test_images[: judge.count]).transpose(0, 3, 1, 2),
            # The papers' surrogate is fitted without rescaling (section 6.2.1), KFAC itself with.
            prior_precision=problem.prior_precision,
            num_data=FULL,
            spanning=SPANNING,
        )
        script = pathlib.Path(__file__).with_name("cifar10_laplace_torch.py")
        weights, rows = options.cache / "cifar10.npz", options.cache / "cifar10_rows.npy"
        command = [options.peers, script, weights, rows, source, target]
        subprocess.run([str(part) for part in command], check=True)
    with np.load(target) as found:
        found = dict(found)
    np.testing.assert_allclose(found["logits"], judge.logits, atol=1e-3)
    seconds = float(found["seconds"])
    judge.record("KFAC", 1.0, None, None, found["covariance"], seconds=seconds)
    span = Span(found["gram"], found["train"], found["test"], found["images"])
    judge_span(problem, judge, options, span, "lowrank-KFAC", factors)


def real(problem, options):
    """`pnkrylov.inverse` on the network's own GGN, one seed; its KL at the test points."""
    params, _ = network.load(options.cache / "cifar10.npz")
    (images, labels), (test_images, _), _ = cifar10_problem.training_subset(options.data)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    data = (jnp.asarray(network.standardised(images)), jnp.asarray(labels))
    curvature = laplace.ggn(
        network.apply, params, data, laplace.Categorical(), num_data=FULL, batch_size=50
    )
    exact = np.concatenate(list(problem.test_jacobians(options.points)))
    inner = 1 / (problem.values + problem.prior_precision) - 1 / problem.prior_precision
    beyond = np.full(problem.beyond.shape[2], 1 / problem.prior_precision)
    inner = np.concatenate([inner + 1 / problem.prior_precision, beyond])
    reference = np.matmul(exact * inner, exact.transpose(0, 2, 1))
    records = []
    for size in options.sizes:
        started = time.perf_counter()
        belief = pk.inverse(
            curvature,
            key=jax.random.key(1000),
            num_steps=size,
            shift=problem.prior_precision,
            progress=True,
        )
        seconds = time.perf_counter() - started
        bar = tqdm(total=options.points, desc="test points")
        divergences = []
        chunks = network.jacobians(params, test_images[: options.points])
        for start, jacobian in zip(range(0, options.points, network.CHUNK), chunks, strict=True):
            flat = jnp.asarray(jacobian.reshape(-1, problem.size))
            pushed = np.asarray(belief.covariance.push(flat), np.float64)
            for point in range(len(jacobian)):
                part = slice(point * CLASSES, (point + 1) * CLASSES)
                divergences.append(
                    laplace.metrics.gaussian_kl(
                        jnp.asarray(reference[start + point])[None], pushed[None, part, part]
                    )
                )
            bar.update(len(jacobian))
        records.append(
            {
                "s": size,
                "kl": float(np.mean(divergences)),
                "products": int(belief.stats.num_matvecs),
                "seconds": seconds,
                "driver": belief.stats.driver,
            }
        )
        del belief
    return {"points": options.points, "parameters": problem.size, "records": records}
