"""What the optimizers take where nothing is said, in torch and in JAX alike."""

from __future__ import annotations

import sys
import warnings
from typing import Any

__all__ = ["RATIO", "USUAL_LR", "usual_lr", "warn", "warn_if_papers", "warn_if_swapped"]

USUAL_LR = 1e-3
RATIO = 100.0  # lr_sgd / lr in the paper


def usual_lr(lr_sgd: Any) -> Any:
    """The base of a learning rate that is not known yet: that of the paper's ratio, or the usual one."""
    return USUAL_LR if lr_sgd is None else lr_sgd / RATIO


# Settings that are permitted, and rarely meant


def warn_if_swapped(lr: float, lr_sgd: float) -> None:
    if lr_sgd < lr:
        warn(
            f"lr_sgd={lr_sgd:g} is below lr={lr:g}: hardly any weight will move like Adam. "
            "Have the two been swapped? lr is Adam's learning rate, lr_sgd is SGD's, usually some 100 times larger; "
            "leave it out for 100 * lr."
        )


def warn_if_papers(lr: float, weight_decay: float) -> None:
    """Where weight decay looks as if it were in the paper's units."""
    if 0 < weight_decay < 1e-4 and lr > 0:
        warn(
            f"weight_decay={weight_decay:g} takes {lr * weight_decay:.1g} of each weight in a step, next to nothing: "
            "as in AdamW, a step multiplies weights by 1 - lr * weight_decay. If this is the paper's lambda, or "
            f"weight_drift of its author's code, give lambda / lr, here {weight_decay / lr:.3g}."
        )


def warn(message: str) -> None:
    """As from the line, outside of this package and torch, that the call came from."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("adabayes", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
