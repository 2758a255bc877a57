"""When a run on the host has to stop early: a Ctrl-C, or a time limit."""

import contextlib
import contextvars
import math
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

# A context variable, because the limit is for all loops of a call: main run, look-ahead, probes.
_deadline = contextvars.ContextVar("deadline", default=math.inf)


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Within it, loops on the host stop after the step in progress once `seconds` have passed.

    An outer limit that ends earlier stays in force. None sets no limit.
    """
    if seconds is None:
        yield
        return
    token = _deadline.set(min(_deadline.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def check_seconds(name: str, seconds: float | None, *, zero: bool = False) -> None:
    """Refuses what is no number of seconds; zero only if `zero`."""
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name}={seconds!r} must be a number of seconds.")
    if not (seconds > 0 or (zero and seconds == 0)):
        raise ValueError(
            f"{name}={seconds} must be {'at least 0' if zero else 'positive'}: it is in seconds."
        )


class Interruptible:
    """Turns the first Ctrl-C into a request to stop after the step in progress.

    The second Ctrl-C interrupts at once. Outside the main thread, where Python delivers no
    signals, only the time limit is seen.
    """

    def __init__(self) -> None:
        self.from_keyboard = False
        self._previous: Any = None

    @property
    def requested(self) -> bool:
        """Whether to stop: after a Ctrl-C, or when the time is up."""
        return self.from_keyboard or time.monotonic() >= _deadline.get()

    def __enter__(self) -> "Interruptible":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: Any) -> None:
        self.from_keyboard = True
        signal.signal(signal.SIGINT, self._previous)
