"""What version 0.2 of the lab has written keeps its meaning: AdaBayes-K moved matrices as far as vectors there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState, create_trial
from torch import nn

from adabayes import AdaBayesK
from adabayes.lab import compatibility, optimizers, protocol, suite, tuning
from adabayes.lab.data import Data
from adabayes.lab.protocol import PROTOCOL, Protocol, Spec
from adabayes.lab.run.folder import RunFolder, folder_of
from adabayes.lab.run.training import Interrupted, Watch, train
from adabayes.rates import MATRIX_SCALE
from tests.lab.conftest import spec_of, without_times

RECORDS = suite.read(Path(__file__).parents[2] / "evidence")
EVERY_RECORD = pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record.name))

TUNED_BY_0_2 = """\
# Written by adabayes tune: the best settings that it found for each optimizer. Validation errors:
# adabayes-k 1.111, of 3 trials

description = "quick, tuned"
extends = "quick"
datasets = [
    "digits",
]
models = [
    "resnet8",
]
epochs = 12
compare = [
    "adabayes-k",
]

[optimizers.adabayes-k]
lr = 0.0127
weight_decay = 0.05

[optimizers.adabayes-k.models]
"""


def scale_of(spec: Spec) -> Any:
    """Return the scale of the optimizer that a run is made with."""
    optimizer = optimizers.make(spec, nn.Linear(2, 2))
    assert isinstance(optimizer, AdaBayesK)
    return optimizer.param_groups[0]["matrix_scale"]


def adabayes_k(chosen: Protocol) -> Spec:
    return chosen.narrowed(optimizers=["adabayes-k"], seeds=1).runs()[0]


def of_0_2(spec: Spec) -> Spec:
    """Return the run as version 0.2 specified it."""
    return replace(spec, settings={name: value for name, value in spec.settings.items() if name != "matrix_scale"})


def load(text: str, folder: Path) -> Protocol:
    (folder / "mine.toml").write_text(text)
    return protocol.load(folder / "mine.toml")


# Runs


@EVERY_RECORD
def test_recorded_runs_are_those_of_todays_protocols(record: suite.Record) -> None:
    """So they are not run again, and other runs are not taken for them."""
    found = protocol.load(f"suite/{record.name}")
    assert [trial.run for trial in record.trials] == [spec.identity for spec in suite.trials(found, suite.BUDGET)]
    finals = {spec.identity for spec in suite.finals(found, record.chosen)}
    assert {run.run for run in record.finals if run.length == 1} == finals


@EVERY_RECORD
def test_recorded_settings_mean_a_scale_of_1(record: suite.Record) -> None:
    found = protocol.load(f"suite/{record.name}")
    specs = suite.finals(found, {"adabayes-k": record.chosen["adabayes-k"]})
    assert {scale_of(spec) for spec in specs} == {1}


def test_a_stored_run_is_found_with_its_scale(tmp_path: Path) -> None:
    (record,) = (record for record in RECORDS if record.name == "digits")
    (stored,) = (run for run in record.runs("adabayes-k") if run.seed == 0)
    (spec,) = suite.finals(
        replace(protocol.load("suite/digits"), seeds=(0,)), {"adabayes-k": record.chosen["adabayes-k"]}
    )
    folder = RunFolder(tmp_path / "runs" / f"digits-resnet8-adabayes-k-seed0-{stored.run}")
    folder.path.mkdir(parents=True)
    folder.write("spec.json", asdict(of_0_2(spec)))
    folder.write("result.json", {"status": "done"})
    assert folder_of(spec, tmp_path).status() == "done"
    read = folder.spec()
    assert read is not None
    assert read.identity == stored.run
    assert scale_of(read) == 1


@pytest.mark.parametrize("name", ["quick", "mini", "text", "anchors/nanogpt-cpu", "anchors/fmnist-2c2d"])
def test_new_runs_name_their_scale_and_are_not_taken_for_old_ones(name: str) -> None:
    spec = adabayes_k(protocol.load(name))
    assert spec.settings["matrix_scale"] == scale_of(spec) == MATRIX_SCALE
    assert spec.identity != of_0_2(spec).identity
    assert scale_of(of_0_2(spec)) == 1


def test_a_scale_of_1_that_is_named_is_the_same_run() -> None:
    spec = of_0_2(adabayes_k(protocol.load("quick")))
    for one in (1, 1.0):
        named = replace(spec, settings={**spec.settings, "matrix_scale": one})
        assert named.identity == spec.identity
        assert scale_of(named) == 1


def test_other_optimizers_may_have_a_setting_of_this_name() -> None:
    settings = {"lr": 0.1, "matrix_scale": 1}
    spec = replace(spec_of("sgd"), optimizer_class="mine.Shampoo", settings=settings)
    assert spec.identity != replace(spec, settings={"lr": 0.1}).identity
    assert compatibility.complete_settings("mine.Shampoo", {"lr": 0.1}) == {"lr": 0.1}
    assert compatibility.settings_to_store("mine.Shampoo", settings) == settings


@pytest.mark.parametrize(
    "path", ["adabayes.AdaBayesK", "adabayes.optim.AdaBayesK", "adabayes.optim.adabayes_k.AdaBayesK"]
)
def test_all_import_paths_are_the_same_optimizer(path: str, tmp_path: Path) -> None:
    text = f"extends = 'quick'\ncompare = ['mine']\n[optimizers.mine]\nclass = '{path}'\nlr = 1e-3\n"
    (spec, *_) = load(text, tmp_path).runs()
    assert scale_of(spec) == MATRIX_SCALE
    assert scale_of(of_0_2(spec)) == 1


def test_a_checkpoint_goes_on_with_a_scale_of_1(tmp_path: Path, digits: Data) -> None:
    """Its optimizer's groups have no ``matrix_scale``, either."""
    spec = replace(of_0_2(adabayes_k(protocol.load("quick"))), epochs=1, model_options={"width": 4}, batch_size=256)
    whole, stopped = (RunFolder(tmp_path / name) for name in ("whole", "stopped"))
    train(spec, whole, digits)
    steps = iter([False] * 3)
    with pytest.raises(Interrupted):
        train(spec, stopped, digits, watch=Watch(should_stop=lambda: next(steps, True)))
    (number, *_) = stopped.checkpoints()
    tree = stopped.load()
    (state,) = find(tree, "param_groups")
    for group in state["param_groups"]:
        assert group.pop("matrix_scale") == 1
    stopped.save(number, tree)
    train(spec, stopped, digits)
    assert without_times(stopped.metrics()) == without_times(whole.metrics())
    other = RunFolder(tmp_path / "other")
    train(replace(spec, settings={**spec.settings, "matrix_scale": MATRIX_SCALE}), other, digits)
    assert without_times(other.metrics()) != without_times(whole.metrics())


def find(tree: Any, key: str) -> list[Any]:
    """Return all tables in a tree that have a key."""
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    found = [table for branch in below for table in find(branch, key)]
    return [tree, *found] if isinstance(tree, dict) and key in tree else found


# Protocols


def test_a_protocol_that_a_user_writes_has_the_default(tmp_path: Path) -> None:
    text = "extends = 'quick'\ncompare = ['adabayes-k']\n[optimizers.adabayes-k]\nlr = 2e-3\n"
    spec = load(text, tmp_path).runs()[0]
    assert spec.settings["lr"] == 2e-3
    assert scale_of(spec) == MATRIX_SCALE
    assert scale_of(load(f"{text}matrix_scale = 3\n", tmp_path).runs()[0]) == 3
    assert scale_of(load(f"{text}matrix_scale = 1\n", tmp_path).runs()[0]) == 1


@pytest.mark.parametrize("name", ["demo", *(f"suite/{name}" for name in protocol.WORKLOADS)])
def test_the_suite_and_the_demo_have_the_scale_of_the_records(name: str) -> None:
    assert scale_of(adabayes_k(protocol.load(name))) == 1


def test_a_stored_protocol_means_a_scale_of_1() -> None:
    entry = json.loads(json.dumps(asdict(protocol.load("quick"))))
    del entry["optimizers"]["adabayes-k"]["settings"]["matrix_scale"]
    PROTOCOL("", entry)
    assert scale_of(adabayes_k(Protocol.restored(entry))) == 1


def test_a_tuned_file_means_the_scale_that_it_was_tuned_for(tmp_path: Path) -> None:
    (spec, *_) = load(TUNED_BY_0_2, tmp_path).runs()
    assert (spec.settings["lr"], scale_of(spec)) == (0.0127, 1)
    (tmp_path / "tuned.toml").write_text(TUNED_BY_0_2)
    (spec, *_) = load("extends = 'tuned.toml'\ncompare = ['adabayes-k']\n", tmp_path).runs()
    assert scale_of(spec) == 1


@pytest.mark.parametrize("name", ["quick", "suite/digits"])
def test_a_new_tuned_file_names_the_scale(name: str, tmp_path: Path) -> None:
    chosen = protocol.load(name).narrowed(optimizers=["adabayes-k", "adamw"])
    trial = create_trial(state=TrialState.COMPLETE, value=1.0)
    searches = [tuning.Search(optimizer, (trial,)) for optimizer in chosen.optimizers.values()]
    path = tmp_path / "tuned.toml"
    tuning.write_protocol(chosen, Path(protocol.__file__).parent / "protocols" / f"{name}.toml", searches, path)
    scale = scale_of(adabayes_k(chosen))
    assert f"matrix_scale = {float(scale)}" in path.read_text()
    tuned = protocol.load(path)
    assert scale_of(adabayes_k(tuned)) == scale
    assert "matrix_scale" not in tuned.optimizers["adamw"].settings
