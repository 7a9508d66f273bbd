"""The library of fused CPU kernels: plain C, built when the package is installed, called through ctypes."""

from __future__ import annotations

import ctypes
import sys
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "LIBRARY", "PAIRS", "call", "instruction_set", "stream", "thread_source", "unavailable"]

ABI_VERSION = 6  # as in fused.c
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


def _structure(name: str, fields: dict[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


# As in fused.c
ARRAYS = ("params", "grads", "exp_avgs", "second_states", "steps", "numels", "indices")
Tensors = _structure(
    "Tensors",
    {
        "count": ctypes.c_int64,
        **dict.fromkeys(ARRAYS, ctypes.c_void_p),
        **dict.fromkeys(("param_type", "state_type", "step_type", "threads", "round_params"), ctypes.c_int32),
        "seed": ctypes.c_int64,
    },
)
_COMMON = ("unscale", "beta1", "beta2", "shrink", "rate")
NUMBERS = {
    "adabayes_step": _structure(
        "AdaBayesNumbers",
        dict.fromkeys((*_COMMON, "forget", "noise", "information", "half", "slope", "memory"), ctypes.c_double),
    ),
    "adabayes_fp_step": _structure(
        "AdaBayesFPNumbers", dict.fromkeys((*_COMMON, "eps", "centred", "cautious"), ctypes.c_double)
    ),
    "adabayes_stream": _structure("CommonNumbers", dict.fromkeys(_COMMON, ctypes.c_double)),
}


@cache
def load() -> ctypes.CDLL | str:
    """Load the library; return it, or why there is none."""
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
    library.adabayes_set_team(team_of_torch())
    return library


def team_of_torch() -> int | None:
    """Return GOMP_parallel of the OpenMP runtime that torch has loaded, so that the kernels run on its threads."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def unavailable() -> str | None:
    """Return why there are no kernels, or None if there are."""
    library = load()
    return library if isinstance(library, str) else None


def thread_source() -> str:
    """Say whose threads the kernels use."""
    return "torch's OpenMP" if team_of_torch() else "the kernels themselves, for the time of a step"


def instruction_set() -> str:
    """Return the instructions that the kernels use on this machine."""
    library = load()
    assert not isinstance(library, str)
    name: bytes = library.adabayes_instruction_set()
    return name.decode()


def call(function: str, tensors: ctypes.Structure, numbers: ctypes.Structure) -> None:
    """Run a kernel. The memory at every address must be as large as ``numels`` and the types say."""
    library = load()
    assert not isinstance(library, str)
    if getattr(library, function)(ctypes.byref(tensors), ctypes.byref(numbers)):
        raise AssertionError(f"{function} has no kernel for types {tensors.param_type} and {tensors.state_type}")


def stream(*arrays: Tensor) -> None:
    """Add the second of four fp32 arrays to the others, which takes as long as a step at the speed of memory."""
    step = torch.zeros(())
    columns = {name: array("Q", [t.data_ptr()]) for name, t in zip(ARRAYS, (*arrays, step))}
    columns |= {"numels": array("q", [arrays[0].numel()]), "indices": array("q", [0])}
    pointers = {name: column.buffer_info()[0] for name, column in columns.items()}
    call("adabayes_stream", Tensors(count=1, threads=torch.get_num_threads(), **pointers), NUMBERS["adabayes_stream"]())
