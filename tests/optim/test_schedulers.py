"""Every scheduler of torch, on every optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK
from tests.conftest import MAKERS, Maker

Schedule = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Schedule] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda i: min(1.0, i / 3)),  # a warm-up from zero
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 3),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 6),  # to zero
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 6),  # to zero and back
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 1e-4, 1e-2, step_size_up=3),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 1e-2, total_steps=12),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.5)], [4]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)], o),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-4, anneal_epochs=4),
}


def test_none_is_forgotten() -> None:
    classes = {name for name, cls in vars(lrs).items() if inspect.isclass(cls) and issubclass(cls, lrs.LRScheduler)}
    assert {name for name in classes if not name.startswith("_")} - {"LRScheduler"} <= set(SCHEDULERS)


def advance(scheduler: Any) -> None:
    scheduler.step(1.0) if isinstance(scheduler, lrs.ReduceLROnPlateau) else scheduler.step()


@pytest.mark.parametrize("name", list(SCHEDULERS))
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
def test_training_under_each_scheduler_equals_setting_the_rates_by_hand(
    make: Maker, foreach: bool, name: str, tensor_lr: bool
) -> None:
    w, v = (torch.linspace(-1, 1, 5, dtype=torch.float64) for _ in range(2))
    lr: Any = torch.tensor(1e-3, dtype=torch.float64) if tensor_lr else 1e-3
    scheduled = make([w], lr=lr, weight_decay=0.1, foreach=foreach)
    by_hand = make([v], lr=1e-3, weight_decay=0.1, foreach=foreach)
    scheduler = SCHEDULERS[name](scheduled)
    rates = set()
    for t in range(10):
        (group,), (hand,) = scheduled.param_groups, by_hand.param_groups
        hand["lr"], hand["betas"] = float(group["lr"]), tuple(map(float, group["betas"]))
        rates.add(hand["lr"])
        for p, optimizer in ((w, scheduled), (v, by_hand)):
            p.grad = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
            optimizer.step()
        advance(scheduler)
        assert torch.equal(w, v)
        assert w.isfinite().all()
    assert len(rates) > 1


@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize("schedule", ["OneCycleLR", "CyclicLR"])
def test_momentum_is_cycled(name: str, schedule: str) -> None:
    w = torch.zeros(1)
    optimizer = MAKERS[name]([w])
    scheduler = SCHEDULERS[schedule](optimizer)
    seen = set()
    for _ in range(6):
        seen.add(float(optimizer.param_groups[0]["betas"][0]))
        w.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    assert len(seen) > 3


def test_resuming_scheduler_and_optimizer_goes_on_exactly(make: Maker) -> None:
    def start() -> tuple[torch.Tensor, torch.optim.Optimizer, Any]:
        w = torch.linspace(-1, 1, 5, dtype=torch.float64)
        optimizer = make([w], lr=1e-2)
        return w, optimizer, lrs.CosineAnnealingLR(optimizer, 10)

    def run(w: torch.Tensor, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> None:
        for t in steps:
            w.grad = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
            optimizer.step()
            scheduler.step()

    whole = start()
    run(*whole, range(10))
    first = start()
    run(*first, range(5))
    second = start()
    second[0].copy_(first[0])
    second[2].load_state_dict(copy.deepcopy(first[2].state_dict()))
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    run(*second, range(5, 10))
    assert torch.equal(whole[0], second[0])


def test_a_schedule_scales_both_learning_rates() -> None:
    """Weights of either regime get their share of the drop in the same step."""
    w = torch.zeros(2, dtype=torch.float64)
    optimizer = AdaBayes([w], lr=1e-3, lr_sgd=0.1)
    scheduler = lrs.StepLR(optimizer, 1)
    w.grad = torch.tensor([1e-7, 1.0], dtype=torch.float64)
    for _ in range(3):
        optimizer.step()
    before = optimizer.effective_lr(w)
    scheduler.step()
    torch.testing.assert_close(optimizer.effective_lr(w), 0.1 * before)
    assert before[0].item() == pytest.approx(0.1)


@pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP, AdaBayesK])  # AdaBayes with a batch size: test_exact.py
@pytest.mark.parametrize("lr_sgd", [None, 0.1, 10.0])
def test_a_rate_that_is_set_later_belongs_to_the_usual_one(cls: Any, lr_sgd: float | None) -> None:
    later, now = torch.zeros(4, 3), torch.zeros(4, 3)
    optimizers = cls([later], lr=0.0, lr_sgd=lr_sgd), cls([now], lr=1e-3, lr_sgd=lr_sgd)
    optimizers[0].param_groups[0]["lr"] = 1e-3
    for t in range(3):
        later.grad = now.grad = 1e-2 * torch.randn(4, 3, generator=torch.Generator().manual_seed(t))
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(later, now)
