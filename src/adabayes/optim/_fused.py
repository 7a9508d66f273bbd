"""Fused steps: which optimizers and tensors a kernel serves, and the addresses that it works on.

To check all that a kernel relies on, tensor by tensor, would take longer than the kernel itself on small tensors. So
a plan is made once and kept while it holds: the same parameters at the same addresses, with the same layout.
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

from adabayes.kernels import library
from adabayes.optim._state import Group, own_state
from adabayes.optim._tensors import as_float, check_memory, has_gaps, local

if TYPE_CHECKING:
    from adabayes.optim._engine import EngineOptimizer

__all__ = ["FusedSteps", "Kernel"]


class Kernel(NamedTuple):
    """A kernel of the library, for an optimizer whose state is ``exp_avg`` and one more entry."""

    function: str
    second_state: str
    numbers: Callable[[Any], dict[str, float]]  # those beyond the common ones, from the optimizer's
    serves: Callable[[Group], bool] = lambda group: True  # whether it can take a group's steps

    def fill(self, c: Any, *, unscale: float, shrink: float, rate: float) -> Any:
        """Return the structure of numbers that the kernel takes."""
        beta2 = getattr(c, "beta2", 0.0)
        common = {"unscale": unscale, "beta1": c.beta1, "beta2": beta2, "shrink": shrink, "rate": rate}
        return library.NUMBERS[self.function](**common, **self.numbers(c))

    def direction(
        self,
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        second_states: Sequence[Tensor],
        c: Any,
        t: float,
        cautious: Sequence[int] = (),
    ) -> list[Tensor] | None:
        """Update the state of tensors of one dtype and return their steps; None if it cannot serve them.

        With ``cautious``, which says how many blocks each tensor has, the step of a block keeps what agrees with its
        gradient, as by :meth:`~adabayes.optim._batch.Step.cautious`.
        """
        like, states = exp_avgs[0], (*exp_avgs, *second_states)
        if library.unavailable() or (like.dtype, like.dtype) not in library.PAIRS or not all(map(_is_plain, states)):
            return None
        for state in states:
            check_memory("state", state)
        moves = list(map(torch.empty_like, exp_avgs))  # where weights at 0 go
        grads = [_fitting(g, move) for g, move in zip(grads, moves)]
        steps = array("d", [t - 1]) * len(grads)
        first = steps.buffer_info()[0]
        numels = array("q", map(Tensor.numel, grads))
        arrays = {
            "params": array("q", map(_address, moves)),
            "grads": array("q", map(_address, grads)),
            "exp_avgs": array("q", map(_address, exp_avgs)),
            "second_states": array("q", map(_address, second_states)),
            "steps": array("q", range(first, first + 8 * len(steps), 8)),
            "numels": numels,
            "indices": array("q", [0]) * len(grads),
        }
        kind = library.DTYPES[like.dtype]
        types = {"param_type": kind, "state_type": kind, "step_type": library.DTYPES[torch.float64]}
        _call(self.function, arrays, self.fill(c, unscale=1.0, shrink=0.0, rate=-as_float(c.rate)), **types)
        if cautious:
            blocks = {"params": array("q"), "grads": array("q"), "numels": array("q")}
            for move, grad, numel, count in zip(arrays["params"], arrays["grads"], numels, cautious):
                size = numel // count * like.element_size() or 1  # of a tensor without elements, there is nothing to do
                blocks["params"].extend(range(move, move + count * size, size))
                blocks["grads"].extend(range(grad, grad + count * size, size))
                blocks["numels"].extend([numel // count] * count)
            _call("adabayes_cautious", blocks, library.NUMBERS["adabayes_cautious"](), **types)
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
        """Note that no other code has."""
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
        for other in ("foreach", "capturable"):
            if group[other]:
                raise RuntimeError(f"`fused` and `{other}` cannot be `True` together. Leave one of them out.")
        if reason := library.unavailable():
            raise RuntimeError(f"fused=True: {reason}. Or leave `fused` out: then foreach is taken.")

    def step(self, optimizer: EngineOptimizer, group: Group) -> bool:
        """Take a step with a kernel, if there is one for all tensors of the group; return whether it was taken."""
        if self._kernel is None or torch.compiler.is_compiling() or library.unavailable():
            return False
        wanted = group["fused"]
        if not wanted and (wanted is False or group["foreach"] is not None):
            return False
        if group["differentiable"] or group["capturable"] or not self._kernel.serves(group):
            return False
        c = optimizer.numbers(group, as_float(group["lr"]))
        if c is None:
            return False
        params, grads = group["params"], [p.grad for p in group["params"]]
        if any(map(is_, grads, repeat(None))):
            params = [p for p, grad in zip(params, grads) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if not params:
            return True
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
        if found_inf is not None and found_inf.item():
            return True
        scale = getattr(optimizer, "grad_scale", None)
        weight_decay, rate = group["weight_decay"], as_float(c.rate)
        numbers = self._kernel.fill(
            c,
            unscale=1.0 if scale is None else 1.0 / as_float(scale),
            shrink=1 - as_float(group["lr"]) * weight_decay if weight_decay else 1.0,
            rate=-rate if group["maximize"] else rate,
        )
        plan.run(self._kernel.function, grads, numbers, group["seed"], group["stochastic_rounding"])
        return True

    def _look(self, optimizer: EngineOptimizer) -> None:
        """See whether other code has let go of the state: after 1, 2, 4, 8, ... steps, for to look costs a check."""
        self._looks += 1
        if self._looks & (self._looks - 1) == 0 and len(self._plans) == len(optimizer.param_groups):
            outer = sys.getrefcount(optimizer.__dict__["state"]) <= 2  # in its place, and as an argument
            self._lent = not (outer and all(plan.is_ours_alone() for plan in self._plans.values()))

    @_disable_dynamo  # beyond its limit, the compiler tries what a step calls
    def _new_plan(self, optimizer: EngineOptimizer, group: Group, params: list[Tensor]) -> _Plan | None:
        assert self._kernel is not None
        indices = optimizer.indices(group, params)
        optimizer._init_group(group, [], [], [])  # makes the state that is not there yet, refuses sparse gradients
        states = [own_state(optimizer)[p] for p in params]
        if hasattr(params[0], "to_local"):  # DTensor: each process steps its own shard, planned for anew each time
            states = [{name: local(entry) for name, entry in state.items()} for state in states]
            params = [local(p) for p in params]
        names = ("exp_avg", self._kernel.second_state, "step")
        for p, state in zip(params, states):
            if reason := _unfit(p, *(state[name] for name in names)):
                if group["fused"]:
                    raise RuntimeError(f"{reason} Leave `fused` out, and foreach is taken.")
                return None
        return _Plan(params, states, names, indices)


class _Part(NamedTuple):
    """Tensors of a plan for which there is one kernel: what is handed to C, and which of the plan's they are."""

    places: list[int]
    types: dict[str, int]
    arrays: dict[str, array[int]]


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
        columns = {
            "params": self._addresses,
            "exp_avgs": self._entry_addresses[0::3],
            "second_states": self._entry_addresses[1::3],
            "steps": self._entry_addresses[2::3],
            "numels": list(map(Tensor.numel, params)),
            "indices": indices,
        }
        kinds: dict[tuple[torch.dtype, ...], list[int]] = {}
        for place, (p, m, step) in enumerate(zip(params, self._entries[0::3], self._entries[2::3])):
            kinds.setdefault((p.dtype, m.dtype, step.dtype), []).append(place)
        self._parts = [
            _Part(
                places,
                dict(zip(("param_type", "state_type", "step_type"), map(library.DTYPES.__getitem__, kind))),
                {name: array("q", [column[place] for place in places]) for name, column in columns.items()},
            )
            for kind, places in kinds.items()
        ]

    def holds(self, params: Sequence[Tensor], state: Mapping[Tensor, dict[str, Tensor]] | None) -> bool:
        """Tell whether the plan is for these parameters, and they are where they were; so for their state, if given."""
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

        Then nobody else can move or replace it. Each count includes the argument of the function that counts.
        """
        return (
            max(map(sys.getrefcount, self._states)) <= 3  # in the optimizer's state, in this plan
            and max(map(sys.getrefcount, self._entries)) <= 3  # in that dict, in this plan
            and max(map(_users, self._entry_memory)) <= 2  # a tensor, this plan
        )

    def fitting(self, grads: list[Tensor]) -> list[Tensor]:
        """Return gradients of the type and layout of their parameters; copies of those that are not."""
        if self._gradient_guard is not None and self._gradient_guard.check(*grads):
            return grads
        fitting = [_fitting(local(g), p) for g, p in zip(grads, self._params)]
        if all(map(is_, fitting, grads)):
            self._gradient_guard = _guard(grads)
        return fitting

    def run(self, function: str, grads: list[Tensor], numbers: Any, seed: int, round_params: bool) -> None:
        """Take a step. The plan must hold, and the gradients must fit."""
        addresses = list(map(_address, grads))
        if 0 in addresses:
            for g, address in zip(grads, addresses):
                if not address:
                    check_memory("gradient", g)
        for places, types, arrays in self._parts:
            chosen = addresses if len(self._parts) == 1 else itemgetter(*places, places[0])(addresses)[:-1]
            arrays["grads"] = array("q", chosen)
            _call(function, arrays, numbers, **types, round_params=round_params, seed=seed)
        torch.autograd.graph.increment_version(self._params)  # as after any other change in place


def _call(function: str, arrays: Mapping[str, array[int]], numbers: Any, **options: int) -> None:
    pointers = {name: column.buffer_info()[0] for name, column in arrays.items()}
    count, threads = len(arrays["params"]), torch.get_num_threads()
    library.call(function, library.Tensors(count=count, threads=threads, **options, **pointers), numbers)


def _is_plain(t: Tensor) -> bool:
    return type(t) is Tensor and t.is_cpu and t.is_contiguous() and not _is_lazy(t)


def _unfit(p: Tensor, exp_avg: Tensor, second_state: Tensor, step: Tensor) -> str | None:
    """Return why no kernel can serve a parameter and its state, or None if one can."""
    what = f"a parameter of shape {tuple(p.shape)}"
    if not (p.is_cpu and exp_avg.is_cpu and second_state.is_cpu and step.is_cpu) or not p.is_floating_point():
        return (
            "`fused=True` requires all the params to be floating point Tensors of supported devices: ['cpu'], but "
            f"{what} is of {p.dtype} on {p.device}, its state on {exp_avg.device}."
        )
    if type(p) not in (Tensor, Parameter) or any(type(t) is not Tensor for t in (exp_avg, second_state, step)):
        return f"fused=True: {what} is a {type(p).__name__}, its state a {type(exp_avg).__name__}, not a plain tensor."
    if exp_avg.dtype != second_state.dtype or (p.dtype, exp_avg.dtype) not in library.PAIRS:
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
    """Return a gradient of the type and layout of its parameter: itself, or a copy."""
    if g.shape != p.shape:
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} has a gradient of shape {tuple(g.shape)}; was its data replaced "
            "after the backward pass? Call zero_grad() first."
        )
    plain = type(g) in (Tensor, Parameter) and g.is_cpu and not _is_lazy(g)
    if plain and g.dtype == p.dtype and _laid_out_alike(g, p):
        return g
    if type(g) is Tensor and g.is_cpu and not g._is_zerotensor():
        check_memory("gradient", g)
    return torch.empty_like(p, requires_grad=False).copy_(g)


def _is_lazy(t: Tensor) -> bool:
    """Tell whether the memory of a tensor does not hold its numbers: only their negatives, or nothing, for zeros."""
    return t.is_neg() or t.is_conj() or t._is_zerotensor()


def _guard(tensors: Sequence[Tensor]) -> TensorGuards:
    """Return a check of types, dtypes, devices, shapes, strides and lazy views, of many tensors in one call."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _users(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


_address: Callable[[Tensor], int] = Tensor.data_ptr
