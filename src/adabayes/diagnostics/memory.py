"""Plans the memory of training, and the traffic and the operations of an optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from adabayes._blocks.blocks import Blocks, check_block_size, cut
from adabayes._blocks.ownership import first_owners, owned_range
from adabayes._util.checks import check_integer
from adabayes._util.distributed import num_rank_orders
from adabayes._util.table import html

__all__ = ["MemoryPlan", "matrix_memory_plan", "memory_plan"]


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of each device, and the traffic and the operations of an optimizer's step.

    Attributes:
        parameters: bytes of the weights.
        gradients: bytes of the gradients.
        state: bytes of the optimizer's state.
        moved: bytes that a step reads and writes.
        sent: bytes that a step sends to other devices, in addition to FSDP2's own traffic.
        rotations: operations of a step for rotations and factors.
        refreshes: operations of a step for refreshes of bases, on average; at first there are more.
        peak: operations of the costliest step after the first ones, when the most bases are due.
        largest: operations of the largest piece of work in such a step, which cannot be divided: however many devices
            there are, one of them does it alone.
    """

    parameters: float
    gradients: float
    state: float
    moved: float
    sent: float = 0.0
    rotations: float = 0.0
    refreshes: float = 0.0
    peak: float = 0.0
    largest: float = 0.0

    @property
    def total(self) -> float:
        """The bytes that stay on a device, without activations and gathered layers."""
        return self.parameters + self.gradients + self.state

    def seconds(self, bandwidth: float) -> float:
        """Return the seconds of a step on large tensors, which the memory's ``bandwidth`` (bytes per second) limits."""
        return self.moved / bandwidth

    def _repr_html_(self) -> str:
        names = ("parameters", "gradients", "state", "total", "moved")
        rows = [("", "GB per device"), *((name, f"{getattr(self, name) / 1e9:.3g}") for name in names)]
        return html(rows, ["total: what stays on the device. moved: what a step reads and writes."])


def memory_plan(
    weights: float,
    devices: int = 1,
    *,
    param_dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
) -> MemoryPlan:
    """Plan the memory that AdaBayes or AdaBayes-FP needs for a network, sharded over devices by FSDP2.

    Args:
        weights: number of weights of the network, such as ``7e9``.
        devices: number of devices over which they are sharded.
        param_dtype: dtype of the weights.
        grad_dtype: dtype of the gradients that the optimizer gets. None: that of the weights.
        state_dtype: as given to the optimizer. None: fp32, or float64 for such weights.

    Examples:
        >>> plan = memory_plan(7e9, devices=8)
        >>> f"{plan.total / 1e9:.1f} GB per device"
        '14.0 GB per device'
    """
    if not weights > 0 or devices < 1:
        raise ValueError(f"weights {weights} must be above 0 and devices {devices} at least 1")
    wide = torch.promote_types(param_dtype, torch.float32)
    p, g, s = (dtype.itemsize for dtype in (param_dtype, grad_dtype or param_dtype, state_dtype or wide))
    per_device = weights / devices
    # A step reads weights, gradients and two arrays of state, and writes all but the gradients.
    return MemoryPlan(p * per_device, g * per_device, 2 * s * per_device, (2 * p + g + 4 * s) * per_device)


def matrix_memory_plan(
    shapes: Iterable[Sequence[int]],
    block_size: int | tuple[int, int] = 128,
    max_size: int = 16384,
    *,
    batch_dims: int = 0,
    share_bases: bool = False,
    devices: int = 1,
    learn_every: int = 2,
    refresh: int = 10,
    param_dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
) -> MemoryPlan:
    """Plan the memory that AdaBayes-K needs for a network, unsharded (as under DDP) or sharded by FSDP2.

    In addition to the two averages, each side of a block has a factor and a basis: 2 n² values, in fp32 or float64.
    With ``share_bases``, a row of blocks has one pair for all left sides, and a column one for all right sides. Factors
    and bases count among the bytes that a step moves; intermediate results and refreshes of bases do not. A step may be
    limited by matrix products instead of memory, so ``seconds`` is a lower bound. Each figure is the largest of all
    devices. ``largest`` is the work on one block, or with ``share_bases`` on one matrix.

    Args:
        shapes: shapes of the parameters, ``[p.shape for p in model.parameters()]``.
        block_size: as given to the optimizer.
        max_size: as given to the optimizer.
        batch_dims: as given to the optimizer for all of these parameters.
        share_bases: as given to the optimizer, which supports it on one device only.
        devices: number of devices. By FSDP2's default, each has some rows of each parameter.
        learn_every: as given to the optimizer.
        refresh: as given to the optimizer.
        param_dtype: dtype of the weights.
        grad_dtype: dtype of the gradients that the optimizer gets. None: that of the weights.
        state_dtype: dtype of the averages, as given to the optimizer. None: fp32, or float64 for such weights.

    Examples:
        >>> layer = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]  # of GPT-2
        >>> for devices in (1, 8):
        ...     plan = matrix_memory_plan(layer, devices=devices)
        ...     print(f"{plan.state / 1e6:.0f} MB of state, {plan.sent / 1e6:.0f} MB sent")
        170 MB of state, 0 MB sent
        22 MB of state, 2 MB sent
        >>> f"{matrix_memory_plan(layer, share_bases=True).state / 1e6:.0f} MB of state with shared bases"
        '69 MB of state with shared bases'
    """
    block_size = check_block_size(block_size, check_integer)
    max_size, batch_dims = check_integer("max_size", max_size), check_integer("batch_dims", batch_dims, least=0)
    learn_every, refresh = check_integer("learn_every", learn_every), check_integer("refresh", refresh)
    devices = check_integer("devices", devices)
    if share_bases and devices > 1:
        raise ValueError(
            "share_bases=True does not work with sharded parameters: leave it out, or plan for one device."
        )
    tuples = [tuple(shape) for shape in shapes]
    weights, averages, squares, rotations, refreshes, sent = torch.zeros(6, devices, dtype=torch.float64)
    for shape in tuples:
        rows, rest = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        weights += _rows_per_device(rows, devices) * rest
    cuts = [(shape, cut(shape, block_size, max_size, batch_dims, share_bases)) for shape in tuples]
    matrices = [(shape, blocks) for shape, blocks in cuts if blocks is not None]
    for shape, blocks in cuts:
        if blocks is None:
            averages += _rows_per_device(shape[0], devices) * math.prod(shape[1:]) if shape else 1
    costs = [blocks.rotation_cost for _, blocks in matrices]
    counts = [blocks.num_blocks for _, blocks in matrices]
    firsts = first_owners(costs, counts, [0] * devices, num_rank_orders())
    most_bases = max((blocks.num_bases(side) for _, blocks in matrices for side in blocks.sides), default=1)
    residues = torch.arange(min(refresh, most_bases))
    due = torch.zeros(devices, len(residues), dtype=torch.float64)  # operations for bases that are due together
    learning = torch.zeros(2, devices, dtype=torch.float64)  # operations when the left or the right factors learn
    largest = torch.zeros(1, dtype=torch.float64)
    for (shape, blocks), first in zip(matrices, firsts):
        size = blocks.m * blocks.n
        ranges = [owned_range(blocks.num_blocks, devices, first, rank) for rank in range(devices)]
        owned = torch.tensor([end - begin for begin, end in ranges], dtype=torch.float64)
        averages += owned * size
        rotations += owned * 4 * blocks.rotation_cost  # products of a block with both bases, there and back
        piece = 4.0 * blocks.rotation_cost
        for side, n in zip(blocks.sides, blocks.sizes):
            bases = blocks.num_bases(side)
            bounds = torch.tensor([(0, bases)] if blocks.shared else ranges)
            owned_bases = (bounds[:, 1] - bounds[:, 0]).double()
            squares += owned_bases * n**2
            learning[side] += owned * 2 * size * n  # a product of a block with itself
            # A product with the factor, a QR decomposition (4/3 n³ for its triangle and as much for its basis), and the
            # rotation from the old basis to the new one, which is then applied to the average of each block.
            blocks_of_basis = blocks.num_blocks // bases
            operations = (2 + 8 / 3 + 2) * n**3 + blocks_of_basis * 2 * size * n
            refreshes += owned_bases * operations / refresh
            due += _count_due(bounds, residues, refresh).double() * operations
            piece += operations / blocks_of_basis
        piece += 2 * (blocks.rotation_cost if learn_every == 1 else size * max(blocks.sizes))
        largest.clamp_(min=piece * (blocks.num_blocks // blocks.matrices if blocks.shared else 1))
        sent += _sent(shape, blocks, first, devices)
    learning_at_once = learning.sum(0) if learn_every == 1 else learning.amax(0)
    peak = rotations + learning_at_once + due.amax(1)
    rotations += learning.sum(0) / learn_every
    wide = torch.promote_types(param_dtype, torch.float32)
    p, g, s = (dtype.itemsize for dtype in (param_dtype, grad_dtype or param_dtype, state_dtype or wide))
    state = 2 * s * averages + 2 * wide.itemsize * squares
    # A step reads and writes averages and factors, and reads each basis on the way there and back.
    moved = (2 * p + g) * weights + 4 * s * averages + 4 * wide.itemsize * squares
    columns = (p * weights, g * weights, state, moved, wide.itemsize * sent, rotations, refreshes, peak, largest)
    return MemoryPlan(*(column.max().item() for column in columns))


def _count_due(bounds: Tensor, residues: Tensor, refresh: int) -> Tensor:
    """Count the bases in each range whose index has each residue modulo ``refresh``: they are due at the same steps."""
    begin, end = ((bounds[:, i, None] - 1 - residues).div(refresh, rounding_mode="floor") for i in (0, 1))
    return end - begin


def _rows_per_device(rows: int, devices: int) -> Tensor:
    """Return the number of rows that each device has."""
    each = -(-rows // devices)
    return (rows - each * torch.arange(devices, dtype=torch.float64)).clamp(0, each)


@lru_cache(maxsize=1024)  # a network has many matrices of one shape
def _sent(shape: tuple[int, ...], blocks: Blocks, first: int, devices: int) -> Tensor:
    """Return the number of elements that each device sends to others.

    The device that holds an element of a gradient sends it to the owner of its block, which sends the step back.
    """
    columns, m, n = blocks.columns, blocks.m, blocks.n
    num_rows = blocks.matrices * blocks.height
    each = -(-shape[0] // devices) * (num_rows // shape[0])  # rows of a device; a stack has more of them than shape[0]
    per_owner = -(-blocks.num_blocks // devices)
    starts = (matrix * blocks.height + row for matrix in range(blocks.matrices) for row in range(0, blocks.height, m))
    cuts = torch.tensor(sorted({*starts, *range(0, num_rows, each), num_rows}))
    begin = cuts[:-1, None]
    matrix, row = begin // blocks.height, begin % blocks.height
    holder, block = begin // each, (matrix * blocks.rows + row // m) * columns + torch.arange(columns)
    owner = (first + block // per_owner) % devices
    elements = (cuts[1:, None] - begin) * n * (owner != holder)
    sent = torch.zeros(devices, dtype=torch.float64)
    for sender in (holder.expand_as(owner), owner):
        sent.index_add_(0, sender.flatten(), elements.flatten().double())
    return sent
