"""The torch side of performance_laplace.py: curvlinops and laplace-torch on the same weights."""

import copy
import sys

import numpy as np
import scipy.sparse.linalg as spla
import torch
from curvlinops import GGNLinearOperator
from laplace import Laplace
from laplace.curvature import BackPackGGN, CurvlinopsGGN
from peers_serve import serve
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BACKENDS = {"curvlinops": CurvlinopsGGN, "BackPACK": BackPackGGN}


def network(weights, biases):
    """Linear layers, and convolutions with 2x2 pooling before them, as their weights say."""
    layers = []
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if weight.ndim == 4:
            layer = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2])
        else:
            layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data, layer.bias.data = weight, bias
        layers += [layer]
        if index + 1 < len(weights):
            layers += [nn.Tanh()]
        if weight.ndim == 4:
            layers += [nn.MaxPool2d(2)]
            if weights[index + 1].ndim == 2:
                layers += [nn.Flatten()]
    return nn.Sequential(*layers)


def rows_of(model, x, y, new, vectors, prior_precision):
    """Rows on one network; vectors are rows in the order of torch's parameters."""
    parameters = list(model.parameters())
    loss = nn.CrossEntropyLoss(reduction="sum")
    ggn = GGNLinearOperator(model, loss, parameters, [(x, y)], check_deterministic=False)
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
    fitted = {}

    def products(count):
        block = vectors[:count].T
        return {"products": (ggn @ (block if count > 1 else block[:, 0])).reshape(-1, count).T}

    def eigenpairs(count, tolerance):
        start = vectors[0].numpy()
        operator = ggn.to_scipy()
        counted = []

        def product(vector):
            counted.append(None)
            return operator @ vector

        counting = spla.LinearOperator(operator.shape, product, dtype=np.float32)
        values, rows = spla.eigsh(counting, count, which="LA", tol=tolerance, v0=start)
        fitted["pairs"] = values, rows.T
        return {"products": len(counted)}

    def residual_of_pairs():
        values, rows = fitted["pairs"]
        left = ggn.to_scipy() @ rows.T - values[None, :] * rows.T
        return float(np.linalg.norm(left, axis=0).max() / values.max())

    def fit(structure, backend):
        # A copy: BackPACK hangs hooks into the model.
        posterior = Laplace(
            copy.deepcopy(model), "classification", "all", structure,
            prior_precision=prior_precision, backend=BACKENDS[backend],
        )  # fmt: skip
        posterior.fit(loader)
        if structure == "full":
            posterior.posterior_scale  # noqa: B018  (made on demand; ours makes it in its fit)
        fitted[structure] = posterior

    def functional(structure):
        _, covariance = fitted[structure]._glm_predictive_distribution(new)
        return {"covariance": covariance}

    return {
        "products": products,
        "eigenpairs": eigenpairs,
        "residual of the pairs": residual_of_pairs,
        "fit": fit,
        "functional": functional,
    }


def main(source):
    torch.set_num_threads(1)
    given = {name: torch.from_numpy(array) for name, array in np.load(source).items()}
    count = sum(name.startswith("weight") for name in given)
    weights, biases = ([given[f"{kind}{i}"] for i in range(count)] for kind in ("weight", "bias"))
    x, y, new, vectors = (given[name] for name in ("x", "y", "new", "vectors"))
    rows = rows_of(network(weights, biases), x, y, new, vectors, float(given["prior_precision"]))
    serve(rows, ("laplace-torch", "curvlinops-for-pytorch"))


if __name__ == "__main__":
    main(*sys.argv[1:])
