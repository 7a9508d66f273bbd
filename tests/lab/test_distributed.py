"""A run in several processes, started by torchrun: the metrics of one process, and no loss when a process is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from adabayes.lab.execute import sweep
from adabayes.lab.run.folder import folder_of
from tests.lab.conftest import adabayes, without_times
from tests.support.marks import has_fsdp2
from tests.support.torchrun import LOOPBACK

# The paper's dynamics begin with small steps, so that rounding takes longer to grow.
TRAIN = ("train", "--optimizer", "adabayes", "--set", "dynamics=paper", "--epochs", "3", "--checkpoint-every", "0.1")
TRAIN_K = ("train", "--optimizer", "adabayes-k", "--epochs", "2", "--checkpoint-every", "0.1")
TOGETHER = ("--standalone", "--nproc-per-node=2")
ONE_THREAD = LOOPBACK


def torchrun(
    out: Path, kind: str, *options: str, launch: Sequence[str] = TOGETHER, train: Sequence[str] = TRAIN
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "--max-restarts=3", "-m", "adabayes", *train]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, "--out", str(out), "--distributed", kind, *options],
        stdout=pipe,
        stderr=pipe,
        text=True,
        env={**ONE_THREAD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # for several agents; see docs/cluster.md
    )


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    return list(map(int, found.stdout.split()))


def metrics(out: Path) -> list[dict[str, Any]]:
    (spec,) = sweep.noted(out)
    return without_times(folder_of(spec, out).metrics())


def wait_for(out: Path, pattern: str, process: subprocess.Popen[str]) -> None:
    while not list(out.rglob(pattern)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("together")
    process = torchrun(out, "ddp")
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone")
    done = adabayes(*TRAIN, "--out", out, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return out


def test_metrics_are_those_of_one_process(together: Path, alone: Path) -> None:
    """But for the order of sums, which training blows up: losses differ by 2e-8 in the first epoch."""
    ours, theirs = metrics(together), metrics(alone)
    assert len(ours) == 3
    for key in ("train_loss", "train_error", "test_loss", "test_error", "sgd_like"):
        assert ours[0][key] == pytest.approx(theirs[0][key], rel=1e-3)
        assert ours[1][key] == pytest.approx(theirs[1][key], rel=0.05)
    assert ours[0]["train_loss"] == pytest.approx(theirs[0]["train_loss"], rel=1e-5)
    assert len(list(together.rglob("model.safetensors"))) == 1


@has_fsdp2
def test_fsdp2_does_what_ddp_does_and_a_rank_that_is_killed_costs_nothing(together: Path, tmp_path: Path) -> None:
    process = torchrun(tmp_path, "fsdp2")
    wait_for(tmp_path, "checkpoint-*.json", process)
    os.kill(workers_of(process)[-1], signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "failed: RuntimeError" in errors  # of the first, whose partner was gone; torchrun started both again
    losses = [[row[key] for row in metrics(out) for key in ("train_loss", "test_loss")] for out in (tmp_path, together)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_one_process_goes_on_where_several_were_killed(together: Path, tmp_path: Path) -> None:
    process = torchrun(tmp_path, "ddp")
    wait_for(tmp_path, "metrics.jsonl", process)
    for pid in (process.pid, *workers_of(process)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    done = adabayes(*TRAIN, "--out", tmp_path, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert "processes 2 then, 1 now" in done.stderr
    ours, theirs = metrics(tmp_path), metrics(together)
    assert ours[0]["train_loss"] == pytest.approx(theirs[0]["train_loss"], rel=1e-4)
    assert ours[2]["train_loss"] == pytest.approx(theirs[2]["train_loss"], rel=0.05)


@has_fsdp2
def test_mixed_precision_and_one_process_after_fsdp2_with_kernels(together: Path, tmp_path: Path) -> None:
    process = torchrun(tmp_path / "mixed", "ddp", "--autocast", "--epochs", "1")
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert metrics(tmp_path / "mixed")[0]["train_loss"] == pytest.approx(metrics(together)[0]["train_loss"], rel=0.05)

    fused = ("--set", "fused=true")
    process = torchrun(tmp_path / "fused", "fsdp2", *fused)
    wait_for(tmp_path / "fused", "checkpoint-*.json", process)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    done = adabayes(*TRAIN, *fused, "--out", tmp_path / "fused", env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "fused")) == 3


@pytest.fixture(scope="module")
def k_alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("k")
    done = adabayes(*TRAIN_K, "--out", out, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return metrics(out)


def assert_alike(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Compare losses of AdaBayes-K in fp32: one process uses its kernel, several use torch's products.

    In an early epoch of large steps, their rounding changes the loss by a few percent. tests/optim compares weights in
    float64, within 1e-9.
    """
    assert len(ours) == len(theirs) == 2
    for row, other in zip(ours, theirs):
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=0.05)
        assert row["state_bytes"] == other["state_bytes"]


def test_adabayes_k_under_ddp_trains_as_in_one_process(k_alone: list[dict[str, Any]], tmp_path: Path) -> None:
    process = torchrun(tmp_path, "ddp", train=TRAIN_K)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert_alike(metrics(tmp_path), k_alone)


@has_fsdp2
def test_two_agents_restart_after_a_kill_from_shards_of_adabayes_k(
    k_alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Two machines, as torchrun sees them; a process of the second one dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=test", "--local-addr=127.0.0.1")
    launch = ("--nnodes=2", "--nproc-per-node=1", *meeting)
    agents = [torchrun(tmp_path, "fsdp2", launch=launch, train=TRAIN_K) for _ in range(2)]
    wait_for(tmp_path, "checkpoint-*.json", agents[0])
    (written,) = {path.parent for path in tmp_path.rglob("__0_*.distcp")}
    assert sorted(path.name for path in written.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    os.kill(workers_of(agents[1])[0], signal.SIGKILL)
    for agent in agents:
        _, errors = agent.communicate()
        assert agent.returncode == 0, errors
    assert_alike(metrics(tmp_path), k_alone)
    (run,) = (tmp_path / "runs").iterdir()
    assert len(json.loads((run / "environment.json").read_text(encoding="utf-8"))) == 2  # starts
    assert not list(run.glob("*.shards"))  # of no more use


def test_the_reason_of_a_failure_is_that_of_the_first_process(tmp_path: Path) -> None:
    assert adabayes(*TRAIN, "--epochs", "1", "--out", tmp_path, env=ONE_THREAD).returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    (run / "result.json").unlink()
    starts = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    starts[-1]["data"] = "another"
    (run / "environment.json").write_text(json.dumps(starts), encoding="utf-8")
    process = torchrun(tmp_path, "ddp", "--epochs", "1")
    _, errors = process.communicate()
    assert process.returncode != 0
    assert "was begun with other data" in errors
    assert "was begun with other data" in json.loads((run / "failed.json").read_text(encoding="utf-8"))["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*TRAIN, "--distributed", "ddp", "--compile"), "--compile does not go with --distributed"),
        (("reproduce", "--address", "auto"), "--address auto is that of a Ray cluster: give --executor ray"),
    ],
)
def test_what_does_not_go_together_is_said(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = adabayes(*arguments, "--out", tmp_path)
    assert done.returncode == 1
    assert message in done.stderr


def test_without_torchrun_it_is_said_how(tmp_path: Path) -> None:
    done = adabayes(*TRAIN, "--out", tmp_path, "--distributed", "ddp")
    assert done.returncode == 1
    assert "torchrun --nproc-per-node 2 -m adabayes train --distributed ddp" in done.stderr
