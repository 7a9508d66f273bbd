"""Plans the memory of training, and the bytes that a step moves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from adabayes._table import html
from adabayes.eigenbasis import cut

__all__ = ["MemoryPlan", "matrix_memory_plan", "memory_plan"]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device, and bytes that a step of the optimizer moves there."""

    parameters: float
    gradients: float
    state: float
    moved: float

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
    param_dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
) -> MemoryPlan:
    """Plan the memory that AdaBayes-K needs for a network, on each device that has all of it.

    Beside the two averages, each side of a block has a factor and a basis: 2 n² numbers, in fp32 or more.
    They are counted among the bytes that a step moves; intermediate results and the refresh of bases are not. A step
    may be limited by matrix products instead, so ``seconds`` is a lower bound.

    Args:
        shapes: shapes of the parameters, ``[p.shape for p in model.parameters()]``.
        block_size: as given to the optimizer.
        max_size: as given to the optimizer.
        param_dtype: dtype of the weights.
        grad_dtype: dtype of the gradients that the optimizer gets. None: that of the weights.
        state_dtype: dtype of the averages, as given to the optimizer. None: fp32, or float64 for such weights.

    Examples:
        >>> layer = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]  # of GPT-2
        >>> for block_size in (128, 768):
        ...     print(f"{matrix_memory_plan(layer, block_size).state / 1e6:.0f} MB")
        170 MB
        170 MB
    """
    shapes = [tuple(shape) for shape in shapes]
    weights = sum(map(math.prod, shapes))
    cuts = [(math.prod(shape), blocks) for shape in shapes if (blocks := cut(shape, block_size, max_size))]
    squares = sum(blocks.number * blocks.size(side) ** 2 for _, blocks in cuts for side in blocks.sides)
    filling = sum(math.prod(blocks.shape) - size for size, blocks in cuts)  # of the averages, up to whole blocks
    plan, filled = (
        memory_plan(count, param_dtype=param_dtype, grad_dtype=grad_dtype, state_dtype=state_dtype)
        for count in (weights, weights + filling)
    )
    wide = torch.promote_types(param_dtype, torch.float32).itemsize
    # A step reads and writes averages and factors, and reads each basis on the way there and back.
    moved = plan.moved + 2 * (filled.state - plan.state) + 4 * wide * squares
    return replace(plan, state=filled.state + 2 * wide * squares, moved=moved)
