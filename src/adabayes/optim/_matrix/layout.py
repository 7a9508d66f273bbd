"""The layout of each parameter: its blocks, and its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from adabayes._blocks.blocks import Blocks, check_block_size, cut
from adabayes._util.checks import check_integer
from adabayes._util.tensors import real_shape
from adabayes.kernels.cpu.matrix import LARGEST_SIDE
from adabayes.optim._engine.state import Entry, Group

__all__ = ["Subgroups", "blocks_of", "check_integers", "check_state", "entries_of", "layout_of", "split_by_kind"]

_INTEGERS = {"learn_every": 1, "refresh": 1, "max_size": 1, "batch_dims": 0}  # settings, and their least values


def blocks_of(p: Tensor, group: Group) -> Blocks | None:
    """Return the blocks of a parameter, or None if it is not rotated."""
    return cut(real_shape(p), *layout_of(group))


def layout_of(group: Group) -> tuple[int | tuple[int, int], int, int, bool]:
    """Return the settings that, with the shape of a parameter, decide how it is cut into blocks."""
    return group["block_size"], group["max_size"], group["batch_dims"], group["share_bases"]


class Subgroups:
    """Splits parameter groups into parameters of one kind, and remembers the result until they change.

    Vectors are one kind. Matrices with small blocks are another one for each dtype, so that matrices without a kernel
    do not keep the others from theirs.

    Args:
        on_change: called when a group is split again, because its parameters or settings have changed.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._known: dict[int, tuple[Any, Group, list[Group]]] = {}  # by the id of the group

    def __call__(self, group: Group) -> list[Group]:
        """Return the groups that a parameter group is split into. All of their parameters are rotated, or none."""
        settings = {name: value for name, value in group.items() if name != "params"}
        chosen = {name: settings[name] for name in (*_INTEGERS, "block_size", "share_bases")}
        key = [*map(id, group["params"])], [(p.shape, p.dtype) for p in group["params"]], chosen
        known, integers, subgroups = self._known.get(id(group), (None, {}, []))
        if known != key:
            self._on_change()
            integers = check_integers(group)
            kinds: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                blocks = blocks_of(p, {**group, **integers})
                kind = blocks and (max(blocks.sizes) <= LARGEST_SIDE, p.dtype)
                kinds.setdefault(kind, []).append(p)
            subgroups = [{"params": params} for params in kinds.values()]
            self._known[id(group)] = key, integers, subgroups
        for subgroup in subgroups:
            subgroup.update(settings | integers)
        return subgroups


def check_integers(group: Group) -> Group:
    """Return the settings of AdaBayes-K that must be integers, as ints; raise if one is not an integer."""
    integers = {name: check_integer(name, group[name], least) for name, least in _INTEGERS.items()}
    return {**integers, "block_size": check_block_size(group["block_size"], check_integer)}


@lru_cache(maxsize=4096)
def entries_of(blocks: Blocks | None) -> dict[str, Entry]:
    """Return the entries of state: both averages, and factors and bases for each side that is rotated."""
    average = Entry(shape=lambda shape: shape if blocks is None else blocks.shape)
    entries = {"exp_avg": average, "exp_avg_sq": average}
    if blocks is None:
        return entries
    for side, size in zip(blocks.sides, blocks.sizes):
        shape = blocks.num_bases(side), size, size
        square = Entry(shape=lambda _, shape=shape: shape, low=False)  # type: ignore[misc]
        entries |= {f"factor_{side}": square, f"basis_{side}": square}
    return entries


def split_by_kind(group: Group) -> list[list[Tensor]]:
    """Split parameters into lists that are stacked together: blocks of one size, on one device mesh."""
    kinds: dict[Any, list[Tensor]] = {}
    seen: set[int] = set()
    for p in group["params"]:
        blocks = blocks_of(p, group)
        size = None if blocks is None else (blocks.m, blocks.n, blocks.sides)
        kind: Any = size, getattr(p, "device_mesh", None)
        if id(p) in seen:  # a parameter that occurs twice takes two steps, one after the other
            kind = len(kinds)
        kinds.setdefault(kind, []).append(p)
        seen.add(id(p))
    return list(kinds.values())


def check_state(state: Mapping[Tensor, Mapping[str, Tensor]], group: Group) -> None:
    """Raise if an entry of state does not have the shape that the blocks of its parameter need."""
    for p in group["params"]:
        needed = {name: entry.shape_for(p) for name, entry in entries_of(blocks_of(p, group)).items()}
        for name, value in state.get(p, {}).items():
            is_ours = name in needed or name.startswith(("factor_", "basis_"))
            if is_ours and tuple(value.shape) != needed.get(name):
                raise RuntimeError(
                    f"the state of a parameter of shape {tuple(p.shape)} has {name} of shape {tuple(value.shape)}, but "
                    f"needs {needed.get(name, 'no such entry')}. Its shape, block_size, max_size, batch_dims and "
                    "share_bases cannot change once there is state: set them back, or make a new optimizer."
                )
