"""Arithmetic on many tensors at once, in which the update rules are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adabayes._util.tensors import Scalar

__all__ = ["Batch", "Step"]

Operand = Any  # a Batch, a number, a 0-dim tensor, or a vector with one number for each tensor


class Batch:
    """A list of tensors with the same device and dtype, whose methods have the names and the meaning of torch's.

    Methods with an underscore change the batch; others return a new one. In the foreach form, changes are written to
    the tensors' memory, in one call for all of them. In the single-tensor form, which autograd may follow, new tensors
    replace the old ones.

    Args:
        tensors: the tensors.
        in_place: whether changes are written to the tensors' memory.
        params: for a batch of gradients, the optimizer's parameters that they belong to.
    """

    def __init__(self, tensors: Sequence[Tensor], in_place: bool, params: Sequence[Tensor] = ()) -> None:
        self.tensors = list(tensors)
        self.in_place = in_place
        self.params = params

    def lerp_(self, end: Operand, weight: Scalar) -> Batch:
        like = self.tensors[0]
        if isinstance(end, Tensor):
            end = end.to(like)
        elif not isinstance(end, Batch):  # created on the device, to avoid a sync
            end = torch.full((), end, dtype=like.dtype, device=like.device)
        return self._change("lerp", end, weight)

    def add(self, other: Operand, alpha: float = 1.0) -> Batch:
        return self._new("add", other) if alpha == 1.0 else self._new("add", other, alpha=alpha)

    def add_(self, other: Operand, alpha: float = 1.0) -> Batch:
        return self._change("add", other) if alpha == 1.0 else self._change("add", other, alpha=alpha)

    def sub(self, other: Batch) -> Batch:
        return self._new("sub", other)

    def mul(self, other: Operand) -> Batch:
        return self._new("mul", other)

    def mul_(self, other: Operand) -> Batch:
        return self._change("mul", other)

    def div_(self, other: Operand) -> Batch:
        return self._change("div", other)

    def addcmul_(self, one: Batch, other: Batch, value: float) -> Batch:
        return self._change("addcmul", one, other, value=value)

    def maximum_(self, other: Batch) -> Batch:
        return self._change("maximum", other)

    def clamp_(self, least: Operand, most: Operand) -> Batch:
        return self._clamp_("min", least)._clamp_("max", most)

    def clamp_min_(self, least: Operand) -> Batch:
        return self._clamp_("min", least)

    def _clamp_(self, side: str, bound: Operand) -> Batch:
        if self.in_place:
            return self._change(f"clamp_{side}", bound)
        self.tensors = [t.clamp(**{side: bound}) for t in self.tensors]  # torch 2.6 cannot shard the others
        return self

    def neg(self) -> Batch:
        return self._new("neg")

    def sqrt(self) -> Batch:
        return self._new("sqrt")

    def sqrt_(self) -> Batch:
        return self._change("sqrt")

    def reciprocal_(self) -> Batch:
        return self._change("reciprocal")

    def clone(self) -> Batch:
        return self.mul(1.0)  # DTensors have no foreach copy

    def zero_disagreeing(self, other: Batch) -> Batch:
        """Return 0 where the sign is not that of ``other``, and keep nan."""
        return self.map(lambda x, y: torch.where(x * y.sign() <= 0, 0.0, x), other)

    def map(self, function: Callable[..., Tensor], *others: Batch) -> Batch:
        """Apply a function to each tensor, together with the tensors of other batches at the same index."""
        rows = zip(self.tensors, *(other.tensors for other in others))
        return Batch([function(*row) for row in rows], self.in_place)

    def replace_(self, index: int, value: Tensor) -> None:
        """Replace the values of one tensor."""
        if self.in_place:
            self.tensors[index].copy_(value)
        else:
            self.tensors[index] = value

    def move_(self, step: Step, sign: int) -> Batch:
        """Subtract ``sign * step``."""
        size = -sign * step.size
        numerator = step.numerator
        if isinstance(size, Tensor):
            numerator, size = numerator.mul(size), 1.0
        if step.denominator is None:
            return self._change("add", numerator, alpha=size)
        return self._change("addcdiv", numerator, step.denominator, value=size)

    def find_zeros(self, may_sync: bool) -> list[int]:
        """Return the indices of the tensors that may contain zeros or nan: all of them, if that cannot be decided.

        Args:
            may_sync: whether the program may read values, which a captured or compiled graph must not. On devices other
                than the CPU this costs a sync.
        """
        if not may_sync or any(type(t) is not Tensor or t.is_meta for t in self.tensors):
            return list(range(len(self.tensors)))
        indices = [i for i, t in enumerate(self.tensors) if t.numel()]
        if not indices:
            return []
        tensors = [self.tensors[i] for i in indices]
        if tensors[0].is_cpu:
            least = list(map(torch.amin, tensors))
        else:  # three launches in all, instead of one for each tensor
            least = list(torch._foreach_neg(torch._foreach_max(torch._foreach_neg(tensors))))
        positive = (torch.stack(least) > 0).tolist()
        return [i for i, known in zip(indices, positive) if not known]

    def _change(self, operation: str, *operands: Operand, **options: float) -> Batch:
        if self.in_place:
            function = getattr(torch, f"_foreach_{operation}_")
            function(self.tensors, *map(self._for_foreach, operands), **options)
        else:
            self.tensors = self._one_by_one(operation, operands, options)
        return self

    def _new(self, operation: str, *operands: Operand, **options: float) -> Batch:
        if self.in_place:
            function: Callable[..., list[Tensor]] = getattr(torch, f"_foreach_{operation}")
            tensors = function(self.tensors, *map(self._for_foreach, operands), **options)
        else:
            tensors = self._one_by_one(operation, operands, options)
        return Batch(tensors, self.in_place, self.params)

    def _for_foreach(self, operand: Operand) -> Any:
        """Convert an operand to a type that foreach functions take."""
        if isinstance(operand, Batch):
            return operand.tensors
        if not isinstance(operand, Tensor):
            return operand
        return list(operand.unbind()) if operand.dim() else [operand] * len(self.tensors)

    def _one_by_one(self, operation: str, operands: Sequence[Operand], options: dict[str, float]) -> list[Tensor]:
        columns = [o.tensors if isinstance(o, Batch) else [o] * len(self.tensors) for o in operands]
        return [getattr(torch, operation)(*row, **options) for row in zip(self.tensors, *columns)]


class Step(NamedTuple):
    """A step: ``size * numerator / denominator`` is subtracted from the weights."""

    numerator: Batch
    denominator: Batch | None = None
    size: Scalar = 1.0

    def value(self) -> Batch:
        """Return the step as one batch."""
        quotient = self.numerator if self.denominator is None else self.numerator.map(torch.div, self.denominator)
        return quotient.mul(self.size)
