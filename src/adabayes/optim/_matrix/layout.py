"""The layout of each parameter: its blocks, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from adabayes._blocks.blocks import Blocks, check_block_size, cut
from adabayes._util.checks import check_integer
from adabayes._util.tensors import real_shape
from adabayes.optim._engine.state import Entry, Group

__all__ = ["Subgroups", "blocks_of", "check_averages", "check_integers", "entries_of", "split_by_kind"]

_INTEGERS = {"learn_every": 1, "refresh": 1, "max_size": 1, "batch_dims": 0}  # settings, and their least values


def blocks_of(p: Tensor, group: Group) -> Blocks | None:
    """Return the blocks of a parameter, or None if it is not rotated."""
    return cut(real_shape(p), group["block_size"], group["max_size"], group["batch_dims"], group["share_bases"])


class Subgroups:
    """Splits parameter groups into vectors and matrices, and remembers the result until they change."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Group, list[Group]]] = {}  # by the id of the group

    def __call__(self, group: Group) -> list[Group]:
        """Return a group of the parameters that are not rotated and one of those that are, if there are any."""
        settings = {name: value for name, value in group.items() if name != "params"}
        chosen = {name: settings[name] for name in (*_INTEGERS, "block_size", "share_bases")}
        key = [*map(id, group["params"])], [p.shape for p in group["params"]], chosen
        known, integers, subgroups = self._known.get(id(group), (None, {}, []))
        if known != key:
            integers = check_integers(group)
            is_rotated = [blocks_of(p, {**group, **integers}) is not None for p in group["params"]]
            kinds = [[p for p, kind in zip(group["params"], is_rotated) if kind == wanted] for wanted in (False, True)]
            subgroups = [{"params": params} for params in kinds if params]
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
        kind: Any = blocks and (blocks.m, blocks.n, blocks.sides), getattr(p, "device_mesh", None)
        if id(p) in seen:  # a parameter that occurs twice takes two steps, one after the other
            kind = len(kinds)
        kinds.setdefault(kind, []).append(p)
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
