"""AdaBound and AMSBound: Adam whose learning rate is clipped between bounds that close in on SGD's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, _disable_dynamo_if_unsupported

from adabayes.optim._base import (
    BaseOptimizer,
    Group,
    Scalar,
    as_scalar,
    check_call,
    check_range,
    count_step_,
    in_precision_of,
    per_step,
    prefers_foreach,
    real_views,
    step_value,
    uniform_runs,
)

__all__ = ["AdaBound", "adabound"]


class AdaBound(BaseOptimizer):
    r"""AdaBound, and AMSBound with ``amsbound=True`` (Luo et al., 2019): the paper's rivals.

    .. math::
        \begin{aligned}
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        \eta_t &= \text{clip}\left(\text{lr} \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{1}{\sqrt{v_t} + \epsilon},
            \; \text{final_lr} \left(1 - \tfrac{1}{\gamma t + 1}\right),
            \; \text{final_lr} \left(1 + \tfrac{1}{\gamma t}\right)\right) \\
        \theta_t &= \theta_{t-1} - \eta_t \, m_t
        \end{aligned}

    The arithmetic is that of the authors' package ``adabound``, which AMSBound's missing bias correction of the
    maximum is part of. What a schedule does to ``lr`` it does to ``final_lr`` too.

    Args:
        params: parameters, named parameters or parameter groups, as for any optimizer of torch.
        lr: Adam's learning rate.
        betas: decay of the averaged gradient and of its averaged square.
        final_lr: SGD's learning rate, on which the bounds close in.
        gamma: how fast they do; 0 is Adam.
        eps: added to the denominator.
        weight_decay: coupled: ``weight_decay * weight`` is added to the gradient (an L2 penalty).
        amsbound: divide by the largest ``v`` so far.
        maximize: ascend instead of descending.
        foreach: the form that works on all tensors at once. None: whenever it can.
        capturable: keep the step count on the device, for CUDA graphs.
        differentiable: let autograd follow the step.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdaBound(model.parameters(), lr=1e-3, final_lr=0.1)
        >>> model(torch.ones(4, 2)).square().mean().backward()
        >>> optimizer.step()

    References:
        Luo, Xiong, Liu and Sun, "Adaptive gradient methods with dynamic bound of learning rate", ICLR 2019.
    """

    _buffers = ("exp_avg", "exp_avg_sq")

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
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "final_lr": final_lr,
            "gamma": gamma,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsbound": amsbound,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_range("final learning rate", group["final_lr"])
        check_range("gamma parameter", group["gamma"], below=1.0)
        check_range("epsilon value", group["eps"])

    def _buffers_of(self, group: Group) -> tuple[str, ...]:
        return (*self._buffers, "max_exp_avg_sq") if group["amsbound"] else self._buffers

    def _step_group(self, group: Group) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        steps: list[Tensor] = []
        exp_avgs: list[Tensor] = []
        exp_avg_sqs: list[Tensor] = []
        max_exp_avg_sqs: list[Tensor] = []
        has_complex = self._init_group(group, params, grads, steps, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
        adabound(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs,
            steps,
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            has_complex=has_complex,
            amsbound=group["amsbound"],
            lr=group["lr"],
            base_lr=group["base_lr"],
            final_lr=group["final_lr"],
            gamma=group["gamma"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )


@_disable_dynamo_if_unsupported()
def adabound(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    foreach: bool | None = None,
    capturable: bool = False,
    differentiable: bool = False,
    has_complex: bool = False,
    *,
    amsbound: bool,
    lr: float | Tensor,
    base_lr: float,
    final_lr: float,
    gamma: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    r"""Functional API that performs a step of AdaBound or AMSBound. See :class:`AdaBound`.

    ``lr`` is the learning rate now, ``base_lr`` that without the schedule, ``final_lr`` goes with ``base_lr``.
    """
    check_call(params, state_steps, capturable)
    if foreach is None:
        foreach = prefers_foreach(params, differentiable)
    lr = as_scalar(lr, keep_tensor=capturable or differentiable)
    coefficients = _Coefficients(
        lr=lr,
        final_lr=final_lr * lr / base_lr,
        gamma=gamma,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
    )
    maxima = max_exp_avg_sqs if amsbound else exp_avg_sqs
    update = _multi_tensor_adabound if foreach else _single_tensor_adabound
    update(params, grads, exp_avgs, exp_avg_sqs, maxima, state_steps, coefficients, amsbound, capturable, has_complex)


class _Coefficients(NamedTuple):
    """The numbers of one step, the same for all tensors; some are tensors while a graph is captured."""

    lr: Scalar
    final_lr: Scalar
    gamma: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool

    def of_step(self, step: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """What depends on the step count: Adam's step size, the lower and the upper bound."""
        size = self.lr * (1 - self.beta2**step) ** 0.5 / (1 - self.beta1**step)
        if not self.gamma:
            return size, 0.0 * size, float("inf") + 0.0 * size
        lower = self.final_lr * (1 - 1 / (self.gamma * step + 1))
        return size, lower, self.final_lr * (1 + 1 / (self.gamma * step))


def _single_tensor_adabound(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    maxima: list[Tensor],
    state_steps: list[Tensor],
    c: _Coefficients,
    amsbound: bool,
    capturable: bool,
    has_complex: bool,
) -> None:
    """One tensor after the other. Nothing that autograd may want is overwritten."""
    rows = zip(params, grads, exp_avgs, exp_avg_sqs, maxima, state_steps)
    for param, grad, exp_avg, exp_avg_sq, maximum, step_t in rows:
        step_t += 1
        if has_complex:
            param, grad, exp_avg, exp_avg_sq, maximum = real_views(param, grad, exp_avg, exp_avg_sq, maximum)
        (value,), (grad,) = in_precision_of(exp_avg_sq, [param], [grad])
        size, lower, upper = c.of_step(step_value(step_t, capturable))

        if c.maximize:
            grad = -grad
        if c.weight_decay:
            grad = grad.add(value, alpha=c.weight_decay)
        mean = (exp_avg * c.beta1).add(grad, alpha=1 - c.beta1)
        mean_square = (exp_avg_sq * c.beta2).addcmul(grad, grad, value=1 - c.beta2)
        divisor = torch.maximum(maximum.clone(), mean_square) if amsbound else mean_square
        lrs = (size / (divisor.sqrt() + c.eps)).clamp(lower, upper)  # type: ignore[arg-type]

        param.copy_(value - lrs * mean)
        exp_avg.copy_(mean)
        exp_avg_sq.copy_(mean_square)
        if amsbound:
            maximum.copy_(divisor)


def _multi_tensor_adabound(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    maxima: list[Tensor],
    state_steps: list[Tensor],
    c: _Coefficients,
    amsbound: bool,
    capturable: bool,
    has_complex: bool,
) -> None:
    """All tensors at once."""
    for run in uniform_runs(params, exp_avg_sqs, grads, exp_avgs, maxima, state_steps):
        targets, v, g, m, divisors, steps = run
        count_step_(steps)
        if has_complex:
            targets, v, g, m, divisors = (real_views(*tensors) for tensors in (targets, v, g, m, divisors))
        p, g = in_precision_of(v[0], targets, g)
        sizes, lower, upper = map(list, zip(*per_step(c.of_step, steps, capturable)))

        if c.maximize:
            g = list(torch._foreach_neg(g))
        if c.weight_decay:
            g = list(torch._foreach_add(g, p, alpha=c.weight_decay))
        torch._foreach_mul_(m, c.beta1)
        torch._foreach_add_(m, g, alpha=1 - c.beta1)
        torch._foreach_mul_(v, c.beta2)
        torch._foreach_addcmul_(v, g, g, 1 - c.beta2)
        if amsbound:
            torch._foreach_maximum_(divisors, v)
        denominator = torch._foreach_sqrt(divisors if amsbound else v)
        torch._foreach_add_(denominator, c.eps)
        lrs = [size / d for size, d in zip(sizes, denominator)]
        torch._foreach_clamp_min_(lrs, lower)
        torch._foreach_clamp_max_(lrs, upper)
        torch._foreach_mul_(lrs, m)
        torch._foreach_sub_(p, lrs)
        if p[0].dtype != targets[0].dtype:
            torch._foreach_copy_(targets, p)
