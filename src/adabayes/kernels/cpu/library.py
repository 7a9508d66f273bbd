"""The library of CPU kernels: plain C, built when the package is installed, called through ctypes."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from adabayes.kernels.coefficients import RULES, Rule

__all__ = [
    "DTYPES",
    "LIBRARY",
    "PAIRS",
    "StepCounter",
    "Tensors",
    "call_kernel",
    "call_matrix_kernel",
    "coefficient_names",
    "instruction_set",
    "num_matrix_buffers",
    "order_coefficients",
    "stream",
    "thread_source",
    "unavailable",
]

ABI_VERSION = 8  # as in fused.c
LIBRARY = Path(__file__).with_name("_fused.dll" if sys.platform == "win32" else "_fused.so")
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
PAIRS = {  # dtypes of parameter and state
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.bfloat16),
}


class Tensors(ctypes.Structure):
    """The struct ``tensors`` of fused.c, which explains its fields."""

    _fields_ = (
        ("num_tensors", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("params", "grads", "exp_avgs", "second_states", "numels", "indices")),
        *((name, ctypes.c_void_p) for name in ("counts", "rows", "coefficients")),
        *((name, ctypes.c_int32) for name in ("param_type", "state_type", "threads", "returns_step", "round_params")),
        ("seed", ctypes.c_int64),
    )


@cache
def load() -> ctypes.CDLL | str:
    """Load the library; return it, or the reason why there is none."""
    if not LIBRARY.exists():
        return (
            "the kernels were not built when adabayes was installed; install a C compiler (gcc or clang) and then "
            "adabayes again: pip install --force-reinstall --no-deps --no-cache-dir adabayes"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY.name} does not load on this machine: {error}"
    if library.adabayes_abi_version() != ABI_VERSION or not all(_has_rule(library, rule) for rule in RULES.values()):
        return f"{LIBRARY.name} was built from another version of adabayes; install adabayes again"
    library.adabayes_instruction_set.restype = ctypes.c_char_p
    library.adabayes_set_team.argtypes = [ctypes.c_void_p]
    library.adabayes_set_team(team_of_torch())
    return library


def team_of_torch() -> int | None:
    """Return GOMP_parallel of the OpenMP runtime that torch has loaded, so that the kernels run on its threads."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def unavailable() -> str | None:
    """Return why the kernels cannot be used, or None if they can."""
    library = load()
    return library if isinstance(library, str) else None


def thread_source() -> str:
    """Return whose threads the kernels use."""
    return "torch's OpenMP" if team_of_torch() else "their own, started at each step"


def instruction_set() -> str:
    """Return the instructions that the kernels use on this machine."""
    name: bytes = _require_library().adabayes_instruction_set()
    return name.decode()


def call_kernel(rule: str, tensors: Tensors) -> None:
    """Call the kernel of a rule. Every address must point to ``numels`` elements of its type."""
    if getattr(_require_library(), f"{rule}_step")(ctypes.byref(tensors)):
        raise AssertionError(f"{rule} has no kernel for types {tensors.param_type} and {tensors.state_type}")


def call_matrix_kernel(matrices: ctypes.Structure) -> None:
    """Call the kernel of AdaBayes-K, with the struct ``matrices`` of matrix.h."""
    if _require_library().adabayes_k_step(ctypes.byref(matrices)):
        raise AssertionError("AdaBayes-K has no kernel for these types and sizes")


@cache
def num_matrix_buffers() -> int:
    """Return how many matrices of scratch memory a thread needs in the kernel of AdaBayes-K."""
    return int(_require_library().adabayes_k_buffers())


def order_coefficients(rule: str, coefficients: Mapping[str, float]) -> list[float]:
    """Return the coefficients of a rule in the order in which its kernel reads them."""
    return [coefficients[name] for name in coefficient_names(rule)]


@cache
def coefficient_names(rule: str) -> list[str]:
    """Return the names of a rule's coefficients, in the order in which its kernel reads them."""
    return _names(_require_library(), rule)


def _names(library: ctypes.CDLL, rule: str) -> list[str]:
    function = getattr(library, f"{rule}_coefficient_names")
    function.restype = ctypes.c_char_p
    names: bytes = function()
    return names.decode().split()


def _has_rule(library: ctypes.CDLL, rule: Rule) -> bool:
    """Tell whether the library has a kernel for a rule, with the same coefficients."""
    exists = hasattr(library, f"{rule.name}_coefficient_names")
    return exists and set(_names(library, rule.name)) == {*rule.coefficients, *rule.options}


class StepCounter:
    """Counts the steps of many tensors, whose step counts are tensors on the CPU.

    Args:
        steps: step counts of one dtype, which stay at their addresses.
    """

    def __init__(self, steps: Sequence[Tensor]) -> None:
        self._type = DTYPES[steps[0].dtype]
        self._steps = array("q", map(Tensor.data_ptr, steps))

    def count(self) -> array[float]:
        """Add 1 to each step count; return the new counts."""
        counts = array("d", bytes(8 * len(self._steps)))
        addresses = (ctypes.c_void_p(column.buffer_info()[0]) for column in (self._steps, counts))
        _require_library().adabayes_count_steps(ctypes.c_int64(len(counts)), self._type, *addresses)
        return counts


def stream(*arrays: Tensor) -> None:
    """Add the second of four fp32 arrays to the others, which takes as long as a step at the speed of memory."""
    names = ("params", "grads", "exp_avgs", "second_states")
    columns = {name: array("q", [x.data_ptr()]) for name, x in zip(names, arrays)}
    columns |= dict.fromkeys(("indices", "counts", "rows", "coefficients"), array("q", [0]))
    columns["numels"] = array("q", [arrays[0].numel()])
    pointers = {name: column.buffer_info()[0] for name, column in columns.items()}
    call_kernel("adabayes_stream", Tensors(num_tensors=1, threads=torch.get_num_threads(), **pointers))


def _require_library() -> ctypes.CDLL:
    library = load()
    assert not isinstance(library, str)
    return library
