"""Work on blocks that several processes have alike, as under DDP: each does a part of it, and all get the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["SharedWork"]


class SharedWork:
    """Shares work out over the processes of a group. What one has computed, all have to the bit."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._loads = [0] * dist.get_world_size(group)

    def map(
        self, function: Callable[[dict[str, Tensor]], dict[str, Tensor]], blocks: dict[str, Tensor], cost: int
    ) -> dict[str, Tensor]:
        """Return what a function makes of blocks, entry by entry of the same shape as what it is given.

        Args:
            function: takes and returns entries by their names, each with a leading axis of blocks; it need not return
                all of them.
            blocks: the same in all processes.
            cost: of one block.
        """
        like = next(iter(blocks.values()))
        shares = self._shares(len(like), cost)
        mine = torch.tensor(shares[dist.get_rank(self._group)], dtype=torch.long, device=like.device)
        done = function({name: x[mine] for name, x in blocks.items()})
        sizes = [blocks[name][0].numel() for name in done]
        sent = like.new_zeros(max(map(len, shares)), sum(sizes))
        sent[: len(mine)] = torch.cat([x.flatten(1) for x in done.values()], 1)
        come = sent.new_empty(len(shares) * len(sent), sent.shape[1])
        renamed = hasattr(dist, "all_gather_single")  # in torch 2.13, which warns of the old name
        gather = dist.all_gather_single if renamed else dist.all_gather_into_tensor
        gather(come, sent, group=self._group)
        found = torch.cat([part[: len(share)] for part, share in zip(come.split(len(sent)), shares)])
        order = torch.tensor([block for share in shares for block in share], device=like.device).argsort()
        columns = found[order].split(sizes, 1)
        return {name: column.reshape(blocks[name].shape) for name, column in zip(done, columns)}

    def _shares(self, count: int, cost: int) -> list[list[int]]:
        """Deal out blocks, each to the process that has had least to do so far."""
        shares: list[list[int]] = [[] for _ in self._loads]
        for block in range(count):
            place = self._loads.index(min(self._loads))
            shares[place].append(block)
            self._loads[place] += cost
        return shares
