"""Stochastic rounding to bfloat16, reproducible from a seed whatever computes it.

bf16 keeps 8 bits, so a change below 1/512 of a value is lost when rounded to nearest. Rounded up with the probability
of the remainder instead, it arrives on average.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adabayes.random_bits import MASK, Bits, carry_of, key_of
from adabayes.optim._base import step_value

Stored = tuple[list[Tensor], list[Tensor], str]  # where, what, and the stream of random bits


class Rounding(NamedTuple):
    """What stochastic rounding needs to know."""

    seed: int
    ordinals: list[int]  # of the tensors at hand
    params: bool  # whether bf16 parameters are rounded so, too


def to_bf16(x: Tensor, like: Tensor, key: Bits, stream: str) -> Tensor:
    """Round fp32 to bf16, up with the probability of the remainder; infinities and nan stay what they are.

    ``like`` gives the layout in memory, in whose order elements are numbered.
    """
    element = torch.arange(like.numel(), device=x.device).as_strided(like.shape, like.stride())
    carry = carry_of(element, key, stream)
    bits = x.contiguous().view(torch.int32).to(torch.int64) & MASK
    rounded = torch.where(x.isnan(), 0x7FC00000, bits + carry) >> 16  # a nan could carry over into a number
    return rounded.to(torch.int16).view(torch.bfloat16)


class Keys(NamedTuple):
    """The keys of one tensor at one step; None where it is rounded to nearest."""

    state: Bits | None
    param: Bits | None


def keys_of(rounding: Rounding | None, place: int, step: float | Tensor) -> Keys:
    if rounding is None:
        return Keys(None, None)
    whole = step.to(torch.int64) if isinstance(step, Tensor) else int(step)
    key = key_of(rounding.seed, rounding.ordinals[place], whole)
    return Keys(key, key if rounding.params else None)


def store_(target: Tensor, value: Tensor, key: Bits | None, stream: str) -> None:
    """Put a value where it belongs; stochastically rounded if that is bf16 and there is a key."""
    if key is not None and target.dtype == torch.bfloat16:
        value = to_bf16(value, target, key, stream)
    target.copy_(value)


def store_all_(
    params: Stored,
    exp_avgs: Stored,
    seconds: Stored,
    rounding: Rounding | None,
    places: list[int],
    steps: list[Tensor],
    capturable: bool,
) -> None:
    """The same for lists, where the values are not already in their places: of another dtype, they are copies."""
    apart = [stored for stored in (params, exp_avgs, seconds) if stored[0][0].dtype != stored[1][0].dtype]
    if rounding is None:
        for targets, values, _ in apart:
            torch._foreach_copy_(targets, values)
        return
    for i, (place, step) in enumerate(zip(places, steps)):
        keys = keys_of(rounding, place, step_value(step, capturable))
        for targets, values, stream in apart:
            store_(targets[i], values[i], keys.param if stream == "param" else keys.state, stream)


def widened(tensors: list[Tensor]) -> list[Tensor]:
    """State to compute with: itself, or copies in fp32 of bf16."""
    return [t.float() for t in tensors] if tensors[0].dtype == torch.bfloat16 else tensors
