"""Stacks of matrices in several processes, over gloo, against one process. tests/workers/stacks.py has the cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.torchrun import torchrun
from tests.workers import stacks as worker

WORLDS = (2, 4)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stacks")
    for world in WORLDS:
        torchrun(world, worker.__name__, out)
    return out


@pytest.mark.parametrize(("world", "case"), [(world, case) for world in WORLDS for case in worker.cases(world)])
def test_in_several_processes(out: Path, world: int, case: str) -> None:
    path = out / str(world) / case
    if not path.exists():
        error = path.with_suffix(".error").read_text(encoding="utf-8")
        if torch.__version__.startswith("2.6") and "AttributeError" in error:
            pytest.skip("FSDP2 of torch 2.6 does not run on the CPU")
        pytest.fail(error)
