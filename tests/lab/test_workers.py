"""Processes for runs: they do several, and one that dies is replaced."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from adabayes.lab.execute.sweep import Options
from adabayes.lab.execute.workers import Workers
from adabayes.lab.run.folder import RunFolder, folder_of
from tests.lab.conftest import spec_of


@pytest.fixture
def folders(tmp_path: Path) -> list[RunFolder]:
    """Two runs that have not started yet."""
    found = []
    for seed in (0, 1):
        spec = spec_of("sgd", seed=seed, epochs=1)
        found.append(folder_of(spec, tmp_path))
        found[-1].path.mkdir(parents=True)
        found[-1].write("spec.json", asdict(spec))
    return found


def test_a_process_does_several_runs_and_a_dead_one_is_not_lent_again(folders: list[RunFolder]) -> None:
    first, second = folders
    with Workers() as workers:
        with workers.one() as worker:
            *_, last = worker.ask(first.path, Options(), 1)
            assert last["status"] == "done"
        with workers.one() as same:
            assert same is worker
        worker.process.kill()  # while it is idle
        worker.process.wait()
        with workers.one() as other:
            assert other is not worker
            *_, last = other.ask(second.path, Options(), 1)
            assert last["status"] == "done"
    assert other.process.poll() == 0
