"""torch's Muon for matrices, with AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MuonAdamW"]


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices inside a network and AdamW for the rest, as Muon's author advises.

    Embeddings, the output layer (the last dense one), biases and norms go to AdamW. Convolutions are matrices of
    outputs times the rest. Both have the same learning rate: Muon's updates are scaled to the size of AdamW's
    (``adjust_lr_fn="match_rms_adamw"``).

    Args:
        model: the network, whose layers decide which weights are matrices. A list of tensors has no layers; then all
            tensors with two or more dimensions are matrices.
        lr: learning rate of both.
        weight_decay: decoupled weight decay of both.
        betas: AdamW's betas.
        momentum: Muon's momentum.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(
                f"Muon came with torch 2.9, and this is {torch.__version__}: install a later one, or leave Muon out "
                "with --optimizers"
            )
        params: Sequence[Tensor]
        if isinstance(model, nn.Module):
            params, matrices = list(model.parameters()), _inner_matrices(model)
        else:
            params, matrices = model, [p for p in model if p.dim() >= 2]
        inside = {id(p) for p in matrices}
        others = [p for p in params if id(p) not in inside]
        if not matrices or not others:
            raise ValueError("this network has no matrices for Muon, or nothing else; use AdamW or Muon alone")
        # Muon takes only matrices, so it steps these, which share the weights' memory where they can.
        self._flat = [nn.Parameter(p.detach().flatten(1)) for p in matrices]
        self._muon = torch.optim.Muon(
            self._flat, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=betas, fused=True)
        both: Any = [{**self._muon.param_groups[0], "params": matrices}, *self._adamw.param_groups]
        super().__init__(both, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("MuonAdamW takes no closure")
        inner, rest = self.param_groups
        for p, flat in zip(inner["params"], self._flat):
            flat.data = p.detach().flatten(1)
            flat.grad = None if p.grad is None else p.grad.flatten(1)
            self._muon.state[flat] = self.state[p]  # the same dict, which is part of our state dict
        self._muon.param_groups[0].update({key: inner[key] for key in ("lr", "weight_decay")})
        self._muon.step()
        for p, flat in zip(inner["params"], self._flat):
            if flat.data_ptr() != p.data_ptr():  # flat is a copy of a convolution in channels_last layout
                p.copy_(flat.view_as(p))
        self._adamw.param_groups, self._adamw.state = [rest], self.state
        self._adamw.step()


def _inner_matrices(model: nn.Module) -> list[Tensor]:
    """Return the weights of dense layers and convolutions, without the output layer's."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    dense = [m for m in layers if isinstance(m, nn.Linear)]
    # A network with an embedding uses it as the output layer, too; then no dense layer is left out.
    tied = any(isinstance(m, nn.Embedding) for m in model.modules())
    last = dense[-1] if dense and not tied else None
    return [m.weight for m in layers if m is not last]
