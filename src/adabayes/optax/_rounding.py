"""Stochastic rounding to bfloat16, with the same random bits as in torch."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from adabayes._util.random_bits import carry_of, key_of


def convert(values: jax.Array, dtype: Any, seed: Any, index: int, step: jax.Array, stream: str) -> jax.Array:
    """Convert an array to a dtype. Conversion to bfloat16 rounds stochastically.

    Args:
        values: the array.
        dtype: the dtype to convert it to.
        seed: seed of the optimizer's random bits.
        index: index of the leaf.
        step: the number of this step.
        stream: name of the random bits within a leaf and step; a key of ``random_bits.STREAMS``.
    """
    if dtype != jnp.bfloat16:
        return values.astype(dtype)
    # bfloat16 is the upper half of float32. Random bits that are added to the lower half carry into the upper half with
    # the probability with which the value should be rounded up.
    values = values.astype(jnp.float32)
    key = key_of(seed, index, step.astype(jnp.uint32))
    carry = carry_of(_element_indices(values.shape), key, stream)
    bits = (jax.lax.bitcast_convert_type(values, jnp.uint32) + carry) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isnan(values), values, jax.lax.bitcast_convert_type(bits, jnp.float32)).astype(dtype)


def _element_indices(shape: tuple[int, ...]) -> jax.Array:
    """Return the index of each element in row-major order."""
    strides = (math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    offsets = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride for axis, stride in enumerate(strides))
    return sum(offsets, jnp.uint32(0))
