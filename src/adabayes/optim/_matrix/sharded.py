"""Sharded matrices: which process owns which blocks, and how gradients travel to owners and steps travel back.

A sharded parameter (a DTensor of FSDP2, HSDP or tensor parallelism) is cut into the same blocks as an unsharded one.
Each block has one owner, and only the owner keeps its averages, factors and bases. At each step, one all-to-all sends
the shards of a gradient to the owners of its blocks, and another one sends the shards of the step back. Where shards
are complete rows of blocks, their owners already hold them, and nothing is sent.

State is itself a DTensor, sharded over blocks, so torch's distributed checkpoints can move it to any number of
processes. Its mesh lists the parameter's processes starting with the first owner, so that small matrices have different
owners.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from adabayes._blocks.blocks import Blocks
from adabayes._blocks.ownership import first_owners, owned_range
from adabayes._util.distributed import num_rank_orders
from adabayes._util.tensors import local, real_shape, real_view
from adabayes.eigenbasis import Sides

__all__ = ["Owners", "ShardedStack", "is_sharded", "shard_like"]

# Number of stacks of one kind that are kept. Parameters without gradients, such as unused experts, make new ones.
_MAX_STACKS = 4

Box = list[tuple[int, int]]  # the first index and the length of a shard, for each dimension of the tensor


def is_sharded(p: Tensor) -> bool:
    """Tell whether a parameter is distributed over processes, as a DTensor."""
    return hasattr(p, "device_mesh")


def shard_like(p: Any, gradient: Any) -> Tensor:
    """Return this process's shard of a gradient, with the placements of the parameter."""
    if gradient.placements != p.placements:  # for example, the unreduced gradient of a replicated parameter
        gradient = gradient.redistribute(placements=p.placements)
    return local(gradient)


# Ownership


class Owners:
    """The owners of an optimizer's sharded matrices, and the process groups in which they exchange shards."""

    def __init__(self) -> None:
        self._firsts: dict[Tensor, int | None] = {}  # None if it is not rotated: its state is sharded alike
        self._loads: dict[tuple[int, ...], list[int]] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        self._meshes: dict[tuple[Any, ...], Any] = {}
        self._stacks: dict[Any, dict[Any, ShardedStack]] = {}  # by kind, then by parameters; the last used is the last

    def __contains__(self, p: Tensor) -> bool:
        return p in self._firsts

    def appoint(self, params: Sequence[tuple[Tensor, Blocks | None]]) -> None:
        """Choose the owners of matrices that have none yet. All processes must call this in the same order."""
        new: dict[tuple[int, ...], list[tuple[Tensor, Blocks]]] = {}
        for p, blocks in params:
            if blocks and blocks.shared:
                raise NotImplementedError(
                    f"share_bases=True does not work with sharded parameters, and one of shape {tuple(p.shape)} is "
                    "sharded: its blocks have different owners. Leave share_bases out: sharding already divides the "
                    "state among the devices."
                )
            if blocks is None:
                self._firsts[p] = None
            elif p not in self._firsts:
                new.setdefault(_ranks(p), []).append((p, blocks))
        for ranks, chosen in new.items():
            loads = self._loads.setdefault(ranks, [0] * len(ranks))
            costs = [blocks.rotation_cost for _, blocks in chosen]
            counts = [blocks.num_blocks for _, blocks in chosen]
            firsts = first_owners(costs, counts, loads, num_rank_orders())
            self._firsts.update(zip((p for p, _ in chosen), firsts))

    def new_entry(self, p: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Create an entry of state: sharded over blocks for a matrix, like the parameter for a vector."""
        from torch.distributed.tensor import DTensor

        if self._firsts[p] is None:
            zeros = torch.zeros_like(real_view(local(p)), dtype=dtype, memory_format=torch.contiguous_format)
            return DTensor.from_local(zeros, p.device_mesh, p.placements, **_global(shape))
        begin, end = self._owned_range(p, shape[0])
        return self._shard_over_blocks(p, torch.zeros((end - begin, *shape[1:]), dtype=dtype, device=p.device), shape)

    def to_storage(self, p: Any, value: Tensor) -> Tensor:
        """Convert an entry of state, unsharded or sharded in another way, to this process's storage format."""
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor

        is_rotated = self._firsts[p] is not None
        mesh, placements = (self.mesh(p), (Shard(0),)) if is_rotated else (p.device_mesh, p.placements)
        if isinstance(value, DTensor):
            if value.device_mesh == mesh and tuple(value.placements) == tuple(placements):
                return value
            value = value.full_tensor()
        if not is_rotated:
            return distribute_tensor(value.to(p.device), mesh, placements)
        begin, end = self._owned_range(p, len(value))
        return self._shard_over_blocks(p, value[begin:end].to(p.device, copy=True), value.shape)

    def _shard_over_blocks(self, p: Any, blocks: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a DTensor of this shape, of which this process holds the blocks that it owns."""
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(blocks, self.mesh(p), [Shard(0)], **_global(shape))

    def _owned_range(self, p: Any, num_blocks: int) -> tuple[int, int]:
        """Return the first and the end of the blocks that this process owns."""
        ranks = _ranks(p)
        return owned_range(num_blocks, len(ranks), self._firsts[p] or 0, ranks.index(dist.get_rank()))

    def mesh(self, p: Any) -> Any:
        """Return a mesh of the parameter's processes, in the order in which they own its blocks."""
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
        """Return the process group of all processes that have a shard of a parameter."""
        ranks = _ranks(p)
        if ranks not in self._groups:
            if p.device_mesh.ndim == 1:
                self._groups[ranks] = p.device_mesh.get_group()
            elif len(ranks) == dist.get_world_size():
                self._groups[ranks] = dist.group.WORLD
            else:
                self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[ranks]

    def stack(self, params: Sequence[Any], blocks: Sequence[Blocks]) -> ShardedStack:
        """Return how matrices on one mesh, whose blocks have one size, are stacked at the owners of their blocks."""
        m, n, sides = blocks[0].m, blocks[0].n, blocks[0].sides
        stacks = self._stacks.setdefault((m, n, sides, params[0].device_mesh), {})
        key = tuple((p, real_shape(p), p.placements) for p in params)
        stack = stacks.pop(key, None)
        if stack is None:
            matrices = [_Matrix(p, b, self._firsts[p] or 0) for p, b in zip(params, blocks)]
            stack = ShardedStack(matrices, self.group(params[0]), params[0].device)
        stacks[key] = stack
        if len(stacks) > _MAX_STACKS:
            del stacks[next(iter(stacks))]
        return stack


def _global(shape: Sequence[int]) -> dict[str, Any]:
    """Return the arguments that DTensor.from_local needs for a tensor of this global shape."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return {"run_check": False, "shape": torch.Size(shape), "stride": stride}


def _ranks(p: Any) -> tuple[int, ...]:
    """Return the ranks of the processes that have a shard of a parameter."""
    return tuple(sorted(p.device_mesh.mesh.flatten().tolist()))


# Communication: processes are identified by their index among the sorted ranks of a parameter


class _Matrix:
    """A sharded matrix, or a stack of them: which process has which shard, and which process owns which blocks."""

    def __init__(self, p: Any, blocks: Blocks, first: int) -> None:
        shape = self.shape = real_shape(p)
        self.blocks, self.first = blocks, first
        # The number of leading dimensions that count rows; more than one if the parameter is a stack of matrices
        self.row_dims = next(
            i for i in range(1, len(shape)) if shape[i - 1] == blocks.height and math.prod(shape[i:]) == blocks.width
        )
        mesh, placements = p.device_mesh.mesh, p.placements
        if any(placement.is_partial() for placement in placements):
            raise NotImplementedError(
                f"AdaBayesK: a parameter of shape {tuple(p.shape)} is placed as {placements}, that is, not reduced "
                "yet. Redistribute it to Shard or Replicate placements."
            )
        all_coordinates = list(itertools.product(*map(range, mesh.shape)))
        coordinates = [all_coordinates[i] for i in mesh.flatten().argsort().tolist()]
        self.boxes = [_box(self.shape, mesh.shape, coordinate, placements) for coordinate in coordinates]
        replicated = [i for i, placement in enumerate(placements) if _sharded_dim(placement) is None]
        self.replicas = [tuple(coordinate[i] for i in replicated) for coordinate in coordinates]

    @property
    def unit(self) -> int:
        """How many consecutive entries of a row always stay together, in one shard and in one block."""
        columns = [self._columns(process) for process in range(len(self.boxes))]
        if any(len(ids) and ids[-1] - ids[0] + 1 != len(ids) for ids in columns):
            return 1
        return math.gcd(self.blocks.n, *(int(ids[0]) for ids in columns if len(ids)))

    def owned_range(self, process: int) -> tuple[int, int]:
        """Return the first and the end of the blocks that a process owns."""
        return owned_range(self.blocks.num_blocks, len(self.boxes), self.first, process)

    def width(self, process: int, unit: int) -> int:
        """Return how many columns of a shard are sent, including the padding of the last block."""
        ids, end = self._columns(process), self.blocks.width
        padding = self.blocks.columns * self.blocks.n - end if len(ids) and unit > 1 and ids[-1] == end - 1 else 0
        return len(ids) + padding

    def routes(self, process: int, unit: int) -> tuple[Tensor, Tensor]:
        """Return, for each unit of a shard, its owner, and its index among this matrix's units at that owner."""
        blocks = self.blocks
        m, n, num_blocks = blocks.m, blocks.n, blocks.num_blocks
        rows = self._indices(process, 0, self.row_dims)[:, None]
        matrix, row = rows // blocks.height, rows % blocks.height
        ids = self._columns(process)
        if unit > 1 and len(ids):
            ids = torch.arange(int(ids[0]), int(ids[0]) + self.width(process, unit), unit)
        block = (matrix * blocks.rows + row // m) * blocks.columns + ids // n
        length = -(-num_blocks // len(self.boxes))
        owner = (self.first + block // length) % len(self.boxes)
        index = ((block % length) * m + row % m) * (n // unit) + (ids % n) // unit
        return owner.flatten(), index.flatten()

    def _columns(self, process: int) -> Tensor:
        """Return which columns of the matrices a shard has."""
        return self._indices(process, self.row_dims, len(self.shape))

    def _indices(self, process: int, begin: int, end: int) -> Tensor:
        """Return the indices that a shard has in some dimensions, seen as one dimension."""
        shape = self.shape[begin:end]
        indices = torch.arange(math.prod(shape)).view(shape)
        for dim, (first, size) in enumerate(self.boxes[process][begin:end]):
            indices = indices.narrow(dim, first, size)
        return indices.flatten()


def _box(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]) -> Box:
    """Return the shard at a coordinate of the mesh."""
    box = [(0, size) for size in shape]
    # FSDP2 shards the result of tensor parallelism, although it comes first in the mesh.
    for strided in (False, True):
        for i, placement in enumerate(placements):
            dim = _sharded_dim(placement)
            if dim is not None and hasattr(placement, "split_factor") == strided:
                begin, size = box[dim]
                length = -(-size // mesh[i])
                skipped = min(length * coordinate[i], size)
                box[dim] = (begin + skipped, min(length, size - skipped))
    return box


def _sharded_dim(placement: Any) -> int | None:
    return getattr(placement, "dim", None)


class _Route(NamedTuple):
    """One direction of an exchange."""

    take: Tensor  # the units that are sent, sorted by receiver
    put: Tensor  # where the received units belong
    sent: list[int]  # units sent to each process
    received: list[int]  # units received from each process


class ShardedStack:
    """Sends the shards of gradients to the owners of their blocks, and the steps back.

    It has the interface of :class:`adabayes.optim._matrix.stack.LocalStack`, of which it is the sharded form.
    """

    def __init__(self, matrices: Sequence[_Matrix], group: Any, device: torch.device) -> None:
        self._matrices, self._group = matrices, group
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        owned = [matrix.owned_range(rank) for matrix in matrices]
        self.ranges = (owned, owned)  # the bases of each matrix that are in the stack, left and right
        self._num_blocks = sum(end - begin for begin, end in owned)
        _, self._m, self._n = matrices[0].blocks.shape
        self._unit = math.gcd(*(matrix.unit for matrix in matrices))
        self._widths = [matrix.width(rank, self._unit) for matrix in matrices]
        counts = [[end - begin for begin, end in map(matrix.owned_range, range(world))] for matrix in matrices]
        units = torch.tensor(counts) * (self._m * self._n // self._unit)  # of each matrix, at each owner
        self._before = units.cumsum(0) - units
        # Every replica of a shard needs the step, but an owner receives the gradient only once, from its own replica.
        arriving, self._communicates = [], False  # pairs: units that need a step, units that come with a gradient
        for process in range(world):
            owners, indices, matrix_indices = self._routes(process)
            self._communicates |= bool((owners != process).any())
            to_here = owners == rank
            arriving.append((indices[to_here], indices[to_here & self._sends(process, rank)[matrix_indices]]))
        owners, _, matrix_indices = self._routes(rank)
        order = owners.argsort(stable=True)
        allowed = torch.stack([self._sends(rank, owner) for owner in range(world)])
        mine = order[allowed[owners[order], matrix_indices[order]]]
        self._to_owners = _Route(
            mine.to(device),
            torch.cat([units for _, units in arriving]).to(device),
            owners[mine].bincount(minlength=world).tolist(),
            [len(units) for _, units in arriving],
        )
        self._from_owners = _Route(
            torch.cat([units for units, _ in arriving]).to(device),
            order.to(device),
            [len(units) for units, _ in arriving],
            owners.bincount(minlength=world).tolist(),
        )

    def to_blocks(self, shards: Sequence[Tensor]) -> Tensor:
        """Send shards to the owners of their blocks; return a stack of the blocks that this process owns."""
        pieces = zip(shards, self._matrices, self._widths)
        units = torch.cat([self._to_units(x, matrix.row_dims, width) for x, matrix, width in pieces])
        stack = units.new_zeros(self._num_blocks, self._m, self._n)
        stack.view(-1, self._unit)[self._to_owners.put] = self._send(units, self._to_owners)
        return stack

    def from_blocks(self, stack: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send a stack of blocks back; return this process's shards, which have these shapes."""
        received = self._send(stack.reshape(-1, self._unit), self._from_owners)
        units = torch.empty_like(received)
        units[self._from_owners.put] = received
        shards, first = [], 0
        for matrix, width, shape in zip(self._matrices, self._widths, shapes):
            height = math.prod(shape[: matrix.row_dims])
            count = height * width // self._unit
            rows = units[first : first + count].view(height, width)
            shards.append(rows[:, : math.prod(shape[matrix.row_dims :])].reshape(tuple(shape)))
            first += count
        return shards

    def owners(self, device: torch.device) -> Sides:
        """Return None for both sides: blocks of sharded matrices do not share their bases."""
        return None, None

    def _to_units(self, x: Tensor, row_dims: int, width: int) -> Tensor:
        rows = x.reshape(math.prod(x.shape[:row_dims]), math.prod(x.shape[row_dims:]))
        padding = width - rows.shape[1]
        return (pad(rows, (0, padding)) if padding else rows).reshape(-1, self._unit)

    def _send(self, units: Tensor, route: _Route) -> Tensor:
        """Send units along a route; return the received ones."""
        packed = units[route.take]
        if not self._communicates:
            return packed
        received = packed.new_empty(sum(route.received), self._unit)
        dist.all_to_all_single(received, packed, route.received, route.sent, group=self._group)
        return received

    def _routes(self, process: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for all units of a process, their owners, their indices there, and the indices of their matrices."""
        owners, indices, matrix_indices = [], [], []
        for k, matrix in enumerate(self._matrices):
            owner, index = matrix.routes(process, self._unit)
            owners.append(owner)
            indices.append(index + self._before[k, owner])
            matrix_indices.append(torch.full_like(owner, k))
        return torch.cat(owners), torch.cat(indices), torch.cat(matrix_indices)

    def _sends(self, process: int, owner: int) -> Tensor:
        """Tell for each matrix whether a process, and not one of its replicas, sends its shard to an owner."""
        return torch.tensor([matrix.replicas[process] == matrix.replicas[owner] for matrix in self._matrices])
