"""The plan of AdaBayes-K's memory and work, against what is measured, and the tables in docs/cluster.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adabayes import AdaBayesK
from adabayes.bench.torch_steps import state_bytes
from adabayes.diagnostics import matrix_memory_plan, scale
from tests.support.marks import keeps_order
from tests.support.operations import count_operations

ROOT = Path(__file__).parents[2]
MATRICES = [(6, 4), (12, 3), (4, 3, 2, 2), (9, 9), (20, 3)]
STACKS = [(2, 6, 4), (3, 9, 5), (1, 4, 4), (2, 3, 8, 2)]


def trained(shapes: list[tuple[int, ...]], steps: int, **settings: Any) -> AdaBayesK:
    optimizer = AdaBayesK([torch.zeros(shape) for shape in shapes], fused=False, **settings)
    for _ in range(steps):
        take_step(optimizer)
    return optimizer


def take_step(optimizer: AdaBayesK) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn(p.shape)
    optimizer.step()


@pytest.mark.parametrize("block_size", [4, (3, 5), (100, 2)])
@pytest.mark.parametrize("share_bases", [False, True])
@pytest.mark.parametrize(("shapes", "batch_dims"), [(MATRICES, 0), (STACKS, 1)])
def test_state_is_what_is_measured(
    shapes: list[tuple[int, ...]], batch_dims: int, share_bases: bool, block_size: int | tuple[int, int]
) -> None:
    settings: dict[str, Any] = {"block_size": block_size, "share_bases": share_bases, "batch_dims": batch_dims}
    plan = matrix_memory_plan(shapes, **settings)
    assert plan.state == state_bytes(trained(shapes, 1, **settings))


def test_shared_bases_need_less_than_half_of_the_state_of_a_large_matrix() -> None:
    plain, shared = (matrix_memory_plan([(768, 3072)], share_bases=share) for share in (False, True))
    assert plain.state / (768 * 3072) == 24
    assert shared.state / (768 * 3072) == pytest.approx(9.67, abs=0.01)
    assert shared.refreshes < plain.refreshes
    with pytest.raises(ValueError, match="share_bases=True does not work with sharded parameters"):
        matrix_memory_plan([(768, 3072)], share_bases=True, devices=2)


@pytest.mark.parametrize("share_bases", [False, True])
@pytest.mark.parametrize("learn_every", [1, 2])
def test_the_costliest_step_is_the_costliest_that_is_counted(share_bases: bool, learn_every: int) -> None:
    """Products of matrices are counted by torch, decompositions here; over all combinations of what is due."""
    settings: dict[str, Any] = {"block_size": 4, "refresh": 3, "learn_every": learn_every, "share_bases": share_bases}
    optimizer = trained(MATRICES, 32, **settings)  # at first, bases are refreshed more often
    counts = [count_operations(lambda: take_step(optimizer)) for _ in range(6)]
    plan = matrix_memory_plan(MATRICES, **settings)
    assert plan.peak == pytest.approx(max(counts), rel=1e-12)
    assert plan.rotations + plan.refreshes == pytest.approx(sum(counts) / 6, rel=1e-12)


def test_bases_with_one_index_are_due_together() -> None:
    """Matrices of one block are refreshed in the same step; the blocks of one matrix take turns."""
    many, one = (matrix_memory_plan(shapes, block_size=4) for shapes in ([(4, 4)] * 10, [(40, 4)]))
    assert many.refreshes == pytest.approx(one.refreshes)
    idle = matrix_memory_plan([(40, 4)], block_size=4, refresh=10**9)
    assert one.peak - one.rotations == pytest.approx(one.refreshes)
    assert many.peak - many.rotations == pytest.approx(10 * many.refreshes)
    assert idle.peak == pytest.approx(one.peak)  # each basis is still due once


def test_the_largest_piece_is_a_block_however_many_devices_there_are() -> None:
    shapes = [(4096, 1024), (30000, 256)]
    one, few, many = (matrix_memory_plan(shapes, devices=devices) for devices in (1, 8, 4096))
    assert one.largest == few.largest == many.largest
    assert many.peak == many.largest  # a device has one block at most
    (m, n) = (30000, 128)
    expected = (4 + 2) * m * n * n + (2 + 8 / 3 + 2) * n**3 + 2 * m * n * n  # rotations, a factor, and a refresh
    assert one.largest == expected


def test_work_is_that_of_ten_operations_for_each_side_of_a_block() -> None:
    """About ``10 * block_size / (6 * tokens)`` of training, as docs/cluster.md says, and a sixth more for refreshes."""
    plan = matrix_memory_plan([(4096, 4096)])
    assert plan.rotations == 10 * 128 * 4096**2
    assert plan.refreshes / plan.rotations == pytest.approx(1 / 6, rel=0.05)


@keeps_order
def test_the_tables_in_the_docs_are_those_that_are_printed() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text("utf-8")
    assert scale.cost_per_weight() in page
    assert scale.cost_per_device() in page
