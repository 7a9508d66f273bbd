"""Settings of blocks, in every form in which they are given: shared bases from AdamW's state, pairs as lists."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK
from adabayes.diagnostics import Correlations, matrix_memory_plan
from adabayes.optim.param_groups import param_groups

SHAPE = (16, 24)


def parameter(seed: int = 0) -> Tensor:
    return nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)))


def train(optimizer: torch.optim.Optimizer, p: Tensor, steps: int = 3) -> None:
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        p.grad = torch.randn(SHAPE, generator=random).to(p.dtype)
        optimizer.step()


# Continuing from AdamW with shared bases


def migrated(**settings: Any) -> tuple[AdaBayesK, Tensor]:
    """Return AdaBayes-K with the state of an AdamW that took three steps."""
    p = nn.Parameter(parameter().double())  # in fp32, rounding turns directions without gradients
    adamw = torch.optim.AdamW([p], lr=1e-3)
    train(adamw, p)
    optimizer = AdaBayesK([p], lr=1e-3, **settings)
    optimizer.load_state_dict(optimizer.from_adamw(adamw.state_dict()))
    return optimizer, p


def test_shared_bases_from_adamws_state_are_those_of_the_summed_covariances() -> None:
    optimizer, p = migrated(block_size=8, share_bases=True)
    separate, q = migrated(block_size=8)
    state, reference = optimizer.state[p], separate.state[q]
    grid = reference["factor_0"].unflatten(0, (2, 3)), reference["factor_1"].unflatten(0, (2, 3))
    torch.testing.assert_close(state["factor_0"], grid[0].sum(1))  # the blocks of a row share their left basis
    torch.testing.assert_close(state["factor_1"], grid[1].sum(0))
    for side in (0, 1):
        factor, basis = state[f"factor_{side}"], state[f"basis_{side}"]
        rotated = basis.mT @ factor @ basis
        off_diagonal = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
        # The ramp of the first eigenvectors turns them by about 1e-5 per row.
        assert off_diagonal.abs().amax() < 1e-3 * rotated.abs().amax()


def test_training_continues_from_adamws_state_with_shared_bases() -> None:
    optimizer, p = migrated(block_size=8, share_bases=True)
    before = p.detach().clone()
    train(optimizer, p)
    assert optimizer.state[p]["step"] == 4
    assert p.isfinite().all()
    assert (p != before).all()


def test_sharing_the_bases_of_a_single_block_changes_nothing() -> None:
    shared, p = migrated(share_bases=True)
    separate, q = migrated()
    for name, value in separate.state[q].items():
        torch.testing.assert_close(shared.state[p][name], value)


# Pairs as lists, as files of settings have them


def test_a_state_dict_whose_block_size_is_a_list_loads_and_continues() -> None:
    p, q = parameter(), parameter()
    optimizer, other = AdaBayesK([p], block_size=(4, 8)), AdaBayesK([q], block_size=(4, 8))
    train(optimizer, p)
    train(other, q)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][0]["block_size"] = [4, 8]
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["block_size"] == (4, 8)
    assert state_dict["param_groups"][0]["block_size"] == [4, 8]  # the caller's dict is not changed
    train(optimizer, p)
    train(other, q)
    assert torch.equal(p, q)


@pytest.mark.parametrize("in_group", [True, False])
def test_a_block_size_given_as_a_list_is_a_pair(in_group: bool) -> None:
    p = parameter()
    group: dict[str, Any] = {"params": [p]}
    optimizer = AdaBayesK([group | {"block_size": [4, 8]}]) if in_group else AdaBayesK([group], block_size=[4, 8])  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["block_size"] == (4, 8)
    train(optimizer, p)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.effective_lr(p).shape == (12, 4, 8)
    rates = optimizer.current_rates(optimizer.param_groups[0], p)
    assert rates[0] == pytest.approx(4 * optimizer.param_groups[0]["lr"])


def test_param_groups_accept_a_list_and_refuse_three_sizes() -> None:
    model = nn.MultiheadAttention(embed_dim=64, num_heads=4)
    assert param_groups(model, block_size=[32, 16])[0]["block_size"] == (32, 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid block_size"):
        param_groups(model, block_size=(32, 16, 8))  # type: ignore[arg-type]


def test_memory_plans_accept_a_list_and_refuse_three_sizes() -> None:
    plan = matrix_memory_plan([SHAPE], block_size=[4, 8])  # type: ignore[arg-type]
    assert plan == matrix_memory_plan([SHAPE], block_size=(4, 8))
    with pytest.raises(ValueError, match="Invalid block_size"):
        matrix_memory_plan([SHAPE], block_size=(4, 8, 2))  # type: ignore[arg-type]


def test_correlations_accept_a_list_and_refuse_three_sizes() -> None:
    model = nn.Linear(8, 8)
    correlations = Correlations(model, block_size=[4, 8])  # type: ignore[arg-type]
    model(torch.ones(1, 8)).sum().backward()
    correlations.see()
    with pytest.raises(ValueError, match="Invalid block_size"):
        Correlations(model, block_size=(4, 8, 2))  # type: ignore[arg-type]


# Step counts


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bfloat16])
@pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP, AdaBayesK])
def test_step_counts_of_other_dtypes_are_loaded_as_floats(cls: Any, dtype: torch.dtype) -> None:
    p, q = parameter(), parameter()
    optimizer, other = cls([p]), cls([q])
    train(optimizer, p)
    train(other, q)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0]["step"] = state_dict["state"][0]["step"].to(dtype)
    optimizer.load_state_dict(state_dict)
    assert optimizer.state[p]["step"].dtype == torch.float32
    train(optimizer, p)
    train(other, q)
    assert torch.equal(p, q)
