"""Protocols: the paper's is the paper's, and a user's own is read as they would expect."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adabayes.lab import optimizers, protocol
from adabayes.lab.protocol import ProtocolError, lr_factor
from tests.lab.conftest import spec_of

NINE = ["sgd", "adam", "adagrad", "amsgrad", "adabound", "amsbound", "adamw", "adabayes-fp", "adabayes"]


@pytest.mark.parametrize("name", protocol.NAMES)
def test_every_protocol_compares_the_papers_optimizers_and_adabayes_k_and_can_make_them(name: str) -> None:
    found = protocol.load(name)
    names = NINE if name == "paper" else [*NINE, "adabayes-k"]
    assert list(found.optimizers) == names
    runs = found.runs()
    assert len(runs) == len(found.seeds) * len(found.datasets) * len(found.models) * len(names)
    assert len({spec.identity for spec in runs}) == len(runs)
    for spec in runs:
        w = torch.nn.Parameter(torch.ones(3))
        optimizer = optimizers.make(spec, [w])
        w.grad = torch.ones(3)
        optimizer.step()
        assert torch.isfinite(w).all()
        assert set(found.optimizers[spec.optimizer].search) <= set(spec.settings)


def test_the_papers_protocol_is_that_of_luo_et_al() -> None:
    paper = protocol.load("paper")
    assert (paper.datasets, paper.models) == (("cifar10", "cifar100"), ("resnet34", "densenet121"))
    assert (paper.epochs, paper.batch_size, paper.test_batch_size) == (200, 128, 100)
    coupled = {"weight_decay": 5e-4}
    bound: dict[str, Any] = {"lr": 1e-3, "final_lr": 0.1, "gamma": 1e-3, "betas": [0.9, 0.999], **coupled}
    decoupled = {"lr": 1e-3, "weight_decay": 0.05}
    expected: dict[str, dict[str, Any]] = {
        "sgd": {"lr": 0.1, "momentum": 0.9, **coupled},
        "adam": {"lr": 1e-3, "betas": [0.99, 0.999], **coupled},
        "adagrad": {"lr": 0.01, **coupled},
        "amsgrad": {"lr": 1e-3, "betas": [0.99, 0.999], "amsgrad": True, **coupled},
        "adabound": bound,
        "amsbound": {**bound, "amsbound": True},
        "adamw": {**decoupled, "betas": [0.9, 0.999]},
        "adabayes-fp": {**decoupled, "lr_sgd": 0.1, "betas": [0.9, 0.999]},
        "adabayes": {**decoupled, "lr_sgd": 0.1, "beta1": 0.9, "dynamics": "paper"},
    }
    for name, settings in expected.items():
        assert paper.optimizers[name].settings_for("resnet34") == settings
        on_densenet = {**settings, "betas": [0.9, 0.999]} if name in ("adam", "amsgrad") else settings
        assert paper.optimizers[name].settings_for("densenet121") == on_densenet
    factors = [lr_factor(paper.schedule, epoch / 200) for epoch in (0, 149, 150, 199)]
    assert factors == [1.0, 1.0, 0.1, 0.1]


def test_the_papers_figures_go_with_the_papers_protocol_alone(tmp_path: Path) -> None:
    paper = protocol.load("paper")
    assert paper.published["cifar100"]["densenet121"]["sgd"] == [21.29, 0.774]
    assert paper.published["cifar10"]["resnet34"]["adabayes"] == [4.84, 0.229]
    assert sum(len(m) for d in paper.published.values() for m in d.values()) == 36
    assert protocol.load("mini").published == {}
    assert paper.narrowed(epochs=10).published == {}
    assert paper.narrowed(seeds=1).published == paper.published
    path = tmp_path / "mine.toml"
    path.write_text("extends = 'paper'\nseeds = 1\n[optimizers.sgd]\nlr = 0.5")
    figures = protocol.load(path).published["cifar10"]["resnet34"]
    assert "sgd" not in figures
    assert figures["adam"] == [7.11, 0.239]
    path.write_text("extends = 'paper'\nmodel_options = { width = 8 }")
    assert protocol.load(path).published == {}


def test_mini_is_the_papers_protocol_with_a_drop_at_epoch_9_of_12() -> None:
    mini = protocol.load("mini")
    assert (mini.epochs, mini.models, mini.batch_size) == (12, ("resnet8",), 128)
    assert [lr_factor(mini.schedule, epoch / 12) for epoch in (8, 9)] == [1.0, 0.1]
    assert {**mini.optimizers, **protocol.load("paper").optimizers} == mini.optimizers


@given(progress=st.floats(0, 1), warmup=st.floats(0, 0.9))
def test_cosine_warms_up_to_one_and_ends_at_zero(progress: float, warmup: float) -> None:
    schedule = {"kind": "cosine", "warmup": warmup}
    assert 0 <= lr_factor(schedule, progress) <= 1
    assert lr_factor(schedule, warmup) == 1
    assert lr_factor(schedule, 1.0) == pytest.approx(0, abs=1e-12)


def test_a_file_can_extend_a_protocol_and_name_any_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        extends = "quick"
        compare = ["adamw", "radam"]
        seeds = 2
        [optimizers.radam]
        class = "torch.optim.RAdam"
        lr = 3e-3
        betas = [0.8, 0.9]
        [optimizers.adamw]
        lr = 0.5
        """
    )
    mine = protocol.load(path)
    assert list(mine.optimizers) == ["adamw", "radam"]
    assert mine.optimizers["adamw"].settings == {"lr": 0.5, "betas": [0.9, 0.999], "weight_decay": 0.05}
    assert mine.seeds == (0, 1)
    assert mine.epochs == protocol.load("quick").epochs
    made = optimizers.make(mine.runs()[1], [torch.nn.Parameter(torch.ones(1))])
    assert isinstance(made, torch.optim.RAdam)
    assert made.defaults["betas"] == (0.8, 0.9)
    (tmp_path / "other.toml").write_text("extends = 'mine.toml'\nseeds = [5, 7]")
    assert protocol.load(tmp_path / "other.toml").seeds == (5, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs = [", "is not TOML"),
        ("extends = 'nothing'", "no protocol '.*nothing'"),
        ("extends = 'quick'\nepoch = 3", "unknown entry 'epoch'.*epochs"),
        ("extends = 'quick'\nepochs = 0", "epochs is 0; it must be a whole number of at least 1"),
        ("extends = 'quick'\nbatch_size = 1.5", "batch_size is 1.5"),
        ("extends = 'quick'\ndatasets = ['imagenet']", "unknown data set 'imagenet'; there are digits"),
        ("extends = 'quick'\ndatasets = 'digits'", "must be a list"),
        ("extends = 'quick'\ndatasets = ['digits', 'digits']", "'digits' is twice among the datasets"),
        ("extends = 'quick'\nseeds = [0, 0]", "0 is twice among the seeds"),
        ("extends = 'quick'\nseeds = 1.5", "seeds is 1.5; it must be a number of seeds"),
        ("extends = 'quick'\nseeds = 'abc'", "seeds is 'abc'"),
        ("extends = 'quick'\nseeds = [-1]", "a seed is -1"),
        ("extends = 'quick'\nepochs = true", "epochs is True"),
        ("extends = 'quick'\nvalidation = 'x'", "validation is 'x'"),
        ("extends = 'quick'\nschedule = 'step'", "schedule is 'step'; it must be a table"),
        ("extends = 'quick'\ncompare = 3", "compare is 3"),
        ("extends = 'mine.toml'", "mine.toml extends itself"),
        ("extends = 'quick'\n[optimizers.sgd]\nsearch = 3", "search in .*sgd.* is 3"),
        ("extends = 'quick'\n[optimizers.sgd]\nsearch = { lr = ['a', 'b'] }", "two numbers"),
        ("extends = 'quick'\n[optimizers.sgd]\nmodels = { resnet8 = 3 }", "models.resnet8 in .* is 3"),
        ("extends = 'quick'\n[optimizers.sgd]\nlabel = 3", "label in .* is 3"),
        ("extends = 'quick'\n[optimizers.sgd]\nlr = 2020-01-01", "which no optimizer takes"),
        ("extends = 'quick'\nmodels = ['vgg']", "unknown model 'vgg'; there are resnet8"),
        ("extends = 'quick'\ncompare = ['sgdd']", "unknown optimizer 'sgdd'"),
        ("extends = 'quick'\nseeds = 0", "there are no seeds"),
        ("extends = 'quick'\nvalidation = 1.0", "validation is 1.0"),
        ("extends = 'quick'\n[optimizers.x]\nlr = 1", r"\[optimizers.x\] has no class"),
        ("extends = 'quick'\n[schedule]\nkind = 'linear'", "unknown schedule 'linear'.*constant, step, cosine"),
        ("extends = 'quick'\n[schedule]\nkind = 'step'\nat = [9]\nfactor = 0.1", "shares of the training"),
        ("extends = 'quick'\n[schedule]\nkind = 'cosine'", "has the entries kind, warmup"),
        ("extends = 'quick'\n[optimizers.sgd]\nschedule = 'step'", "schedule in .optimizers.sgd. is 'step'"),
        (
            "extends = 'quick'\n[optimizers.sgd]\nschedule = { kind = 'linear' }",
            r"unknown schedule 'linear' \(kind\) in mine, \[optimizers.sgd\]",
        ),
        ("extends = 'quick'\n[optimizers.sgd]\nsearch = { lr = [1.0, 0.1] }", "search of lr.*two numbers"),
        ("datasets = ['digits']\nmodels = ['resnet8']\nbatch_size = 3", "there is no epochs"),
        ("optimizers = 3", "must be tables"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ProtocolError, match=message):
        protocol.load(path)


def test_an_optimizer_may_have_a_schedule_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("extends = 'quick'\n[optimizers.sgd]\nschedule = { kind = 'constant' }", encoding="utf-8")
    own = protocol.load(path)
    schedules = {spec.optimizer: spec.schedule["kind"] for spec in own.runs()}
    assert schedules == {name: "constant" if name == "sgd" else "step" for name in own.optimizers}


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("Adam", {}, "not an import path"),
        ("torch.optim.Adamm", {}, "there is no Adamm in torch.optim"),
        ("nowhere.Adam", {}, "cannot import nowhere.Adam.*Install"),
        ("torch.optim.Adam", {"learning_rate": 1}, "learning_rate.*It takes lr, betas"),
    ],
)
def test_what_is_wrong_with_an_optimizer_is_named(path: str, settings: dict[str, Any], message: str) -> None:
    spec = spec_of(optimizer_class=path, settings=settings)
    with pytest.raises(ProtocolError, match=message):
        optimizers.make(spec, [torch.nn.Parameter(torch.ones(1))])


def test_an_optimizer_that_wants_the_batch_size_gets_the_protocols() -> None:
    w = torch.nn.Parameter(torch.ones(1))
    assert optimizers.make(spec_of(batch_size=77), [w]).defaults["batch_size"] == 77
    stated = spec_of(batch_size=77, settings={"batch_size": 5})
    assert optimizers.make(stated, [w]).defaults["batch_size"] == 5


def test_the_identity_of_a_run_is_that_of_all_that_it_depends_on() -> None:
    spec = spec_of()
    others = {
        field.name: 7 if isinstance(value, int | float) else {"x": 1} if isinstance(value, dict) else "other"
        for field in dataclasses.fields(spec)
        for value in [getattr(spec, field.name)]
    }
    identities = {dataclasses.replace(spec, **{name: other}).identity for name, other in others.items()}
    assert len(identities | {spec.identity}) == len(others) + 1
    assert spec.identity == spec_of().identity
