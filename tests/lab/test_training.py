"""One run: training, testing and logging."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from adabayes.lab import data
from adabayes.lab.data import Data, Images
from adabayes.lab.protocol import Spec
from adabayes.lab.run import training
from adabayes.lab.run.folder import RunFolder
from adabayes.lab.run.training import Progress, Watch, train
from tests.lab.conftest import spec_of, without_times


def rows(spec: Spec, digits: Data, path: Path, **options: Any) -> list[dict[str, Any]]:
    folder = RunFolder(path)
    train(spec, folder, digits, **options)
    return folder.metrics()


def test_a_run_is_determined_by_its_specification(digits: Data, tmp_path: Path) -> None:
    first, again, other = (
        without_times(rows(spec, digits, tmp_path / str(i)))
        for i, spec in enumerate([spec_of(), spec_of(), spec_of(seed=1)])
    )
    assert first == again
    assert first != other


def test_what_one_did_before_does_not_matter_and_is_not_disturbed(digits: Data, tmp_path: Path) -> None:
    first = rows(spec_of(), digits, tmp_path / "a")
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    again = rows(spec_of(), digits, tmp_path / "b")
    assert without_times(first) == without_times(again)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_optimizers_start_from_the_same_weights(digits: Data) -> None:
    states = [training.make(spec_of(name), digits)[0].state_dict() for name in ("sgd", "adabayes")]
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values()))


def test_training_is_what_a_plain_loop_does(digits: Data, tmp_path: Path) -> None:
    """Compare with the same network, batches, learning rates and figures, written out."""
    spec = spec_of("sgd", epochs=4, test_batch_size=100)
    found = rows(spec, digits, tmp_path)
    model, _ = training.make(spec, digits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for epoch in range(4):
        order = torch.randperm(digits.count("train"), generator=training._generator(0, "order", epoch))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 if epoch < 3 else 0.01
        losses, wrong = 0.0, 0
        model.train()
        for step, indices in enumerate(torch.split(order, spec.batch_size)):
            x, y = digits.train_batch(indices, training._generator(0, "augment", epoch, step))
            output = model(x)
            loss = F.cross_entropy(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += loss.item() * len(y)
            wrong += int((output.argmax(1) != y).sum())
        model.eval()
        x, y = digits.test_batch(torch.arange(digits.count("test")))
        with torch.no_grad():
            output = model(x)
        assert found[epoch]["train_loss"] == pytest.approx(losses / 1438, rel=1e-6)
        assert found[epoch]["train_error"] == 100 * wrong / 1438
        assert found[epoch]["test_loss"] == pytest.approx(F.cross_entropy(output, y).item(), rel=1e-4)
        assert found[epoch]["test_error"] == pytest.approx(100 * (output.argmax(1) != y).double().mean().item())
        assert found[epoch]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])


def test_the_short_last_batch_is_kept(digits: Data, tmp_path: Path) -> None:
    (row,) = rows(spec_of(epochs=1, batch_size=500), digits, tmp_path)
    assert row["steps"] == 3


def test_regimes_are_logged_of_the_pair_and_of_no_other(digits: Data, tmp_path: Path) -> None:
    for name in ("adabayes", "adabayes-fp"):
        row = rows(spec_of(name, epochs=1), digits, tmp_path / name)[-1]
        assert row["sgd_like"] + row["adam_like"] == pytest.approx(1)
        assert 0 < row["lr_5%"] <= row["lr_50%"] <= row["lr_95%"] <= 0.1
    assert "sgd_like" not in rows(spec_of("adamw", epochs=1), digits, tmp_path / "adamw")[-1]


def test_a_run_that_diverges_is_recorded_as_such(digits: Data, tmp_path: Path) -> None:
    spec = spec_of("sgd", settings={"lr": 1e20}, epochs=3)
    folder = RunFolder(tmp_path)
    assert train(spec, folder, digits) == "diverged"
    assert folder.status() == "diverged"
    assert len(folder.metrics()) < 3
    assert train(spec, folder, digits) == "diverged"  # is not tried again


def test_with_a_validation_split_the_test_set_is_not_looked_at(digits: Data, tmp_path: Path) -> None:
    assert isinstance(digits, Images)
    spoilt = Images(**{**vars(digits), "test_y": digits.test_y * 0 + 99})  # would be out of range
    (row,) = rows(spec_of(epochs=1, validation=0.2), spoilt, tmp_path)
    assert math.isfinite(row["test_loss"])
    with pytest.raises(ValueError, match="validation 1e-05 leaves no example to test on"):
        rows(spec_of(validation=1e-5), digits, tmp_path / "none")


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("schedulefree.AdamWScheduleFree", {"lr": 0.01}),
        ("ivon.IVON", {"lr": 0.1, "ess": 1438}),
        ("torch.optim.RAdam", {"lr": 0.01}),
        ("adabound.AdaBound", {"lr": 0.01}),
    ],
)
@pytest.mark.filterwarnings("ignore:This overload of add:UserWarning")
def test_optimizers_of_other_packages_learn_and_resume(
    digits: Data, tmp_path: Path, path: str, settings: dict[str, Any]
) -> None:
    spec = spec_of(optimizer="adam", optimizer_class=path, settings=settings, epochs=3)
    whole = rows(spec, digits, tmp_path / "whole")
    assert whole[-1]["train_loss"] < whole[0]["train_loss"]
    stops = iter([False] * 15 + [True])
    folder = RunFolder(tmp_path / "stopped")
    with pytest.raises(training.Interrupted):
        train(spec, folder, digits, watch=Watch(should_stop=lambda: next(stops)))
    assert folder.status() == "interrupted"
    assert without_times(rows(spec, digits, folder.path)) == without_times(whole)


def test_the_transformer_learns(tmp_path: Path) -> None:
    text = data.load("stdlib")
    assert isinstance(text, data.Text)
    small = data.Text(text.train[:20_000], text.test[:3_000], context=32)
    spec = spec_of(
        "adamw", dataset="stdlib", model="transformer", model_options={"width": 32, "layers": 1, "heads": 2},
        batch_size=16, test_batch_size=64, settings={"lr": 1e-2},
    )  # fmt: skip
    found = rows(spec, small, tmp_path)
    assert found[-1]["test_loss"] < 3.6  # of log(128) = 4.85 at the start
    assert 0 < found[-1]["test_error"] < 100


def test_autocast_trains_to_about_the_same(digits: Data, tmp_path: Path) -> None:
    plain = rows(spec_of("sgd"), digits, tmp_path / "plain")
    low = rows(spec_of("sgd", autocast=True), digits, tmp_path / "low")
    assert low[-1]["train_loss"] == pytest.approx(plain[-1]["train_loss"], rel=0.1)
    assert low[-1]["train_loss"] != plain[-1]["train_loss"]


@pytest.mark.long
def test_compiled_models_train_to_about_the_same_and_resume(digits: Data, tmp_path: Path) -> None:
    plain = rows(spec_of("sgd"), digits, tmp_path / "plain")
    compiled = rows(spec_of("sgd", compile=True), digits, tmp_path / "compiled")
    assert compiled[-1]["train_loss"] == pytest.approx(plain[-1]["train_loss"], rel=1e-2)
    stops = iter([False] * 15 + [True])
    folder = RunFolder(tmp_path / "stopped")
    with pytest.raises(training.Interrupted):
        train(spec_of("sgd", compile=True), folder, digits, watch=Watch(should_stop=lambda: next(stops)))
    assert without_times(rows(spec_of("sgd", compile=True), digits, folder.path)) == without_times(compiled)


def test_progress_says_how_far_a_run_is(digits: Data, tmp_path: Path) -> None:
    seen: list[Progress] = []
    rows(spec_of(), digits, tmp_path, watch=Watch(seen.append))
    assert seen[-1].step == seen[-1].steps == 24
    assert seen[-1].test_error is not None
    assert [p.step for p in seen] == sorted(p.step for p in seen)


def test_the_folder_says_what_was_run_where_and_with_what(digits: Data, tmp_path: Path) -> None:
    spec = spec_of(epochs=1)
    rows(spec, digits, tmp_path)
    assert RunFolder(tmp_path).spec() == spec
    (start,) = json.loads((tmp_path / "environment.json").read_text())
    assert start["torch"] == torch.__version__
    assert start["data"] == digits.fingerprint()
    assert {"commit", "threads", "processor", "python"} <= set(start)
    assert {path.name for path in tmp_path.iterdir()} - {".lock"} == {
        "spec.json", "environment.json", "metrics.jsonl", "rates.jsonl", "model.safetensors", "result.json",
    }  # fmt: skip


def test_the_weights_at_the_end_can_be_loaded(digits: Data, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    spec = spec_of(epochs=1)
    (row,) = rows(spec, digits, tmp_path)
    model, _ = training.make(spec, digits)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x, y = digits.test_batch(torch.arange(digits.count("test")))
    with torch.no_grad():
        loss = F.cross_entropy(model.eval()(x), y)
    assert loss.item() == pytest.approx(row["test_loss"], rel=1e-4)


def test_a_shorter_run_has_a_shorter_schedule_that_ends(digits: Data, tmp_path: Path) -> None:
    """With a cosine over 1.3 of 4 epochs: the last learning rate is as by hand, also after an interruption."""
    spec = spec_of("sgd", epochs=4, length=0.325, schedule={"kind": "cosine", "warmup": 0.0})
    found = rows(spec, digits, tmp_path / "whole")
    each = math.ceil(digits.count("train") / 128)
    total = round(1.3 * each)
    assert [row["steps"] for row in found] == [each, total - each]
    ends = [(steps - 1) / total for steps in (each, total)]
    assert [row["lr"] for row in found] == pytest.approx([0.05 * (1 + math.cos(math.pi * end)) for end in ends])

    taken = iter(range(each + 2))
    with pytest.raises(training.Interrupted):
        rows(spec, digits, tmp_path / "again", watch=Watch(should_stop=lambda: next(taken, None) is None))
    assert without_times(rows(spec, digits, tmp_path / "again")) == without_times(found)
