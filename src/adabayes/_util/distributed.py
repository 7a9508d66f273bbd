"""Capabilities of this version of torch.distributed."""

from __future__ import annotations

import inspect

import torch.distributed as dist

__all__ = ["num_rank_orders"]


def num_rank_orders() -> int:
    """Return how many orders of ranks process groups may use.

    Before torch 2.13, the ranks of a group are always sorted, so there is only one order.
    """
    keeps_order = dist.is_available() and "sort_ranks" in inspect.signature(dist.new_group).parameters
    return 8 if keeps_order else 1
