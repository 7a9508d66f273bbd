"""The examples, run as a user runs them but for less long: they learn, and refuse nonsense."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient

from tests.lab.conftest import write_cifar10

EXAMPLES = Path(__file__).parents[2] / "examples"


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # One thread: small networks wait for a second one more than they gain, and torchrun warns unless it is told.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def output(*arguments: str | Path) -> str:
    """Return the output of a script that must end without errors or warnings."""
    done = python(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def errors(printed: str) -> dict[str, float]:
    """Test errors by what is said to have them."""
    found = re.findall(r"^(\S.*?) +test error ([0-9.]+) %", printed, re.MULTILINE)
    return {name: float(error) for name, error in found}


def test_quickstart_learns() -> None:
    printed = output(EXAMPLES / "quickstart.py")
    found = re.fullmatch(r"test error ([0-9.]+) %\n", printed)
    assert found, printed
    assert float(found[1]) < 5


def test_digits_trains_prints_and_draws(tmp_path: Path) -> None:
    printed = output(EXAMPLES / "digits.py", "--epochs", "2", "--seeds", "1", "--out", tmp_path)
    for name in ("SGD", "AdamW", "AdaBayes", "AdaBayes-FP", "8.weight"):
        assert re.search(rf"^ *{re.escape(name)} ", printed, re.MULTILINE), printed
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_diagnose_prints_regimes_and_draws(tmp_path: Path) -> None:
    printed = output(EXAMPLES / "diagnose.py", "--steps", "20", "--out", tmp_path / "rates.png")
    assert "Look at this first" not in printed  # nothing is wrong with it
    assert re.search(r"^ *7\.weight +5,120", printed, re.MULTILINE), printed
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_correlations_prints_a_verdict_and_draws(tmp_path: Path) -> None:
    printed = output(EXAMPLES / "correlations.py", "--steps", "20", "--out", tmp_path / "correlations.png")
    assert re.search(r"^layers\.0\.qkv\.weight +384 x 128 +\d+%", printed, re.MULTILINE), printed
    assert "over 20 gradients. AdaBayes-K" in " ".join(printed.split())
    assert (tmp_path / "correlations.png").read_bytes().startswith(b"\x89PNG")


def test_jax_flax_learns_and_tells_regimes() -> None:
    printed = output(EXAMPLES / "jax_flax.py", "--epochs", "8")
    found = errors(printed)
    assert list(found) == ["optax.adamw", "AdaBayes", "AdaBayes-FP", "AdaBayes-K"]
    assert max(found.values()) < 10, found
    assert re.search(r"^hidden1\.kernel ", printed, re.MULTILINE), printed


def test_char_gpt_learns_and_writes() -> None:
    printed = output(EXAMPLES / "char_gpt.py", "--steps", "40")
    assert re.search(r"^ *step +AdamW +AdaBayesK$", printed, re.MULTILINE), printed
    found = re.search(r"^ +40 +([0-9.]+) +([0-9.]+)$", printed, re.MULTILINE)
    assert found, printed
    assert max(map(float, found.groups())) < 3.5  # a guess has 4.85, the frequencies of characters 3.1
    assert len(printed[printed.index("    def __init__(self, ") :]) > 400


@pytest.mark.skipif(torch.__version__.startswith("2.6"), reason="FSDP2 of torch 2.6 does not run on the CPU")
def test_fsdp2_goes_on_from_its_checkpoint_and_shares_the_memory(tmp_path: Path) -> None:
    for processes in (2, 1):  # the second time, over the checkpoint of the first
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
        printed = output(*torchrun, EXAMPLES / "fsdp2.py", "--steps", "80", "--checkpoint", tmp_path / "checkpoint")
        found = errors(printed)
        assert list(found) == ["saved", "made anew", "loaded", "trained on"]
        assert found["made anew"] > 50
        assert found["trained on"] < found["loaded"] == found["saved"] < 30
        # 301,066 weights in fp32, shared out; two numbers of state for each, and 1,344,288 of factors and bases.
        memory = {2: "602 kB of weights, 3,893 kB of state", 1: "1,204 kB of weights, 7,786 kB of state"}[processes]
        assert re.findall(r"^process (\d): (.*)$", printed, re.MULTILINE) == [
            (str(i), memory) for i in range(processes)
        ]


def test_hf_trainer_ends_alike_with_an_instance_and_with_the_class(tmp_path: Path) -> None:
    said = []
    for how in ("instance", "class"):
        done = python(EXAMPLES / "hf_trainer.py", "--how", how, "--steps", "3", "--out", tmp_path / how)
        assert done.returncode == 0, done.stderr
        assert "16 x 2 accumulated x 1 processes = 32 sequences" in done.stdout
        said.append(re.findall(r"^(?:held-out modules|\d+% of).*", done.stdout, re.MULTILINE))
        assert (tmp_path / how / "checkpoint-3" / "optimizer.pt").exists()
    assert len(said[0]) == 2
    assert said[0] == said[1]


def test_lightning_module_resumes_to_the_same_weights(tmp_path: Path) -> None:
    printed = output(EXAMPLES / "lightning_module.py", "--epochs", "4", "--out", tmp_path)
    assert "epoch=1.ckpt: the same weights, bit for bit" in printed
    found = errors(printed)
    assert list(found) == ["whole", "resumed"]
    assert found["whole"] < 10


def test_lightning_cli_trains_what_the_yaml_says(tmp_path: Path) -> None:
    printed = output(
        EXAMPLES / "lightning_cli.py", "fit", "--config", EXAMPLES / "configs" / "lightning.yaml",
        "--trainer.logger.init_args.save_dir", tmp_path, "--trainer.max_epochs", "2",
    )  # fmt: skip
    assert float(re.findall(r"^loss: ([0-9.]+)$", printed, re.MULTILINE)[0]) < 2  # a guess has 2.3
    assert 0 < float(re.findall(r"^regimes/adam_like: ([0-9.]+)$", printed, re.MULTILINE)[0]) <= 1
    (saved,) = tmp_path.rglob("config.yaml")
    assert "class_path: adabayes.AdaBayesK" in saved.read_text()


def test_hydra_app_trains_what_the_yaml_and_the_command_line_say(tmp_path: Path) -> None:
    printed = output(EXAMPLES / "hydra_app.py", f"hydra.run.dir={tmp_path}", "optimizer.lr=0.02", "epochs=5")
    assert "AdaBayesK {'_target_': 'adabayes.AdaBayesK', 'lr': 0.02, 'weight_decay': 0.01}" in printed
    assert float(re.findall(r"^test error ([0-9.]+) %$", printed, re.MULTILINE)[0]) < 20


def test_the_notebook_runs_from_top_to_bottom_and_shows_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(EXAMPLES / "adabayes_k.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    shorter = [cell for cell in notebook.cells if "steps=600" in cell.source]
    assert len(shorter) == 1
    shorter[0].source = shorter[0].source.replace("steps=600", "steps=60")
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": EXAMPLES}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    found = re.findall(r"^(\S+) +lr \S+ +test error ([0-9.]+)$", printed, re.MULTILINE)
    assert [name for name, _ in found] == ["AdamW"] * 3 + ["AdaBayes-K"] * 3
    assert max(float(error) for _, error in found) < 0.1  # the pixels' variance is 0.14
    shown = [kind for output in outputs for kind in output.get("data", {}) if kind != "text/plain"]
    assert shown == ["image/png", "text/html", "text/html"]


# Files as CIFAR's in all but their checksums

WITH_CHECKSUMS = """
import runpy, sys
from dataclasses import replace
from adabayes.lab.data import download
download.SOURCES["cifar10"] = replace(download.SOURCES["cifar10"], files={checksums})
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    """How to run the example on 1,200 images whose colour tells their class."""
    folder = tmp_path_factory.mktemp("cifar")
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 1200)
    colours = random.integers(64, 192, (10, 3))[labels]
    pixels = np.repeat(colours, 1024, axis=1) + random.integers(-64, 64, (1200, 3072))
    source = write_cifar10(folder, pixels.astype(np.uint8), labels)
    return "-c", WITH_CHECKSUMS.format(checksums=source.files), EXAMPLES / "cifar.py", "--data", folder


@pytest.mark.parametrize("optimizer", ["adabayes", "adabayes-fp", "adamw", "sgd"])
def test_cifar_learns(cifar: tuple[str | Path, ...], optimizer: str) -> None:
    printed = output(*cifar, "--optimizer", optimizer, "--epochs", "2", "--images", "960")
    found = re.search(rf"^{optimizer} +test error ([0-9.]+) %, averaged ([0-9.]+) %$", printed, re.MULTILINE)
    assert found, printed
    assert max(float(found[1]), float(found[2])) < 60  # a guess has 90


def test_cifar_refuses_more_images_than_there_are(cifar: tuple[str | Path, ...]) -> None:
    done = python(*cifar, "--images", "1001")
    assert done.returncode == 2
    assert "--images 1001: must be from 1 to 1000" in done.stderr


def test_cifar_tells_how_to_get_the_data(tmp_path: Path) -> None:
    done = python(EXAMPLES / "cifar.py", "--data", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("cifar10: no data_batch_1 in")
    assert "adabayes data fetch cifar10" in done.stderr


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        ("digits", ["--epochs", "0"], "--epochs 0 --seeds 3: both must be at least 1"),
        ("jax_flax", ["--epochs", "0"], "--epochs 0: must be at least 1"),
        ("diagnose", ["--steps", "0"], "--steps 0: must be at least 1"),
        ("correlations", ["--steps", "1"], "--steps 1: must be at least 2"),
        ("cifar", ["--epochs", "-1"], "--epochs -1: must be at least 1"),
        ("char_gpt", ["--steps", "0"], "--steps 0: must be at least 1"),
        ("hf_trainer", ["--steps", "0"], "--steps 0: must be at least 1"),
        ("lightning_module", ["--epochs", "0"], "--epochs 0: must be"),
        ("fsdp2", ["--steps", "1"], "--steps 1: must be at least 2"),
        ("fsdp2", [], "started by torchrun"),
    ],
)
def test_nonsense_is_refused(example: str, arguments: list[str], message: str) -> None:
    done = python(EXAMPLES / f"{example}.py", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
