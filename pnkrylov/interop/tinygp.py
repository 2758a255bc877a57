"""tinygp: a solver that never forms the covariance matrix.

`tinygp.GaussianProcess(kernel, X, diag=..., solver=KrylovSolver)` is the whole change to a model;
the options of `KrylovSolver` are further keyword arguments of `GaussianProcess`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from pnkrylov.estimate import Estimate
from pnkrylov.gp.noisy import Factor, factor

try:
    from tinygp.noise import Diagonal
    from tinygp.solvers.solver import Solver
except ModuleNotFoundError as error:
    raise ImportError(
        "The tinygp bridge needs the package tinygp, which could not be imported "
        f"({error}). Install it with: pip install 'tinygp>=0.3.1'."
    ) from error


class KrylovSolver(Solver):
    """The covariance `K + noise` of a tinygp process through products only.

    Where a Cholesky factor would be used, this solver uses the symmetric square root, computed for
    every vector anew to a relative tolerance that the noise level proves (`pnkrylov.gp.roots`).
    What tinygp makes of it keeps its meaning: means and covariances of conditioned processes, and
    the quadratic form of `log_probability`, are accurate to about `rtol`; variances are at least
    the exact ones, so never negative beyond rounding. The log-determinant is an estimate from
    random probes; `logdet()` tells its standard error, and it is exact once `num_steps` reaches n.

    Gradients never differentiate through an iteration. Those of the quadratic form are accurate to
    `rtol`; that of the log-determinant is exact on the resolved space and estimated by
    `num_probes` random probes outside it.

    Pass an explicit `X_test`, of few points: conditioning at the n inputs takes n solves, and
    every test point takes two (tinygp computes variances apart from covariances).

    Attributes:
        X: The inputs.
        factor: The stand-in for the Cholesky factor.
    """

    X: Float[Array, " n *p"]
    factor: Factor

    def __init__(
        self,
        kernel: Any,
        X: Any,
        noise: Any,
        *,
        covariance: Any | None = None,
        key: PRNGKeyArray | None = None,
        **options: Any,
    ):
        """Builds the solver; `tinygp.GaussianProcess` does so.

        Args:
            kernel: The tinygp kernel.
            X: Inputs, shape `(n,)` or `(n, p)`, float32 or float64.
            noise: The tinygp noise model, a `Diagonal` one: what `diag=` makes.
            covariance: Must be None: this solver has no use for a matrix.
            key: Random key of probes and start vectors, `jax.random.key(0)` by default: the same
                arguments give the same numbers.
            **options: `num_steps`, `num_probes`, `probe_depth`, `rtol`, `max_steps` and
                `block_rows` of `pnkrylov.gp.noisy.factor`.

        Raises:
            TypeError, ValueError: As `pnkrylov.gp.noisy.factor`; `covariance` is given, or the
                noise is not diagonal.
            NotPositiveDefiniteError: A noise variance is not positive.
            PnkrylovError: As `pnkrylov.inverse`.
        """
        if covariance is not None:
            raise ValueError(
                "covariance: KrylovSolver works with products and never looks at a matrix. Leave "
                "covariance_value out, or use tinygp.solvers.DirectSolver for a given matrix."
            )
        if not isinstance(noise, Diagonal):
            raise TypeError(
                f"noise is {type(noise).__name__}, but KrylovSolver needs independent noise, whose "
                "variance bounds the spectrum. Pass diag=, or use tinygp.solvers.DirectSolver."
            )
        self.factor = factor(kernel, X, noise.diagonal(), key=key, **options)
        self.X = self.factor.operator.bare.inputs

    def variance(self) -> Float[Array, " n"]:
        """The diagonal of `K + noise`."""
        return self.factor.operator.diagonal()

    def covariance(self) -> Float[Array, "n n"]:
        """The dense matrix `K + noise`, evaluated when asked for."""
        operator = self.factor.operator
        return operator.bare.as_matrix() + jnp.diag(operator.noise)

    def logdet(self) -> Estimate:
        """The log-determinant of `K + noise` with its standard error; costs nothing."""
        return self.factor.belief.logdet()

    def normalization(self) -> Float[Array, ""]:
        """`(logdet + n log(2 pi)) / 2`, with the estimate of `logdet()`."""
        return self.factor.half_logdet() + 0.5 * len(self.X) * math.log(2 * math.pi)

    def solve_triangular(
        self, y: Float[Array, " n *k"], *, transpose: bool = False
    ) -> Float[Array, " n *k"]:
        """`(K + noise)^-1/2 y`, for a vector `(n,)` or columns `(n, k)`.

        Raises:
            PnkrylovError: `max_steps` are not enough for `rtol` (NaN inside `jit`).
        """
        rows = self.factor.inverse_root(y.reshape(len(y), -1).T, transpose=transpose)
        return rows.T.reshape(y.shape)

    def dot_triangular(self, y: Float[Array, " n *k"]) -> Float[Array, " n *k"]:
        """`(K + noise)^1/2 y`, for a vector `(n,)` or columns `(n, ...)`.

        Raises:
            PnkrylovError: As `solve_triangular`.
        """
        return self.factor.root(y.reshape(len(y), -1).T).T.reshape(y.shape)

    def condition(self, kernel: Any, X_test: Any | None, noise: Any) -> Float[Array, "s s"]:
        """The covariance at test points, given the data.

        Args:
            kernel: Kernel between the data and the test points, and among these.
            X_test: Test points; the n inputs if None, at the price of n solves.
            noise: tinygp noise model of the test points, added to the result.

        Returns:
            The matrix, shape `(s, s)`. Its diagonal without the noise is never negative.

        Raises:
            PnkrylovError: As `solve_triangular`.
        """
        points = self.X if X_test is None else X_test
        solved = self.factor.inverse_root(kernel(points, self.X), transpose=False)
        covariance = kernel(points, points) - jnp.matmul(
            solved, solved.T, precision=jax.lax.Precision.HIGHEST
        )
        variances = jnp.maximum(jnp.diagonal(covariance), 0)
        return jnp.fill_diagonal(covariance, variances, inplace=False) + noise
