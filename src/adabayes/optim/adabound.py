"""AdaBound and AMSBound: Adam with a learning rate clipped between bounds that converge to SGD's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from adabayes._util.averages import bias_correction
from adabayes._util.checks import check_range
from adabayes._util.tensors import Scalar
from adabayes.optim._engine.batch import Batch, Step
from adabayes.optim._engine.state import Entry, Group, settings_of
from adabayes.optim._engine.step import EngineOptimizer

__all__ = ["AdaBound"]


class Coefficients(NamedTuple):
    """The scalars of one step; some are tensors while a graph is captured."""

    lr: Scalar
    final_lr: Scalar
    gamma: float
    beta1: float
    beta2: float
    eps: float

    def bounds(self, t: Scalar) -> tuple[Scalar, Scalar]:
        """Return the bounds of the learning rate at step ``t``."""
        if not self.gamma:
            return 0.0 * t, float("inf") + 0.0 * t
        return self.final_lr * (1 - 1 / (self.gamma * t + 1)), self.final_lr * (1 + 1 / (self.gamma * t))


class AdaBound(EngineOptimizer):
    r"""AdaBound, and AMSBound with ``amsbound=True`` (Luo et al., 2019): baselines of the paper.

    .. math::
        \begin{aligned}
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        \eta_t &= \text{clip}\left(\text{lr} \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{1}{\sqrt{v_t} + \epsilon},
            \; \text{final_lr} \left(1 - \tfrac{1}{\gamma t + 1}\right),
            \; \text{final_lr} \left(1 + \tfrac{1}{\gamma t}\right)\right) \\
        \theta_t &= \theta_{t-1} - \eta_t \, m_t
        \end{aligned}

    It computes the same as the authors' package ``adabound``, where AMSBound's maximum has no bias correction. A
    schedule scales ``final_lr`` with ``lr``.

    Args:
        params: parameters, named parameters or parameter groups, as for any optimizer of torch.
        lr: Adam's learning rate.
        betas: decay of the averaged gradient and of its averaged square.
        final_lr: SGD's learning rate, to which the bounds converge.
        gamma: how fast they converge; 0 is Adam.
        eps: added to the denominator.
        weight_decay: coupled: ``weight_decay * weight`` is added to the gradient (an L2 penalty).
        amsbound: divide by the largest ``v`` so far.
        maximize: ascend instead of descend.
        foreach: work on all tensors at once. None: whenever that is possible.
        capturable: keep the step count on the device, for CUDA graphs.
        differentiable: let autograd follow the step.
        state_dtype: ``torch.bfloat16`` halves the state, with stochastic rounding.
        stochastic_rounding: round bf16 parameters stochastically, so that small steps are not lost.
        seed: seed of the rounding.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdaBound(model.parameters(), lr=1e-3, final_lr=0.1)
        >>> model(torch.ones(4, 2)).square().mean().backward()
        >>> optimizer.step()

    References:
        Luo, Xiong, Liu and Sun, "Adaptive gradient methods with dynamic bound of learning rate", ICLR 2019.
    """

    STATE = {"exp_avg": Entry(), "exp_avg_sq": Entry()}  # noqa: RUF012
    COUPLED_DECAY = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        final_lr: float = 0.1,
        gamma: float = 1e-3,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsbound: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(params, settings_of(locals()))

    def direction(self, gradient: Batch, state: dict[str, Batch], coefficients: Coefficients, t: Scalar) -> Step:
        mean = state["exp_avg"].mul_(coefficients.beta1).add_(gradient, alpha=1 - coefficients.beta1)
        mean_square = state["exp_avg_sq"].mul_(coefficients.beta2).addcmul_(gradient, gradient, 1 - coefficients.beta2)
        if "max_exp_avg_sq" in state:
            mean_square = state["max_exp_avg_sq"].maximum_(mean_square)
        adam_lr = (
            coefficients.lr * bias_correction(coefficients.beta2, t) ** 0.5 / bias_correction(coefficients.beta1, t)
        )
        rates = mean_square.sqrt().add_(coefficients.eps).reciprocal_().mul_(adam_lr).clamp_(*coefficients.bounds(t))
        return Step(rates.mul_(mean))

    def coefficients(self, group: Group, lr: Scalar) -> Coefficients:
        final_lr = group["final_lr"] * lr / group["base_lr"]  # follows the schedule
        beta1, beta2 = group["betas"]
        return Coefficients(lr, final_lr, group["gamma"], beta1, beta2, group["eps"])

    def _entries(self, group: Group, p: Tensor) -> dict[str, Entry]:
        return {**self.STATE, "max_exp_avg_sq": Entry()} if group["amsbound"] else self.STATE

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_range("final learning rate", group["final_lr"])
        check_range("gamma parameter", group["gamma"], below=1.0)
        check_range("epsilon value", group["eps"])
