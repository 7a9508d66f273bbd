"""Splits work on replicated blocks across ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Entries", "Ranks", "Replicas"]

Entries = dict[str, Tensor]  # several tensors by name, each with a leading axis of blocks


class Ranks:
    """The ranks that split work on blocks: here a single one, for which collectives are no-ops."""

    communicates = False

    def map(self, function: Callable[[Entries], Entries], blocks: Entries, cost: int) -> Entries:
        """Apply a function to blocks.

        Args:
            function: takes entries and returns entries for the same blocks; it may be called with no block.
            blocks: the entries, identical on all ranks.
            cost: the relative cost of one block.
        """
        return function(blocks)


class Replicas(Ranks):
    """Ranks with the same parameters and gradients, as under DDP: each computes some blocks for all of them.

    All ranks end with identical bits.
    """

    communicates = True

    def __init__(self, group: Any) -> None:
        self._group = group
        self._loads = [0] * dist.get_world_size(group)

    def map(self, function: Callable[[Entries], Entries], blocks: Entries, cost: int) -> Entries:
        """Apply a function to this rank's blocks, and gather the results of all ranks."""
        like = next(iter(blocks.values()))
        assigned = self._assign(len(like), cost)
        mine = torch.tensor(assigned[dist.get_rank(self._group)], dtype=torch.long, device=like.device)
        results = function({name: x[mine] for name, x in blocks.items()})
        shapes = {name: x.shape[1:] for name, x in results.items()}
        sizes = [shape.numel() for shape in shapes.values()]
        sent = like.new_zeros(max(map(len, assigned)), sum(sizes))
        sent[: len(mine)] = torch.cat([x.flatten(1) for x in results.values()], 1)
        received = sent.new_empty(len(assigned) * len(sent), sent.shape[1])
        renamed = hasattr(dist, "all_gather_single")  # torch 2.13 warns about the old name
        gather = dist.all_gather_single if renamed else dist.all_gather_into_tensor
        gather(received, sent, group=self._group)
        gathered = torch.cat([x[: len(rows)] for x, rows in zip(received.split(len(sent)), assigned)])
        order = torch.tensor([block for rows in assigned for block in rows], device=like.device).argsort()
        columns = gathered[order].split(sizes, 1)
        return {name: x.reshape(len(like), *shape) for (name, shape), x in zip(shapes.items(), columns)}

    def _assign(self, num_blocks: int, cost: int) -> list[list[int]]:
        """Assign each block to the rank with the least work so far."""
        assigned: list[list[int]] = [[] for _ in self._loads]
        for block in range(num_blocks):
            rank = self._loads.index(min(self._loads))
            assigned[rank].append(block)
            self._loads[rank] += cost
        return assigned
