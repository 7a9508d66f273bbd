"""Stochastic rounding to bfloat16, reproducible from a seed whatever computes it.

bf16 keeps 8 bits, so a change below 1/512 of a value is lost when rounded to nearest. Rounded up with the probability
of the remainder instead, it arrives on average. The random bits are a function of seed, tensor, step and element: the
same in every form of an optimizer, for any number of threads, and after a restart. fused.c has the same functions in C.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from adabayes.optim._base import step_value

Bits = Any  # int, or int64 tensor of 32-bit values
Stored = tuple[list[Tensor], list[Tensor], str]  # where, what, and the stream of random bits

_MASK = 0xFFFFFFFF
STREAMS = {"exp_avg": (0, 0), "second": (0, 16), "param": (0x9E3779B9, 16)}  # key flip, and which half of the 32 bits


def mix(x: Bits) -> Bits:
    """Random bits for an element: spread evenly among neighbours, and by the key, independent from step to step."""
    x = (x * 0x9E3779B1) & _MASK
    return x ^ (x >> 16)


def scatter(x: Bits) -> Bits:
    """For keys: a bijection of 32 bits in which each bit of the result depends on all of the argument."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & _MASK
    return x ^ (x >> 15)


def key_of(seed: int, ordinal: int, step: float | Tensor) -> Bits:
    """Who is asking: the optimizer, the how-manieth of its tensors, and when."""
    key = scatter(seed & _MASK) ^ ((seed >> 32) & _MASK)
    key = scatter((key + ordinal) & _MASK)
    return scatter((key + (step.to(torch.int64) if isinstance(step, Tensor) else int(step))) & _MASK)


class Rounding(NamedTuple):
    """What stochastic rounding needs to know."""

    seed: int
    ordinals: list[int]  # of the tensors at hand
    params: bool  # whether bf16 parameters are rounded so, too


def to_bf16(x: Tensor, like: Tensor, key: Bits, stream: str) -> Tensor:
    """Round fp32 to bf16, up with the probability of the remainder; infinities and nan stay what they are.

    ``like`` gives the layout in memory, in whose order elements are numbered.
    """
    flip, shift = STREAMS[stream]
    element = torch.arange(like.numel(), device=x.device).as_strided(like.shape, like.stride())
    carry = (mix((element ^ key ^ flip) & _MASK) >> shift) & 0xFFFF
    bits = x.contiguous().view(torch.int32).to(torch.int64) & _MASK
    rounded = torch.where(x.isnan(), 0x7FC00000, bits + carry) >> 16  # a nan could carry over into a number
    return rounded.to(torch.int16).view(torch.bfloat16)


class Keys(NamedTuple):
    """The keys of one tensor at one step; None where it is rounded to nearest."""

    state: Bits | None
    param: Bits | None


def keys_of(rounding: Rounding | None, place: int, step: float | Tensor) -> Keys:
    if rounding is None:
        return Keys(None, None)
    key = key_of(rounding.seed, rounding.ordinals[place], step)
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
