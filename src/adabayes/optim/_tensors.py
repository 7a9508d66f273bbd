"""Small functions on tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Scalar", "as_float", "check_memory", "has_gaps", "local", "may_be_freed", "real_view", "whole"]

Scalar = float | Tensor  # a tensor while a graph is captured, compiled or differentiated


def as_float(value: Any) -> float:
    return value.item() if isinstance(value, Tensor) else float(value)


def local(t: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: all of it, unless it is sharded."""
    return t.to_local() if hasattr(t, "to_local") else t


def whole(t: Tensor) -> Tensor:
    """Return all of a tensor, gathered from all processes if it is sharded."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def real_view(t: Tensor) -> Tensor:
    """View complex numbers as pairs of reals: each component is a separate weight."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def has_gaps(t: Tensor) -> bool:
    """Tell whether a tensor leaves gaps in the memory between its first and its last element."""
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
    needed, there = (last + 1) * t.itemsize, t.untyped_storage().nbytes()
    if there < needed or not t.data_ptr():
        raise RuntimeError(
            f"a {name} of shape {tuple(t.shape)} needs {needed} bytes of memory but its storage has {there}: it was "
            "freed or resized. Give the memory back before the step, or set the gradient to None."
        )


def may_be_freed(t: Tensor) -> bool:
    """Tell quickly whether a tensor may have less memory than torch's operations rely on."""
    return (
        t.is_cpu
        and t.untyped_storage().nbytes() < t.nbytes
        and type(t) in (Tensor, torch.nn.Parameter)
        and not (t._is_zerotensor() or torch._is_functional_tensor(t))
    )
