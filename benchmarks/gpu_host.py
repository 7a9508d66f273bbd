"""Times what the host does in a fused step on a GPU, for 1000 tensors, without one: ``python benchmarks/gpu_host.py``.

The two launches are left out, and the small operations on step counts run on the CPU in their place. So the figures are
not times of a step on a GPU: they tell how long Python is busy, and what it costs when gradients have moved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adabayes import AdaBayes, AdaBayesFP
from adabayes.bench import gpu
from adabayes.kernels.triton import launch as device


class NoLaunch:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **fixed: None


class NoKernels:
    """The module of kernels, without them."""

    fused_step = count_steps = NoLaunch()


def main(tensors: int = 1000, repeats: int = 200) -> None:
    torch.set_num_threads(1)
    device._kernels = NoKernels  # type: ignore[assignment]
    print(f"{tensors} tensors, microseconds of the host in a step, median of {repeats}")
    for cls in (AdaBayes, AdaBayesFP):
        params = [torch.zeros(10) for _ in range(tensors)]
        grads = [[torch.ones(10) for _ in params] for _ in range(2)]
        optimizer = cls(params, fused=True, weight_decay=0.01)
        with gpu.on_cpu_tensors():
            stay, move = medians(optimizer, params, grads, repeats)
        print(f"{cls.__name__:<11} nothing moved {stay:6.0f}   all gradients moved {move:6.0f}")


def medians(optimizer: Any, params: list[Tensor], grads: list[list[Tensor]], repeats: int) -> tuple[float, float]:
    """Time steps whose gradients are where they were, and steps whose gradients have moved, in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(2 * repeats + 4):
        for p, g in zip(params, grads[i // 2 % 2]):
            p.grad = g
        started = time.perf_counter()
        optimizer.step()
        times[i % 2 == 0].append(1e6 * (time.perf_counter() - started))
    return statistics.median(times[0][2:]), statistics.median(times[1][2:])


if __name__ == "__main__":
    main()
