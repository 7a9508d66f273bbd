"""Decides at which steps factors learn and bases are refreshed.

The schedule of a parameter depends only on its own blocks, its settings and its step count. So a resumed run follows
the same schedule, and so does a process that holds only some of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adabayes._util.arrays import namespace

__all__ = ["due_bases", "interval", "learns"]


def interval(t: Any, longest: int) -> Any:
    """Return the interval between two updates at step ``t``: an eighth of the steps so far, at most ``longest``.

    An average over few gradients changes with each of them, and its eigenvectors change too. Later it changes slowly.
    The eighth is rounded down to a power of two. Each interval then holds for at least eight updates, so
    every block is refreshed at least once at each interval.

    >>> [interval(t, longest=10) for t in (1, 8, 16, 31, 32, 64, 128, 1000)]
    [1, 1, 2, 2, 4, 8, 10, 10]
    """
    eighth = t // 8 | 1
    for shift in (1, 2, 4, 8, 16):  # sets all bits below the highest one
        eighth = eighth | eighth >> shift
    power = (eighth + 1) // 2
    return min(power, longest) if isinstance(t, int) else namespace(t).minimum(power, longest)


def learns(side: int, t: Any, every: Any) -> Any:
    """Tell whether a side's factor learns from the gradient of step ``t``: every ``every`` steps, alternating sides.

    >>> [[t for t in range(1, 9) if learns(side, t, every=4)] for side in (0, 1)]
    [[4, 8], [2, 6]]
    """
    return t % every == side * every // 2


def due_bases(t: int, every: int, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the bases that are refreshed at step ``t``, as positions in a stack of several parameters' bases.

    Basis ``i`` of a parameter is due when ``t - i`` is a multiple of ``every``, so that its bases take turns.

    Args:
        t: the step count, from 1.
        every: steps between two refreshes of a basis.
        ranges: the bases of each parameter that are in the stack: the first one, and the one after the last.

    >>> due_bases(t=3, every=2, ranges=[(0, 4), (2, 4)])
    [1, 3, 5]
    """
    due: list[int] = []
    position = 0
    for begin, end in ranges:
        due += range(position + (t - begin) % every, position + end - begin, every)
        position += end - begin
    return due
