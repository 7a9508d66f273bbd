"""Cuts parameters into blocks of bounded size, so that the cost per weight is bounded too.

Each block is a matrix with its own factors and bases. See :class:`adabayes.AdaBayesK`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from adabayes._util.arrays import namespace

__all__ = ["Blocks", "check_block_size", "cut", "from_blocks", "to_blocks"]

Array = Any  # torch.Tensor | jax.Array


class Blocks(NamedTuple):
    """A stack of ``height`` x ``width`` matrices, each cut into a grid of m x n blocks.

    Zeros fill up the blocks at the lower and right edges.
    """

    matrices: int  # 1, unless the parameter has batch dimensions
    height: int
    width: int
    m: int
    n: int
    sides: tuple[int, ...]  # the sides that are rotated: 0 is the left one, of size m, and 1 the right one, of size n
    shared: bool = False  # whether the blocks in a row share their left basis, and those in a column their right one

    @property
    def rows(self) -> int:
        """The number of rows of blocks in a matrix."""
        return -(-self.height // self.m)

    @property
    def columns(self) -> int:
        """The number of columns of blocks in a matrix."""
        return -(-self.width // self.n)

    @property
    def num_blocks(self) -> int:
        return self.matrices * self.rows * self.columns

    def num_bases(self, side: int) -> int:
        """Return the number of bases of one side."""
        return self.matrices * (self.rows, self.columns)[side] if self.shared else self.num_blocks

    def basis_of(self, block: int, side: int) -> int:
        """Return the index of a block's basis among those of one side.

        >>> blocks = cut((256, 384), block_size=128, max_size=2048, share_bases=True)
        >>> [[blocks.basis_of(block, side) for block in range(blocks.num_blocks)] for side in (0, 1)]
        [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
        """
        if not self.shared:
            return block
        matrix_and_row, column = divmod(block, self.columns)
        return column + self.columns * (matrix_and_row // self.rows) if side else matrix_and_row

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


def check_block_size(value: Any, check_integer: Callable[[str, Any], int]) -> int | tuple[int, int]:
    """Return a ``block_size`` as an integer or a pair of integers; raise if it is neither.

    Files of settings (JSON, YAML) have lists instead of pairs.

    Args:
        value: the setting.
        check_integer: returns a value as an integer, given its name, or raises; torch and JAX have their own.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        return check_integer("block_size", value)
    if len(value) != 2:
        raise ValueError(f"Invalid block_size: {value}. It must be an integer, or a pair: height and width.")
    height, width = (check_integer("block_size", side) for side in value)
    return height, width


@lru_cache(maxsize=4096)
def cut(
    shape: tuple[int, ...],
    block_size: int | tuple[int, int],
    max_size: int,
    batch_dims: int = 0,
    share_bases: bool = False,
) -> Blocks | None:
    """Return the blocks of a parameter, or None if no side is rotated.

    Vectors, scalars and empty arrays are not rotated, nor are sides of size 1 or above ``max_size``.

    A parameter is a stack of matrices: its first ``batch_dims`` dimensions count matrices, the next one counts rows,
    and all others count columns. So a convolution is a matrix, out x (in * height * width). Sides above ``block_size``
    are cut into chunks of equal size. A side above ``max_size``, such as a vocabulary, is neither cut nor rotated.

    Args:
        shape: the shape of the parameter.
        block_size: largest side of a block, or a pair: its largest height and its largest width.
        max_size: largest side that is rotated.
        batch_dims: number of leading dimensions that count matrices.
        share_bases: whether blocks in a row share their left basis, and blocks in a column their right basis.

    >>> blocks = cut((512, 100), block_size=128, max_size=2048)
    >>> blocks.rows, blocks.columns, blocks.shape, blocks.sides
    (4, 1, (4, 128, 100), (0, 1))
    >>> cut((50257, 768), block_size=128, max_size=2048)
    Blocks(matrices=1, height=50257, width=768, m=50257, n=128, sides=(1,), shared=False)
    >>> cut((64, 32, 3, 3), block_size=128, max_size=2048)
    Blocks(matrices=1, height=64, width=288, m=64, n=96, sides=(0, 1), shared=False)
    >>> cut((8, 256, 64), block_size=128, max_size=2048, batch_dims=1)
    Blocks(matrices=8, height=256, width=64, m=128, n=64, sides=(0, 1), shared=False)
    """
    if len(shape) < batch_dims + 2 or 0 in shape:
        return None
    height, width = size = shape[batch_dims], math.prod(shape[batch_dims + 1 :])
    limits = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    m, n = (side if side > max_size else -(-side // -(-side // limit)) for side, limit in zip(size, limits))
    sides = tuple(index for index, side in enumerate((m, n)) if 1 < side <= max_size)
    return Blocks(math.prod(shape[:batch_dims]), height, width, m, n, sides, share_bases) if sides else None


def to_blocks(x: Array, blocks: Blocks) -> Array:
    """Cut a parameter, or its gradient, into a stack of blocks: an array of shape ``blocks.shape``."""
    matrices, height, width, m, n, *_ = blocks
    rows, columns = blocks.rows, blocks.columns
    x = _pad(x.reshape(matrices, height, width), rows * m, columns * n)
    return x.reshape(matrices, rows, m, columns, n).swapaxes(2, 3).reshape(blocks.shape)


def from_blocks(x: Array, blocks: Blocks, shape: Sequence[int]) -> Array:
    """Assemble an array of this shape from its stack of blocks: the inverse of :func:`to_blocks`."""
    matrices, height, width, m, n, *_ = blocks
    rows, columns = blocks.rows, blocks.columns
    x = x.reshape(matrices, rows, columns, m, n).swapaxes(2, 3).reshape(matrices, rows * m, columns * n)
    return x[:, :height, :width].reshape(tuple(shape))


def _pad(x: Array, height: int, width: int) -> Array:
    """Add zeros below and to the right."""
    below, right = height - x.shape[-2], width - x.shape[-1]
    if not below and not right:
        return x
    library = namespace(x)
    if hasattr(library, "pad"):
        return library.pad(x, ((0, 0), (0, below), (0, right)))
    return library.nn.functional.pad(x, (0, right, 0, below))
