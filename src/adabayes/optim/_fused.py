"""Fused steps: which optimizers and tensors a kernel serves, on which device, and the addresses that it works on.

Checking all that a kernel relies on, tensor by tensor, would take longer than the kernel itself on small tensors. So
a plan is made once and kept while it is valid: the same parameters at the same addresses, with the same layout.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from adabayes.kernels import device, library
from adabayes.optim._state import Group, own_state
from adabayes.optim._tensors import Scalar, as_float, check_memory, has_gaps, local

if TYPE_CHECKING:
    from adabayes.optim._engine import EngineOptimizer

__all__ = ["BACKENDS", "FusedSteps", "Kernel"]


class Kernel(NamedTuple):
    """A kernel, for an optimizer whose state is ``exp_avg`` and one more entry."""

    function: str
    second_state: str
    numbers: Callable[[Any], dict[str, Scalar]]  # those beyond the common ones, from the optimizer's

    def fill(self, c: Any, *, unscale: Scalar, shrink: Scalar, rate: Scalar) -> dict[str, Scalar]:
        """Return the numbers that the kernel takes."""
        beta2 = getattr(c, "beta2", 0.0)
        common = {"unscale": unscale, "beta1": c.beta1, "beta2": beta2, "shrink": shrink, "rate": rate}
        return common | self.numbers(c)

    def direction(
        self, grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], second_states: Sequence[Tensor], c: Any, t: float
    ) -> list[Tensor] | None:
        """Update the state of tensors of one dtype and return their steps; None if it cannot serve them."""
        like, states = exp_avgs[0], (*exp_avgs, *second_states)
        backend = BACKENDS.get(like.device.type)
        if backend is None or not (backend.by_default or c.fused):
            return None
        if reason := backend.unavailable():
            if c.fused:
                raise RuntimeError(f"fused=True: {reason}. Or leave `fused` out: then foreach is taken.")
            return None
        if (like.dtype, like.dtype) not in backend.pairs or not all(_is_plain(state, like.device) for state in states):
            return None
        for state in states:
            check_memory("state", state)
        moves = list(map(torch.empty_like, exp_avgs))  # where weights at 0 go
        grads = [_fitting(g, move) for g, move in zip(grads, moves)]
        launch = backend.launch(moves, exp_avgs, second_states, None, [0] * len(grads))
        launch.run(self.function, list(map(_address, grads)), self.fill(c, unscale=1.0, shrink=0.0, rate=-c.rate), t=t)
        return moves


class FusedSteps:
    """The fused steps of one optimizer, if it has a kernel."""

    def __init__(self, kernel: Kernel | None) -> None:
        self._kernel = kernel
        self._plans: dict[int, _Plan] = {}  # by group
        self.lend()

    def __bool__(self) -> bool:
        """Tell whether the last steps were fused."""
        return bool(self._plans)

    def lend(self) -> None:
        """Note that other code has references to the state, and so may change it at any time."""
        self._lent = True
        self._looks = 0

    def take_back(self) -> None:
        """Note that no other code has references to the state."""
        self._lent = False

    def forget(self) -> None:
        """Make new plans, because state was replaced."""
        self._plans.clear()

    def check(self, group: Group) -> None:
        """Raise if a group demands a kernel together with what no kernel can do."""
        if not group.get("fused"):
            return
        if group["differentiable"]:
            raise RuntimeError(
                "`fused` does not support `differentiable`: autograd cannot follow a kernel. Leave `fused` out, and "
                "the single-tensor form is taken."
            )
        if group["foreach"]:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together. Leave one of them out.")
        if (reason := library.unavailable()) and not torch.cuda.is_available():
            raise RuntimeError(f"fused=True: {reason}. Or leave `fused` out: then foreach is taken.")

    def step(self, optimizer: EngineOptimizer, group: Group) -> bool:
        """Take a step with a kernel, if there is one for all tensors of the group; return whether it was taken."""
        if self._kernel is None or torch.compiler.is_compiling():
            return False
        wanted = group["fused"]
        if not wanted and (wanted is False or group["foreach"] is not None):
            return False
        if group["differentiable"]:
            return False
        params, grads = group["params"], [p.grad for p in group["params"]]
        if any(map(is_, grads, repeat(None))):
            params = [p for p, grad in zip(params, grads) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if not params:
            return True
        backend = BACKENDS.get(params[0].device.type)
        if not wanted and (backend is None or not backend.by_default or backend.unavailable()):
            return False
        if group["capturable"] and not (wanted and backend is not None and backend.asynchronous):
            return False
        lr = _kept(group["lr"], params[0].device)
        c = optimizer.numbers(group, lr)
        if c is None:
            return False
        plan = self._plans.get(id(group))
        if plan is None or not plan.holds(params, own_state(optimizer) if self._lent else None):
            self._plans.pop(id(group), None)
            plan = self._new_plan(optimizer, group, params)
            if plan is None:
                return False
            self._plans[id(group)] = plan
        elif self._lent:
            self._look(optimizer)
        grads = plan.fitting(grads)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and not (backend and backend.asynchronous) and found_inf.item():
            return True
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            scale = _kept(scale, params[0].device)
        weight_decay = group["weight_decay"]
        numbers = self._kernel.fill(
            c,
            unscale=1.0 if scale is None else 1.0 / scale,
            shrink=1 - lr * weight_decay if weight_decay else 1.0,
            rate=-c.rate if group["maximize"] else c.rate,
        )
        plan.run(self._kernel.function, grads, numbers, found_inf, group["seed"], group["stochastic_rounding"])
        return True

    def _look(self, optimizer: EngineOptimizer) -> None:
        """See whether other code has released the state: after 1, 2, 4, 8, ... steps, because looking costs a check."""
        self._looks += 1
        if self._looks & (self._looks - 1) == 0 and len(self._plans) == len(optimizer.param_groups):
            outer = sys.getrefcount(optimizer.__dict__["state"]) <= 2  # in its place, and as an argument
            self._lent = not (outer and all(plan.is_ours_alone() for plan in self._plans.values()))

    @_disable_dynamo  # beyond its limit, the compiler tries what a step calls
    def _new_plan(self, optimizer: EngineOptimizer, group: Group, params: list[Tensor]) -> _Plan | None:
        assert self._kernel is not None
        indices = optimizer.indices(params)
        optimizer._init_group(group, [], [], [])  # makes the state that is not there yet, refuses sparse gradients
        states = [own_state(optimizer)[p] for p in params]
        if hasattr(params[0], "to_local"):  # DTensor: each process steps its own shard, planned for anew each time
            states = [{name: local(entry) for name, entry in state.items()} for state in states]
            params = [local(p) for p in params]
        names = ("exp_avg", self._kernel.second_state, "step")
        twice = len(set(map(id, params))) < len(params)
        for p, state in zip(params, states):
            exp_avg, second_state, step = (state[name] for name in names)
            if reason := _unfit(p, exp_avg, second_state, step, group, twice):
                if group["fused"]:
                    raise RuntimeError(f"{reason} Leave `fused` out, and foreach is taken.")
                return None
        return _Plan(params, states, names, indices)


class _LaunchOnCPU:
    """Tensors of one kind, for the CPU library, as :class:`adabayes.kernels.device.Launch` is for a GPU."""

    counts_on_host = False  # the kernel itself counts

    def __init__(
        self,
        params: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        second_states: Sequence[Tensor],
        steps: Sequence[Tensor] | None,
        indices: Sequence[int],
    ) -> None:
        self._steps = params[0].new_zeros(len(params), dtype=torch.float64)  # if there are no others
        steps = list(self._steps) if steps is None else steps
        kinds = params[0].dtype, exp_avgs[0].dtype, steps[0].dtype
        self._types = dict(zip(("param_type", "state_type", "step_type"), map(library.DTYPES.__getitem__, kinds)))
        columns: dict[str, Iterable[int]] = {
            "params": map(_address, params),
            "exp_avgs": map(_address, exp_avgs),
            "second_states": map(_address, second_states),
            "steps": map(_address, steps),
            "numels": map(Tensor.numel, params),
            "indices": indices,
        }
        self._arrays = {name: array("q", column) for name, column in columns.items()}

    def run(
        self,
        function: str,
        grads: Sequence[int],
        numbers: Mapping[str, Scalar],
        *,
        steps: Sequence[Tensor] | None = None,
        t: float | None = None,
        found_inf: Tensor | None = None,
        seed: int = 0,
        round_params: bool = False,
    ) -> None:
        if found_inf is not None and found_inf.item():
            return
        if t is not None:
            self._steps.fill_(t - 1)
        arrays = {**self._arrays, "grads": array("q", grads)}
        pointers = {name: column.buffer_info()[0] for name, column in arrays.items()}
        options: dict[str, int] = {"seed": seed, "round_params": round_params, **self._types, **pointers}
        tensors = library.Tensors(count=len(grads), threads=torch.get_num_threads(), **options)
        library.call(function, tensors, library.NUMBERS[function](**{k: as_float(x) for k, x in numbers.items()}))


class Backend(NamedTuple):
    """The kernels of one type of device."""

    unavailable: Callable[[], str | None]
    pairs: set[tuple[torch.dtype, torch.dtype]]  # of parameter and state
    launch: type[_LaunchOnCPU | device.Launch]
    by_default: bool  # whether fused=None uses them
    asynchronous: bool  # whether they run asynchronously, so that nothing should wait, and graphs can capture them


BACKENDS = {
    "cpu": Backend(library.unavailable, library.PAIRS, _LaunchOnCPU, by_default=True, asynchronous=False),
    "cuda": Backend(device.unavailable, device.PAIRS, device.Launch, by_default=device.BY_DEFAULT, asynchronous=True),
}


class _Part(NamedTuple):
    """Tensors of a plan for which there is one kernel, and their places in the plan."""

    places: list[int]
    launch: _LaunchOnCPU | device.Launch


class _Plan:
    """The tensors of a group and their addresses.

    It keeps the memory of parameters and state alive. So a parameter that is the same object, with the same layout at
    the same address, is still in that memory; and state can only have been moved or replaced by code that has access.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        names: tuple[str, str, str],
        indices: Sequence[int],
    ) -> None:
        self._params = list(params)
        self._guard = _guard(params)
        self._gradient_guard: TensorGuards | None = None  # once there were gradients that could be taken as they are
        self._addresses = list(map(_address, params))
        self._states = states
        self._names = itemgetter(*names)
        self._entries = self._entries_now()
        self._entry_addresses = list(map(_address, self._entries))
        self._memory = [t.untyped_storage() for t in params]
        self._entry_memory = [t.untyped_storage() for t in self._entries]
        kinds: dict[tuple[Any, ...], list[int]] = {}
        columns = (self._params, *(self._entries[i::3] for i in range(3)), indices)
        for place, (p, m, _, step, _) in enumerate(zip(*columns)):
            kinds.setdefault((p.device, p.dtype, m.dtype, step.device, step.dtype), []).append(place)
        self._parts = []
        for places in kinds.values():
            backend = BACKENDS[params[places[0]].device.type]
            chosen: list[Any] = [[column[place] for place in places] for column in columns]
            launch = backend.launch(*chosen)
            self._parts.append(_Part(places, launch))

    def holds(self, params: Sequence[Tensor], state: Mapping[Tensor, dict[str, Tensor]] | None) -> bool:
        """Tell whether the plan is for these parameters, and they have not moved; so for their state, if given."""
        return (
            len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and list(map(_address, params)) == self._addresses
            and self._guard.check(*params)
            and (state is None or self._holds_state(params, state))
        )

    def _holds_state(self, params: Sequence[Tensor], state: Mapping[Tensor, dict[str, Tensor]]) -> bool:
        if len(state) == len(params) and all(map(is_, state, params)):  # which is faster than to look them up
            states: Iterable[Any] = state.values()
        else:
            states = map(state.get, params)
        return (
            all(map(is_, states, self._states))
            and all(map(is_, self._entries_now(), self._entries))
            and list(map(_address, self._entries)) == self._entry_addresses
        )

    def _entries_now(self) -> list[Tensor]:
        return list(chain.from_iterable(map(self._names, self._states)))

    def is_ours_alone(self) -> bool:
        """Tell whether only the optimizer and this plan have references to the state, directly or by a view.

        Then no other code can move or replace it. Each count includes the argument of the function that counts.
        """
        return (
            max(map(sys.getrefcount, self._states)) <= 3  # in the optimizer's state, in this plan
            and max(map(sys.getrefcount, self._entries)) <= 3  # in that dict, in this plan
            and max(map(_users, self._entry_memory)) <= 2  # a tensor, this plan
        )

    def fitting(self, grads: list[Tensor]) -> list[Tensor]:
        """Return gradients with the type and layout of their parameters; copies where they differ."""
        if self._gradient_guard is not None and self._gradient_guard.check(*grads):
            return grads
        fitting = [_fitting(local(g), p) for g, p in zip(grads, self._params)]
        if all(map(is_, fitting, grads)):
            self._gradient_guard = _guard(grads)
        return fitting

    def run(
        self,
        function: str,
        grads: list[Tensor],
        numbers: Mapping[str, Scalar],
        found_inf: Tensor | None,
        seed: int,
        round_params: bool,
    ) -> None:
        """Take a step. The plan must be valid, and the gradients must fit."""
        addresses = list(map(_address, grads))
        if 0 in addresses:
            for g, address in zip(grads, addresses):
                if not address:
                    check_memory("gradient", g)
        for places, launch in self._parts:
            chosen = addresses if len(self._parts) == 1 else [addresses[place] for place in places]
            steps = [self._entries[3 * place + 2] for place in places] if launch.counts_on_host else None
            launch.run(
                function, chosen, numbers, steps=steps, found_inf=found_inf, seed=seed, round_params=round_params
            )
        torch.autograd.graph.increment_version(self._params)  # as after any other change in place


def _kept(value: Scalar, where: torch.device) -> Scalar:
    """Return a setting as a number; one on a GPU as a 0-dim tensor of float64, not to wait for it."""
    if not isinstance(value, Tensor):
        return value
    if value.is_cpu or where.type == "cpu":
        return as_float(value)
    return value.squeeze().to(where, torch.float64, non_blocking=True)


def _is_plain(t: Tensor, where: torch.device) -> bool:
    return type(t) is Tensor and t.device == where and t.is_contiguous() and not _is_lazy(t)


def _unfit(p: Tensor, exp_avg: Tensor, second_state: Tensor, step: Tensor, group: Group, twice: bool) -> str | None:
    """Return why no kernel can serve a parameter and its state, or None if one can."""
    what = f"a parameter of shape {tuple(p.shape)}"
    backend = BACKENDS.get(p.device.type)
    if backend is None or not exp_avg.device == second_state.device == p.device or not p.is_floating_point():
        return (
            "`fused=True` requires all the params to be floating point Tensors of supported devices: "
            f"{list(BACKENDS)}, but {what} is of {p.dtype} on {p.device}, its state on {exp_avg.device}."
        )
    if not (group["fused"] or backend.by_default):
        return f"the kernel for {p.device} is not taken unasked."
    if reason := backend.unavailable():
        return f"fused=True: {reason}."
    if twice and backend.asynchronous:
        return "fused=True: a parameter is twice in its group, and both of its steps would be taken at once."
    if step.device != p.device and (group["capturable"] or not step.is_cpu):
        return f"fused=True: {what} is on {p.device}, but its step count on {step.device}."
    if type(p) not in (Tensor, Parameter) or any(type(t) is not Tensor for t in (exp_avg, second_state, step)):
        return f"fused=True: {what} is a {type(p).__name__}, its state a {type(exp_avg).__name__}, not a plain tensor."
    if exp_avg.dtype != second_state.dtype or (p.dtype, exp_avg.dtype) not in backend.pairs:
        return f"fused=True: there is no kernel for parameters of {p.dtype} with state of {exp_avg.dtype}."
    if step.dtype not in (torch.float32, torch.float64) or step.numel() != 1:
        return f"fused=True: the step count of {what} is {step!r}, not a number of torch.float32 or torch.float64."
    if has_gaps(p) or not (_laid_out_alike(p, exp_avg) and _laid_out_alike(p, second_state)):
        return (
            f"fused=True: {what} and strides {p.stride()} has gaps in memory, or its state is laid out in another way."
        )
    if any(_is_lazy(t) for t in (p, exp_avg, second_state)):
        return f"fused=True: {what}, or its state, is a view whose numbers are still to be computed."
    for name, t in (("parameter", p), ("state", exp_avg), ("state", second_state), ("step count", step)):
        check_memory(name, t)
    return None


def _laid_out_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous()))


def _fitting(g: Tensor, p: Tensor) -> Tensor:
    """Return a gradient with the type and layout of its parameter: itself, or a copy."""
    if g.shape != p.shape:
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} has a gradient of shape {tuple(g.shape)}; was its data replaced "
            "after the backward pass? Call zero_grad() first."
        )
    plain = type(g) in (Tensor, Parameter) and g.device == p.device and not _is_lazy(g)
    if plain and g.dtype == p.dtype and _laid_out_alike(g, p):
        return g
    if type(g) is Tensor and (g.is_cpu or g.is_cuda) and not g._is_zerotensor():
        check_memory("gradient", g)
    return torch.empty_like(p, requires_grad=False).copy_(g)


def _is_lazy(t: Tensor) -> bool:
    """Tell whether the memory of a tensor does not hold its numbers, but their negatives, or nothing for zeros."""
    return t.is_neg() or t.is_conj() or t._is_zerotensor()


def _guard(tensors: Sequence[Tensor]) -> TensorGuards:
    """Return a check of types, dtypes, devices, shapes, strides and lazy views, of many tensors in one call."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _users(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


_address: Callable[[Tensor], int] = Tensor.data_ptr
