"""How close a method's predictive covariances are to the exact ones, and how good its predictions.

The figures of pslq.md section 6.2.2: mean Gaussian divergence per test point, log-trace, and
negative log-likelihood, calibration error and Brier score under the probit predictive.
"""

import jax.numpy as jnp
import numpy as np
from scipy.special import softmax

from pnkrylov.laplace import metrics


def probit(logits, covariance):
    """Class probabilities (n, K): every logit scaled by its own variance."""
    variances = np.diagonal(covariance, axis1=1, axis2=2)
    return softmax(logits / np.sqrt(1 + np.pi / 8 * variances), axis=1)


def predictive(logits, covariance, labels):
    """NLL, ECE (15 bins) and Brier score."""
    probabilities = jnp.asarray(probit(logits, covariance))
    labels = jnp.asarray(labels)
    return {
        "nll": float(metrics.negative_log_likelihood(probabilities, labels)),
        "ece": float(metrics.expected_calibration_error(probabilities, labels)),
        "brier": float(metrics.brier_score(probabilities, labels)),
    }


def fidelity(reference, covariance):
    """Mean divergence from the exact covariances, its standard error over points, log-trace.

    The divergence is infinite where a method has no variance in some direction of the outputs.
    """
    divergence = np.asarray(metrics.gaussian_kl(jnp.asarray(reference), jnp.asarray(covariance)))
    finite = np.isfinite(divergence)
    spread = np.std(divergence) / np.sqrt(len(divergence)) if finite.all() else np.nan
    return {
        "kl": float(np.mean(divergence)),
        "kl_infinite": int(np.sum(~finite)),
        "kl_over_points": float(spread),
        "log_trace": float(metrics.log_trace(jnp.asarray(covariance))),
    }
