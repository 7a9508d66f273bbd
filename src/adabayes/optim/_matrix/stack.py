"""Stacks the blocks of many matrices, so that one matrix product serves all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from adabayes._blocks.blocks import Blocks, from_blocks, to_blocks
from adabayes.eigenbasis import Sides
from adabayes.optim._matrix.refresh import MatrixState

__all__ = ["LocalStack", "StackedState"]

Ranges = list[tuple[int, int]]  # for each matrix, the first index and the end


class LocalStack:
    """Stacks the blocks of unsharded matrices, and takes them apart again.

    Args:
        blocks: the blocks of each matrix, all of one size.
    """

    def __init__(self, blocks: Sequence[Blocks]) -> None:
        self._blocks = blocks
        # the bases of each matrix that are in the stack, left and right
        self.ranges: tuple[Ranges, Ranges] = (
            [(0, b.num_bases(0)) for b in blocks],
            [(0, b.num_bases(1)) for b in blocks],
        )

    def to_blocks(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return a stack of the blocks of all matrices."""
        stacks = [to_blocks(x, b) for x, b in zip(matrices, self._blocks)]
        return stacks[0] if len(stacks) == 1 else torch.cat(stacks)

    def from_blocks(self, stack: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Assemble matrices of these shapes from a stack of their blocks."""
        stacks = stack.split([b.num_blocks for b in self._blocks])
        return [from_blocks(x, b, shape) for x, b, shape in zip(stacks, self._blocks, shapes)]

    def owners(self, device: torch.device) -> Sides:
        """Return the index of each block's left and right basis, or None if no bases are shared."""
        if not self._blocks[0].shared:
            return None, None
        columns: list[list[int]] = [[], []]
        for side, column in enumerate(columns):
            first = 0
            for b in self._blocks:
                column += [first + b.basis_of(block, side) for block in range(b.num_blocks)]
                first += b.num_bases(side)
        left, right = (torch.tensor(column, device=device) for column in columns)
        return left, right


class StackedState:
    """The state of several matrices as one stack.

    Args:
        entries: the entries of state by name, with one tensor for each matrix.
        owners: the indices of the blocks' bases, as :meth:`LocalStack.owners` returns them.
    """

    def __init__(self, entries: Mapping[str, Sequence[Tensor]], owners: Sides) -> None:
        self._entries = {name: [x for x in tensors if len(x)] for name, tensors in entries.items()}
        self._stacks = {name: x[0] if len(x) == 1 else torch.cat(x) for name, x in self._entries.items()}
        factors = self._stacks.get("factor_0"), self._stacks.get("factor_1")
        bases = self._stacks.get("basis_0"), self._stacks.get("basis_1")
        self.matrices = MatrixState(self._stacks["exp_avg"], self._stacks["exp_avg_sq"], factors, bases, owners)

    def copy_back_(self) -> None:
        """Copy the stack to the entries of each matrix."""
        for name, tensors in self._entries.items():
            if len(tensors) > 1:
                torch._foreach_copy_(tensors, list(self._stacks[name].split([len(x) for x in tensors])))
