"""AdaBayes-FP: AdaBayes with every gain at its fixed point, that is, AdamW with an epsilon that has a meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from adabayes._util.averages import bias_correction
from adabayes._util.tensors import Scalar, as_float
from adabayes.kernels.coefficients import ADABAYES_FP
from adabayes.kernels.plan import compute_step
from adabayes.optim._engine.batch import Batch, Step
from adabayes.optim._engine.explain import explains_unknown
from adabayes.optim._engine.fixed_point import FixedPointOptimizer, crossover
from adabayes.optim._engine.state import Entry, Group, settings_of

__all__ = ["AdaBayesFP", "adabayes_fp_rule", "adabayes_fp_steps"]


def adabayes_fp_rule(gradient: Batch, mean: Batch, mean_square: Batch, coefficients: Any, t: Scalar) -> Step:
    r"""Update both averages and return the step of AdaBayes-FP.

    .. math:: m = \beta_1 m + (1 - \beta_1) g, \qquad v = \beta_2 v + (1 - \beta_2) g^2, \qquad
              u = \frac{\hat m}{\epsilon/2 + \sqrt{\epsilon^2/4 + \hat v}}

    The step is :math:`\text{lr}\,u`. With ``cautious``, :math:`u = 0` where :math:`m` and :math:`g` disagree in sign.
    With ``centred``, :math:`v` averages :math:`(g - m)^2`, with the old :math:`m`.
    """
    seen = gradient.sub(mean) if coefficients.centred else gradient
    mean.lerp_(gradient, 1 - coefficients.beta1)
    mean_square.mul_(coefficients.beta2).addcmul_(seen, seen, 1 - coefficients.beta2)
    # Multiply numerator and denominator by the root of v's bias correction, so that v is used as is.
    root = bias_correction(coefficients.beta2, t) ** 0.5
    half = root * (coefficients.eps / 2)
    denominator = mean_square.add(half * half).sqrt_().add_(half)
    moving = mean.zero_disagreeing(gradient) if coefficients.cautious else mean
    return Step(moving, denominator, size=coefficients.lr * root / bias_correction(coefficients.beta1, t))


class Coefficients(NamedTuple):
    """The scalars of one step."""

    lr: Scalar
    beta1: float
    beta2: float
    eps: float  # lr / lr_sgd, in the units of the given gradients
    cautious: bool
    centred: bool


class AdaBayesFP(FixedPointOptimizer):
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
        lr: Adam's learning rate. A scheduler, or a group with its own ``lr``, scales ``lr_sgd`` with it. If it is 0, to
            be set later, ``lr_sgd`` belongs to an ``lr`` of 1e-3.
        lr_sgd: learning rate for weights with small gradients, in units of the averaged gradient. Coming from
            ``torch.optim.SGD(lr, momentum)``, which sums instead, give ``lr / (1 - momentum)``. None:
            ``1e5 * lr``, which is AdamW except for the smallest gradients. The paper has ``100 * lr``.
        betas: decay of the averaged gradient and of its averaged square.
        weight_decay: decoupled, in AdamW's convention: each step multiplies weights by ``1 - lr * weight_decay``.
        reduction: ``"mean"`` or ``"sum"``: how the loss was reduced over the minibatch.
        batch_size: needed with ``reduction="sum"``; otherwise it cancels.
        cautious: move only weights whose averaged gradient has the sign of the newest one. Steps are shorter then: the
            best ``lr`` is about twice as high.
        centred: average :math:`(g_t - m_{t-1})^2` instead of :math:`g_t^2`. Where gradients have no noise, this average
            vanishes, and steps are not bounded: do not use it with full batches.
        maximize: ascend instead of descend.
        foreach: work on all tensors at once. None: whenever that is possible and there is no kernel.
        fused: use a kernel. None: on the CPU, if it was built and supports the parameters. On a GPU only if True,
            because that kernel has not been run on one yet.
        capturable: keep the step count on the device, for CUDA graphs.
        differentiable: let autograd follow the step.
        state_dtype: ``torch.bfloat16`` halves the state, to 4 bytes per weight, with stochastic rounding.
        stochastic_rounding: round bf16 parameters stochastically, so that steps and decay below half of their
            precision are not lost.
        seed: seed of the rounding.

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

    STATE = {"exp_avg": Entry(), "exp_avg_sq": Entry()}  # noqa: RUF012
    KERNEL = ADABAYES_FP

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
        cautious: bool = False,
        centred: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(params, settings_of(locals()))

    def direction(self, gradient: Batch, state: dict[str, Batch], coefficients: Coefficients, t: Scalar) -> Step:
        return adabayes_fp_rule(gradient, state["exp_avg"], state["exp_avg_sq"], coefficients, t)

    def coefficients(self, group: Group, lr: Scalar) -> Coefficients:
        beta1, beta2 = group["betas"]
        return Coefficients(lr, beta1, beta2, crossover(group), group["cautious"], group["centred"])

    def _warm_state(self, adamw: dict[str, Any], group: Group, beta2: float) -> dict[str, Any]:
        return {name: adamw[name] for name in ("step", *self.STATE)}


def adabayes_fp_steps(
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    mean_squares: Sequence[Tensor],
    coefficients: Any,
    t: Scalar,
    fused: bool | None,
) -> list[Tensor]:
    """Update both averages in place and return the steps, by a kernel where there is one."""
    steps = compute_step(ADABAYES_FP, gradients, means, mean_squares, coefficients, as_float(t), fused)
    if steps is None:
        gradient, mean, mean_square = (Batch(x, in_place=True) for x in (gradients, means, mean_squares))
        steps = adabayes_fp_rule(gradient, mean, mean_square, coefficients, t).value().tensors
    return steps
