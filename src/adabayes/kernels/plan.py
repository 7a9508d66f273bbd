"""Plans fused steps: which tensors a kernel can serve, and the addresses that it works on.

Making a plan checks every tensor, which takes longer than the kernel itself on small tensors. So a plan is made once
and used as long as it is valid: the same parameters and state, at the same addresses, with the same layout. Each step
checks this before a kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.nn import Parameter

from adabayes._util.tensors import check_memory, has_gaps, local
from adabayes.kernels.backends import BACKENDS, backend_for
from adabayes.kernels.coefficients import Rule, StepOptions
from adabayes.kernels.launch import Launch, Operands

__all__ = ["Plan", "StatePlan", "compute_step", "explain_unfit", "explain_unsupported"]

State = Mapping[str, Tensor]

# Number of steps after which a plan is made again, so that the optimizer can convert step counts before they reach
# 2**24, where fp32 stands still.
_LONGEST_USE = 2**23


class _Batch(NamedTuple):
    """Tensors of a plan that one launch serves, and their indices in the plan."""

    indices: list[int]
    launch: Launch


class StatePlan:
    """The tensors of a parameter group and their state, as long as they stay where they are.

    A plan keeps the memory of its tensors alive. A tensor with the same layout at the same address is therefore still
    in that memory.

    Args:
        params: parameters, or this process's shards of them.
        states: the state of each parameter.
        entries_of: returns the entries of a parameter's state that kernels use.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[State],
        entries_of: Callable[[State], tuple[Tensor, ...]],
    ) -> None:
        self._params = list(params)
        self._states = list(states)
        self._entries_of = entries_of
        entries = self._present_entries()
        self._guard = _guard((*params, *entries))
        self._gradient_guard: TensorGuards | None = None  # made once gradients could be used without a copy
        self._addresses = list(map(_address, params))
        self._entry_addresses = list(map(_address, entries))
        self._memory = [t.untyped_storage() for t in (*params, *entries)]  # keeps it alive
        self._steps_left = _LONGEST_USE

    def is_valid(self, params: Sequence[Tensor], state: Mapping[Tensor, State]) -> bool:
        """Tell whether the plan is for these parameters and their present state, and none of them has moved."""
        try:
            entries = self._present_entries()
        except KeyError:  # an entry was deleted
            return False
        return (
            self._steps_left > 0
            and len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and list(map(_address, params)) == self._addresses
            and all(map(is_, _states_of(params, state), self._states))
            and list(map(_address, entries)) == self._entry_addresses
            and self._guard.check(*params, *entries)
        )

    def is_current(self, state: Mapping[Tensor, State]) -> bool:
        """Tell whether the plan's own parameters and their state are still where they were."""
        return self.is_valid(self._params, state)

    def _present_entries(self) -> list[Tensor]:
        return list(chain.from_iterable(map(self._entries_of, self._states)))

    def take_step(self, grads: list[Tensor], coefficients: Any, options: StepOptions) -> None:
        """Take a step with the optimizer's coefficients."""
        self._steps_left -= 1
        grads = self._fit(grads)
        addresses = list(map(_address, grads))
        if 0 in addresses:
            for g, address in zip(grads, addresses):
                if not address:
                    check_memory("gradient", g)
        self._launch(grads, addresses, coefficients, options)
        torch.autograd.graph.increment_version(self._params)  # as after any other in-place change

    def _launch(self, grads: list[Tensor], addresses: list[int], coefficients: Any, options: StepOptions) -> None:
        """Run the kernels on gradients with the layouts of their parameters."""
        raise NotImplementedError

    def _fit(self, grads: list[Tensor]) -> list[Tensor]:
        """Return gradients with the dtypes and layouts of their parameters; copies where they differ."""
        if self._gradient_guard is not None and self._gradient_guard.check(*grads):
            return grads
        fitting = [_fit(local(g), p) for g, p in zip(grads, self._params)]
        if all(map(is_, fitting, grads)):
            self._gradient_guard = _guard(grads)
        return fitting


class Plan(StatePlan):
    """The tensors of a parameter group, and the launches that step them.

    Args:
        rule: the update rule.
        params: parameters, or this process's shards of them, which :func:`explain_unfit` has not refused.
        states: the state of each parameter.
        indices: the index of each parameter among all of the optimizer's.
    """

    def __init__(self, rule: Rule, params: Sequence[Tensor], states: Sequence[State], indices: Sequence[int]) -> None:
        super().__init__(params, states, itemgetter("exp_avg", rule.second_state, "step"))
        rows = list(zip(params, *zip(*map(self._entries_of, states)), indices))
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for i, (p, exp_avg, _, step, _) in enumerate(rows):
            kinds.setdefault((p.device, p.dtype, exp_avg.dtype, step.device, step.dtype), []).append(i)
        self._batches = []
        for chosen in kinds.values():
            operands = Operands(*map(list, zip(*(rows[i] for i in chosen))))
            self._batches.append(_Batch(chosen, BACKENDS[params[chosen[0]].device.type].launch(rule, operands)))

    def _launch(self, grads: list[Tensor], addresses: list[int], coefficients: Any, options: StepOptions) -> None:
        for indices, launch in self._batches:
            chosen = addresses if len(self._batches) == 1 else [addresses[index] for index in indices]
            launch.take_step(chosen, coefficients, options)


def compute_step(
    rule: Rule,
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    second_states: Sequence[Tensor],
    coefficients: Any,
    t: float,
    fused: bool | None,
) -> list[Tensor] | None:
    """Update the state of tensors of one dtype and return the step; return None if no kernel can serve them.

    ``fused`` is the setting of the group. State with gaps, and dtypes without a kernel, use foreach even if it is True.
    """
    like, states = exp_avgs[0], (*exp_avgs, *second_states)
    backend = backend_for(like.device, fused)
    if backend is None:
        return None
    if (like.dtype, like.dtype) not in backend.dtype_pairs or not all(_is_plain(x, like) for x in states):
        return None
    for state in states:
        check_memory("state", state)
    steps = list(map(torch.empty_like, exp_avgs))
    grads = [_fit(g, step) for g, step in zip(grads, steps)]
    launch = backend.launch(rule, Operands(steps, exp_avgs, second_states, None, [0] * len(grads)))
    launch.compute_step(list(map(_address, grads)), coefficients, t)
    return steps


def explain_unfit(rule: Rule, p: Tensor, state: State, group: Mapping[str, Any], repeated: bool) -> str | None:
    """Return why no kernel can serve a parameter with its state, or None if one can.

    Args:
        rule: the update rule.
        p: the parameter.
        state: its state.
        group: the settings of its group.
        repeated: whether a parameter occurs twice in the group.
    """
    exp_avg, second_state, step = state["exp_avg"], state[rule.second_state], state["step"]
    name = f"a parameter of shape {tuple(p.shape)}"
    if reason := explain_unsupported(p):
        return reason
    if not exp_avg.device == second_state.device == p.device:
        return f"fused=True: {name} is on {p.device}, its state on {exp_avg.device}."
    backend = BACKENDS[p.device.type]
    if not (group["fused"] or backend.by_default):
        return f"the kernel for {p.device} is opt-in: pass `fused=True`."
    if reason := backend.unavailable():
        return f"fused=True: {reason}."
    if repeated and backend.asynchronous:
        return "fused=True: a parameter occurs twice in its group, and its two steps would run at the same time."
    if step.device != p.device and (group["capturable"] or not step.is_cpu):
        return f"fused=True: {name} is on {p.device}, but its step count on {step.device}."
    if type(p) not in (Tensor, Parameter) or any(type(t) is not Tensor for t in (exp_avg, second_state, step)):
        return f"fused=True: {name} is a {type(p).__name__}, its state a {type(exp_avg).__name__}, not a plain tensor."
    if exp_avg.dtype != second_state.dtype or (p.dtype, exp_avg.dtype) not in backend.dtype_pairs:
        return f"fused=True: there is no kernel for parameters of {p.dtype} with state of {exp_avg.dtype}."
    if step.dtype not in (torch.float32, torch.float64) or step.numel() != 1:
        return f"fused=True: the step count of {name} is {step!r}, not a scalar of torch.float32 or torch.float64."
    if has_gaps(p) or not (_have_same_layout(p, exp_avg) and _have_same_layout(p, second_state)):
        return f"fused=True: {name} and strides {p.stride()} has gaps in memory, or its state has another layout."
    if any(_is_lazy(t) for t in (p, exp_avg, second_state)):
        return f"fused=True: {name}, or its state, is a view whose values have not been computed yet."
    for kind, t in (("parameter", p), ("state", exp_avg), ("state", second_state), ("step count", step)):
        check_memory(kind, t)
    return None


def explain_unsupported(p: Tensor) -> str | None:
    """Return why there are no kernels at all for a parameter's device or dtype, or None if there are."""
    if p.device.type in BACKENDS and p.is_floating_point():
        return None
    return (
        f"`fused=True` requires all the params to be floating point Tensors of supported devices: {list(BACKENDS)}, "
        f"but a parameter of shape {tuple(p.shape)} is of {p.dtype} on {p.device}."
    )


def _states_of(params: Sequence[Tensor], state: Mapping[Tensor, State]) -> Iterable[Any]:
    if len(state) == len(params) and all(map(is_, state, params)):  # faster than looking them up
        return state.values()
    return map(state.get, params)


def _is_plain(t: Tensor, like: Tensor) -> bool:
    is_like = type(t) is Tensor and t.device == like.device and t.dtype == like.dtype
    return is_like and t.is_contiguous() and not _is_lazy(t)


def _have_same_layout(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous()))


def _fit(g: Tensor, p: Tensor) -> Tensor:
    """Return a gradient with the dtype and layout of its parameter: the gradient itself, or a copy."""
    if g.layout != torch.strided:
        raise RuntimeError(
            f"fused=True does not support sparse gradients, but a parameter of shape {tuple(p.shape)} has one of "
            f"layout {g.layout}. Make the layer with sparse=False, or give its parameters to torch.optim.SparseAdam."
        )
    if g.shape != p.shape:
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} has a gradient of shape {tuple(g.shape)}; was its data replaced "
            "after the backward pass? Call zero_grad() first."
        )
    plain = type(g) in (Tensor, Parameter) and g.device == p.device and not _is_lazy(g)
    if plain and g.dtype == p.dtype and _have_same_layout(g, p):
        return g
    if type(g) is Tensor and (g.is_cpu or g.is_cuda) and not g._is_zerotensor():
        check_memory("gradient", g)
    return torch.empty_like(p, requires_grad=False).copy_(g)


def _is_lazy(t: Tensor) -> bool:
    """Tell whether a tensor's memory does not hold its values: a negated or conjugated view, or a zero tensor."""
    return t.is_neg() or t.is_conj() or t._is_zerotensor()


def _guard(tensors: Sequence[Tensor]) -> TensorGuards:
    """Return a check of types, dtypes, devices, shapes, strides and lazy views, of many tensors in one call."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


_address: Callable[[Tensor], int] = Tensor.data_ptr
