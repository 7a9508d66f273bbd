"""Runs and searches that version 0.1 has begun can be continued."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from adabayes.lab import compatibility
from adabayes.lab.protocol import Spec
from adabayes.lab.run.training import _Position


def test_runs_of_version_0_1_keep_their_folders() -> None:
    spec = Spec(
        dataset="digits", model="resnet8", model_options={}, optimizer="sgd", optimizer_class="torch.optim.SGD",
        settings={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0005}, seed=0, epochs=1, batch_size=64,
        test_batch_size=360, schedule={"kind": "step", "at": [0.75], "factor": 0.1},
    )  # fmt: skip
    assert spec.identity == "64a7b0871e"
    for change in ({"data_options": {"examples": 9}}, {"tests_per_epoch": 2}, {"test_at_end": True}, {"length": 0.5}):
        assert replace(spec, **change).identity != spec.identity


def test_wrong_answers_of_version_0_1_become_the_sum_of_errors() -> None:
    old = {"epoch": 1, "step": 2, "loss": 3.0, "wrong": 4, "seen": 5, "seconds": 6.0}
    assert _Position(**compatibility.complete_position(old)) == _Position(1, 2, 3.0, [4], 5, 6.0)
    new = {"epoch": 1, "errors": [2.0, 3.0]}
    assert compatibility.complete_position(new) == new


def test_a_start_without_a_number_of_processes_had_one() -> None:
    assert compatibility.complete_start({"threads": 2}) == {"threads": 2, "processes": 1}
    assert compatibility.complete_start({"processes": 4}) == {"processes": 4}


def test_locks_of_optuna_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("journal.log", "journal.log.lock", "journal.log.lock.1a2b", "other.lock"):
        (tmp_path / name).touch()
    compatibility.remove_optuna_locks(tmp_path / "journal.log")
    assert {path.name for path in tmp_path.iterdir()} == {"journal.log", "other.lock"}
