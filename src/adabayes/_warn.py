"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn"]


def warn(message: str) -> None:
    """Warn as from the line, outside of this package and torch, that the call came from."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("adabayes", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
