"""The default dynamics: how the filter starts, follows schedules, and stays close to the paper's."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from adabayes import AdaBayes
from adabayes import filtering as f
from tests.conftest import all_state

LR, LR_SGD, BATCH = 1e-3, 0.1, 128


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def step(optimizer: AdaBayes, gradient: torch.Tensor | list[float]) -> torch.Tensor:
    """Take a step with this gradient; the gain after it."""
    (w,) = optimizer.param_groups[0]["params"]
    w.grad = torch.as_tensor(gradient, dtype=w.dtype)
    optimizer.step()
    gain: torch.Tensor = optimizer.state[w]["gain"]
    return gain.clone()


def after_start(g: float) -> float:
    """Return the gain after a first gradient: the filter starts at its fixed point and takes its first step."""
    flow = f.ornstein_uhlenbeck(f.drift(LR, LR_SGD, BATCH), LR_SGD)
    return float(f.update(f.predict(f.fixed_point(g * g, LR, LR_SGD), flow), f.curvature(g, BATCH)))


@settings(deadline=None)
@given(st.floats(1e-8, 1e4), st.booleans(), st.sampled_from(["mean", "sum"]))
def test_filter_starts_at_the_fixed_point_of_the_first_gradient(
    g: float, foreach: bool, reduction: Literal["mean", "sum"]
) -> None:
    optimizer = AdaBayes([zeros(1)], LR, LR_SGD, BATCH, foreach=foreach, reduction=reduction)
    gain = step(optimizer, [g * (BATCH if reduction == "sum" else 1)]).item()
    assert gain == pytest.approx(after_start(g), rel=1e-12)
    if g < 0.1 / (BATCH * LR):  # below the gradients that outweigh the noise, the first step leaves it there
        assert gain == pytest.approx(f.fixed_point(g * g, LR, LR_SGD), rel=0.06)


@pytest.mark.parametrize("foreach", [False, True, None], ids=["single", "foreach", "fused"])
def test_each_weight_starts_at_its_own_first_gradient(foreach: bool | None) -> None:
    """As the rows of an embedding do: what has had no gradient yet waits, however long."""
    optimizer = AdaBayes([zeros(3)], LR, LR_SGD, BATCH, foreach=foreach)
    first = step(optimizer, [1.0, 0.0, 0.0])
    assert first.tolist() == pytest.approx([after_start(1.0), 0.0, 0.0], rel=1e-12)
    for _ in range(20):
        step(optimizer, [1.0, 0.0, 0.0])
    later = step(optimizer, [1.0, 0.5, 0.0])
    assert later.tolist()[1:] == pytest.approx([after_start(0.5), 0.0], rel=1e-12)


def test_zero_gradients_after_the_start_are_observations(foreach: bool) -> None:
    optimizer = AdaBayes([zeros(1)], LR, LR_SGD, BATCH, foreach=foreach)
    gain = step(optimizer, [1.0]).item()
    flow = f.ornstein_uhlenbeck(f.drift(LR, LR_SGD, BATCH), LR_SGD)
    for _ in range(5):
        gain = f.predict(gain, flow)
        assert step(optimizer, [0.0]).item() == pytest.approx(gain, rel=1e-12)


def test_distributed_checkpointing_does_not_spoil_the_start() -> None:
    model = torch.nn.Linear(3, 2).double()
    optimizer = AdaBayes(model.parameters(), LR, LR_SGD, BATCH)
    before = copy.deepcopy(list(model.parameters()))
    saved: Any = get_optimizer_state_dict(model, optimizer)  # steps at lr = 0 with zero gradients to make the state
    assert saved["state"]["weight"]["gain"].shape == (2, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.3)
    optimizer.step()
    for p in model.parameters():
        assert optimizer.state[p]["gain"].flatten().tolist() == pytest.approx([after_start(0.3)] * p.numel(), rel=1e-12)


def test_the_papers_filter_has_the_papers_ratio_and_the_one_that_remembers_has_another() -> None:
    """The paper's is asked for by a batch size, or by its dynamics."""
    options: list[dict[str, Any]] = [{"batch_size": BATCH}, {"dynamics": "paper"}, {}]
    found = [AdaBayes([zeros(2)], 1e-2, **chosen).param_groups[0]["lr_sgd"] for chosen in options]
    assert found == [1.0, 1.0, 1000.0]


@pytest.mark.parametrize("dynamics", ["exact", "paper"])
@pytest.mark.parametrize("lr_sgd", [None, 0.1, 0.5])
def test_a_group_made_at_lr_zero_is_a_schedule_of_the_usual_rate(
    dynamics: Literal["exact", "paper"], lr_sgd: float | None
) -> None:
    """As with warm-ups that set the rate themselves: they must not make their first, tiny rate the base of all."""
    late = AdaBayes([zeros(2)], 0.0, lr_sgd, BATCH, dynamics=dynamics)
    prompt = AdaBayes([zeros(2)], 1e-3, lr_sgd, BATCH, dynamics=dynamics)
    assert late.param_groups[0]["lr_sgd"] == prompt.param_groups[0]["lr_sgd"]
    for factor in (0.001, 0.01, 1.0):
        for optimizer in (late, prompt):
            optimizer.param_groups[0]["lr"] = factor * 1e-3
        assert torch.equal(step(late, [1.0, 1e-4]), step(prompt, [1.0, 1e-4]))
    assert all(torch.equal(a, b) for a, b in zip(all_state(late), all_state(prompt)))


@pytest.mark.parametrize("dynamics", ["exact", "paper"])
def test_lr_zero_moves_nothing_at_any_time(dynamics: Literal["exact", "paper"], foreach: bool) -> None:
    w = torch.ones(3, dtype=torch.float64)
    optimizer = AdaBayes([w], LR, LR_SGD, BATCH, weight_decay=0.1, dynamics=dynamics, foreach=foreach)
    for lr in (0.0, LR, 0.0, 0.0, LR):
        optimizer.param_groups[0]["lr"] = lr
        before = w.clone()
        step(optimizer, [1.0, 1e-4, 0.0])
        assert torch.equal(w, before) == (lr == 0)
        assert torch.equal(optimizer.effective_lr(w), zeros(3)) == (lr == 0)


@pytest.mark.parametrize("foreach", [False, True, None], ids=["single", "foreach", "fused"])
def test_state_put_back_to_zero_in_place_begins_anew(foreach: bool | None) -> None:
    w = zeros(2)
    optimizer = AdaBayes([w], LR, LR_SGD, BATCH, foreach=foreach)
    for _ in range(10):
        step(optimizer, [1.0, 1.0])
    for entry in optimizer.state[w].values():
        entry.zero_()
    assert step(optimizer, [1e-3, 0.0]).tolist() == pytest.approx([after_start(1e-3), 0.0], rel=1e-12)
    assert step(optimizer, [1e-3, 0.3])[1].item() == pytest.approx(after_start(0.3), rel=1e-12)


def test_a_gradient_too_large_to_square_is_no_new_beginning(foreach: bool) -> None:
    """In fp32, 1e20 squared is infinite and the gain 0; but the weight has had a gradient."""
    w = torch.zeros(2)
    optimizer = AdaBayes([w], LR, LR_SGD, BATCH, foreach=foreach)
    for g in (1.0, 1e20, 1.0):
        gain = step(optimizer, [g, 0.0])
    assert 0 < gain[0] < 2 * BATCH * LR**2  # what the process noise of a step allows


def test_parameters_that_are_gone_are_not_kept_alive() -> None:
    w, v = torch.zeros(2), torch.zeros(2)
    optimizer = AdaBayes([w, v])
    for p in (w, v):
        p.grad = torch.ones(2)
    optimizer.step()
    gain = weakref.ref(optimizer.state[v]["gain"])
    del optimizer.param_groups[0]["params"][1], optimizer.state[v]
    optimizer.step()
    gc.collect()
    assert gain() is None


@pytest.mark.parametrize("k", [1e-2, 1e-3])
def test_exact_and_paper_agree_to_first_order_in_k(k: float, foreach: bool) -> None:
    """From the same gain, at a constant learning rate."""
    batch = 2 * k * LR_SGD / LR**2
    gradients = torch.randn(500, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients *= torch.logspace(-4, 0, 8, dtype=torch.float64) / (batch * LR)
    paths = []
    for dynamics in ("exact", "paper"):
        optimizer = AdaBayes([zeros(8)], LR, LR_SGD, batch, dynamics=dynamics, foreach=foreach)
        step(optimizer, gradients[0])
        (state,) = optimizer.state.values()
        state["gain"].fill_(0.01 * LR_SGD)
        paths.append(torch.stack([step(optimizer, g) for g in gradients[1:]]))
    exact, paper = paths
    worst = ((exact - paper) / paper).abs().max().item()
    assert worst < 1.0 * k  # first order, with a coefficient below one ...
    assert worst > 0.1 * k  # ... and not less: the two do differ


@pytest.mark.filterwarnings("ignore:batch_size=.*leaves AdaBayes no room")
@settings(deadline=None)
@given(st.floats(0, 9), st.floats(-8, 4), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_every_batch_size_is_finite(log_batch: float, log_g: float, foreach: bool, dtype: torch.dtype) -> None:
    w = torch.ones(2, dtype=dtype)
    optimizer = AdaBayes([w], LR, LR_SGD, 10**log_batch, foreach=foreach)
    for sign in (1, -1, 1):
        step(optimizer, [sign * 10**log_g, 0.0])
        (state,) = optimizer.state.values()
        assert all(torch.isfinite(x).all() for x in (w, *state.values()))
        assert 0 < state["gain"][0] <= LR_SGD * (1 + 1e-6)


def test_schedule_is_followed_at_once(foreach: bool) -> None:
    """A copy at a tenth of the learning rate takes a tenth of the next step, for weights of every regime."""
    w = zeros(3)
    optimizer = AdaBayes([w], LR, LR_SGD, BATCH, foreach=foreach)
    gradient = torch.tensor([1e-6, 1e-2, 1.0], dtype=torch.float64)
    for _ in range(50):
        step(optimizer, gradient)
    moves = []
    for factor in (1.0, 0.1, 0.0):
        twin = copy.deepcopy(optimizer)
        twin.param_groups[0]["lr"] = factor * LR
        (v,) = twin.param_groups[0]["params"]
        step(twin, gradient)
        moves.append(v - w)
    torch.testing.assert_close(moves[1], 0.1 * moves[0], rtol=1e-9, atol=0)
    assert torch.equal(moves[2], zeros(3))


def test_gain_settles_at_lr_sgd_in_single_precision_however_slow_the_filter() -> None:
    """2k = 1e-6: in fp32, decay * gain + noise would settle 5 % away, because the decay rounds."""
    lr, lr_sgd = 1e-4, 1e-2
    w = torch.zeros(1)
    optimizer = AdaBayes([w], lr, lr_sgd, batch_size=1)
    step(optimizer, [1.0])
    optimizer.state[w]["gain"].fill_(lr_sgd)
    for _ in range(1000):
        gain = step(optimizer, [0.0])
    assert gain.item() == pytest.approx(lr_sgd, rel=1e-6)


@pytest.mark.parametrize("foreach", [False, True, None], ids=["single", "foreach", "fused"])
def test_weights_of_a_large_tensor_start_at_their_own_first_gradient(foreach: bool | None) -> None:
    """Whether few or many have had none."""
    few, many = zeros(10, 64), zeros(10, 64)
    optimizer = AdaBayes([few, many], LR, LR_SGD, BATCH, foreach=foreach)
    for t in range(12):
        few.grad, many.grad = torch.ones_like(few), torch.zeros_like(many)
        few.grad[3, :5] = 0.5 if t == 11 else 0.0
        many.grad[0] = 1.0
        many.grad[3, :5] = few.grad[3, :5]
        optimizer.step()
    for p in (few, many):
        assert optimizer.state[p]["gain"][3, :5].tolist() == pytest.approx([after_start(0.5)] * 5, rel=1e-12)
