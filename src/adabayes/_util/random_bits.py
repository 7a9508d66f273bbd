"""Random bits for stochastic rounding: 32-bit arithmetic with integers of Python, torch or JAX.

The bits are a function of seed, tensor, step and element. So they are the same in every form of an optimizer, for any
number of threads, and after a restart. kernels/cpu/fused.c has the same functions in C.
"""

from __future__ import annotations

from typing import Any

Bits = Any  # int, int64 tensor of 32-bit values, or uint32 array

MASK = 0xFFFFFFFF
_FLIP = 0x9E3779B9
# For each stream: the bits of the key that it flips, and the position of its 16 bits among the 32
STREAMS = {"exp_avg": (0, 0), "second": (0, 16), "third": (0xC2B2AE35, 0), "param": (_FLIP, 16)}


def mix(x: Bits) -> Bits:
    """Return random bits for an element: evenly spread over neighbours and, through the key, independent over steps."""
    x = _low(x * _as(x, 0x9E3779B1))
    return x ^ (x >> 16)


def scatter(x: Bits) -> Bits:
    """Mix keys thoroughly: a bijection of 32 bits, in which each bit of the result depends on all bits of ``x``."""
    x = _low((x ^ (x >> 16)) * _as(x, 0x21F0AAAD))
    x = _low((x ^ (x >> 15)) * _as(x, 0xD35A2D97))
    return x ^ (x >> 15)


def key_of(seed: Bits, index: int, step: Bits) -> Bits:
    """Return the key of a tensor at a step, from the optimizer's seed, the tensor's index and the step count."""
    key = scatter(_low(seed)) ^ _low(seed >> 32)
    key = scatter(_low(key + _as(key, index)))
    return scatter(_low(step + _as(step, key)))


def carry_of(element: Bits, key: Bits, stream: str) -> Bits:
    """Return 16 random bits for each element, to add to the bits that rounding to bfloat16 cuts off."""
    flip, shift = STREAMS[stream]
    return (mix(_low(element ^ key ^ _as(element, flip))) >> shift) & 0xFFFF


def _low(x: Bits) -> Bits:
    return x & _as(x, MASK)


def _as(x: Bits, number: Bits) -> Any:
    """Convert an integer to the type of ``x``: JAX would treat a Python integer as signed and 32 bits wide."""
    kind = getattr(getattr(x, "dtype", None), "type", None)
    return kind(number) if kind and isinstance(number, int) else number
