"""Step counts beyond 2**24, where fp32 stands still: all optimizers count on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, AdaBound, kernels
from adabayes.kernels import plan

LIMIT = 2**24
CLASSES = pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP, AdaBayesK, AdaBound])
FORMS: dict[str, dict[str, Any]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {},
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the settings that select each form."""
    if request.param == "fused" and kernels.unavailable():
        pytest.skip("there are no kernels")
    return FORMS[request.param]


def params(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.ones(24, 16, dtype=dtype), torch.ones(5, dtype=dtype)]


def take_step(optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def at(step: float, make: Callable[..., Any], **settings: Any) -> Any:
    """Return an optimizer that has taken this many steps."""
    optimizer = make(params(settings.pop("dtype", torch.float32)), **settings)
    take_step(optimizer)
    state_dict = optimizer.state_dict()
    for state in state_dict["state"].values():
        state["step"] = torch.full_like(state["step"], step)
    optimizer.load_state_dict(state_dict)
    return optimizer


@CLASSES
@pytest.mark.parametrize("start", [LIMIT - 2, LIMIT])
def test_steps_are_counted_beyond_the_limit_of_fp32(cls: Any, form: dict[str, Any], start: int) -> None:
    optimizer = at(start, cls, **form)
    for _ in range(4):
        take_step(optimizer)
    assert [state["step"].item() for state in optimizer.state.values()] == [start + 4] * 2


@CLASSES
def test_counts_are_those_of_torch_before(cls: Any, form: dict[str, Any]) -> None:
    optimizer = at(1000, cls, **form)
    take_step(optimizer)
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}


def test_plans_are_made_again_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that began below the half of the limit ends before the limit."""
    if kernels.unavailable():
        pytest.skip("there are no kernels")
    assert plan._LONGEST_USE == LIMIT // 2
    monkeypatch.setattr(plan, "_LONGEST_USE", 3)
    optimizer = at(LIMIT // 2 - 3, AdaBayesFP)
    dtypes = []
    for _ in range(6):
        take_step(optimizer)
        dtypes.append({state["step"].dtype for state in optimizer.state.values()})
    assert dtypes == [{torch.float32}] * 3 + [{torch.float64}] * 3
    assert {state["step"].item() for state in optimizer.state.values()} == {LIMIT // 2 + 3}


@CLASSES
def test_stochastic_rounding_does_not_repeat_its_bits(cls: Any, form: dict[str, Any]) -> None:
    """Steps far below the precision of bf16, from one state and one gradient, end at different weights."""
    optimizer = at(LIMIT, cls, **form, dtype=torch.bfloat16, stochastic_rounding=True, lr=1e-3)
    (w, v), state = optimizer.param_groups[0]["params"], optimizer.state
    values = [w, v, *(x for p in (w, v) for name, x in state[p].items() if name != "step")]
    start = [x.clone() for x in values]
    ends = []
    for _ in range(4):
        take_step(optimizer)
        ends.append(w.clone())
        for x, value in zip(values, start):
            x.copy_(value)
    assert not any(torch.equal(ends[0], end) for end in ends[1:])


def test_bases_are_refreshed_beyond_the_limit(form: dict[str, Any]) -> None:
    """Each basis once in ``refresh`` steps."""
    optimizer = at(LIMIT, AdaBayesK, refresh=4, **form)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    changes = 0
    for seed in range(8):
        before = state["basis_0"].clone()
        take_step(optimizer, seed)
        changes += not torch.equal(state["basis_0"], before)
    assert changes == 2
