"""laplace-torch's side of the CIFAR-10 experiment, in an environment of its own.

Reads the weights and the training rows of the cache, and an npz of images. Writes KFAC's output
covariances at test points, and inner products of `Y = J' Psi`, J' the first training rows and Psi
the posterior covariance of a KFAC that is fitted without rescaling. cifar10.py runs it:

    PYTHON-WITH-LAPLACE-TORCH cifar10_laplace_torch.py WEIGHTS ROWS IN OUT
"""

import sys
import time
import warnings

import laplace
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from train_cifar10 import network

CLASSES = 10


def fitted(model, loader, precision, temperature):
    posterior = laplace.Laplace(
        model, "classification", subset_of_weights="all", hessian_structure="kron",
        prior_precision=precision, temperature=temperature,
    )  # fmt: skip
    posterior.fit(loader)
    return posterior


def jacobian(model, image):
    """`(10, p)` in torch's order of parameters."""
    outputs = model(image[None])[0]
    rows = []
    for index in range(CLASSES):
        slopes = torch.autograd.grad(outputs[index], list(model.parameters()), retain_graph=True)
        rows.append(torch.cat([slope.reshape(-1) for slope in slopes]))
    return torch.stack(rows)


def order_of(names, model):
    """Index that takes rows in JAX's order (names sorted) to torch's."""
    sizes = {name: part.numel() for name, part in model.named_parameters()}
    starts, position = {}, 0
    for name in sorted(names):
        starts[name], position = position, position + sizes[name]
    return np.concatenate([np.arange(starts[name], starts[name] + sizes[name]) for name in sizes])


def main(weights, rows_path, source, target):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = network()
    with np.load(weights, allow_pickle=False) as stored:
        state = {name: torch.from_numpy(stored[name]) for name in stored.files if name != "about"}
    model.load_state_dict(state)
    model.eval()
    given = np.load(source)
    images, labels, test = (torch.from_numpy(given[k]) for k in ("images", "labels", "test"))
    loader = DataLoader(TensorDataset(images, labels.long()), batch_size=50)
    precision, scale = float(given["prior_precision"]), float(given["num_data"]) / len(images)
    started = time.process_time()
    # (c H + lambda)^-1 = (H / T + lambda)^-1 with the temperature T = 1 / c.
    posterior = fitted(model, loader, precision, 1 / scale)
    surrogate = fitted(model, loader, precision, 1.0)
    order = order_of(state, model)
    rows = np.load(rows_path, mmap_mode="r")
    spanning = torch.from_numpy(rows[: CLASSES * int(given["spanning"])][:, order])
    with torch.no_grad():
        span = torch.cat(
            [surrogate.posterior_precision.bmm(part, exponent=-1) for part in spanning.split(100)]
        )
    made = {
        "logits": model(test).detach().numpy(),
        "gram": (span @ span.T).double().numpy(),
        "images": (span @ spanning.T).double().numpy(),
    }
    del spanning
    parts = [
        torch.from_numpy(rows[start : start + 200][:, order]) for start in range(0, len(rows), 200)
    ]
    made["train"] = np.concatenate([(span @ part.T).numpy() for part in parts], axis=1)
    del parts
    covariances, along = [], []
    for image in tqdm(test, desc="test points"):
        own = jacobian(model, image)
        with torch.no_grad():
            covariances.append(
                (own @ posterior.posterior_precision.bmm(own, exponent=-1).T).numpy()
            )
            along.append((own @ span.T).numpy())
    covariances = np.stack(covariances).astype(np.float64)
    made["covariance"] = (covariances + covariances.transpose(0, 2, 1)) / 2
    made["test"] = np.concatenate(along).astype(np.float64)
    np.savez(target, **made, seconds=time.process_time() - started)


if __name__ == "__main__":
    main(*sys.argv[1:])
