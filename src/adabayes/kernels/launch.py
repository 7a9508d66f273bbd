"""The interface of kernels: what the kernels of a device must provide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from adabayes.kernels.coefficients import Rule, StepOptions

__all__ = ["Launch", "Operands"]


class Operands(NamedTuple):
    """The tensors of a launch, of one device and one combination of dtypes, which stay at their addresses."""

    params: Sequence[Tensor]  # without gaps in memory; for `compute_step`, memory that receives the step
    exp_avgs: Sequence[Tensor]  # the first entries of state, with the layout of their parameters
    second_states: Sequence[Tensor]  # the second entries of state, with the same layout
    steps: Sequence[Tensor] | None  # the step counts; None if only `compute_step` is called
    indices: Sequence[int]  # of each parameter among all of the optimizer's, to select its random bits


class Launch(Protocol):
    """Runs a rule on operands."""

    def __init__(self, rule: Rule, operands: Operands) -> None: ...

    def take_step(self, grads: Sequence[int], coefficients: Any, options: StepOptions) -> None:
        """Count a step, update the state, and move the parameters.

        Args:
            grads: addresses of the gradients, which have the layout of the parameters.
            coefficients: the optimizer's coefficients of this step.
            options: how the step is taken.
        """
        ...

    def compute_step(self, grads: Sequence[int], coefficients: Any, t: float) -> None:
        """Update the state and write the step, which ``take_step`` would subtract, to the memory of the parameters."""
        ...
