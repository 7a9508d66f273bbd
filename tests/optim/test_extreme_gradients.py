"""Finite gradients, however large, leave weights finite, as with AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adabayes import AdaBayesK

FORMS: dict[str, dict[str, Any]] = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {}}
LARGEST = {torch.float32: 1e38, torch.float64: 1e308, torch.bfloat16: 1e38}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [*((dtype, None) for dtype in LARGEST), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize(
    "settings", [{}, {"share_bases": True}, {"cautious": False}, {"centred": True}, {"maximize": True}]
)
@pytest.mark.parametrize("first", [0, 3])
def test_weights_stay_finite(
    form: str, dtype: torch.dtype, state_dtype: torch.dtype | None, settings: dict[str, Any], first: int
) -> None:
    """With the largest gradients from a step on, then usual ones: the first basis, a refresh, and what follows."""
    w, v = torch.ones(12, 8, dtype=dtype), torch.ones(5, dtype=dtype)
    optimizer = AdaBayesK([w, v], block_size=4, refresh=1, state_dtype=state_dtype, **FORMS[form], **settings)
    for t in range(8):
        for p in (w, v):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(t)).to(dtype)
            p.grad = torch.full_like(p, LARGEST[dtype]) if first <= t < first + 2 else noise
        optimizer.step()
        assert w.isfinite().all()
        assert v.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_show(form: str, value: float) -> None:
    """They make the weights of their block nan, as they make the weights of AdamW nan; other blocks continue."""

    def trained(optimizer: Any, w: Tensor) -> Tensor:
        w.grad = torch.ones_like(w)
        w.grad[0, 0] = value
        optimizer.step()
        return w

    w = torch.ones(8, 4)
    trained(AdaBayesK([w], block_size=4, **FORMS[form]), w)
    assert w[:4].isnan().any()
    assert w[4:].isfinite().all()
