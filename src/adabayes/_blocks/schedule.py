"""Decides at which steps factors learn and bases are refreshed.

The schedule depends only on shapes, settings and the step count, so a resumed run follows the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adabayes._blocks.blocks import Blocks
from adabayes._util.arrays import namespace

__all__ = ["due_blocks", "interval", "learns", "refresh_offsets", "spread"]


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


def due_blocks(t: int, every: int, offsets: Sequence[int], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the blocks whose bases are refreshed at step ``t``, as positions in a stack of several parameters' blocks.

    Block ``b`` of a parameter is due when ``t - offset - b`` is a multiple of ``every``.

    Args:
        t: the step count, from 1.
        every: steps between two refreshes of a block.
        offsets: the offset of each parameter, from :func:`refresh_offsets`.
        ranges: the blocks of each parameter that are in the stack: the first one, and the one after the last.

    >>> due_blocks(t=3, every=2, offsets=[0, 1], ranges=[(0, 4), (2, 4)])
    [1, 3, 4]
    """
    due: list[int] = []
    position = 0
    for offset, (begin, end) in zip(offsets, ranges):
        due += range(position + (t - offset - begin) % every, position + end - begin, every)
        position += end - begin
    return due


def refresh_offsets(blocks: Sequence[Blocks | None], refreshes: Sequence[int]) -> list[int]:
    """Return at which step, modulo its ``refresh``, the first block of each parameter is refreshed.

    Args:
        blocks: the blocks of each parameter; None if it is not rotated.
        refreshes: the ``refresh`` setting of each parameter.
    """
    offsets = [0] * len(blocks)
    for refresh in set(refreshes):
        indices = [index for index, other in enumerate(refreshes) if other == refresh]
        grids = [blocks[index] for index in indices]
        costs = [grid.refresh_cost if grid else 0 for grid in grids]
        counts = [grid.num_blocks if grid else 0 for grid in grids]
        for index, offset in zip(indices, spread(costs, counts, refresh)):
            offsets[index] = offset
    return offsets


def spread(costs: Sequence[int], num_blocks: Sequence[int], refresh: int) -> list[int]:
    """Spread refreshes over ``refresh`` steps, so that all steps cost about the same; return each parameter's offset.

    A parameter refreshes one block at each step, starting at its offset. If it has more than ``refresh`` blocks, it
    refreshes every ``refresh``-th of them at the same step. The costliest parameters choose first.

    Args:
        costs: cost of one block of each parameter.
        num_blocks: number of blocks of each parameter.
        refresh: steps between two refreshes of a block.

    >>> spread([8, 1, 8, 1], [2, 1, 1, 1], refresh=3)
    [0, 0, 2, 1]
    """
    loads = [0] * refresh
    offsets = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        offsets[index] = loads.index(min(loads))
        for block in range(num_blocks[index]):
            loads[(offsets[index] + block) % refresh] += costs[index]
    return offsets
