"""The processes that train one run together. Most often there is one; :mod:`adabayes.lab.several` is for more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Ranks"]


class Ranks:
    """One process: what the others have to add to it is nothing."""

    world, rank, kind = 1, 0, "alone"

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and shows."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Of a batch of so many, those that are for this process."""
        return slice(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def place(self, model: nn.Module) -> nn.Module:
        """What is done to a model before its optimizer is made."""
        return model

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        """What is called in place of the model."""
        return model

    def total(self, value: Tensor) -> float:
        """The sum over all processes."""
        return float(value.item())

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag, if it is set anywhere."""
        return flags

    def wait(self) -> None:
        """Until all are here."""

    def gathered(self, tree: Any) -> Any:
        """State in whole tensors, which any number of processes can go on from."""
        return tree

    def load(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        model.load_state_dict(weights)

    def scattered(self, state: Any, optimizer: torch.optim.Optimizer) -> Any:
        """An optimizer's state dict, as this process holds it: sharded, and laid out in memory, as the weights are."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        entries = {
            i: {name: self._like(params[i], e) for name, e in of.items()} if isinstance(of, dict) else of
            for i, of in state["state"].items()  # in which IVON keeps numbers of its own as well
        }
        return {**state, "state": entries}

    def _like(self, p: Tensor, entry: Any) -> Any:
        if not isinstance(entry, Tensor) or entry.shape != p.shape:
            return entry
        return torch.empty_like(p, dtype=entry.dtype).copy_(entry)
