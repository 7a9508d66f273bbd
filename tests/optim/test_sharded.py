"""Parameters that are sharded: DTensors, as FSDP2 makes them, here in one real gloo process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from adabayes import AdaBayes, kernels
from adabayes.diagnostics import Correlations, Observer, regimes
from adabayes.optim._engine.step import EngineOptimizer
from tests.conftest import Maker


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        net = nn.Linear(2, 1)
        fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        net(torch.ones(1, 2)).sum().backward()
    except AttributeError as error:
        dist.destroy_process_group()
        pytest.skip(f"FSDP2 of torch {torch.__version__} does not run on the CPU: {error}")
    yield
    dist.destroy_process_group()


def pair() -> tuple[nn.Module, nn.Module]:
    """Return a network and a sharded copy."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    sharded = copy.deepcopy(whole)
    fully_shard(sharded, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    return whole, sharded


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        net(torch.randint(9, (4,), generator=torch.Generator().manual_seed(t))).square().mean().backward()
        optimizer.step()


def assert_equal(whole: nn.Module, sharded: nn.Module) -> None:
    for p, q in zip(whole.parameters(), sharded.parameters()):
        assert isinstance(q, DTensor)
        assert torch.equal(p, q.full_tensor())


@pytest.mark.parametrize("foreach", [False, True, None], ids=["single", "foreach", "fused"])
def test_fsdp2_trains_as_one_process_does(make_elementwise: Maker, foreach: bool | None) -> None:
    whole, sharded = pair()
    for net in (whole, sharded):
        optimizer = make_elementwise(net.parameters(), weight_decay=0.1, foreach=foreach)
        train(net, optimizer, range(5))
        assert isinstance(optimizer, EngineOptimizer)
        if foreach is None and kernels.unavailable() is None and optimizer.KERNEL:
            assert optimizer._fused  # the kernel took the shards, too
    assert_equal(whole, sharded)


def test_bf16_state_of_shards_is_rounded_as_of_the_whole() -> None:
    """In one process, where the shard is the whole."""
    whole, sharded = pair()
    for net in (whole, sharded):
        train(net, AdaBayes(net.parameters(), state_dtype=torch.bfloat16), range(5))
    assert_equal(whole, sharded)


def test_distributed_state_dict_resumes_exactly(make_elementwise: Maker) -> None:
    whole, sharded = pair()
    optimizer = make_elementwise(whole.parameters())
    train(whole, optimizer, range(3))
    saved = get_optimizer_state_dict(whole, optimizer)
    for p, q in zip(whole.parameters(), sharded.parameters()):
        assert isinstance(q, DTensor)
        q.data.copy_(distribute_tensor(p.data, q.device_mesh, q.placements))
    resumed = make_elementwise(sharded.parameters())
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(sharded, resumed, copy.deepcopy(saved), options=options)
    train(whole, optimizer, range(3, 6))
    train(sharded, resumed, range(3, 6))
    assert_equal(whole, sharded)


def test_diagnostics_tell_of_the_shard_that_is_here() -> None:
    whole, sharded = pair()
    reports = []
    for net in (whole, sharded):
        optimizer = AdaBayes(net.named_parameters())
        with Observer(optimizer, per_tensor=5) as observer:
            train(net, optimizer, range(3))
        reports.append((regimes(optimizer), [p.effective_lr.tolist() for p in observer.points()]))
    assert reports[0] == reports[1]


def test_correlations_of_sharded_gradients_are_refused() -> None:
    _, net = pair()
    net(torch.tensor([1, 2])).square().mean().backward()
    with pytest.raises(NotImplementedError, match=r"0\.weight is sharded"):
        Correlations(net).see()
