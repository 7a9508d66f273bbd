"""Stacks of matrices in several processes, over gloo, against one process. tests/workers/stacks.py has the cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.cases import error_of, run_cases
from tests.workers import stacks as worker

WORLDS = (2, 4)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(worker, tmp_path_factory.mktemp("stacks"), WORLDS)


@pytest.mark.parametrize(("world", "case"), [(world, case) for world in WORLDS for case in worker.cases(world)])
def test_in_several_processes(out: Path, world: int, case: str) -> None:
    if error := error_of(out, world, case):
        if torch.__version__.startswith("2.6") and "AttributeError" in error:
            pytest.skip("FSDP2 of torch 2.6 does not run on the CPU")
        pytest.fail(error)
