"""An optimizer in a few lines: momentum, whitened by the covariance of the gradient's rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from adabayes.optim.extend import Batch, EngineOptimizer, Entry, Group, Step


class Coefficients(NamedTuple):
    lr: Any
    beta1: float
    beta2: float


class Whitened(EngineOptimizer):
    """Keeps an average and a covariance matrix for each parameter."""

    STATE = {  # noqa: RUF012
        "exp_avg": Entry(),
        "covariance": Entry(shape=lambda p: (p[0], p[0]) if p else (1, 1), low=False),
    }

    def __init__(self, params: Any, lr: Any = 1e-3, weight_decay: float = 0.0, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay, **options})

    def coefficients(self, group: Group, lr: Any) -> Coefficients:
        return Coefficients(lr, *group["betas"])

    def direction(self, gradient: Batch, state: dict[str, Batch], coefficients: Coefficients, t: Any) -> Step:
        mean = state["exp_avg"].lerp_(gradient, 1 - coefficients.beta1)
        covariance = state["covariance"].lerp_(gradient.map(outer), 1 - coefficients.beta2)
        whitened = covariance.mul(1 / (1 - coefficients.beta2**t)).map(whiten, mean)
        return Step(whitened, size=coefficients.lr / (1 - coefficients.beta1**t))


def rows_of(t: Tensor) -> Tensor:
    """Return a tensor of any shape as a matrix."""
    return t[..., None, None].flatten(1)


def outer(g: Tensor) -> Tensor:
    return rows_of(g) @ rows_of(g).mT


def whiten(covariance: Tensor, mean: Tensor) -> Tensor:
    damping = 1e-3 * torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    solved: Tensor = torch.linalg.solve(covariance + damping, rows_of(mean))
    return solved.reshape(mean.shape)
