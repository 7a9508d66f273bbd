"""What AdaBayes and AdaBayes-FP share: a second learning rate that follows the first, kernels, and bf16 state."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor

from adabayes import kernels
from adabayes._warn import warn
from adabayes.rates import base_lr_of, lr_sgd_of, warn_if_papers, warn_if_swapped
from adabayes.optim._base import BaseOptimizer, Group, as_float, check_choice, check_range, local, own_state
from adabayes.optim._explain import explain
from adabayes.optim._rounding import Rounding

# Of AdamW's groups, what means nothing here or is a matter of how to compute; all else is taken from them
_NOT_OURS = {"eps", "amsgrad", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


class TwoRateOptimizer(BaseOptimizer):
    """Resolves ``lr_sgd`` of each group, which goes with its base learning rate; takes fused steps where it can."""

    _buffers: ClassVar[tuple[str, str]]
    _kernel: ClassVar[str]

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._plans: dict[int, kernels.Plan] = {}
        defaults["state_dtype"] = _dtype_name(defaults["state_dtype"])
        super().__init__(params, defaults)
        self._lent = False

    def _complete_group(self, group: Group) -> None:
        explain(type(self), [name for name in group if name not in self.defaults])
        if "state_dtype" in group:
            group["state_dtype"] = _dtype_name(group["state_dtype"])
        super()._complete_group(group)
        if group.get("lr_sgd") is None:
            group["lr_sgd"] = self._default_lr_sgd(group)
        given = {**self.defaults, **group}
        base_lr, lr_sgd, weight_decay = (as_float(given[name]) for name in ("base_lr", "lr_sgd", "weight_decay"))
        warn_if_swapped(base_lr, lr_sgd)
        warn_if_papers(base_lr, weight_decay)

    def _default_lr_sgd(self, group: Group) -> float:
        """For a group that does not state its own: in the proportion that the defaults have, or the paper's."""
        base_lr = group.get("base_lr", self.defaults["base_lr"])
        return float(lr_sgd_of(base_lr, (self.defaults["base_lr"], self.defaults["lr_sgd"])))

    def _base_lr(self, group: Group) -> float:
        return float(base_lr_of(as_float(group["lr"]), group.get("lr_sgd")))

    def __setstate__(self, state: dict[str, Any]) -> None:
        lacking = [group for group in state["param_groups"] if group.get("lr_sgd") is None]
        super().__setstate__(state)
        self._plans = {}
        for group in lacking:
            group["lr_sgd"] = self._default_lr_sgd(group)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        lr_sgd = group["lr_sgd"]
        if lr_sgd is not None:
            hint = " It must be above 0; leave it out for 100 * lr. To freeze parameters, set lr=0."
            check_range("lr_sgd", lr_sgd, hint=hint)
            if lr_sgd == 0:
                raise ValueError(f"Invalid lr_sgd: 0.{hint}")
        check_choice("reduction", group["reduction"], ("mean", "sum"))
        if group["fused"]:
            for other in ("foreach", "differentiable", "capturable"):
                if group[other]:
                    raise RuntimeError(f"`fused` and `{other}` cannot be `True` together. Leave one of them out.")
            if reason := kernels.unavailable():
                raise RuntimeError(f"fused=True: {reason}. Or leave `fused` out: then foreach is taken.")

    # State

    @property  # type: ignore[override]
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """As in torch. Whoever has had it may change it at any time, so from then on every fused step looks it over."""
        state = own_state(self)
        self._lent = True
        return state

    @state.setter
    def state(self, value: dict[Tensor, dict[str, Any]]) -> None:
        self.__dict__["state"] = value

    def _state_dtype(self, p: Tensor, group: Group) -> torch.dtype:
        dtype = super()._state_dtype(p, group)
        if group["state_dtype"] is None:
            return dtype
        if dtype != torch.float32:
            raise ValueError(f"state_dtype=torch.bfloat16 is for fp32, bf16 and fp16 parameters, not for {p.dtype}")
        return torch.bfloat16

    @torch.no_grad()
    def from_adamw(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict of a ``torch.optim.AdamW`` as one of this optimizer, to go on from there.

        Make this optimizer with the groups and the learning rate that AdamW was made with: its peak, if there is a
        schedule. What both have is AdamW's: the learning rate of now and all that its scheduler noted, weight decay,
        momentum. What only this optimizer has is as it was made. The average of squared gradients is what AdaBayes-FP
        needs; for AdaBayes, the gain is put at its fixed point. AMSGrad's maximum is left behind, and so is the penalty
        of an Adam, which has no equivalent.

        Examples:
            >>> from adabayes import AdaBayes
            >>> w = torch.ones(3)
            >>> adamw = torch.optim.AdamW([w], lr=1e-3)
            >>> w.grad = torch.tensor([0.0, 0.1, 1.0])
            >>> adamw.step()
            >>> optimizer = AdaBayes([w], lr=1e-3, lr_sgd=0.1, batch_size=128)
            >>> optimizer.load_state_dict(optimizer.from_adamw(adamw.state_dict()))
            >>> optimizer.effective_lr(w)
            tensor([0.1000, 0.0095, 0.0010])
        """
        saved = state_dict.get("param_groups", [])
        is_adamw = saved and all("eps" in group and len(group.get("betas", ())) == 2 for group in saved)
        if not is_adamw or not all("exp_avg_sq" in state for state in state_dict["state"].values()):
            raise ValueError(
                f"this is not the state dict of an AdamW: it has {sorted(map(str, state_dict))}, and groups with "
                f"{sorted(saved[0]) if saved else 'nothing'}. Give what AdamW.state_dict() returned."
            )
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the state dict has groups of {sizes[0]} parameters, this optimizer of {sizes[1]}: make it with the "
                "same groups as AdamW was made with"
            )
        groups, states = [], {}
        for theirs, ours in zip(saved, self.param_groups):
            betas = tuple(map(as_float, theirs["betas"]))
            taken = {name: value for name, value in theirs.items() if name not in _NOT_OURS}
            if theirs.get("decoupled_weight_decay") is False and theirs["weight_decay"]:
                warn(
                    f"weight_decay={theirs['weight_decay']:g} of this Adam is a penalty, not decoupled: it stays at "
                    f"{ours['weight_decay']:g}, as this optimizer was made"
                )
                del taken["weight_decay"]
            group = {**{k: v for k, v in ours.items() if k != "params"}, **taken, "betas": betas[: self._betas]}
            groups.append(group)
            for i in theirs["params"]:
                if state := state_dict["state"].get(i):
                    states[i] = self._warm_state(state, group, betas[1])
        return {"state": states, "param_groups": groups}

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        if any("eps" in group and "lr_sgd" not in group for group in state_dict["param_groups"]):
            raise ValueError(
                "this state dict was saved by another optimizer, one with an eps. If that was AdamW, load "
                "optimizer.from_adamw(state_dict) instead to go on from there. Nothing was changed."
            )
        super()._check_loadable(state_dict)

    def _warm_state(self, adamw: dict[str, Any], group: Group, beta2: float) -> dict[str, Any]:
        """The state of a parameter, from AdamW's."""
        raise NotImplementedError

    def _rounding(self, group: Group, params: list[Tensor]) -> Rounding | None:
        """What stochastic rounding needs to know, if there is any to be done."""
        if group["state_dtype"] is None and not group["stochastic_rounding"]:
            return None
        return Rounding(group["seed"], self._ordinals(group, params), group["stochastic_rounding"])

    def _ordinals(self, group: Group, params: list[Tensor]) -> list[int]:
        """The how-manieth parameter of the optimizer each of these is."""
        first = 0
        for other in self.param_groups:
            if other is group:
                break
            first += len(other["params"])
        place = {id(p): i for i, p in enumerate(group["params"], first)}
        return [place[id(p)] for p in params]

    # Fused steps

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells GradScaler to leave unscaling to the step, and to say in ``found_inf`` if it shall be skipped."""
        return all(group["fused"] for group in self.param_groups)

    def _coefficients(self, group: Group, unscale: float) -> ctypes.Structure:
        raise NotImplementedError

    def _fused_step(self, group: Group) -> bool:
        """Take the step with a kernel, if there is one for all tensors of the group."""
        if torch.compiler.is_compiling() or group["differentiable"] or group["capturable"] or kernels.unavailable():
            return False
        if not group["fused"] and (group["fused"] is False or group["foreach"] is not None):
            return False
        params = group["params"]
        grads = [p.grad for p in params]
        if any(map(is_, grads, repeat(None))):
            params = [p for p, grad in zip(params, grads) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if not params:
            return True
        plan = self._plans.get(id(group))
        taken = plan is not None and plan.takes(grads)
        if plan is None or not plan.holds(params, self._own_state if self._lent else None, sizes=not taken):
            self._plans.pop(id(group), None)
            ordinals = self._ordinals(group, params)
            self._init_group(group, [], [], [])  # makes the state that is not there yet
            states = [self._own_state[p] for p in params]
            if hasattr(params[0], "to_local"):  # DTensor: each process steps its own shard, planned for anew each time
                states = [{name: local(entry) for name, entry in state.items()} for state in states]
                params, grads = ([local(t) for t in tensors] for tensors in (params, grads))
            if reason := kernels.unfit(params, states, self._buffers):
                if group["fused"]:
                    raise RuntimeError(f"fused=True: {reason}. Leave `fused` out, and foreach is taken.")
                return False
            plan = self._plans[id(group)] = kernels.Plan(
                params, states, self._buffers, ordinals, may_sleep="gain" in self._buffers
            )
            taken = plan.takes(grads)
        if not taken:
            self._init_group(group, [], [], [])  # refuses sparse gradients
            grads = plan.laid_out(grads)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return True
        scale = getattr(self, "grad_scale", None)
        self._run_kernel(plan, grads, group, 1.0 if scale is None else 1.0 / as_float(scale))
        return True

    def _run_kernel(self, plan: kernels.Plan, grads: Sequence[Tensor], group: Group, unscale: float) -> None:
        coefficients = self._coefficients(group, unscale)
        plan.step(self._kernel, grads, coefficients, group["seed"], group["stochastic_rounding"])

    # What diagnostics ask

    @torch.no_grad()
    def effective_lr(self, param: Tensor) -> Tensor:
        """The learning rate that each weight of ``param`` has now; ``lr_sgd`` where it has had no gradient yet.

        Of complex parameters, each component is a weight: they come as by ``torch.view_as_real``.
        """
        for group in self.param_groups:
            if any(p is param for p in group["params"]):
                if param not in self._own_state:
                    raise RuntimeError("this parameter has no state yet: take a step with a gradient first")
                lr_sgd: float = group["lr_sgd"] * self._schedule(group)
                return self._relative_gain(group, self._own_state[param]) * lr_sgd
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is not one of this optimizer's")

    def _relative_gain(self, group: Group, state: dict[str, Any]) -> Tensor:
        """The gain in units of the most that it can be, lr_sgd: whatever the schedule, also at lr = 0."""
        raise NotImplementedError

    @staticmethod
    def _to_mean(group: Group) -> float:
        """What turns the gradients given into those of the mean loss, in whose units the gain is a learning rate."""
        return 1 / group["batch_size"] if group["reduction"] == "sum" else 1.0

    @staticmethod
    def _schedule(group: Group) -> float:
        schedule: float = as_float(group["lr"]) / group["base_lr"]
        return schedule


def two_rates(optimizer: Any) -> TwoRateOptimizer:
    """The optimizer itself, out of what accelerate (and so the Trainer) or Lightning has wrapped it in."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, TwoRateOptimizer):
        raise TypeError(
            f"{type(optimizer).__name__} has one learning rate, so its weights have no regimes: "
            "diagnostics take an AdaBayes or an AdaBayesFP"
        )
    return optimizer


def _dtype_name(dtype: Any) -> str | None:
    """As parameter groups keep it, so that they can be written as JSON."""
    if dtype in (None, "bfloat16"):
        return dtype  # type: ignore[no-any-return]
    if dtype == torch.bfloat16:
        return "bfloat16"
    raise ValueError(f"Invalid state_dtype: {dtype!r}. It must be None (fp32, or float64) or torch.bfloat16.")
