"""Names of parameters, from the model or from the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from adabayes.optim._two_rates import TwoRateOptimizer

__all__ = ["named_with_state"]


def named_with_state(
    optimizer: TwoRateOptimizer, model: nn.Module | None
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yield name, parameter and group of each parameter that has state."""
    in_model = {p: name for name, p in model.named_parameters()} if model is not None else {}
    for i, group in enumerate(optimizer.param_groups):
        given: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
        for j, (p, name) in enumerate(zip(group["params"], given)):
            if optimizer.has_state(p):
                yield in_model.get(p) or name or f"group {i}, parameter {j}", p, group
