"""What AdaBayes and AdaBayes-FP share: a second learning rate that follows the first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adabayes.optim._base import USUAL_LR, BaseOptimizer, Group, as_float, check_choice, check_range

RATIO = 100.0  # lr_sgd / lr in the paper


class TwoRateOptimizer(BaseOptimizer):
    """Resolves ``lr_sgd`` of each group, which goes with its base learning rate."""

    def _complete_group(self, group: Group) -> None:
        super()._complete_group(group)
        if group.get("lr_sgd") is None:
            group["lr_sgd"] = self._default_lr_sgd(group)

    def _default_lr_sgd(self, group: Group) -> float:
        """For a group that does not state its own: in the proportion that the defaults have, or the paper's."""
        base_lr = group.get("base_lr", self.defaults["base_lr"])
        lr_sgd = self.defaults["lr_sgd"]
        return float(RATIO * base_lr if lr_sgd is None else lr_sgd * (base_lr / self.defaults["base_lr"]))

    def _base_lr(self, group: Group) -> float:
        lr_sgd = group.get("lr_sgd")
        return as_float(group["lr"]) or (USUAL_LR if lr_sgd is None else lr_sgd / RATIO)

    def __setstate__(self, state: dict[str, Any]) -> None:
        lacking = [group for group in state["param_groups"] if group.get("lr_sgd") is None]
        super().__setstate__(state)
        for group in lacking:
            group["lr_sgd"] = self._default_lr_sgd(group)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        lr_sgd = group["lr_sgd"]
        if lr_sgd is not None:
            hint = " It must be above 0; leave it out for 100 * lr. To freeze parameters, set lr=0."
            check_range("lr_sgd", lr_sgd, hint=hint)
            if lr_sgd == 0:
                raise ValueError(f"Invalid lr_sgd: 0.{hint}")
        check_choice("reduction", group["reduction"], ("mean", "sum"))

    # What diagnostics ask

    @torch.no_grad()
    def effective_lr(self, param: Tensor) -> Tensor:
        """The learning rate that each weight of ``param`` has now; ``lr_sgd`` where it has had no gradient yet.

        Of complex parameters, each component is a weight: they come as by ``torch.view_as_real``.
        """
        for group in self.param_groups:
            if any(p is param for p in group["params"]):
                if param not in self.state:
                    raise RuntimeError("this parameter has no state yet: take a step with a gradient first")
                lr_sgd: float = group["lr_sgd"] * self._schedule(group)
                return self._relative_gain(group, self.state[param]) * lr_sgd
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is not one of this optimizer's")

    def _relative_gain(self, group: Group, state: dict[str, Any]) -> Tensor:
        """The gain in units of the most that it can be, lr_sgd: whatever the schedule, also at lr = 0."""
        raise NotImplementedError

    @staticmethod
    def _schedule(group: Group) -> float:
        schedule: float = as_float(group["lr"]) / group["base_lr"]
        return schedule
