"""The layout of each parameter: its blocks, and when their bases are refreshed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from adabayes._blocks.blocks import Blocks, cut
from adabayes._blocks.schedule import refresh_offsets
from adabayes._util.checks import check_integer
from adabayes._util.tensors import real_shape
from adabayes.optim._engine.state import Entry, Group

__all__ = ["Layout", "blocks_of", "check_averages", "chunks", "entries_of", "layouts_of", "split_by_kind"]

_CPU_CHUNK = 2**20  # weights that a CPU processes at a time


class Layout(NamedTuple):
    """The blocks of a parameter, or None if it is not rotated, and the offset of its refreshes in the schedule."""

    blocks: Blocks | None
    offset: int


def layouts_of(groups: Sequence[Group]) -> dict[Tensor, Layout]:
    """Return the layout of all parameters, which depends only on shapes and settings."""
    names = ("block_size", "max_size", "refresh")
    integers = [tuple(check_integer(name, group[name]) for name in names) for group in groups]
    params = [p for group in groups for p in group["params"]]
    settings = tuple((real_shape(p), *given) for group, given in zip(groups, integers) for p in group["params"])
    layouts: dict[Tensor, Layout] = {}
    for p, layout in zip(params, _layouts(settings)):
        layouts.setdefault(p, layout)  # a parameter that occurs twice has one layout
    return layouts


@lru_cache(maxsize=64)
def _layouts(settings: tuple[tuple[Any, ...], ...]) -> list[Layout]:
    blocks = [cut(shape, block_size, max_size) for shape, block_size, max_size, _ in settings]
    return list(map(Layout, blocks, refresh_offsets(blocks, [refresh for *_, refresh in settings])))


def blocks_of(p: Tensor, group: Group) -> Blocks | None:
    """Return the blocks of a parameter, or None if it is not rotated."""
    return cut(real_shape(p), int(group["block_size"]), int(group["max_size"]))


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


def split_by_kind(params: Sequence[Tensor], layouts: Mapping[Tensor, Layout], replicated: bool) -> list[list[Tensor]]:
    """Split parameters into lists that are stacked together: blocks of one size, on one device mesh.

    On a CPU, a list has about ``_CPU_CHUNK`` weights. Ranks that communicate do so once per list, so their lists are
    not split by size.
    """
    kinds: dict[Any, list[Tensor]] = {}
    weights: dict[Any, int] = {}  # of each kind so far
    seen: set[int] = set()
    for p in params:
        blocks = layouts[p].blocks
        mesh = getattr(p, "device_mesh", None)
        # A parameter that occurs twice takes two steps, one after the other.
        kind = len(kinds) if id(p) in seen else (blocks and (blocks.m, blocks.n, blocks.sides), mesh)
        before = weights.setdefault(kind, 0)
        unsplit = blocks is None or mesh is not None or replicated
        kinds.setdefault((kind, 0 if unsplit else before // _weights_at_once(p)), []).append(p)
        weights[kind] = before + p.numel()
        seen.add(id(p))
    return list(kinds.values())


def check_averages(
    state: Mapping[Tensor, Mapping[str, Tensor]], params: Sequence[Tensor], layouts: Mapping[Tensor, Layout]
) -> None:
    """Raise if the averages of a parameter do not have the shape that its layout needs."""
    for p in params:
        if "exp_avg" in (entries := state.get(p, {})):
            blocks = layouts[p].blocks
            shape, wanted = tuple(entries["exp_avg"].shape), real_shape(p) if blocks is None else blocks.shape
            if shape != wanted:
                raise RuntimeError(
                    f"the averages of a parameter of shape {tuple(p.shape)} have shape {shape}, but must have shape "
                    f"{wanted}. Its shape, block_size and max_size cannot change once there is state: set them back, "
                    "or make a new optimizer."
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
