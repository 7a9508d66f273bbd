"""Steps of torch's optimizers and of ours, to be timed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, kernels
from adabayes.bench.measure import Step
from adabayes.bench.muon import MuonAdamW
from adabayes.bench.workloads import Workload

__all__ = ["BASELINE", "matrix_optimizers", "optimizers", "roof", "state_bytes", "steps"]

Maker = Callable[[list[Tensor]], torch.optim.Optimizer]

BASELINE = "AdamW fused"
EARLY = "AdaBayes-K, steps 2 to 41"


def optimizers() -> dict[str, Maker]:
    """Return the optimizers by their names in the table; those of other packages if they are installed."""
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


def matrix_optimizers() -> dict[str, Maker]:
    """Return the optimizers that work on matrices, all with the same settings; others' if installed."""
    makers: dict[str, Maker] = {
        BASELINE: optimizers()[BASELINE],
        "AdaBayes-K": lambda p: AdaBayesK(p, weight_decay=0.01),
        EARLY: lambda p: AdaBayesK(p, weight_decay=0.01),
    }
    if hasattr(torch.optim, "Muon"):
        makers["Muon"] = MuonAdamW
    if importlib.util.find_spec("pytorch_optimizer"):
        makers["pytorch_optimizer.SOAP"] = _soap
    makers["AdaBayes-K, shared bases"] = lambda p: AdaBayesK(p, weight_decay=0.01, share_bases=True)
    makers["AdaBayes-K bf16"] = lambda p: AdaBayesK(p, weight_decay=0.01, state_dtype=torch.bfloat16)
    return makers


def steps(workload: Workload, names: Sequence[str]) -> dict[str, Step]:
    """Create each optimizer with its own parameters, and gradients that all share."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in workload.shapes()]
    grads = [0.01 * torch.randn(shape, generator=generator) for shape in workload.shapes()]
    for g in grads:
        g[g == 0] = 1e-3  # no zeros, of which there would be one in ten million: they would be dead weights
    makers = {**matrix_optimizers(), **optimizers()}
    made: dict[str, Step] = {}
    for name in names:
        params = [p.clone().requires_grad_() for p in start]
        for p, g in zip(params, grads):
            p.grad = g
        optimizer = makers[name](params)
        take = _step_of(optimizer)
        if workload.saved:
            take()
            optimizer.state_dict()
        if isinstance(optimizer, AdaBayesK):
            take()
            if name == EARLY:
                take = _early_step_of(optimizer)
            else:
                skip_beginning(optimizer)
        made[name] = Step(take, partial(state_bytes, optimizer))
    return made


def skip_beginning(optimizer: AdaBayesK) -> None:
    """Count the steps of an optimizer as if it were past those in which bases are refreshed more often."""
    for state in optimizer.state.values():
        state["step"].fill_(16 * optimizer.defaults["refresh"])


def _early_step_of(optimizer: AdaBayesK) -> Callable[[], None]:
    """Return a function that takes the steps 2 to 41, over and over."""
    counts = [state["step"] for state in optimizer.state.values()]
    before = cycle(range(1, 41))

    def step() -> None:
        torch._foreach_zero_(counts)
        torch._foreach_add_(counts, next(before))
        optimizer.step()

    return step


def roof(weights: int) -> Callable[[], None] | None:
    """Return a loop that reads four arrays and writes three of them in place, with the threads of the kernels."""
    if kernels.unavailable():
        return None
    arrays = [torch.ones(weights) for _ in range(4)]
    return lambda: kernels.stream(*arrays)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors of the state, wherever the optimizer keeps them, except step counts."""

    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict | list | tuple):
            for entry in value.values() if isinstance(value, dict) else value:
                yield from tensors(entry)

    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    entries = [*tensors(dict(optimizer.state)), *tensors(settings)]
    return sum(entry.nbytes for entry in entries if entry.dim() > 0)


def _adabound(params: list[Tensor]) -> torch.optim.Optimizer:
    # A package of 2019: torch warns about its deprecated calls at each step.
    warnings.filterwarnings("ignore", "This overload of add", UserWarning)
    optimizer: torch.optim.Optimizer = importlib.import_module("adabound").AdaBound(params)
    return optimizer


def _ivon(params: list[Tensor]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = importlib.import_module("ivon").IVON(params, lr=0.1, ess=50_000)
    return optimizer


def _schedule_free(params: list[Tensor]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = importlib.import_module("schedulefree").AdamWScheduleFree(params)
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def _soap(params: list[Tensor]) -> torch.optim.Optimizer:
    module = importlib.import_module("pytorch_optimizer")
    optimizer: torch.optim.Optimizer = module.SOAP(params, betas=(0.9, 0.99), max_precondition_dim=2048)
    return optimizer


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return the calls of one training step: IVON also samples the weights at which gradients are taken."""
    if not hasattr(optimizer, "sampled_params"):
        return optimizer.step

    def step() -> None:
        with optimizer.sampled_params(train=True):
            pass
        optimizer.step()

    return step
