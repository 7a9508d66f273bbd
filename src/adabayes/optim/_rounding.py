"""Stochastic rounding to bfloat16, reproducible from a seed whatever computes it.

bf16 keeps 8 bits, so a change below 1/512 of a value is lost when rounded to nearest. Rounded up with the probability
of the remainder instead, it arrives on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adabayes.optim._tensors import Scalar, has_gaps
from adabayes.random_bits import MASK, Bits, carry_of, key_of

__all__ = ["STATE_STREAMS", "Rounding", "round_to_bf16"]

STATE_STREAMS = ("exp_avg", "second", "third")  # of the entries of state that are kept in bf16, in their order


def round_to_bf16(x: Tensor, like: Tensor, key: Bits, stream: str) -> Tensor:
    """Round fp32 to bf16, up with the probability of the remainder; infinities and nan stay what they are.

    ``like`` gives the layout in memory, in whose order elements are numbered, if it has no gaps.
    """
    element = torch.arange(like.numel(), device=x.device)
    element = element.view(like.shape) if has_gaps(like) else element.as_strided(like.shape, like.stride())
    carry = carry_of(element, key, stream)
    bits = x.contiguous().view(torch.int32).to(torch.int64) & MASK
    rounded = torch.where(x.isnan(), 0x7FC00000, bits + carry) >> 16  # a nan could carry over into a number
    return rounded.to(torch.int16).view(torch.bfloat16)


class Rounding(NamedTuple):
    """How values are stored: bf16 state is rounded stochastically, and so are bf16 parameters on request."""

    seed: int
    params: bool

    def store(
        self, targets: Sequence[Tensor], values: Sequence[Tensor], stream: str, indices: Sequence[int], t: Scalar
    ) -> None:
        """Store values for the parameters with these indices, at step ``t`` (a number, or one for each)."""
        if targets[0].dtype == torch.bfloat16 and (self.params or stream != "param"):
            count = len(targets)
            steps = t.to(torch.int64).expand(count).unbind() if isinstance(t, Tensor) else [int(t)] * count
            keys = [key_of(self.seed, index, step) for index, step in zip(indices, steps)]
            values = [round_to_bf16(v, target, key, stream) for v, target, key in zip(values, targets, keys)]
        if len(targets) == 1:
            targets[0].copy_(values[0])
        else:
            torch._foreach_copy_(list(targets), list(values))
