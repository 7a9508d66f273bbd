"""Capabilities of this version of torch.distributed."""

from __future__ import annotations

import inspect

import torch.distributed as dist

__all__ = ["num_rank_orders"]


def num_rank_orders() -> int:
    """Return the number of rank orders to use for process groups: 1 before torch 2.13, which always sorts ranks."""
    keeps_order = dist.is_available() and "sort_ranks" in inspect.signature(dist.new_group).parameters
    return 8 if keeps_order else 1
