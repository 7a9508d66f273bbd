"""Small functions on torch tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Scalar",
    "as_float",
    "check_memory",
    "full",
    "has_gaps",
    "local",
    "may_be_freed",
    "real_shape",
    "real_view",
]

Scalar = float | Tensor  # a tensor while a graph is captured, compiled or differentiated


def as_float(value: Any) -> float:
    return value.item() if isinstance(value, Tensor) else float(value)


def local(t: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or the tensor itself if it is not sharded."""
    return t.to_local() if hasattr(t, "to_local") else t


def full(t: Tensor) -> Tensor:
    """Return the full tensor, gathered from all processes if it is sharded."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def real_view(t: Tensor) -> Tensor:
    """View complex numbers as pairs of reals: each component is a separate weight."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def real_shape(t: Tensor) -> tuple[int, ...]:
    """Return the shape of :func:`real_view`."""
    return (*t.shape, 2) if t.is_complex() else tuple(t.shape)


def has_gaps(t: Tensor) -> bool:
    """Tell whether there are gaps in the memory between a tensor's first and last element."""
    if t.is_contiguous():
        return False
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape) if size != 1):
        if stride != expected:
            return True
        expected *= size
    return False


def check_memory(name: str, t: Tensor) -> None:
    """Raise if a tensor has less memory than its elements need."""
    if not t.numel():
        return
    last = t.storage_offset() + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    needed, available = (last + 1) * t.itemsize, t.untyped_storage().nbytes()
    if available < needed or not t.data_ptr():
        raise RuntimeError(
            f"the {name} of shape {tuple(t.shape)} needs {needed} bytes of memory but its storage has {available}: it "
            "was freed or resized. Give the memory back before the step, or set the gradient to None."
        )


def may_be_freed(t: Tensor) -> bool:
    """Tell quickly whether a tensor may have less memory than torch's operations assume."""
    return (
        t.is_cpu
        and t.untyped_storage().nbytes() < t.nbytes
        and type(t) in (Tensor, torch.nn.Parameter)
        and not (t._is_zerotensor() or torch._is_functional_tensor(t))
    )
