"""Describes the machine of a measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """Return the name of the processor and the number of its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()} ({os.cpu_count()} cores)"
