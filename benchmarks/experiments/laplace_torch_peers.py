"""laplace-torch's side of the FashionMNIST experiment, in an environment of its own.

In (npz): weights in torch's layout (`state/<name>`), training subset, test images, prior precision,
the number of examples that the subset stands for, and rows (k, p) in torch's order of parameters.
Out (npz): output covariances of KFAC and ELLA, and the rows times the KFAC posterior covariance.

    /path/to/venv-peers/bin/python benchmarks/experiments/laplace_torch_peers.py IN OUT
"""

import sys
import time
import warnings
from importlib import metadata

import laplace
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(288, 20), nn.ReLU(), nn.Linear(20, 10),
    )  # fmt: skip


def output_covariances(posterior, images, size=50):
    parts = [
        posterior._glm_predictive_distribution(images[start : start + size])[1].detach()
        for start in range(0, len(images), size)
    ]
    return torch.cat(parts).double().numpy()


def main(source, target):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    given = np.load(source)
    model = network()
    state = {
        key[6:]: torch.from_numpy(given[key]) for key in given.files if key.startswith("state/")
    }
    model.load_state_dict(state)
    model.eval()
    images, labels, test = (torch.from_numpy(given[k]) for k in ("images", "labels", "test"))
    loader = DataLoader(TensorDataset(images, labels.long()), batch_size=50)
    # (c H + lambda)^-1 = (H / T + lambda)^-1 with the temperature T = 1 / c.
    temperature = len(images) / float(given["num_data"])
    made = {"logits": model(test).detach().numpy()}
    for factor in given["factors"]:
        options = {
            "likelihood": "classification",
            "prior_precision": float(given["prior_precision"] * factor),
            "temperature": temperature,
        }
        started = time.process_time()
        kfac = laplace.Laplace(model, subset_of_weights="all", hessian_structure="kron", **options)
        kfac.fit(loader)
        made[f"kfac{factor:g}"] = output_covariances(kfac, test)
        made[f"kfac_seconds{factor:g}"] = time.process_time() - started
        rows = torch.from_numpy(given["rows"])
        with torch.no_grad():
            images_of_rows = kfac.posterior_precision.bmm(rows, exponent=-1)
        made[f"kfac_rows{factor:g}"] = images_of_rows.numpy()
        print("kfac", factor, time.process_time() - started, flush=True)
        started = time.process_time()
        count = int(given["ella"])
        ella = laplace.ELLA(model, subsample_size=count, n_eigenvalues=count, **options)
        ella.fit(loader)
        made[f"ella{factor:g}"] = output_covariances(ella, test)
        made[f"ella_seconds{factor:g}"] = time.process_time() - started
        print("ella", factor, time.process_time() - started, flush=True)
    np.savez(target, **made, version=np.array(metadata.version("laplace-torch")))


if __name__ == "__main__":
    main(*sys.argv[1:])
