"""AdaBayes-K in several processes, over gloo: sharded matrices, shared refreshes, against one process.

All cases of a number of processes are run by one start of torchrun (tests/workers/matrix.py). Where unsharded and
sharded parameters get the same gradients, they end within 1e-9. tests/optim/test_distributed.py trains networks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adabayes._blocks.ownership import first_owners
from adabayes._util.distributed import num_rank_orders
from tests.support.cases import error_of, run_cases
from tests.workers import matrix as worker

WORLDS = (2, 4)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(worker, tmp_path_factory.mktemp("matrices"), WORLDS)


@pytest.mark.parametrize(("world", "case"), [(world, case) for world in WORLDS for case in worker.cases(world)])
def test_in_several_processes(out: Path, world: int, case: str) -> None:
    if error := error_of(out, world, case):
        if torch.__version__.startswith("2.6") and ("AttributeError" in error or case == "complex"):
            pytest.skip("FSDP2 of torch 2.6 does not run on the CPU, nor do its collectives take complex numbers")
        if case == "work_is_balanced" and num_rank_orders() == 1:
            pytest.skip("process groups of this torch have their ranks in order, so owners differ")
        pytest.fail(error)


def test_owners_are_balanced_by_cost() -> None:
    """A transformer of GPT-2's shapes on as many processes as leave most of its matrices uneven."""
    square = 128**3 * 2
    num_blocks = [36, 108, 144, 144] * 12
    for world in (5, 7, 64):
        loads = [0] * world
        firsts = first_owners([square] * len(num_blocks), num_blocks, loads, num_candidates=8)
        assert sum(loads) == square * sum(num_blocks)
        assert max(loads) < 1.1 * sum(loads) / world
        assert len(set(firsts)) <= 8  # as many process groups
    loads = [0, 0]
    assert first_owners([8, 8, 1, 1], [2, 1, 1, 1], loads, num_candidates=8) == [0, 0, 1, 1]
    assert loads == [16, 10]
    loads = [0] * 4
    first_owners([8, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 9, loads, num_candidates=8)  # one owns only the large matrix
    assert sorted(loads) == [2, 3, 3, 8]


def test_with_one_candidate_process_0_owns_the_first_blocks() -> None:
    assert first_owners([8, 8], [1, 3], [0, 0], num_candidates=1) == [0, 0]
