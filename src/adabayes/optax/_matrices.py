"""Parameters as stacks of blocks, which are matrices of inputs x outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from adabayes._blocks.blocks import Blocks, check_block_size, cut, from_blocks, to_blocks
from adabayes.optax._leaves import is_complex, is_none, real_dtype, real_shape
from adabayes.optax._settings import check_integer
from adabayes.optax._shardings import distribute_like
from adabayes.optax._storage import create_zeros

Squares = tuple[jax.Array, ...]  # a stack of square matrices for each side that is rotated, as the state stores them
Pair = tuple[jax.Array | None, jax.Array | None]  # the same for computations: None for a side that is not rotated


@dataclass(frozen=True)
class Layout:
    """How a parameter is cut into blocks.

    A parameter of JAX is the transpose of torch's: the last axis is that of the outputs, and all others are inputs. The
    second to last axis comes first among them, as in torch. So the blocks are the transposes of torch's, too.
    """

    blocks: Blocks
    order: tuple[int, ...]  # the axes of the parameter: batch dimensions, then inputs, then outputs

    def to_blocks(self, x: jax.Array) -> jax.Array:
        """Cut a parameter, or its gradient, into a stack of blocks."""
        blocks: jax.Array = to_blocks(x.transpose(self.order), self.blocks)
        return blocks

    def from_blocks(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Assemble an array of this shape from its stack of blocks."""
        permuted: jax.Array = from_blocks(x, self.blocks, [shape[axis] for axis in self.order])
        return permuted.transpose(np.argsort(self.order))

    def owners(self, side: int) -> NDArray[np.intp] | None:
        """Return the index of each block's basis, or None if block ``i`` has basis ``i``."""
        if not self.blocks.shared:
            return None
        return np.array([self.blocks.basis_of(block, side) for block in range(self.blocks.num_blocks)])

    def blocks_of_bases(self, side: int) -> NDArray[np.intp]:
        """Return the indices of the blocks that each basis rotates, with one row for each basis."""
        owners = self.owners(side)
        blocks = np.arange(self.blocks.num_blocks) if owners is None else owners.argsort(kind="stable")
        return blocks.reshape(self.blocks.num_bases(side), -1)

    def turns(self, side: int) -> NDArray[np.intp]:
        """Return the bases in torch's order, in which they take turns at being refreshed.

        torch counts blocks by row, and its rows are the columns here.
        """
        if self.blocks.shared:
            return np.arange(self.blocks.num_bases(side))
        grid = np.arange(self.blocks.num_blocks).reshape(-1, self.blocks.rows, self.blocks.columns)
        return grid.swapaxes(1, 2).ravel()


class LayoutSettings(NamedTuple):
    """The settings that decide how parameters are cut into blocks."""

    block_size: int | tuple[int, int]
    max_size: int
    share_bases: bool
    batch_dims: Any  # an integer, a tree of integers, or a function that returns one of these

    @classmethod
    def checked(cls, block_size: Any, max_size: Any, share_bases: Any, batch_dims: Any) -> LayoutSettings:
        """Check the settings. The compiled program depends on all of them."""
        if not callable(batch_dims):
            _check_counts(batch_dims)
        sizes = check_block_size(block_size, check_integer)
        return cls(sizes, check_integer("max_size", max_size), bool(share_bases), batch_dims)

    def layouts(self, params: optax.Params) -> Any:
        """Return the layout of each leaf of a tree, or None for leaves that are not rotated. The tree may be empty."""
        if not jax.tree.leaves(params):
            return params
        batch_dims = self.batch_dims(params) if callable(self.batch_dims) else self.batch_dims

        def create(count: int, subtree: Any) -> Any:
            return jax.tree.map(lambda p: None if p is None else self._layout(p, count), subtree, is_leaf=is_none)

        return jax.tree.map(create, _check_counts(batch_dims), params)

    def _layout(self, p: Any, batch_dims: int) -> Layout | None:
        shape = real_shape(p)
        parts = [0] if is_complex(p) else []  # the axis of real and imaginary parts, which are further inputs
        axes = list(range(len(parts), len(shape)))
        batch, inputs, outputs = axes[:batch_dims], axes[batch_dims:-1], axes[-1:]
        inputs = inputs[-1:] + inputs[:-1] + parts
        if len(axes) <= batch_dims or not inputs:
            return None
        num_inputs = math.prod(shape[axis] for axis in inputs)
        matrices = *(shape[axis] for axis in batch), num_inputs, shape[-1]
        blocks = cut(matrices, self.block_size, self.max_size, batch_dims, self.share_bases)
        return None if blocks is None else Layout(blocks, (*batch, *inputs, *outputs))


def _check_counts(batch_dims: Any) -> Any:
    return jax.tree.map(lambda count: check_integer("batch_dims", count, least=0), batch_dims)


def create_averages(p: Any, dtype: Any, layout: Layout | None) -> jax.Array:
    """Return zeros for the blocks of a parameter, or in its shape if it is not rotated."""
    if layout is None:
        return create_zeros(p, dtype)
    real = jnp.finfo(dtype).dtype  # type: ignore[no-untyped-call]
    return distribute_like(jnp.zeros(layout.blocks.shape, real), p, axes=(0, 1, 2))


def create_identities(p: Any, layout: Layout | None) -> Squares:
    """Return identity matrices, one for each basis of a parameter."""
    if layout is None:
        return ()
    dtype = real_dtype(jnp.result_type(p))
    return tuple(
        distribute_like(jnp.tile(jnp.eye(size, dtype=dtype), (layout.blocks.num_bases(side), 1, 1)), p, axes=(0,))
        for side, size in zip(layout.blocks.sides, layout.blocks.sizes)
    )


def create_factors(p: Any, layout: Layout | None) -> Squares:
    """Return square matrices of zeros, one for each basis of a parameter."""
    return tuple(map(jnp.zeros_like, create_identities(p, layout)))


def to_pair(squares: Squares, sides: tuple[int, ...]) -> Pair:
    by_side = dict(zip(sides, squares))
    return by_side.get(0), by_side.get(1)


def from_pair(pair: Pair) -> Squares:
    return tuple(square for square in pair if square is not None)


def map_sides(function: Callable[[int, jax.Array], Any], pair: Pair) -> Pair:
    """Return ``function(side, square)`` for each side that is rotated."""
    left, right = (None if square is None else function(side, square) for side, square in enumerate(pair))
    return left, right
