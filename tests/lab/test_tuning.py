"""Tuning: fair, honest and resumable."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from rich.console import Console

from adabayes.lab import data, journal, protocol, tuning
from adabayes.lab.data import Data
from adabayes.lab.display import Display
from adabayes.lab.execute import sweep
from adabayes.lab.protocol import Protocol, ProtocolError
from adabayes.lab.run.folder import RunFolder, exclusive
from adabayes.lab.run.training import Interrupted
from tests.lab.conftest import adabayes, start
from tests.support.marks import has_muon

COMMAND = ("tune", "--budget", "3", "--epochs", "2", "--optimizers", "sgd,adabayes")


def small(epochs: int = 2) -> Protocol:
    return protocol.load("quick").narrowed(optimizers=["sgd", "adabayes"], epochs=epochs)


def tune(chosen: Protocol, budget: int, out: Path, stop: sweep.Stop | None = None) -> list[tuning.Search]:
    with Display(1, 1, Console(quiet=True)) as display:
        failures = tuning.tune(chosen, budget, out, lambda: data.load("digits"), display, stop or sweep.Stop())
    assert not failures
    return tuning.searches(chosen, out)


def test_every_optimizer_gets_the_same_trials_the_first_with_the_settings_as_given(tmp_path: Path) -> None:
    found = tune(small(), 4, tmp_path)
    assert [search.optimizer.name for search in found] == ["sgd", "adabayes"]
    for search in found:
        assert len(search.finished) == 4
        given = search.optimizer.settings_for("resnet8")
        assert search.trials[0].params == {key: pytest.approx(given[key]) for key in search.optimizer.search}
        for trial in search.trials:
            for key, (low, high) in search.optimizer.search.items():
                assert low <= trial.params[key] <= high
        assert len({trial.params["lr"] for trial in search.trials}) == 4
        assert search.best is not None
        complete = [t.value for t in search.trials if t.state == TrialState.COMPLETE]
        assert search.best.value == min(value for value in complete if value is not None)
    more = tune(small(), 5, tmp_path)  # a larger budget adds to it
    assert [t.params for t in more[0].trials[:4]] == [t.params for t in found[0].trials]
    assert len(more[0].finished) == 5


def test_trials_are_judged_on_held_out_training_data_with_a_seed_of_their_own(tmp_path: Path) -> None:
    tune(small(), 1, tmp_path)
    specs = [spec for path in (tmp_path / "runs").iterdir() if (spec := RunFolder(path).spec())]
    assert len(specs) == 2
    assert {spec.validation for spec in specs} == {tuning.VALIDATION}
    assert not {spec.seed for spec in specs} & set(range(1000))


def test_trials_with_other_fixed_settings_are_not_taken_for_these(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = "extends = 'quick'\ncompare = ['sgd']\nepochs = 1\n[optimizers.sgd]\nnesterov = {}\n"
    for nesterov in ("true", "false"):
        path.write_text(text.format(nesterov))
        (search,) = tune(protocol.load(path), 1, tmp_path)
        assert len(search.finished) == 1
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_what_failed_is_named_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "extends = 'quick'\ncompare = ['sparse', 'adam']\nepochs = 1\n"
        "[optimizers.sparse]\nclass = 'torch.optim.SparseAdam'\nsearch = { lr = [1e-4, 1e-2] }\n"
    )
    command = ("tune", "--protocol", path, "--budget", "2", "--out", tmp_path / "out")
    done = adabayes(*command)
    assert done.returncode == 1
    assert "failed: digits resnet8 sparse seed 1000003: RuntimeError: SparseAdam does not support dense" in done.stderr
    assert list(protocol.load(tmp_path / "out" / "tuned.toml").optimizers) == ["adam"]
    chosen = protocol.load(path)
    assert [len(search.finished) for search in tuning.searches(chosen, tmp_path / "out")] == [0, 2]
    assert adabayes(*command).returncode == 1
    assert [len(search.trials) for search in tuning.searches(chosen, tmp_path / "out")] == [2, 2]


def test_two_searches_do_not_get_into_each_others_way(tmp_path: Path) -> None:
    with exclusive(tmp_path / ".lock", ""):
        done = adabayes(*COMMAND, "--out", tmp_path)
    assert done.returncode == 1
    assert "another process is tuning in" in done.stderr


def test_the_hopeless_are_pruned(tmp_path: Path) -> None:
    found = tune(small(epochs=6), 8, tmp_path)
    pruned = [t for search in found for t in search.trials if t.state == TrialState.PRUNED]
    assert pruned
    assert any(len(t.intermediate_values) < 6 for t in pruned)  # others, in their last epoch
    statuses = [RunFolder(path).status() for path in (tmp_path / "runs").iterdir()]
    assert statuses.count("pruned") == len(pruned)


def test_a_search_that_was_stopped_ends_like_one_that_was_not(tmp_path: Path, digits: Data) -> None:
    class StopAfter(sweep.Stop):
        left = 60

        def __call__(self) -> bool:
            self.left -= 1
            return self.left < 0

    with pytest.raises(Interrupted):
        tune(small(), 3, tmp_path / "stopped", StopAfter())
    stopped = tune(small(), 3, tmp_path / "stopped")
    whole = tune(small(), 3, tmp_path / "whole")
    for a, b in zip(stopped, whole):
        results = [sorted((t.params["lr"], t.value) for t in s.finished if t.value is not None) for s in (a, b)]
        assert results[0] == results[1]
        assert len(a.finished) == 3


def test_the_command_writes_a_protocol_with_the_winners_and_a_picture(tmp_path: Path) -> None:
    process = start(*COMMAND, "--out", tmp_path)
    while not list(tmp_path.rglob("result.json")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = adabayes(*COMMAND, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert (tmp_path / "tune.png").read_bytes()[:4] == b"\x89PNG"
    tuned = protocol.load(tmp_path / "tuned.toml")
    assert list(tuned.optimizers) == ["sgd", "adabayes"]
    for search in tuning.searches(small(), tmp_path):
        assert search.best is None or tuned.optimizers[search.optimizer.name].settings["lr"] == search.best.params["lr"]
    assert tuned.optimizers["adabayes"].settings["dynamics"] == "exact"
    assert (tuned.epochs, tuned.validation, tuned.seeds) == (2, 0.0, (0, 1, 2))
    compared = adabayes(
        "reproduce", "--protocol", tmp_path / "tuned.toml", "--out", tmp_path / "compared", "--seeds", "1"
    )
    assert compared.returncode == 0, compared.stderr


def test_what_cannot_be_tuned_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="one data set and one model at a time"):
        tune(protocol.load("paper"), 1, tmp_path)
    path = tmp_path / "mine.toml"
    path.write_text("extends = 'quick'\ncompare = ['radam']\n[optimizers.radam]\nclass = 'torch.optim.RAdam'\n")
    with pytest.raises(ProtocolError, match=r"\[optimizers.radam\] has no search"):
        tune(protocol.load(path), 1, tmp_path)
    path.write_text("extends = 'quick'\ncompare = ['sgd']\n[optimizers.sgd]\nlr = 50.0\n")
    with pytest.raises(ProtocolError, match=r"lr = 50.0, which is outside its search range, 0.001 to 1.0"):
        tune(protocol.load(path), 1, tmp_path)


@pytest.mark.parametrize("stem", ["mine", "my sgd v1.0", "naïve 😀", "it's #1", "a=b"])
def test_a_tuned_protocol_is_toml_whatever_names_there_are(tmp_path: Path, stem: str) -> None:
    path = tmp_path / f"{stem}.toml"
    space = "search = { lr = [1e-4, 1.0] }\nmodels.resnet8 = { nesterov = true }\nmomentum = 0.9"
    path.write_text(
        f"extends = 'quick'\ncompare = ['my sgd v1.0', '😀#']\n[optimizers.'my sgd v1.0']\nclass = 'torch.optim.SGD'\n"
        f"{space}\n[optimizers.'😀#']\nclass = 'torch.optim.SGD'\nlabel = 'a \"label\"'\n{space}\n",
        encoding="utf-8",
    )
    chosen = protocol.load(path)
    space_of: dict[str, optuna.distributions.BaseDistribution] = {
        "lr": optuna.distributions.FloatDistribution(1e-4, 1.0, log=True)
    }
    trial = optuna.trial.create_trial(params={"lr": 0.25}, distributions=space_of, value=3.0)
    found = [tuning.Search(optimizer, (trial,)) for optimizer in chosen.optimizers.values()]
    (tmp_path / "out").mkdir()
    tuning.write_protocol(chosen, path, found, tmp_path / "out" / "tuned.toml")
    tuned = protocol.load(tmp_path / "out" / "tuned.toml")
    assert tuned.description == f"{stem}, tuned"
    assert list(tuned.optimizers) == ["my sgd v1.0", "😀#"]
    for optimizer in tuned.optimizers.values():
        assert optimizer.settings_for("resnet8") == {"momentum": 0.9, "nesterov": True, "lr": 0.25}
    assert tuned.optimizers["😀#"].label == 'a "label"'


def test_a_search_for_a_setting_that_there_is_not_is_refused_before_the_first_trial(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("extends = 'quick'\ncompare = ['sgd']\n[optimizers.sgd]\nsearch = { lrr = [1e-4, 1.0] }\n")
    with pytest.raises(ProtocolError, match=r"lrr.*Did you mean lr"):
        tune(protocol.load(path), 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [pytest.param(x, marks=has_muon) if x == "demo" else x for x in protocol.NAMES])
def test_the_protocols_that_come_with_the_package_can_be_tuned(name: str) -> None:
    chosen = protocol.load(name)
    tuning.check(chosen.narrowed(chosen.datasets[:1], chosen.models[:1]))


# The journal


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a search of two trials."""
    out = tmp_path_factory.mktemp("finished")
    tune(short(), 2, out)
    return out


def short() -> Protocol:
    return protocol.load("quick").narrowed(optimizers=["sgd"], epochs=1)


def known(out: Path) -> list[tuple[dict[str, float], float | None]]:
    (search,) = tuning.searches(short(), out)
    return [(trial.params, trial.value) for trial in search.finished]


DAMAGES = {
    "cut by 1": lambda whole: whole[:-1],
    "cut by 5": lambda whole: whole[:-5],
    "cut by 40": lambda whole: whole[:-40],
    "cut in the first line": lambda whole: whole[:7],
    "all gone": lambda whole: b"",
    "zeros at the end": lambda whole: whole + bytes(500),
    "zeros for the end": lambda whole: whole[:-30] + bytes(30),
    "written on after a tear": lambda whole: whole[:-40] + whole.splitlines(keepends=True)[0] * 2,
    "torn twice, then written on": lambda whole: whole[:-40] + whole[:30] + whole.splitlines(keepends=True)[0],
    "without the last end of line, then zeros": lambda whole: whole[:-1] + bytes(30) + b"\n",
    "written on after zeros": lambda whole: whole + bytes(100) + whole.splitlines(keepends=True)[0],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_journal_that_was_torn_is_mended_and_nothing_else_is_lost(
    finished: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    path = out / "tune.journal"
    path.write_bytes(damage(path.read_bytes()))
    results = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    tune(short(), 2, out)
    assert known(out) == known(finished)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("result.json")} == results  # nothing is trained again


def test_wherever_a_journal_is_cut_its_whole_records_stay(finished: Path, tmp_path: Path) -> None:
    whole = (finished / "tune.journal").read_bytes()
    path = tmp_path / "tune.journal"
    warnings: list[str] = []
    for cut in range(0, len(whole), 61):
        path.write_bytes(whole[:cut])
        journal.mend(path, warnings.append)
        assert path.read_bytes() == whole[: whole.rfind(b"\n", 0, cut) + 1]
    assert all("was damaged" in warning for warning in warnings)


@pytest.mark.parametrize(
    "content",
    [
        b"hello\n",
        b"hello",
        b"\x89PNG\r\n\x1a\n\0\0\0\r",
        b'{"a": 1}\n',
        b"[1]\n",
        b'{"op_code":0,"worker_id":"a"\n{"op_code":0,"worker_id":"a"}\n',
        b'{"op_code":99}\n',
        b'{"op_code":"x"}\n',
        b'{"op_code":6,"trial_id":7,"state":1}\n',
        '{"op_code":0}\n'.encode("utf-16"),
    ],
)
def test_a_file_that_is_not_a_journal_is_named_and_not_changed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tune.journal"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tune.journal is not a journal that tune can continue .* move it away"):
        tune(short(), 1, tmp_path)
    assert path.read_bytes() == content


def test_a_lock_that_an_earlier_version_has_left_is_not_waited_for(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    (out / "tune.journal.lock").symlink_to(out / "tune.journal")
    (out / "tune.journal.lock1234.rename").symlink_to(out / "tune.journal")
    began = time.monotonic()
    tune(short(), 2, out)
    assert time.monotonic() - began < 20  # Optuna waits for 30 seconds
    assert sorted(path.name for path in out.iterdir()) == [".lock", "runs", "tune.journal"]
