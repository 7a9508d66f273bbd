"""AdaBayes-K's fused steps give the same bits for every number of threads: one thread works on a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adabayes import AdaBayesK
from tests.kernels.common import needs_kernels

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def train(threads: int, **settings: Any) -> list[torch.Tensor]:
    """Return the weights after 30 steps."""
    torch.set_num_threads(threads)
    random = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=random) for shape in ((256, 384), (130, 77), (64, 32, 3, 3), (10,))]
    optimizer = AdaBayesK(params, lr=1e-2, fused=True, **settings)
    for _ in range(30):
        for p in params:
            p.grad = torch.randn(p.shape, generator=random)
        optimizer.step()
    return params


@pytest.mark.parametrize("settings", [{}, {"share_bases": True}, {"block_size": 256}, {"state_dtype": torch.bfloat16}])
def test_steps_are_the_same_for_every_number_of_threads(settings: dict[str, Any]) -> None:
    one = train(1, **settings)
    for threads in (2, 5):
        assert all(map(torch.equal, train(threads, **settings), one))
