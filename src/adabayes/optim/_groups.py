"""Parameter groups as most training code wants them."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["param_groups"]


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for any optimizer of torch: what decays, and what does not.

    Matrices, convolutions and embeddings decay; biases and the weights of norms, which have fewer than two dimensions,
    do not. Frozen parameters are left out, tied ones counted once. Names come along, for tables and checkpoints.

    Examples:
        >>> from adabayes import AdaBayes
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))
        >>> optimizer = AdaBayes(param_groups(model, weight_decay=0.05), lr=1e-3)
        >>> [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
        [(['0.weight', '2.weight'], 0.05), (['0.bias', '1.weight', '1.bias'], 0.0)]
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decaying = [(name, p) for name, p in named if p.dim() >= 2]
    others = [(name, p) for name, p in named if p.dim() < 2]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
