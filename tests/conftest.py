"""Fixtures for the common contract: each optimizer, in each of its forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, AdaBound
from tests.support.whitened import Whitened

Maker = Callable[..., torch.optim.Optimizer]

MAKERS: dict[str, Maker] = {
    "adabayes": AdaBayes,
    "adabayes-exact": partial(AdaBayes, batch_size=2),
    "adabayes-paper": partial(AdaBayes, dynamics="paper"),
    "adabayes-sum": partial(AdaBayes, reduction="sum", batch_size=4),
    "adabayes-fp": AdaBayesFP,
    "adabayes-fp-sum": partial(AdaBayesFP, reduction="sum", batch_size=4),
    "adabayes-k": partial(AdaBayesK, refresh=1),
    "adabound": AdaBound,
    "amsbound": partial(AdaBound, amsbound=True),
    "whitened": Whitened,  # which the engine has never seen
}
# Optimizers in which the step of a weight does not depend on other weights
ELEMENTWISE = [name for name in MAKERS if name not in ("whitened", "adabayes-k")]


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Maker:
    """Return the constructor of each optimizer."""
    return MAKERS[request.param]


@pytest.fixture(params=[name for name in MAKERS if name != "adabayes-k"])
def make_graphable(request: pytest.FixtureRequest) -> Maker:
    """Return the constructor of each optimizer whose step can be captured, compiled as one graph or differentiated."""
    return MAKERS[request.param]


@pytest.fixture(params=ELEMENTWISE)
def make_elementwise(request: pytest.FixtureRequest) -> Maker:
    """Return the constructor of each element-wise optimizer, which can therefore step shards of a parameter."""
    return MAKERS[request.param]


@pytest.fixture(params=[False, True], ids=["single", "foreach"])
def foreach(request: pytest.FixtureRequest) -> bool:
    """Return the value of ``foreach`` in each form."""
    return bool(request.param)


def all_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters and all entries of their state, in order."""
    entries: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            entries.append(p.detach())
            state: dict[str, Any] = optimizer.state.get(p, {})
            entries += [state[name] for name in sorted(state)]
    return entries


def assert_same(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """Assert that parameters and state of two optimizers have the same bits."""
    left, right = all_state(a), all_state(b)
    assert len(left) == len(right)
    for x, y in zip(left, right):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
