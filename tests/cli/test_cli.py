"""The command line, as a user runs it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adabayes import __version__, cli, kernels
from adabayes.bench import measure, torch_steps
from adabayes.bench.report import Report, Row
from adabayes.bench.workloads import QUICK, WORKLOADS, Workload
from adabayes.cli import doctor

ROOT = Path(__file__).parents[2]


def adabayes(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "adabayes", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


HELP = """
import contextlib, io, os, sys
from adabayes import cli

os.environ["COLUMNS"] = "80"

def say(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main(arguments)
    return out.getvalue()

assert say("--version") == f"adabayes {cli.__version__}\\n"
commands = {
    (): ["doctor", "bench", "reproduce", "train", "tune", "suite", "report", "theory", "runs", "data"],
    ("data",): ["list", "fetch", "verify"],
}
for before, names in commands.items():
    text = say(*before, "--help")
    wide = [line for name in names for line in (text + say(*before, name, "--help")).splitlines() if len(line) > 80]
    assert not wide, wide
    lines = text.partition("commands:")[2].splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "]
    assert listed == names, text  # there are no others
    for name in names:
        assert say(*before, name, "--help").startswith(" ".join(["usage: adabayes", *before, name]))
for name in ("train", "tune"):  # which take one data set and one model
    assert "commas" not in say(name, "--help")
heavy = {"torch", "numpy", "jax", "matplotlib", "rich", "adabayes.lab"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_and_version_do_not_wait_for_torch_and_fit_80_columns() -> None:
    subprocess.run([sys.executable, "-c", HELP], check=True)


def test_the_import_costs_nothing_beyond_torchs() -> None:
    code = "import sys, torch; before = set(sys.modules); import adabayes; print(*set(sys.modules) - before)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    others = {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) - {"adabayes", "torch"}
    assert not others, others
    assert "torch._dynamo" not in found  # a second by itself


@pytest.mark.parametrize("command", [[], ["data"]])
def test_without_a_command_the_help_is_printed_and_that_is_no_error(command: list[str]) -> None:
    bare, asked = adabayes(*command), adabayes(*command, "--help")
    assert bare.returncode == 0
    assert bare.stdout == asked.stdout
    assert bare.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["benhc"], "bench"), (["data", "ftech"], "fetch"), (["bench", "--backend", "jaxx"], "jax")],
)
def test_a_misspelt_command_is_an_error_that_names_the_commands_and_the_nearest(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    said = capsys.readouterr().err
    assert f"'{meant}'" in said or f"{meant}," in said or f" {meant})" in said  # as the version of Python quotes them
    assert f"did you mean {meant}?" in said
    with pytest.raises(SystemExit, match="2"):
        cli.main(["nothing-like-it"])
    assert "did you mean" not in capsys.readouterr().err


def test_a_list_without_names_is_an_error_and_does_not_mean_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["suite", "--workload", " , "])
    assert "--workload: there is no name in it" in capsys.readouterr().err


def test_that_nobody_reads_the_output_is_no_error() -> None:
    """As with ``adabayes doctor | true``."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "adabayes", "doctor"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_an_error_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit, match=r"^adabayes: cannot write the output: .*No space left"):
            cli.main(["--help"])
        assert sys.stdout is full


def test_the_version_stands_in_one_place() -> None:
    """That of the package, which the installed metadata and pyproject.toml take over; CITATION.cff may repeat it."""
    assert importlib.metadata.version("adabayes") == __version__
    assert not re.search(r"^version\b", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    cited = re.findall(r"^version: *(\S+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited in ([], [__version__])


def test_doctor_tells_versions_and_kernels_and_all_extras(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor"])
    said = capsys.readouterr().out
    assert f"adabayes      {__version__}" in said
    assert torch.__version__ in said
    assert (kernels.unavailable() or kernels.instruction_set()) in said
    table = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    declared = re.findall(r"^(\w+) = \[", table.partition("\n[")[0], re.MULTILINE)
    assert "lightning" in declared
    listed = re.findall(r"[\w-]+", said.partition("\nextras")[2].replace("not installed", ""))
    assert set(declared) <= set(listed)
    assert doctor.extras()["plot"]


def test_doctor_names_extras_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.metadata.distribution

    def without_ray(name: str) -> importlib.metadata.Distribution:
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(importlib.metadata, "distribution", without_ray)
    found = doctor.extras()
    assert not found["ray"]
    assert found["plot"]
    assert "not installed" in doctor.diagnosis()


def test_bench_measures_prints_writes_and_draws(tmp_path: Path) -> None:
    file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    options = ["--workload", "tiny", "--repeats", "3", "--threads", "1"]
    names = ["AdaBayes foreach", "AdamW foreach"] + ([] if kernels.unavailable() else ["AdaBayes fused bf16"])
    chosen = [word for name in names for word in ("--optimizer", name)]
    done = adabayes("bench", *options, *chosen, "--json", str(file), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines()[:-2])) <= 80  # below are paths
    report = json.loads(file.read_text())
    assert report["machine"]["torch"] == torch.__version__
    assert report["settings"]["threads"] == 1
    rows = {row["optimizer"]: row for row in report["rows"]}
    assert set(rows) == {torch_steps.BASELINE, *names}
    assert rows[torch_steps.BASELINE]["ratio"] == 1
    assert rows[torch_steps.BASELINE]["state_bytes"] == 8
    if not kernels.unavailable():
        assert rows["AdaBayes fused bf16"]["state_bytes"] == 4
        assert rows["AdaBayes fused bf16"]["of_roof"] > 0
    for name, row in rows.items():
        assert len(row["seconds"]) == 3
        assert name in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_measures_optimizers_of_matrices(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    names = ["AdaBayes-K", "pytorch_optimizer.SOAP"] + (["Muon"] if hasattr(torch.optim, "Muon") else [])
    chosen = [word for name in names for word in ("--optimizer", name)]
    done = adabayes("bench", "--matrix", "--workload", "transformer", "--repeats", "2", *chosen, "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = {row["optimizer"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {torch_steps.BASELINE, *names}
    for row in rows.values():  # the mean, for steps differ
        assert row["milliseconds"] == pytest.approx(1e3 * sum(row["seconds"]) / 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "resnet"], "unknown workload 'resnet'; there are 'tiny'"),
        (["--optimizer", "adam"], "unknown optimizer 'adam'; there are 'AdamW fused'"),
        (["--threads", "0"], "threads 0 and repeats 30 must be at least 1"),
        (["--json", "no/such/folder/file.json"], "there is no folder"),
    ],
)
def test_bench_refuses_what_it_does_not_know_before_it_measures(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", *arguments])
    assert message in capsys.readouterr().err


def test_slow_steps_have_a_table_of_80_columns_too() -> None:
    settings = measure.Settings(("gpt2",), ("pytorch_optimizer.SOAP",), threads=2, repeats=1)
    machine = {"processor": "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz (64 cores)", "torch": "2.15.0+cu128"}
    for milliseconds in (99.994, 999.94, 12345.6):
        row = Row("gpt2", "pytorch_optimizer.SOAP", 10, milliseconds, milliseconds, milliseconds, 1, 38, 10.1, 1, ())
        table = Report(settings, machine, (row,)).table()
        assert max(map(len, table.splitlines())) <= 80


def test_workloads_have_the_sizes_of_the_networks() -> None:
    assert {name: workload.weights for name, workload in WORKLOADS.items()} == {
        "tiny": 10_000,
        "small": 2_099_068,
        "small-saved": 2_099_068,
        "densenet121": 6_956_298,
        "resnet34": 21_282_122,
        "one50m": 50_000_000,
        "gpt2": 124_439_808,
        "transformer": 842_496,
        "resnet20": 269_722,
        "vit-s": 10_646_784,
    }


def test_small_workloads_are_a_thousand_tensors_each_time_the_same() -> None:
    for name in ("small", "small-saved"):
        shapes = WORKLOADS[name].shapes()
        assert len(shapes) == 1000
        assert all(64 <= size <= 4096 for (size,) in shapes)
        assert shapes == WORKLOADS["small"].shapes()
        assert name in QUICK


@pytest.mark.parametrize("saved", [False, True])
def test_every_optimizer_of_a_saved_workload_has_given_its_state_away(
    saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    state_dict = torch.optim.Optimizer.state_dict

    def noted(optimizer: torch.optim.Optimizer) -> Any:
        found = state_dict(optimizer)
        given.append(len(found["state"]))
        return found

    monkeypatch.setattr(torch.optim.Optimizer, "state_dict", noted)
    names = [torch_steps.BASELINE, "AdaBayes foreach", "AdaBayes-FP foreach"]
    torch_steps.steps(Workload(lambda: [(3,), (4,)], saved=saved), names)
    assert given == ([2, 2, 2] if saved else [])


def test_bench_measures_jax_too() -> None:
    chosen = ("--workload", "one50m", "--optimizer", "AdaBayes", "--repeats", "2")
    done = adabayes("bench", "--backend", "jax", *chosen)
    assert done.returncode == 0, done.stderr
    for name in ("optax.adamw", "AdaBayes"):
        assert f"\n{name} " in done.stdout
    matrix = ("--matrix", "--optimizer", "AdaBayes-K", "--optimizer", "optax.contrib.muon")
    done = adabayes("bench", "--backend", "jax", "--workload", "one50m", "--repeats", "1", *matrix)
    assert done.returncode == 0, done.stderr
    assert "\nAdaBayes-K " in done.stdout
    assert "\noptax.contrib.muon " in done.stdout
    done = adabayes("bench", "--backend", "jax", "--threads", "1")
    assert done.returncode == 2
    assert "taskset" in done.stderr
    done = adabayes("bench", "--backend", "jax", "--workload", "small-saved")  # JAX's state is with the caller anyway
    assert done.returncode == 2
    assert "unknown workload 'small-saved'" in done.stderr


@pytest.mark.parametrize(
    "name", sorted({"ivon.IVON", "schedulefree.AdamW", "adabound.AdaBound"} & set(torch_steps.optimizers()))
)
def test_other_packages_take_part_where_they_are_installed(name: str) -> None:
    report = measure.run(measure.Settings(("tiny",), (torch_steps.BASELINE, name), threads=1, repeats=2))
    assert report.rows[1].optimizer == name
    assert report.rows[1].milliseconds > 0
