"""Train networks in each process of tests/optim/test_distributed.py: ``python -m tests.workers.distributed OUT``.

Every case trains a small network for a few steps on its share of a global batch, and rank 0 writes the weights that
come out to ``OUT/WORLD/CASE.pt``.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, AdaBound
from adabayes.diagnostics import memory_plan

BATCH, STEPS = 16, 50
FIRST_STEPS = range(6)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adabayes": lambda params, **form: AdaBayes(params, lr=0.01, batch_size=BATCH, weight_decay=0.1, **form),
    "paper": lambda params, **form: AdaBayes(params, lr=0.01, batch_size=BATCH, dynamics="paper", **form),
    "fp": lambda params, **form: AdaBayesFP(params, lr=0.01, weight_decay=0.1, **form),
    "k": lambda params, **form: AdaBayesK(params, lr=0.005, weight_decay=0.1, block_size=4, **form),
    "adabound": lambda params, **form: AdaBound(params, lr=0.01, **form),
}
FORMS: dict[str, dict[str, bool]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Make a network of odd sizes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5)).to(dtype)


def batches(net: nn.Module, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    dtype = layers[0].weight.dtype
    for t in steps:
        random = torch.Generator().manual_seed(t)
        ends = layers[0].in_features, layers[-1].out_features
        x, y = (torch.randn(BATCH, size, generator=random).to(dtype) for size in ends)
        yield x, y


def mine(x: Tensor) -> Tensor:
    """Return this process's chunk of a batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def train(
    net: Any, optimizer: torch.optim.Optimizer, steps: range = range(STEPS), whole: bool = False, parts: int = 1
) -> None:
    """Take steps on this process's chunk of the batch, or on the full batch; accumulate over ``parts`` of it."""
    for x, y in batches(net, steps):
        optimizer.zero_grad()
        share = (x, y) if whole else (mine(x), mine(y))
        pieces = list(zip(*(s.chunk(parts) for s in share)))
        for i, (a, b) in enumerate(pieces):
            with net.no_sync() if i + 1 < len(pieces) else nullcontext():
                (nn.functional.mse_loss(net(a), b) / parts).backward()
        optimizer.step()


def full(net: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in net.named_parameters()
    }


# Cases


def alone(make: Any, steps: range = range(STEPS)) -> nn.Module:
    net = network()
    train(net, make(net.parameters(), foreach=False), steps, whole=True)
    return net


def ddp(make: Any, **form: Any) -> nn.Module:
    net = DistributedDataParallel(network())
    train(net, make(net.parameters(), **form))
    return net


def accumulated(make: Any) -> nn.Module:
    net = DistributedDataParallel(network())
    train(net, make(net.parameters()), parts=2)
    return net


def zero(kind: Any, options: dict[str, Any]) -> nn.Module:
    net = DistributedDataParallel(network())
    train(net, ZeroRedundancyOptimizer(net.parameters(), kind, **options))
    return net


def sharded(net: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def fsdp(make: Any, **form: Any) -> nn.Module:
    net = sharded(network())
    optimizer = make(net.parameters(), **form)
    train(net, optimizer)
    if isinstance(optimizer, AdaBayes | AdaBayesFP):
        check_memory(net, optimizer)
    return net


def check_memory(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All shards together are as large as the plan says."""

    def here(tensors: list[Any]) -> float:
        total = torch.tensor(float(sum(t.to_local().nbytes for t in tensors if isinstance(t, DTensor))))
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    params = list(net.parameters())
    weights = sum(p.numel() for p in params)
    plan = memory_plan(weights, dist.get_world_size(), param_dtype=torch.float64)
    assert here(params) == plan.parameters
    assert here([p.grad for p in params]) == plan.gradients
    assert here([e for p in params for name, e in optimizer.state[p].items() if name != "step"]) == plan.state


def fsdp_mixed(make: Any) -> nn.Module:
    """Train the first steps with weights and state in fp32, and computations and messages in bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = sharded(network(torch.float32), mp_policy=policy)
    optimizer = make(net.parameters())
    train(net, optimizer, FIRST_STEPS)
    for p in net.parameters():
        assert {entry.dtype for name, entry in optimizer.state[p].items() if name != "step"} == {torch.float32}
    return net


def tensor_parallel(make: Any, **form: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(net, make(net.parameters(), **form), whole=True)
    return net


def checkpointed(make: Any, folder: Path, before: Path | None, steps: range, dtype: torch.dtype) -> nn.Module:
    """Go on from a checkpoint that any number of processes wrote, for some steps, and write the next."""
    net = sharded(network(dtype))
    optimizer = make(net.parameters())
    if before is not None:
        weights, state = get_model_state_dict(net), get_optimizer_state_dict(net, optimizer)
        load({"model": weights, "optimizer": state}, checkpoint_id=str(before))
        set_model_state_dict(net, weights)
        set_optimizer_state_dict(net, optimizer, state)
    train(net, optimizer, steps)
    state = get_optimizer_state_dict(net, optimizer)
    save({"model": get_model_state_dict(net), "optimizer": state}, checkpoint_id=str(folder))
    return net


def cases(out: Path) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    for name, make in OPTIMIZERS.items():
        yield f"{name}-alone", partial(alone, make)
        yield f"{name}-alone-first-steps", partial(alone, make, FIRST_STEPS)
        yield f"{name}-accumulated", partial(accumulated, make)
        yield f"{name}-mixed", partial(fsdp_mixed, make)
        for form, options in FORMS.items():
            if form == "fused" and name == "adabound":
                continue
            for kind in (ddp, fsdp, tensor_parallel):
                yield f"{name}-{kind.__name__}-{form}", partial(kind, make, **options)
    yield "adabayes-zero", lambda: zero(AdaBayes, {"lr": 0.01, "batch_size": BATCH, "weight_decay": 0.1})
    yield "fp-zero", lambda: zero(AdaBayesFP, {"lr": 0.01, "weight_decay": 0.1})
    yield "k-zero", lambda: zero(AdaBayesK, {"lr": 0.005, "weight_decay": 0.1, "block_size": 4})
    # Checkpoints go from two processes to four, to one, and back to two: `checkpoints` says which is whose.
    order: dict[int, list[tuple[str | None, str, range]]] = {
        2: [(None, "two", range(20)), ("one", "two-again", range(40, STEPS))],
        4: [("two", "four", range(20, 35))],
        1: [("four", "one", range(35, 40))],
    }
    for before, after, steps in order[dist.get_world_size()]:
        for name in ("adabayes", "fp", "k"):
            for low in (False, True):
                suffix = f"{name}-bf16" if low else name
                ready = before is None or (out / f"checkpoint-{before}-{suffix}").exists()
                if not ready or (out / f"checkpoint-{after}-{suffix}").exists():
                    continue
                make = OPTIMIZERS[name]
                if low:
                    make = partial(make, state_dtype=torch.bfloat16)
                yield (
                    f"{suffix}-{after}",
                    partial(
                        checkpointed,
                        make,
                        out / f"checkpoint-{after}-{suffix}",
                        out / f"checkpoint-{before}-{suffix}" if before else None,
                        steps,
                        torch.float32 if low else torch.float64,
                    ),
                )


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = out / str(dist.get_world_size())
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in list(cases(out)):
        path = folder / f"{name}.pt"
        if path.exists():
            continue
        try:
            weights = full(case())
        except Exception:
            if dist.get_rank() == 0:
                (folder / f"{name}.error").write_text(traceback.format_exc(), encoding="utf-8")
            continue
        if dist.get_rank() == 0:
            torch.save(weights, path)
    dist.barrier()
    time.sleep(0.5)  # gloo's threads let go of what was sent last a moment later, and abort if Python is ending by then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
