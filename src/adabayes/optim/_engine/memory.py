"""Where the memory of state begins.

Matrix products round differently in memory that is aligned differently. So state begins where torch's own memory does,
at a multiple of 64 bytes, also in a resumed run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["is_aligned", "with_own_memory"]

_ALIGNMENT = 64


def with_own_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Clone tensors that share their memory with others or are not aligned; return the rest unchanged.

    Views of one storage stay there if together they fill it.
    """
    unfilled: dict[int, int] = {}  # bytes of each storage that no tensor uses
    misaligned = set()
    for t in filter(_has_memory, tensors):
        storage = t.untyped_storage()
        unfilled[storage.data_ptr()] = unfilled.get(storage.data_ptr(), storage.nbytes()) - t.nbytes
        if not is_aligned(t):
            misaligned.add(storage.data_ptr())
    unfit = {storage for storage, left in unfilled.items() if left > 0} | misaligned
    return [t.clone() if _has_memory(t) and t.untyped_storage().data_ptr() in unfit else t for t in tensors]


def is_aligned(t: Tensor) -> bool:
    """Tell whether a tensor begins at an address that torch's allocator would choose, or has no memory."""
    return not _has_memory(t) or t.data_ptr() % _ALIGNMENT == 0


def _has_memory(t: Tensor) -> bool:
    return type(t) is torch.Tensor and not t.is_meta
