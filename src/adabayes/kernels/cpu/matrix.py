"""Steps of AdaBayes-K by the CPU kernel: the tables that matrix.c reads."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adabayes._blocks.blocks import Blocks
from adabayes.kernels.cpu import library

__all__ = ["LARGEST_SIDE", "Matrix", "MatrixLaunch"]

LARGEST_SIDE = 256  # of a rotated side, as in matrix.c
_LONGEST_TILE = 128  # of a side that is not rotated


class Matrix(NamedTuple):
    """A parameter that is rotated, with its state, which stays at its address."""

    param: Tensor
    blocks: Blocks
    batch_dims: int  # the number of leading dimensions that count matrices
    state: dict[str, Tensor]
    param_index: int  # among all of the optimizer's parameters; it selects random bits


class _Tile(NamedTuple):
    """The struct ``tile`` of matrix.h, which explains its fields."""

    param: int
    offset: int
    stride: int
    column: int
    height: int
    width: int
    m: int
    n: int
    state_offset: int
    state_stride: int
    left: int
    right: int


class _Basis(NamedTuple):
    """The struct ``basis`` of matrix.h."""

    side: int
    size: int
    index: int  # type: ignore[assignment]  # hides a method of tuples
    factor: int
    basis: int


class _Matrices(ctypes.Structure):
    """The struct ``matrices`` of matrix.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_clusters", "num_tiles")),
        *((name, ctypes.c_void_p) for name in ("clusters", "tiles", "bases", "params", "grads", "column_offsets")),
        *((name, ctypes.c_void_p) for name in ("exp_avgs", "exp_avg_sqs", "indices", "rows", "coefficients")),
        ("width", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("largest", "seed")),
        *((name, ctypes.c_int32) for name in ("param_type", "state_type", "threads")),
    )


class MatrixLaunch:
    """Runs AdaBayes-K on matrices of one combination of dtypes."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._dtypes = matrices[0].param.dtype, matrices[0].state["exp_avg"].dtype
        clusters, tiles, bases = _tables(matrices)
        self._counts = {"num_clusters": len(clusters), "num_tiles": len(tiles)}
        sides = chain.from_iterable((tile.m, tile.n) for tile in tiles)
        self._largest = -(-max(sides) // 32) * 32
        self._offsets = [_column_offsets(matrix) for matrix in matrices]
        arrays = {
            "clusters": chain.from_iterable(clusters),
            "tiles": chain.from_iterable(tiles),
            "bases": chain.from_iterable(bases),
            "params": (matrix.param.data_ptr() for matrix in matrices),
            "column_offsets": (0 if offsets is None else offsets.data_ptr() for offsets in self._offsets),
            "exp_avgs": (matrix.state["exp_avg"].data_ptr() for matrix in matrices),
            "exp_avg_sqs": (matrix.state["exp_avg_sq"].data_ptr() for matrix in matrices),
            "indices": (matrix.param_index for matrix in matrices),
        }
        self._arrays: dict[str, array[Any]] = {name: array("q", values) for name, values in arrays.items()}
        self._scratch = torch.empty(0, dtype=self._dtypes[0])

    def take_step(
        self, grads: Sequence[int], rows: Sequence[int], coefficients: Sequence[Sequence[float]], seed: int
    ) -> None:
        """Take a step.

        Args:
            grads: addresses of the gradients, which have the layout of the parameters.
            rows: for each matrix, the index of its coefficients.
            coefficients: the fields of ``matrix_coefficients`` in matrix.h.
            seed: seed of the stochastic rounding.
        """
        threads = torch.get_num_threads()
        needed = threads * library.num_matrix_buffers() * self._largest**2
        if self._scratch.numel() < needed:
            self._scratch = self._scratch.new_empty(needed)
        arrays = {
            **self._arrays,
            "grads": array("q", grads),
            "rows": array("q", rows),
            "coefficients": array("d", chain.from_iterable(coefficients)),
        }
        pointers = {name: values.buffer_info()[0] for name, values in arrays.items()}
        param_type, state_type = (library.DTYPES[dtype] for dtype in self._dtypes)
        matrices = _Matrices(
            **self._counts,
            width=len(coefficients[0]),
            scratch=self._scratch.data_ptr(),
            largest=self._largest,
            seed=seed,
            param_type=param_type,
            state_type=state_type,
            threads=threads,
            **pointers,
        )
        library.call_matrix_kernel(matrices)


def _tables(matrices: Sequence[Matrix]) -> tuple[list[tuple[int, int, int, int]], list[_Tile], list[_Basis]]:
    """Return the clusters, the tiles and the bases of all matrices, with the costliest clusters first."""
    unsorted = [cluster for param, matrix in enumerate(matrices) for cluster in _clusters(param, matrix)]
    clusters: list[tuple[int, int, int, int]] = []
    tiles: list[_Tile] = []
    bases: list[_Basis] = []
    for own_tiles, own_bases in sorted(unsorted, key=_cost, reverse=True):
        clusters.append((len(tiles), len(own_tiles), len(bases), len(own_bases)))
        shift = len(bases)
        tiles += [
            tile._replace(left=tile.left + shift * (tile.left >= 0), right=tile.right + shift * (tile.right >= 0))
            for tile in own_tiles
        ]
        bases += own_bases
    return clusters, tiles, bases


def _cost(cluster: tuple[list[_Tile], list[_Basis]]) -> int:
    """Return the relative cost of the rotations of a cluster."""
    return sum(t.m * t.n * (t.m * (t.left >= 0) + t.n * (t.right >= 0)) for t in cluster[0])


def _clusters(param: int, matrix: Matrix) -> Iterator[tuple[list[_Tile], list[_Basis]]]:
    """Yield the tiles and the bases of each block, or of all blocks that share bases."""
    blocks = matrix.blocks
    together = blocks.rows * blocks.columns if blocks.shared else 1
    p, batch_dims = matrix.param, matrix.batch_dims
    offsets = _positions(p.shape[:batch_dims], p.stride()[:batch_dims]).tolist()  # of the matrices of a stack
    for first in range(0, blocks.num_blocks, together):
        positions: dict[tuple[int, int], int] = {}  # in the list of bases, by side and index
        tiles: list[_Tile] = []
        for block in range(first, first + together):
            keys = [(side, blocks.basis_of(block, side)) for side in blocks.sides]
            by_side = {key[0]: positions.setdefault(key, len(positions)) for key in keys}
            offset = offsets[block // (blocks.rows * blocks.columns)]
            tiles += _tiles(param, matrix, block, offset, by_side.get(0, -1), by_side.get(1, -1))
        yield tiles, [_basis(matrix, side, index) for side, index in positions]


def _tiles(param: int, matrix: Matrix, block: int, offset: int, left: int, right: int) -> Iterator[_Tile]:
    """Yield the tiles of a block: the block itself, unless it has a long side that is not rotated."""
    blocks, stride = matrix.blocks, matrix.param.stride(matrix.batch_dims)
    _, height, width, m, n, *_ = blocks
    row, column = divmod(block % (blocks.rows * blocks.columns), blocks.columns)
    tall, wide = (size if side in blocks.sides else min(size, _LONGEST_TILE) for side, size in enumerate((m, n)))
    for i in range(0, m, tall):
        for j in range(0, n, wide):
            yield _Tile(
                param=param,
                offset=offset + (row * m + i) * stride,
                stride=stride,
                column=column * n + j,
                height=max(0, min(tall, m - i, height - row * m - i)),
                width=max(0, min(wide, n - j, width - column * n - j)),
                m=min(tall, m - i),
                n=min(wide, n - j),
                state_offset=(block * m + i) * n + j,
                state_stride=n,
                left=left,
                right=right,
            )


def _column_offsets(matrix: Matrix) -> Tensor | None:
    """Return the offset of each column within a row of a parameter, or None if columns are consecutive.

    The channels of a convolution come first or last, depending on its memory format.
    """
    p, batch_dims = matrix.param, matrix.batch_dims
    offsets = _positions(p.shape[batch_dims + 1 :], p.stride()[batch_dims + 1 :])
    return None if torch.equal(offsets, torch.arange(len(offsets))) else offsets


def _positions(shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return the positions in memory of all elements, in the order of their indices."""
    positions = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(shape, strides):
        positions = (positions[:, None] + torch.arange(size) * stride).flatten()
    return positions


def _basis(matrix: Matrix, side: int, index: int) -> _Basis:
    factor, basis = matrix.state[f"factor_{side}"], matrix.state[f"basis_{side}"]
    size = basis.shape[-1]
    offset = index * size * size * basis.itemsize
    return _Basis(side, size, index, factor.data_ptr() + offset, basis.data_ptr() + offset)
