"""A training run changes from AdamW to AdaBayes-K, as docs/migration.md shows, and its loss does not jump.

The mean loss of the 20 steps after the switch is not above that of the 20 steps before. Losses are those of all data,
so that minibatches do not blur them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from adabayes import AdaBayesK
from adabayes.integrations.huggingface import optimizer_cls_and_kwargs

STEPS, WARMUP, AROUND = 300, 30, 20
LR, DECAY = 3e-3, 0.05

Schedule = Callable[[int], float]


def constant(step: int) -> float:
    return min(1.0, (step + 1) / WARMUP)


def cosine(step: int) -> float:
    return constant(step) * 0.5 * (1 + math.cos(math.pi * max(0, step - WARMUP) / (STEPS - WARMUP)))


class Task(nn.Module):
    """A network that learns another one's classes, a tenth of which are wrong."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.x = torch.randn(2048, 24)
        labels = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 10))(4 * self.x).argmax(1)
        self.labels = torch.where(torch.rand(2048) < 0.1, torch.randint(10, (2048,)), labels)
        hidden = [nn.Linear(24, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()]
        self.net = nn.Sequential(*hidden, nn.Linear(64, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.net(x), labels)}

    @torch.no_grad()
    def loss(self) -> float:
        return self(self.x, self.labels)["loss"].item()  # type: ignore[no-any-return]


def train(
    task: Task, optimizer: torch.optim.Optimizer, scheduler: LambdaLR, steps: range, ramp: bool = False
) -> list[float]:
    """Take steps, and return the loss after each; with ``ramp``, matrices reach their full speed after 100 steps."""
    losses = []
    for step in steps:
        if ramp:
            for group in optimizer.param_groups:
                group["matrix_scale"] = 4.0 ** min(1.0, (step - steps[0]) / 100)
        batch = torch.randint(len(task.x), (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        task(task.x[batch], task.labels[batch])["loss"].backward()
        optimizer.step()
        scheduler.step()
        losses.append(task.loss())
    return losses


def switch(task: Task, lr: float, schedule: Schedule, at: int, ramp: bool = False) -> tuple[list[float], list[float]]:
    """Train with AdamW until the step ``at``, then with AdaBayes-K; return the losses just before and just after."""
    adamw = torch.optim.AdamW(task.parameters(), lr=lr, weight_decay=DECAY)
    scheduler = LambdaLR(adamw, schedule)
    before = train(task, adamw, scheduler, range(at))[-AROUND:]
    saved = copy.deepcopy({"optimizer": adamw.state_dict(), "scheduler": scheduler.state_dict()})

    optimizer = AdaBayesK(task.parameters(), lr=lr, weight_decay=DECAY)
    scheduler = LambdaLR(optimizer, schedule)
    optimizer.load_state_dict(optimizer.from_adamw(saved["optimizer"]))
    scheduler.load_state_dict(saved["scheduler"])
    after = train(task, optimizer, scheduler, range(at, at + AROUND), ramp)
    assert optimizer.param_groups[0]["base_lr"] == lr
    assert scheduler.get_last_lr() == [pytest.approx(lr * schedule(at + AROUND))]
    return before, after


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("at", [40, 120, 200])
@pytest.mark.parametrize("schedule", [constant, cosine])
def test_the_loss_does_not_jump(schedule: Schedule, at: int, seed: int) -> None:
    before, after = switch(Task(seed), LR, schedule, at)
    assert sum(after) <= sum(before)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("at", [120, 200])
@pytest.mark.parametrize("schedule", [constant, cosine])
def test_the_loss_does_not_jump_after_a_high_learning_rate_if_matrices_speed_up_slowly(
    schedule: Schedule, at: int, seed: int
) -> None:
    """Three times the learning rate of the other tests: at once, the steps of matrices would be too large."""
    before, after = switch(Task(seed), 3 * LR, schedule, at, ramp=True)
    assert sum(after) <= 0.97 * sum(before)


# The Trainer of transformers


class Examples(Dataset[dict[str, Tensor]]):
    def __init__(self, task: Task) -> None:
        self.task = task

    def __len__(self) -> int:
        return len(self.task.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.task.x[i], "labels": self.task.labels[i]}


class Losses(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Notes the loss after each step, and ends training after the step ``last``."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **now: Any) -> None:
        self.losses.append(now["model"].loss())
        control.should_training_stop = state.global_step >= self.last


def test_the_loss_does_not_jump_in_the_trainer(tmp_path: Path) -> None:
    at = 120
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=STEPS,
        learning_rate=LR,
        weight_decay=DECAY,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP,
        per_device_train_batch_size=64,
        save_steps=at,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    task, first = Task(0), Losses(at)
    transformers.Trainer(task, arguments, train_dataset=Examples(task), callbacks=[first]).train()

    checkpoint = tmp_path / f"checkpoint-{at}"
    task, then = Task(0), Losses(at + AROUND)
    trainer = transformers.Trainer(
        task,
        arguments,
        train_dataset=Examples(task),
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(arguments),
        callbacks=[then],
    )
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, AdaBayesK)
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    torch.save(optimizer.from_adamw(saved), checkpoint / "optimizer.pt")
    trainer.train(resume_from_checkpoint=str(checkpoint))

    assert len(then.losses) == AROUND
    assert sum(then.losses) <= sum(first.losses[-AROUND:])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY, 0.0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR * cosine(at + AROUND), rel=0.01)
