"""Check stacks of matrices in several processes, for tests/optim/test_stacks_distributed.py.

Start each process with ``python -m tests.workers.stacks OUT``. Every case checks a property of AdaBayes-K in several
processes. If it fails in any of them, the traceback is written to ``OUT/WORLD/CASE.error``; a file without the ending
says that it holds.
"""

from __future__ import annotations

import copy
import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from adabayes import AdaBayesK, param_groups
from adabayes.diagnostics import matrix_memory_plan
from adabayes.optim._matrix.sharded import ShardedStack

SETTINGS: dict[str, Any] = {"block_size": 4, "refresh": 2, "weight_decay": 0.1, "lr": 0.01}
GPT2_LAYER = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]


def mesh(*sizes: int) -> Any:
    names = ("outer", "inner")[-len(sizes) :] if sizes else ("inner",)
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=names)


def full(x: Any) -> Tensor:
    result: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return result.detach()


def assert_close(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other):
        torch.testing.assert_close(full(a), full(b), rtol=0, atol=1e-11)


class Experts(nn.Module):
    """Stacked experts beside a usual layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        random = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(3, 10, 6, generator=random, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(3, 6, 10, generator=random, dtype=torch.float64))
        self.norm = nn.LayerNorm(6, dtype=torch.float64)
        self.head = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm((torch.tanh(x @ self.up.mT) @ self.down.mT).mean(0))
        return torch.tanh(self.head(y))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take steps with the same batch in all processes, so that gradients do not depend on their number."""
    for t in steps:
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def optimizer_of(model: nn.Module) -> AdaBayesK:
    return AdaBayesK(param_groups(model, block_size=4), **SETTINGS)


def sharded() -> Any:
    model = Experts()
    fully_shard(model, mesh=mesh())
    return model


# Cases


def stacks_are_stepped_as_unsharded(placements: Sequence[Placement], sizes: Sequence[int] = ()) -> None:
    """Compare uneven and empty shards of stacks, of single matrices and of convolutions.

    Without the kernel for matrices, whose eigenvectors may have other signs.
    """
    random = torch.Generator().manual_seed(0)
    shapes = [(3, 10, 6), (8, 4, 4), (1, 5, 9), (2, 3, 7, 2), (5, 1, 6)]

    def draw(shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    on = mesh(*sizes)
    start = [draw(shape) for shape in shapes]
    unsharded = [nn.Parameter(x.clone()) for x in start]
    sharded = [nn.Parameter(distribute_tensor(x.clone(), on, placements)) for x in start]
    optimizers = [AdaBayesK(params, batch_dims=1, fused=False, **SETTINGS) for params in (unsharded, sharded)]
    for _ in range(20):
        for p, q in zip(unsharded, sharded):
            p.grad = draw(p.shape)
            q.grad = distribute_tensor(p.grad.clone(), on, placements)
        for optimizer in optimizers:
            optimizer.step()
    assert_close(unsharded, sharded)
    for p, q in zip(unsharded, sharded):
        one, other = optimizers[0].state[p], optimizers[1].state[q]
        assert_close(list(one.values()), list(other.values()))


def a_network_with_experts_trains_as_unsharded() -> None:
    alone, net = Experts(), sharded()
    for model in (alone, net):
        take_steps(model, optimizer_of(model), range(20))
    assert_close(list(alone.parameters()), list(net.parameters()))


def experts_are_separate_matrices() -> None:
    """Refresh bases at each step: otherwise those of a stack are due at other steps than those of separate matrices."""
    net = sharded()
    optimizer = AdaBayesK(param_groups(net), **{**SETTINGS, "refresh": 1})
    start = [nn.Parameter(x.clone()) for x in full(net.up)]
    alone = AdaBayesK(start, **{**SETTINGS, "refresh": 1})
    for t in range(10):
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        optimizer.zero_grad()
        net(x).square().sum().backward()
        for p, gradient in zip(start, full(net.up.grad)):
            p.grad = gradient.clone()
        optimizer.step()
        alone.step()
    assert_close(list(full(net.up)), start)


def full_state_dicts_go_to_one_process_and_back() -> None:
    net, alone = sharded(), Experts()
    optimizer, other = optimizer_of(net), optimizer_of(alone)
    take_steps(net, optimizer, range(5))
    saved = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    saved = copy.deepcopy(saved)
    for p, q in zip(net.parameters(), alone.parameters()):
        q.data.copy_(full(p))
    set_optimizer_state_dict(alone, other, saved, options=StateDictOptions(full_state_dict=True))
    take_steps(alone, other, range(5, 10))
    take_steps(net, optimizer, range(5, 10))
    assert_close(list(alone.parameters()), list(net.parameters()))


def distributed_checkpoints_continue(out: Path, flatten: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    net, other_net = sharded(), sharded()
    optimizer, other = optimizer_of(net), optimizer_of(other_net)
    take_steps(net, optimizer, range(5))
    folder = str(out / f"checkpoint_{flatten}")
    save({"optimizer": get_optimizer_state_dict(net, optimizer, options=options)}, checkpoint_id=folder)
    other_net.load_state_dict(copy.deepcopy(net.state_dict()))
    target = {"optimizer": get_optimizer_state_dict(other_net, other, options=options)}
    load(target, checkpoint_id=folder)
    set_optimizer_state_dict(other_net, other, target["optimizer"], options=options)
    take_steps(other_net, other, range(5, 10))
    take_steps(net, optimizer, range(5, 10))
    assert_close(list(other_net.parameters()), list(net.parameters()))


def distributed_checkpoints_of_0_2_continue(out: Path) -> None:
    """Load what they have into an optimizer with the scale of 0.2: torch demands all settings unless told otherwise."""
    net, other_net = sharded(), sharded()
    optimizer, other = (AdaBayesK(model.parameters(), **SETTINGS, matrix_scale=1.0) for model in (net, other_net))
    take_steps(net, optimizer, range(5))
    saved: Any = get_optimizer_state_dict(net, optimizer)
    for group in saved["param_groups"]:
        for name in ("batch_dims", "share_bases", "matrix_scale", "param_shapes"):
            del group[name]
    folder = str(out / "checkpoint_0_2")
    save({"optimizer": saved}, checkpoint_id=folder)
    other_net.load_state_dict(copy.deepcopy(net.state_dict()))
    target = {"optimizer": get_optimizer_state_dict(other_net, other)}
    load(target, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(other_net, other, target["optimizer"])
    take_steps(other_net, other, range(5, 10))
    take_steps(net, optimizer, range(5, 10))
    assert_close(list(other_net.parameters()), list(net.parameters()))


def state_of_another_shape_is_refused() -> None:
    saved, here = (
        AdaBayesK([nn.Parameter(distribute_tensor(torch.zeros(shape), mesh(), [Shard(0)]))], block_size=4)
        for shape in ((16, 4), (4, 16))
    )
    for optimizer in (saved, here):
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = distribute_tensor(torch.ones(p.shape), mesh(), [Shard(0)])
        optimizer.step()
    try:
        here.load_state_dict(saved.state_dict())
    except ValueError as error:
        assert "parameter 0 had shape (16, 4)" in str(error)  # noqa: PT017
    else:
        raise AssertionError("it was not refused")


def subsets_of_parameters_with_gradients_do_not_fill_the_memory() -> None:
    """As of experts that a batch does not use."""
    params = [nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh(), [Shard(0)])) for _ in range(6)]
    optimizer = AdaBayesK(params, block_size=4)
    for subset in range(1, 2 ** len(params)):
        for i, p in enumerate(params):
            used = subset >> i & 1
            p.grad = distribute_tensor(torch.ones(8, 4), mesh(), [Shard(0)]) if used else None
        optimizer.step()
    gc.collect()
    assert sum(type(x) is ShardedStack for x in gc.get_objects()) <= 4


def the_plan_is_what_is_measured(shapes: Sequence[tuple[int, ...]], **settings: Any) -> None:
    """Bytes of state, and bytes that a step sends, of the process that has most of them."""
    params = [nn.Parameter(distribute_tensor(torch.zeros(shape), mesh(), [Shard(0)])) for shape in shapes]
    optimizer = AdaBayesK(params, **settings)
    here = {"state": 0, "sent": 0}
    exchange = dist.all_to_all_single

    def counting(received: Tensor, units: Tensor, sizes: list[int], sent: list[int], **options: Any) -> Any:
        here["sent"] += (sum(sent) - sent[dist.get_rank()]) * units.shape[1] * units.itemsize
        return exchange(received, units, sizes, sent, **options)

    for p in params:
        p.grad = distribute_tensor(torch.ones(p.shape), mesh(), [Shard(0)])
    with patch.object(dist, "all_to_all_single", counting):
        optimizer.step()
    for state in optimizer.state.values():
        here["state"] += sum(entry.to_local().nbytes for name, entry in state.items() if name != "step")
    plan = matrix_memory_plan(shapes, devices=dist.get_world_size(), **settings)
    most = torch.tensor(list(here.values()))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert most.tolist() == [plan.state, plan.sent]


def cases(world: int, out: Path = Path()) -> dict[str, Callable[[], None]]:
    named: dict[str, Callable[[], None]] = {
        f"stacks_shard_{dim}": partial(stacks_are_stepped_as_unsharded, [Shard(dim)]) for dim in range(3)
    }
    named["stacks_replicate"] = partial(stacks_are_stepped_as_unsharded, [Replicate()])
    if world == 4:
        named["stacks_shard_0_x_shard_1"] = partial(stacks_are_stepped_as_unsharded, [Shard(0), Shard(1)], (2, 2))
        named["stacks_shard_2_x_replicate"] = partial(stacks_are_stepped_as_unsharded, [Shard(2), Replicate()], (2, 2))
    named["distributed_checkpoints_continue"] = partial(distributed_checkpoints_continue, out, flatten=False)
    named["flattened_checkpoints_continue"] = partial(distributed_checkpoints_continue, out, flatten=True)
    named["distributed_checkpoints_of_0_2_continue"] = partial(distributed_checkpoints_of_0_2_continue, out)
    stacks = [(6, 8, 5), (3, 9, 7), (1, 4, 4)]
    named["plan_of_stacks"] = partial(the_plan_is_what_is_measured, stacks, batch_dims=1, block_size=4)
    named["plan_of_pairs"] = partial(the_plan_is_what_is_measured, [(24, 10), (7, 9)], block_size=(8, 3))
    named["plan_of_a_layer_of_gpt2"] = partial(the_plan_is_what_is_measured, GPT2_LAYER)
    for case in (
        a_network_with_experts_trains_as_unsharded,
        experts_are_separate_matrices,
        full_state_dicts_go_to_one_process_and_back,
        state_of_another_shape_is_refused,
        subsets_of_parameters_with_gradients_do_not_fill_the_memory,
    ):
        named[case.__name__] = case
    return named


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    world = dist.get_world_size()
    folder = out / str(world)
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in cases(world, folder).items():
        error = ""
        try:
            case()
        except (Exception, CheckpointException):  # which is no Exception
            error = traceback.format_exc()
        errors: list[Any] = [None] * world
        dist.all_gather_object(errors, error)
        if dist.get_rank() == 0:
            (folder / (f"{name}.error" if any(errors) else name)).write_text("\n".join(errors), encoding="utf-8")
    dist.barrier()
    time.sleep(0.5)  # gloo's threads release what was sent last a moment later, and abort if Python is ending by then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
