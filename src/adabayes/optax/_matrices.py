"""Parameters as matrices, inputs x outputs: which sides are rotated, and square matrices for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adabayes.optax._leaves import is_none, real_dtype, real_shape
from adabayes.optax._shardings import replicate_like

Squares = tuple[jax.Array, ...]  # one square matrix for each side that is rotated, as the state stores them
Pair = tuple[jax.Array | None, jax.Array | None]  # the same for computations: None for a side that is not rotated


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of a parameter as a matrix: the last axis is that of the outputs."""
    return math.prod(shape[:-1]), shape[-1]


def rotated_sides(shape: tuple[int, ...], max_size: int) -> tuple[int, ...]:
    """Return the sides that are rotated: 0 is that of the inputs, 1 that of the outputs.

    >>> rotated_sides((3, 3, 16, 32), max_size=128), rotated_sides((32,), max_size=128)
    ((1,), ())
    """
    if len(shape) < 2 or 0 in shape:
        return ()
    return tuple(side for side, size in enumerate(matrix_shape(shape)) if 1 < size <= max_size)


def create_identities(p: Any, max_size: int) -> Squares:
    """Return an identity matrix for each side of a parameter that is rotated."""
    shape = real_shape(p)
    dtype = real_dtype(jnp.result_type(p))
    sizes = (matrix_shape(shape)[side] for side in rotated_sides(shape, max_size))
    return tuple(replicate_like(jnp.eye(size, dtype=dtype), p) for size in sizes)


def create_zeros(p: Any, max_size: int) -> Squares:
    """Return a square matrix of zeros for each side of a parameter that is rotated."""
    return tuple(map(jnp.zeros_like, create_identities(p, max_size)))


def to_pair(squares: Squares, sides: tuple[int, ...]) -> Pair:
    by_side = dict(zip(sides, squares))
    return by_side.get(0), by_side.get(1)


def from_pair(pair: Pair) -> Squares:
    return tuple(square for square in pair if square is not None)


def map_sides(function: Callable[[int, jax.Array], Any], pair: Pair) -> Pair:
    """Return ``function(side, square)`` for each side that is rotated."""
    left, right = (None if square is None else function(side, square) for side, square in enumerate(pair))
    return left, right


def refresh_offsets(updates: optax.Updates, bases: Any, refresh: int) -> Any:
    """Return at which step, modulo ``refresh``, the bases of each leaf are refreshed."""
    tree: Any = jax.tree.structure(updates, is_leaf=is_none)
    return tree.unflatten([0] * tree.num_leaves)
