"""Mistakes that people make: each is met by a message that tells what to do."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adabayes import AdaBayes, AdaBayesFP
from adabayes.diagnostics import check

TWO = pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP])


# Settings


@TWO
def test_learning_rates_that_may_have_been_swapped(cls: Any) -> None:
    with pytest.warns(UserWarning, match=r"lr_sgd=0\.001 is below lr=0\.1.*swapped\?.*leave it out") as caught:
        cls([torch.zeros(1)], lr=0.1, lr_sgd=1e-3)
    assert [warning.filename for warning in caught] == [__file__]  # as from the line that made the optimizer
    optimizer = cls([torch.zeros(1)], lr=1e-3, lr_sgd=0.1)
    with pytest.warns(UserWarning, match="swapped") as caught:
        optimizer.add_param_group({"params": [torch.zeros(1)], "lr_sgd": 1e-4})
    assert [warning.filename for warning in caught] == [__file__]


@TWO
def test_weight_decay_in_the_units_of_the_paper(cls: Any) -> None:
    with pytest.warns(UserWarning, match=r"weight_decay=5e-05 takes 5e-08 .*AdamW.*lambda / lr, here 0\.05"):
        cls([torch.zeros(1)], lr=1e-3, weight_decay=5e-5)


@TWO
@pytest.mark.parametrize("settings", [{}, {"lr_sgd": 1e-3}, {"weight_decay": 1e-4}, {"lr": 0.0}])
def test_usual_settings_warn_of_nothing(cls: Any, settings: dict[str, float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls([torch.zeros(1)], **settings)


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (AdaBayes, {"betas": (0.9, 0.999)}, "AdaBayes takes no betas. It takes beta1"),
        (AdaBayes, {"eps": 1e-8, "amsgrad": True}, r"no eps and no amsgrad\. lr / lr_sgd, the gradient"),
        (AdaBayesFP, {"eps": 1e-8}, "AdaBayesFP takes no eps"),
        (AdaBayesFP, {"momentum": 0.9}, r"lr_sgd = lr / \(1 - momentum\)"),
        (AdaBayes, {"weight_drift": 5e-5}, "Give weight_decay = weight_drift / lr"),
        (AdaBayes, {"learning_rate": 5e-5}, "AdaBayes takes no learning_rate. It is lr."),
    ],
)
def test_arguments_of_other_optimizers(cls: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cls([torch.zeros(1)], **settings)
    with pytest.raises(TypeError, match=message):
        cls([{"params": [torch.zeros(1)], **settings}])


def test_other_unknown_arguments_are_pythons_own_error_and_the_signature_is_seen() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        AdaBayes([torch.zeros(1)], rate=1.0)  # type: ignore[call-arg]
    assert {"lr", "lr_sgd", "batch_size"} < set(inspect.signature(AdaBayes).parameters)


def test_a_tensor_for_weight_decay_is_warned_of_too() -> None:
    with pytest.warns(UserWarning, match=r"weight_decay=5e-05"):
        AdaBayes([torch.zeros(1)], weight_decay=torch.tensor([5e-5]))  # type: ignore[arg-type]


# Set-ups: diagnostics.check


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


BATCH = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3


def loss_of(net: nn.Module, reduction: str = "mean") -> Any:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y, reduction=reduction)

    return loss


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net)(BATCH[0].to(next(net.parameters()).dtype), BATCH[1]).backward()
        optimizer.step()


@TWO
def test_a_right_set_up_has_no_problems_and_is_left_as_it_was(cls: Any) -> None:
    net = network()
    optimizer = cls(net.parameters(), batch_size=32)
    train(net, optimizer)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    gradients = [p.grad.clone() for p in net.parameters()]  # type: ignore[union-attr]
    generator = torch.get_rng_state()
    assert check(optimizer, net, loss_of(net), *BATCH) == []
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), gradients))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), generator)


@TWO
def test_a_summed_loss_with_reduction_mean(cls: Any) -> None:
    net = network()
    optimizer = cls(net.parameters(), batch_size=32)
    (problem,) = check(optimizer, net, loss_of(net, "sum"), *BATCH)
    assert problem.startswith("The loss is summed: twice the examples make it twice as large.")
    assert 'Set reduction="sum"' in problem
    optimizer = cls(net.parameters(), batch_size=32, reduction="sum")
    assert check(optimizer, net, loss_of(net, "sum"), *BATCH) == []


def test_an_averaged_loss_with_reduction_sum() -> None:
    net = network()
    (problem,) = check(AdaBayes(net.parameters(), batch_size=32, reduction="sum"), net, loss_of(net), *BATCH)
    assert problem == 'The loss is averaged: twice the examples leave it as it is. Set reduction="mean".'


@pytest.mark.parametrize("seed", range(5))
def test_neither_dropout_nor_losses_among_examples_mislead(seed: int) -> None:
    """A small loss, which dropout makes fluctuate; and examples compared with one another, which doubling changes."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 3))
    optimizer = AdaBayes(net.parameters(), lr=1e-2, lr_sgd=1.0, batch_size=32)
    x, y = BATCH
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert check(optimizer, net, loss_of(net), *BATCH) == []
    assert "The loss is summed" in check(optimizer, net, loss_of(net, "sum"), *BATCH)[0]
    assert all(module.training for module in net.modules())

    def contrastive(x: Tensor) -> Tensor:
        z = F.normalize(net(x), dim=1)
        return F.cross_entropy(z @ z.T / 0.07, torch.arange(len(x)))

    assert check(optimizer, net, contrastive, x) == []


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_that_tell_nothing(reduction: str) -> None:
    net = network()
    optimizer = AdaBayes(net.parameters(), batch_size=32, reduction=reduction)  # type: ignore[arg-type]
    assert check(optimizer, net, lambda x, y: net(x).sum() * 0, *BATCH) == []
    assert check(optimizer, net, lambda x, y: net(x).sum() * torch.nan, *BATCH) == [
        "The loss of this minibatch is nan."
    ]
    wrongs: list[tuple[Callable[[Tensor, Tensor], Any], str]] = [
        (lambda x, y: (net(x), y), "a tuple"),
        (lambda x, y: net(x), r"a tensor of shape \(32, 3\)"),
    ]
    for wrong, what in wrongs:
        with pytest.raises(TypeError, match=f"loss has to return a tensor of one element, not {what}"):
            check(optimizer, net, wrong, *BATCH)


def test_buffers_that_are_replaced_in_forward_are_put_back() -> None:
    class Counting(nn.Linear):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().forward(x)

    net = Counting()
    assert check(AdaBayes(net.parameters(), batch_size=32), net, loss_of(net), *BATCH) == []
    assert net.calls == 0


def test_batch_size_of_one_of_several_accumulated_minibatches() -> None:
    net = network()
    optimizer = AdaBayes(net.parameters(), batch_size=32)
    (problem,) = check(optimizer, net, loss_of(net), *BATCH, accumulate=4)
    assert problem.startswith("batch_size=32, but a step sees 32 examples x 4 accumulated.")
    assert problem.endswith("give batch_size=128.")
    assert check(AdaBayes(net.parameters(), batch_size=100), net, loss_of(net), *BATCH, accumulate=4) == []


def test_batches_may_be_dicts_or_as_those_of_hugging_face_user_dicts() -> None:
    net = network()
    batch = {"x": BATCH[0], "y": BATCH[1], "scale": torch.tensor(1.0), "name": "train"}
    optimizer = AdaBayes(net.parameters(), batch_size=512)
    for given in (batch, UserDict(batch)):
        (problem,) = check(optimizer, net, lambda b: loss_of(net)(b["x"], b["y"]) * b["scale"], given)
        assert "give batch_size=32." in problem
    (problem,) = check(optimizer, net, lambda pair: loss_of(net)(*pair), list(BATCH), processes=4)
    assert "32 examples x 4 processes" in problem
    with pytest.raises(ValueError, match="no tensor in batch"):
        check(optimizer, net, lambda: torch.tensor(1.0))


SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from adabayes import AdaBayes
from adabayes.diagnostics import check

dist.init_process_group("gloo")
net = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
x, y = torch.randn(32, 6), torch.arange(32) % 3
for size in (32, 32 * dist.get_world_size()):
    optimizer = AdaBayes(net.parameters(), batch_size=size)
    problems = check(optimizer, net, lambda x, y: nn.functional.cross_entropy(net(x), y), x, y)
    if dist.get_rank() == 0:
        print(problems)
dist.destroy_process_group()
"""


def test_batch_size_of_one_device_under_ddp(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    local, whole = done.stdout.splitlines()
    assert "batch_size=32, but a step sees 32 examples x 2 processes." in local
    assert "give batch_size=64." in local
    assert whole == "[]"


def test_parameters_that_were_replaced_after_the_optimizer_was_made() -> None:
    net = network()
    optimizer = AdaBayes(net.parameters(), batch_size=32)
    net[4] = nn.Linear(8, 3)
    strange, missing = check(optimizer, net, loss_of(net), *BATCH)
    assert strange.startswith("2 of 6 parameters of the optimizer are not the model's.")
    assert "Make the optimizer last" in strange
    assert missing.endswith("are not in the optimizer and stay as they are: 4.weight, 4.bias.")


def test_a_model_converted_after_the_first_steps() -> None:
    net = network()
    optimizer = AdaBayes(net.parameters(), batch_size=32)
    train(net, optimizer)
    net.double()
    batch = BATCH[0].double(), BATCH[1]
    (problem,) = check(optimizer, net, loss_of(net), *batch)
    assert "0.weight (torch.float32 for torch.float64)" in problem
    assert "make the optimizer after model.to(dtype)" in problem
    optimizer.load_state_dict(optimizer.state_dict())  # the other remedy
    assert check(optimizer, net, loss_of(net), *batch) == []


def test_parameters_of_bfloat16_need_stochastic_rounding() -> None:
    net = network().bfloat16()
    batch = BATCH[0].bfloat16(), BATCH[1]
    (problem,) = check(AdaBayes(net.parameters(), batch_size=32), net, loss_of(net), *batch)
    assert "6 parameters are bfloat16" in problem
    assert "stochastic_rounding=True" in problem
    rounding = AdaBayes(net.parameters(), batch_size=32, stochastic_rounding=True)
    assert check(rounding, net, loss_of(net), *batch) == []


# AdamW's state


def pair(cls: Any, **settings: Any) -> tuple[nn.Module, nn.Module, torch.optim.AdamW, Any]:
    """Return a network that AdamW has trained, and a copy whose optimizer has loaded AdamW's state."""
    ours, theirs = network().double(), network().double()
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.8, 0.99), eps=0, weight_decay=0.1)
    ours.eval(), theirs.eval()
    train(theirs, adamw, 5)
    ours.load_state_dict(theirs.state_dict())
    optimizer = cls(ours.parameters(), lr=1e-2, **settings)
    optimizer.load_state_dict(optimizer.from_adamw(copy.deepcopy(adamw.state_dict())))  # state dicts share memory
    return theirs, ours, adamw, optimizer


@pytest.mark.parametrize("fused", [True, False])
def test_adamws_state_warm_starts_fp_exactly(fused: bool) -> None:
    """As lr_sgd goes to infinity, training goes on as AdamW's would, weight decay and momentum included."""
    theirs, ours, adamw, optimizer = pair(AdaBayesFP, lr_sgd=1e12, fused=fused)
    for net, any_optimizer in ((theirs, adamw), (ours, optimizer)):
        train(net, any_optimizer, 20)
    for p, q in zip(theirs.parameters(), ours.parameters()):
        torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dynamics", ["exact", "paper"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_adamws_state_puts_the_gain_at_its_fixed_point(dynamics: str, reduction: str) -> None:
    """Where AdaBayes-FP, from the same state, has it; and a step later the two are still together."""
    settings: dict[str, Any] = {"lr_sgd": 1.0, "reduction": reduction, "batch_size": 32}
    _, net, _, optimizer = pair(AdaBayes, dynamics=dynamics, **settings)
    _, twin, _, fixed = pair(AdaBayesFP, **settings)
    assert optimizer.param_groups[0]["betas"] == (0.8,)
    for p, q in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(optimizer.effective_lr(p), fixed.effective_lr(q), rtol=1e-6, atol=0)
    train(net, optimizer, 1)
    train(twin, fixed, 1)
    for p, q in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(optimizer.effective_lr(p), fixed.effective_lr(q), rtol=0.2, atol=0)


def test_weights_without_a_gradient_so_far_wait_for_their_first() -> None:
    w = torch.ones(3)
    adamw = torch.optim.AdamW([w], lr=1e-3)
    w.grad = torch.tensor([0.0, 0.1, 1.0])
    adamw.step()
    optimizer = AdaBayes([w], lr=1e-3, lr_sgd=0.1)
    optimizer.load_state_dict(optimizer.from_adamw(adamw.state_dict()))
    assert (optimizer.state[w]["gain"] == 0).tolist() == [True, False, False]
    w.grad = torch.tensor([1.0, 0.1, 1.0])
    optimizer.step()
    rates = optimizer.effective_lr(w).tolist()
    assert rates[0] == pytest.approx(rates[2], rel=0.05)  # Adam's, at once


SCHEDULES = {
    "ExponentialLR": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20),
}


@TWO
@pytest.mark.parametrize("scheduled", SCHEDULES.values(), ids=list(SCHEDULES))
def test_a_schedule_goes_on_where_adamws_was(cls: Any, scheduled: Any) -> None:
    """The base is what the optimizer was made with, whatever a scheduler has put where."""
    w = torch.ones(3)
    w.grad = torch.ones(3)
    adamw = torch.optim.AdamW([w], lr=1e-2, weight_decay=0.3)
    scheduler = scheduled(adamw)
    for _ in range(2):
        adamw.step()
        scheduler.step()
    now = adamw.param_groups[0]["lr"]
    assert now < 1e-2
    optimizer = cls([w], lr=1e-2, lr_sgd=0.2, batch_size=64)
    again = scheduled(optimizer)
    optimizer.load_state_dict(optimizer.from_adamw(adamw.state_dict()))
    again.load_state_dict(scheduler.state_dict())
    (group,) = optimizer.param_groups
    numbers = {key: group[key] for key in ("lr", "base_lr", "lr_sgd", "weight_decay", "batch_size")}
    assert numbers == {"lr": now, "base_lr": 1e-2, "lr_sgd": 0.2, "weight_decay": 0.3, "batch_size": 64}
    own = {"eps", "amsgrad", "decoupled_weight_decay"}
    assert set(adamw.param_groups[0]) - own <= set(group)  # what schedulers note as well
    assert not own & set(group)
    for one, its in ((adamw, scheduler), (optimizer, again)):
        one.step()
        its.step()
    assert group["lr"] == adamw.param_groups[0]["lr"] != now


def test_a_learning_rate_that_is_set_by_hand_is_no_base() -> None:
    w = torch.ones(3)
    w.grad = torch.ones(3)
    adamw = torch.optim.AdamW([w], lr=1e-3)
    adamw.param_groups[0]["lr"] = 1e-6  # warming up
    adamw.step()
    optimizer = AdaBayes([w], lr=1e-3)
    optimizer.load_state_dict(optimizer.from_adamw(adamw.state_dict()))
    assert [optimizer.param_groups[0][key] for key in ("lr", "base_lr", "lr_sgd")] == [1e-6, 1e-3, 100]


def test_adams_penalty_is_not_taken_for_decay() -> None:
    w = torch.ones(2)
    w.grad = torch.ones(2)
    adam = torch.optim.Adam([w], weight_decay=0.1)
    adam.step()
    if "decoupled_weight_decay" not in adam.param_groups[0]:
        pytest.skip("this version of torch does not tell Adam from AdamW")
    optimizer = AdaBayesFP([w], weight_decay=0.02)
    with pytest.warns(UserWarning, match=r"weight_decay=0\.1 of this Adam is a penalty.*stays at 0\.02") as caught:
        state = optimizer.from_adamw(adam.state_dict())
    assert caught[0].filename == __file__
    assert state["param_groups"][0]["weight_decay"] == 0.02


@TWO
def test_complex_and_unused_and_low_precision_parameters(cls: Any) -> None:
    params = [torch.ones(2, dtype=torch.complex128), torch.ones(2), torch.ones(2, dtype=torch.bfloat16)]
    adamw = torch.optim.AdamW(params, lr=1e-2)
    params[0].grad, params[2].grad = params[0] * (1 + 2j), params[2] * 0.1
    adamw.step()
    optimizer = cls(params, lr=1e-2)
    optimizer.load_state_dict(optimizer.from_adamw(adamw.state_dict()))
    assert params[1] not in optimizer.state
    assert optimizer.state[params[2]]["exp_avg"].dtype == torch.float32
    expected = [[1e-2 / 1.0, 1e-2 / 2.0]] * 2  # each component at Adam's learning rate, but for 1 part in 100
    torch.testing.assert_close(optimizer.effective_lr(params[0]), torch.tensor(expected).double(), rtol=0.01, atol=0)


def test_adamws_state_dict_by_itself_is_refused_with_the_remedy() -> None:
    w = torch.ones(2)
    w.grad = torch.ones(2)
    adamw, sgd = torch.optim.AdamW([w]), torch.optim.SGD([w], momentum=0.9)
    adamw.step()
    sgd.step()
    for cls in (AdaBayes, AdaBayesFP):
        optimizer = cls([w], lr_sgd=0.7)
        with pytest.raises(ValueError, match=r"load optimizer\.from_adamw\(state_dict\) instead.*Nothing was changed"):
            optimizer.load_state_dict(adamw.state_dict())
        assert optimizer.param_groups[0]["lr_sgd"] == 0.7
        with pytest.raises(ValueError, match=r"another optimizer\. Start without it"):
            optimizer.load_state_dict(sgd.state_dict())
        for wrong in (sgd.state_dict(), {"model": {}, "optimizer": adamw.state_dict()}):
            with pytest.raises(ValueError, match="not the state dict of an AdamW: it has"):
                optimizer.from_adamw(wrong)
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, this optimizer of \[2\]"):
        AdaBayes([w, torch.ones(1)]).from_adamw(adamw.state_dict())
