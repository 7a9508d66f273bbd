"""Arithmetic on many tensors at once, in which the mathematics of an optimizer is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adabayes.optim._tensors import Scalar

__all__ = ["Batch", "Step"]

Operand = Any  # a Batch, a number, a 0-dim tensor, or a vector that has a number for each tensor


class Batch:
    """Tensors of one kind that are computed with together, by methods with the names and the meaning of torch's.

    Methods with an underscore change the batch, others return a new one. To change it, the foreach form writes to the
    tensors' memory, all of them in one call; the single-tensor form, which autograd may follow, replaces the old
    tensors by new ones.
    """

    def __init__(self, tensors: Sequence[Tensor], in_place: bool, indices: Sequence[int] = ()) -> None:
        self.tensors = list(tensors)
        self.in_place = in_place
        self.indices = indices  # for gradients: indices of their parameters in the optimizer

    def lerp_(self, end: Operand, weight: Scalar) -> Batch:
        """Move towards ``end`` by this share of the distance."""
        like = self.tensors[0]
        if isinstance(end, Tensor):
            end = end.to(like)
        elif not isinstance(end, Batch):  # made on the device itself, so that nothing waits for a copy
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
        return self._bound_("min", least)._bound_("max", most)

    def at_least_(self, least: Operand) -> Batch:
        """Raise what is below a number; nan stays."""
        return self._bound_("min", least)

    def _bound_(self, side: str, bound: Operand) -> Batch:
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

    def agreeing(self, other: Batch) -> Batch:
        """Put 0 where the sign is not that of ``other``; nan stays."""
        return self.map(lambda x, y: torch.where(x * y.sign() <= 0, 0.0, x), other)

    def map(self, function: Callable[..., Tensor], *others: Batch) -> Batch:
        """Apply a function to each tensor, with those of other batches beside it."""
        rows = zip(self.tensors, *(other.tensors for other in others))
        return Batch([function(*row) for row in rows], self.in_place)

    def replace_(self, place: int, value: Tensor) -> None:
        """Replace the numbers of one tensor."""
        if self.in_place:
            self.tensors[place].copy_(value)
        else:
            self.tensors[place] = value

    def move_(self, step: Step, sign: int) -> Batch:
        """Subtract ``sign * step``."""
        size = -sign * step.size
        numerator = step.numerator
        if isinstance(size, Tensor):
            numerator, size = numerator.mul(size), 1.0
        if step.denominator is None:
            return self._change("add", numerator, alpha=size)
        return self._change("addcdiv", numerator, step.denominator, value=size)

    def may_be_zero(self, decide: bool) -> list[int]:
        """Return which of the tensors may contain zeros (or nan): all of them, if that cannot be decided.

        Args:
            decide: whether the program may depend on numbers: a graph that is captured or compiled may not. On other
                devices than the CPU, it waits for them.
        """
        if not decide or any(type(t) is not Tensor or t.is_meta for t in self.tensors):
            return list(range(len(self.tensors)))
        places = [i for i, t in enumerate(self.tensors) if t.numel()]
        if not places:
            return []
        tensors = [self.tensors[i] for i in places]
        if tensors[0].is_cpu:
            least = list(map(torch.amin, tensors))
        else:  # in two calls, not in one for each tensor
            least = list(torch._foreach_neg(torch._foreach_max(torch._foreach_neg(tensors))))
        positive = (torch.stack(least) > 0).tolist()
        return [i for i, known in zip(places, positive) if not known]

    def _change(self, operation: str, *operands: Operand, **options: float) -> Batch:
        if self.in_place:
            function = getattr(torch, f"_foreach_{operation}_")
            function(self.tensors, *map(self._together, operands), **options)
        else:
            self.tensors = self._one_by_one(operation, operands, options)
        return self

    def _new(self, operation: str, *operands: Operand, **options: float) -> Batch:
        if self.in_place:
            function: Callable[..., list[Tensor]] = getattr(torch, f"_foreach_{operation}")
            tensors = function(self.tensors, *map(self._together, operands), **options)
        else:
            tensors = self._one_by_one(operation, operands, options)
        return Batch(tensors, self.in_place)

    def _together(self, operand: Operand) -> Any:
        """Return an operand as foreach functions take it."""
        if isinstance(operand, Batch):
            return operand.tensors
        if not isinstance(operand, Tensor):
            return operand
        return list(operand.unbind()) if operand.dim() else [operand] * len(self.tensors)

    def _one_by_one(self, operation: str, operands: Sequence[Operand], options: dict[str, float]) -> list[Tensor]:
        columns = [o.tensors if isinstance(o, Batch) else [o] * len(self.tensors) for o in operands]
        return [getattr(torch, operation)(*row, **options) for row in zip(self.tensors, *columns)]


class Step(NamedTuple):
    """What is subtracted from the weights: ``size * numerator / denominator``."""

    numerator: Batch
    denominator: Batch | None = None
    size: Scalar = 1.0
    after: Callable[[], Any] | None = None  # what remains to be done when the weights have moved

    def quotient(self) -> Batch:
        """Return the step without its size."""
        return self.numerator if self.denominator is None else self.numerator.map(torch.div, self.denominator)
