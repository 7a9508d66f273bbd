"""Handles Ctrl-C and SIGTERM, which ask a command to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Stopped", "handled", "raise_stopped"]


class Stopped(KeyboardInterrupt):
    """Raised when the command has stopped because of a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number  # the exit code that shells expect: 130 after Ctrl-C, 143 after SIGTERM


def raise_stopped(number: int) -> None:
    raise Stopped(number)


@contextmanager
def handled(handler: Callable[[int], None]) -> Iterator[None]:
    """Call ``handler`` with the number of each signal that arrives."""
    before = {
        number: signal.signal(number, lambda number, frame: handler(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)  # None: it was not set from Python
