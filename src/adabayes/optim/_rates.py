"""What AdaBayes and AdaBayes-FP share: a second learning rate that follows the first."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adabayes.optim._base import BaseOptimizer, Group, as_float, check_choice, check_range

RATIO = 100.0  # lr_sgd / lr in the paper


class TwoRateOptimizer(BaseOptimizer):
    """Resolves ``lr_sgd`` of each group, in units of the base learning rate."""

    def _complete_group(self, group: Group) -> None:
        stated = group.get("lr_sgd") is not None
        super()._complete_group(group)
        if not stated:
            group["lr_sgd"] = self._default_lr_sgd(group["base_lr"])

    def _default_lr_sgd(self, base_lr: float) -> float | None:
        """For a group that does not state its own: in the proportion that the defaults have, or the paper's."""
        lr, lr_sgd = as_float(self.defaults["lr"]), self.defaults["lr_sgd"]
        if lr_sgd is None:
            return RATIO * base_lr or None
        return float(lr_sgd * (base_lr / lr)) if lr and base_lr else float(lr_sgd)

    def _has_base_lr(self, group: Group) -> bool:
        known = super()._has_base_lr(group)
        if known and group["lr_sgd"] is None:
            group["lr_sgd"] = self._default_lr_sgd(group["base_lr"])
        return known

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        lr_sgd = group["lr_sgd"]
        if lr_sgd is not None:
            check_range("lr_sgd", lr_sgd, hint=" Leave it out for 100 * lr.")
            if lr_sgd == 0:
                raise ValueError("Invalid lr_sgd: 0. It must be above 0. To freeze parameters, set lr=0.")
        check_choice("reduction", group["reduction"], ("mean", "sum"))

    def effective_lr(self, param: Tensor) -> Tensor:
        """The learning rate that each weight of ``param`` has now."""
        raise NotImplementedError

    def _group_and_state(self, param: Tensor) -> tuple[Group, dict[str, Any]]:
        for group in self.param_groups:
            if any(p is param for p in group["params"]):
                if param not in self.state or not group["base_lr"]:
                    raise RuntimeError("this parameter has no state yet: take a step with a gradient first")
                return group, self.state[param]
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is not one of this optimizer's")

    def _schedule(self, group: Group) -> float:
        return as_float(group["lr"]) / group["base_lr"]  # type: ignore[no-any-return]
