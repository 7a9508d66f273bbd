"""AdaBayes-FP: AdaBayes with every gain at its fixed point; AdamW whose epsilon has a meaning."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, _disable_dynamo_if_unsupported

from adabayes import kernels
from adabayes.filtering import fixed_point
from adabayes.optim._base import (
    Group,
    Scalar,
    as_float,
    as_scalar,
    check_call,
    check_range,
    count_step_,
    in_precision_of,
    kept,
    per_step,
    prefers_foreach,
    real_views,
    step_value,
    uniform_runs,
)
from adabayes.optim._explain import explains_unknown
from adabayes.optim._rates import TwoRateOptimizer
from adabayes.optim._rounding import Rounding, keys_of, store_, store_all_, widened

__all__ = ["AdaBayesFP", "adabayes_fp"]


class AdaBayesFP(TwoRateOptimizer):
    r"""AdaBayes-FP (Aitchison, 2020), Algorithm 2: AdaBayes with the gain at its fixed point.

    .. math::
        \begin{aligned}
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        \frac{1}{\text{gain}_t} &= \frac{1}{2\,\text{lr_sgd}}
            + \sqrt{\frac{1}{4\,\text{lr_sgd}^2} + \frac{v_t / (1 - \beta_2^t)}{\text{lr}^2}} \\
        \theta_t &= (1 - \text{lr} \lambda) \theta_{t-1} - \text{gain}_t \, m_t / (1 - \beta_1^t)
        \end{aligned}

    With :math:`\epsilon = \text{lr} / \text{lr_sgd}` the step is
    :math:`\text{lr}\,\hat m / (\epsilon/2 + \sqrt{\epsilon^2/4 + \hat v})`: AdamW whose epsilon is Adam's learning
    rate over SGD's. ``lr_sgd`` to infinity is AdamW; ``lr`` to infinity is SGD with averaged momentum.

    Args:
        params: parameters, named parameters or parameter groups, as for any optimizer of torch.
        lr: Adam's learning rate, and *the* learning rate: what scales it, a scheduler or a group with its own,
            scales ``lr_sgd`` too. Made with 0, to be set later, it is taken as a schedule of ``lr_sgd / 100`` or, if
            that is not given, of 1e-3.
        lr_sgd: learning rate for weights with small gradients, in units of the averaged gradient. Coming from
            ``torch.optim.SGD(lr, momentum)``, which sums instead, give ``lr / (1 - momentum)``. None: 100 ``lr``,
            the paper's ratio.
        betas: decay of the averaged gradient and of its averaged square.
        weight_decay: decoupled, in AdamW's convention: each step multiplies weights by ``1 - lr * weight_decay``.
        reduction: ``"mean"`` or ``"sum"``: how the loss was reduced over the minibatch.
        batch_size: needed with ``reduction="sum"``; otherwise it has cancelled.
        maximize: ascend instead of descending.
        foreach: the form that works on all tensors at once. None: whenever it can and there is no kernel.
        fused: the kernel for the CPU. None: whenever it was built and can serve the parameters.
        capturable: keep the step count on the device, for CUDA graphs.
        differentiable: let autograd follow the step.
        state_dtype: ``torch.bfloat16`` halves the state, to 4 bytes a weight, with stochastic rounding.
        stochastic_rounding: round bf16 parameters stochastically, so that steps and decay below half of their
            precision are not lost.
        seed: of the rounding.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdaBayesFP(model.parameters(), lr=1e-3, lr_sgd=0.1)
        >>> model(torch.ones(4, 2)).square().mean().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight])
        ['exp_avg', 'exp_avg_sq', 'step']

    References:
        Aitchison, "Bayesian filtering unifies adaptive and non-adaptive neural network optimization methods",
        NeurIPS 2020.
    """

    _buffers = ("exp_avg", "exp_avg_sq")
    _kernel = "adabayes_fp_step"

    @explains_unknown
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        lr_sgd: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        batch_size: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_sgd": lr_sgd,
            "betas": betas,
            "weight_decay": weight_decay,
            "reduction": reduction,
            "batch_size": batch_size,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
            "state_dtype": state_dtype,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if group["batch_size"] is not None:
            check_range("batch_size", group["batch_size"], least=1.0)
        elif group["reduction"] == "sum":
            raise ValueError(
                "reduction='sum' needs batch_size, which is None: give the number of examples of a step, over all "
                "devices and accumulated gradients."
            )

    def _step_group(self, group: Group) -> None:
        if self._fused_step(group):
            return
        params: list[Tensor] = []
        grads: list[Tensor] = []
        steps: list[Tensor] = []
        exp_avgs: list[Tensor] = []
        exp_avg_sqs: list[Tensor] = []
        has_complex = self._init_group(group, params, grads, steps, exp_avgs, exp_avg_sqs)
        adabayes_fp(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            steps,
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            has_complex=has_complex,
            lr=group["lr"],
            eps=self._eps(group),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            rounding=self._rounding(group, params),
        )

    def _coefficients(self, group: Group, unscale: float) -> kernels.AdaBayesFPCoefficients:
        lr = as_float(group["lr"])
        return kernels.AdaBayesFPCoefficients(
            unscale=unscale,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            shrink=1 - lr * group["weight_decay"],
            lr=-lr if group["maximize"] else lr,
            eps=self._eps(group),
        )

    @staticmethod
    def _eps(group: Group) -> float:
        """The gradient at which SGD gives way to Adam, in the units of the gradients given."""
        eps: float = group["base_lr"] / group["lr_sgd"]
        return eps * group["batch_size"] if group["reduction"] == "sum" else eps

    def _warm_state(self, adamw: dict[str, Any], group: Group, beta2: float) -> dict[str, Any]:
        return {name: adamw[name] for name in ("step", *self._buffers)}

    def _relative_gain(self, group: Group, state: dict[str, Any]) -> Tensor:
        (exp_avg_sq,) = real_views(state["exp_avg_sq"])
        mean_square = exp_avg_sq / (1 - group["betas"][1] ** state["step"].item())
        # With the gradient in units of the crossover, both learning rates are 1.
        gain: Tensor = fixed_point(mean_square / self._eps(group) ** 2, 1.0, 1.0)
        return gain


@_disable_dynamo_if_unsupported()
def adabayes_fp(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    foreach: bool | None = None,
    capturable: bool = False,
    differentiable: bool = False,
    has_complex: bool = False,
    *,
    lr: float | Tensor,
    eps: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
    rounding: Rounding | None = None,
) -> None:
    r"""Functional API that performs a step of AdaBayes-FP. See :class:`AdaBayesFP`.

    ``eps`` is ``lr / lr_sgd``, times the batch size if the gradients are those of a summed loss.
    """
    check_call(params, state_steps, capturable)
    if foreach is None:
        foreach = prefers_foreach(params, differentiable)
    lr = as_scalar(lr, keep_tensor=capturable or differentiable)
    coefficients = _Coefficients(
        lr=-lr if maximize else lr,
        eps=eps,
        beta1=beta1,
        beta2=beta2,
        shrink=1 - lr * weight_decay if weight_decay else None,
    )
    update = _multi_tensor_adabayes_fp if foreach else _single_tensor_adabayes_fp
    update(params, grads, exp_avgs, exp_avg_sqs, state_steps, coefficients, rounding, capturable, has_complex)


class _Coefficients(NamedTuple):
    """The numbers of one step, the same for all tensors; some are tensors while a graph is captured."""

    lr: Scalar
    eps: float
    beta1: float
    beta2: float
    shrink: Scalar | None  # weight decay

    def of_step(self, step: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        r"""What depends on the step count: summand under the root, summand outside, step size.

        The denominator and the step are both multiplied by the root of v's bias correction, so that v itself is
        taken as it is: :math:`\sqrt{c}\,(\epsilon/2 + \sqrt{\epsilon^2/4 + v/c}) = \sqrt{c}\,\epsilon/2 +
        \sqrt{c\,\epsilon^2/4 + v}`.
        """
        correction = 1 - self.beta2**step
        half = correction**0.5 * (self.eps / 2)
        return half * half, half, -self.lr * correction**0.5 / (1 - self.beta1**step)


def _single_tensor_adabayes_fp(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    c: _Coefficients,
    rounding: Rounding | None,
    capturable: bool,
    has_complex: bool,
) -> None:
    """One tensor after the other. Nothing that autograd may want is overwritten."""
    rows = zip(params, grads, exp_avgs, exp_avg_sqs, state_steps)
    for i, (param, grad, exp_avg_, exp_avg_sq_, step_t) in enumerate(rows):
        step_t += 1
        if has_complex:
            param, grad, exp_avg_, exp_avg_sq_ = real_views(param, grad, exp_avg_, exp_avg_sq_)
        exp_avg, exp_avg_sq = widened([exp_avg_, exp_avg_sq_])
        (value,), (grad,) = in_precision_of(exp_avg_sq, [param], [grad])
        step = step_value(step_t, capturable)
        inside, outside, step_size = c.of_step(step)

        mean = exp_avg.lerp(grad, 1 - c.beta1)
        mean_square = (exp_avg_sq * c.beta2).addcmul(grad, grad, value=1 - c.beta2)
        denominator = (mean_square + inside).sqrt() + outside

        moved = value if c.shrink is None else kept(value, c.shrink) * c.shrink
        if isinstance(step_size, Tensor):
            moved = torch.addcdiv(moved, mean * step_size, denominator)
        else:
            moved = torch.addcdiv(moved, mean, denominator, value=step_size)
        keys = keys_of(rounding, i, step)
        store_(param, moved, keys.param, "param")
        store_(exp_avg_, mean, keys.state, "exp_avg")
        store_(exp_avg_sq_, mean_square, keys.state, "second")


def _multi_tensor_adabayes_fp(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    c: _Coefficients,
    rounding: Rounding | None,
    capturable: bool,
    has_complex: bool,
) -> None:
    """All tensors at once; the denominator is the one thing that needs memory beside the state."""
    places = range(len(params))
    for run in uniform_runs(params, exp_avg_sqs, grads, exp_avgs, state_steps, places):
        targets, exp_avg_sqs_, g, exp_avgs_, steps, place = run
        count_step_(steps)
        if has_complex:
            views = (real_views(*tensors) for tensors in (targets, exp_avg_sqs_, g, exp_avgs_))
            targets, exp_avg_sqs_, g, exp_avgs_ = views
        v, m = widened(exp_avg_sqs_), widened(exp_avgs_)
        p, g = in_precision_of(v[0], targets, g)
        inside, outside, step_sizes = map(list, zip(*per_step(c.of_step, steps, capturable)))

        torch._foreach_lerp_(m, g, 1 - c.beta1)
        torch._foreach_mul_(v, c.beta2)
        torch._foreach_addcmul_(v, g, g, 1 - c.beta2)
        denominator = torch._foreach_add(v, inside)
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, outside)
        if c.shrink is not None:
            torch._foreach_mul_(p, c.shrink)
        if isinstance(step_sizes[0], Tensor):
            torch._foreach_addcdiv_(p, torch._foreach_mul(m, step_sizes), denominator)
        else:
            torch._foreach_addcdiv_(p, m, denominator, step_sizes)
        store_all_(
            (targets, p, "param"),
            (exp_avgs_, m, "exp_avg"),
            (exp_avg_sqs_, v, "second"),
            rounding,
            place,
            steps,
            capturable,
        )
