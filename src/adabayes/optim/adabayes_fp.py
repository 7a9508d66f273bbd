"""AdaBayes-FP: AdaBayes with every gain at its fixed point; AdamW whose epsilon has a meaning."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from adabayes.filtering import fixed_point
from adabayes.optim._checks import explains_unknown
from adabayes.optim._engine import Batch, Group, Step
from adabayes.optim._fused import Kernel
from adabayes.optim._state import Entry, own_state
from adabayes.optim._tensors import Scalar, as_float, real_view
from adabayes.optim._two_rates import TwoRateOptimizer

__all__ = ["AdaBayesFP"]


class _Numbers(NamedTuple):
    """The numbers of one step."""

    rate: Scalar  # lr
    beta1: float
    beta2: float
    eps: float  # lr / lr_sgd: the gradient at which SGD gives way to Adam, in the units of the gradients given
    cautious: bool
    centred: bool


SETTLED = Kernel(
    "adabayes_fp_step",
    "exp_avg_sq",
    lambda c: {"eps": c.eps, "centred": c.centred, "cautious": c.cautious},
)


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
        centred: average the squares of what the average did not predict, :math:`(g_t - m_{t-1})^2`, in place of
            :math:`g_t^2`. It vanishes where gradients have no noise, and with it the bound on the step: do not use it
            with full batches.
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
    KERNEL: ClassVar[Kernel | None] = SETTLED

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
        defaults = {
            "lr": lr,
            "lr_sgd": lr_sgd,
            "betas": betas,
            "weight_decay": weight_decay,
            "reduction": reduction,
            "batch_size": batch_size,
            "cautious": cautious,
            "centred": centred,
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

    def direction(self, gradient: Batch, state: dict[str, Batch], c: Any, t: Scalar) -> Step:
        mean, mean_square = state["exp_avg"], state["exp_avg_sq"]
        seen = gradient.sub(mean) if c.centred else gradient
        mean.lerp_(gradient, 1 - c.beta1)
        mean_square.mul_(c.beta2).addcmul_(seen, seen, 1 - c.beta2)
        # lr m / (eps/2 + sqrt(eps^2/4 + v)), above and below times the root of v's bias correction: so v is taken as is
        root = (1 - c.beta2**t) ** 0.5
        half = root * (c.eps / 2)
        denominator = mean_square.add(half * half).sqrt_().add_(half)
        moving = mean.agreeing(gradient) if c.cautious else mean
        return Step(moving, denominator, size=c.rate * root / (1 - c.beta1**t))

    def numbers(self, group: Group, lr: Scalar) -> Any:
        beta1, beta2 = group["betas"]
        return _Numbers(lr, beta1, beta2, self._eps(group), group["cautious"], group["centred"])

    @staticmethod
    def _eps(group: Group) -> float:
        eps: float = group["base_lr"] / group["lr_sgd"]
        return eps * group["batch_size"] if group["reduction"] == "sum" else eps

    def _warm_state(self, adamw: dict[str, Any], group: Group, beta2: float) -> dict[str, Any]:
        return {name: adamw[name] for name in ("step", *self.STATE)}

    @torch.no_grad()
    def mean_square(self, param: Tensor) -> Tensor:
        """Return the averaged squared gradient of each weight, of the mean loss."""
        group, state = self._group_of(param), own_state(self)[param]
        average: Tensor = real_view(state["exp_avg_sq"]) / (1 - group["betas"][1] ** as_float(state["step"]))
        return average * self.mean_factor(group) ** 2

    def _relative_gain(self, group: Group, state: dict[str, Any]) -> Tensor:
        mean_square = real_view(state["exp_avg_sq"]) / (1 - group["betas"][1] ** as_float(state["step"]))
        # With the gradient in units of the crossover, both learning rates are 1.
        gain: Tensor = fixed_point(mean_square / self._eps(group) ** 2, 1.0, 1.0)
        return gain
