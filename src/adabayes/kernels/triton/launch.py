"""Launches the Triton kernel: one launch for all tensors of one combination of dtypes, and the tables that it reads.

Nothing here waits for the device, unless step counts are on the host and the found_inf of a GradScaler is not. Under
TRITON_INTERPRET=1, which Triton reads when it is imported, the same kernel runs on CPU tensors; the tests use that.
"""

from __future__ import annotations

import math
import os
import shutil
import sysconfig
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from adabayes._util.random_bits import MASK, scatter
from adabayes._util.tensors import Scalar
from adabayes.kernels.coefficients import Rule, StepOptions
from adabayes.kernels.launch import Operands

__all__ = [
    "BY_DEFAULT",
    "PAIRS",
    "REGISTERS",
    "TritonLaunch",
    "compile_options",
    "constants",
    "counting_constants",
    "is_interpreted",
    "unavailable",
]

PAIRS = {  # dtypes of parameter and state; float64 uses foreach
    (param, state)
    for param in (torch.float32, torch.bfloat16, torch.float16)
    for state in (torch.float32, torch.bfloat16)
}
BLOCK, BITE = 1024, 256  # elements of a program; elements at a time where they do not fill it or are not aligned
COUNTED = 128  # step counts of a program
WIDTH = 6  # columns of the table: see kernel.py
WARPS = 4  # warps of a program
LEAST_TRITON = (3, 6)  # earlier versions round subnormal numbers to zero, and do not compile all of this
# Registers of a thread: five programs then fit into a multiprocessor. By itself, Nvidia's compiler uses 64 and spills.
REGISTERS = 96

# Whether fused=None uses this kernel: not before there is a report of `adabayes doctor --gpu` from a GPU.
BY_DEFAULT = False

# Memory that captured graphs read at each replay. A graph may outlive its optimizer, so this is kept for the life of
# the process: a few bytes for each tensor.
_captured: list[Tensor] = []


def is_interpreted() -> bool:
    """Tell whether Triton's kernels are interpreted: then they take tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def unavailable() -> str | None:
    """Return why there is no kernel for this machine's GPU, or None if there is one."""
    try:
        import triton
    except ImportError as error:
        return f"Triton, which torch's CUDA builds for Linux bring along, cannot be imported: {error}"
    if tuple(map(int, triton.__version__.split(".")[:2])) < LEAST_TRITON:
        return f"the kernel needs Triton 3.6, which comes with torch 2.10, and this is {triton.__version__}"
    if is_interpreted():
        return None
    try:
        triton.runtime.driver.active.get_current_target()  # compiles a part of Triton, at its first use
    except Exception as error:
        compilers = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not torch.cuda.is_available():
            return f"there is no GPU that torch {torch.__version__} can use"
        if not any(map(shutil.which, compilers)):
            return f"Triton needs a C compiler, and there is none ({', '.join(compilers)}); install gcc"
        if not header.exists():
            return f"Triton needs Python's headers, and there is no {header}; install python3-dev"
        return f"Triton {triton.__version__} does not work here: {type(error).__name__}: {error}"
    return None


@cache
def _kernels() -> ModuleType:
    from adabayes.kernels.triton import kernel

    return kernel


@cache
def constants(
    rule: str,
    param: torch.dtype,
    state: torch.dtype,
    options: tuple[bool, ...],
    round_params: bool = False,
    returns_step: bool = False,
) -> dict[str, Any]:
    """Return the types and constants that a variant of the kernel is compiled for."""
    import triton.language as tl

    types = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.uint16}  # bf16 as its bits
    low = torch.bfloat16
    return {
        "RULE": _kernels().RULES[rule],
        "NAME": rule,
        "OPTIONS": options,
        "P": types[param],
        "S": types[state],
        "P_BF16": param == low,
        "S_BF16": state == low,
        "ROUND": round_params and param == low,
        "RETURNS_STEP": returns_step,
        "BLOCK": BLOCK,
        "BITE": BITE,
        "WIDTH": WIDTH,
    }


@cache
def counting_constants(step: torch.dtype) -> dict[str, Any]:
    """Return the types and constants that the kernel that counts steps is compiled for."""
    import triton.language as tl

    return {"STEP": tl.float64 if step == torch.float64 else tl.float32, "BLOCK": COUNTED, "WIDTH": WIDTH}


def compile_options(nvidia: bool) -> dict[str, Any]:
    """Return the options with which a kernel is compiled."""
    common = {"num_warps": WARPS, "enable_fp_fusion": False}
    return {**common, "maxnreg": REGISTERS} if nvidia else common


class TritonLaunch:
    """Implements :class:`adabayes.kernels.launch.Launch` for GPUs."""

    def __init__(self, rule: Rule, operands: Operands) -> None:
        params, steps = operands.params, operands.steps
        self.device = params[0].device
        if is_capturing(self.device):
            raise RuntimeError(
                "fused=True: a graph cannot capture the first step, nor the first with other parameters, state or "
                "missing gradients: take one before the capture (torch's docs: 'warmup' of CUDA graphs)."
            )
        self._rule = rule
        self._dtypes = params[0].dtype, operands.second_states[0].dtype
        self._steps = steps
        self._num_tensors = len(params)
        self.counts_on_device = steps is not None and steps[0].device == self.device
        step_counts = map(Tensor.data_ptr, steps) if steps and self.counts_on_device else [0] * len(params)
        numels = tuple(map(Tensor.numel, params))
        addresses = (map(Tensor.data_ptr, column) for column in operands[:3])
        table = array("q", [x for row in zip(*addresses, numels, operands.indices, step_counts) for x in row])
        self.table = _send(torch.frombuffer(table, dtype=torch.int64), self.device)
        self.pieces = _pieces(numels, self.device)
        self._sent_for: Any = None  # the stream and the gradients whose addresses were sent
        self._grads: Tensor | None = None
        self._coefficient_table: _CoefficientTable | None = None

    def take_step(self, grads: Sequence[int], coefficients: Any, options: StepOptions) -> None:
        """Count a step, update the state, and move the parameters."""
        assert self._steps is not None
        found_inf = options.found_inf
        with _on_device(self.device):
            if self.counts_on_device:
                found_inf = None if found_inf is None else self._here(found_inf).float()
                counts: Any = self._count_on_device(found_inf)
            else:
                if found_inf is not None and found_inf.item():  # the host must know whether to count
                    return
                found_inf = None
                torch._foreach_add_(list(self._steps), 1)
                counts = [step.item() for step in self._steps]
            self._launch(grads, coefficients, counts, options._replace(found_inf=found_inf))

    def compute_step(self, grads: Sequence[int], coefficients: Any, t: float) -> None:
        """Update the state, and write the step to the memory of the parameters."""
        with _on_device(self.device):
            self._launch(grads, coefficients, [t], StepOptions(), returns_step=True)

    def _launch(
        self, grads: Sequence[int], coefficients: Any, counts: Any, options: StepOptions, returns_step: bool = False
    ) -> None:
        rows = self._coefficients(coefficients, counts, options)
        if not len(self.pieces):
            return
        base = scatter(options.seed & MASK) ^ (options.seed >> 32 & MASK)
        chosen = self._rule.chosen_options(coefficients)
        _kernels().fused_step[(len(self.pieces),)](
            self.table,
            self._gradients(grads),
            self.pieces,
            rows,
            options.found_inf,
            rows.shape[1],
            base - (base >> 31 << 32),  # the same bits with a sign: Triton then always uses 32 bits
            **constants(self._rule.name, *self._dtypes, chosen, options.round_params, returns_step),
            **compile_options(torch.version.hip is None),
        )

    def _here(self, value: Any) -> Any:
        """Move a tensor to this device without waiting; the tensors of a group may be on several devices."""
        return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value

    def _gradients(self, addresses: Sequence[int]) -> Tensor:
        """Return the addresses of the gradients on the device; send them only if a gradient has moved."""
        if is_capturing(self.device):
            # Pass them as arguments of kernels: a replay would read the host's memory again.
            _captured.extend((self.table, self.pieces))
            sent = torch.zeros(self._num_tensors, dtype=torch.int64, device=self.device)
            torch._foreach_add_(list(sent.unbind()), list(addresses))
            return sent
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        if self._grads is None or self._sent_for != (stream, addresses):
            self._sent_for = stream, list(addresses)
            self._grads = _send(torch.frombuffer(array("q", addresses), dtype=torch.int64), self.device)
        return self._grads

    def _count_on_device(self, found_inf: Tensor | None) -> Tensor:
        """Count the steps on the device; return the counts."""
        assert self._steps is not None
        counts = torch.empty(self._num_tensors, dtype=torch.float64, device=self.device)
        _kernels().count_steps[(-(-self._num_tensors // COUNTED),)](
            self.table,
            counts,
            found_inf,
            self._num_tensors,
            **counting_constants(self._steps[0].dtype),
            **compile_options(torch.version.hip is None),
        )
        return counts

    def _coefficients(self, coefficients: Any, counts: Any, options: StepOptions) -> Tensor:
        """Return the rows of coefficients on the device: one for all tensors if their counts are equal and known."""
        options = options._replace(unscale=self._here(options.unscale), shrink=self._here(options.shrink))
        tensors = {name: self._here(x) for name, x in coefficients._asdict().items() if isinstance(x, Tensor)}
        coefficients = coefficients._replace(**tensors)
        if isinstance(counts, Tensor):
            if is_capturing(self.device) or self._coefficient_table is None:
                table = _CoefficientTable(self._rule, self._num_tensors, self.device)
                self._coefficient_table = self._coefficient_table if is_capturing(self.device) else table
            else:
                table = self._coefficient_table
            return table.fill_([counts, *self._rule.derive(coefficients, counts, options)])
        counts = counts[:1] if len(set(counts)) == 1 else counts
        if len(counts) == 1:
            values = self._rule.derive(coefficients, counts[0], options)
            if not any(isinstance(x, Tensor) for x in values):
                packed = array("I", [int(counts[0]) & MASK]).tobytes() + array("f", map(float, values)).tobytes()
                return _send(torch.frombuffer(bytearray(packed), dtype=torch.float32), self.device).view(-1, 1)
        on_device = _send(torch.tensor(counts, dtype=torch.float64, device="cpu"), self.device)
        table = _CoefficientTable(self._rule, len(counts), self.device)
        return table.fill_([on_device, *self._rule.derive(coefficients, on_device, options)])


class _CoefficientTable:
    """Step counts and coefficients on the device, a column for each tensor; constant rows are written once."""

    def __init__(self, rule: Rule, count: int, device: torch.device) -> None:
        width = 1 + len(rule.coefficients)
        self._floats = torch.empty((width, count), dtype=torch.float32, device=device)
        self._rows = [self._floats.view(torch.int32)[0], *self._floats[1:].unbind()]
        self._filled = [math.nan] * width

    def fill_(self, values: Sequence[Scalar]) -> Tensor:
        """Write one value, or one for each tensor, to each row; return the table."""
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                self._rows[index].copy_(value)
                self._filled[index] = math.nan
            elif value != self._filled[index]:
                self._rows[index].fill_(value)
                self._filled[index] = value
        return self._floats


def is_capturing(device: torch.device) -> bool:
    """Tell whether launches on a device are being captured in a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _on_device(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _send(host: Tensor, device: torch.device) -> Tensor:
    """Send to the device without waiting; torch keeps pinned memory until the copy is done."""
    if device.type == "cpu":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=256)
def _pieces(numels: tuple[int, ...], device: torch.device) -> Tensor:
    """List the blocks of all tensors: the tensor in the upper half of an integer, its block in the lower half."""
    blocks = -(torch.tensor(numels, device="cpu").neg() // BLOCK)  # whatever torch's default device is
    tensors = torch.repeat_interleave(torch.arange(len(numels), device="cpu"), blocks)
    ends = blocks.cumsum(0)
    within = torch.arange(len(tensors), device="cpu") - (ends - blocks)[tensors]
    return ((tensors << 32) | within).to(device)  # once, so it may wait
