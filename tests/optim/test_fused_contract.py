"""What torch's tests demand of ``fused=True``, for AdaBayes-K, whose kernels serve some matrices and not others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, kernels

pytestmark = pytest.mark.skipif(kernels.unavailable() is not None, reason="there are no kernels")
CLASSES = pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP, AdaBayesK])

# Parameters that kernels serve, and matrices that they do not
PARAMS: dict[str, Callable[[], list[Tensor]]] = {
    "vectors": lambda: [torch.ones(1) for _ in range(5)],
    "matrices": lambda: [torch.ones(4, 3), torch.ones(3, 2)],
    "low precision": lambda: [torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(4, 3)],
    "transposed": lambda: [torch.ones(3, 4).t(), torch.ones(4, 3)],
    "twice": lambda: [torch.ones(4, 3)] * 2,
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("scale", [None, torch.ones(1)])
def test_found_inf_skips_the_step(kind: str, scale: Tensor | None) -> None:
    params = PARAMS[kind]()
    before = [p.clone() for p in params]
    optimizer: Any = AdaBayesK(params, fused=True, weight_decay=0.1)
    for p in params:
        p.grad = torch.full_like(p, float("inf"))
    optimizer.grad_scale, optimizer.found_inf = scale, torch.ones(())
    optimizer.step()
    assert all(map(torch.equal, params, before))
    assert all(state["step"] == 0 for state in optimizer.state.values() if state)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("kind", PARAMS)
def test_the_step_divides_by_the_scale(kind: str) -> None:
    """By a power of 2, so that nothing is rounded. With a small lr_sgd, the step depends on the gradient's size."""
    ends = []
    for scale in (None, 1024.0):
        params = PARAMS[kind]()
        optimizer: Any = AdaBayesK(params, lr=0.01, lr_sgd=0.1, fused=True)
        optimizer.grad_scale = None if scale is None else torch.tensor(scale)
        for step in range(3):
            for i, p in enumerate(params):
                noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
                p.grad = (noise * (scale or 1.0)).to(p.dtype)
            optimizer.step()
        ends.append(params)
    assert all(map(torch.equal, *ends))


@CLASSES
@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_meta_parameters_are_refused(cls: Any, shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.zeros(shape, device="meta"))
    optimizer = cls([p], fused=True)
    p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="`fused=True` requires all the params to be floating point Tensors"):
        optimizer.step()
    p.grad = None
    optimizer.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("kind", PARAMS)
def test_fused_true_uses_kernels_where_there_are_some(kind: str) -> None:
    ends = []
    for fused in (None, True):
        params = PARAMS[kind]()
        optimizer = AdaBayesK(params, fused=fused)
        for p in params:
            p.grad = torch.linspace(-1, 1, p.numel()).view(p.shape).to(p.dtype)
        optimizer.step()
        ends.append(params)
    assert all(map(torch.equal, *ends))
