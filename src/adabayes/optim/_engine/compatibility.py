"""Completes state dicts that lack what this version saves.

They come from version 0.1, or were pruned or written by hand. An optimizer calls these functions from ``__setstate__``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["lacks_float_step", "lacks_lr_sgd", "missing_settings", "original_lr"]


# Settings of AdaBayes-K that version 0.2 does not have, with the values that have its effect
_IN_0_2 = {"matrix_scale": 1.0, "batch_dims": 0, "share_bases": False}


def missing_settings(group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a loaded group lacks.

    Version 0.1 saved AdaBayes-FP without ``cautious`` and ``centred``, and AdaBound without ``state_dtype``,
    ``stochastic_rounding`` and ``seed``. The defaults of these settings have the effect of version 0.1. Version 0.2
    saved AdaBayes-K without some settings whose defaults have another effect: such groups, which have a ``block_size``,
    get the values of version 0.2. Pruned groups may lack any setting, and get the defaults.
    """
    known = _IN_0_2 if "block_size" in group else {}
    return {name: known.get(name, default) for name, default in defaults.items() if name not in group}


def original_lr(group: dict[str, Any]) -> Any:
    """Return the learning rate without a schedule of a loaded group that has no ``base_lr``.

    All versions save ``base_lr``, but pruned groups may lack it. torch's schedulers keep the same rate as
    ``initial_lr``.
    """
    return group.get("initial_lr", group["lr"])


def lacks_lr_sgd(group: dict[str, Any]) -> bool:
    """Tell whether a loaded group has no ``lr_sgd``, as pruned groups may; all versions save it."""
    return group.get("lr_sgd") is None


def lacks_float_step(state: dict[str, Any]) -> bool:
    """Tell whether the step count of a loaded parameter is neither fp32 nor float64, as in state written by hand.

    It may be a Python number or a tensor of integers. All versions save a tensor of floats.
    """
    if not state or getattr(state["step"], "is_meta", False):  # a tensor on the meta device has no value to convert
        return False
    return not isinstance(state["step"], Tensor) or state["step"].dtype not in (torch.float32, torch.float64)
