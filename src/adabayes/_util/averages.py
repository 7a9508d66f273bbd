"""Exponential averages that start at zero."""

from __future__ import annotations

from typing import Any

__all__ = ["bias_correction"]


def bias_correction(beta: float, t: Any) -> Any:
    r"""Return :math:`1 - \beta^t`, the sum of the weights in an average after ``t`` steps; divide by it to debias."""
    return 1 - beta**t
