"""Tasks beyond classification: their losses and errors, and runs that train, test and resume with them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adabayes.lab import data
from adabayes.lab.data import Data, DataError, Points, Vectors
from adabayes.lab.protocol import Spec
from adabayes.lab.run.folder import RunFolder
from adabayes.lab.run.training import Interrupted, Watch, train
from adabayes.lab.tasks import Poisson, Reconstruction, Regression

from .conftest import spec_of, without_times


def vectors(task: str) -> Vectors:
    random = np.random.default_rng(0)
    x = random.standard_normal((300, 5)).astype(np.float32)
    y = (x @ random.standard_normal(5) + 0.1 * x[:, 0] ** 2).astype(np.float32)
    if task == "regression":
        rows, targets = torch.from_numpy(x), torch.from_numpy(y)
        return Vectors(rows[:200], targets[:200], rows[200:], targets[200:], Regression("metres", 2.0))
    pixels = torch.from_numpy(random.integers(0, 256, (300, 8), dtype=np.uint8))
    return Vectors(pixels[:200], None, pixels[200:], None, Reconstruction())


KINDS: dict[str, tuple[Data, str]] = {
    "regression": (vectors("regression"), "mlp"),
    "reconstruction": (vectors("reconstruction"), "autoencoder"),
    "poisson": (Points(size=200, grid=8), "pinn"),
}


def spec_for(kind: str, **options: Any) -> Spec:
    model = {"widths": [16, 16]}
    given = {"dataset": kind, "model": KINDS[kind][1], "model_options": model, "batch_size": 32, "test_batch_size": 30}
    given["settings"] = {"lr": 0.01}
    return spec_of("adabayes-k", **{**given, **options})


def test_the_exact_solution_has_neither_loss_nor_error() -> None:
    points = Points(size=500, grid=20)

    def exact(at: Tensor) -> Tensor:
        return sum((a * torch.sin(torch.pi * k * at).prod(1, keepdim=True) for k, a in points.waves), torch.tensor(0.0))

    task = points.task
    mean_square = points.test_batch(torch.arange(400))[1][:, 1].square().mean()  # over a period
    for inputs, targets in (
        points.train_batch(torch.arange(500), torch.Generator()),
        points.test_batch(torch.arange(400)),
    ):
        loss, output = task.loss(exact, inputs, targets)
        assert loss < 1e-6
        assert task.value(task.sums(output, targets).tolist(), 1) < 1e-3
        wrong, output = task.loss(lambda at: 1.1 * exact(at), inputs, targets)
        interior = targets[:, 2] == 0
        expected = (0.1 * targets[interior, 1]).square().sum() / len(targets) / mean_square
        torch.testing.assert_close(wrong, expected, rtol=1e-2, atol=0.0)
        assert task.value(task.sums(output, targets).tolist(), 1) == pytest.approx(10, rel=1e-3)


def test_a_fifth_of_the_points_is_on_the_boundary_and_pays_for_what_is_not_zero_there() -> None:
    inputs, targets = Points().train_batch(torch.arange(1000), torch.Generator())
    at_edge = targets[:, 2] > 0
    assert at_edge.sum() == 200
    assert ((inputs == 0) | (inputs == 1)).any(1).equal(at_edge)
    assert len(inputs[at_edge].eq(0).any(0).nonzero()) == 2  # on all sides
    assert len(inputs[at_edge].eq(1).any(0).nonzero()) == 2
    loss, _ = Poisson(boundary=7.0).loss(lambda at: 0.5 + 0 * at[:, :1] ** 2, inputs[at_edge], targets[at_edge])
    assert loss.item() == pytest.approx(7.0 * 0.25)


def test_regression_reports_the_error_in_the_targets_unit() -> None:
    task = Regression("minutes", scale=45.0)
    output, targets = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 1.0])
    loss, _ = task.loss(lambda _: output[:, None], output, targets)
    assert loss.item() == pytest.approx(3.0)
    assert task.value(task.sums(output, targets).tolist(), 3) == pytest.approx(45 * math.sqrt(3))
    assert task.error == "RMSE, minutes"


def test_reconstruction_is_cross_entropy_summed_over_pixels() -> None:
    images, logits = torch.rand(4, 6), torch.randn(4, 6)
    loss, _ = Reconstruction().loss(lambda _: logits, images, images)
    shares = logits.sigmoid()
    expected = -(images * shares.log() + (1 - images) * (1 - shares).log()).sum(1).mean()
    torch.testing.assert_close(loss, expected)
    sums = Reconstruction().sums(logits, images)
    assert Reconstruction().value(sums.tolist(), 4) == pytest.approx((shares - images).square().mean().sqrt().item())


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_every_task_learn_and_resume_bit_for_bit(kind: str, tmp_path: Path) -> None:
    examples, spec = KINDS[kind][0], spec_for(kind, epochs=6, tests_per_epoch=3)
    whole = RunFolder(tmp_path / "whole")
    assert train(spec, whole, examples) == "done"
    rows = whole.metrics()
    assert rows[-1]["test_loss"] < rows[0]["test_loss"]
    stops = iter([False] * 10 + [True])
    folder = RunFolder(tmp_path / "stopped")
    with pytest.raises(Interrupted):
        train(spec, folder, examples, watch=Watch(should_stop=lambda: next(stops)))
    train(spec, folder, examples)
    assert without_times(folder.metrics()) == without_times(rows)
    assert without_times(folder.metrics("curve.jsonl")) == without_times(whole.metrics("curve.jsonl"))


def test_tests_within_an_epoch_change_nothing_of_the_training(digits: Data, tmp_path: Path) -> None:
    spec = spec_of("adabayes", epochs=2)
    folders = {tests: RunFolder(tmp_path / str(tests)) for tests in (1, 4)}
    for tests, folder in folders.items():
        train(replace(spec, tests_per_epoch=tests), folder, digits)
    assert without_times(folders[1].metrics()) == without_times(folders[4].metrics())
    curve = folders[4].metrics("curve.jsonl")
    assert [row["epoch"] for row in curve] == pytest.approx([0.25, 0.5, 0.75, 1.25, 1.5, 1.75], abs=0.05)
    seconds = [row["seconds"] for row in curve]
    assert seconds == sorted(seconds)
    assert folders[4].metrics()[0]["train_seconds"] < curve[3]["seconds"]
    assert not folders[1].metrics("curve.jsonl")


def test_the_test_set_is_used_once_at_the_end_where_training_data_is_held_out(digits: Data, tmp_path: Path) -> None:
    held, plain = RunFolder(tmp_path / "held"), RunFolder(tmp_path / "plain")
    spec = spec_of("sgd", epochs=1, validation=0.25)
    train(replace(spec, test_at_end=True), held, digits)
    train(spec, plain, digits)
    assert without_times(held.metrics()) == without_times(plain.metrics())
    result, plain_result = held.read("result.json"), plain.read("result.json")
    assert result is not None
    assert plain_result is not None
    assert result["test_loss"] != held.metrics()[-1]["test_loss"]
    assert result["test_error"] * 359 / 100 == pytest.approx(round(result["test_error"] * 359 / 100))
    assert "test_loss" not in plain_result


def test_fewer_examples_and_no_augmentation(digits: Data) -> None:
    few = data.load("digits", options={"examples": 100, "augment": False})
    assert few.count("train") == 100
    assert few.count("test") == digits.count("test")
    x, _ = few.train_batch(torch.arange(100), torch.Generator().manual_seed(0))
    again, _ = few.train_batch(torch.arange(100), torch.Generator().manual_seed(1))
    assert x.equal(again)
    text = data.load("stdlib", options={"examples": 50})
    assert text.count("train") == 50
    text.train_batch(torch.arange(50), torch.Generator())
    for wrong in ({"examples": 0}, {"examples": 2000}, {"exampels": 3}):
        with pytest.raises(DataError, match=r"data set digits|of data set digits"):
            data.load("digits", options=wrong)


def test_the_flights_are_standardised_and_split(tmp_path: Path) -> None:
    flights = data.load("flights")
    x, y = flights.train_batch(torch.arange(flights.count("train")), torch.Generator())
    assert x.shape == (261_877, 137)
    assert abs(float(y.mean())) < 0.01
    assert float(y.std()) == pytest.approx(1, abs=0.02)
    assert x[:, 7:].sum(1).unique().tolist() == [4.0]  # a weekday, an airline, two airports
    assert (x[:, 0] * y).mean() > 0.8  # who leaves late arrives late
