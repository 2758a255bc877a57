"""The curvature of a small network trained on scikit-learn's digits, in NumPy float64."""

import functools
import warnings

import numpy as np
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier


@functools.cache
def trained(num_data, hidden=16, weight_decay=1.0, seed=0):
    """Trains a 64-hidden-10 tanh network with weight decay.

    Returns:
        Inputs `(N, 64)`, labels, and the weights and biases of both layers.
    """
    inputs, labels = load_digits(return_X_y=True)
    chosen = np.random.default_rng(seed).permutation(len(inputs))[:num_data]
    inputs, labels = inputs[chosen] / 16, labels[chosen]
    options = {"activation": "tanh", "solver": "lbfgs", "max_iter": 200, "random_state": seed}
    network = MLPClassifier((hidden,), alpha=weight_decay, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        network.fit(inputs, labels)
    return inputs, labels, network.coefs_, network.intercepts_


def jacobians(inputs, coefs, intercepts):
    """Logits `(N, 10)` and their Jacobians `(N, 10, d)`: W1, b1, W2, b2 one after the other."""
    (first, second), (bias, last) = coefs, intercepts
    hidden = np.tanh(inputs @ first + bias)
    logits = hidden @ second + last
    count, outputs = logits.shape
    back = (1 - hidden**2)[:, None, :] * second.T[None]  # (N, O, hidden)
    eye = np.broadcast_to(np.eye(outputs), (count, outputs, outputs))
    parts = [
        inputs[:, None, :, None] * back[:, :, None, :],
        back,
        hidden[:, None, :, None] * eye[:, :, None, :],
        eye,
    ]
    return logits, np.concatenate([part.reshape(count, outputs, -1) for part in parts], axis=2)


def layer_sizes(coefs):
    """Numbers of parameters of W1, b1, W2, b2."""
    return [size for kernel in coefs for size in (kernel.size, kernel.shape[1])]


def softmax_hessians(logits):
    """`diag(p) - p p^T` of every observation, `(N, O, O)`, and p."""
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return p[:, :, None] * np.eye(p.shape[1])[None] - p[:, :, None] * p[:, None, :], p


def softmax_roots(p):
    """A square root of `diag(p) - p p^T`, not the symmetric one: `(I - p 1^T) diag(sqrt p)`."""
    return (np.eye(p.shape[1])[None] - p[:, :, None]) * np.sqrt(p)[:, None, :]


@functools.cache
def ggn(num_data, damping, hidden=16):
    """The GGN of the summed loss plus `damping I` (the weight decay of the training), dense.

    Returns:
        `(matrix (d, d), jacobians (N, O, d), hessians (N, O, O), gradient (d,), layer sizes)`.
    """
    inputs, labels, coefs, intercepts = trained(num_data, hidden, damping)
    logits, J = jacobians(inputs, coefs, intercepts)
    H, p = softmax_hessians(logits)
    rows = np.einsum("npo,npd->nod", softmax_roots(p), J).reshape(-1, J.shape[2])
    matrix = rows.T @ rows + damping * np.eye(J.shape[2])
    gradient = np.einsum("no,nod->d", p - np.eye(p.shape[1])[labels], J)
    return matrix, J, H, gradient, layer_sizes(coefs)
