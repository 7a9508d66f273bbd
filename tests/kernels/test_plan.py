"""Plans of fused steps never use a stale address: they follow parameters, state and gradients that change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adabayes import AdaBayes, AdaBayesFP
from tests.conftest import all_state, assert_same
from tests.kernels.common import CLASSES, assert_close, needs_kernels, set_gradients

pytestmark = needs_kernels

Move = Callable[[nn.Parameter, Any], None]
Change = Callable[[Any, Tensor], None]

# Memory that moves and keeps its values


def replace_data(p: nn.Parameter, optimizer: Any) -> None:
    p.data = p.data.clone()


def replace_data_twice(p: nn.Parameter, optimizer: Any) -> None:
    p.data, kept = torch.empty(0), p.data
    p.data = kept.clone()


def change_strides(p: nn.Parameter, optimizer: Any) -> None:
    p.data = p.data.t().contiguous().t()


def replace_data_of_state(p: nn.Parameter, optimizer: Any) -> None:
    for name, entry in optimizer.state[p].items():
        if name != "step":
            entry.data = entry.data.clone()


def replace_state(p: nn.Parameter, optimizer: Any) -> None:
    optimizer.state[p] = {name: entry.clone() for name, entry in optimizer.state[p].items()}


def replace_entries(p: nn.Parameter, optimizer: Any) -> None:
    for name, entry in list(optimizer.state[p].items()):
        optimizer.state[p][name] = entry.clone()


def load_own_state(p: nn.Parameter, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def convert_to_double_and_back(p: nn.Parameter, optimizer: Any) -> None:
    p.data = p.data.double().float()


@CLASSES
@pytest.mark.parametrize(
    "move",
    [
        replace_data,
        replace_data_twice,
        change_strides,
        replace_data_of_state,
        replace_state,
        replace_entries,
        load_own_state,
        convert_to_double_and_back,
    ],
)
def test_memory_that_moves_between_steps_is_followed(cls: type[AdaBayes], move: Move) -> None:
    """Compare with training without moves, and check that no step writes to the old memory."""
    torch.manual_seed(0)
    start = torch.randn(5, 5)
    moved, unmoved = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [cls([moved]), cls([unmoved])]
    for t in range(6):
        for p in (moved, unmoved):
            p.grad = torch.randn(5, 5, generator=torch.Generator().manual_seed(t))
        if t >= 2:
            old = [moved.data, *optimizers[0].state[moved].values()]
            old_values = [x.clone() for x in old]
            old_addresses = [x.data_ptr() for x in old]
            move(moved, optimizers[0])
            new = [moved, *optimizers[0].state[moved].values()]
            left = [
                (x, value)
                for x, value, address, y in zip(old, old_values, old_addresses, new)
                if y.data_ptr() != address and x.data_ptr() == address
            ]
        for optimizer in optimizers:
            optimizer.step()
        if t >= 2:
            assert all(torch.equal(x, value) for x, value in left)
    assert optimizers[0].state[moved]["step"].item() == 6
    if move is change_strides:  # foreach, which rounds differently
        torch.testing.assert_close(moved, unmoved, rtol=1e-5, atol=1e-7)
    else:
        assert_same(*optimizers)


@CLASSES
def test_a_transposed_view_of_the_same_memory_is_noticed(cls: type[AdaBayes]) -> None:
    """Object, address and shape stay the same; only the strides change."""
    torch.manual_seed(0)
    start, grad = torch.randn(5, 5), torch.randn(5, 5)
    fused, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [cls([fused]), cls([plain], fused=False)]
    for t in range(3):
        for p, optimizer in zip((fused, plain), optimizers):
            if t == 1:
                p.data = p.data.t()
                for name, entry in optimizer.state[p].items():
                    optimizer.state[p][name] = entry.t()
            p.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-7)


# State that gets other values


def replace_exp_avg(optimizer: Any, p: Tensor) -> None:
    optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.3)


def replace_second_state(optimizer: Any, p: Tensor) -> None:
    name = list(optimizer.STATE)[1]
    optimizer.state[p][name] = optimizer.state[p][name] * 2


def replace_dict(optimizer: Any, p: Tensor) -> None:
    optimizer.state[p] = {name: entry / 2 for name, entry in optimizer.state[p].items()}


def assign_data_of_entries(optimizer: Any, p: Tensor) -> None:
    for name in optimizer.STATE:
        optimizer.state[p][name].data = optimizer.state[p][name] / 2


def set_memory_of_entries(optimizer: Any, p: Tensor) -> None:
    for name in optimizer.STATE:
        optimizer.state[p][name].set_(optimizer.state[p][name] / 2)


def transpose_in_place(optimizer: Any, p: Tensor) -> None:
    optimizer.state[p]["exp_avg"].t_()


def write_in_place(optimizer: Any, p: Tensor) -> None:
    for entry in optimizer.state[p].values():
        entry.mul_(2)


def replace_step(optimizer: Any, p: Tensor) -> None:
    optimizer.state[p]["step"] = torch.tensor(50.0)


def replace_step_by_float64(optimizer: Any, p: Tensor) -> None:
    optimizer.state[p]["step"] = torch.tensor(50.0, dtype=torch.float64)


def assign_data_of_step(optimizer: Any, p: Tensor) -> None:
    optimizer.state[p]["step"].data = torch.tensor(50.0)


def clear_state(optimizer: Any, p: Tensor) -> None:
    optimizer.state.clear()


def clear_dict(optimizer: Any, p: Tensor) -> None:
    optimizer.state[p].clear()


def delete_dict(optimizer: Any, p: Tensor) -> None:
    del optimizer.state[p]


def load_other_state(optimizer: Any, p: Tensor) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for entry in state.values():
            entry.mul_(2)
    optimizer.load_state_dict(saved)


CHANGES: list[Change] = [
    replace_exp_avg,
    replace_second_state,
    replace_dict,
    assign_data_of_entries,
    set_memory_of_entries,
    transpose_in_place,
    write_in_place,
    replace_step,
    replace_step_by_float64,
    assign_data_of_step,
    clear_state,
    clear_dict,
    delete_dict,
    load_other_state,
]


def train(cls: type[AdaBayes], changes: list[Change | None], **options: Any) -> Any:
    """Take a step after each change of the state of the last parameter; return the optimizer."""
    params = [torch.randn(n, n, generator=torch.Generator().manual_seed(n)) for n in (3, 5)]
    optimizer: Any = cls(params, lr=1e-2, **options)
    for t, change in enumerate(changes):
        set_gradients(params, t)
        if change is not None and optimizer.has_state(params[-1]):
            change(optimizer, params[-1])
        optimizer.step()
    return optimizer


@CLASSES
@pytest.mark.parametrize("change", CHANGES)
def test_changed_state_is_noticed_at_the_next_step(cls: type[AdaBayes], change: Change) -> None:
    """Compare with foreach, and with an optimizer that makes a new plan for this step."""

    def change_with_new_plan(optimizer: Any, p: Tensor) -> None:
        change(optimizer, p)
        optimizer._fused._plans.clear()

    before, after = [None, None, None], [None]
    optimizer = train(cls, [*before, change, *after])
    assert bool(optimizer._fused) == (change is not transpose_in_place)  # which no kernel supports
    assert_close(optimizer, train(cls, [*before, change, *after], foreach=True), torch.float32)
    assert_same(optimizer, train(cls, [*before, change_with_new_plan, *after]))
    unchanged = train(cls, [*before, None, *after])
    assert not all(map(torch.equal, all_state(optimizer), all_state(unchanged)))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([AdaBayes, AdaBayesFP]), st.lists(st.sampled_from([*CHANGES, None]), min_size=5, max_size=5))
def test_every_sequence_of_changes_is_noticed(cls: type[AdaBayes], changes: list[Change | None]) -> None:
    assert_close(train(cls, changes), train(cls, changes, foreach=True), torch.float32)


@CLASSES
def test_a_deleted_entry_is_refused_with_an_explanation(cls: type[AdaBayes]) -> None:
    for form in ({"fused": True}, {"foreach": True}):
        optimizer = train(cls, [None, None], **form)
        *_, p = optimizer.state
        del optimizer.state[p]["exp_avg"]
        before = [x.clone() for x in all_state(optimizer)]
        with pytest.raises(RuntimeError, match=r"^the state of a parameter of shape \(5, 5\) has .*, but not exp_avg"):
            optimizer.step()
        assert all(map(torch.equal, all_state(optimizer), before))


@CLASSES
@pytest.mark.parametrize(
    "get_state", [lambda o: o.state, lambda o: o.state_dict()["state"]], ids=["state", "state_dict"]
)
def test_a_change_through_an_old_reference_is_noticed(cls: type[AdaBayes], get_state: Any) -> None:
    """Get the state at one step, and move and replace its entries at later steps."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5))
    twin = nn.Parameter(w.detach().clone())
    optimizers = [cls([w]), cls([twin], fused=False)]
    references: list[dict[str, Tensor]] = []
    for t in range(8):
        for p in (w, twin):
            p.grad = torch.ones(5) * (t + 1)
        if t == 2:
            references = [state for optimizer in optimizers for state in get_state(optimizer).values()]
        if t == 5:
            for state in references:
                state["exp_avg"].data = torch.zeros(5)
        if t == 6:
            for state in references:
                state["exp_avg"] = torch.ones(5)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(w, twin, rtol=1e-5, atol=1e-7)


@CLASSES
def test_unchanged_tensors_need_no_new_plan(cls: type[AdaBayes]) -> None:
    """Also while other code holds references to the state."""
    optimizer = train(cls, [None])
    (plan,) = optimizer._fused._plans.values()
    params = optimizer.param_groups[0]["params"]
    references = [optimizer.state, optimizer.state_dict(), *optimizer.state[params[0]].values()]
    for t in range(1, 4):
        set_gradients(params, t)
        optimizer.step()
        assert list(optimizer._fused._plans.values()) == [plan]
    assert references


# Parameters and gradients that do not fit


@CLASSES
def test_a_smaller_parameter_at_the_same_address_is_refused(cls: type[AdaBayes]) -> None:
    """Torch's optimizers refuse it, too. Nothing may be written, with a new gradient or with the old one."""
    w = nn.Parameter(torch.zeros(10))
    optimizer = cls([w])
    w.grad = torch.ones(10)
    optimizer.step()
    memory = w.data
    w.grad = None
    w.data = memory[:4]
    w.grad = torch.ones(4)
    before = memory.clone()
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert torch.equal(memory, before)
    w.grad = None
    w.data = memory
    w.grad = torch.ones(10)
    w.data = memory[:4]
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert torch.equal(memory, before)


@CLASSES
def test_gradients_may_have_another_layout(cls: type[AdaBayes]) -> None:
    torch.manual_seed(0)
    w, v = (nn.Parameter(torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last)) for _ in range(2))
    v.data.copy_(w.data)
    fused, single = cls([w]), cls([v], foreach=False)
    for _ in range(3):
        w.grad = torch.randn(3, 4, 5, 5)  # contiguous
        v.grad = w.grad.clone()
        for optimizer in (fused, single):
            optimizer.step()
    assert fused._fused
    assert_close(fused, single, torch.float32)
