"""The lab's commands, as a user runs them."""

from __future__ import annotations

import csv
import json
import os
import signal
import statistics
import time
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from adabayes.lab import results, sweep
from adabayes.lab.display import Display
from adabayes.lab.protocol import load
from adabayes.lab.store import RunFolder
from tests.lab.conftest import adabayes, spec_of, start, start_and_wait

PROTOCOL = """
extends = "quick"
epochs = 1
seeds = 2
batch_size = 256
compare = ["sgd", "adabayes"]
model_options = { width = 4 }
"""


@pytest.fixture
def protocol(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(PROTOCOL)
    return path


def test_reproduce_trains_all_prints_a_table_and_writes_the_results(protocol: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = adabayes("reproduce", "--protocol", protocol, "--out", out)
    assert done.returncode == 0, done.stderr
    for words in ("digits, resnet8", "mean ± standard error of 2 seeds", "SGD", "AdaBayes", "ms/step"):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines()[:-2])) <= 80  # below are paths
    assert done.stderr.count(": done") == 4
    assert "\x1b" not in done.stdout + done.stderr  # plain where there is no terminal

    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["optimizer"], row["seed"]) for row in rows] == [
        ("sgd", "0"), ("adabayes", "0"), ("sgd", "1"), ("adabayes", "1"),
    ]  # fmt: skip
    wanted = {"dataset", "model", "optimizer", "seed", "status", "seconds"}
    wanted |= {
        f"{which}_{split}_{what}"
        for which in ("best", "final")
        for split in ("test", "train")
        for what in ("error", "loss")
    }
    assert wanted <= set(rows[0])
    results = json.loads((out / "results.json").read_text())
    summary = next(s for s in results["summary"] if s["optimizer"] == "sgd")
    errors = [float(row["final_test_error"]) for row in rows if row["optimizer"] == "sgd"]
    assert summary["final_test_error"]["mean"] == pytest.approx(statistics.fmean(errors))
    assert summary["final_test_error"]["error"] == pytest.approx(statistics.stdev(errors) / 2**0.5)
    assert f"{statistics.fmean(errors):.2f}" in done.stdout

    before = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    again = adabayes("reproduce", "--protocol", protocol, "--out", out)
    assert again.stdout == done.stdout
    assert again.stderr.count("was there already") == 4
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")} == before


def test_one_failed_run_is_told_and_does_not_stop_the_others(protocol: Path, tmp_path: Path) -> None:
    with protocol.open("a") as file:
        file.write("[optimizers.sgd]\nclass = 'torch.optim.Sgd'\n")
    for jobs in ("1", "2"):
        out = tmp_path / jobs
        done = adabayes("reproduce", "--protocol", protocol, "--out", out, "--jobs", jobs, "--seeds", "1")
        assert done.returncode == 1
        assert "failed: digits resnet8 sgd seed 0: there is no Sgd in torch.optim" in done.stderr
        assert "1 of 2 runs have no result" in done.stderr
        assert "SGD (failed)" in done.stdout
        with (out / "results.csv").open() as file:
            assert [row["status"] for row in csv.DictReader(file)] == ["failed", "done"]
        listed = adabayes("runs", out).stdout
        assert "1 failed, 1 done" in listed
        assert "no Sgd" in " ".join(listed.split())


def test_a_run_that_diverges_is_shown_as_such_and_is_no_failure(protocol: Path, tmp_path: Path) -> None:
    with protocol.open("a") as file:
        file.write("[optimizers.sgd]\nlr = 1e30\n")
    done = adabayes("reproduce", "--protocol", protocol, "--out", tmp_path / "out", "--seeds", "1")
    assert done.returncode == 0, done.stderr
    assert "SGD (diverged)" in done.stdout
    assert "already" not in done.stderr


def test_a_killed_process_fails_its_run_alone(tmp_path: Path) -> None:
    """With --jobs, each run has a process; the system may kill one, for want of memory."""
    command = ("reproduce", "--optimizers", "sgd,adamw", "--seeds", "1", "--epochs", "6", "--jobs", "2")
    process = start(*command, "--out", tmp_path)
    victim = None
    while victim is None:
        time.sleep(0.01)
        for path in tmp_path.glob("runs/*sgd*/environment.json"):
            victim = json.loads(path.read_text())[0]["process"]
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "its process was killed by signal 9" in errors
    statuses = {path.name.split("-")[2]: RunFolder(path).status() for path in (tmp_path / "runs").iterdir()}
    assert statuses == {"sgd": "failed", "adamw": "done"}
    assert adabayes(*command, "--out", tmp_path).returncode == 0


def test_dry_run_lists_and_estimates_and_leaves_nothing(protocol: Path, tmp_path: Path) -> None:
    done = adabayes("reproduce", "--protocol", protocol, "--out", tmp_path / "out", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "digits resnet8 adabayes seed 1: missing; 1 epochs; lr 0.001, lr_sgd 0.1" in done.stdout
    assert "4 runs, of which 4 are to be done" in done.stdout
    assert "seconds on this machine" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [["--dataset", "cifar10"], ["--device", "cuda:99"]])
def test_dry_run_lists_what_cannot_be_run_here(protocol: Path, tmp_path: Path, options: list[str]) -> None:
    done = adabayes("reproduce", "--protocol", protocol, "--data", tmp_path, "--dry-run", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "are to be done" in done.stdout
    assert "how long that takes cannot be measured here: " in done.stdout


def test_dry_run_measures_any_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    for text in ("'schedulefree.AdamWScheduleFree'", "'ivon.IVON'\nlr = 0.1\ness = 1438"):
        path.write_text(f"extends = 'quick'\nbatch_size = 5000\ncompare = ['x']\n[optimizers.x]\nclass = {text}\n")
        done = adabayes("reproduce", "--protocol", path, "--dry-run", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "on this machine" in done.stdout


def test_a_narrower_comparison_keeps_the_rows_of_the_others(protocol: Path, tmp_path: Path) -> None:
    command = ("reproduce", "--protocol", protocol, "--out", tmp_path / "out", "--seeds", "1")
    assert adabayes(*command).returncode == 0
    done = adabayes(*command, "--optimizers", "adabayes")
    assert "SGD" not in done.stdout
    with (tmp_path / "out" / "results.csv").open() as file:
        assert [row["optimizer"] for row in csv.DictReader(file)] == ["adabayes", "sgd"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (name, content)
        for name in ("result.json", "spec.json", "environment.json", "sweep.json")
        for content in ("", "{")
    ]
    + [("spec.json", '{"of": "another version"}'), ("sweep.json", '[{"of": "another version"}]')],
)
def test_a_damaged_small_file_is_named_and_does_not_stop_a_comparison(name: str, content: str, tmp_path: Path) -> None:
    spec = spec_of(epochs=1)
    folder = sweep.folder_of(spec, tmp_path)
    with Display(1, 1, Console(quiet=True)) as display:
        sweep.run([spec], tmp_path, display, sweep.Stop())
        path = tmp_path / name if name == "sweep.json" else folder.path / name
        path.write_text(content)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            specs, status = sweep.noted(tmp_path), folder.status()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (outcome,) = sweep.run([spec], tmp_path, display, sweep.Stop())
    assert name == "environment.json" or any(f"{name} is" in str(w.message) for w in warned)
    assert specs == [spec]
    assert status == "done" or name == "result.json"
    assert outcome.status == "done"


def test_an_optimizer_that_prints_does_not_disturb_a_sweep_in_processes(protocol: Path, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "import torch\nclass Loud(torch.optim.SGD):\n"
        "    def step(self, *a):\n        print('hello')\n        super().step(*a)\n"
    )
    with protocol.open("a") as file:
        file.write("[optimizers.sgd]\nclass = 'loud.Loud'\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = adabayes("reproduce", "--protocol", protocol, "--jobs", "2", "--out", tmp_path / "out", env=environment)
    assert done.returncode == 0, done.stderr


def test_with_jobs_a_damaged_checkpoint_is_named_too(tmp_path: Path) -> None:
    command = ("reproduce", "--optimizers", "sgd", "--seeds", "1", "--epochs", "6", "--jobs", "2")
    options = ("--checkpoint-every", "0.02")
    process = start_and_wait(tmp_path, *command, *options)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    (folder,) = (tmp_path / "runs").iterdir()
    newest = RunFolder(folder).checkpoints()[0]
    (folder / f"checkpoint-{newest}.json").write_text("{")
    done = adabayes(*command, *options, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"checkpoint-{newest}.json is damaged" in done.stderr


def test_tables_are_printed_whole_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paper = load("paper").narrowed(["cifar100"], ["densenet121"])
    rows = [
        results.Row("cifar100", "densenet121", name, seed, "done", 200, 23.456 + seed, 1.2345 + seed, 23.456, 1.2345,
                    milliseconds_per_step=123.4)
        for name in paper.optimizers for seed in range(3)
    ]  # fmt: skip
    for table in results.tables(paper, rows):
        results.show(table)
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "21.29" in printed
    assert "24.46 ±0.58" in printed


def test_train_takes_settings(tmp_path: Path) -> None:
    done = adabayes(
        "train", "--optimizer", "adabayes", "--set", "lr=0.02", "--set", "dynamics=exact", "--seed", "7",
        "--epochs", "1", "--no-channels-last", "--validation", "0.1", "--out", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "validation set" in done.stdout
    (path,) = (tmp_path / "runs").iterdir()
    spec = RunFolder(path).spec()
    assert spec is not None
    assert (spec.settings["lr"], spec.settings["dynamics"], spec.settings["lr_sgd"]) == (0.02, "exact", 0.1)
    assert (spec.seed, spec.channels_last, spec.validation) == (7, False, 0.1)


def test_folders_of_runs_are_merged_by_copying(tmp_path: Path) -> None:
    for seed in ("0", "1"):
        done = adabayes("train", "--optimizer", "sgd", "--seed", seed, "--epochs", "1", "--out", tmp_path / seed)
        assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "1" / "runs").iterdir()
    path.rename(tmp_path / "0" / "runs" / path.name)
    listed = adabayes("runs", tmp_path / "0").stdout
    assert "2 done" in listed
    done = adabayes("reproduce", "--optimizers", "sgd", "--seeds", "2", "--epochs", "1", "--out", tmp_path / "0")
    assert done.stderr.count("was there already") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "--protocol", "fast"], "no protocol 'fast': there are quick, mini, paper, text"),
        (["reproduce", "--optimizers", "adam,sgdd"], "unknown optimizer 'sgdd' in protocol quick; there are sgd, adam"),
        (["reproduce", "--dataset", "imagenet"], "unknown data set 'imagenet'"),
        (["reproduce", "--model", "vgg"], "unknown model 'vgg'"),
        (["reproduce", "--epochs", "0"], "epochs is 0"),
        (["reproduce", "--seeds", "0"], "there are no seeds"),
        (["reproduce", "--jobs", "0"], "--jobs 0"),
        (["reproduce", "--device", "abacus"], "--device abacus: Expected one of cpu, cuda"),
        (["reproduce", "--validation", "2"], "validation is 2.0; it must be a share"),
        (["reproduce", "--protocol", "mini", "--data", "nowhere"], "cifar10: no data_batch_1 in nowhere"),
        (["train", "--optimizer", "sgd", "--protocol", "paper"], "choose with --dataset and --model"),
        (["train", "--optimizer", "sgd", "--set", "lr"], "--set lr: write it as name=value"),
        (["tune", "--budget", "0"], "--budget 0: there must be at least one trial"),
        (["runs", "nowhere"], "there are no runs in nowhere"),
    ],
)
def test_bad_input_is_named_in_a_line_and_nothing_is_begun(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = adabayes(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_help_teaches_with_examples() -> None:
    for command in ("reproduce", "train", "tune"):
        text = adabayes(command, "--help").stdout
        assert f"adabayes {command} --" in text
        assert "(default:" in text
