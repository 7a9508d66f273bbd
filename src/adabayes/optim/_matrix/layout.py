"""The layout of each parameter: its blocks, and its state."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from adabayes._blocks.blocks import Blocks, cut
from adabayes._util.checks import check_integer
from adabayes._util.tensors import real_shape
from adabayes.optim._engine.state import Entry, Group

__all__ = ["blocks_of", "check_averages", "check_block_size", "chunks", "entries_of", "split_by_kind"]

_CPU_CHUNK = 2**20  # weights that a CPU processes at a time


def blocks_of(p: Tensor, group: Group) -> Blocks | None:
    """Return the blocks of a parameter, or None if it is not rotated."""
    return cut(real_shape(p), group["block_size"], group["max_size"], group["batch_dims"])


def check_block_size(value: Any) -> int | tuple[int, int]:
    """Return ``block_size`` as an integer or a pair of integers; raise if it is neither."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return check_integer("block_size", value)
    if len(value) != 2:
        raise ValueError(f"Invalid block_size: {value}. It must be an integer, or a pair: height and width.")
    height, width = (check_integer("block_size", side) for side in value)
    return height, width


@lru_cache(maxsize=4096)
def entries_of(blocks: Blocks | None) -> dict[str, Entry]:
    """Return the entries of state: both averages; for each rotated side of each block, a factor and a basis."""
    average = Entry(shape=lambda shape: shape if blocks is None else blocks.shape)
    entries = {"exp_avg": average, "exp_avg_sq": average}
    if blocks is None:
        return entries
    for side, size in zip(blocks.sides, blocks.sizes):
        square = Entry(shape=lambda _, size=size: (blocks.num_blocks, size, size), low=False)  # type: ignore[misc]
        entries |= {f"factor_{side}": square, f"basis_{side}": square}
    return entries


def split_by_kind(group: Group, replicated: bool) -> list[list[Tensor]]:
    """Split parameters into lists that are stacked together: blocks of one size, on one device mesh.

    On a CPU, a list has about ``_CPU_CHUNK`` weights. Ranks that communicate do so once per list, so their lists are
    not split by size.
    """
    kinds: dict[Any, list[Tensor]] = {}
    weights: dict[Any, int] = {}  # of each kind so far
    seen: set[int] = set()
    for p in group["params"]:
        blocks = blocks_of(p, group)
        mesh = getattr(p, "device_mesh", None)
        # A parameter that occurs twice takes two steps, one after the other.
        kind = len(kinds) if id(p) in seen else (blocks and (blocks.m, blocks.n, blocks.sides), mesh)
        before = weights.setdefault(kind, 0)
        unsplit = blocks is None or mesh is not None or replicated
        kinds.setdefault((kind, 0 if unsplit else before // _weights_at_once(p)), []).append(p)
        weights[kind] = before + p.numel()
        seen.add(id(p))
    return list(kinds.values())


def check_averages(state: Mapping[Tensor, Mapping[str, Tensor]], group: Group) -> None:
    """Raise if the averages of a parameter do not have the shape that its blocks need."""
    for p in group["params"]:
        if "exp_avg" in (entries := state.get(p, {})):
            blocks = blocks_of(p, group)
            shape, wanted = tuple(entries["exp_avg"].shape), real_shape(p) if blocks is None else blocks.shape
            if shape != wanted:
                raise RuntimeError(
                    f"the averages of a parameter of shape {tuple(p.shape)} have shape {shape}, but must have shape "
                    f"{wanted}. Its shape, block_size, max_size and batch_dims cannot change once there is state: set "
                    "them back, or make a new optimizer."
                )


def chunks(stack: Tensor, due: Sequence[int], unsplit: bool) -> Iterator[tuple[slice, list[int]]]:
    """Split a stack of blocks into slices that are processed one at a time; yield each with its due blocks."""
    at_once = len(stack) if unsplit else max(1, _weights_at_once(stack) // stack[0].numel())
    for first in range(0, len(stack), at_once):
        yield slice(first, first + at_once), [i - first for i in due if first <= i < first + at_once]


def _weights_at_once(x: Tensor) -> int:
    """Return how many weights to process at a time.

    On a CPU, a chunk fits into the caches, and its memory is reused. A large array would get new memory from the system
    at each step, which takes as long as rotating it. Other devices process everything at once.
    """
    return _CPU_CHUNK if x.is_cpu else sys.maxsize
