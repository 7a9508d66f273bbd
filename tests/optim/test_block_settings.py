"""Settings of blocks: shared bases from AdamW's state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adabayes import AdaBayesK

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
