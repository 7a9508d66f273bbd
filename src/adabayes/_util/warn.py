"""Warnings that point at the line of the caller's own code."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn"]


def warn(message: str) -> None:
    """Warn at the innermost line of the call stack that is neither in this package nor in torch."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("adabayes", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
