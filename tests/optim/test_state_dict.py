"""Checkpoints: what is saved, in which types, and that training goes on from it exactly."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from adabayes import AdaBayes, AdaBayesFP, AdaBound
from tests.conftest import Maker, assert_same
from tests.support.saving import through_torch_save


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for t in steps:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(t)).to(next(net.parameters()).dtype)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("save_form", [False, True])
def test_training_goes_on_exactly_from_a_checkpoint(
    make: Maker, foreach: bool, save_form: bool, dtype: torch.dtype
) -> None:
    """Also from one form into the other, and with fp32 state of bf16 parameters, which torch would round."""
    net = model(dtype)
    optimizer = make(net.parameters(), lr=1e-2, weight_decay=0.1, foreach=save_form)
    train(net, optimizer, range(5))
    saved_net = copy.deepcopy(net.state_dict())
    saved = through_torch_save(optimizer.state_dict())
    train(net, optimizer, range(5, 10))

    resumed_net = model(dtype)
    resumed_net.load_state_dict(saved_net)
    resumed = make(resumed_net.parameters(), foreach=foreach)
    resumed.load_state_dict(saved)
    resumed.param_groups[0]["foreach"] = foreach
    train(resumed_net, resumed, range(5, 10))
    assert_same(optimizer, resumed)


def test_state_dict_is_deterministic(make: Maker) -> None:
    net = model()
    optimizer = make(net.parameters())
    train(net, optimizer, range(2))
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert list(first["state"]) == list(second["state"])
    assert first["param_groups"] == second["param_groups"]
    for i, state in first["state"].items():
        assert list(state) == list(second["state"][i])
        assert all(torch.equal(value, second["state"][i][name]) for name, value in state.items())


def test_param_groups_are_json(make: Maker) -> None:
    net = model()
    optimizer = make(net.parameters())
    groups = json.loads(json.dumps(optimizer.state_dict()["param_groups"]))
    train(net, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())  # loading does not copy, in torch
    other_net = model()
    other = make(other_net.parameters())
    other.load_state_dict({"state": saved["state"], "param_groups": groups})
    other_net.load_state_dict(net.state_dict())
    train(net, optimizer, range(2, 4))
    train(other_net, other, range(2, 4))
    assert_same(optimizer, other)


def test_state_can_be_kept_in_safetensors(make: Maker, tmp_path: Path) -> None:
    net = model()
    optimizer = make(net.parameters())
    train(net, optimizer, range(3))
    saved = optimizer.state_dict()
    flat = {f"{i}.{name}": value for i, state in saved["state"].items() for name, value in state.items()}
    save_file(flat, tmp_path / "optimizer.safetensors")
    state: dict[int, dict[str, Any]] = {}
    for key, value in load_file(tmp_path / "optimizer.safetensors").items():
        i, name = key.split(".")
        state.setdefault(int(i), {})[name] = value
    other_net = model()
    other_net.load_state_dict(net.state_dict())
    other = make(other_net.parameters())
    other.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
    assert_same(optimizer, other)


@pytest.mark.parametrize("save_named", [False, True])
@pytest.mark.parametrize("load_named", [False, True])
def test_named_and_unnamed_parameters_load_each_other(make: Maker, save_named: bool, load_named: bool) -> None:
    def optimizer_of(net: nn.Module, named: bool) -> torch.optim.Optimizer:
        return make(net.named_parameters() if named else net.parameters())

    net, other_net = model(), model()
    optimizer = optimizer_of(net, save_named)
    train(net, optimizer, range(2))
    other = optimizer_of(other_net, load_named)
    other.load_state_dict(optimizer.state_dict())
    other_net.load_state_dict(net.state_dict())
    assert_same(optimizer, other)
    assert ("param_names" in other.param_groups[0]) == (save_named or load_named)


def test_dicts_without_newer_flags_and_with_a_number_for_the_step_load(make: Maker) -> None:
    net = model()
    optimizer = make(net.parameters())
    train(net, optimizer, range(2))
    old = copy.deepcopy(optimizer.state_dict())
    for name in ("foreach", "capturable", "differentiable", "maximize", "base_lr"):
        del old["param_groups"][0][name]
    for state in old["state"].values():
        state["step"] = int(state["step"])
    other_net = model()
    other_net.load_state_dict(net.state_dict())
    other = make(other_net.parameters())
    other.load_state_dict(old)
    assert all(isinstance(state["step"], torch.Tensor) for state in other.state.values())
    train(net, optimizer, range(2, 4))
    train(other_net, other, range(2, 4))
    assert_same(optimizer, other)


def test_base_learning_rate_survives_a_checkpoint_taken_under_a_schedule(make: Maker) -> None:
    net = model()
    optimizer = make(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    train(net, optimizer, range(1))
    scheduler.step()
    other = make(model().parameters(), lr=5e-5)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["base_lr"] == 1e-2
    assert other.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_a_dict_from_before_base_lr_takes_the_schedulers_word() -> None:
    optimizer = AdaBayes(model().parameters(), lr=1e-2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(initial_lr=1e-2, lr=1e-3)
    del saved["param_groups"][0]["base_lr"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["base_lr"] == 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_keeps_fp32_through_load_state_dict(make: Maker, dtype: torch.dtype) -> None:
    net = model(dtype)
    optimizer = make(net.parameters())
    train(net, optimizer, range(3))
    seen: list[torch.dtype] = []
    other = make(model(dtype).parameters())
    other.register_load_state_dict_post_hook(
        lambda o: seen.extend(v.dtype for state in o.state.values() for v in state.values())
    )
    other.load_state_dict(optimizer.state_dict())
    assert set(seen) == {torch.float32}  # already when the user's hooks see it
    for (p, state), (q, other_state) in zip(optimizer.state.items(), other.state.items()):
        assert p.dtype == q.dtype == dtype
        assert all(torch.equal(value, other_state[name]) for name, value in state.items())


def test_state_follows_the_precision_of_other_parameters(make: Maker) -> None:
    net = model(torch.float64)
    optimizer = make(net.parameters())
    train(net, optimizer, range(2))
    other = make(model(torch.float32).parameters())
    other.load_state_dict(optimizer.state_dict())
    assert {v.dtype for state in other.state.values() for v in state.values()} == {torch.float32}


def test_what_a_load_hook_returns_is_what_is_loaded(make: Maker) -> None:
    net = model(torch.bfloat16)
    optimizer = make(net.parameters())
    train(net, optimizer, range(2))

    def ten_times(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {i: {k: v if k == "step" else 10 * v for k, v in s.items()} for i, s in state_dict["state"].items()}
        return {"state": state, "param_groups": state_dict["param_groups"]}

    other = make(model(torch.bfloat16).parameters())
    other.register_load_state_dict_pre_hook(ten_times)
    other.load_state_dict(optimizer.state_dict())
    for state, other_state in zip(optimizer.state.values(), other.state.values()):
        assert torch.equal(10 * state["exp_avg"], other_state["exp_avg"])


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_are_whole_and_independent(make: Maker, way: str) -> None:
    net = model()
    pair: tuple[nn.Module, torch.optim.Optimizer] = (net, make(net.parameters(), lr=1e-2))
    train(*pair, range(3))
    twin: tuple[nn.Module, torch.optim.Optimizer] = (
        copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    )
    assert_same(pair[1], twin[1])
    train(*twin, range(3, 6))
    before = copy.deepcopy(pair)
    assert_same(pair[1], before[1])
    train(*pair, range(3, 6))
    assert_same(pair[1], twin[1])


def test_repr_tells_the_hyperparameters(make: Maker) -> None:
    text = repr(make([torch.zeros(1)], lr=0.125))
    assert "lr: 0.125" in text
    assert "base_lr: 0.125" in text


def test_parameters_that_change_dtype_after_the_optimizer_is_made_still_train(make: Maker, foreach: bool) -> None:
    for before, after in [(torch.float32, torch.bfloat16), (torch.float32, torch.float64)]:
        net = model(before)
        optimizer = make(net.parameters(), foreach=foreach)
        train(net, optimizer, range(2))
        net.to(after)
        weight = next(net.parameters())
        start = weight.detach().clone()
        train(net, optimizer, range(2, 4))
        assert weight.dtype == after
        assert not torch.equal(weight, start)
        assert optimizer.state[weight]["exp_avg"].dtype == torch.float32


def test_state_of_another_optimizer_is_refused_and_nothing_changes() -> None:
    net = model()
    adamw = torch.optim.AdamW(net.parameters())
    fixed = AdaBayesFP(net.parameters())
    for other in (adamw, fixed):
        train(net, other, range(1))
    optimizer = AdaBayes(net.parameters())
    train(net, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    for other in (adamw, fixed):
        with pytest.raises(ValueError, match="another optimizer"):
            optimizer.load_state_dict(other.state_dict())
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert all(torch.equal(v, after["state"][i][k]) for i, s in before["state"].items() for k, v in s.items())


def test_state_without_the_maximum_is_refused_by_amsbound() -> None:
    net = model()
    adam = torch.optim.Adam(net.parameters())
    train(net, adam, range(1))
    saved = adam.state_dict()
    saved["param_groups"][0]["amsbound"] = True
    with pytest.raises(ValueError, match=r"needs \['max_exp_avg_sq'\]"):
        AdaBound(net.parameters(), amsbound=True).load_state_dict(saved)


def test_a_group_without_lr_sgd_takes_it_in_proportion() -> None:
    net = model()
    saved = AdaBayesFP(net.parameters(), lr=1e-4).state_dict()
    for name in ("lr_sgd", "base_lr"):
        del saved["param_groups"][0][name]
    optimizer = AdaBayesFP(net.parameters(), lr=1e-3, lr_sgd=0.2)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr_sgd"] == pytest.approx(0.02)


def test_a_group_that_has_nothing_but_a_learning_rate_takes_the_rest_from_the_defaults(make: Maker) -> None:
    """As of a dict that was pruned or made by hand. The copy goes on as the original."""
    one, other = model(), model()
    optimizer, loaded = make(one.parameters(), lr=0.01), make(other.parameters(), lr=0.01)
    train(one, optimizer, range(2))
    other.load_state_dict(one.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"] = [{name: group[name] for name in ("lr", "params")} for group in saved["param_groups"]]
    loaded.load_state_dict(saved)
    train(one, optimizer, range(2, 4))
    train(other, loaded, range(2, 4))
    assert_same(optimizer, loaded)


def test_state_takes_eight_bytes_a_weight() -> None:
    for cls in (AdaBayes, AdaBayesFP):
        w = torch.zeros(100)
        optimizer = cls([w])
        w.grad = torch.ones(100)
        optimizer.step()
        assert sum(v.nbytes for k, v in optimizer.state[w].items() if k != "step") == 800
