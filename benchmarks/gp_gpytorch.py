"""gpytorch's side of bench_gp.py, run by it in an environment of its own: npz in, npz out."""

import sys
import time
import warnings

import gpytorch
import numpy as np
import torch


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, lengthscale, variance):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        base = gpytorch.kernels.MaternKernel(nu=1.5)
        base.lengthscale = lengthscale
        self.covar_module = gpytorch.kernels.ScaleKernel(base)
        self.covar_module.outputscale = variance

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def main(source, target):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    # Negative variances are clamped by gpytorch, with a warning; they are counted below instead.
    warnings.simplefilter("ignore")
    given = np.load(source)
    x, y, new = (torch.from_numpy(given[name]) for name in ("X", "y", "Xs"))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = float(given["noise"])
    made = {}
    for steps in given["steps"]:
        times = []
        for _ in range(2):
            model = Model(x, y, likelihood, float(given["lengthscale"]), float(given["variance"]))
            model.eval()
            started = time.perf_counter()
            with (
                torch.no_grad(),
                gpytorch.settings.max_cholesky_size(0),
                gpytorch.settings.fast_pred_var(),
                gpytorch.settings.max_root_decomposition_size(int(steps)),
                gpytorch.settings.max_cg_iterations(1000),
            ):
                posterior = model(new)
                mean = posterior.mean.numpy()
                covariance = posterior.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)
                variance = covariance.numpy()
            times.append(time.perf_counter() - started)
        made |= {f"mean{steps}": mean, f"variance{steps}": variance}
        made[f"seconds{steps}"] = np.array(min(times))
    np.savez(target, **made, version=np.array(gpytorch.__version__))


if __name__ == "__main__":
    main(*sys.argv[1:])
