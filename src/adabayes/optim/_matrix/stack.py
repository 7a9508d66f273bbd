"""Stacks the blocks of many matrices, so that one matrix product serves all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adabayes._blocks.blocks import Blocks, from_blocks, to_blocks
from adabayes.optim._engine.memory import is_aligned

__all__ = ["LocalStack", "copy_back_", "stack_"]


class LocalStack:
    """Stacks the blocks of unsharded matrices, and takes them apart again.

    Args:
        blocks: the blocks of each matrix, all of one size.
    """

    def __init__(self, blocks: Sequence[Blocks]) -> None:
        self._blocks = blocks
        self.ranges = [(0, b.num_blocks) for b in blocks]  # the blocks of each matrix that are in the stack

    def to_blocks(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return a stack of the blocks of all matrices."""
        stacks = [to_blocks(x, b) for x, b in zip(matrices, self._blocks)]
        return stacks[0] if len(stacks) == 1 else torch.cat(stacks)

    def from_blocks(self, stack: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Assemble matrices of these shapes from a stack of their blocks."""
        stacks = stack.split([b.num_blocks for b in self._blocks])
        return [from_blocks(x, b, shape) for x, b, shape in zip(stacks, self._blocks, shapes)]


def stack_(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one, along their first axis: a view, after moving them next to each other in memory.

    Where other tensors share their memory, moving them would keep all of the old memory alive. The result is then a
    copy, and :func:`copy_back_` copies changes back.
    """
    first = tensors[0]
    if len(tensors) == 1 and is_aligned(first):
        return first
    if not (_are_adjacent(tensors) and is_aligned(first)):
        stack = torch.cat(list(tensors))
        if not _fill_their_memory(tensors):
            return stack
        for t, view in zip(tensors, stack.split([len(t) for t in tensors])):
            t.set_(view)  # in place: other references to these tensors stay valid
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def copy_back_(tensors: Sequence[Tensor], stack: Tensor) -> None:
    """Copy the values of ``stack_(tensors)`` to the tensors, if it was a copy."""
    first = tensors[0]
    if stack is not first and stack.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
        torch._foreach_copy_(list(tensors), list(stack.split([len(t) for t in tensors])))


def _fill_their_memory(tensors: Sequence[Tensor]) -> bool:
    """Tell whether no other tensors can be in the memory of these."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(t.nbytes for t in tensors) >= sum(storages.values())


def _are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """Tell whether each tensor begins in memory where the one before it ends."""
    storage, end = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for t in tensors:
        if t.data_ptr() != end or not t.is_contiguous() or t.untyped_storage().data_ptr() != storage:
            return False
        end += t.nbytes
    return True
