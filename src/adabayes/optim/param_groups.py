"""Parameter groups for weight decay."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["param_groups"]


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups for any optimizer of torch: parameters that decay, and parameters that do not.

    Matrices, convolutions and embeddings decay; biases, the weights of norms and everything with fewer than two
    dimensions do not. Frozen parameters are left out, tied ones counted once. Names are kept, for tables and
    checkpoints.

    Examples:
        >>> from adabayes import AdaBayes
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))
        >>> optimizer = AdaBayes(param_groups(model, weight_decay=0.05), lr=1e-3)
        >>> [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
        [(['0.weight', '2.weight'], 0.05), (['0.bias', '1.weight', '1.bias'], 0.0)]
    """
    norms = {p for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm) for p in m.parameters()}
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (weight_decay, 0.0)]
    for name, p in model.named_parameters():
        if p.requires_grad:
            decays = p.dim() >= 2 and p not in norms and "bias" not in name.rpartition(".")[2]
            groups[0 if decays else 1]["params"].append((name, p))
    return [group for group in groups if group["params"]]
