"""Times optimizer steps, ours and torch's, on the parameter lists of real networks.

Up to five optimizers live in one process, with torch's fused AdamW always among them, and take their steps in random
order, so that what the machine does meanwhile hits all alike: compare ratios, not milliseconds. What is timed is the
whole of optimizer.step(), with hooks, groups and checks. GB/s counts each array that a step must read or write once;
"of roof" is that over the speed of a plain loop that reads four fp32 arrays and writes three of them, measured among
the steps. Packages adabound, ivon and schedulefree take part where they are installed.

With --backend jax, it is jitted steps of adabayes.optax against optax.adamw.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import math
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adabayes import AdaBayes, AdaBayesFP, __version__, kernels
from adabayes._machine import processor

Shapes = list[tuple[int, ...]]
Maker = Callable[[list[Tensor]], torch.optim.Optimizer]
Step = tuple[Callable[[], Any], Callable[[], int]]  # takes a step; tells the bytes of the state, once there is one

BASELINE = "AdamW fused"
ROOF = "roof"


# Workloads: the parameters of real networks


def _resnet34() -> Shapes:
    shapes: Shapes = [(64, 3, 3, 3), (64,), (64,)]
    width = 64
    for blocks, channels in zip((3, 4, 6, 3), (64, 128, 256, 512)):
        for block in range(blocks):
            shapes += [
                (channels, width, 3, 3),
                (channels,),
                (channels,),
                (channels, channels, 3, 3),
                (channels,),
                (channels,),
            ]
            if block == 0 and width != channels:
                shapes += [(channels, width, 1, 1), (channels,), (channels,)]
            width = channels
    return [*shapes, (10, 512), (10,)]


def _densenet121() -> Shapes:
    shapes: Shapes = [(64, 3, 3, 3)]
    width = 64
    for blocks in (6, 12, 24, 16):
        for _ in range(blocks):
            shapes += [(width,), (width,), (128, width, 1, 1), (128,), (128,), (32, 128, 3, 3)]
            width += 32
        if blocks != 16:
            shapes += [(width,), (width,), (width // 2, width, 1, 1)]
            width //= 2
    return [*shapes, (width,), (width,), (10, width), (10,)]


def _gpt2() -> Shapes:
    wide = 768
    shapes: Shapes = [(50257, wide), (1024, wide)]
    for _ in range(12):
        shapes += [(wide,), (wide,), (wide, 3 * wide), (3 * wide,), (wide, wide), (wide,)]
        shapes += [(wide,), (wide,), (wide, 4 * wide), (4 * wide,), (4 * wide, wide), (wide,)]
    return [*shapes, (wide,), (wide,)]


WORKLOADS: dict[str, Callable[[], Shapes]] = {
    "tiny": lambda: [(10,)] * 1000,
    "densenet121": _densenet121,
    "resnet34": _resnet34,
    "one50m": lambda: [(50_000_000,)],
    "gpt2": _gpt2,
}
QUICK = ("tiny", "densenet121", "resnet34")


# Optimizers


def optimizers() -> dict[str, Maker]:
    """By the name that the table shows; those of other packages where they are installed."""
    low = torch.bfloat16
    makers: dict[str, Maker] = {
        BASELINE: lambda p: torch.optim.AdamW(p, fused=True),
        "AdaBayes fused": lambda p: AdaBayes(p, weight_decay=0.01, fused=True),
        "AdaBayes-FP fused": lambda p: AdaBayesFP(p, weight_decay=0.01, fused=True),
        "AdaBayes fused bf16": lambda p: AdaBayes(p, weight_decay=0.01, fused=True, state_dtype=low),
        "AdaBayes-FP fused bf16": lambda p: AdaBayesFP(p, weight_decay=0.01, fused=True, state_dtype=low),
        "AdaBayes foreach": lambda p: AdaBayes(p, weight_decay=0.01, foreach=True),
        "AdaBayes-FP foreach": lambda p: AdaBayesFP(p, weight_decay=0.01, foreach=True),
        "AdaBayes single": lambda p: AdaBayes(p, weight_decay=0.01, foreach=False),
        "AdaBayes-FP single": lambda p: AdaBayesFP(p, weight_decay=0.01, foreach=False),
        "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
        "Adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
        "SGD fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
        "SGD foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    }
    if kernels.unavailable():
        makers = {name: maker for name, maker in makers.items() if not ("AdaBayes" in name and "fused" in name)}
    for package, name, make in (
        ("adabound", "adabound.AdaBound", _adabound),
        ("ivon", "ivon.IVON", _ivon),
        ("schedulefree", "schedulefree.AdamW", _schedule_free),
    ):
        if importlib.util.find_spec(package):
            makers[name] = make
    return makers


def _adabound(params: list[Tensor]) -> torch.optim.Optimizer:
    # A package of 2019, whose calls torch deprecates at each step.
    warnings.filterwarnings("ignore", "This overload of add", UserWarning)
    optimizer: torch.optim.Optimizer = importlib.import_module("adabound").AdaBound(params)
    return optimizer


def _ivon(params: list[Tensor]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = importlib.import_module("ivon").IVON(params, lr=0.1, ess=50_000)
    return optimizer


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """What a step of training calls: of IVON, also to draw the weights at which gradients are taken."""
    if not hasattr(optimizer, "sampled_params"):
        return optimizer.step

    def step() -> None:
        with optimizer.sampled_params(train=True):
            pass
        optimizer.step()

    return step


def _schedule_free(params: list[Tensor]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = importlib.import_module("schedulefree").AdamWScheduleFree(params)
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer


# Measuring


@dataclass(frozen=True)
class Settings:
    """What to run."""

    workloads: tuple[str, ...]
    optimizers: tuple[str, ...]  # the first is what the others are compared with
    threads: int
    repeats: int
    backend: str = "torch"

    @classmethod
    def of(
        cls,
        quick: bool = False,
        threads: int | None = None,
        workloads: Sequence[str] | None = None,
        optimizers_: Sequence[str] | None = None,
        repeats: int | None = None,
        backend: str = "torch",
    ) -> Settings:
        if backend == "jax":
            from adabayes import _bench_jax

            baseline, known = _bench_jax.BASELINE, dict.fromkeys(_bench_jax.OPTIMIZERS)
            if threads is not None:
                raise ValueError("JAX takes the cores that the process may use: taskset -c 0 adabayes bench ...")
        else:
            baseline, known = BASELINE, dict.fromkeys(optimizers())
        chosen = tuple(optimizers_ or [name for name in known if not (quick and "single" in name)])
        for kind, names, choices in (("workload", workloads or (), WORKLOADS), ("optimizer", chosen, known)):
            for name in names:
                if name not in choices:
                    raise ValueError(f"unknown {kind} {name!r}; there are {', '.join(map(repr, choices))}")
        threads = torch.get_num_threads() if threads is None else threads
        repeats = (10 if quick else 30) if repeats is None else repeats
        if threads < 1 or repeats < 1:
            raise ValueError(f"threads {threads} and repeats {repeats} must be at least 1")
        return cls(
            tuple(workloads or (QUICK if quick else WORKLOADS)),
            tuple(dict.fromkeys((baseline, *chosen))),
            threads,
            repeats,
            backend,
        )


@dataclass(frozen=True)
class Row:
    """One optimizer on one workload."""

    workload: str
    optimizer: str
    weights: int
    milliseconds: float  # median
    low: float  # quartiles
    high: float
    ratio: float  # to AdamW, fused or of optax; above 1 is faster
    state_bytes: float  # a weight
    gigabytes_per_second: float
    of_roof: float | None
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    settings: Settings
    machine: dict[str, str]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def table(self) -> str:
        header = ("optimizer", "ms", "quartiles", "x AdamW", "B/weight", "GB/s", "of roof")
        library = f"{self.settings.backend} {self.machine[self.settings.backend]}"
        lines = [f"{self.machine['processor']}, {library}, {self.settings.threads} threads"]
        for workload in self.settings.workloads:
            rows = [row for row in self.rows if row.workload == workload]
            cells = [header] + [
                (
                    row.optimizer,
                    f"{row.milliseconds:.2f}",
                    f"{row.low:.2f}-{row.high:.2f}",
                    f"{row.ratio:.2f}",
                    f"{row.state_bytes:.0f}",
                    f"{row.gigabytes_per_second:.1f}",
                    "" if row.of_roof is None else f"{row.of_roof:.0%}",
                )
                for row in rows
            ]
            widths = [max(map(len, column)) for column in zip(*cells)]
            lines += ["", f"{workload}: {rows[0].weights:,} weights"]
            lines += [
                "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths)))
                for row in cells
            ]
        return "\n".join(lines)

    def plot(self, path: Path) -> None:
        """Ratios to AdamW, a panel for each workload."""
        try:
            import matplotlib as mpl
        except ImportError as error:
            raise ImportError("plotting needs matplotlib: pip install '.[plot]' in the folder of AdaBayes") from error
        mpl.use("agg")
        import matplotlib.pyplot as plt

        baseline, *names = self.settings.optimizers
        count = len(self.settings.workloads)
        height = 1.2 + 0.28 * len(names)
        figure, axes = plt.subplots(
            1, count, figsize=(2.6 + 2.2 * count, height), sharey=True, squeeze=False, layout="constrained"
        )
        for ax, workload in zip(axes[0], self.settings.workloads):
            ratios = {row.optimizer: row.ratio for row in self.rows if row.workload == workload}
            colours = ["tab:green" if "AdaBayes" in name else "0.6" for name in names]
            bars = ax.barh(names, [ratios[name] for name in names], color=colours)
            ax.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
            ax.axvline(1, color="tab:blue", linewidth=1)
            ax.set(title=workload, xlabel=f"x as fast as {baseline}", xlim=(0, 1.25 * max([1.0, *ratios.values()])))
        axes[0][0].invert_yaxis()
        figure.savefig(path, dpi=130)


def run(settings: Settings) -> Report:
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        rows = [
            row
            for workload in settings.workloads
            for names in _portions(workload, settings.optimizers)
            for row in _measure(workload, names, settings.repeats, settings.backend)
        ]
    finally:
        torch.set_num_threads(threads)
    first = {(row.workload, row.optimizer): row for row in reversed(rows)}  # the baseline is in every portion
    order = [(workload, name) for workload in settings.workloads for name in settings.optimizers]
    return Report(settings, _machine(settings.backend), tuple(first[key] for key in order))


def _portions(workload: str, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The optimizers that are in memory together, at most 5 at a time or 8 GB; the baseline is always among them."""
    weights = _weights(workload)
    baseline, *others = names
    size = max(1, min(5, int(8e9 / (12 * weights))))
    for i in range(0, max(1, len(others)), size):
        yield (baseline, *others[i : i + size])


def _weights(workload: str) -> int:
    return sum(math.prod(shape) for shape in WORKLOADS[workload]())


def _torch_steps(shapes: Shapes, names: Sequence[str]) -> dict[str, Step]:
    """Of each optimizer, what takes a step, and what tells the bytes of its state once it has taken one."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    grads = [0.01 * torch.randn(shape, generator=generator) for shape in shapes]
    for g in grads:
        g[g == 0] = 1e-3  # no dead weights, of which random numbers would make one in ten million
    makers = optimizers()
    made: dict[str, Step] = {}
    for name in names:
        params = [p.clone().requires_grad_() for p in start]
        for p, g in zip(params, grads):
            p.grad = g
        optimizer = makers[name](params)
        made[name] = _step_of(optimizer), partial(state_bytes, optimizer)
    return made


def _measure(workload: str, names: tuple[str, ...], repeats: int, backend: str) -> Iterator[Row]:
    weights = _weights(workload)
    if backend == "jax":
        from adabayes import _bench_jax

        made = _bench_jax.steps(WORKLOADS[workload](), names)
    else:
        made = _torch_steps(WORKLOADS[workload](), names)
    steps = {name: step for name, (step, _) in made.items()}
    if backend == "torch" and not kernels.unavailable():
        steps[ROOF] = _roof(weights)

    for step in steps.values():  # state is made, caches and threads are warm
        for _ in range(3):
            step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    shuffler = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for _ in _progress(range(repeats), workload):
            shuffler.shuffle(order)
            for name in order:
                started = time.perf_counter()
                steps[name]()
                taken[name].append(time.perf_counter() - started)
    finally:
        gc.enable()

    baseline = statistics.median(taken[names[0]])
    roof = 28 * weights / statistics.median(taken[ROOF]) / 1e9 if ROOF in taken else None
    for name in names:
        median = statistics.median(taken[name])
        low, _, high = statistics.quantiles(taken[name], n=4) if len(taken[name]) > 1 else (median,) * 3
        state = made[name][1]() / weights
        speed = (12 + 2 * state) * weights / median / 1e9
        yield Row(
            workload=workload,
            optimizer=name,
            weights=weights,
            milliseconds=1e3 * median,
            low=1e3 * low,
            high=1e3 * high,
            ratio=baseline / median,
            state_bytes=state,
            gigabytes_per_second=speed,
            of_roof=None if roof is None else speed / roof,
            seconds=tuple(taken[name]),
        )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """All tensors of the state, wherever the optimizer keeps them, but for step counts."""
    entries = [
        entry
        for state in optimizer.state.values()
        for entry in (state.values() if isinstance(state, dict) else [state])
    ]
    entries += [value for group in optimizer.param_groups for value in group.values()]
    return sum(entry.nbytes for entry in entries if isinstance(entry, Tensor) and entry.dim() > 0)


def _roof(weights: int) -> Callable[[], None]:
    """A loop that reads four arrays and writes three of them in place, by the threads of the kernels."""
    arrays = [torch.ones(weights) for _ in range(4)]
    return lambda: kernels.stream(*arrays)


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
