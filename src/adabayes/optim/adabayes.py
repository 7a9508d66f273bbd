"""AdaBayes: a Kalman filter for every weight, whose gain is the weight's learning rate."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, _disable_dynamo_if_unsupported

from adabayes import kernels
from adabayes.filtering import Dynamics, drift, euler, fixed_point, ornstein_uhlenbeck, predict
from adabayes.optim._base import (
    Group,
    Scalar,
    as_float,
    as_scalar,
    check_call,
    check_choice,
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
from adabayes.optim._explain import explain, explains_unknown
from adabayes.optim._rates import TwoRateOptimizer
from adabayes.optim._rounding import Rounding, keys_of, store_, store_all_, widened

__all__ = ["AdaBayes", "adabayes"]

Asleep = bool | tuple[Tensor, ...]  # where in a tensor weights may sleep: nowhere, anywhere, or at these indices


class AdaBayes(TwoRateOptimizer):
    r"""AdaBayes (Aitchison, 2020), Algorithm 1: moves by itself between SGD and AdamW, weight by weight.

    .. math::
        \begin{aligned}
        \text{prior} &= d \cdot \text{gain}_{t-1} + q               && \text{the optimum may have moved} \\
        \text{gain}_t &= \text{prior} / (1 + \text{prior} \cdot B g_t^2) && \text{the gradient tells where} \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        \theta_t &= (1 - \eta \lambda) \theta_{t-1} - \text{gain}_t \, m_t / (1 - \beta_1^t)
        \end{aligned}

    With :math:`k = B\,\text{lr}^2 / (2\,\text{lr_sgd})`: :math:`d = e^{-2k}` and
    :math:`q = \text{lr_sgd}\,(1 - e^{-2k})` (``dynamics="exact"``), or :math:`d = (1 - k)^2` and
    :math:`q = B\,\text{lr}^2` (``dynamics="paper"``).

    The gain settles at a soft minimum of the two learning rates: ``lr_sgd`` for weights with gradients far below
    ``lr / lr_sgd``, ``lr / rms(gradient)`` for those far above. So, once settled, no weight moves faster than SGD at
    ``lr_sgd``, or AdamW at ``lr``, would move it.

    Args:
        params: parameters, named parameters or parameter groups, as for any optimizer of torch.
        lr: Adam's learning rate, and *the* learning rate: what scales it, a scheduler or a group with its own,
            scales ``lr_sgd`` too. Made with 0, to be set later, it is taken as a schedule of ``lr_sgd / 100`` or, if
            that is not given, of 1e-3.
        lr_sgd: learning rate for weights with small gradients, in units of the averaged gradient. Coming from
            ``torch.optim.SGD(lr, momentum)``, which sums instead, give ``lr / (1 - momentum)``. None: 100 ``lr``,
            the paper's ratio.
        batch_size: of one step, over all devices and accumulated gradients. It sets how fast the filter adapts
            (in about ``lr_sgd / (batch_size * lr**2)`` steps), not where it settles, so a rough figure does no harm;
            but gradients above ``1 / (batch_size * lr)`` get less than Adam's learning rate.
        beta1: decay of the averaged gradient (momentum).
        weight_decay: decoupled, in AdamW's convention: each step multiplies weights by ``1 - lr * weight_decay``.
            The paper's lambda = 5e-5 at lr = 1e-3 is 0.05.
        dynamics: ``"exact"`` solves the Ornstein-Uhlenbeck process exactly, runs the filter at the base learning
            rates while a schedule scales the step, and starts each weight at the fixed point of its first gradient.
            ``"paper"`` is Algorithm 1 to the letter: Euler form, schedule inside the filter, start at ``lr_sgd``.
        reduction: ``"mean"`` or ``"sum"``: how the loss was reduced over the minibatch.
        maximize: ascend instead of descending.
        foreach: the form that works on all tensors at once. None: whenever it can and there is no kernel.
        fused: the kernel for the CPU. None: whenever it was built and can serve the parameters.
        capturable: keep the step count on the device, for CUDA graphs.
        differentiable: let autograd follow the step. With respect to a tensor ``lr``, it follows the schedule's
            part in the step, at a base learning rate that is a constant.
        state_dtype: ``torch.bfloat16`` halves the state, to 4 bytes a weight, with stochastic rounding.
        stochastic_rounding: round bf16 parameters stochastically, so that steps and decay below half of their
            precision are not lost.
        seed: of the rounding.

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

    # A gain of 0 marks a weight that has had no gradient yet: its filter has not begun.
    _buffers = ("exp_avg", "gain")
    _betas = 1
    _kernel = "adabayes_step"

    @explains_unknown
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        lr_sgd: float | None = None,
        batch_size: float = 128,
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
        self._sleepers = _Sleepers()
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

    def _complete_group(self, group: Group) -> None:
        if "beta1" in group:
            group["betas"] = (group.pop("beta1"),)
        if len(group.get("betas", (0,))) != 1:
            explain(type(self), ["betas"])
        super()._complete_group(group)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_range("batch_size", group["batch_size"], least=1.0)
        check_choice("dynamics", group["dynamics"], ("exact", "paper"))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._sleepers = _Sleepers()

    def _step_group(self, group: Group) -> None:
        if self._fused_step(group):
            return
        params: list[Tensor] = []
        grads: list[Tensor] = []
        steps: list[Tensor] = []
        exp_avgs: list[Tensor] = []
        gains: list[Tensor] = []
        has_complex = self._init_group(group, params, grads, steps, exp_avgs, gains)
        # A graph that is captured cannot decide anew at each step who may be asleep.
        eager = not (torch.compiler.is_compiling() or group["capturable"])
        adabayes(
            params,
            grads,
            exp_avgs,
            gains,
            steps,
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            has_complex=has_complex,
            **self._numbers(group),
            asleep=self._sleepers.among(gains, steps) if eager else None,
            rounding=self._rounding(group, params),
        )
        if eager:
            self._sleepers.look(gains, steps)

    @staticmethod
    def _numbers(group: Group) -> dict[str, Any]:
        names = ("lr", "lr_sgd", "base_lr", "batch_size", "weight_decay", "dynamics", "reduction", "maximize")
        return {**{name: group[name] for name in names}, "beta1": group["betas"][0]}

    def _numbers_now(self, group: Group, unscale: float = 1.0) -> _Coefficients:
        return _coefficients(**{**self._numbers(group), "lr": as_float(group["lr"])}, unscale=unscale)

    def _coefficients(self, group: Group, unscale: float) -> kernels.AdaBayesCoefficients:
        c = self._numbers_now(group)
        stationary = as_float(c.stationary)
        return kernels.AdaBayesCoefficients(
            unscale=unscale,
            beta1=c.beta1,
            shrink=1.0 if c.shrink is None else c.shrink,
            scale=c.scale,
            loss=c.loss,
            noise=c.flow.noise,
            information=c.information,
            half=0.5 / stationary if stationary else math.inf,
            slope=c.to_mean / c.eta if c.exact else 0.0,
        )

    def _fused_step(self, group: Group) -> bool:
        if torch.compiler.is_compiling() or (group["dynamics"] == "paper" and as_float(group["lr"]) == 0):
            return False  # at lr = 0, there is nothing to do but make state
        return super()._fused_step(group)

    def _run_kernel(self, plan: kernels.Plan, grads: Sequence[Tensor], group: Group, unscale: float) -> None:
        # The kernel begins filters where any may sleep; a known few are begun here, and cost it nothing.
        few = [i for i in plan.drowsy if plan.asleep[i] is not True]
        still_asleep: list[tuple[Tensor, Any]] = []
        if few:
            c = self._numbers_now(group, unscale)
            rows = ((plan.seconds[i], grads[i], plan.exp_avgs[i], plan.asleep[i]) for i in few)
            still_asleep = [(gain, _begin_(gain, grad, exp_avg, where, c)) for gain, grad, exp_avg, where in rows]
        super()._run_kernel(plan, grads, group, unscale)
        _sleep_on_(still_asleep)
        if plan.steps[0].item() == 1:  # the first, or its state was put back to zero, in place
            plan.drowsy = list(range(len(plan.params)))
        if plan.drowsy:
            self._sleepers.look([plan.seconds[i] for i in plan.drowsy], [plan.steps[i] for i in plan.drowsy])
            for i in plan.drowsy:
                plan.asleep[i] = self._sleepers.known(plan.seconds[i])
            plan.drowsy = [i for i in plan.drowsy if plan.asleep[i] is not False]

    def _warm_state(self, adamw: dict[str, Any], group: Group, beta2: float) -> dict[str, Any]:
        exp_avg, square = real_views(adamw["exp_avg"], adamw["exp_avg_sq"])
        mean_square = square.double() / ((1 - beta2 ** as_float(adamw["step"])) or 1.0)
        gain = fixed_point(self._to_mean(group) ** 2 * mean_square, group["base_lr"], group["lr_sgd"])
        if group["dynamics"] == "paper":
            gain = gain * (self._schedule(group) or 1.0)
        gain = gain.masked_fill((square == 0) & (exp_avg == 0), 0)  # no gradient yet
        gain = gain.to(torch.promote_types(square.dtype, torch.float32))
        return {
            "step": adamw["step"],
            "exp_avg": adamw["exp_avg"],
            "gain": torch.view_as_complex(gain) if adamw["exp_avg"].is_complex() else gain,
        }

    def _relative_gain(self, group: Group, state: dict[str, Any]) -> Tensor:
        (gain,) = real_views(state["gain"])
        schedule = self._schedule(group)
        most = group["lr_sgd"] * (schedule if group["dynamics"] == "paper" and schedule else 1.0)
        return torch.where(gain == 0, 1.0, gain / most)


@_disable_dynamo_if_unsupported()
def adabayes(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    gains: list[Tensor],
    state_steps: list[Tensor],
    foreach: bool | None = None,
    capturable: bool = False,
    differentiable: bool = False,
    has_complex: bool = False,
    *,
    lr: float | Tensor,
    lr_sgd: float,
    base_lr: float,
    batch_size: float,
    beta1: float,
    weight_decay: float,
    dynamics: str,
    reduction: str,
    maximize: bool,
    asleep: list[Asleep] | None = None,
    rounding: Rounding | None = None,
) -> None:
    r"""Functional API that performs a step of AdaBayes. See :class:`AdaBayes`.

    ``lr`` is the learning rate now, ``base_lr`` and ``lr_sgd`` those without the schedule. A gain of 0 stands for a
    weight that has had no gradient yet: start with zeros. ``asleep`` may say where such weights can be, to spare the
    search for them: for each tensor False (nowhere), True (anywhere) or their indices.
    """
    check_choice("dynamics", dynamics, ("exact", "paper"))
    check_choice("reduction", reduction, ("mean", "sum"))
    check_call(params, state_steps, capturable)
    if foreach is None:
        foreach = prefers_foreach(params, differentiable)
    if asleep is None:
        asleep = [True] * len(params)

    lr = as_scalar(lr, keep_tensor=capturable or differentiable)
    if dynamics == "paper" and not isinstance(lr, Tensor) and lr == 0:
        return  # where the paper divides by zero
    c = _coefficients(
        lr=lr,
        lr_sgd=lr_sgd,
        base_lr=base_lr,
        batch_size=batch_size,
        beta1=beta1,
        weight_decay=weight_decay,
        dynamics=dynamics,
        reduction=reduction,
        maximize=maximize,
    )
    update = _multi_tensor_adabayes if foreach else _single_tensor_adabayes
    update(params, grads, exp_avgs, gains, state_steps, asleep, c, rounding, capturable, has_complex)


def _coefficients(
    *,
    lr: Scalar,
    lr_sgd: float,
    base_lr: float,
    batch_size: float,
    beta1: float,
    weight_decay: float,
    dynamics: str,
    reduction: str,
    maximize: bool,
    unscale: float = 1.0,
) -> _Coefficients:
    """The numbers of a step from the hyperparameters, and GradScaler's."""
    exact = dynamics == "exact"
    schedule = lr / base_lr
    # What turns the gradient given into that of the mean loss, in whose units the gain is a learning rate.
    to_mean = unscale if reduction == "mean" else unscale / batch_size
    k = drift(base_lr, lr_sgd, batch_size)
    if exact:
        flow = ornstein_uhlenbeck(k, lr_sgd)
        loss = flow.forget
        scale = schedule
    else:
        k = k * schedule
        flow = euler(k, lr_sgd * schedule)
        loss = flow.forget
        scale = (lr != 0) * 1.0  # the paper's filter does not stop at lr = 0, but the weights shall
    return _Coefficients(
        exact=exact,
        flow=flow,
        loss=loss,
        eta=base_lr,
        stationary=lr_sgd if exact else lr_sgd * schedule,
        information=batch_size * to_mean * to_mean,
        to_mean=to_mean,
        scale=scale * (-to_mean if maximize else to_mean),
        beta1=beta1,
        shrink=1 - lr * weight_decay if weight_decay else None,
    )


class _Coefficients(NamedTuple):
    """The numbers of one step, the same for all tensors; some are tensors while a graph is captured."""

    exact: bool
    flow: Dynamics
    loss: Scalar  # share of the gain that is forgotten in a step: 1 - decay
    eta: float
    stationary: Scalar  # where the gain settles without gradients
    information: float  # curvature per squared gradient
    to_mean: float
    scale: Scalar  # of the step, beside gain and momentum
    beta1: float
    shrink: Scalar | None  # weight decay

    def step_size(self, step: Scalar) -> Scalar:
        return -self.scale / (1 - self.beta1**step)


def _single_tensor_adabayes(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    gains: list[Tensor],
    state_steps: list[Tensor],
    asleep: list[Asleep],
    c: _Coefficients,
    rounding: Rounding | None,
    capturable: bool,
    has_complex: bool,
) -> None:
    """One tensor after the other. Nothing that autograd may want is overwritten."""
    rows = zip(params, grads, exp_avgs, gains, state_steps, asleep)
    for i, (param, grad, exp_avg_, gain_, step_t, may_sleep) in enumerate(rows):
        step_t += 1
        if has_complex:
            param, grad, exp_avg_, gain_ = real_views(param, grad, exp_avg_, gain_)
        exp_avg, gain = widened([exp_avg_, gain_])
        (value,), (grad,) = in_precision_of(gain, [param], [grad])
        step = step_value(step_t, capturable)
        step_size = c.step_size(step)

        mean = exp_avg.lerp(grad, 1 - c.beta1)
        begun, still_asleep = _begin(gain, grad, exp_avg, c) if may_sleep else (gain, None)
        if c.exact:
            # predict(begun, flow) in a form that keeps small changes: in fp32, the decay may round to 1.
            prior = begun.lerp(_filled(c.stationary, gain), c.loss)
        else:
            prior = predict(kept(begun, c.flow.forget), c.flow)
        precision = prior.reciprocal().addcmul(grad, grad, value=c.information)
        posterior = precision.reciprocal()
        if still_asleep is not None:
            posterior = posterior.masked_fill(still_asleep, 0)

        moved = value if c.shrink is None else kept(value, c.shrink) * c.shrink
        if isinstance(step_size, Tensor):
            moved = torch.addcdiv(moved, mean * step_size, precision)
        else:
            moved = torch.addcdiv(moved, mean, precision, value=step_size)
        keys = keys_of(rounding, i, step)
        store_(param, moved, keys.param, "param")
        store_(exp_avg_, mean, keys.state, "exp_avg")
        store_(gain_, posterior, keys.state, "second")


def _multi_tensor_adabayes(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    gains: list[Tensor],
    state_steps: list[Tensor],
    asleep: list[Asleep],
    c: _Coefficients,
    rounding: Rounding | None,
    capturable: bool,
    has_complex: bool,
) -> None:
    """All tensors at once, in seven calls that need no memory beside the state (while no weight sleeps)."""
    places = range(len(params))
    for run in uniform_runs(params, gains, grads, exp_avgs, state_steps, asleep, places):
        targets, gains_, g, exp_avgs_, steps, may_sleep, place = run
        count_step_(steps)
        if has_complex:
            targets, gains_, g, exp_avgs_ = (real_views(*tensors) for tensors in (targets, gains_, g, exp_avgs_))
        s, m = widened(gains_), widened(exp_avgs_)
        p, g = in_precision_of(s[0], targets, g)
        step_sizes = per_step(c.step_size, steps, capturable)

        still_asleep = [
            (gain, _begin_(gain, grad, exp_avg, where, c))
            for gain, grad, exp_avg, where in zip(s, g, m, may_sleep)
            if where is not False
        ]
        torch._foreach_lerp_(m, g, 1 - c.beta1)
        if c.exact:
            torch._foreach_lerp_(s, [_filled(c.stationary, s[0])] * len(s), cast(float, c.loss))
        else:
            torch._foreach_mul_(s, 1 - c.flow.forget)
            torch._foreach_add_(s, [c.flow.noise] * len(s))
        torch._foreach_reciprocal_(s)
        torch._foreach_addcmul_(s, g, g, c.information)
        if c.shrink is not None:
            torch._foreach_mul_(p, c.shrink)
        if isinstance(step_sizes[0], Tensor):
            torch._foreach_addcdiv_(p, torch._foreach_mul(m, step_sizes), s)
        else:
            torch._foreach_addcdiv_(p, m, s, step_sizes)
        torch._foreach_reciprocal_(s)

        _sleep_on_(still_asleep)
        store_all_(
            (targets, p, "param"), (exp_avgs_, m, "exp_avg"), (gains_, s, "second"), rounding, place, steps, capturable
        )


def _begin(gain: Tensor, grad: Tensor, exp_avg: Tensor, c: _Coefficients) -> tuple[Tensor, Tensor | None]:
    """The gain with the filters of sleeping weights begun, and which of them this gradient leaves asleep.

    Exact: at the fixed point of the first gradient that is not zero. Paper: all at once, at lr_sgd.
    """
    sleeping = (gain == 0) & (exp_avg == 0)  # a gain alone may also be so small that it was rounded to 0
    if not c.exact:
        return torch.where(sleeping, c.stationary, gain), None
    start = fixed_point((c.to_mean * grad) ** 2, c.eta, c.stationary)
    return torch.where(sleeping, start, gain), sleeping & (grad == 0)


def _begin_(gain: Tensor, grad: Tensor, exp_avg: Tensor, where: Asleep, c: _Coefficients) -> Any:
    """The same in place; of the given few alone, and then as indices, if they are given."""
    if where is True:
        begun, mask = _begin(gain, grad, exp_avg, c)
        gain.copy_(begun)
        return mask
    wide = torch.promote_types(gain.dtype, torch.float32)
    begun, mask = _begin(gain[where].to(wide), grad[where].to(wide), exp_avg[where].to(wide), c)
    gain[where] = begun.to(gain.dtype)
    return None if mask is None else tuple(index[mask] for index in cast(tuple[Tensor, ...], where))


def _sleep_on_(still_asleep: list[tuple[Tensor, Any]]) -> None:
    """Mark again as asleep what a gradient of zero has left so."""
    for gain, where in still_asleep:
        if isinstance(where, Tensor):
            gain.masked_fill_(where, 0)
        elif where is not None:
            gain[where] = 0


class _Sleepers:
    """Remembers which weights may have had no gradient yet, because to look at all of them costs as much as a step.

    That changes no result. They only become fewer, so it looks again ever more rarely: after steps 1, 2, 4, 8, ... of a
    tensor. Most tensors have none left after the first.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], Asleep]] = {}  # by identity of the gain

    def among(self, gains: Sequence[Tensor], steps: Sequence[Tensor]) -> list[Asleep]:
        # State that was put back to zero, in place, begins anew.
        return [self.known(gain) if step.item() > 0 else True for gain, step in zip(gains, steps)]

    def known(self, gain: Tensor) -> Asleep:
        found = self._found.get(id(gain))
        return found[1] if found and found[0]() is gain else True

    def look(self, gains: Sequence[Tensor], steps: Sequence[Tensor]) -> None:
        for gain, step_t in zip(gains, steps):
            if type(gain) is not Tensor or gain.is_meta:
                continue
            step = int(step_t)
            if step == 1 or (step & (step - 1) == 0 and self.known(gain) is not False):
                gone = partial(self._forget, id(gain))
                self._found[id(gain)] = (weakref.ref(gain, gone), _zeros(*real_views(gain)))

    def _forget(self, key: int, _: weakref.ref[Tensor]) -> None:
        self._found.pop(key, None)


def _zeros(gain: Tensor) -> Asleep:
    """Where the gain is zero, if that is worth knowing."""
    count = gain.numel() - int(gain.count_nonzero())
    if count == 0:
        return False
    if gain.dim() == 0 or count > gain.numel() // 16:
        return True
    return torch.nonzero(gain == 0, as_tuple=True)


def _filled(value: Scalar, like: Tensor) -> Tensor:
    """A 0-dim tensor, made on the device itself so that nothing waits for a copy."""
    return torch.full((), cast(float, value), dtype=like.dtype, device=like.device)
