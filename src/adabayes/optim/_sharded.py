"""Sharded matrices: which process owns which blocks, and how gradients get there and steps come back.

A parameter that is sharded (a DTensor of FSDP2, HSDP or tensor parallelism) is cut into the same blocks as a whole one.
Each block has one owner, which alone keeps its averages, factors and bases. At each step the shards of a gradient
travel to the owners of its blocks in one all-to-all, and the shards of the step come back in another. Where the shards
are whole rows of blocks, owners have them already, and nothing is sent.

State is itself a DTensor, sharded over blocks, so torch's distributed checkpoints move it to any other number of
processes. Its mesh has the parameter's processes in an order that begins with the first owner: so small matrices have
different owners.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from adabayes.eigenbasis import Blocks
from adabayes.optim._tensors import local, real_view

__all__ = ["Exchange", "Owners", "first_owners", "is_sharded", "mesh_of", "owned", "shard_like", "work_of"]

_MESHES = 8  # at most so many different first owners: each needs a process group of its own

Box = list[tuple[int, int]]  # first index and length of a shard, for each dimension of the tensor


def is_sharded(p: Tensor) -> bool:
    """Tell whether a parameter is distributed over processes, as a DTensor."""
    return hasattr(p, "device_mesh")


def mesh_of(p: Any) -> Any:
    """Return the processes of a sharded parameter, as something to tell them apart by; None of a whole one."""
    return p.device_mesh if is_sharded(p) else None


def shard_like(p: Any, gradient: Any) -> Tensor:
    """Return the shard of a gradient that belongs to this process's shard of the parameter."""
    if gradient.placements != p.placements:  # as that of a replicated parameter, still to be summed
        gradient = gradient.redistribute(placements=p.placements)
    return local(gradient)


# Who owns what


def first_owners(costs: Sequence[int], numbers: Sequence[int], loads: list[int]) -> list[int]:
    """Return which process owns the first blocks of each matrix; the next processes own the following blocks.

    A matrix is dealt out in equal runs of blocks, the last one shorter. If all processes get the same, the first one
    begins, for so shards are most often where they are needed. Of the others, the costliest choose first, each those
    processes that have least to do.

    Args:
        costs: of a block of each matrix.
        numbers: of blocks that each matrix has.
        loads: of the processes so far; what is given out now is added.
    """
    world = len(loads)
    candidates = range(0, world, -(-world // _MESHES)) if _keeps_order() else range(1)
    firsts = [0] * len(costs)
    runs = [_runs(number, world) for number in numbers]

    def share(index: int) -> int:
        return costs[index] * runs[index][0]

    for index in sorted(range(len(costs)), key=share, reverse=True):

        def after(first: int, index: int = index) -> list[int]:
            return [loads[(first + i) % world] + costs[index] * run for i, run in enumerate(runs[index])]

        if numbers[index] % world:
            firsts[index] = min(candidates, key=lambda first: (max(after(first)), sum(after(first))))
        for i, load in enumerate(after(firsts[index])):
            loads[(firsts[index] + i) % world] = load
    return firsts


def work_of(blocks: Blocks) -> int:
    """Return the work of a step with a block, in proportion: m³ + n³ if it is square, and has two sides to rotate."""
    return blocks.m * blocks.n * sum(blocks.size(side) for side in blocks.sides)


def _runs(number: int, world: int) -> list[int]:
    """Return how many blocks each owner has, in DTensor's way to shard them."""
    each = -(-number // world)
    return [min(each, number - begin) for begin in range(0, number, each)]


def _keeps_order() -> bool:
    """Tell whether this version of torch can make process groups in an order of their own (2.13 can)."""
    return dist.is_available() and "sort_ranks" in inspect.signature(dist.new_group).parameters


class Owners:
    """The owners of an optimizer's sharded matrices, and the process groups in which they exchange their shards."""

    def __init__(self) -> None:
        self._firsts: dict[Tensor, int | None] = {}  # None: a vector, which is sharded as it is
        self._loads: dict[tuple[int, ...], list[int]] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        self._meshes: dict[tuple[Any, ...], Any] = {}
        self._exchanges: dict[Any, Exchange] = {}

    def __contains__(self, p: Tensor) -> bool:
        return p in self._firsts

    def appoint(self, params: Sequence[tuple[Tensor, Blocks | None]]) -> None:
        """Choose the owners of matrices that have none yet. All processes must do so in the same order."""
        new: dict[tuple[int, ...], list[tuple[Tensor, Blocks]]] = {}
        for p, blocks in params:
            if blocks is None:
                self._firsts[p] = None
            elif p not in self._firsts:
                new.setdefault(_ranks(p), []).append((p, blocks))
        for ranks, chosen in new.items():
            loads = self._loads.setdefault(ranks, [0] * len(ranks))
            costs, numbers = [work_of(blocks) for _, blocks in chosen], [blocks.number for _, blocks in chosen]
            self._firsts.update(zip((p for p, _ in chosen), first_owners(costs, numbers, loads)))

    def zeros(self, p: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make the state of a sharded parameter: that of a matrix by blocks, that of a vector sharded as it is."""
        from torch.distributed.tensor import DTensor

        if self._firsts[p] is None:
            zeros = torch.zeros_like(real_view(local(p)), dtype=dtype, memory_format=torch.contiguous_format)
            return DTensor.from_local(zeros, p.device_mesh, p.placements, **_global(shape))
        begin, end = self._own(p, shape[0])
        return self._by_blocks(p, torch.zeros((end - begin, *shape[1:]), dtype=dtype, device=p.device), shape)

    def placed(self, p: Any, value: Tensor) -> Tensor:
        """Return an entry of state, whole or distributed in another way, as this process keeps it."""
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor

        is_vector = self._firsts[p] is None
        mesh, placements = (p.device_mesh, p.placements) if is_vector else (self.mesh(p), (Shard(0),))
        if isinstance(value, DTensor):
            if value.device_mesh == mesh and tuple(value.placements) == tuple(placements):
                return value
            value = value.full_tensor()
        if is_vector:
            return distribute_tensor(value.to(p.device), mesh, placements)
        begin, end = self._own(p, len(value))
        return self._by_blocks(p, value[begin:end].to(p.device, copy=True), value.shape)

    def _by_blocks(self, p: Any, blocks: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the blocks that this process owns as its shard of a tensor of this shape."""
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(blocks, self.mesh(p), [Shard(0)], **_global(shape))

    def _own(self, p: Any, number: int) -> tuple[int, int]:
        """Return the first and the end of the blocks that this process owns."""
        ranks = _ranks(p)
        return owned(number, len(ranks), self._firsts[p] or 0, ranks.index(dist.get_rank()))

    def mesh(self, p: Any) -> Any:
        """Return the processes of a parameter, in the order in which they own its blocks."""
        from torch.distributed.device_mesh import DeviceMesh

        ranks, first = _ranks(p), self._firsts[p]
        assert first is not None
        key = (p.device_mesh.device_type, ranks, first)
        if key not in self._meshes:
            group = self.group(p)
            if first:
                order = [*ranks[first:], *ranks[:first]]
                group = dist.new_group(order, use_local_synchronization=True, sort_ranks=False)
            self._meshes[key] = DeviceMesh.from_group(group, p.device_mesh.device_type)
        return self._meshes[key]

    def group(self, p: Any) -> Any:
        """Return the group of all processes that have a shard of a parameter."""
        ranks = _ranks(p)
        if ranks not in self._groups:
            if p.device_mesh.ndim == 1:
                self._groups[ranks] = p.device_mesh.get_group()
            elif len(ranks) == dist.get_world_size():
                self._groups[ranks] = dist.group.WORLD
            else:
                self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[ranks]

    def exchange(self, params: Sequence[Any], blocks: Sequence[Blocks]) -> Exchange:
        """Return how these matrices of one mesh, whose blocks are of one shape, exchange their shards."""
        key = (tuple(params), tuple(blocks))
        if key not in self._exchanges:
            matrices = [_Matrix(p, b, self._firsts[p] or 0) for p, b in zip(params, blocks)]
            self._exchanges[key] = Exchange(matrices, self.group(params[0]), params[0].device)
        return self._exchanges[key]


def _global(shape: Sequence[int]) -> dict[str, Any]:
    """Return what a DTensor of this shape is to be told beside its shard."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return {"run_check": False, "shape": torch.Size(shape), "stride": stride}


def _ranks(p: Any) -> tuple[int, ...]:
    """Return the processes that have a shard of a parameter."""
    return tuple(sorted(p.device_mesh.mesh.flatten().tolist()))


def owned(number: int, world: int, first: int, place: int) -> tuple[int, int]:
    """Return the first and the end of the blocks that the process at a place owns."""
    each = -(-number // world)
    begin = min(each * ((place - first) % world), number)
    return begin, min(begin + each, number)


# How shards travel


class _Matrix:
    """A sharded matrix: where its shards are, and where its blocks."""

    def __init__(self, p: Any, blocks: Blocks, first: int) -> None:
        self.shape = (*p.shape, 2) if p.is_complex() else tuple(p.shape)
        self.blocks, self.first = blocks, first
        mesh, placements = p.device_mesh.mesh, p.placements
        if any(placement.is_partial() for placement in placements):
            raise NotImplementedError(
                f"AdaBayesK: a parameter of shape {tuple(p.shape)} is placed as {placements}, that is, still to be "
                "summed. Redistribute it to Shard or Replicate placements."
            )
        everywhere = list(itertools.product(*map(range, mesh.shape)))
        places = [everywhere[i] for i in mesh.flatten().argsort().tolist()]
        self.boxes = [_box(self.shape, mesh.shape, place, placements) for place in places]
        copies = [i for i, placement in enumerate(placements) if _sharded_dim(placement) is None]
        self.replicas = [tuple(place[i] for i in copies) for place in places]

    @property
    def unit(self) -> int:
        """How many numbers of a row always stay together: they are of one shard and of one block."""
        starts = [self._columns(place) for place in range(len(self.boxes))]
        if any(len(ids) and ids[-1] - ids[0] + 1 != len(ids) for ids in starts):
            return 1
        return math.gcd(self.blocks.n, *(int(ids[0]) for ids in starts if len(ids)))

    def own(self, place: int) -> tuple[int, int]:
        return owned(self.blocks.number, len(self.boxes), self.first, place)

    def width(self, place: int, unit: int) -> int:
        """Return how many columns of a shard are sent: up to whole blocks."""
        ids = self._columns(place)
        end = math.prod(self.shape[1:])
        filling = self.blocks.columns * self.blocks.n - end if len(ids) and unit > 1 and ids[-1] == end - 1 else 0
        return len(ids) + filling

    def routes(self, place: int, unit: int) -> tuple[Tensor, Tensor]:
        """Return, for each unit of a shard, the place of its owner, and its index among all units that are there."""
        (_, columns, m, n, _), number = self.blocks, self.blocks.number
        begin, rows = self.boxes[place][0]
        row = torch.arange(begin, begin + rows)[:, None]
        ids = self._columns(place)
        if unit > 1 and len(ids):
            ids = torch.arange(int(ids[0]), int(ids[0]) + self.width(place, unit), unit)
        block = (row // m) * columns + ids // n
        each = -(-number // len(self.boxes))
        owner = (self.first + block // each) % len(self.boxes)
        index = ((block % each) * m + row % m) * (n // unit) + (ids % n) // unit
        return owner.flatten(), index.flatten()

    def _columns(self, place: int) -> Tensor:
        """Return which columns of the matrix a shard has."""
        ids = torch.arange(math.prod(self.shape[1:])).view(self.shape[1:])
        for dim, (begin, size) in enumerate(self.boxes[place][1:]):
            ids = ids.narrow(dim, begin, size)
        return ids.flatten()


def _box(shape: Sequence[int], mesh: Sequence[int], place: Sequence[int], placements: Sequence[Any]) -> Box:
    box = [(0, size) for size in shape]
    # FSDP2 shards what tensor parallelism has sharded before it, though it comes first in the mesh.
    for strided in (False, True):
        for i, placement in enumerate(placements):
            dim = _sharded_dim(placement)
            if dim is not None and hasattr(placement, "split_factor") == strided:
                begin, size = box[dim]
                each = -(-size // mesh[i])
                skipped = min(each * place[i], size)
                box[dim] = (begin + skipped, min(each, size - skipped))
    return box


def _sharded_dim(placement: Any) -> int | None:
    return getattr(placement, "dim", None)


class _Route(NamedTuple):
    """One way of an exchange: which units are sent, in their order, and where those that come are put."""

    take: Tensor
    put: Tensor
    sent: list[int]  # how many to each process
    received: list[int]


class _Travel(NamedTuple):
    """Units on their way. It holds those that were sent: gloo's threads read them until all have arrived."""

    sent: Tensor
    come: Tensor
    work: Any

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.come


class Exchange:
    """Takes the shards of gradients to the owners of their blocks, and the steps back."""

    def __init__(self, matrices: Sequence[_Matrix], group: Any, device: torch.device) -> None:
        self._matrices, self._group = matrices, group
        here, world = dist.get_rank(group), dist.get_world_size(group)
        self.ranges = [matrix.own(here) for matrix in matrices]  # of blocks
        _, self._m, self._n = matrices[0].blocks.shape
        self._unit = math.gcd(*(matrix.unit for matrix in matrices))
        self._widths = [matrix.width(here, self._unit) for matrix in matrices]
        numbers = [[end - begin for begin, end in map(matrix.own, range(world))] for matrix in matrices]
        units = torch.tensor(numbers) * (self._m * self._n // self._unit)  # of each matrix, at each owner
        self._before = units.cumsum(0) - units
        # Of the replicas of a shard, all need the step; an owner is sent the gradient by the one in its own replica.
        come, self._travels = [], False
        for place in range(world):
            owners, indices, kinds = self._routes(place)
            self._travels |= bool((owners != place).any())
            to_here = owners == here
            come.append((indices[to_here], indices[to_here & self._sends(place, here)[kinds]]))
        owners, _, kinds = self._routes(here)
        order = owners.argsort(stable=True)
        allowed = torch.stack([self._sends(here, owner) for owner in range(world)])
        mine = order[allowed[owners[order], kinds[order]]]
        self._there = _Route(
            mine.to(device),
            torch.cat([some for _, some in come]).to(device),
            owners[mine].bincount(minlength=world).tolist(),
            [len(some) for _, some in come],
        )
        self._back = _Route(
            torch.cat([every for every, _ in come]).to(device),
            order.to(device),
            [len(every) for every, _ in come],
            owners.bincount(minlength=world).tolist(),
        )

    def to_blocks(self, shards: Sequence[Tensor]) -> Tensor:
        """Send shards to the owners of their blocks; return the blocks that this process owns."""
        units = torch.cat([self._units(x, width) for x, width in zip(shards, self._widths)])
        travel = self._send(units, self._there)
        blocks = units.new_zeros(sum(end - begin for begin, end in self.ranges), self._m, self._n)
        blocks.view(-1, self._unit)[self._there.put] = travel.wait()
        return blocks

    def from_blocks(
        self, blocks: Tensor, shapes: Sequence[Sequence[int]], meanwhile: Callable[[], Any] | None
    ) -> list[Tensor]:
        """Send blocks to where their shards are, and do something else on the way; return the shards that are here."""
        travel = self._send(blocks.reshape(-1, self._unit), self._back)
        if meanwhile is not None:
            meanwhile()
        come = travel.wait()
        units = torch.empty_like(come)
        units[self._back.put] = come
        shards, first = [], 0
        for width, shape in zip(self._widths, shapes):
            count = shape[0] * width // self._unit
            rows = units[first : first + count].view(shape[0], width)
            shards.append(rows[:, : math.prod(shape[1:])].reshape(tuple(shape)))
            first += count
        return shards

    def _units(self, x: Tensor, width: int) -> Tensor:
        rows = x.reshape(len(x), math.prod(x.shape[1:]))
        filling = width - rows.shape[1]
        return (pad(rows, (0, filling)) if filling else rows).reshape(-1, self._unit)

    def _send(self, units: Tensor, route: _Route) -> _Travel:
        packed = units[route.take]
        if not self._travels:
            return _Travel(packed, packed, None)
        come = packed.new_empty(sum(route.received), self._unit)
        work = dist.all_to_all_single(come, packed, route.received, route.sent, group=self._group, async_op=True)
        return _Travel(packed, come, work)

    def _routes(self, place: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the owners of all units of a process, their indices there, and which of the matrices they are of."""
        owners, indices, kinds = [], [], []
        for k, matrix in enumerate(self._matrices):
            owner, index = matrix.routes(place, self._unit)
            owners.append(owner)
            indices.append(index + self._before[k, owner])
            kinds.append(torch.full_like(owner, k))
        return torch.cat(owners), torch.cat(indices), torch.cat(kinds)

    def _sends(self, place: int, owner: int) -> Tensor:
        """Tell for each matrix whether a process, and not one of its replicas, sends its shard to an owner."""
        return torch.tensor([matrix.replicas[place] == matrix.replicas[owner] for matrix in self._matrices])
