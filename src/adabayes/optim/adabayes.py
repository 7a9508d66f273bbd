"""AdaBayes: a Kalman filter for every weight, whose gain is the weight's learning rate."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from adabayes._util.averages import bias_correction
from adabayes._util.checks import check_choice
from adabayes._util.tensors import Scalar, as_float, real_view
from adabayes.filtering import drift, euler, fixed_point, is_unstarted, ornstein_uhlenbeck
from adabayes.kernels.coefficients import ADABAYES
from adabayes.optim._engine.batch import Batch, Step
from adabayes.optim._engine.explain import explain, explains_unknown
from adabayes.optim._engine.state import Entry, Group, settings_of
from adabayes.optim._engine.two_rates import TwoRateOptimizer
from adabayes.rates import LEAST_GAIN, batch_size_of, memory_of, newest_weight, ratio_of, warn_if_closed

__all__ = ["AdaBayes"]


class Coefficients(NamedTuple):
    """The scalars of one step; some are tensors while a graph is captured."""

    step_scale: Scalar  # factor of the step, apart from gain and momentum
    beta1: float
    forget: Scalar  # fraction of the gain that is lost between two gradients
    noise: Scalar  # added to the gain between two gradients
    asymptotic_gain: Scalar  # the gain's limit without gradients: noise / forget
    information: float  # curvature per squared gradient
    exact: bool
    eta: float
    lr_sgd: Scalar  # the value that the filter uses
    to_mean: float  # converts gradients to those of the mean loss
    memory: int | None  # in steps; None if it follows from a batch size
    may_sync: bool  # whether the program may read values, which a captured graph must not

    def start(self, gradient: Tensor) -> Tensor | Scalar:
        """Return the gain at which a filter starts: its fixed point if exact, or lr_sgd as in the paper."""
        return fixed_point((self.to_mean * gradient) ** 2, self.eta, self.lr_sgd) if self.exact else self.lr_sgd


class AdaBayes(TwoRateOptimizer):
    r"""AdaBayes (Aitchison, 2020), Algorithm 1: moves between SGD and AdamW, weight by weight.

    .. math::
        \begin{aligned}
        \text{prior} &= \text{gain}_{t-1} + (q - f \cdot \text{gain}_{t-1}) && \text{the optimum may have moved} \\
        \text{gain}_t &= \text{prior} / (1 + \text{prior} \cdot B g_t^2) && \text{the gradient shows where} \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        \theta_t &= (1 - \text{lr} \lambda) \theta_{t-1} - \text{gain}_t \, m_t / (1 - \beta_1^t)
        \end{aligned}

    With :math:`k = B\,\text{lr}^2 / (2\,\text{lr_sgd})`: :math:`f = 1 - e^{-2k}` and
    :math:`q = \text{lr_sgd}\,f` (``dynamics="exact"``), or :math:`f = 1 - (1 - k)^2` and
    :math:`q = B\,\text{lr}^2` (``dynamics="paper"``).

    This is the paper's filter, with a ``batch_size`` of :math:`B`. Without one, the filter of each weight remembers
    :math:`n` steps, the last 100 or all so far (:func:`adabayes.filtering.remember`):

    .. math::
        \begin{aligned}
        1 / \text{prior} &= 1 / \text{gain}_{t-1} - (1 / \text{gain}_{t-1} - 1 / \text{lr_sgd}) / n \\
        1 / \text{gain}_t &= 1 / (2\,\text{prior}) + \sqrt{1 / (4\,\text{prior}^2) + g_t^2 / (n\,\text{lr}^2)}
        \end{aligned}

    The fixed point of the gain is a soft minimum of the two learning rates: ``lr_sgd`` for weights with gradients far
    below ``lr / lr_sgd``, ``lr / rms(gradient)`` for those far above. So, at the fixed point, no weight moves faster
    than with SGD at ``lr_sgd``, or with AdamW at ``lr``.

    Args:
        params: parameters, named parameters or parameter groups, as for any optimizer of torch.
        lr: Adam's learning rate. A scheduler, or a group with its own ``lr``, scales ``lr_sgd`` with it. If it is 0, to
            be set later, ``lr_sgd`` belongs to an ``lr`` of 1e-3.
        lr_sgd: learning rate for weights with small gradients, in units of the averaged gradient. Coming from
            ``torch.optim.SGD(lr, momentum)``, which sums instead, give ``lr / (1 - momentum)``. None: ``1e5 * lr``;
            with a ``batch_size``, the paper's ``100 * lr``.
        batch_size: number of examples in a step, over all devices and accumulated gradients. It sets how fast the
            filter adapts (in about ``lr_sgd / (batch_size * lr**2)`` steps), and gradients above
            ``1 / (batch_size * lr)`` get less than Adam's learning rate. None: unknown. The filter of each weight then
            remembers the last 100 steps, whatever the size of its gradients; with ``dynamics="paper"``, it is taken as
            ``0.01 / lr``.
        beta1: decay of the averaged gradient (momentum).
        weight_decay: decoupled, in AdamW's convention: each step multiplies weights by ``1 - lr * weight_decay``.
            The paper's lambda = 5e-5 at lr = 1e-3 is 0.05.
        dynamics: ``"exact"`` solves the Ornstein-Uhlenbeck process exactly, runs the filter at the base learning
            rates while a schedule scales the step, and starts each weight at the fixed point of its first gradient.
            ``"paper"`` is Algorithm 1 to the letter: Euler form, schedule inside the filter, start at ``lr_sgd``.
        reduction: ``"mean"`` or ``"sum"``: how the loss was reduced over the minibatch. A sum needs a ``batch_size``.
        maximize: ascend instead of descend.
        foreach: work on all tensors at once. None: whenever that is possible and there is no kernel.
        fused: use a kernel. None: on the CPU, if it was built and supports the parameters. On a GPU only if True,
            because that kernel has not been run on one yet.
        capturable: keep the step count on the device, for CUDA graphs.
        differentiable: let autograd follow the step. Gradients with respect to a tensor ``lr`` treat ``base_lr`` as a
            constant.
        state_dtype: ``torch.bfloat16`` halves the state, to 4 bytes per weight, with stochastic rounding.
        stochastic_rounding: round bf16 parameters stochastically, so that steps and decay below half of their
            precision are not lost.
        seed: seed of the rounding.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdaBayes(model.parameters(), lr=1e-3, lr_sgd=0.1, batch_size=4)
        >>> model(torch.ones(4, 2)).square().mean().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight])
        ['exp_avg', 'gain', 'step']

    References:
        Aitchison, "Bayesian filtering unifies adaptive and non-adaptive neural network optimization methods",
        NeurIPS 2020.
    """

    STATE = {"exp_avg": Entry(), "gain": Entry()}  # noqa: RUF012
    BETAS = 1
    KERNEL = ADABAYES

    @explains_unknown
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        lr_sgd: float | None = None,
        batch_size: float | None = None,
        beta1: float = 0.9,
        weight_decay: float = 0.0,
        *,
        dynamics: Literal["exact", "paper"] = "exact",
        reduction: Literal["mean", "sum"] = "mean",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        defaults = settings_of(locals())
        defaults["betas"] = (defaults.pop("beta1"),)  # the name by which OneCycleLR and CyclicLR find momentum
        super().__init__(params, defaults)

    def direction(self, gradient: Batch, state: dict[str, Batch], coefficients: Coefficients, t: Scalar) -> Step:
        mean, gain = state["exp_avg"], state["gain"]
        waiting = _start_(gain, mean, gradient, coefficients)
        mean.lerp_(gradient, 1 - coefficients.beta1)
        size = coefficients.step_scale / bias_correction(coefficients.beta1, t)
        if coefficients.memory:
            _remember_(gain, gradient, coefficients, newest_weight(t, coefficients.memory))
            _fill_(gain, waiting, 0.0)
            return Step(mean.mul(gain), size=size)
        gain.lerp_(coefficients.asymptotic_gain, coefficients.forget)  # predict: gain + (noise - forget * gain)
        precision = gain.reciprocal_()  # in the memory of the gain
        precision.addcmul_(gradient, gradient, coefficients.information)  # update: 1 / prior + B g^2
        _fill_(precision, waiting, math.inf)  # no step, and a gain of 0: the filter stays unstarted
        denominator = precision.clone()
        precision.reciprocal_()  # the gain again
        return Step(mean, denominator, size=size)

    def coefficients(self, group: Group, lr: Scalar) -> Coefficients | None:
        exact = group["dynamics"] == "exact"
        if not exact and not isinstance(lr, Tensor) and lr == 0:
            return None  # skip the step: the paper's dynamics would divide by zero
        base_lr, lr_sgd = group["base_lr"], group["lr_sgd"]
        batch_size = batch_size_of(group["batch_size"], base_lr)
        schedule = lr / base_lr
        to_mean = self.mean_factor(group)
        k = drift(base_lr, lr_sgd, batch_size)
        if exact:  # the filter runs at the base rates, and the schedule scales the step
            flow = ornstein_uhlenbeck(k, lr_sgd)
            step_scale, asymptotic_gain = schedule * to_mean, lr_sgd
        else:  # the schedule is part of the filter
            k, lr_sgd = k * schedule, lr_sgd * schedule
            if not isinstance(k, Tensor) and k == 2:
                k = math.nextafter(k, 0)  # at 2 nothing is forgotten, and the gain has no limit
            flow = euler(k, lr_sgd)
            step_scale, asymptotic_gain = (lr != 0) * 1.0 * to_mean, lr_sgd / (1 - k / 2)
        return Coefficients(
            step_scale=step_scale,
            beta1=group["betas"][0],
            forget=flow.forget,
            noise=flow.noise,
            asymptotic_gain=asymptotic_gain,
            information=batch_size * to_mean * to_mean,
            exact=exact,
            eta=base_lr,
            lr_sgd=lr_sgd,
            to_mean=to_mean,
            memory=memory_of(group["batch_size"], group["dynamics"]),
            may_sync=not (torch.compiler.is_compiling() or group["capturable"]),
        )

    def _complete_group(self, group: Group) -> None:
        if "beta1" in group:
            group["betas"] = (group.pop("beta1"),)
        if len(group.get("betas", (0,))) != 1:
            explain(type(self), ["betas"])
        super()._complete_group(group)
        given = {**self.defaults, **group}
        warn_if_closed(given["base_lr"], given["lr_sgd"], given["batch_size"])

    def _ratio(self, group: Group) -> float:
        return ratio_of(group["batch_size"], group["dynamics"])

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_choice("dynamics", group["dynamics"], ("exact", "paper"))

    def _warm_state(self, adamw: dict[str, Any], group: Group, beta2: float) -> dict[str, Any]:
        exp_avg, square = (real_view(adamw[name]) for name in ("exp_avg", "exp_avg_sq"))
        mean_square = square.double() / (bias_correction(beta2, as_float(adamw["step"])) or 1.0)
        gain = fixed_point(self.mean_factor(group) ** 2 * mean_square, group["base_lr"], group["lr_sgd"])
        if group["dynamics"] == "paper":
            gain = gain * (self._schedule(group) or 1.0)
        gain = gain.masked_fill(is_unstarted(square, exp_avg), 0)
        gain = gain.to(torch.promote_types(square.dtype, torch.float32))
        return {
            "step": adamw["step"],
            "exp_avg": adamw["exp_avg"],
            "gain": torch.view_as_complex(gain) if adamw["exp_avg"].is_complex() else gain,
        }

    def _relative_gain(self, group: Group, state: dict[str, Any]) -> Tensor:
        gain, mean = real_view(state["gain"]), real_view(state["exp_avg"])
        schedule = self._schedule(group)
        lr_sgd = group["lr_sgd"] * (schedule if group["dynamics"] == "paper" and schedule else 1.0)
        return torch.where(is_unstarted(gain, mean), 1.0, gain / lr_sgd)


def _remember_(gain: Batch, gradient: Batch, coefficients: Coefficients, newest: Scalar) -> None:
    """Update gains whose filters remember ``1 / newest`` steps: :func:`adabayes.filtering.remember`."""
    half = gain.clamp_min_(LEAST_GAIN).mul(newest * (0.5 / coefficients.lr_sgd)).add_((1 - newest) / 2)
    step = gradient.mul(newest**0.5 * (coefficients.to_mean / coefficients.eta)).mul_(gain)
    gain.div_(step.mul_(step).addcmul_(half, half, 1.0).sqrt_().add_(half))


def _fill_(batch: Batch, masks: list[tuple[int, Tensor]], value: float) -> None:
    """Write a value where a mask is true; each mask comes with the index of its tensor."""
    for index, mask in masks:
        batch.replace_(index, batch.tensors[index].masked_fill(mask, value))


def _start_(gain: Batch, mean: Batch, gradient: Batch, coefficients: Coefficients) -> list[tuple[int, Tensor]]:
    """Start filters at their first gradient; return masks of the weights that still wait for one.

    Each mask comes with the index of its tensor. In the paper, filters do not wait.
    """
    waiting = []
    for index in gain.find_zeros(coefficients.may_sync):
        before, g = gain.tensors[index], gradient.tensors[index]
        unstarted = is_unstarted(before, mean.tensors[index])
        gain.replace_(index, torch.where(unstarted, coefficients.start(g), before))
        if coefficients.exact:
            waiting.append((index, unstarted & (g == 0)))
    return waiting
