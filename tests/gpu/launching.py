"""Ways to run the kernel for GPUs without one, on tensors of the CPU and through the optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from adabayes.kernels import compiled, device
from tests.gpu.emulator import Program, Region


@cache
def program_of(target: str, variant: compiled.Variant) -> Program:
    return Program(compiled.compile_for(target, variant).code)


@cache
def counting_of(target: str, step: torch.dtype, found_inf: bool) -> Program:
    return Program(compiled.compile_counting(target, step, found_inf))


class Emulated:
    """Takes the place of the Triton kernels: launches run their PTX, with the memory that a step may touch."""

    def __init__(self, target: str, change: Callable[[Program], Program] = lambda program: program) -> None:
        self.target, self.change = target, change
        self.launches = 0
        self.fused_step = _Launcher(self._step)
        self.count_steps = _Launcher(self._count)

    def _step(
        self,
        blocks: int,
        table: Tensor,
        grads: Tensor,
        pieces: Tensor,
        rows: Tensor,
        found_inf: Tensor | None,
        columns: int,
        seed: int,
        **fixed: Any,
    ) -> None:
        variant = next(
            v
            for v in compiled.variants()
            if device.constants(*v[:-1]).items() <= fixed.items() and v.found_inf == (found_inf is not None)
        )
        self.launches += 1
        tables = [t for t in (table, grads, pieces, rows, found_inf) if t is not None]
        tensors = zip(table.view(-1, device.WIDTH).tolist(), grads.tolist())
        sizes = variant.param.itemsize, variant.state.itemsize
        memory = [
            Region(address, numel * size)
            for (p, m, s, numel, _, _), g in tensors
            for address, size in zip((p, g, m, s), (sizes[0], sizes[0], sizes[1], sizes[1]))
            if numel
        ]
        program = self.change(program_of(self.target, variant))
        program.run(blocks, [*map(Tensor.data_ptr, tables), columns, seed], [*memory, *map(region_of, tables)])

    def _count(
        self, blocks: int, table: Tensor, counts: Tensor, found_inf: Tensor | None, tensors: int, **fixed: Any
    ) -> None:
        step = next(d for d in (torch.float32, torch.float64) if device.counting(d).items() <= fixed.items())
        tables = [t for t in (table, counts, found_inf) if t is not None]
        memory = [Region(row[5], step.itemsize) for row in table.view(-1, device.WIDTH).tolist()]
        program = counting_of(self.target, step, found_inf is not None)
        program.run(blocks, [*map(Tensor.data_ptr, tables), tensors], [*memory, *map(region_of, tables)])


class _Launcher:
    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments, **fixed: self._run(*grid, *arguments, **fixed)


def region_of(t: Tensor) -> Region:
    return Region(t.data_ptr(), t.nbytes)
