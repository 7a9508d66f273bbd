"""What the callbacks log."""

from __future__ import annotations

from torch import nn

from adabayes.diagnostics import regimes
from adabayes.diagnostics._names import named_with_state
from adabayes.optim._two_rates import TwoRateOptimizer

__all__ = ["scalars_of"]


def scalars_of(
    optimizer: TwoRateOptimizer, model: nn.Module, prefix: str = "regimes", *, tensors: bool
) -> dict[str, float]:
    """Return the regimes of an optimizer as a flat dict; it is empty before the first step with a gradient."""
    # Not optimizer.state: fused steps would check it from then on.
    started = any(True for _ in named_with_state(optimizer, model))
    return regimes(optimizer, model).scalars(prefix, tensors=tensors) if started else {}
