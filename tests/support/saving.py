"""State dicts on their way through a file."""

from __future__ import annotations

import io
from typing import Any

import torch

__all__ = ["through_torch_save"]


def through_torch_save(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict as it is after ``torch.save`` and ``torch.load``."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
