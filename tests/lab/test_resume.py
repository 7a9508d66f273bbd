"""A run that is killed, stopped, starved of disk or damaged ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adabayes.lab.data import Data
from adabayes.lab.run.folder import Busy, RunFolder, load_tree, save_tree
from adabayes.lab.run.training import Interrupted, Watch, train
from tests.lab.conftest import adabayes, spec_of, start, start_and_wait, without_times

RUN = ("train", "--optimizer", "adabayes", "--epochs", "8", "--checkpoint-every", "0.02")


def only_run(out: Path) -> RunFolder:
    (path,) = (out / "runs").iterdir()
    return RunFolder(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Return the metrics of a run without interruption."""
    out = tmp_path_factory.mktemp("whole")
    done = adabayes(*RUN, "--out", out)
    assert done.returncode == 0, done.stderr
    return without_times(only_run(out).metrics())


def kill_until_done(out: Path, kills: int, seed: int) -> int:
    """Start the run and kill it at a random moment after it has begun to write, again and again; then let it end."""
    moments = random.Random(seed)
    killed = 0
    while killed < kills:
        process = start(*RUN, "--out", out)
        before = _written(out)
        while process.poll() is None and _written(out) == before:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.35))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += 1
    done = adabayes(*RUN, "--out", out)
    assert done.returncode == 0, done.stderr
    return killed


def _written(out: Path) -> set[str]:
    return {str(path) for path in out.rglob("*")}


@pytest.mark.long  # in every test run: tests/lab/test_deaths.py
def test_killed_at_random_moments_a_run_ends_with_the_same_metrics(
    whole: list[dict[str, object]], tmp_path: Path
) -> None:
    assert kill_until_done(tmp_path, kills=3, seed=0) >= 2
    assert without_times(only_run(tmp_path).metrics()) == whole


@pytest.mark.long
def test_killed_many_times_runs_end_with_the_same_metrics(whole: list[dict[str, object]], tmp_path: Path) -> None:
    killed = 0
    for seed in range(30):
        killed += kill_until_done(tmp_path / str(seed), kills=3, seed=seed)
        assert without_times(only_run(tmp_path / str(seed)).metrics()) == whole
        if killed >= 30:
            return
    pytest.fail(f"only {killed} kills came in time")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_with_a_checkpoint_and_says_how_to_go_on(
    whole: list[dict[str, object]], tmp_path: Path, number: signal.Signals
) -> None:
    process = start_and_wait(tmp_path, *RUN)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"Go on with: adabayes {' '.join(RUN)} --out {tmp_path}" in errors
    assert "Traceback" not in errors
    assert only_run(tmp_path).status() == "interrupted"
    assert "interrupted" in adabayes("runs", tmp_path).stdout
    assert adabayes(*RUN, "--out", tmp_path).returncode == 0
    assert without_times(only_run(tmp_path).metrics()) == whole


def test_a_sweep_of_several_processes_stops_and_goes_on_too(tmp_path: Path) -> None:
    command = ("reproduce", "--optimizers", "sgd,adam,adamw", "--seeds", "1", "--epochs", "6", "--jobs", "2")
    options = ("--checkpoint-every", "0.02")
    process = start_and_wait(tmp_path, *command, *options)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    done = adabayes(*command, *options, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [RunFolder(path).status() for path in (tmp_path / "runs").iterdir()] == ["done"] * 3


def test_a_second_process_leaves_a_run_alone(tmp_path: Path) -> None:
    long = [*RUN[:-3], "500", *RUN[-2:]]  # epochs
    first = start_and_wait(tmp_path, *long)
    try:
        second = adabayes(*long, "--out", tmp_path)
        listed = adabayes("runs", tmp_path)
    finally:
        first.send_signal(signal.SIGINT)
        _, errors = first.communicate(timeout=60)
    assert second.returncode == 1
    assert "another process is working on" in second.stderr
    assert "1 running" in listed.stdout
    assert first.returncode == 130, errors


def test_a_lock_is_not_held_by_the_dead(digits: Data, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.lock(), pytest.raises(Busy):
        train(spec_of(), folder, digits)
    child = os.fork()
    if child == 0:
        with folder.lock():
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert not folder.is_locked()


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
@pytest.mark.parametrize("damage", ["cut off", "changed", "emptied", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    digits: Data, tmp_path: Path, suffix: str, damage: str
) -> None:
    spec = spec_of(epochs=4)
    folder = RunFolder(tmp_path / "damaged")
    stops = iter([False] * 30 + [True])
    with pytest.raises(Interrupted):
        train(spec, folder, digits, watch=Watch(should_stop=lambda: next(stops)))
    newest, older = folder.checkpoints()
    path = folder.path / f"checkpoint-{newest}.{suffix}"
    content = path.read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    path.unlink()
    if damage != "gone":
        path.write_bytes({"cut off": content[:-20], "changed": changed, "emptied": b""}[damage])
    if (suffix, damage) == ("json", "gone"):
        train(spec, folder, digits)  # as if it had never been written
    else:
        with pytest.warns(UserWarning, match=rf"checkpoint-{newest}\.json is damaged.*left out"):
            train(spec, folder, digits)
    whole = RunFolder(tmp_path / "whole")
    train(spec, whole, digits)
    assert older < newest
    assert without_times(folder.metrics()) == without_times(whole.metrics())


@pytest.mark.parametrize(
    "name", ["3 (1).json", "٣.json", "+3.json", "03.json", ".json", "3.json.bak", "best.json", "3/.json", "1_0.json"]
)
def test_files_that_are_not_ours_are_ignored(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path)
    stray = tmp_path / f"checkpoint-{name}"
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"{}")
    (tmp_path / "checkpoint-7.json").mkdir()
    assert folder.checkpoints() == []
    assert folder.load() is None  # without a warning, which would be an error here
    assert folder.status() == "missing"
    with folder.lock():
        folder.save(1, {"a": 1})
        assert folder.load() == {"a": 1}
        folder.finish({}, {"status": "done"})
    assert stray.exists()
    assert (tmp_path / "checkpoint-7.json").exists()


def test_a_damaged_checkpoint_does_not_push_out_a_whole_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for number in (10, 20):
        folder.save(number, {"number": number})
    (tmp_path / "checkpoint-20.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"checkpoint-20\.json is damaged.*checkpoint-20\.safetensors"):
        assert folder.load() == {"number": 10}
    folder.save(30, {"number": 30})
    assert folder.checkpoints() == [30, 10]


def test_when_all_checkpoints_are_damaged_the_run_begins_anew(digits: Data, tmp_path: Path) -> None:
    spec = spec_of(epochs=3)
    folder = RunFolder(tmp_path / "damaged")
    stops = iter([False] * 30 + [True])
    with pytest.raises(Interrupted):
        train(spec, folder, digits, watch=Watch(should_stop=lambda: next(stops)))
    for path in folder.path.glob("checkpoint-*"):
        path.write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match="is damaged"):
        train(spec, folder, digits)
    whole = RunFolder(tmp_path / "whole")
    train(spec, whole, digits)
    assert without_times(folder.metrics()) == without_times(whole.metrics())


def test_a_full_disk_is_a_clear_error_and_nothing_is_lost(whole: list[dict[str, object]], tmp_path: Path) -> None:
    """The system refuses to write files above a size that checkpoints exceed, as it would on a full disk."""
    process = start_and_wait(tmp_path, *RUN)
    process.kill()
    process.communicate()
    before = {path: path.read_bytes() for path in tmp_path.rglob("checkpoint-*.json")}

    def little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    full = adabayes(*RUN, "--out", tmp_path, preexec_fn=little_room)
    assert full.returncode == 1
    assert "no room to write" in full.stderr
    assert "Nothing is lost" in full.stderr
    assert "Traceback" not in full.stderr
    assert not list(tmp_path.rglob("*.tmp"))
    assert {path: path.read_bytes() for path in tmp_path.rglob("checkpoint-*.json")} == before
    assert only_run(tmp_path).status() == "failed"
    assert adabayes(*RUN, "--out", tmp_path).returncode == 0
    assert without_times(only_run(tmp_path).metrics()) == whole
    assert only_run(tmp_path).status() == "done"


def test_a_line_of_metrics_that_was_cut_off_does_no_harm(digits: Data, tmp_path: Path) -> None:
    def row(epoch: int, x: float) -> dict[str, float]:
        return {"epoch": epoch, "steps": 1, "state_bytes": 8.0, "train_seconds": 1.0, "test_seconds": 1.0, "x": x}

    folder = RunFolder(tmp_path)
    folder.path.mkdir(exist_ok=True)
    folder.log(row(0, 1.0))
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"epoch": 1, "x"')
    assert folder.metrics() == [row(0, 1.0)]
    folder.log(row(1, 2.0))
    folder.log(row(1, 3.0))  # run again
    assert folder.metrics() == [row(0, 1.0), row(1, 3.0)]


def test_other_data_under_the_same_name_is_refused(digits: Data, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    stops = iter([False, True])
    with pytest.raises(Interrupted):
        train(spec_of(), folder, digits, watch=Watch(should_stop=lambda: next(stops)))
    with pytest.raises(ValueError, match="was begun with other data"):
        train(spec_of(), folder, digits.hold_out(0.1))


def test_another_environment_is_warned_about(digits: Data, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    stops = iter([False, True])
    with pytest.raises(Interrupted):
        train(spec_of(), folder, digits, watch=Watch(should_stop=lambda: next(stops)))
    starts = json.loads((tmp_path / "environment.json").read_text())
    starts[0]["torch"] = "1.0"
    folder.write("environment.json", starts)
    with pytest.warns(UserWarning, match=r"torch 1\.0 then"):
        train(spec_of(), folder, digits)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text(), inner) | st.lists(inner).map(tuple),
    max_leaves=20,
)


@given(tree=TREES)
@settings(deadline=None)
def test_checkpoints_keep_plain_data_as_it_is(tree: object) -> None:
    saved = json.loads(json.dumps(save_tree(tree, {})))
    assert load_tree(saved, {}) == tree


def test_checkpoints_keep_tensors_types_and_layouts(tmp_path: Path) -> None:
    tensors = {
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 4).t(),
        "bf16": torch.randn(3).bfloat16(),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 2),
        "long": torch.arange(3),
    }
    folder = RunFolder(tmp_path)
    folder.save(1, {"group": [tensors], "shared": (tensors["bf16"], tensors["bf16"])})
    loaded = folder.load()
    assert loaded is not None
    for name, t in tensors.items():
        found = loaded["group"][0][name]
        assert found.dtype == t.dtype
        assert found.stride() == t.stride()
        assert torch.equal(found, t)
    with pytest.raises(TypeError, match="cannot save a set"):
        folder.save(2, {1, 2})
    assert folder.checkpoints() == [1]
