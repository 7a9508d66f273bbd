"""Stochastic rounding to bfloat16, reproducible from a seed in every form of an optimizer.

bf16 keeps 8 bits, so rounding to nearest loses a change below 1/512 of a value. Stochastic rounding rounds up with the
probability of the remainder, which preserves the change on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adabayes._util.random_bits import MASK, Bits, carry_of, key_of
from adabayes._util.tensors import Scalar, has_gaps

__all__ = ["STATE_STREAMS", "Rounding", "round_to_bf16"]

STATE_STREAMS = ("exp_avg", "second", "third")  # random streams for entries of state in bf16, in their order


def round_to_bf16(x: Tensor, like: Tensor, key: Bits, stream: str) -> Tensor:
    """Round fp32 to bf16, up with the probability of the remainder; keep infinities and nan.

    Random bits belong to elements in the memory order of ``like``, if it has no gaps.
    """
    element = torch.arange(like.numel(), device=x.device)
    element = element.view(like.shape) if has_gaps(like) else element.as_strided(like.shape, like.stride())
    carry = carry_of(element, key, stream)
    bits = x.contiguous().view(torch.int32).to(torch.int64) & MASK
    rounded = torch.where(x.isnan(), 0x7FC00000, bits + carry) >> 16  # the carry could turn nan into a number
    return rounded.to(torch.int16).view(torch.bfloat16)


class Rounding(NamedTuple):
    """Stores values: rounds bf16 state stochastically, and bf16 parameters on request."""

    seed: int
    params: bool

    def store(
        self, targets: Sequence[Tensor], values: Sequence[Tensor], stream: str, indices: Sequence[int], t: Scalar
    ) -> None:
        """Store values of the parameters with these indices, at step ``t`` (one for all, or one for each)."""
        if targets[0].dtype == torch.bfloat16 and (self.params or stream != "param"):
            count = len(targets)
            steps = t.to(torch.int64).expand(count).unbind() if isinstance(t, Tensor) else [int(t)] * count
            keys = [key_of(self.seed, index, step) for index, step in zip(indices, steps)]
            values = [round_to_bf16(v, target, key, stream) for v, target, key in zip(values, targets, keys)]
        if len(targets) == 1:
            targets[0].copy_(values[0])
        else:
            torch._foreach_copy_(list(targets), list(values))
