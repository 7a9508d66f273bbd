"""Tasks: the loss that a network is trained with, and the error that is reported beside it.

Each data set has a task. Errors are computed from sums over examples, which batches and processes can add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Classification", "Poisson", "Reconstruction", "Regression", "Task"]

Network = Callable[[Tensor], Tensor]


class Task(Protocol):
    """A loss, and an error that is easy to interpret. Both are lower for a better network."""

    @property
    def error(self) -> str:
        """The error's name for tables, with its unit."""

    def loss(self, network: Network, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss over all targets, and the network's output."""

    def count(self, targets: Tensor) -> int:
        """Count the targets that the mean is over."""

    def sums(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the sums over targets that the error is computed from, as a vector."""

    def value(self, sums: Sequence[float], count: int) -> float:
        """Return the error, given these sums over ``count`` targets."""


@dataclass(frozen=True)
class Classification:
    """Predicts one of several classes, or each next character of a text: cross-entropy, and the share that is wrong."""

    error: str = "error %"

    def loss(self, network: Network, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        output = network(inputs)
        return F.cross_entropy(output.flatten(0, -2), targets.flatten()), output

    def count(self, targets: Tensor) -> int:
        return targets.numel()

    def sums(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output.argmax(-1) != targets).sum().view(1)

    def value(self, sums: Sequence[float], count: int) -> float:
        return 100 * sums[0] / count


@dataclass(frozen=True)
class Regression:
    """Predicts a number: squared error, and its root in the target's unit.

    Args:
        unit: unit of the target.
        scale: number by which the target was divided, so that its variance is about one.
    """

    unit: str
    scale: float

    @property
    def error(self) -> str:
        return f"RMSE, {self.unit}"

    def loss(self, network: Network, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        output = network(inputs).squeeze(-1)
        return F.mse_loss(output, targets), output

    def count(self, targets: Tensor) -> int:
        return len(targets)

    def sums(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).double().square().sum().view(1)

    def value(self, sums: Sequence[float], count: int) -> float:
        return self.scale * math.sqrt(sums[0] / count)


@dataclass(frozen=True)
class Reconstruction:
    """Predicts the input itself, numbers from 0 to 1: the sum of their cross-entropies, and the RMS error."""

    error: str = "RMSE"

    def loss(self, network: Network, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        output = network(inputs)
        return F.binary_cross_entropy_with_logits(output, targets, reduction="sum") / len(targets), output

    def count(self, targets: Tensor) -> int:
        return len(targets)

    def sums(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output.sigmoid() - targets).double().square().mean(1).sum().view(1)

    def value(self, sums: Sequence[float], count: int) -> float:
        return math.sqrt(sums[0] / count)


@dataclass(frozen=True)
class Poisson:
    r"""Solves :math:`-\Delta u = f`, with u = 0 on the boundary: the network is the solution.

    The loss is the squared residual of the equation inside, and of the boundary condition at the boundary, with
    derivatives by automatic differentiation. The error is that of the solution, relative to its norm.

    Args:
        boundary: weight of the squared boundary condition.
        scale: mean of f², by which the loss is divided, so that a network that is zero has a loss of about one.
    """

    boundary: float = 100.0
    scale: float = 1.0
    error: str = "relative L2 error %"

    def loss(self, network: Network, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        _, f, at_edge = targets.unbind(-1)
        with torch.enable_grad():  # also in testing: the equation needs derivatives
            points = inputs.detach().requires_grad_()
            u = network(points).squeeze(-1)
            (gradient,) = torch.autograd.grad(u.sum(), points, create_graph=True)
            laplacian = sum(
                torch.autograd.grad(gradient[:, i].sum(), points, create_graph=True)[0][:, i]
                for i in range(points.shape[1])
            )
            residuals = torch.where(at_edge > 0, self.boundary * u.square(), (laplacian + f).square())
        return residuals.mean() / self.scale, u

    def count(self, targets: Tensor) -> int:
        return len(targets)

    def sums(self, output: Tensor, targets: Tensor) -> Tensor:
        exact = targets[:, 0]
        return torch.stack([(output - exact).double().square().sum(), exact.double().square().sum()])

    def value(self, sums: Sequence[float], count: int) -> float:
        return 100 * math.sqrt(sums[0] / sums[1])
