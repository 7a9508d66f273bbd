"""Ctrl-C and SIGTERM, which ask a command to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Stopped", "handled", "raise_stopped"]


class Stopped(KeyboardInterrupt):
    """A signal has asked to stop, and that was done."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number  # as shells have it: 130 after Ctrl-C, 143 after SIGTERM


def raise_stopped(number: int) -> None:
    raise Stopped(number)


@contextmanager
def handled(handler: Callable[[int], None]) -> Iterator[None]:
    """Call ``handler`` with a signal's number when one comes."""
    before = {
        number: signal.signal(number, lambda number, frame: handler(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)  # None: it was not set from Python
