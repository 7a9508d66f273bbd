"""Arrays whose last axes agree, seen as one, so that one product of matrices serves them all.

Products of matrices round differently in memory that is aligned differently. So state begins where torch's own memory
does, at a multiple of 64 bytes, that of a resumed run as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["cat", "cat_", "put_back_", "with_own_memory"]

_ALIGNMENT = 64


def with_own_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors, or clones of those whose memory is not theirs, or not where torch would have it begin.

    Views of one memory are left there if they fill it, all of them together.
    """
    unfilled: dict[int, int] = {}
    misaligned = set()
    for t in filter(_has_memory, tensors):
        memory = t.untyped_storage()
        unfilled[memory.data_ptr()] = unfilled.get(memory.data_ptr(), memory.nbytes()) - t.nbytes
        if not _is_aligned(t):
            misaligned.add(memory.data_ptr())
    others = {memory for memory, left in unfilled.items() if left > 0} | misaligned
    return [t.clone() if _has_memory(t) and t.untyped_storage().data_ptr() in others else t for t in tensors]


def _has_memory(t: Tensor) -> bool:
    return type(t) is Tensor and not t.is_meta


def _is_aligned(t: Tensor) -> bool:
    """Tell whether a tensor begins where torch would have it begin; one without memory does."""
    return not _has_memory(t) or t.data_ptr() % _ALIGNMENT == 0


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one, along their first axis: a copy, unless there is only one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def cat_(tensors: Sequence[Tensor]) -> Tensor:
    """Return a view of tensors as one, after moving their memory together where it is not yet so.

    Where that would leave others behind, which would keep all of the old memory, it is a copy: see :func:`put_back_`.
    """
    first = tensors[0]
    if len(tensors) == 1 and _is_aligned(first):
        return first
    if not (_side_by_side(tensors) and _is_aligned(first)):
        together = torch.cat(list(tensors))
        if not _are_all(tensors):
            return together
        for t, place in zip(tensors, together.split([len(t) for t in tensors])):
            t.set_(place)  # the same tensors, to all who hold them
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def put_back_(tensors: Sequence[Tensor], together: Tensor) -> None:
    """Copy the numbers of ``cat_(tensors)`` to the tensors, if it was a copy."""
    first = tensors[0]
    if together is not first and together.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
        torch._foreach_copy_(list(tensors), list(together.split([len(t) for t in tensors])))


def _are_all(tensors: Sequence[Tensor]) -> bool:
    """Tell whether these are all the tensors in the memory that they have."""
    there = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(t.nbytes for t in tensors) >= sum(there.values())


def _side_by_side(tensors: Sequence[Tensor]) -> bool:
    memory, end = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for t in tensors:
        if t.data_ptr() != end or not t.is_contiguous() or t.untyped_storage().data_ptr() != memory:
            return False
        end += t.nbytes
    return True
