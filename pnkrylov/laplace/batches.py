"""Data as a sequence of batches that can be gone through again and again."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from pnkrylov._structure import describe
from pnkrylov.laplace.models import num_examples, take


class Batches:
    """Batches `(inputs, targets)`; every `iter` goes through all of the data.

    Attributes:
        in_memory: the data when they are one batch of arrays, else None.
    """

    def __init__(self, start: Callable[[], Iterator[Any]], in_memory: Any = None):
        self._start = start
        self.in_memory = in_memory

    def __iter__(self) -> Iterator[tuple[int, PyTree, Any]]:
        """Yields the number of the first example, inputs and targets of every batch."""
        offset = 0
        for batch in self._start():
            inputs, targets = as_batch(batch)
            yield offset, inputs, targets
            offset += num_examples(inputs)


def as_batches(data: Any, batch_size: int | None = None) -> Batches:
    """Reads what the user calls data.

    Args:
        data: A tuple `(x, y)` of arrays (x may be a pytree of them), a collection of such batches
            (a list, a data loader), or a function without arguments that starts a new pass.
        batch_size: Cut arrays into batches of this many examples (the last may be smaller).

    Returns:
        The batches.

    Raises:
        ValueError: Data are empty, x and y differ in length, or `batch_size` is not positive or
            given for data that come in batches.
        TypeError: Data are none of these, or an iterator that can only be gone through once.
    """
    if batch_size is not None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
            raise TypeError(f"batch_size={batch_size!r} must be an int.")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[1], tuple):
        inputs, targets = as_batch(data)
        if batch_size is None or batch_size >= num_examples(inputs):
            return Batches(lambda: iter([(inputs, targets)]), in_memory=(inputs, targets))
        return Batches(lambda: _slices(inputs, targets, int(batch_size)))
    if batch_size is not None:
        raise ValueError(
            f"batch_size={batch_size} was given, but data is {type(data).__name__}, which comes in "
            "batches of its own. Leave batch_size out, or pass a tuple (x, y) of arrays."
        )
    if callable(data) and not isinstance(data, Iterable):
        start: Callable[[], Any] = data
        return Batches(lambda: iter(start()))
    if isinstance(data, Iterator):
        raise TypeError(
            "data is an iterator, which can be gone through only once, but every product needs all "
            "of the data. Pass a list of batches, or a function that starts a new iterator: "
            "data=lambda: make_batches()."
        )
    if not isinstance(data, Iterable) or _is_array(data) or isinstance(data, (str, dict)):
        raise TypeError(
            f"data is {type(data).__name__}; a tuple (x, y) of arrays, an iterable of such "
            "batches, or a function that returns one is needed."
        )
    return Batches(lambda: iter(data))


def as_batch(batch: Any) -> tuple[PyTree, Any]:
    """Checks one batch `(x, y)` and turns its leaves into arrays.

    Raises:
        ValueError: It is empty, or x and y differ in length.
        TypeError: It is not a pair.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(f"A batch of data is {describe(batch)}; a pair (x, y) is needed.")
    inputs = jtu.tree_map(_as_array, batch[0])
    targets = _as_array(batch[1])
    n = num_examples(inputs)
    if np.ndim(targets) == 0 or np.shape(targets)[0] != n:
        raise ValueError(
            f"x has {n} examples, but y has shape {tuple(np.shape(targets))}: one target per "
            "example is needed."
        )
    if n == 0:
        raise ValueError("data is empty: x and y have no example.")
    return inputs, targets


def _as_array(leaf: Any) -> jax.Array:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(np.asarray(leaf))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _slices(inputs: PyTree, targets: Any, batch_size: int) -> Iterator[tuple[PyTree, Any]]:
    for start in range(0, num_examples(inputs), batch_size):
        window = slice(start, start + batch_size)
        yield take(inputs, window), take(targets, window)
