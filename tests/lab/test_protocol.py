"""Protocols: the paper's has the paper's settings, and a user's own is read as expected."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st

from adabayes.cli import main
from adabayes.lab import models, optimizers, protocol, schema
from adabayes.lab.protocol import Execution, ProtocolError, lr_factor
from tests.lab.conftest import spec_of

NINE = ["sgd", "adam", "adagrad", "amsgrad", "adabound", "amsbound", "adamw", "adabayes-fp", "adabayes"]


@pytest.mark.parametrize("name", [name for name in protocol.NAMES if name != "demo"])
def test_every_protocol_compares_the_papers_optimizers_and_adabayes_k_and_can_make_them(name: str) -> None:
    found = protocol.load(name)
    names = NINE if name == "paper" else [*NINE, "adabayes-k"]
    assert list(found.optimizers) == names
    runs = found.runs()
    assert len(runs) == len(found.seeds) * len(found.datasets) * len(found.models) * len(names)
    assert len({spec.identity for spec in runs}) == len(runs)
    for spec in runs:
        w = torch.nn.Parameter(torch.ones(3))
        optimizer = optimizers.make(spec, torch.nn.ParameterList([w]))
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


def test_a_cosine_can_end_above_zero() -> None:
    schedule = {"kind": "cosine", "warmup": 0.05, "final": 0.1}
    assert [lr_factor(schedule, progress) for progress in (0.025, 0.05, 0.525, 1.0)] == pytest.approx(
        [0.5, 1.0, 0.55, 0.1]
    )


def test_nanogpts_recipe_has_its_steps_schedule_and_published_loss() -> None:
    """It has 2000 steps of 12 windows: 15,684 windows are 1307 steps per epoch."""
    anchor = protocol.load("anchors/nanogpt-cpu")
    (dataset,), (model,) = anchor.datasets, anchor.models
    assert anchor.published == {dataset: {model: {"adamw": [None, 1.88]}}}
    spec = anchor.runs()[0]
    assert spec.settings == {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1, "fused": True}
    assert round(spec.length * spec.epochs * 1307) == 2000
    assert [lr_factor(spec.schedule, step / 2000) for step in (50, 100, 2000)] == pytest.approx([0.5, 1.0, 0.1])
    assert sum(p.numel() for p in models.make(model, classes=65, context=64, **spec.model_options).parameters()) < 0.9e6


def test_deepobs_problem_has_its_batch_epochs_and_published_error() -> None:
    anchor = protocol.load("anchors/fmnist-2c2d")
    assert anchor.published == {"fashion-mnist": {"2c2d": {"adam": [7.66, None]}}}
    assert (anchor.batch_size, anchor.epochs, anchor.schedule) == (128, 100, {"kind": "constant"})
    assert anchor.optimizers["adam"].settings["lr"] == 2.5e-4


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
    made = optimizers.make(mine.runs()[1], torch.nn.Linear(1, 1))
    assert isinstance(made, torch.optim.RAdam)
    assert made.defaults["betas"] == (0.8, 0.9)
    (tmp_path / "other.toml").write_text("extends = 'mine.toml'\nseeds = [5, 7]")
    assert protocol.load(tmp_path / "other.toml").seeds == (5, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs = [", "is not TOML"),
        ("extends = 'nothing'", "no protocol '.*nothing'"),
        ("extends = 'quick'\nepoch = 3", "unknown entry 'epoch'; there may be .*Did you mean epochs"),
        ("extends = 'quick'\nepochs = 0", "epochs is 0; it must be a whole number of at least 1"),
        ("extends = 'quick'\nbatch_size = 1.5", "batch_size is 1.5"),
        ("extends = 'quick'\ndatasets = ['imagenet']", "unknown data set 'imagenet'; there are digits"),
        ("extends = 'quick'\ndatasets = 'digits'", "must be a list"),
        ("extends = 'quick'\ndatasets = ['digits', 'digits']", "'digits' occurs twice in datasets"),
        ("extends = 'quick'\nseeds = [0, 0]", "0 occurs twice in seeds"),
        ("extends = 'quick'\nseeds = 1.5", "seeds is 1.5; it must be a number of seeds"),
        ("extends = 'quick'\nseeds = 'abc'", "seeds is 'abc'"),
        ("extends = 'quick'\nseeds = [-1]", "seeds is .-1.; it must be a number of seeds, at most 10000, or a list"),
        ("extends = 'quick'\nepochs = true", "epochs is True"),
        ("extends = 'quick'\nvalidation = 'x'", "validation is 'x'"),
        ("extends = 'quick'\nschedule = 'step'", "schedule is 'step'; it must be a table"),
        ("extends = 'quick'\ncompare = 3", "compare is 3"),
        ("extends = 'mine.toml'", "mine.toml extends itself"),
        (
            "extends = 'quick'\n[optimizers.sgd]\nsearch = 3",
            "optimizers.sgd.search is 3; it must be a table, like . lr",
        ),
        ("extends = 'quick'\n[optimizers.sgd]\nsearch = { lr = ['a', 'b'] }", "sgd.search.lr is .*two numbers"),
        ("extends = 'quick'\n[optimizers.sgd]\nmodels = { resnet8 = 3 }", "optimizers.sgd.models.resnet8 is 3"),
        ("extends = 'quick'\n[optimizers.sgd]\nlabel = 3", "optimizers.sgd.label is 3; it must be a text of one line"),
        (
            "extends = 'quick'\n[optimizers.sgd]\nlr = 2020-01-01",
            r"optimizers.sgd.lr is datetime.date\(2020, 1, 1\); it must be a number",
        ),
        ("extends = 'quick'\nmodels = ['vgg']", "unknown model 'vgg'; there are resnet8"),
        ("extends = 'quick'\ncompare = ['sgdd']", "unknown optimizer 'sgdd'.*Did you mean sgd"),
        ("extends = 'quick'\nseeds = 0", "there are no seeds"),
        ("extends = 'quick'\nvalidation = 1.0", "validation is 1.0"),
        ("extends = 'quick'\n[optimizers.x]\nlr = 1", r"\[optimizers.x\] has no class"),
        (
            "extends = 'quick'\n[schedule]\nkind = 'linear'",
            "schedule.kind is 'linear'; it must be one of constant, step, cosine",
        ),
        (
            "extends = 'quick'\n[schedule]\nkind = 'step'\nat = [9]\nfactor = 0.1",
            r"schedule.at\[0\] is 9; it must be a share",
        ),
        (
            "extends = 'quick'\n[schedule]\nkind = 'cosine'",
            "there is no warmup in schedule; there must be kind, warmup",
        ),
        (
            "extends = 'quick'\n[optimizers.sgd]\nschedule = 'step'",
            "optimizers.sgd.schedule is 'step'; it must be a table",
        ),
        (
            "extends = 'quick'\n[optimizers.sgd]\nschedule = { kind = 'linear' }",
            "mine.toml: optimizers.sgd.schedule.kind is 'linear'",
        ),
        (
            "extends = 'quick'\n[optimizers.sgd]\nsearch = { lr = [1.0, 0.1] }",
            r"sgd.search.lr is \[1.0, 0.1\]; it must be two numbers",
        ),
        ("datasets = ['digits']\nmodels = ['resnet8']\nbatch_size = 3", "there is no epochs"),
        ("optimizers = 3", "must be tables"),
        (
            "extends = 'quick'\n[optimizers.sgd]\ncolour = 'red'",
            "optimizers.sgd.colour is 'red'; it must be two colours",
        ),
        (
            "extends = 'quick'\n[optimizers.sgd]\ncolour = ['#000000', '#00000\"']",
            "optimizers.sgd.colour is .*; it must be two colours",
        ),
        ("extends = 'quick'\n[optimizers.sgd]\ndash = 'long'", "dash is 'long'; it must be one of solid, dash"),
        ("extends = 'quick'\n[optimizers.sgd]\nclass = 'x; y'", "class is 'x; y'; it must be an import path"),
        ("extends = 'quick'\n[optimizers.sgd]\nmodels.resnet9 = {}", "unknown model 'resnet9'.*Did you mean resnet8"),
        ("extends = 'quick'\npublished.digits.resnet8.sgd = 3", "published.digits.resnet8.sgd is 3; .* two numbers"),
        (
            "extends = 'quick'\npublished.digits.resnet8.sgd = [1, 'x']",
            "published.digits.resnet8.sgd is .* two numbers",
        ),
        ("extends = 'quick'\npublished.digits.resnet8.sgdd = [1, 2]", "unknown optimizer 'sgdd' .published"),
        ("extends = 'quick'\npublished.digit.resnet8.sgd = [1, 2]", "unknown data set 'digit'.*Did you mean digits"),
        ("extends = 'quick'\npublished.digits = 3", "published.digits is 3"),
        ("extends = 'quick'\npublished.digits.resnet8.sgd = { los = 1 }", "or a table of one of them"),
        ("extends = 'quick'\nlength = 0", "length is 0; it must be a share, above 0 and at most 1"),
        ("extends = 'quick'\nseeds = 1_000_000_000_000", "seeds is 1000000000000; .*at most 10000"),
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
        ("torch.optim.Adamm", {}, r"there is no Adamm in torch.optim. Did you mean Adam\?"),
        ("nowhere.Adam", {}, "cannot import nowhere.Adam.*Install"),
        ("torch.optim.Adam", {"learning_rate": 1}, "learning_rate.*It takes lr, betas"),
        ("torch.optim.SGD", {"lrr": 1}, r"lrr.*It takes lr, momentum.*Did you mean lr\?"),
        ("torch.optim.SGD", {"lr": -1}, "torch.optim.SGD with .*: Invalid learning rate: -1"),
        ("torch.optim.SGD", {"lr": "x"}, "torch.optim.SGD with "),
        ("torch.optim.lr_scheduler.LRScheduler", {}, "must be a class derived from torch.optim.Optimizer"),
        ("os.system", {"command": "true"}, "os.system is not an optimizer"),
        ("..x", {}, "cannot import ..x: TypeError"),
    ],
)
def test_what_is_wrong_with_an_optimizer_is_named(path: str, settings: dict[str, Any], message: str) -> None:
    spec = spec_of(optimizer_class=path, settings=settings)
    with pytest.raises(ProtocolError, match=message):
        optimizers.check([spec_of(), spec])


def run(*arguments: str | Path) -> int | str | None:
    """Run a command in this process, and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


@pytest.mark.parametrize(
    "command",
    [
        ("reproduce", "--dry-run"),
        ("reproduce",),
        ("reproduce", "--jobs", "2"),
        ("tune", "--budget", "1"),
        ("train", "--optimizer", "mine"),
    ],
    ids=" ".join,
)
def test_a_class_that_is_not_an_optimizer_is_never_called_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.toml"
    path.write_text(
        f"extends = 'quick'\ncompare = ['sgd', 'mine']\n[optimizers.mine]\nclass = 'pydoc.pipepager'\n"
        f"cmd = 'touch {tmp_path / 'called'}'\nsearch = {{ lr = [0.1, 1.0] }}\n"
    )
    assert run(*command, "--protocol", path) == 1
    assert "pydoc.pipepager is not an optimizer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_a_module_that_breaks_when_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, text, message in (
        ("exits", "raise SystemExit(3)", "cannot import exits.X: SystemExit: 3"),
        ("divides", "1 / 0", "cannot import divides.X: ZeroDivisionError"),
        ("wrong", "def", "cannot import wrong.X: SyntaxError"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ProtocolError, match=message):
            optimizers.check([spec_of(optimizer_class=f"{name}.X")])


def test_a_seed_that_could_not_be_read_again_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"seed is .*; it must be a whole number of at most 64 bits"):
        optimizers.check([spec_of(seed=2**63)])
    optimizers.check([spec_of(seed=-1)])


def test_a_misspelt_setting_is_reported_once_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", "--optimizer", "sgd", "--set", "lrr=1", "--out", tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "Did you mean lr?" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["reproduce", "--protocol", "quik"], "quick"),
        (["reproduce", "--optimizers", "AdaBayess"], "adabayes"),
        (["reproduce", "--dataset", "cifar-10"], "cifar10"),
        (["reproduce", "--model", "resnet-8"], "resnet8"),
        (["train", "--optimizer", "SGD"], "sgd"),
    ],
)
def test_what_was_meant_is_asked(arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 1
    assert f"Did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "/../../../../escaped/x",
        "a/b",
        "a\\b",
        "..",
        "",
        "CON",
        "lpt1.txt",
        "x.",
        "x ",
        "a:b",
        "a\0b",
        "a\x1b[0m",
        "é" * 51,
    ],
)
def test_a_name_that_is_no_file_name_everywhere_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.toml"
    optimizer = {"class": "torch.optim.SGD"}
    for table in (
        {"extends": "quick", "optimizers": {name: optimizer}},
        {"extends": "quick", "presets": {name: {"label": "x", "optimizers": []}}},
    ):
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
        with pytest.raises(ProtocolError, match="a name that a file can have on every system"):
            protocol.load(path)


@pytest.mark.parametrize("name", ["my sgd v1.0", "😀", "naïve", "a=b", "x" * 100, "con-x", ".hidden", "mine[v2]"])
def test_ordinary_names_are_names_of_folders_as_they_are(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.toml"
    optimizer = {"class": "torch.optim.SGD"}
    path.write_text(tomli_w.dumps({"extends": "quick", "compare": [name], "optimizers": {name: optimizer}}), "utf-8")
    mine = protocol.load(path)
    spec = mine.runs()[0]
    assert mine.name == name
    assert spec.folder == f"digits-resnet8-{name}-seed0-{spec.identity}"
    (tmp_path / spec.folder).mkdir()


@pytest.mark.parametrize("stem", [".", "..", "x ", "con", "a:b", "x" * 101])
def test_the_name_of_a_protocol_is_checked_because_it_becomes_a_folder(tmp_path: Path, stem: str) -> None:
    path = tmp_path / f"{stem}.toml"
    path.write_text("extends = 'quick'")
    with pytest.raises(ProtocolError, match="the name of the file"):
        protocol.load(path)


def test_presets_that_would_be_the_same_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    for names in (["Mine", "mine"], ["\u00e9", "e\u0301"], ["ALL"], ["train"]):
        presets = {name: {"label": name, "optimizers": ["sgd"]} for name in names}
        path.write_text(tomli_w.dumps({"extends": "quick", "presets": presets}), encoding="utf-8")
        with pytest.raises(ProtocolError, match="exists already"):
            protocol.load(path)


def test_runs_never_meet_where_case_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    names = ["SGD", "sgd", "\u00e9", "e\u0301"]
    table = {"extends": "quick", "compare": names, "optimizers": {name: {"class": "torch.optim.SGD"} for name in names}}
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    folders = [spec.folder for spec in protocol.load(path).runs()]
    assert schema.meeting(folders) is None


def test_how_a_run_is_computed_is_part_of_it() -> None:
    quick = protocol.load("quick")
    execution = Execution("meta", channels_last=False, autocast=True, compile=True)
    for spec in quick.runs(execution):
        assert (spec.device, spec.channels_last, spec.autocast, spec.compile) == ("meta", False, True, True)
    assert quick.runs(Execution()) == quick.runs()


def test_a_new_colour_leaves_the_published_figures_and_the_runs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("extends = 'paper'\n[optimizers.sgd]\ncolour = ['#000000', '#FFFFFF']\ndash = 'dot'\n")
    mine, paper = protocol.load(path), protocol.load("paper")
    assert mine.published == paper.published
    assert mine.runs() == paper.runs()
    assert (mine.optimizers["sgd"].colour, mine.optimizers["sgd"].dash) == (("#000000", "#FFFFFF"), "dot")


def test_an_optimizer_that_wants_the_batch_size_gets_the_protocols() -> None:
    w = torch.nn.Parameter(torch.ones(1))
    assert optimizers.make(spec_of(batch_size=77), torch.nn.ParameterList([w])).defaults["batch_size"] == 77
    stated = spec_of(batch_size=77, settings={"batch_size": 5})
    assert optimizers.make(stated, torch.nn.ParameterList([w])).defaults["batch_size"] == 5
    unknown = spec_of(batch_size=77, settings={"batch_size": "unknown"})
    assert optimizers.make(unknown, torch.nn.ParameterList([w])).defaults["batch_size"] is None


def test_the_identity_of_a_run_is_that_of_all_that_it_depends_on() -> None:
    spec = spec_of()
    others: dict[str, Any] = {
        field.name: 7 if isinstance(value, int | float) else {"x": 1} if isinstance(value, dict) else "other"
        for field in dataclasses.fields(spec)
        for value in [getattr(spec, field.name)]
    }
    identities = {dataclasses.replace(spec, **{name: other}).identity for name, other in others.items()}
    assert len(identities | {spec.identity}) == len(others) + 1
    assert spec.identity == spec_of().identity
