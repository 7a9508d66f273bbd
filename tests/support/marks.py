"""What older versions of torch cannot do: marks for the tests that need it."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
import torch

from adabayes._util.distributed import num_rank_orders
from adabayes.kernels.triton.launch import LEAST_TRITON

__all__ = ["has_fsdp2", "has_muon", "has_triton", "keeps_order"]


def _triton() -> str | None:
    """Return why the kernel for GPUs cannot be checked here."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    version = importlib.metadata.version("triton")
    return f"the kernel needs Triton 3.6, and this is {version}" if _numbers(version) < LEAST_TRITON else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


has_fsdp2 = pytest.mark.skipif(_numbers(torch.__version__) < (2, 7), reason="FSDP2 of torch 2.6 is not for CPUs")
has_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
has_triton = pytest.mark.skipif(_triton() is not None, reason=str(_triton()))
keeps_order = pytest.mark.skipif(
    num_rank_orders() == 1, reason="process groups of this torch have their ranks in order, so owners differ"
)
