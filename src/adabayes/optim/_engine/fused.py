"""Fused steps: when a group is stepped by a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from adabayes._util.tensors import Scalar, as_float, local
from adabayes.kernels import unavailable
from adabayes.kernels.backends import backend_for
from adabayes.kernels.coefficients import Rule, StepOptions
from adabayes.kernels.plan import Plan, StatePlan, explain_unfit
from adabayes.optim._engine.state import Group

if TYPE_CHECKING:
    from adabayes.optim._engine.step import EngineOptimizer

__all__ = ["FusedSteps"]

_MAX_PLANS = 4  # of a group: different parameters may have gradients at different steps


class FusedSteps:
    """The fused steps of one optimizer, if its rule has kernels."""

    def __init__(self, rule: Rule | None) -> None:
        self._rule = rule
        self._plans: dict[int, list[StatePlan]] = {}  # by the id of the group; for different sets of its parameters

    def __bool__(self) -> bool:
        """Tell whether the last steps were fused."""
        return bool(self._plans)

    def forget_plans(self) -> None:
        """Forget all plans, because groups have changed."""
        self._plans.clear()

    def check(self, group: Group) -> None:
        """Raise if a group demands a kernel together with something that no kernel supports."""
        if not group.get("fused"):
            return
        if group["differentiable"]:
            raise RuntimeError(
                "`fused` does not support `differentiable`: autograd cannot follow a kernel. Leave `fused` out to use "
                "the single-tensor form."
            )
        if group["foreach"]:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together. Leave one of them out.")
        if (reason := unavailable()) and not torch.cuda.is_available():
            raise RuntimeError(f"fused=True: {reason}. Or leave `fused` out: then foreach is used.")

    def step(self, optimizer: EngineOptimizer, group: Group) -> bool:
        """Take a step with kernels, if they can serve all tensors of the group; return whether it was taken."""
        if self._rule is None or not _may_use_kernel(group):
            return False
        params, grads = group["params"], [p.grad for p in group["params"]]
        if any(map(is_, grads, repeat(None))):
            params = [p for p, grad in zip(params, grads) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if not params:
            return True
        device = params[0].device
        backend = backend_for(device, group["fused"])  # None with fused=True: the plan explains why
        if backend is None and not group["fused"]:
            return False
        asynchronous = backend is not None and backend.asynchronous
        if group["capturable"] and not (group["fused"] and asynchronous):
            return False
        lr = _without_sync(group["lr"], device)
        coefficients = optimizer.coefficients(group, lr)
        if coefficients is None:
            return False
        plan = self._plan(optimizer, group, params)
        if plan is None:
            return False
        found_inf = getattr(optimizer, "found_inf", None)
        scale = getattr(optimizer, "grad_scale", None)
        weight_decay = group["weight_decay"]
        options = StepOptions(
            unscale=1.0 if scale is None else 1.0 / _without_sync(scale, device),
            shrink=1 - lr * weight_decay if weight_decay else 1.0,
            sign=-1 if group["maximize"] else 1,
            found_inf=found_inf,
            seed=group["seed"],
            round_params=group["stochastic_rounding"],
        )
        plan.take_step(grads, coefficients, options)
        return True

    def _plan(self, optimizer: EngineOptimizer, group: Group, params: list[Tensor]) -> StatePlan | None:
        """Return a valid plan for these parameters, or None if kernels cannot serve all of them."""
        plans = self._plans.get(id(group), [])
        for plan in plans:
            if plan.is_valid(params, optimizer.state):
                return plan
        new = self._new_plan(optimizer, group, params)
        if new is None:
            self._plans.pop(id(group), None)
        else:
            others = [plan for plan in plans if plan.is_current(optimizer.state)]  # the rest would keep memory alive
            self._plans[id(group)] = [new, *others][:_MAX_PLANS]
        return new

    @_disable_dynamo  # beyond its recompilation limit, the compiler traces functions that a step calls
    def _new_plan(self, optimizer: EngineOptimizer, group: Group, params: list[Tensor]) -> StatePlan | None:
        assert self._rule is not None
        indices = optimizer.indices(params)
        # Creates missing state; refuses sparse gradients, and state that lacks one of its two entries.
        optimizer._init_group(group, [], [], [], [], [])
        states: list[Mapping[str, Any]] = [optimizer.state[p] for p in params]
        if hasattr(params[0], "to_local"):  # DTensors: each process steps its own shards, with a new plan each time
            states = [{name: local(entry) for name, entry in state.items()} for state in states]
            params = [local(p) for p in params]
        repeated = len(set(map(id, params))) < len(params)
        for p, state in zip(params, states):
            if reason := explain_unfit(self._rule, p, state, group, repeated):
                if group["fused"]:
                    raise RuntimeError(f"{reason} Leave `fused` out to use foreach.")
                return None
        return Plan(self._rule, params, states, indices)


def _may_use_kernel(group: Group) -> bool:
    """Tell whether the settings of a group permit a kernel: by request, or if no other form is requested."""
    if torch.compiler.is_compiling() or group["differentiable"]:
        return False
    return bool(group["fused"] or (group["fused"] is None and group["foreach"] is None))


def _without_sync(value: Scalar, device: torch.device) -> Scalar:
    """Return a setting as a number; a setting on a GPU as a 0-dim tensor of float64, to avoid a device sync."""
    if not isinstance(value, Tensor):
        return value
    if value.is_cpu or device.type == "cpu":
        return as_float(value)
    return value.squeeze().to(device, torch.float64, non_blocking=True)
