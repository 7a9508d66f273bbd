"""Sweeps on a real Ray cluster of several nodes, here all on this machine: nodes that die, drivers that are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["RAY_AUTH_MODE"] = "disabled"  # of processes on this machine, for a minute
cluster_utils = pytest.importorskip("ray.cluster_utils")

from adabayes.lab.execute import sweep  # noqa: E402
from adabayes.lab.run.folder import folder_of  # noqa: E402
from tests.lab.conftest import adabayes, start, without_times  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

ASKED = ("reproduce", "--optimizers", "sgd,adabayes-k", "--seeds", "1", "--epochs", "6")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a head that runs nothing, and two nodes with one core each."""
    handler = signal.getsignal(signal.SIGTERM)
    found = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        found.add_node(num_cpus=1)
    signal.signal(signal.SIGTERM, handler)  # which Ray has taken
    yield found
    found.shutdown()


def on(cluster: Any, out: Path) -> tuple[Any, ...]:
    return (*ASKED, "--executor", "ray", "--address", cluster.address, "--out", out, "--checkpoint-every", "0.1")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the local executor with the same number of threads."""
    out = tmp_path_factory.mktemp("local")
    done = adabayes(*ASKED, "--jobs", "2", "--out", out)
    assert done.returncode == 0, done.stderr
    return metrics(out)


def metrics(out: Path) -> dict[str, Any]:
    return {spec.folder: without_times(folder_of(spec, out).metrics()) for spec in sweep.noted(out)}


def wait_for_checkpoints(out: Path, process: Any, runs: int = 1) -> None:
    deadline = time.monotonic() + 120
    while len({path.parent for path in out.rglob("checkpoint-*.json")}) < runs:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_results_are_those_of_the_local_executor_though_a_node_dies(
    cluster: Any, local: dict[str, Any], tmp_path: Path
) -> None:
    process = start(*on(cluster, tmp_path))
    wait_for_checkpoints(tmp_path, process, 2)
    doomed = next(iter(cluster.worker_nodes))
    doomed.kill_raylet()  # SIGKILL, with all that ran there
    cluster.add_node(num_cpus=1)  # which takes longer than the runs may
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert metrics(tmp_path) == local
    assert "its worker or node died; it resumes from its last checkpoint" in errors
    assert "AdaBayes" in output
    cluster.remove_node(doomed)


def test_a_sweep_resumes_after_its_driver_was_killed(cluster: Any, local: dict[str, Any], tmp_path: Path) -> None:
    command = (
        *ASKED,
        "--executor",
        "ray",
        "--address",
        cluster.address,
        "--out",
        tmp_path,
        "--checkpoint-every",
        "0.1",
    )
    process = start(*command)
    wait_for_checkpoints(tmp_path, process)
    process.kill()
    process.communicate()
    done = adabayes(*command)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path) == local


@pytest.mark.long
def test_ctrl_c_leaves_checkpoints(cluster: Any, local: dict[str, Any], tmp_path: Path) -> None:
    command = on(cluster, tmp_path)
    process = start(*command)
    wait_for_checkpoints(tmp_path, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert "nothing is lost" in errors
    assert adabayes(*command).returncode == 0
    assert metrics(tmp_path) == local


def test_failures_are_reported_run_by_run(cluster: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        "extends = 'quick'\nseeds = 1\nepochs = 1\ncompare = ['sgd', 'bad']\n"
        "[optimizers.bad]\nlabel = 'Bad'\nclass = 'torch.optim.SparseAdam'\n"
    )
    done = adabayes(
        "reproduce", "--protocol", path, "--executor", "ray", "--address", cluster.address, "--out", tmp_path
    )
    assert done.returncode == 1
    assert "failed: digits resnet8 bad seed 0: RuntimeError: SparseAdam does not support dense" in done.stderr
    assert "SGD" in done.stdout


def test_runs_that_no_node_can_take_are_not_waited_for_in_silence(cluster: Any, tmp_path: Path) -> None:
    process = start(*on(cluster, tmp_path), "--cpus-per-run", "64")
    said = ""
    assert process.stderr is not None
    while "no node has 64 CPUs" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    done = adabayes("reproduce", "--executor", "ray", "--address", "127.0.0.1:1", "--out", tmp_path)
    assert done.returncode == 1
    assert "there is no Ray cluster at 127.0.0.1:1" in done.stderr
    done = adabayes("reproduce", "--executor", "ray", "--cpus-per-run", "0", "--out", tmp_path)
    assert "--cpus-per-run 0 must be above 0" in done.stderr
