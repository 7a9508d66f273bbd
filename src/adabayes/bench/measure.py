"""Times the steps of several optimizers, interleaved in random order."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from adabayes import __version__, kernels
from adabayes._util.machine import processor
from adabayes.bench.report import Report, Row
from adabayes.bench.workloads import MATRIX, QUICK, WORKLOADS

__all__ = ["Settings", "Step", "run"]

ROOF = "roof"


class Step(NamedTuple):
    """One optimizer at work."""

    take: Callable[[], Any]
    state_bytes: Callable[[], int]  # known once a step has been taken


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement: workloads, optimizers, and how they are timed."""

    workloads: tuple[str, ...]
    optimizers: tuple[str, ...]  # the others are compared with the first
    threads: int
    repeats: int
    backend: str = "torch"
    matrix: bool = False  # optimizers with steps of different length, whose mean is reported

    @classmethod
    def of(
        cls,
        quick: bool = False,
        threads: int | None = None,
        workloads: Sequence[str] | None = None,
        optimizers: Sequence[str] | None = None,
        repeats: int | None = None,
        backend: str = "torch",
        matrix: bool = False,
    ) -> Settings:
        """Fill in defaults, and check the rest."""
        if backend == "jax" and threads is not None:
            raise ValueError("JAX uses the cores that the process may use: taskset -c 0 adabayes bench ...")
        module = _module(backend)
        known = list(module.matrix_optimizers() if matrix else module.optimizers())
        chosen = tuple(optimizers or [name for name in known if not (quick and "single" in name)])
        # In JAX, the caller always holds the state.
        possible = [name for name, workload in WORKLOADS.items() if backend == "torch" or not workload.saved]
        for kind, names, choices in (("workload", workloads or (), possible), ("optimizer", chosen, known)):
            for name in names:
                if name not in choices:
                    raise ValueError(f"unknown {kind} {name!r}; there are {', '.join(map(repr, choices))}")
        threads = torch.get_num_threads() if threads is None else threads
        repeats = (40 if matrix else 10 if quick else 30) if repeats is None else repeats
        if threads < 1 or repeats < 1:
            raise ValueError(f"threads {threads} and repeats {repeats} must be at least 1")
        return cls(
            tuple(workloads or (MATRIX if matrix else [name for name in possible if name in QUICK or not quick])),
            tuple(dict.fromkeys((module.BASELINE, *chosen))),
            threads,
            repeats,
            backend,
            matrix,
        )


def run(settings: Settings) -> Report:
    """Time every optimizer on every workload."""
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        rows = [
            row
            for workload in settings.workloads
            for names in _portions(workload, settings.optimizers)
            for row in _measure(workload, names, settings)
        ]
    finally:
        torch.set_num_threads(threads)
    first = {(row.workload, row.optimizer): row for row in reversed(rows)}  # the baseline is in every portion
    order = [(workload, name) for workload in settings.workloads for name in settings.optimizers]
    return Report(settings, _machine(settings.backend), tuple(first[key] for key in order))


def _module(backend: str) -> ModuleType:
    """Import the module of a backend: ``optimizers``, with a ``BASELINE``, their ``steps``, and a ``roof``."""
    return importlib.import_module(f"adabayes.bench.{backend}_steps")


def _portions(workload: str, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the optimizers that are in memory together, at most 5 at a time or 8 GB, always with the baseline."""
    baseline, *others = names
    size = max(1, min(5, int(8e9 / (12 * WORKLOADS[workload].weights))))
    for i in range(0, max(1, len(others)), size):
        yield (baseline, *others[i : i + size])


def _measure(workload: str, names: tuple[str, ...], settings: Settings) -> Iterator[Row]:
    module, repeats = _module(settings.backend), settings.repeats
    typical = statistics.fmean if settings.matrix else statistics.median
    weights = WORKLOADS[workload].weights
    steps: dict[str, Step] = module.steps(WORKLOADS[workload], names)
    takes = {name: step.take for name, step in steps.items()}
    if roof := module.roof(weights):
        takes[ROOF] = roof

    for take in takes.values():  # creates the state, and warms caches and threads
        for _ in range(3):
            take()
    seconds: dict[str, list[float]] = {name: [] for name in takes}
    order = list(takes)
    shuffler = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for _ in _progress(range(repeats), workload):
            shuffler.shuffle(order)
            for name in order:
                started = time.perf_counter()
                takes[name]()
                seconds[name].append(time.perf_counter() - started)
    finally:
        gc.enable()

    baseline = typical(seconds[names[0]])
    roof_speed = 28 * weights / typical(seconds[ROOF]) / 1e9 if roof else None
    for name in names:
        time_of_step = typical(seconds[name])
        low, _, high = statistics.quantiles(seconds[name], n=4) if repeats > 1 else (time_of_step,) * 3
        state = steps[name].state_bytes() / weights
        speed = (12 + 2 * state) * weights / time_of_step / 1e9
        yield Row(
            workload=workload,
            optimizer=name,
            weights=weights,
            milliseconds=1e3 * time_of_step,
            low=1e3 * low,
            high=1e3 * high,
            ratio=baseline / time_of_step,
            state_bytes=state,
            gigabytes_per_second=speed,
            of_roof=None if roof_speed is None else speed / roof_speed,
            seconds=tuple(seconds[name]),
        )


def _progress(iterable: range, workload: str) -> Iterator[int]:
    if not sys.stderr.isatty():
        yield from iterable
        return
    for i in iterable:
        print(f"\r{workload:<12} {i + 1}/{len(iterable)}", end="", file=sys.stderr, flush=True)
        yield i
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)


def _machine(backend: str) -> dict[str, str]:
    others = {backend: importlib.metadata.version(backend)} if backend != "torch" else {}
    return {
        "processor": processor(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "adabayes": __version__,
        "kernels": kernels.unavailable() or kernels.instruction_set(),
        **others,
    }
