"""Decides which process owns which blocks of a sharded matrix.

The owners of a matrix are consecutive processes. Each owns a range of consecutive blocks, and all ranges have the same
length, except that the last one may be shorter. So one number describes them: the process that owns the first range.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["first_owners", "owned_range"]


def first_owners(costs: Sequence[int], num_blocks: Sequence[int], loads: list[int], num_candidates: int) -> list[int]:
    """Choose which process owns the first range of blocks of each matrix, so that all processes have equal work.

    If all processes get equally many blocks of a matrix, process 0 owns the first range: then most shards already are
    where they are needed. Of the other matrices, the costliest choose first, and each chooses the processes with the
    least work.

    Args:
        costs: cost of one block of each matrix.
        num_blocks: number of blocks of each matrix.
        loads: the work of each process so far, to which the cost of these matrices is added.
        num_candidates: how many different first owners there may be; each needs its own process group.
    """
    world = len(loads)
    candidates = range(0, world, -(-world // num_candidates))
    firsts = [0] * len(costs)
    lengths = [_range_lengths(count, world) for count in num_blocks]

    def loads_after(index: int, first: int) -> list[int]:
        return [loads[(first + i) % world] + costs[index] * length for i, length in enumerate(lengths[index])]

    for index in sorted(range(len(costs)), key=lambda index: -costs[index] * lengths[index][0]):
        if num_blocks[index] % world:
            outcomes = {first: loads_after(index, first) for first in candidates}
            firsts[index] = min(candidates, key=lambda first: (max(outcomes[first]), sum(outcomes[first])))
        for i, load in enumerate(loads_after(index, firsts[index])):
            loads[(firsts[index] + i) % world] = load
    return firsts


def owned_range(num_blocks: int, world: int, first: int, process: int) -> tuple[int, int]:
    """Return the blocks that a process owns: the first one, and the one after the last.

    >>> [owned_range(num_blocks=5, world=3, first=1, process=i) for i in range(3)]
    [(4, 5), (0, 2), (2, 4)]
    """
    length = -(-num_blocks // world)
    begin = min(length * ((process - first) % world), num_blocks)
    return begin, min(begin + length, num_blocks)


def _range_lengths(num_blocks: int, world: int) -> list[int]:
    """Return how many blocks each owner has, as DTensor shards them."""
    length = -(-num_blocks // world)
    return [min(length, num_blocks - begin) for begin in range(0, num_blocks, length)]
