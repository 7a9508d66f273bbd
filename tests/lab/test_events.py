"""TensorBoard: it reads the logged values, during a run and after an interruption."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from adabayes.lab.data import Data
from adabayes.lab.run.folder import RunFolder
from adabayes.lab.run.training import Interrupted, Watch, train
from tests.lab.conftest import adabayes, spec_of, start


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)] if tag in reader.Tags()["scalars"] else []


def test_events_hold_the_log_of_a_run_that_was_interrupted(digits: Data, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    stops = iter([False] * 15 + [True])  # in the second epoch
    with pytest.raises(Interrupted):
        train(spec_of(), folder, digits, watch=Watch(should_stop=lambda: next(stops)), tensorboard=True)
    assert len(scalars(tmp_path, "loss/test")) == 1
    train(spec_of(), folder, digits, tensorboard=True)
    rows = folder.metrics()
    for tag, key in (("loss/test", "test_loss"), ("error/train", "train_error"), ("regime/Adam-like", "adam_like")):
        expected: list[Any] = [(row["epoch"] + 1, pytest.approx(row[key], rel=1e-6)) for row in rows]
        assert scalars(tmp_path, tag) == expected
    reader = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    reader.Reload()
    histograms = reader.Histograms("log10 of gain")
    sampled = [sum(map(len, row["gain"])) for row in folder.metrics("rates.jsonl")]
    assert [histogram.histogram_value.num for histogram in histograms] == sampled


def test_events_come_while_runs_go_on_and_also_of_runs_that_are_done(tmp_path: Path) -> None:
    command = ("reproduce", "--optimizers", "sgd,adabayes", "--seeds", "1", "--epochs", "4", "--out", tmp_path)
    process = start(*command, "--tensorboard", "--jobs", "2")
    seen_live = False
    while process.poll() is None:
        found = [scalars(path.parent, "error/test") for path in tmp_path.rglob("events.out*")]
        seen_live = seen_live or any(0 < len(points) < 4 for points in found)
        time.sleep(0.05)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert seen_live
    folders = sorted((tmp_path / "runs").iterdir())
    assert [len(scalars(folder, "error/test")) for folder in folders] == [4, 4]
    for path in tmp_path.rglob("events.out*"):
        path.unlink()
    assert adabayes(*command, "--tensorboard").returncode == 0
    assert [len(scalars(folder, "error/test")) for folder in folders] == [4, 4]
