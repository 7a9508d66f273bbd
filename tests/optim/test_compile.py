"""torch.compile of a step: the same numbers, and no more compiling after the first steps."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from adabayes import AdaBayesK
from tests.conftest import MAKERS, Maker, all_state


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def twins(make: Maker, dtype: torch.dtype, foreach: bool | None) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    nets = [net, copy.deepcopy(net)]
    return [(n, make(n.parameters(), lr=1e-2, weight_decay=0.1, foreach=foreach)) for n in nets]


def backward(net: nn.Module, t: int) -> None:
    net.zero_grad()
    net(torch.randint(7, (4,), generator=torch.Generator().manual_seed(t))).square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_step_equals_eager_and_stops_recompiling(
    make_graphable: Maker, foreach: bool, dtype: torch.dtype
) -> None:
    """The graph that the compiler sees, run as it is: capturable arithmetic, which keeps step counts as tensors."""
    (net, eager), (compiled_net, compiled) = twins(make_graphable, dtype, foreach)
    counter = CompileCounter()
    step = torch.compile(compiled.step, backend=counter)
    for t in range(8):
        backward(net, t)
        backward(compiled_net, t)
        eager.step()
        step()
    assert counter.frame_count == 1  # one graph without a break, once and for all, as torch's AdamW
    for a, b in zip(all_state(eager), all_state(compiled)):
        # Bias corrections are fp32 there: 1 - 0.999^t = 1e-3 is known to 6e-8 / 1e-3, and v's root to half that.
        torch.testing.assert_close(a, b, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-6)


@pytest.mark.parametrize("name", ["adabayes", "adabayes-exact", "adabayes-fp", "adabound"])
def test_inductor_equals_eager(name: str) -> None:
    """The default backend, which generates and builds C++."""
    (net, eager), (compiled_net, compiled) = twins(MAKERS[name], torch.float32, None)
    step = torch.compile(compiled.step)
    for t in range(4):
        backward(net, t)
        backward(compiled_net, t)
        eager.step()
        step()
    for a, b in zip(all_state(eager), all_state(compiled)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_tensor_lr_can_be_scheduled_without_recompiling(make_graphable: Maker) -> None:
    (net, eager), (compiled_net, compiled) = twins(make_graphable, torch.float32, None)
    for optimizer in (eager, compiled):
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4) for o in (eager, compiled)]
    counter = CompileCounter()
    step = torch.compile(compiled.step, backend=counter)
    for t in range(6):
        backward(net, t)
        backward(compiled_net, t)
        eager.step()
        step()
        for scheduler in schedulers:
            scheduler.step()
    assert counter.frame_count == 1
    for a, b in zip(all_state(eager), all_state(compiled)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_matrix_filter_breaks_the_graph_and_stops_recompiling() -> None:
    """Its bases are refreshed by decisions of the program: that part runs as it is."""
    (net, eager), (compiled_net, compiled) = twins(partial(AdaBayesK, refresh=2), torch.float32, None)
    counter = CompileCounter()
    step = torch.compile(compiled.step, backend=counter)
    counts = []
    for t in range(8):
        backward(net, t)
        backward(compiled_net, t)
        eager.step()
        step()
        counts.append(counter.frame_count)
    assert counts[-1] == counts[2]
    for a, b in zip(all_state(eager), all_state(compiled)):
        assert torch.equal(a, b)
