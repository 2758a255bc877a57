"""The Laplace problem of the CIFAR-10 experiment, in coordinates in which it is small.

The GGN of 200 training points has rank 2,000 at most, in p = 671,622 dimensions. In an orthonormal
basis that begins with its eigenvectors it is `diag(g_1, .., g_r, 0, .., 0)`, and the Jacobian of
one test point (10 x p) has r coordinates along those and ten beyond them. Covariances of outputs,
which are all that methods are judged by, do not depend on the basis; start vectors and probes of
Lanczos runs are isotropic, so neither does their law. Runs then have vectors of their true length
p, but products that cost nothing. `cifar10.py real` makes one run with the network itself.
"""

import dataclasses
import json
import pathlib

import cifar10_network as network
import jax
import numpy as np
from images import cifar10
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize_scalar
from tqdm import tqdm

SUBSET, FULL, CLASSES = 200, 50_000, 10
# Projections are spanned by Jacobian rows at this many training points: twice the largest size.
SPANNING = 100
COLUMNS = 2**16


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the methods are given, and what they are judged on; r is the rank.

    Attributes:
        values: `(r,)`, eigenvalues g of the GGN, scaled to the full data; descending.
        train: `(2000, r)`, coordinates of the Jacobian rows at the training subset.
        test: `(n, 10, r)`, of those at test points.
        beyond: `(n, 10, 10)`, their coordinates outside of the span, in axes of their own.
        mixing: `(2000, r)`: a vector v has the coordinates `(J v) mixing`, J the training rows.
        size: p.
        prior_precision: by the evidence of the unscaled subset, times the same factor.
        test_logits, test_labels: at the test points.
        accuracy: of the network on all 10,000 test images.
        about: what the weights say about themselves.
        stored: further inner products, by name (see `_measure`).
    """

    values: np.ndarray
    train: np.ndarray
    test: np.ndarray
    beyond: np.ndarray
    mixing: np.ndarray
    size: int
    prior_precision: float
    test_logits: np.ndarray
    test_labels: np.ndarray
    accuracy: float
    about: dict
    stored: dict

    def logits(self, count):
        """Outputs at the first test points, (n, 10)."""
        return self.test_logits[:count].astype(np.float64)

    def test_jacobians(self, count, size=100):
        """Yields Jacobians (n, 10, r + 10) at the first test points, in chunks."""
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            yield np.concatenate([self.test[part], self.beyond[part]], axis=2)


def prepare(cache, data, points):
    """Builds the problem from trained weights, or reads it from the cache."""
    cache = pathlib.Path(cache)
    params, about = network.load(cache / "cifar10.npz")
    path = cache / f"cifar10_products_{points}.npz"
    if not path.exists():
        found = _measure(params, cache, data, points)
        partial = path.with_suffix(".unfinished.npz")
        np.savez(partial, **found)
        partial.replace(path)
    with np.load(path) as stored:
        found = dict(stored)
    values, train, test, beyond, mixing = _coordinates(found)
    flat = np.asarray(ravel_pytree(params)[0], np.float64)
    unscaled = fitted_prior_precision(values * SUBSET / FULL, flat)
    return Problem(
        values=values,
        train=train,
        test=test,
        beyond=beyond,
        mixing=mixing,
        size=len(flat),
        prior_precision=unscaled * FULL / SUBSET,
        test_logits=found["test_logits"],
        test_labels=found["test_labels"],
        accuracy=float(found["accuracy"]),
        about=json.loads(about),
        stored=found,
    )


def training_rows(params, images, path):
    """Jacobian rows (2000, p) at the training subset, float32, in a file."""
    size = int(ravel_pytree(params)[0].size)
    shape = (SUBSET * CLASSES, size)
    if not path.exists():
        partial = path.with_suffix(".unfinished.npy")
        rows = np.lib.format.open_memmap(partial, "w+", np.float32, shape)
        chunks = network.jacobians(params, images)
        for index, chunk in enumerate(tqdm(chunks, total=SUBSET // network.CHUNK, desc="rows")):
            start = index * network.CHUNK * CLASSES
            rows[start : start + len(chunk) * CLASSES] = chunk.reshape(-1, size)
        rows.flush()
        partial.replace(path)
    return np.load(path, mmap_mode="r")


def training_subset(data, seed=0):
    """Images and labels (uint8, int32) of the 200 training points, and the test set."""
    (train, test), source = cifar10(data)
    chosen = np.random.default_rng(seed).choice(len(train[0]), SUBSET, replace=False)
    return (train[0][chosen], train[1][chosen]), test, source


def directions(problem, cache, data, seed, count=2, others=50):
    """Random mixtures of the outputs' gradients at other training images, in our coordinates.

    Returns:
        `(count, p)`, float32; what lies beyond the span has axes of its own.
    """
    cache = pathlib.Path(cache)
    path = cache / f"cifar10_directions{seed}.npz"
    if not path.exists():
        params, _ = network.load(cache / "cifar10.npz")
        (train, _), _ = cifar10(data)
        rng = np.random.default_rng((seed, 1))
        images = train[0][rng.choice(len(train[0]), others, replace=False)]
        mixed = rng.standard_normal((count, others, CLASSES)).astype(np.float32)
        mixtures = network.mixtures(params, images, mixed)
        rows = np.load(cache / "cifar10_rows.npy", mmap_mode="r")
        columns = [slice(at, at + COLUMNS) for at in range(0, problem.size, COLUMNS)]
        np.savez(path, along=_product(mixtures, rows, columns), gram=mixtures @ mixtures.T)
    with np.load(path) as found:
        along, gram = found["along"] @ problem.mixing, found["gram"].astype(np.float64)
    squares, axes = np.linalg.eigh(gram - along @ along.T)
    result = np.zeros((count, problem.size), np.float32)
    result[:, : along.shape[1]] = along
    # Axes that no test point uses.
    result[:, -count:] = axes * np.sqrt(np.maximum(squares, 0))[None, :]
    return result


def _measure(params, cache, data, points):
    """All inner products of Jacobian rows that any method needs, float64.

    `gram`: of the training rows J; `test_train`, `test_gram`: of the test rows with J and, within a
    point, with themselves. `diagonal_*`: the same with the inverse diagonal D of the precision
    between them, for the first 1,000 training rows. `largest_*`: columns of the parameters of
    largest magnitude.
    """
    (images, _), (test_images, test_labels), source = training_subset(data)
    rows = training_rows(params, images, cache / "cifar10_rows.npy")
    probabilities = jax.nn.softmax(network.outputs(params, images), axis=1)
    hessian = _hessian(np.asarray(probabilities, np.float64))
    flat = np.asarray(ravel_pytree(params)[0], np.float64)
    gram, diagonal = np.zeros((len(rows), len(rows))), np.zeros(len(flat))
    columns = [slice(start, start + COLUMNS) for start in range(0, len(flat), COLUMNS)]
    for part in tqdm(columns, desc="training rows"):
        block = rows[:, part].astype(np.float64)
        gram += block @ block.T
        blocks = block.reshape(SUBSET, CLASSES, -1)
        diagonal[part] = np.einsum("nkd,nkl,nld->d", blocks, hessian, blocks, optimize=True)
    values = np.linalg.eigvalsh(_within(gram, hessian))
    precision = fitted_prior_precision(np.maximum(values, 0), flat) * FULL / SUBSET
    weights = 1 / (diagonal * FULL / SUBSET + precision)
    largest = np.argsort(-np.abs(flat), kind="stable")[: SPANNING * CLASSES // 2]
    spanning = rows[: SPANNING * CLASSES]
    logits = network.outputs(params, test_images)
    found = {
        "gram": gram,
        "hessian": hessian,
        "test_logits": logits[:points],
        "test_labels": test_labels[:points],
        "accuracy": np.mean(np.argmax(logits, axis=1) == test_labels),
        "source": source,
        "largest_train": rows[:, largest].astype(np.float64),
        "diagonal_gram": _weighted(spanning, rows, weights, columns),
        "diagonal_square": _weighted(spanning, spanning, weights**2, columns),
    }
    names = ("test_train", "test_gram", "diagonal_test_gram", "diagonal_test", "largest_test")
    parts = {name: [] for name in names}
    bar = tqdm(total=points, desc="test points")
    weights = weights.astype(np.float32)
    for jacobian in network.jacobians(params, test_images[:points]):
        block = jacobian.reshape(-1, len(flat))
        parts["test_train"].append(_product(block, rows, columns))
        parts["diagonal_test"].append(_product(block * weights, spanning, columns))
        parts["test_gram"].append(_blocks(jacobian, jacobian, columns))
        parts["diagonal_test_gram"].append(_blocks(jacobian * weights, jacobian, columns))
        parts["largest_test"].append(jacobian[:, :, largest].astype(np.float64))
        bar.update(len(jacobian))
    return found | {name: np.concatenate(part) for name, part in parts.items()}


def _hessian(probabilities):
    """`diag(p) - p p^T` for every row p."""
    outer = probabilities[:, :, None] * probabilities[:, None, :]
    return np.einsum("nk,kl->nkl", probabilities, np.eye(CLASSES)) - outer


def _roots(hessian):
    values, vectors = np.linalg.eigh(hessian)
    return np.sqrt(np.maximum(values, 0))[:, :, None] * vectors.transpose(0, 2, 1)


def _within(gram, hessian):
    """`R J J^T R^T` with the roots R of the Hessian blocks: it has the eigenvalues of the GGN."""
    half = times_blocks(_roots(hessian), gram)
    return times_blocks(_roots(hessian), half.T)


def times_blocks(blocks, matrix):
    return np.matmul(blocks, matrix.reshape(len(blocks), CLASSES, -1)).reshape(matrix.shape)


def _product(left, right, columns):
    """`left right^T`, summed over blocks of columns in float64."""
    total = np.zeros((len(left), len(right)))
    for part in columns:
        total += left[:, part] @ right[:, part].T
    return total


def _blocks(left, right, columns):
    total = np.zeros((len(left), CLASSES, CLASSES))
    for part in columns:
        total += np.matmul(left[:, :, part], right[:, :, part].transpose(0, 2, 1))
    return total


def _weighted(left, right, weights, columns):
    total = np.zeros((len(left), len(right)))
    for part in columns:
        total += (left[:, part] * weights[part].astype(np.float32)) @ right[:, part].T
    return total


def _coordinates(found):
    """Eigenvalues, and coordinates of training and test rows in the eigenvectors."""
    squares, vectors = np.linalg.eigh(found["gram"])
    kept = squares > 1e-10 * squares[-1]
    lengths, vectors = np.sqrt(squares[kept]), vectors[:, kept]
    train = vectors * lengths
    curvature = train.T @ times_blocks(found["hessian"] * (FULL / SUBSET), train)
    values, rotation = np.linalg.eigh((curvature + curvature.T) / 2)
    values, rotation = np.maximum(values[::-1], 0), rotation[:, ::-1]
    points = len(found["test_gram"])
    test = (found["test_train"] @ (vectors / lengths)) @ rotation
    test = test.reshape(points, CLASSES, -1)
    left = found["test_gram"] - np.matmul(test, test.transpose(0, 2, 1))
    squares, axes = np.linalg.eigh((left + left.transpose(0, 2, 1)) / 2)
    beyond = axes * np.sqrt(np.maximum(squares, 0))[:, None, :]
    return values, train @ rotation, test, beyond, (vectors / lengths) @ rotation


def fitted_prior_precision(values, flat):
    """Where the evidence of a precision `diag(values, 0) + lambda I` is largest.

    Twice the evidence, but for what does not depend on lambda, is `p log lambda - lambda ||w||^2 -
    log det`; eigenvalues that are not given are zero.
    """
    square = float(flat @ flat)

    def loss(log_precision):
        precision = np.exp(log_precision)
        return precision * square + np.sum(np.log1p(values / precision))

    return float(np.exp(minimize_scalar(loss, bounds=(-12, 12), method="bounded").x))
