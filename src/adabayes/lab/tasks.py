"""Tasks: which loss a network is trained by, and which error is reported beside it.

A data set says what is asked of a network by the task that it carries. Sums over examples, and not means, are what
batches and processes have to add up.
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
    """A loss, and an error that people understand. Each is lower for a better network."""

    @property
    def error(self) -> str:
        """The error's name for tables, with its unit."""

    def loss(self, network: Network, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss over all targets, and the network's output."""

    def count(self, targets: Tensor) -> int:
        """Count the targets that the mean is over."""

    def sums(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return what the error is computed from, summed over targets: a vector."""

    def value(self, sums: Sequence[float], count: int) -> float:
        """Return the error, from these sums over ``count`` targets."""


@dataclass(frozen=True)
class Classification:
    """Which of several classes: cross-entropy, and the share that is wrong. Of text, each next character."""

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
    """A number: squared error, and its root in the target's own unit.

    Args:
        unit: of the target.
        scale: by which the target was divided, so that its variance is about one.
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
    """The input itself, numbers from 0 to 1: cross-entropy of each, summed, and the root mean square error."""

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
    r"""A network that is itself the solution of :math:`-\Delta u = f`, with u = 0 on the boundary.

    The loss is the squared residual of the equation inside, and of the boundary condition at its edge, with
    derivatives by automatic differentiation. The error is that of the solution, relative to its norm.

    Args:
        boundary: weight of the squared boundary condition.
        scale: mean of f², by which all is divided: a network that is zero has a loss of about one.
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
