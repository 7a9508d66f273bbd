"""Cases that a worker module runs in several processes, a file for each: ``OUT/WORLD/CASE``, or ``CASE.error``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tests.support.torchrun import torchrun

__all__ = ["error_of", "run_cases"]


def run_cases(worker: ModuleType, out: Path, worlds: Sequence[int]) -> Path:
    """Run all cases of a worker, once for each number of processes; return the folder."""
    for world in worlds:
        torchrun(world, worker.__name__, out)
    return out


def error_of(out: Path, world: int, case: str) -> str | None:
    """Return the error of a case, or None if it passed."""
    path = out / str(world) / case
    return None if path.exists() else path.with_suffix(".error").read_text(encoding="utf-8")
