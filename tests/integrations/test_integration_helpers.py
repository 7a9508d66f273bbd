"""Helpers for other people's training code: settings arrive where they belong, and loggers show regimes."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, integrations
from adabayes.diagnostics import regimes
from adabayes.integrations import huggingface
from adabayes.integrations.huggingface import global_batch_size, optimizer_cls_and_kwargs
from adabayes.integrations.lightning import RegimesCallback as LightningCallback
from tests.integrations.test_integrations import (
    ACCUMULATE,
    BATCH,
    DECAY,
    LIGHTNING,
    LR,
    STEPS,
    InOrder,
    Module,
    Net,
    Points,
    lightning_trainer,
    optimizer_in,
    trainer_arguments,
)

NAMES = {"sgd_like", "adam_like", "lr_5", "lr_50", "lr_95", "lr_sgd"}


@pytest.fixture(autouse=True)
def new_process() -> None:
    """Have accelerate forget what the first Accelerator of this process was told."""
    AcceleratorState._reset_state(reset_partial_state=True)


def events(folder: Path) -> dict[str, dict[int, float]]:
    """Read what TensorBoard shows: by tag, values by step."""
    (file,) = folder.rglob("events.out.tfevents.*")
    reader = EventAccumulator(str(file))
    reader.Reload()
    return {tag: {event.step: event.value for event in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


# transformers


@pytest.mark.parametrize("cls", [AdaBayesK, AdaBayesFP, AdaBayes])
def test_learning_rate_and_decay_are_those_of_the_arguments(cls: type[AdaBayes], tmp_path: Path) -> None:
    args = trainer_arguments(tmp_path, learning_rate=LR, lr_scheduler_type="constant", warmup_steps=0)
    training = InOrder(
        Net(), args, train_dataset=Points(), optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, cls)
    )
    training.train()
    optimizer = optimizer_in(training)
    assert type(optimizer) is cls
    assert [group["lr"] for group in optimizer.param_groups] == [LR, LR]
    decays = {p.dim(): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {2: DECAY, 1: 0.0}
    assert [group["batch_size"] for group in optimizer.param_groups] == [None, None]


def test_options_override_the_arguments(tmp_path: Path) -> None:
    cls, settings = optimizer_cls_and_kwargs(
        trainer_arguments(tmp_path, learning_rate=LR), AdaBayes, lr=0.5, batch_size=7, beta1=0.8
    )
    assert cls is AdaBayes
    assert settings == {"lr": 0.5, "batch_size": 7, "beta1": 0.8}


def test_processes_that_share_a_minibatch_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallelism = pytest.importorskip("accelerate.parallelism_config")
    args = trainer_arguments(tmp_path)
    monkeypatch.setattr(type(args), "world_size", 8)
    assert global_batch_size(args) == BATCH * ACCUMULATE * 8
    args.parallelism_config = parallelism.ParallelismConfig(dp_shard_size=2, tp_size=4)
    assert global_batch_size(args) == BATCH * ACCUMULATE * 2


def test_the_trainer_reports_regimes_beside_its_own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    args = trainer_arguments(tmp_path, learning_rate=LR, report_to="tensorboard", logging_steps=2)
    training = InOrder(Net(), args, train_dataset=Points(), optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args))
    training.add_callback(huggingface.RegimesCallback(training))
    training.train()
    found = events(tmp_path / "events")
    assert {tag.removeprefix("train/regimes/") for tag in found if "regimes" in tag} == NAMES
    assert set(found["train/loss"]) == set(found["train/regimes/adam_like"]) == set(range(2, STEPS + 1, 2))
    last = regimes(optimizer_in(training)).scalars()
    assert found["train/regimes/adam_like"][STEPS] == pytest.approx(last["regimes/adam_like"])


def test_the_trainers_callback_refuses_an_optimizer_without_regimes(tmp_path: Path) -> None:
    training = InOrder(Net(), trainer_arguments(tmp_path), train_dataset=Points())
    training.add_callback(huggingface.RegimesCallback(training))
    with pytest.raises(TypeError, match="AdamW has one learning rate"):
        training.train()


# Lightning


@LIGHTNING
def test_lightnings_loggers_show_regimes_of_every_step_that_is_logged(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "events")]
    training = lightning_trainer(logger=loggers, log_every_n_steps=2, callbacks=[LightningCallback(tensors=True)])
    module = Module(AdaBayesK)
    training.fit(module, Points().loader())
    steps = list(range(2, STEPS + 1, 2))

    found = events(tmp_path / "events")
    assert {tag.removeprefix("regimes/") for tag in found} >= NAMES
    assert list(found["regimes/net.inner.weight/lr_50"]) == steps

    (file,) = (tmp_path / "csv").rglob("metrics.csv")
    rows = [row for row in csv.DictReader(file.read_text().splitlines()) if row["regimes/sgd_like"]]
    assert [int(row["step"]) for row in rows] == steps
    last = regimes(training.optimizers[0], module).scalars(tensors=True)
    assert {name: float(rows[-1][name]) for name in last} == pytest.approx(last)


@LIGHTNING
def test_several_optimizers_have_their_places_in_the_names(tmp_path: Path) -> None:
    class Two(Module):
        automatic_optimization = False

        def training_step(self, batch: Any, _: int) -> None:  # type: ignore[override]
            self.manual_backward(self.net(**batch)["loss"])
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [AdaBayesK(self.net.inner.parameters()), AdaBayesFP(self.net.outer.parameters())]

    two = Two(AdaBayesK)
    options: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "log_every_n_steps": 4}
    training = lightning_trainer(logger=CSVLogger(tmp_path), callbacks=[LightningCallback()], **options)
    training.fit(two, Points().loader())
    (file,) = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert {name.split("/")[1] for name in rows[0] if name.startswith("regimes/")} == {"0", "1"}


@LIGHTNING
def test_lightnings_callback_refuses_an_optimizer_without_regimes() -> None:
    with pytest.raises(TypeError, match="AdamW has one learning rate"):
        lightning_trainer(callbacks=[LightningCallback()]).fit(Module(torch.optim.AdamW), Points().loader())


# What a logger gets, and what a notebook shows


def test_scalars_are_flat_floats_under_names_that_every_logger_takes() -> None:
    net = nn.Linear(3, 2)
    optimizer = AdaBayes(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = regimes(optimizer)  # without the model, names have commas, which MLflow refuses
    assert set(found.scalars()) == {f"regimes/{name}" for name in NAMES}
    scalars = found.scalars("a", tensors=True)
    assert len(scalars) == 3 * len(NAMES)
    assert scalars["a/group 0_ parameter 0/lr_50"] == found.tensors[0].lr_quantiles[1]
    assert all(type(value) is float for value in scalars.values())
    assert not set("".join(scalars)) & set(",%()")


def test_a_module_says_which_extra_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, library, extra in (
        ("huggingface", "transformers", "hf"),
        ("lightning", "lightning.pytorch", "lightning"),
    ):
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.delitem(sys.modules, f"{integrations.__name__}.{name}")
        with pytest.raises(ImportError, match=rf"pip install '\.\[{extra}\]'"):
            importlib.import_module(f"{integrations.__name__}.{name}")
