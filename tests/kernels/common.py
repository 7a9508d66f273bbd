"""Optimizers, gradients and comparisons for the tests of the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adabayes import AdaBayes, AdaBayesFP, kernels

needs_kernels = pytest.mark.skipif(kernels.unavailable() is not None, reason=f"no kernels: {kernels.unavailable()}")
CLASSES = pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP])
VARIANTS: list[dict[str, Any]] = [
    {"cls": AdaBayes},
    {"cls": AdaBayes, "batch_size": 2},
    {"cls": AdaBayes, "dynamics": "paper"},
    {"cls": AdaBayes, "reduction": "sum", "batch_size": 7, "beta1": 0.0},
    {"cls": AdaBayes, "batch_size": 1e9, "maximize": True, "beta1": 0.3},
    {"cls": AdaBayesFP},
    {"cls": AdaBayesFP, "reduction": "sum", "batch_size": 7, "betas": (0.0, 0.9), "maximize": True},
    {"cls": AdaBayesFP, "cautious": True},
    {"cls": AdaBayesFP, "centred": True},
    {"cls": AdaBayesFP, "cautious": True, "centred": True},
]


def make(variant: dict[str, Any], params: list[Tensor], **more: Any) -> Any:
    """Make the optimizer of a variant."""
    options = {k: v for k, v in variant.items() if k != "cls"}
    return variant["cls"](params, lr=1e-2, weight_decay=0.1, **options, **more)


def set_gradients(params: list[Tensor], step: int, missing: bool = False) -> None:
    """Set gradients of very different sizes, a fifth of them 0; with ``missing``, leave out every third tensor."""
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        size = 10.0 ** torch.randint(-6, 3, p.shape, generator=generator).double()
        g = torch.randn(p.shape, generator=generator, dtype=torch.float64) * size
        g[torch.rand(p.shape, generator=generator) < 0.2] = 0  # weights that start late
        p.grad = None if missing and (i + step) % 3 == 0 else torch.empty_like(p).copy_(g)


def assert_close(fused: Any, single: Any, dtype: torch.dtype) -> None:
    """Compare two optimizers after up to 5 steps.

    They may differ by 8 units in the last place of fp32 or float64 per step, and by the roundings of 16-bit parameters.
    """
    ulp = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for (p, state), (q, other) in zip(fused.state.items(), single.state.items(), strict=True):
        coarse = 2 * torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
        torch.testing.assert_close(p, q, rtol=40 * ulp + coarse, atol=40 * ulp + 0.01 * coarse)
        for name in state:
            # A mean may lose a unit in the last place of its largest terms, also where they cancel.
            scale = max(1.0, other[name].abs().max().item()) if name == "exp_avg" and other[name].numel() else 0.0
            torch.testing.assert_close(state[name], other[name], rtol=40 * ulp, atol=8 * ulp * scale)
