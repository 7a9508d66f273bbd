"""The devices that have kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from adabayes.kernels.cpu import library
from adabayes.kernels.cpu.launch import CPULaunch
from adabayes.kernels.cpu.matrix import MatrixLaunch
from adabayes.kernels.launch import Launch
from adabayes.kernels.triton import launch as triton

__all__ = ["BACKENDS", "Backend", "backend_for"]


class Backend(NamedTuple):
    """The kernels of one type of device."""

    unavailable: Callable[[], str | None]  # returns why the kernels cannot be used, or None
    dtype_pairs: set[tuple[torch.dtype, torch.dtype]]  # supported dtypes of parameter and state
    launch: type[Launch]
    matrix_launch: type[MatrixLaunch] | None  # of AdaBayes-K; without it, only its element-wise part has a kernel
    by_default: bool  # whether fused=None uses the kernels
    asynchronous: bool  # whether kernels run asynchronously: the host must not wait, and graphs can capture them


BACKENDS = {
    "cpu": Backend(library.unavailable, library.PAIRS, CPULaunch, MatrixLaunch, by_default=True, asynchronous=False),
    "cuda": Backend(
        triton.unavailable, triton.PAIRS, triton.TritonLaunch, None, by_default=triton.BY_DEFAULT, asynchronous=True
    ),
}


def backend_for(device: torch.device, fused: bool | None) -> Backend | None:
    """Return the kernels that a group with this ``fused`` setting uses on a device, or None if it uses none.

    Raise if ``fused=True`` demands kernels that cannot be used.
    """
    backend = BACKENDS.get(device.type)
    if fused is False or backend is None or not (fused or backend.by_default):
        return None
    if reason := backend.unavailable():
        if fused:
            raise RuntimeError(f"fused=True: {reason}. Or leave `fused` out: then foreach is used.")
        return None
    return backend
