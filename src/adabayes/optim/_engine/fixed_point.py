"""Optimizers whose gains are at their fixed point: learning rates follow from ``exp_avg_sq``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adabayes._util.averages import bias_correction
from adabayes._util.tensors import as_float, real_view
from adabayes.filtering import fixed_point
from adabayes.optim._engine.state import Group
from adabayes.optim._engine.two_rates import TwoRateOptimizer

__all__ = ["FixedPointOptimizer", "crossover"]


class FixedPointOptimizer(TwoRateOptimizer):
    """Reports the learning rate of each weight, or of each eigendirection, from the averaged squared gradient."""

    @torch.no_grad()
    def mean_square(self, param: Tensor) -> Tensor:
        """Return the averaged squared gradient of the mean loss."""
        group = self._group_of(param)
        return _debiased_square(self.state[param], group) * self.mean_factor(group) ** 2

    def _relative_gain(self, group: Group, state: dict[str, Any]) -> Tensor:
        # With the gradient in units of the crossover, both learning rates are 1.
        gain: Tensor = fixed_point(_debiased_square(state, group) / crossover(group) ** 2, 1.0, 1.0)
        return gain


def crossover(group: Group) -> float:
    """Return lr / lr_sgd, the gradient at which SGD gives way to Adam, in the units of the given gradients."""
    eps: float = group["base_lr"] / group["lr_sgd"]
    return eps * group["batch_size"] if group["reduction"] == "sum" else eps


def _debiased_square(state: dict[str, Any], group: Group) -> Tensor:
    average: Tensor = real_view(state["exp_avg_sq"]) / bias_correction(group["betas"][1], as_float(state["step"]))
    return average
