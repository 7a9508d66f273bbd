"""Cuts parameters into blocks of bounded size, so that the cost per weight is bounded too.

Each block is a matrix with its own factors and bases. See :class:`adabayes.AdaBayesK`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from adabayes._util.arrays import namespace

__all__ = ["Blocks", "cut", "from_blocks", "to_blocks"]

Array = Any  # torch.Tensor | jax.Array


class Blocks(NamedTuple):
    """A grid of ``rows`` x ``columns`` blocks of size m x n. Zeros fill up the blocks at the lower and right edges."""

    rows: int
    columns: int
    m: int
    n: int
    sides: tuple[int, ...]  # the sides that are rotated: 0 is the left one, of size m, and 1 the right one, of size n

    @property
    def num_blocks(self) -> int:
        return self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the stack of all blocks."""
        return self.num_blocks, self.m, self.n

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the sides that are rotated."""
        return tuple((self.m, self.n)[side] for side in self.sides)

    @property
    def rotation_cost(self) -> int:
        """The relative cost of rotating a block: m n (m + n) if both sides are rotated."""
        return self.m * self.n * sum(self.sizes)

    @property
    def refresh_cost(self) -> int:
        """The relative cost of refreshing the bases of a block."""
        return sum(size**3 for size in self.sizes)


@lru_cache(maxsize=4096)
def cut(shape: tuple[int, ...], block_size: int, max_size: int) -> Blocks | None:
    """Return the blocks of a parameter, or None if no side is rotated.

    Vectors, scalars and empty arrays are not rotated, nor are sides of size 1 or above ``max_size``.

    A convolution is a matrix, out x (in * height * width). Sides above ``block_size`` are cut into chunks of equal
    size. A side above ``max_size``, such as a vocabulary, is neither cut nor rotated.

    >>> cut((512, 128), block_size=128, max_size=2048)
    Blocks(rows=4, columns=1, m=128, n=128, sides=(0, 1))
    >>> cut((50257, 768), block_size=128, max_size=2048)
    Blocks(rows=1, columns=6, m=50257, n=128, sides=(1,))
    >>> cut((64, 32, 3, 3), block_size=128, max_size=2048)
    Blocks(rows=1, columns=3, m=64, n=96, sides=(0, 1))
    """
    if len(shape) < 2 or 0 in shape:
        return None
    matrix = shape[0], math.prod(shape[1:])
    rows, columns = (1 if size > max_size else -(-size // block_size) for size in matrix)
    m, n = -(-matrix[0] // rows), -(-matrix[1] // columns)
    sides = tuple(side for side, size in enumerate((m, n)) if 1 < size <= max_size)
    return Blocks(rows, columns, m, n, sides) if sides else None


def to_blocks(x: Array, blocks: Blocks) -> Array:
    """Cut a parameter, or its gradient, into a stack of blocks: an array of shape ``blocks.shape``."""
    rows, columns, m, n, _ = blocks
    x = _pad(x.reshape(x.shape[0], -1), rows * m, columns * n)
    return x.reshape(rows, m, columns, n).swapaxes(1, 2).reshape(blocks.shape)


def from_blocks(x: Array, blocks: Blocks, shape: Sequence[int]) -> Array:
    """Assemble an array of this shape from its stack of blocks: the inverse of :func:`to_blocks`."""
    rows, columns, m, n, _ = blocks
    x = x.reshape(rows, columns, m, n).swapaxes(1, 2).reshape(rows * m, columns * n)
    return x[: shape[0], : math.prod(shape[1:])].reshape(tuple(shape))


def _pad(x: Array, rows: int, columns: int) -> Array:
    """Add zeros below and to the right."""
    below, right = rows - x.shape[0], columns - x.shape[1]
    if not below and not right:
        return x
    library = namespace(x)
    if hasattr(library, "pad"):
        return library.pad(x, ((0, below), (0, right)))
    return library.nn.functional.pad(x, (0, right, 0, below))
