"""Names of parameters, from the model or from the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from adabayes.optim.extend import TwoRateOptimizer

__all__ = ["named", "named_with_state"]


def named(optimizer: Optimizer, model: nn.Module | None = None) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yield name, parameter and group of each parameter."""
    in_model = {p: name for name, p in model.named_parameters()} if model is not None else {}
    for i, group in enumerate(optimizer.param_groups):
        given: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
        for j, (p, name) in enumerate(zip(group["params"], given)):
            yield in_model.get(p) or name or f"group {i}, parameter {j}", p, group


def named_with_state(
    optimizer: TwoRateOptimizer, model: nn.Module | None
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yield name, parameter and group of each parameter that has state."""
    yield from (entry for entry in named(optimizer, model) if optimizer.has_state(entry[1]))
