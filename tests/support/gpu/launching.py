"""Launches the PTX of the GPU kernels on the emulator, for optimizers whose tensors are on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from adabayes.kernels.check import compiled
from adabayes.kernels.triton import launch as device
from tests.support.gpu.emulator import Program, Region


@cache
def program_of(target: str, variant: compiled.Variant) -> Program:
    return Program(compiled.compile_for(target, variant).code)


@cache
def counting_of(target: str, step: torch.dtype, found_inf: bool) -> Program:
    return Program(compiled.compile_counting(target, step, found_inf))


class Emulated:
    """Replaces the Triton kernels: a launch executes their PTX, and may access only the memory that it needs.

    Args:
        target: the GPU for which the kernels are compiled.
        change: changes a program before it is launched.
    """

    def __init__(self, target: str, change: Callable[[Program], Program] = lambda program: program) -> None:
        from adabayes.kernels.triton.kernel import RULES  # only where there is Triton

        self.target, self.change = target, change
        self.RULES = RULES
        self.launches: list[compiled.Variant] = []
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
        self.launches.append(variant)
        tables = [t for t in (table, grads, pieces, rows, found_inf) if t is not None]
        memory = []
        for (p, m, s, numel, _, _), g in zip(table.view(-1, device.WIDTH).tolist(), grads.tolist()):
            if numel:
                memory.append(Region(p, numel * variant.param.itemsize, readable=not variant.returns_step))
                memory.append(Region(g, numel * variant.param.itemsize))
                memory += [Region(address, numel * variant.state.itemsize) for address in (m, s)]
        program = self.change(program_of(self.target, variant))
        program.launch(blocks, [*map(Tensor.data_ptr, tables), columns, seed], [*memory, *map(region_of, tables)])

    def _count(
        self, blocks: int, table: Tensor, counts: Tensor, found_inf: Tensor | None, tensors: int, **fixed: Any
    ) -> None:
        step = next(d for d in (torch.float32, torch.float64) if device.counting_constants(d).items() <= fixed.items())
        tables = [t for t in (table, counts, found_inf) if t is not None]
        memory = [Region(row[5], step.itemsize) for row in table.view(-1, device.WIDTH).tolist()]
        program = counting_of(self.target, step, found_inf is not None)
        program.launch(blocks, [*map(Tensor.data_ptr, tables), tensors], [*memory, *map(region_of, tables)])


class _Launcher:
    """Supports Triton's syntax of a launch: ``kernel[grid](*arguments, **constants)``."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments, **fixed: self._launch(*grid, *arguments, **fixed)


def region_of(t: Tensor) -> Region:
    return Region(t.data_ptr(), t.nbytes)
