"""Check AdaBayes-K in each process of tests/optim/test_matrix_distributed.py: ``python -m tests.workers.matrix OUT``.

Every case checks a property of AdaBayes-K in several processes. What fails, in any of them, goes to
``OUT/WORLD/CASE.error``; a file without the ending says that it holds.
"""

from __future__ import annotations

import copy
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from adabayes import AdaBayesK
from adabayes.diagnostics import matrix_memory_plan
from adabayes.optim._matrix import sharded as sharded_blocks
from tests.support.gradients import KINDS, draw_gradient
from tests.workers.distributed import OPTIMIZERS, STEPS, full, network, train

# Uneven shards and empty ones, matrices with fewer rows than there are processes, convolutions, vectors, a number
SHAPES: list[tuple[int, ...]] = [
    (12, 6), (5, 12), (3, 4), (1, 9), (9, 1), (10, 33), (4, 3, 2, 2), (16, 16), (16, 8), (2, 3), (7,), ()
]  # fmt: skip
make = OPTIMIZERS["k"]


def mesh(*shape: int) -> Any:
    names = ("outer", "inner")[-len(shape) :] if shape else ("inner",)
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def full_tensor(t: Any) -> Tensor:
    tensor: Tensor = t.full_tensor() if isinstance(t, DTensor) else t
    return tensor


def assert_close(one: Sequence[Tensor], other: Sequence[Tensor], bound: float = 1e-9) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other):
        torch.testing.assert_close(full_tensor(a), full_tensor(b), rtol=0, atol=bound)


class Pair:
    """The same parameters and gradients, whole and sharded."""

    def __init__(
        self,
        on: Any,
        placements: Sequence[Any],
        dtype: torch.dtype = torch.float64,
        gradients: str = "full",
        **options: Any,
    ) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.on, self.placements, self.dtype, self.gradients = on, placements, dtype, gradients
        self.t = 0
        start = [self.draw(shape) for shape in SHAPES]
        self.params = [nn.Parameter(x) for x in start], [nn.Parameter(self.sharded(x)) for x in start]
        options = {"refresh": 2, "weight_decay": 0.1, **options}
        self.optimizers: tuple[Any, ...] = tuple(AdaBayesK(params, **options) for params in self.params)

    def draw(self, shape: Sequence[int]) -> Tensor:
        dtype = torch.complex128 if self.dtype.is_complex else torch.float64
        return torch.randn(shape, generator=self.random, dtype=dtype).to(self.dtype)

    def draw_gradient(self, shape: Sequence[int], index: int) -> Tensor | None:
        if self.gradients == "full":
            return self.draw(shape)
        return draw_gradient(self.gradients, shape, self.t, index, self.random)

    def sharded(self, x: Tensor) -> DTensor:
        fitting = [p if not isinstance(p, Shard) or p.dim < x.dim() else Replicate() for p in self.placements]
        return distribute_tensor(x.clone(), self.on, fitting)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for i, (p, q) in enumerate(zip(*self.params)):
                p.grad = self.draw_gradient(p.shape, i)
                q.grad = None if p.grad is None else self.sharded(p.grad)
            for optimizer in self.optimizers:
                optimizer.step()
            self.t += 1

    def assert_equal(self) -> None:
        assert_close(*self.params)
        one, other = (optimizer.state for optimizer in self.optimizers)
        for p, q in zip(*self.params):
            assert_close(list(one[p].values()), list(other[q].values()))


# Sharded parameters


def trains_as_whole(*shape: int, placements: Sequence[Any], **options: Any) -> None:
    pair = Pair(mesh(*shape), placements, **options)
    pair.train(50)  # from step 16 on, not all bases are refreshed at each step
    pair.assert_equal()


def a_copy_goes_on() -> None:
    pair = Pair(mesh(), [Shard(0)], block_size=4)
    pair.train(3)
    pair.params, pair.optimizers = copy.deepcopy((pair.params, pair.optimizers))
    pair.train(3)
    pair.assert_equal()


def it_goes_on_from_sharded_adamw() -> None:
    """With blocks whose rows do not divide by the processes."""
    pair = Pair(mesh(), [Shard(0)], block_size=4)
    own = pair.optimizers
    pair.optimizers = tuple(torch.optim.AdamW(params) for params in pair.params)
    pair.train(2)
    for optimizer, adamw in zip(own, pair.optimizers):
        optimizer.load_state_dict(optimizer.from_adamw(adamw.state_dict()))
    pair.optimizers = own
    pair.train(2)
    pair.assert_equal()


def factors_have_one_owner_each() -> None:
    pair = Pair(mesh(), [Shard(0)], block_size=4)
    pair.train(1)
    for state in pair.optimizers[1].state.values():
        for entry in (state[name] for name in ("factor_0", "factor_1", "basis_0", "basis_1") if name in state):
            here = torch.tensor(entry.to_local().numel())
            dist.all_reduce(here)
            assert here == entry.numel()


def work_is_balanced() -> None:
    """Eight matrices of one block each: every process owns as many as the others, and refreshes these alone."""
    world = dist.get_world_size()
    params = [nn.Parameter(distribute_tensor(torch.randn(6, 6), mesh(), [Shard(0)])) for _ in range(2 * world)]
    optimizer = AdaBayesK(params, refresh=1)
    for p in params:
        p.grad = distribute_tensor(torch.randn(6, 6), p.device_mesh, [Shard(0)])  # type: ignore[attr-defined]
    optimizer.step()
    with counted() as count:
        optimizer.step()
    assert count == {"qr": 4, "eigh": 0}  # two sides of two matrices


def shards_of_whole_rows_of_blocks_are_not_sent() -> None:
    """Each process has a row of blocks of the first matrix, and half of a row of the second."""
    world = dist.get_world_size()
    for rows, sends in ((4 * world, False), (2 * world, True)):
        q = nn.Parameter(distribute_tensor(torch.ones(rows, 8), mesh(), [Shard(0)]))
        optimizer = AdaBayesK([q], block_size=4)
        q.grad = distribute_tensor(torch.randn(rows, 8), q.device_mesh, [Shard(0)])  # type: ignore[attr-defined]
        with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as send:
            optimizer.step()
        assert send.call_count == (2 if sends else 0)


def the_plan_is_what_is_measured() -> None:
    """Bytes of state, and bytes that a step sends, of the process that has most of them."""
    pair = Pair(mesh(), [Shard(0)], block_size=4)
    pair.train(1)
    here = {"state": 0, "sent": 0}
    for state in pair.optimizers[1].state.values():
        here["state"] += sum(entry.to_local().nbytes for name, entry in state.items() if name != "step")
    exchange = dist.all_to_all_single

    def counting(come: Tensor, units: Tensor, received: list[int], sent: list[int], **options: Any) -> Any:
        to_others = sum(sent) - sent[dist.get_rank()]
        here["sent"] += to_others * units.shape[1] * units.itemsize
        return exchange(come, units, received, sent, **options)

    with patch.object(dist, "all_to_all_single", counting):
        pair.train(1)
    plan = matrix_memory_plan(SHAPES, 4, devices=dist.get_world_size(), refresh=2, param_dtype=torch.float64)
    most = torch.tensor(list(here.values()))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert most.tolist() == [plan.state, plan.sent]


def older_versions_of_torch_train_as_whole() -> None:
    with patch.object(sharded_blocks, "num_rank_orders", lambda: 1):
        trains_as_whole(placements=[Shard(0)], block_size=4)


def whole_state_can_be_loaded_into_shards() -> None:
    """As of a run of one process, by the plain ``load_state_dict``."""
    pair = Pair(mesh(), [Shard(0)], block_size=4)
    one, other = pair.optimizers
    pair.train(3)
    for p in pair.params[0]:
        one.state[p]["exp_avg"].mul_(2)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    pair.train(3)
    pair.assert_equal()


def full_state_dicts_go_to_one_process_and_back() -> None:
    """Through rank 0 alone, as for a checkpoint in one file."""
    net, alone = fsdp(network()), network()
    optimizer, other = make(net.parameters()), make(alone.parameters())
    train(net, optimizer, range(3), whole=True)
    state = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    alone.load_state_dict(full(net))
    set_optimizer_state_dict(alone, other, copy.deepcopy(state), options=StateDictOptions(full_state_dict=True))
    train(alone, other, range(3, 5), whole=True)
    train(net, optimizer, range(3, 5), whole=True)
    assert_close(list(net.parameters()), list(alone.parameters()))

    back = fsdp(network())
    again = make(back.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(back, dict(full(alone)), options=options)
    state = copy.deepcopy(get_optimizer_state_dict(alone, other))
    state = state if dist.get_rank() == 0 else {"state": {}, "param_groups": []}
    set_optimizer_state_dict(back, again, state, options=options)
    train(alone, other, range(5, STEPS), whole=True)
    train(back, again, range(5, STEPS), whole=True)
    assert_close(list(back.parameters()), list(alone.parameters()))


# Networks


def reference() -> list[Tensor]:
    net = network()
    train(net, make(net.parameters()), whole=True)
    return list(net.parameters())


def fsdp(net: nn.Module, on: Any = None) -> Any:
    for layer in [*net.children(), net]:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh() if on is None else on)
    return net


def hsdp() -> None:
    net = fsdp(network(), mesh(2, 2))
    train(net, make(net.parameters()))
    assert_close(reference(), list(net.parameters()))


def fsdp_of_tensor_parallel() -> None:
    """Both shard the same dimension of the first matrix."""
    both = mesh(2, 2)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    net = fsdp(parallelize_module(network(), both["inner"], plan), both["outer"])
    train(net, make(net.parameters()), whole=True)
    assert_close(reference(), list(net.parameters()))


# DDP


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the matrices that are decomposed in this process."""
    counts = {"qr": 0, "eigh": 0}

    def counting(name: str, function: Any, x: Tensor) -> Any:
        counts[name] += len(x)
        return function(x)

    with ExitStack() as patches:
        for name in counts:
            wrapped = partial(counting, name, getattr(torch.linalg, name))
            patches.enter_context(patch.object(torch.linalg, name, wrapped))
        yield counts


def refreshes_are_split_across_ranks() -> None:
    """Each rank does its part of the decompositions, and the weights of all ranks are the same, to the bit."""
    world = dist.get_world_size()
    group = dist.group.WORLD
    weights, counts = [], []
    for options in ({"fused": False}, {"process_group": group}):
        net = DistributedDataParallel(network())
        optimizer = make(net.parameters(), **options)
        optimizer.load_state_dict(optimizer.state_dict())  # which changes nothing
        with counted() as count:
            train(net, optimizer, range(6))
        weights.append(list(net.parameters()))
        counts.append(count)
    for p, q in zip(*weights):
        assert_close([p], [q])
        everywhere = [torch.empty_like(q) for _ in range(world)]
        dist.all_gather(everywhere, q.detach())
        assert all(torch.equal(q, other) for other in everywhere)
    num_bases = 2 * (6 + 6)  # two sides of the blocks of both matrices, which are refreshed in each of the 6 steps
    assert counts[0] == {"qr": 6 * num_bases, "eigh": num_bases}
    done: list[Any] = [None] * world
    dist.all_gather_object(done, counts[1])
    for name, number in counts[0].items():
        assert sum(count[name] for count in done) == number
        assert max(count[name] for count in done) <= 1.5 * number / world, done


def split_refreshes_of_odd_matrices(gradients: str = "full") -> None:
    """More processes than are due blocks, and costs that differ."""
    params = [[nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES] for _ in range(2)]
    optimizers = [AdaBayesK(params[0], refresh=3), AdaBayesK(params[1], refresh=3, process_group=dist.group.WORLD)]
    random = torch.Generator().manual_seed(0)
    for t in range(50):
        for i, (p, q) in enumerate(zip(*params)):
            p.grad = q.grad = draw_gradient(gradients, p.shape, t, i, random)
        for optimizer in optimizers:
            optimizer.step()
    assert_close(params[0], params[1])


def cases(world: int) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}

    def sharded(name: str, *shape: int, placements: Sequence[Any], **options: Any) -> None:
        found[name] = lambda: trains_as_whole(*shape, placements=placements, **options)

    for dim in range(3):
        sharded(f"shard_{dim}", placements=[Shard(dim)])
        sharded(f"shard_{dim}_in_blocks", placements=[Shard(dim)], block_size=4)
    for kind in KINDS[1:]:
        sharded(f"{kind}_gradients", placements=[Shard(0)], block_size=4, gradients=kind)
        found[f"split_refreshes_with_{kind}_gradients"] = partial(split_refreshes_of_odd_matrices, kind)
    sharded("replicate", placements=[Replicate()], block_size=4)
    sharded("one_by_one", placements=[Shard(0)], block_size=4, foreach=False)
    sharded("without_kernels", placements=[Shard(0)], block_size=3, fused=False)
    sharded("without_caution", placements=[Shard(0)], block_size=3, cautious=False, centred=True, maximize=True)
    sharded("vocabulary", placements=[Shard(0)], block_size=4, max_size=8)
    sharded("complex", placements=[Shard(0)], block_size=4, dtype=torch.complex128)
    sharded("bf16", placements=[Shard(0)], block_size=4, dtype=torch.bfloat16)
    if world == 4:
        sharded("replicate_x_shard_0", 2, 2, placements=[Replicate(), Shard(0)], block_size=4)
        sharded("shard_0_x_shard_1", 2, 2, placements=[Shard(0), Shard(1)], block_size=4)
        sharded("shard_1_x_replicate", 2, 2, placements=[Shard(1), Replicate()])
    plain = [
        a_copy_goes_on,
        it_goes_on_from_sharded_adamw,
        factors_have_one_owner_each,
        work_is_balanced,
        shards_of_whole_rows_of_blocks_are_not_sent,
        the_plan_is_what_is_measured,
        older_versions_of_torch_train_as_whole,
        whole_state_can_be_loaded_into_shards,
        full_state_dicts_go_to_one_process_and_back,
        refreshes_are_split_across_ranks,
        split_refreshes_of_odd_matrices,
    ]
    if world == 4:
        plain += [hsdp, fsdp_of_tensor_parallel]
    return found | {function.__name__: function for function in plain}


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    folder = out / str(dist.get_world_size())
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in cases(dist.get_world_size()).items():
        error = ""
        try:
            case()
        except Exception:
            error = traceback.format_exc()
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if dist.get_rank() == 0:
            (folder / (f"{name}.error" if any(errors) else name)).write_text("\n".join(errors), encoding="utf-8")
    dist.barrier()
    time.sleep(0.5)  # gloo's threads let go of what was sent last a moment later, and abort if Python is ending by then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
