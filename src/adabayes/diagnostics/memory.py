"""Plans the memory of training, and what a step of an optimizer moves, sends and computes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adabayes._table import html
from adabayes.eigenbasis import Blocks, cut
from adabayes.optim._checks import check_whole
from adabayes.optim._sharded import first_owners, owned, work_of

__all__ = ["MemoryPlan", "matrix_memory_plan", "memory_plan"]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device, and what a step of the optimizer does there.

    Attributes:
        parameters: bytes of the weights.
        gradients: bytes of the gradients.
        state: bytes of the optimizer's state.
        moved: bytes that a step reads and writes.
        sent: bytes that a step sends to other devices, beside what FSDP2 sends.
        rotations: operations of a step, for rotations and factors.
        refreshes: operations of refreshes, as an average over steps, but for those of the beginning.
    """

    parameters: float
    gradients: float
    state: float
    moved: float
    sent: float = 0.0
    rotations: float = 0.0
    refreshes: float = 0.0

    @property
    def total(self) -> float:
        """Bytes that stay on a device; activations and gathered layers are not included."""
        return self.parameters + self.gradients + self.state

    def seconds(self, bandwidth: float) -> float:
        """Return the time of a step on large tensors, which memory limits; ``bandwidth`` is in bytes per second."""
        return self.moved / bandwidth

    def _repr_html_(self) -> str:
        parts = ("parameters", "gradients", "state", "total", "moved")
        rows = [("", "GB per device"), *((part, f"{getattr(self, part) / 1e9:.3g}") for part in parts)]
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
        devices: number of devices that share them.
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
    here = weights / devices
    # A step reads weights, gradients and two arrays of state, and writes all but the gradients.
    return MemoryPlan(p * here, g * here, 2 * s * here, (2 * p + g + 4 * s) * here)


def matrix_memory_plan(
    shapes: Iterable[Sequence[int]],
    block_size: int = 128,
    max_size: int = 16384,
    *,
    devices: int = 1,
    learn_every: int = 2,
    refresh: int = 10,
    param_dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
) -> MemoryPlan:
    """Plan what AdaBayes-K needs for a network, whole (as under DDP) or sharded over devices by FSDP2.

    Beside the two averages, each side of a block has a factor and a basis: 2 n² numbers, in fp32 or more. They are
    counted among the bytes that a step moves; intermediate results and the refresh of bases are not. A step
    may be limited by matrix products instead: ``seconds`` is a lower bound. Each figure is that of the device
    that has most of it.

    Args:
        shapes: shapes of the parameters, ``[p.shape for p in model.parameters()]``.
        block_size: as given to the optimizer.
        max_size: as given to the optimizer.
        devices: how many share all of it, by FSDP2's default: each has some rows of each parameter.
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
    """
    block_size, max_size = check_whole("block_size", block_size), check_whole("max_size", max_size)
    learn_every, refresh = check_whole("learn_every", learn_every), check_whole("refresh", refresh)
    devices = check_whole("devices", devices)
    shapes = [tuple(shape) for shape in shapes]
    weights, averages, squares, rotations, refreshes, sent = torch.zeros(6, devices, dtype=torch.float64)
    for shape in shapes:
        rows, rest = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        weights += _dealt(rows, devices) * rest
    cuts = [(shape, cut(shape, block_size, max_size)) for shape in shapes]
    matrices = [(shape, blocks) for shape, blocks in cuts if blocks is not None]
    for shape, blocks in cuts:
        if blocks is None:
            averages += _dealt(shape[0], devices) * math.prod(shape[1:]) if shape else 1
    numbers = [blocks.number for _, blocks in matrices]
    firsts = first_owners([work_of(blocks) for _, blocks in matrices], numbers, [0] * devices)
    for (shape, blocks), first in zip(matrices, firsts):
        runs = [owned(blocks.number, devices, first, place) for place in range(devices)]
        here = torch.tensor([end - begin for begin, end in runs], dtype=torch.float64)
        sizes = [blocks.size(side) for side in blocks.sides]
        size = blocks.m * blocks.n
        averages += here * size
        squares += here * sum(side**2 for side in sizes)
        # A product of a block with a basis, there and back, and now and then one with itself for the factor.
        rotations += here * (4 + 2 / learn_every) * work_of(blocks)
        # A product with the factor and a QR decomposition, 4/3 n³ for its triangle and as much for its basis; then the
        # average goes from the old bases to the new ones.
        refreshes += here * (sum((2 + 8 / 3) * side**3 for side in sizes) + 4 * work_of(blocks)) / refresh
        sent += _sent(shape, blocks, first, devices)
    wide = torch.promote_types(param_dtype, torch.float32)
    p, g, s = (dtype.itemsize for dtype in (param_dtype, grad_dtype or param_dtype, state_dtype or wide))
    state = 2 * s * averages + 2 * wide.itemsize * squares
    # A step reads and writes averages and factors, and reads each basis on the way there and back.
    moved = (2 * p + g) * weights + 4 * s * averages + 4 * wide.itemsize * squares
    columns = (p * weights, g * weights, state, moved, wide.itemsize * sent, rotations, refreshes)
    return MemoryPlan(*(column.max().item() for column in columns))


def _dealt(rows: int, devices: int) -> Tensor:
    """Return how many rows each device has."""
    each = -(-rows // devices)
    return (rows - each * torch.arange(devices, dtype=torch.float64)).clamp(0, each)


def _sent(shape: Sequence[int], blocks: Blocks, first: int, devices: int) -> Tensor:
    """Return how many numbers of a gradient and of its step each device sends: those whose block another one owns."""
    (_, columns, m, n, _), rows = blocks, shape[0]
    each, run = -(-rows // devices), -(-blocks.number // devices)
    cuts = torch.tensor(sorted({*range(0, rows, m), *range(0, rows, each), rows}))
    begin = cuts[:-1, None]
    holder, block = begin // each, (begin // m) * columns + torch.arange(columns)
    owner = (first + block // run) % devices
    numbers = (cuts[1:, None] - begin) * n * (owner != holder)
    sent = torch.zeros(devices, dtype=torch.float64)
    for place in (holder.expand_as(owner), owner):
        sent.index_add_(0, place.flatten(), numbers.flatten().double())
    return sent
