"""The lab's commands, as a user runs them."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import statistics
import sys
import time
import warnings
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import create_trial
from rich.console import Console
from rich.table import Table

from adabayes import cli
from adabayes.lab import theory, tuning
from adabayes.lab.display import Display, show
from adabayes.lab.execute import local, sweep
from adabayes.lab.protocol import load
from adabayes.lab.report import results
from adabayes.lab.run.folder import RunFolder, folder_of
from adabayes.lab.theory import Check, Topic
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
    assert again.stderr.count("was done already") == 4
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")} == before


def test_a_failed_run_is_reported_and_does_not_stop_the_others(protocol: Path, tmp_path: Path) -> None:
    protocol.write_text(
        PROTOCOL.replace('"sgd"', '"sparse"')
        + "[optimizers.sparse]\nlabel = 'Sparse'\nclass = 'torch.optim.SparseAdam'\n"
    )
    for jobs in ("1", "2"):
        out = tmp_path / jobs
        done = adabayes("reproduce", "--protocol", protocol, "--out", out, "--jobs", jobs, "--seeds", "1")
        assert done.returncode == 1
        assert "failed: digits resnet8 sparse seed 0: RuntimeError: SparseAdam does not support dense" in done.stderr
        assert "1 of 2 runs have no result" in done.stderr
        assert "Sparse (failed)" in done.stdout
        with (out / "results.csv").open() as file:
            assert [row["status"] for row in csv.DictReader(file)] == ["failed", "done"]
        listed = adabayes("runs", out).stdout
        assert "1 failed, 1 done" in listed
        assert "RuntimeError: SparseAdam" in listed


def test_a_run_that_diverges_is_shown_as_such_and_is_no_failure(protocol: Path, tmp_path: Path) -> None:
    with protocol.open("a") as file:
        file.write("[optimizers.sgd]\nlr = 1e30\n")
    done = adabayes("reproduce", "--protocol", protocol, "--out", tmp_path / "out", "--seeds", "1")
    assert done.returncode == 0, done.stderr
    assert "SGD (diverged)" in done.stdout
    assert "already" not in done.stderr


def test_processes_live_on_from_run_to_run(protocol: Path, tmp_path: Path) -> None:
    """So each process loads the data once, and not once for each run."""
    done = adabayes("reproduce", "--protocol", protocol, "--jobs", "2", "--seeds", "3", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    starts = [json.loads(path.read_text()) for path in tmp_path.glob("out/runs/*/environment.json")]
    assert len(starts) == 6
    assert 1 <= len({start["process"] for (start,) in starts}) <= 2


def test_a_killed_process_fails_its_run_alone(tmp_path: Path) -> None:
    """The system may kill a process when memory is short. The next run gets another one."""
    command = ("reproduce", "--optimizers", "sgd,adamw,adam", "--seeds", "1", "--epochs", "6", "--jobs", "2")
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
    assert statuses == {"sgd": "failed", "adamw": "done", "adam": "done"}
    assert adabayes(*command, "--out", tmp_path).returncode == 0


def test_dry_run_lists_and_estimates_and_leaves_nothing(protocol: Path, tmp_path: Path) -> None:
    done = adabayes("reproduce", "--protocol", protocol, "--out", tmp_path / "out", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "digits resnet8 adabayes seed 1: missing; 1 epochs; lr 0.001, lr_sgd 0.1" in done.stdout
    assert "4 runs, 4 of them still to do" in done.stdout
    assert "seconds on this machine" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [["--dataset", "cifar10"], ["--device", "cuda:99"]])
def test_dry_run_lists_what_cannot_be_run_here(protocol: Path, tmp_path: Path, options: list[str]) -> None:
    done = adabayes("reproduce", "--protocol", protocol, "--data", tmp_path, "--dry-run", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "of them still to do" in done.stdout
    assert "their time cannot be estimated here: " in done.stdout


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
    folder = folder_of(spec, tmp_path)
    with Display(1, 1, Console(quiet=True)) as display:
        local.run([spec], tmp_path, display, sweep.Stop())
        path = tmp_path / name if name == "sweep.json" else folder.path / name
        path.write_text(content)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            specs, status = sweep.noted(tmp_path), folder.status()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (outcome,) = local.run([spec], tmp_path, display, sweep.Stop())
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


# Output


@pytest.mark.usefixtures("signals")
def test_the_page_is_written_whoever_reads_the_output(
    protocol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``reproduce 2>&1 | head -1``, and where the terminal has no ±."""
    command = ["reproduce", "--protocol", str(protocol), "--out", str(tmp_path / "out"), "--optimizers", "sgd"]
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as closed, monkeypatch.context() as context:
        context.setattr(sys, "stdout", closed)
        context.setattr(sys, "stderr", closed)
        cli.main(command)
    page = tmp_path / "out" / "index.html"
    assert page.stat().st_size > 1_000_000
    page.unlink()
    with (tmp_path / "said").open("w+", encoding="ascii") as file, monkeypatch.context() as context:
        context.setattr(sys, "stdout", file)
        cli.main(command)
        file.seek(0)
        assert "mean ? standard error of 2 seeds" in " ".join(file.read().split())
    assert page.exists()


HOSTILE = ("mine[v2]", "[red]", ":smile:", "=cmd|calc!A0")  # but names of files
REFUSED = ("c[/]", "two\nlines", "esc\x1b[2Jape")  # which none of our files can hold


def test_names_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And none of their characters controls the terminal."""
    specs = [replace(spec_of("sgd"), optimizer=name) for name in HOSTILE]
    others = [replace(spec_of("sgd"), optimizer=name) for name in REFUSED]
    (tmp_path / "sweep.json").write_text(json.dumps([asdict(spec) for spec in specs]))
    cli.main(["runs", str(tmp_path)])
    said = capsys.readouterr().out
    screen = StringIO()
    with Display(1, 1, Console(file=screen, force_terminal=True, width=100)) as display:
        for spec in [*specs, *others]:
            display.started(spec)
        display.warned("[/] in a warning")
        display._screen.refresh()
        for spec in [*specs, *others]:
            display.ended(spec, sweep.Outcome(spec, "failed", "why[/]"))
    for shown in (said, screen.getvalue()):
        for name in HOSTILE:
            assert f"digits resnet8 {name}" in shown
    for name in ("c[/]", "esc\N{REPLACEMENT CHARACTER}[2Jape"):
        assert f"digits resnet8 {name}" in screen.getvalue()
    assert "[/] in a warning" in screen.getvalue()
    assert "why[/]" in screen.getvalue()
    assert "\x1b[2J" not in said + screen.getvalue()


def test_spreadsheets_do_not_run_what_is_in_the_results(tmp_path: Path) -> None:
    quick = load("quick")
    odd = ("=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\n=1")
    names = [*odd[:-1], "\r=1", "a=b", "a\r=b", "a\r\n=b"]
    rows = [results.Row("digits", "resnet8", name, 0, "failed", -1, seconds=-1.5, error="-") for name in names]
    results.write(quick, rows, [], tmp_path, "")
    with (tmp_path / "results.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["optimizer"] for row in read] == [*(f"'{name}" for name in odd), "a=b", "a\n=b", "a\n=b"]
    assert {(row["epochs"], row["seconds"], row["error"]) for row in read} == {("-1", "-1.5", "'-")}
    assert json.loads((tmp_path / "results.json").read_text())["runs"][0]["optimizer"] == "=1+1"


def paper_rows(label: str = "") -> list[Table]:
    """Return the paper's table for its widest network, with long names, failures and three seeds."""
    paper = load("paper").narrowed(["cifar100"], ["densenet121"])
    named = {name: replace(o, label=o.label + label) for name, o in paper.optimizers.items()}
    rows = [
        results.Row("cifar100", "densenet121", name, seed, "done", 200, 23.456 + seed, 1.2345 + seed, 23.456, 1.2345,
                    milliseconds_per_step=123.4)
        for name in named for seed in range(3)
    ] + [results.Row("cifar100", "densenet121", "sgd", 3, status, 0) for status in ("failed", "diverged")]  # fmt: skip
    return results.tables(replace(paper, optimizers=named), rows)


def test_figures_are_printed_whole_however_narrow_the_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for table in paper_rows(" of a long name, longer than others are"):
        show(table)
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "21.29" in printed  # as published
    assert "published" in printed
    assert "24.46 ±0.58" in printed
    assert "1.234 ±0.000" in printed


def printed_at_80(*tables: Table) -> str:
    """Print tables on a terminal of 80 columns."""
    screen = Console(file=StringIO(), force_terminal=True, width=80, color_system=None)
    for table in tables:
        show(table, screen)
    assert isinstance(screen.file, StringIO)
    return screen.file.getvalue()


def test_tables_fit_a_terminal_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results_ = printed_at_80(*paper_rows(), *paper_rows(" of a long name, longer than others are"))
    assert results_.count("24.46 ±0.58") == 18
    search = tuning.Search(
        replace(load("quick").optimizers["adabayes"], label="A long name"),
        (create_trial(params=dict.fromkeys("abcdefgh", 0.00012345), distributions={
            name: FloatDistribution(1e-9, 1) for name in "abcdefgh"}, value=1.25),),
    )  # fmt: skip
    tuned = printed_at_80(tuning.table([search], "error %"))
    assert "1.25" in tuned
    checks = (Check("a claim in many words, " * 5, 1.2345e-17, -1.2345e-17, 1e-17),)
    claims = printed_at_80(theory.table([Topic("x", "A title in many words, " * 5, "", checks, lambda figure: None)]))
    assert "-1.2345e-17" in claims

    monkeypatch.setenv("COLUMNS", "80")
    specs = [
        replace(spec_of("sgd"), dataset="cifar100", model="densenet121", optimizer=name, seed=1000003, epochs=200)
        for name in ("adabayes-fp", "a-name-of-many-characters-" * 4)
    ]
    (tmp_path / "sweep.json").write_text(json.dumps([asdict(spec) for spec in specs]))
    cli.main(["runs", str(tmp_path)])
    cli.main(["data", "list", "--data", "/a/folder/with/a/name/that/is/long" * 3])
    commands = capsys.readouterr().out
    assert "0/200" in commands
    for text in (results_, tuned, claims, commands):
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 80


# Options


@pytest.mark.usefixtures("signals")
def test_train_has_a_folder_of_its_own(protocol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a single run is not taken for the comparison in out/PROTOCOL."""
    monkeypatch.chdir(tmp_path)
    cli.main(["train", "--protocol", str(protocol), "--optimizer", "sgd"])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine-train"]


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("command", [["tune", "--optimizers", "sgd", "--budget", "1"], ["train", "--optimizer", "sgd"]])
def test_checkpoints_are_written_as_often_as_asked(
    command: list[str], protocol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    save = RunFolder.save

    def noted(folder: RunFolder, number: int, tree: Any) -> None:
        saved.append(number)
        save(folder, number, tree)

    monkeypatch.setattr(RunFolder, "save", noted)
    cli.main([*command, "--protocol", str(protocol), "--checkpoint-every", "0", "--out", str(tmp_path / "out")])
    assert len(saved) > 3


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
    assert done.stderr.count("was done already") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "--protocol", "fast"], "no protocol 'fast': there are demo, quick, mini, paper, text"),
        (["reproduce", "--optimizers", "adam,sgdd"], "unknown optimizer 'sgdd' in protocol quick; there are sgd, adam"),
        (["reproduce", "--dataset", "imagenet"], "unknown data set 'imagenet'"),
        (["reproduce", "--model", "vgg"], "unknown model 'vgg'"),
        (["reproduce", "--epochs", "0"], "epochs is 0"),
        (["reproduce", "--seeds", "0"], "there are no seeds"),
        (["reproduce", "--jobs", "0"], "--jobs 0"),
        (["reproduce", "--threads", "0"], "--threads 0: a run has at least one thread"),
        (["reproduce", "--device", "abacus"], "--device abacus: Expected one of cpu, cuda"),
        (["reproduce", "--validation", "2"], "validation is 2.0; it must be a share"),
        (["reproduce", "--protocol", "mini", "--data", "nowhere"], "cifar10: no data_batch_1 in nowhere"),
        (["train", "--optimizer", "sgd", "--protocol", "paper"], "choose with --dataset and --model"),
        (["train", "--optimizer", "sgd", "--set", "lr"], "--set lr: write it as name=value"),
        (["tune", "--budget", "0"], "--budget 0: there must be at least one trial"),
        (["runs", "nowhere"], "there are no runs in nowhere"),
    ],
)
def test_bad_input_is_named_in_a_line_and_nothing_is_begun(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        cli.main(arguments)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["reproduce", "train", "tune"])
def test_help_teaches_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert f"adabayes {command} --" in text
    assert "(default:" in text


@pytest.mark.usefixtures("signals")
def test_a_published_experiment_runs_and_shows_its_figure_beside_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepOBS's network on a few images of another set, for two epochs."""
    few = tmp_path / "few.toml"
    few.write_text(
        "extends = 'anchors/fmnist-2c2d'\ndatasets = ['digits']\ndata_options = { examples = 200, augment = false }\n"
        "epochs = 2\nmodel_options = { size = 8 }\n[published.digits.2c2d]\nadam = { error = 7.66 }\n"
    )
    cli.main(["reproduce", "--protocol", str(few), "--out", str(tmp_path / "out")])
    assert re.search(r"published +7\.66 *\n", capsys.readouterr().out)
    runs = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    assert [(row["optimizer"], row["status"], row["epochs"]) for row in runs] == [
        ("adam", "done", 2), ("adabayes-k", "done", 2),
    ]  # fmt: skip
    cli.main(["report", str(tmp_path / "out")])  # reads the figure again
