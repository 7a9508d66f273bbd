"""Tensors of one shape, seen as one tensor, so that one product of matrices serves them all.

Products of matrices round differently in memory that is aligned differently. So state begins where torch's own memory
does, at a multiple of 64 bytes, that of a resumed run as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["is_aligned", "stack", "stack_"]

_ALIGNMENT = 64


def is_aligned(t: Tensor) -> bool:
    """Tell whether a tensor begins where torch would have it begin; one without memory does."""
    return t.is_meta or type(t) is not Tensor or t.data_ptr() % _ALIGNMENT == 0


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as one: a view where they lie side by side in memory, or else a copy."""
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0)
    return _view(tensors) if _side_by_side(tensors) else torch.stack(list(tensors))


def stack_(tensors: Sequence[Tensor]) -> Tensor:
    """Return a view of tensors of one shape as one, after moving their memory together where it is not yet so."""
    if len(tensors) == 1 and is_aligned(tensors[0]):
        return tensors[0].unsqueeze(0)
    if not (_side_by_side(tensors) and is_aligned(tensors[0])):
        for t, place in zip(tensors, torch.stack(list(tensors))):
            t.set_(place)  # the same tensors, to all who hold them
    return _view(tensors)


def _side_by_side(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    if not first.is_contiguous() or not first.numel():
        return False
    start, size = first.data_ptr(), first.numel() * first.element_size()
    memory = first.untyped_storage().data_ptr()
    return all(
        t.data_ptr() == start + i * size and t.untyped_storage().data_ptr() == memory and t.is_contiguous()
        for i, t in enumerate(tensors)
    )


def _view(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
