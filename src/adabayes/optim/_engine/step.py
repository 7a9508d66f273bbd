"""The engine: everything about a step except its mathematics.

An optimizer declares the state of a parameter (``STATE``), computes the coefficients of a step from the settings of a
group (``coefficients``), and computes the step from the gradient (``direction``). The engine collects parameters,
creates their state and batches tensors of one kind. It takes care of precision, complex numbers, weight decay, ascent,
rounding and the form in which a step is computed. docs/adding.md writes an optimizer in a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _foreach_supported_types,
    _get_capturable_supported_devices,
    _use_grad_for_differentiable,
)

from adabayes._util.checks import check_choice, check_range
from adabayes._util.tensors import Scalar, as_float, real_view
from adabayes.kernels.coefficients import Rule
from adabayes.optim._engine.batch import Batch, Step
from adabayes.optim._engine.compatibility import original_lr
from adabayes.optim._engine.fused import FusedSteps
from adabayes.optim._engine.rounding import STATE_STREAMS, Rounding
from adabayes.optim._engine.state import Group, StatefulOptimizer, dtype_name
from adabayes.rates import USUAL_LR

__all__ = ["EngineOptimizer"]

# Older versions of torch use another name, and later versions warn about it.
if hasattr(Optimizer, "_accelerator_graph_capture_health_check"):
    _check_graph_capture = Optimizer._accelerator_graph_capture_health_check
else:
    _check_graph_capture = Optimizer._cuda_graph_capture_health_check

Columns = dict[str, list[Tensor]]  # the entries of state of several parameters, by name


class EngineOptimizer(StatefulOptimizer):
    """Implements torch's optimizer contract; subclasses supply the update rule.

    Each group keeps its original learning rate as ``base_lr``, so the ratio ``lr / base_lr`` is the schedule.
    """

    BETAS: ClassVar[int] = 2
    COUPLED_DECAY: ClassVar[bool] = False  # an L2 penalty in the gradient, instead of AdamW's decoupled decay
    KERNEL: ClassVar[Rule | None] = None  # the rule, if kernels compute it
    IN_PLACE: ClassVar[bool] = False  # whether the single-tensor form, too, changes tensors in place

    # Subclasses define these two

    def coefficients(self, group: Group, lr: Scalar) -> Any:
        """Return the coefficients of a step, the same for all tensors of a group; None to skip the step."""
        raise NotImplementedError

    def direction(self, gradient: Batch, state: dict[str, Batch], coefficients: Any, t: Scalar) -> Step:
        """Update the state and return the step.

        Args:
            gradient: the gradients, which must not be changed.
            state: the entries of ``STATE`` by name, in fp32 or float64, to be updated.
            coefficients: the result of :meth:`coefficients`.
            t: the step count, from 1. While a graph is captured or compiled, it is a tensor: in the foreach form, a
                vector with the count of each tensor.
        """
        raise NotImplementedError

    # Groups

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        options: dict[str, Any] = {
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "state_dtype": None,
            "stochastic_rounding": False,
            "seed": 0,
        }
        if self.KERNEL is not None:
            options["fused"] = None
        defaults = {**options, **defaults}
        defaults["state_dtype"] = dtype_name(defaults["state_dtype"])
        self._fused = FusedSteps(self.KERNEL)
        self._check_group(defaults)
        self._fused.check(defaults)
        # A scheduler changes a tensor lr in place, also in the defaults: so store its value now.
        defaults["base_lr"] = self._base_lr(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):
            self._complete_group(param_group)
        super().add_param_group(param_group)

    def _complete_group(self, group: Group) -> None:
        """Check the settings of a new group, and add those that follow from others."""
        if "state_dtype" in group:
            group["state_dtype"] = dtype_name(group["state_dtype"])
        given = {**self.defaults, **group}
        self._check_group(given)
        self._fused.check(given)
        if "base_lr" not in group and "lr" in group:
            group["base_lr"] = self._base_lr(given)

    def _base_lr(self, group: Group) -> float:
        """Return the learning rate without a schedule; Adam's usual one if it starts at 0."""
        return as_float(group["lr"]) or USUAL_LR

    def _check_group(self, group: Group) -> None:
        """Raise if a setting is invalid."""
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(
                f"Tensor lr must be 1-element, but its shape is {tuple(lr.shape)}. To give each layer its own "
                "learning rate, make parameter groups."
            )
        check_range("learning rate", lr)
        check_range("weight_decay value", group["weight_decay"])
        if len(group["betas"]) != self.BETAS:
            raise ValueError(f"Invalid betas: {group['betas']}. There must be {self.BETAS}.")
        for i, beta in enumerate(group["betas"]):
            check_range(f"beta parameter at index {i}", beta, below=1.0)
        if "reduction" in group:
            check_choice("reduction", group["reduction"], ("mean", "sum"))
        if group["differentiable"] and group["foreach"]:
            raise RuntimeError(
                "`foreach=True` does not support `differentiable=True`: autograd cannot follow its in-place "
                "arithmetic. Leave `foreach` out to use the single-tensor form."
            )

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        for i, saved in enumerate(state_dict["param_groups"]):
            try:
                group = {**self.defaults, **saved}
                group["lr"] = abs(group["lr"])  # a schedule may end below 0
                check_range("base_lr", group["base_lr"])
                self._check_group(group)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"{type(self).__name__} cannot use parameter group {i} of this state dict. {error} Was it saved by "
                    "another optimizer? Nothing was changed."
                ) from error
        super()._check_loadable(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fused = FusedSteps(self.KERNEL)
        for group in state["param_groups"]:
            if "base_lr" not in group:
                group["base_lr"] = self._base_lr({**group, "lr": original_lr(group)})
        super().__setstate__(state)

    def _step_device(self, p: Tensor, group: Group) -> torch.device:
        """Return the parameter's device if ``fused=True``, as in torch, so that found_inf stays on the device."""
        fused = self.KERNEL is not None and group.get("fused")
        return p.device if fused else super()._step_device(p, group)

    # Steps

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss; it runs with gradients enabled.
        """
        _check_graph_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for subgroup in self._subgroups(group):
                if not self._step_fused(subgroup):
                    self._step_group(subgroup)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler leaves unscaling to the step, and tells it by ``found_inf`` whether to skip."""
        return self.KERNEL is not None and all(group.get("fused") for group in self.param_groups)

    def _subgroups(self, group: Group) -> list[Group]:
        """Split a group into groups that different kernels step."""
        return [group]

    def _step_fused(self, group: Group) -> bool:
        """Take a step with kernels, if they can serve all tensors of the group; return whether it was taken."""
        return self._fused.step(self, group)

    def _step_group(self, group: Group) -> None:
        """Take a step with torch's operations."""
        graph = torch.compiler.is_compiling() or group["capturable"]
        lr = _as_scalar(group["lr"], keep_tensor=graph or group["differentiable"])
        coefficients = self.coefficients(group, lr)
        for subgroup in self._split(group, coefficients):
            self._step_params(subgroup, coefficients, lr, graph)

    def _split(self, group: Group, coefficients: Any) -> list[Group]:
        """Split a group into groups whose parameters have the same entries of state."""
        return [group] if group["params"] else []

    def _step_params(self, group: Group, coefficients: Any, lr: Scalar, graph: bool) -> None:
        """Step the parameters of a group that have gradients, in batches or one by one."""
        params: list[Tensor] = []
        grads: list[Tensor] = []
        steps: list[Tensor] = []
        entries: Columns = {name: [] for name in self._entries(group, group["params"][0])}
        has_complex = self._init_group(group, params, grads, steps, *entries.values())
        if group["capturable"]:
            _check_capturable(params, steps)
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if coefficients is None or not params or (found_inf is not None and found_inf.item()):
            return
        indices = self.indices(params)
        targets, grads, entries = self._localize(params, grads, entries)
        if scale is not None:
            grads = [g / scale.to(g.device) for g in grads]
        foreach = group["foreach"]
        if foreach is None:
            foreach = not group["differentiable"] and all(type(p) in _foreach_supported_types for p in targets)
        rounding = Rounding(group["seed"], group["stochastic_rounding"])
        _count_(steps)
        clock: list[Any] = steps if graph else [step.item() for step in steps]
        columns: list[Any] = [targets, grads, clock, indices, params, *entries.values()]
        for batch in _batches(columns) if foreach else [[[item] for item in row] for row in zip(*columns)]:
            weights, g, times, chosen, batch_params, *states = batch
            t: Scalar = torch.stack(times) if graph and foreach else times[0]
            if has_complex:
                weights, g, *states = ([real_view(x) for x in column] for column in (weights, g, *states))
            gradient = Batch(g, foreach or self.IN_PLACE, batch_params)
            store = partial(rounding.store, indices=chosen, t=t)
            self._step_batch(group, coefficients, lr, t, weights, gradient, dict(zip(entries, states)), store)

    def _localize(
        self, params: list[Tensor], grads: list[Tensor], entries: Columns
    ) -> tuple[list[Tensor], list[Tensor], Columns]:
        """Return the parameters, gradients and state to compute with: the tensors themselves, or local shards."""
        return params, grads, entries

    def _step_batch(
        self,
        group: Group,
        coefficients: Any,
        lr: Scalar,
        t: Scalar,
        targets: list[Tensor],
        gradient: Batch,
        states: Columns,
        store: Callable[[list[Tensor], list[Tensor], str], None],
    ) -> None:
        """Step tensors of one kind, in the precision of their state, but at least in fp32."""
        in_place = gradient.in_place
        state = {name: Batch(_to_compute(column, group), in_place) for name, column in states.items()}
        dtype = next(iter(state.values())).tensors[0].dtype
        wide = torch.promote_types(targets[0].dtype, dtype)
        weights = Batch(_to_compute([_to(p, wide) for p in targets], group), in_place)
        gradient.tensors = [_to(g, dtype) for g in gradient.tensors]
        sign = -1 if group["maximize"] else 1
        weight_decay = group["weight_decay"]
        if self.COUPLED_DECAY:
            gradient = gradient.neg() if group["maximize"] else gradient
            gradient = gradient.add(weights, alpha=weight_decay) if weight_decay else gradient
            sign = 1
        elif weight_decay:
            weights.mul_(1 - lr * weight_decay)
        weights.move_(self.direction(gradient, state, coefficients, t), sign)
        results = [(targets, weights), *((states[name], batch) for name, batch in state.items())]
        streams = ["param", *STATE_STREAMS]  # of the random bits that round bf16
        for i, (stored, batch) in enumerate(results):
            if not in_place or batch.tensors[0].dtype != stored[0].dtype:
                store(stored, batch.tensors, streams[min(i, len(STATE_STREAMS))])

    def indices(self, params: Sequence[Tensor]) -> list[int]:
        """Return the indices of these parameters, given in the optimizer's order, among all of its parameters."""
        every = [p for group in self.param_groups for p in group["params"]]
        indices, index = [], 0
        for p in params:
            while every[index] is not p:
                index += 1
            indices.append(index)
            index += 1
        return indices


def _as_scalar(value: Scalar, *, keep_tensor: bool) -> Scalar:
    """Return a setting as a number, or as a 0-dim tensor where a graph is captured or differentiated."""
    if not isinstance(value, Tensor):
        return value
    return value.squeeze() if keep_tensor else value.item()


def _check_capturable(params: Sequence[Tensor], steps: Sequence[Tensor]) -> None:
    if torch.compiler.is_compiling():
        return
    supported = _get_capturable_supported_devices()
    for p, step in zip(params, steps):
        if p.device.type != step.device.type or p.device.type not in supported:
            raise AssertionError(
                f"If capturable=True, params and state_steps must be on supported devices: {supported}; "
                f"got {p.device.type} and {step.device.type}. Leave capturable out on other devices."
            )


def _count_(steps: list[Tensor]) -> None:
    if not torch.compiler.is_compiling() and steps[0].is_cpu:
        # One wrapped number for all tensors, instead of one for each (as in torch.optim).
        torch._foreach_add_(steps, torch.tensor(1.0, device="cpu"), alpha=1.0)
    else:
        torch._foreach_add_(steps, 1)


def _batches(columns: list[Any]) -> list[list[list[Any]]]:
    """Split parallel lists into batches with one device, one dtype for each list, and one step count."""
    params, grads, clock, _, _, *states = columns
    graph = isinstance(clock[0], Tensor)
    kinds = [[p.device for p in params], *([x.dtype for x in column] for column in (params, grads, *states))]
    kinds += [] if graph else [clock]
    if all(len(set(kind)) == 1 for kind in kinds):
        return [columns]
    batches: dict[Any, list[Any]] = {}
    for kind, row in zip(zip(*kinds), zip(*columns)):
        batches.setdefault(kind, []).append(row)
    return [[list(column) for column in zip(*rows)] for rows in batches.values()]


def _to(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype == dtype else t.to(dtype)


def _to_compute(tensors: list[Tensor], group: Group) -> list[Tensor]:
    """Return the tensors to compute with: fp32 copies of bf16, copies that autograd may keep, or the tensors."""
    tensors = [t.float() if t.dtype == torch.bfloat16 else t for t in tensors]
    return [t.clone() for t in tensors] if group["differentiable"] else tensors
