"""Threads of a run: one for a small network, and the same number when it is resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adabayes.lab import data, protocol
from adabayes.lab.data import Data
from adabayes.lab.execute import sweep, threads
from adabayes.lab.run.folder import RunFolder
from adabayes.lab.run.training import Watch
from tests.lab.conftest import spec_of


def test_operations_are_counted_on_one_batch() -> None:
    """Expected by hand: a multiplication and an addition for each weight and example, three times."""
    spec = protocol.load("suite/pinn").runs()[0]
    weights = 2 * 64 + 3 * 64 * 64 + 64
    assert threads.operations(spec, data.load("poisson")) == 3 * 2 * weights * spec.batch_size


def test_a_small_network_gets_one_thread_and_a_large_one_those_of_the_process(digits: Data, tmp_path: Path) -> None:
    small = protocol.load("quick").runs()[0]
    large = replace(small, model_options={"width": 64})
    with threads.using(2):
        assert threads.choose(small, RunFolder(tmp_path), digits, None) == 1
        assert threads.choose(large, RunFolder(tmp_path), digits, None) == 2
        assert threads.choose(small, RunFolder(tmp_path), digits, 3) == 3


@pytest.mark.parametrize(("given", "then"), [(None, 1), (2, 2)])
def test_a_run_resumes_with_the_threads_that_it_had(digits: Data, tmp_path: Path, given: int | None, then: int) -> None:
    spec, folder = spec_of("sgd", epochs=1), RunFolder(tmp_path)
    options = sweep.Options(threads=given)
    before = torch.get_num_threads()
    assert sweep.attempt(spec, folder, lambda: digits, Watch(), options).status == "done"
    starts = folder.read("environment.json") or []
    assert [start["threads"] for start in starts] == [then]
    assert torch.get_num_threads() == before
    folder.remove("result.json")
    assert threads.choose(spec, folder, digits, None) == then
    assert threads.choose(spec, folder, digits, 3) == 3
