"""The scalars that callbacks log."""

from __future__ import annotations

from torch import nn

from adabayes.diagnostics import regimes
from adabayes.diagnostics._names import named_with_state
from adabayes.optim.extend import TwoRateOptimizer

__all__ = ["scalars_of"]


def scalars_of(
    optimizer: TwoRateOptimizer, model: nn.Module, prefix: str = "regimes", *, tensors: bool
) -> dict[str, float]:
    """Return the regimes of an optimizer as a flat dict; it is empty before the first step with a gradient."""
    started = any(True for _ in named_with_state(optimizer, model))
    return regimes(optimizer, model).scalars(prefix, tensors=tensors) if started else {}
