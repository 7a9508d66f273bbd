"""The fused CPU kernels: plain C in a shared library, called through ctypes.

The library is built when the package is installed, if there is a C compiler. Without it everything else works.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter, is_, itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

ABI_VERSION = 1  # as in fused.c
LIBRARY = Path(__file__).with_name("_fused.dll" if sys.platform == "win32" else "_fused.so")
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
PAIRS = {  # of parameter and state
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.bfloat16),
}


class _Tensors(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("params", ctypes.c_void_p),
        ("grads", ctypes.c_void_p),
        ("exp_avgs", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("numels", ctypes.c_void_p),
        ("asleep", ctypes.c_void_p),
        ("ordinals", ctypes.c_void_p),
        ("param_type", ctypes.c_int32),
        ("state_type", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("round_params", ctypes.c_int32),
        ("seed", ctypes.c_int64),
    )


class AdaBayesCoefficients(ctypes.Structure):
    """The numbers of a step of AdaBayes; see fused.c."""

    _fields_ = tuple(
        (name, ctypes.c_double)
        for name in ("unscale", "beta1", "beta2", "shrink", "scale", "loss", "noise", "information", "half", "slope")
    )


class AdaBayesFPCoefficients(ctypes.Structure):
    """The numbers of a step of AdaBayes-FP; see fused.c."""

    _fields_ = tuple((name, ctypes.c_double) for name in ("unscale", "beta1", "beta2", "shrink", "lr", "eps"))


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    if not LIBRARY.exists():
        return (
            "the kernels were not built when adabayes was installed; install a C compiler (gcc or clang) and then "
            "adabayes again: pip install --force-reinstall --no-deps --no-cache-dir adabayes"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY.name} does not load on this machine: {error}"
    if library.adabayes_abi_version() != ABI_VERSION:
        return f"{LIBRARY.name} was built from another version of adabayes; install adabayes again"
    library.adabayes_instruction_set.restype = ctypes.c_char_p
    library.adabayes_set_team.argtypes = [ctypes.c_void_p]
    library.adabayes_set_team(_team_of_torch())
    for step in (library.adabayes_step, library.adabayes_fp_step, library.adabayes_stream):
        step.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


def _team_of_torch() -> int | None:
    """GOMP_parallel of the OpenMP runtime that torch has loaded, so that its threads are ours."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def unavailable() -> str | None:
    """Why there are no kernels, or None if there are."""
    library = _load()
    return library if isinstance(library, str) else None


def thread_source() -> str:
    """Whose threads the kernels run on."""
    return "torch's OpenMP" if _team_of_torch() else "the kernels themselves, for the time of a step"


def instruction_set() -> str:
    library = _load()
    assert not isinstance(library, str)
    name: bytes = library.adabayes_instruction_set()
    return name.decode()


class Plan:
    """The tensors of a group and their addresses, which hold as long as :meth:`holds` says so.

    To check all that a kernel relies on would take longer than the kernel itself on small tensors. But the plan keeps
    the memory of parameters and state alive. So a parameter that is the same object at the same address is still in
    that memory, and no kernel leaves it while the gradients, which are new every time, have the size that the plan
    has. And state can only be moved or replaced by someone who has had it in hands.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        names: tuple[str, str],
        ordinals: Sequence[int],
        may_sleep: bool,
    ) -> None:
        self.params = params
        self.exp_avgs, self.seconds, self.steps = ([state[name] for state in states] for name in (*names, "step"))
        self.dtypes = (params[0].dtype, self.seconds[0].dtype)
        # AdaBayes only: where weights may have had no gradient yet, and in which tensors that is anywhere at all.
        self.asleep: list[Any] = [True] * len(params)
        self.drowsy = list(range(len(params))) if may_sleep else []
        self._states = states
        self._entries = tuple(zip(map(itemgetter, (*names, "step")), (self.exp_avgs, self.seconds, self.steps)))
        large = (params, self.exp_avgs, self.seconds)
        self._addresses = [list(map(_address, tensors)) for tensors in large]
        self._memory = [t.untyped_storage() for tensors in (*large, self.steps) for t in tensors]
        self._contiguous = all(map(_contiguous, params))
        self._layouts = list(map(_layout, params))
        self._nbytes = list(map(_nbytes, params))
        self._arrays = (
            *(array("Q", addresses) for addresses in self._addresses),
            array("Q", map(_address, self.steps)),
            array("q", map(_numel, params)),
            array("q", ordinals),
        )

    def holds(self, params: Sequence[Tensor], state: Mapping[Tensor, dict[str, Tensor]] | None, sizes: bool) -> bool:
        """Whether the plan is for these parameters, and they are where they were; so for their state, if it is given.

        Sizes are to be looked at where the plan does not take the gradients, which may then have grown as well.
        """
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and list(map(_address, params)) == self._addresses[0]
            and (list(map(_layout, params)) == self._layouts if sizes else all(map(_contiguous, params)))
            and (state is None or self._holds_state(params, state))
        )

    def _holds_state(self, params: Sequence[Tensor], state: Mapping[Tensor, dict[str, Tensor]]) -> bool:
        """Of step counts it is enough that they are the same objects: nobody moves a single number."""
        return (
            self._same_states(params, state)
            and all(all(map(is_, map(entry, self._states), kept)) for entry, kept in self._entries)
            and list(map(_address, self.exp_avgs)) == self._addresses[1]
            and list(map(_address, self.seconds)) == self._addresses[2]
        )

    def _same_states(self, params: Sequence[Tensor], state: Mapping[Tensor, dict[str, Tensor]]) -> bool:
        if len(state) == len(params) and all(map(is_, state, params)):  # which is faster than to look them up
            return all(map(is_, state.values(), self._states))
        return all(map(is_, map(state.get, params), self._states))

    def step(
        self, function: str, grads: Sequence[Tensor], coefficients: ctypes.Structure, seed: int, round_params: bool
    ) -> None:
        """Take a step. The plan must hold, and take the gradients."""
        library = _load()
        assert not isinstance(library, str)
        at_grads = array("Q", list(map(_address, grads)))
        asleep = array("B", [where is True for where in self.asleep]) if self.drowsy else None
        at_params, at_exp_avgs, at_seconds, at_steps, numels, ordinals = (a.buffer_info()[0] for a in self._arrays)
        tensors = _Tensors(
            count=len(grads),
            params=at_params,
            grads=at_grads.buffer_info()[0],
            exp_avgs=at_exp_avgs,
            states=at_seconds,
            steps=at_steps,
            numels=numels,
            asleep=asleep.buffer_info()[0] if asleep else None,
            ordinals=ordinals,
            param_type=DTYPES[self.dtypes[0]],
            state_type=DTYPES[self.dtypes[1]],
            threads=torch.get_num_threads(),
            round_params=round_params,
            seed=seed,
        )
        if getattr(library, function)(ctypes.byref(tensors), ctypes.byref(coefficients)):
            raise AssertionError(f"{function} has no kernel for {self.dtypes}")
        torch.autograd.graph.increment_version(self.params)  # as after any other change in place

    def takes(self, grads: Sequence[Tensor]) -> bool:
        """Whether the gradients are of the type and layout of their parameters, for what can be seen at a glance."""
        return self._contiguous and all(map(_contiguous, grads)) and list(map(_nbytes, grads)) == self._nbytes

    def laid_out(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients as the plan takes them; copies of those that are not."""
        return [
            g if _layout(g) == layout else torch.empty_like(p).copy_(g)
            for g, p, layout in zip(grads, self.params, self._layouts)
        ]


def stream(*arrays: Tensor) -> None:
    """Add the second of four fp32 arrays to the others: what a step at the speed of memory would take."""
    p, g, m, s = arrays
    plan = Plan([p], [{"m": m, "s": s, "step": torch.zeros(())}], ("m", "s"), [0], may_sleep=False)
    plan.step("adabayes_stream", [g], AdaBayesFPCoefficients(), seed=0, round_params=False)


def unfit(params: Sequence[Tensor], states: Sequence[dict[str, Tensor]], names: tuple[str, str]) -> str | None:
    """Why the kernels cannot serve these tensors, or None if they can."""
    exp_avgs, seconds, steps = ([state[name] for state in states] for name in (*names, "step"))
    if reason := unavailable():
        return reason
    kinds = {(p.dtype, m.dtype, s.dtype) for p, m, s in zip(params, exp_avgs, seconds)}
    if len(kinds) > 1:
        dtypes = sorted({str(dtype) for kind in kinds for dtype in kind})
        return f"the parameters of a group, or their state, are of several dtypes: {', '.join(dtypes)}"
    ((dtype, first, second),) = kinds
    if first != second or (dtype, second) not in PAIRS:
        return f"there is no kernel for parameters of {dtype} with state of {second}"
    for p, m, s, step in zip(params, exp_avgs, seconds, steps):
        if not (p.is_cpu and m.is_cpu and s.is_cpu and step.is_cpu):
            return f"a parameter of shape {tuple(p.shape)}, or its state, is on {p.device}; the kernels run on the CPU"
        if type(p) not in (Tensor, Parameter):
            return f"a parameter of shape {tuple(p.shape)} is a {type(p).__name__}, not a plain tensor"
        if step.dtype != torch.float32:
            return f"the step count of a parameter of shape {tuple(p.shape)} is of {step.dtype}, not of torch.float32"
        if not (p.shape == m.shape == s.shape and _same_dense_layout(p, m, s)):
            return (
                f"a parameter of shape {tuple(p.shape)} and strides {p.stride()} has gaps in memory, or its state is "
                "laid out in another way"
            )
    return None


_address: Callable[[Tensor], int] = Tensor.data_ptr
_numel: Callable[[Tensor], int] = Tensor.numel
_contiguous: Callable[[Tensor], bool] = Tensor.is_contiguous
_nbytes: Callable[[Tensor], int] = attrgetter("nbytes")


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.shape, t.stride()


def _same_dense_layout(p: Tensor, *others: Tensor) -> bool:
    """Whether the tensors fill their memory without gaps, in the same order."""
    if p.is_contiguous():
        return all(t.is_contiguous() for t in others)
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(p.stride(), p.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return all(t.stride() == p.stride() for t in others)
