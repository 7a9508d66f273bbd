"""What the optimizers take where nothing is said, in torch and in JAX alike."""

from __future__ import annotations

from typing import Any

__all__ = ["RATIO", "USUAL_LR", "usual_lr"]

USUAL_LR = 1e-3
RATIO = 100.0  # lr_sgd / lr in the paper


def usual_lr(lr_sgd: Any) -> Any:
    """The base of a learning rate that is not known yet: that of the paper's ratio, or the usual one."""
    return USUAL_LR if lr_sgd is None else lr_sgd / RATIO
