"""Functions for arrays of NumPy, torch and JAX."""

from __future__ import annotations

from typing import Any

__all__ = ["namespace"]


def namespace(x: Any) -> Any:
    """Return the library that an array belongs to: ``jax.numpy``, ``numpy`` or ``torch``."""
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    import torch

    return torch
