"""Counts the operations of AdaBayes-K's steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["count_operations"]


def count_operations(work: Callable[[], None]) -> float:
    """Return the operations of a function: products of matrices, which torch counts, and QR decompositions."""
    decompositions = 0.0
    qr = torch.linalg.qr

    def counting(x: torch.Tensor) -> Any:
        nonlocal decompositions
        decompositions += len(x) * 8 / 3 * x.shape[-1] ** 3
        return qr(x)

    def in_place(_: Any, a: Any, b: Any, *args: Any, **options: Any) -> int:
        return int(2 * math.prod(a) * b[-1])  # which torch does not count

    mapping = {torch.ops.aten.baddbmm_: in_place}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter, patch.object(torch.linalg, "qr", counting):
        work()
    return float(counter.get_total_flops() + decompositions)
