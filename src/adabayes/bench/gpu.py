"""Checks of the fused step on a GPU, for ``adabayes doctor --gpu``.

With a GPU, they compare the bits with those of the CPU's kernel and the time of a step with torch's, and test a CUDA
graph and a GradScaler. Without a GPU, they check the bits under Triton's interpreter, in a separate process, and the
compiled code.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, __version__, kernels
from adabayes._util.missing_extra import install_command
from adabayes.bench.workloads import WORKLOADS
from adabayes.kernels.backends import BACKENDS
from adabayes.kernels.check import compiled
from adabayes.kernels.triton import launch as device

__all__ = ["VARIANTS", "Finding", "differing", "findings", "on_cpu_tensors", "report", "trained"]

Maker = Callable[..., torch.optim.Optimizer]

VARIANTS: dict[str, Maker] = {
    "AdaBayes": partial(AdaBayes, batch_size=100),  # no power of 2, whose products would be exact in any order
    "AdaBayes, no batch size": AdaBayes,
    "AdaBayes, paper": partial(AdaBayes, dynamics="paper"),
    "AdaBayes, sum, ascending": partial(AdaBayes, reduction="sum", batch_size=7, beta1=0.0, maximize=True),
    "AdaBayes-FP": AdaBayesFP,
    "AdaBayes-FP, sum, ascending": partial(AdaBayesFP, reduction="sum", batch_size=7, betas=(0.0, 0.9), maximize=True),
    "AdaBayes-FP, centred": partial(AdaBayesFP, centred=True),
    "AdaBayes-FP, cautious": partial(AdaBayesFP, cautious=True),
}
LENGTHS = (1, 0, 37, 1024, 2500)  # full blocks, partial blocks, and none
_EXTREME = (0.0, -0.0, 1e-42, -1e-30, 1e-4, 3.0, 6e4, -1e20, 3e38, math.inf, -math.inf, math.nan)


class Finding(NamedTuple):
    """The outcome of one check."""

    name: str
    well: bool | None  # whether it passed; None if there was nothing to judge
    message: str


# Bits


def trained(make: Maker, param: torch.dtype, state: torch.dtype, where: str, lengths: Sequence[int] = LENGTHS) -> Any:
    """Take three fused steps, with some gradients that are 0, huge or nan; return the optimizer."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=generator).to(param) for n in lengths]
    start.append(torch.randn(1200, generator=generator).to(param)[3:])  # not aligned to 16 bytes
    params = [p.to(where) for p in start]
    low = torch.bfloat16 if state == torch.bfloat16 else None
    optimizer = make(
        params, lr=1e-2, weight_decay=0.1, fused=True, state_dtype=low, stochastic_rounding=True, seed=2**40 + 5
    )
    for t in range(3):
        for i, p in enumerate(params):
            size = 10.0 ** torch.randint(-6, 3, p.shape, generator=generator).float()
            g = torch.randn(p.shape, generator=generator) * size
            g[torch.rand(p.shape, generator=generator) < 0.2] = 0  # weights that start late
            extreme = torch.tensor(_EXTREME)[torch.randint(len(_EXTREME), p.shape, generator=generator)]
            g = torch.where(torch.rand(p.shape, generator=generator) < 0.1, extreme, g)
            p.grad = None if (i, t) == (2, 1) else g.to(param).to(where)
        optimizer.step()
    return optimizer


def differing(one: Any, other: Any) -> tuple[int, int]:
    """Count the values of two optimizers that differ in a bit, where all nan are equal; return this and the total."""
    pairs = [
        (a, b.cpu())
        for p, q in zip(one.param_groups[0]["params"], other.param_groups[0]["params"])
        for a, b in ((p, q), *((entry, other.state[q][name]) for name, entry in one.state[p].items()))
    ]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    unlike = sum(
        int(((a.view(bits[a.itemsize]) != b.view(bits[a.itemsize])) & ~(a.isnan() & b.isnan())).sum())
        if a.shape == b.shape and a.dtype == b.dtype
        else max(1, a.numel())
        for a, b in pairs
    )
    return unlike, sum(a.numel() for a, _ in pairs)


@contextmanager
def on_cpu_tensors() -> Iterator[None]:
    """Let the kernel for GPUs step tensors on the CPU, as it can under the interpreter."""
    before = BACKENDS["cpu"]
    BACKENDS["cpu"] = BACKENDS["cuda"]._replace(unavailable=lambda: None, by_default=True)
    try:
        yield
    finally:
        BACKENDS["cpu"] = before


def bits(where: str, names: Sequence[str] = tuple(VARIANTS)) -> Finding:
    """Compare the bits of every pair of types with those of the CPU's kernel; ``where`` may be ``"interpreter"``."""
    unlike: dict[str, int] = {}
    total = 0
    for name in names:
        for param, state in sorted(device.PAIRS, key=str):
            expected = trained(VARIANTS[name], param, state, "cpu")
            if where == "interpreter":
                with on_cpu_tensors():
                    actual = trained(VARIANTS[name], param, state, "cpu")
            else:
                actual = trained(VARIANTS[name], param, state, where)
            count, compared = differing(expected, actual)
            total += compared
            if count:
                unlike[f"{name}, {param}, state {state}"] = count
    if not unlike:
        return Finding("bits", True, f"all {total} values as on the CPU, in {len(names) * len(device.PAIRS)} variants")
    listed = "; ".join(f"{count} of {name}" for name, count in unlike.items())
    return Finding("bits", False, f"of {total} values, these differ from the CPU's: {listed}")


def bits_interpreted() -> Finding:
    """Run :func:`bits` under Triton's interpreter, in a new process: Triton chooses it when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "adabayes.bench.gpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return Finding(
            "bits", False, f"the interpreter failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
        )
    return Finding(*json.loads(done.stdout.splitlines()[-1]))


def code(targets: Sequence[str], chosen: Sequence[compiled.Variant]) -> Finding:
    """Compile for each target without a GPU, and inspect the code."""
    faults, registers = [], [0]
    for target in targets:
        for variant in chosen:
            made = compiled.compile_for(target, variant)
            registers.append(made.registers)
            if made.forbidden:
                faults.append(f"{target}, {variant}: {', '.join(made.forbidden)}")
            if made.spills:
                faults.append(f"{target}, {variant}: spills {made.spills}")
            if made.registers > device.REGISTERS:
                faults.append(f"{target}, {variant}: {made.registers} registers")
            if made.wide_bytes not in (None, variant.bytes_per_weight):
                faults.append(f"{target}, {variant}: {made.wide_bytes} of {variant.bytes_per_weight} bytes in vectors")
    if faults:
        return Finding("code", False, "; ".join(faults))
    return Finding(
        "code",
        True,
        f"compiled for {', '.join(targets)}: at most {max(registers)} registers, no spills; for Nvidia nothing "
        "contracted or approximated, and vectors of 128 bits",
    )


# On a GPU


def speed(where: str, workload: str, repeats: int = 30) -> Finding:
    """Time the steps of several optimizers, in random order, with a device sync before and after each step."""
    makers: dict[str, Maker] = {
        "AdamW fused": partial(torch.optim.AdamW, fused=True),
        "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
        "AdaBayes fused": partial(AdaBayes, fused=True),
        "AdaBayes foreach": partial(AdaBayes, foreach=True),
        "AdaBayes-FP fused": partial(AdaBayesFP, fused=True),
        "AdaBayes-FP fused, bf16 state": partial(AdaBayesFP, fused=True, state_dtype=torch.bfloat16),
    }
    grads = [torch.randn(shape, device=where) for shape in WORKLOADS[workload].shapes()]
    steps = {}
    for name, make in makers.items():
        params = [torch.randn_like(g) for g in grads]
        for p, g in zip(params, grads):
            p.grad = g
        steps[name] = make(params, weight_decay=0.01).step
        for _ in range(3):
            steps[name]()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffler = list(steps), random.Random(0)
    for _ in range(repeats):
        shuffler.shuffle(order)
        for name in order:
            _wait(where)
            started = time.perf_counter()
            steps[name]()
            _wait(where)
            seconds[name].append(time.perf_counter() - started)
    times = ", ".join(f"{name} {1e3 * statistics.median(column):.3f}" for name, column in seconds.items())
    return Finding(f"ms, {workload}", None, times)


def graph(where: str) -> Finding:
    """Capture a step in a CUDA graph; replays must have the bits of steps without a graph."""
    results = []
    for captured in (False, True):
        params = [torch.linspace(-1, 1, n, device=where) for n in (3, 5000)]
        optimizer = AdaBayes(params, fused=True, capturable=True)
        grads = [torch.zeros_like(p) for p in params]
        for p, g in zip(params, grads):
            p.grad = g
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            optimizer.step()  # the first step creates state, which a graph cannot capture
        torch.cuda.current_stream().wait_stream(side)
        take: Callable[[], Any] = optimizer.step
        if captured:
            made = torch.cuda.CUDAGraph()
            with torch.cuda.graph(made):
                optimizer.step()
            take = made.replay
        for t in range(3):
            for g in grads:
                g.fill_(0.1 * (t + 1))
            take()
        results.append([*params, *(entry for state in optimizer.state.values() for entry in state.values())])
    unlike = sum(not torch.equal(a, b) for a, b in zip(*results))
    return Finding("graph", not unlike, f"{unlike} tensors differ" if unlike else "replays equal steps without a graph")


def scaler(where: str) -> Finding:
    """Compare training with a GradScaler and one gradient that overflows with steps without a scaler."""
    w, v = (nn.Parameter(torch.linspace(-1, 1, 2000, device=where)) for _ in range(2))
    scaled, plain = AdaBayesFP([w], lr=1e-2, fused=True), AdaBayesFP([v], lr=1e-2, fused=True)
    scaling = torch.amp.GradScaler(torch.device(where).type, init_scale=8.0)
    for t in range(4):
        bad = t == 1
        for p in (w, v):
            p.grad = None
        scaling.scale((w * (math.inf if bad else 1.0)).square().mean()).backward()
        scaling.step(scaled)
        scaling.update()
        if not bad:
            v.square().mean().backward()
            plain.step()
    count = scaled.state[w]["step"].item()
    far = (w - v).abs().max().item()
    well = count == 3 and far < 1e-6
    return Finding("GradScaler", well, f"3 steps of 4 counted as {count:g}, weights within {far:.1g}")


def matrices(where: str) -> Finding:
    """Compare AdaBayes-K with and without the kernel, which computes its element-wise part."""
    results = []
    for fused in (True, False):
        w = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)).to(where)
        optimizer = AdaBayesK([w], fused=fused)
        for t in range(3):
            w.grad = torch.randn(48, 32, generator=torch.Generator().manual_seed(t)).to(where)
            optimizer.step()
        results.append(w)
    far = (results[0] - results[1]).abs().max().item()
    return Finding("AdaBayes-K", far < 1e-4, f"weights within {far:.1g} of those without the kernel")


def _wait(where: str) -> None:
    if torch.device(where).type == "cuda":
        torch.cuda.synchronize()


# Together


def findings() -> Iterator[Finding]:
    """Run all checks that this machine permits, and yield their results."""
    kinds = [compiled.Variant("adabayes", torch.float32, torch.float32, (False,))]
    kinds.append(compiled.Variant("adabayes_fp", torch.bfloat16, torch.bfloat16, (False, False), round_params=True))
    checks: list[tuple[str, Callable[[], Finding]]]
    if torch.cuda.is_available():
        if missing := device.unavailable():
            yield Finding("kernel", False, missing)
            return
        nvidia = torch.version.hip is None
        target = "sm_{}{}".format(*torch.cuda.get_device_capability()) if nvidia else "gfx942"
        checks = [
            ("bits", partial(bits, "cuda")),
            ("graph", partial(graph, "cuda")),
            ("GradScaler", partial(scaler, "cuda")),
            ("AdaBayes-K", partial(matrices, "cuda")),
            *((f"ms, {name}", partial(speed, "cuda", name)) for name in ("tiny", "resnet34", "gpt2")),
            ("code", partial(code, [target], kinds)),
        ]
    else:
        yield Finding("GPU", None, "there is none that torch can use here: its bits, graph and speed are not checked")
        try:
            import triton
        except ImportError:
            yield Finding("Triton", None, f"not installed, so nothing else can be run: {install_command('gpu')}")
            return
        yield Finding("Triton", None, f"{triton.__version__}; the following checks ran on the CPU")
        checks = [("bits", bits_interpreted), ("code", partial(code, compiled.TARGETS, kinds))]
    for name, check in checks:
        try:
            if name == "bits" and (missing := kernels.unavailable()):
                yield Finding(name, None, f"there is no kernel for the CPU to compare with: {missing}")
            else:
                yield check()
        except Exception as error:  # report it, and continue with the other checks
            yield Finding(name, False, f"failed: {type(error).__name__}: {error}")


def report(results: Sequence[Finding]) -> str:
    """Return the versions and the results as text, to paste into an issue."""
    lines = {"adabayes": __version__, "torch": torch.__version__}
    if torch.cuda.is_available():
        import importlib.metadata

        lines["GPU"] = torch.cuda.get_device_name()
        lines["CUDA"] = f"{torch.version.cuda or torch.version.hip}"
        lines["Triton"] = importlib.metadata.version("triton") if not device.unavailable() else "does not work"
    marks = {True: "ok: ", False: "WRONG: ", None: ""}
    lines |= {name: marks[well] + message for name, well, message in results}
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


if __name__ == "__main__":
    print(json.dumps(bits("interpreter")))
