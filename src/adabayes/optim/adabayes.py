"""AdaBayes: a Kalman filter for every weight, whose gain is the weight's learning rate."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from adabayes.filtering import drift, euler, fixed_point, is_unstarted, ornstein_uhlenbeck
from adabayes.optim._checks import check_choice, explain, explains_unknown
from adabayes.optim._engine import Batch, Group, Step
from adabayes.optim._fused import Kernel
from adabayes.optim._state import Entry
from adabayes.optim._tensors import Scalar, as_float, real_view
from adabayes.optim._two_rates import TwoRateOptimizer
from adabayes.rates import LEAST_GAIN, batch_size_of, memory_of, ratio_of, share_of, warn_if_closed

__all__ = ["AdaBayes"]


class _Numbers(NamedTuple):
    """The numbers of one step; some are tensors while a graph is captured."""

    rate: Scalar  # of the step, beside gain and momentum
    beta1: float
    forget: Scalar  # of the gain, between two gradients
    noise: Scalar
    settled: Scalar  # gain without gradients: noise / forget
    information: float  # curvature per squared gradient
    exact: bool
    eta: float
    lr_sgd: Scalar  # as the filter has it
    to_mean: float
    memory: int | None  # in steps, where it does not follow from a batch size
    decide: bool  # whether the program may depend on numbers: not while a graph is captured

    def start(self, gradient: Tensor) -> Tensor | Scalar:
        """Return the gain at which a filter starts: exactly at its fixed point, in the paper at lr_sgd."""
        return fixed_point((self.to_mean * gradient) ** 2, self.eta, self.lr_sgd) if self.exact else self.lr_sgd

    def for_kernel(self) -> dict[str, Scalar]:
        lr_sgd = self.lr_sgd
        return {
            "forget": self.forget,
            "noise": self.noise,
            "information": self.information,
            "half": 0.5 / lr_sgd if isinstance(lr_sgd, Tensor) or lr_sgd else math.inf,
            "slope": self.to_mean / self.eta if self.exact else 0.0,
            "memory": self.memory or 0.0,
        }


class AdaBayes(TwoRateOptimizer):
    r"""AdaBayes (Aitchison, 2020), Algorithm 1: moves by itself between SGD and AdamW, weight by weight.

    .. math::
        \begin{aligned}
        \text{prior} &= \text{gain}_{t-1} + (q - f \cdot \text{gain}_{t-1}) && \text{the optimum may have moved} \\
        \text{gain}_t &= \text{prior} / (1 + \text{prior} \cdot B g_t^2) && \text{the gradient shows where} \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        \theta_t &= (1 - \eta \lambda) \theta_{t-1} - \text{gain}_t \, m_t / (1 - \beta_1^t)
        \end{aligned}

    With :math:`k = B\,\text{lr}^2 / (2\,\text{lr_sgd})`: :math:`f = 1 - e^{-2k}` and
    :math:`q = \text{lr_sgd}\,f` (``dynamics="exact"``), or :math:`f = 1 - (1 - k)^2` and
    :math:`q = B\,\text{lr}^2` (``dynamics="paper"``).

    That is the paper's filter, with a ``batch_size`` of :math:`B`. Without one, the filter of each weight remembers
    :math:`n` steps, the last 100 or all so far (:func:`adabayes.filtering.remember`):

    .. math::
        \begin{aligned}
        1 / \text{prior} &= 1 / \text{gain}_{t-1} - (1 / \text{gain}_{t-1} - 1 / \text{lr_sgd}) / n \\
        1 / \text{gain}_t &= 1 / (2\,\text{prior}) + \sqrt{1 / (4\,\text{prior}^2) + g_t^2 / (n\,\text{lr}^2)}
        \end{aligned}

    The gain settles at a soft minimum of the two learning rates: ``lr_sgd`` for weights with gradients far below
    ``lr / lr_sgd``, ``lr / rms(gradient)`` for those far above. So, once settled, no weight moves faster than SGD at
    ``lr_sgd``, or AdamW at ``lr``, would move it.

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
        differentiable: let autograd follow the step. With respect to a tensor ``lr``, it follows the schedule's
            part in the step, at a base learning rate that is a constant.
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
    KERNEL = Kernel("adabayes_step", "gain", _Numbers.for_kernel)

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
        defaults = {
            "lr": lr,
            "lr_sgd": lr_sgd,
            "batch_size": batch_size,
            "betas": (beta1,),  # under the name by which OneCycleLR and CyclicLR find the momentum to cycle
            "weight_decay": weight_decay,
            "dynamics": dynamics,
            "reduction": reduction,
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

    def direction(self, gradient: Batch, state: dict[str, Batch], c: _Numbers, t: Scalar) -> Step:
        mean, gain = state["exp_avg"], state["gain"]
        waiting = _start_(gain, mean, gradient, c)
        mean.lerp_(gradient, 1 - c.beta1)
        size = c.rate / (1 - c.beta1**t)
        if c.memory:
            _remember_(gain, gradient, c, share_of(t, c.memory))
            for place, where in waiting:
                gain.replace_(place, gain.tensors[place].masked_fill(where, 0))
            return Step(mean.mul(gain), size=size)
        prior = gain.lerp_(c.settled, c.forget)  # predict: gain + (noise - forget * gain)
        precision = prior.reciprocal_().addcmul_(gradient, gradient, c.information)  # update: 1 / prior + B g^2
        for place, where in waiting:
            precision.replace_(place, precision.tensors[place].masked_fill(where, math.inf))
        return Step(mean, precision, size=size, after=precision.reciprocal_)  # the gain again

    def numbers(self, group: Group, lr: Scalar) -> _Numbers | None:
        exact = group["dynamics"] == "exact"
        if not exact and not isinstance(lr, Tensor) and lr == 0:
            return None  # where the paper divides by zero
        base_lr, lr_sgd = group["base_lr"], group["lr_sgd"]
        batch_size = batch_size_of(group["batch_size"], base_lr)
        schedule = lr / base_lr
        to_mean = self.mean_factor(group)
        k = drift(base_lr, lr_sgd, batch_size)
        if exact:  # the filter runs at the base rates, the schedule scales the step
            flow = ornstein_uhlenbeck(k, lr_sgd)
            rate, settled = schedule * to_mean, lr_sgd
        else:  # the schedule is in the filter, which goes on at lr = 0 while the weights stop
            k, lr_sgd = k * schedule, lr_sgd * schedule
            if not isinstance(k, Tensor) and k == 2:
                k = math.nextafter(k, 0)  # where nothing is forgotten, so that the gain settles nowhere
            flow = euler(k, lr_sgd)
            rate, settled = (lr != 0) * 1.0 * to_mean, lr_sgd / (1 - k / 2)
        return _Numbers(
            rate=rate,
            beta1=group["betas"][0],
            forget=flow.forget,
            noise=flow.noise,
            settled=settled,
            information=batch_size * to_mean * to_mean,
            exact=exact,
            eta=base_lr,
            lr_sgd=lr_sgd,
            to_mean=to_mean,
            memory=memory_of(group["batch_size"], group["dynamics"]),
            decide=not (torch.compiler.is_compiling() or group["capturable"]),
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
        mean_square = square.double() / ((1 - beta2 ** as_float(adamw["step"])) or 1.0)
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


def _remember_(gain: Batch, gradient: Batch, c: _Numbers, share: Scalar) -> None:
    """Update gains whose filters remember 1 / share steps: :func:`adabayes.filtering.remember`."""
    half = gain.at_least_(LEAST_GAIN).mul(share * (0.5 / c.lr_sgd)).add_((1 - share) / 2)
    step = gradient.mul(share**0.5 * (c.to_mean / c.eta)).mul_(gain)
    gain.div_(step.mul_(step).addcmul_(half, half, 1.0).sqrt_().add_(half))


def _start_(gain: Batch, mean: Batch, gradient: Batch, c: _Numbers) -> list[tuple[int, Tensor]]:
    """Start filters at their first gradient; return where weights still wait for one, as the paper's never do."""
    waiting = []
    for place in gain.may_be_zero(c.decide):
        now, g = gain.tensors[place], gradient.tensors[place]
        unstarted = is_unstarted(now, mean.tensors[place])
        gain.replace_(place, torch.where(unstarted, c.start(g), now))
        if c.exact:
            waiting.append((place, unstarted & (g == 0)))
    return waiting
