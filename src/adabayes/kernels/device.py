"""The fused step on a GPU: one Triton kernel for all tensors of a kind, and the tables that it reads.

Nothing here waits for the device, unless step counts are on the host and the found_inf of a GradScaler is not. Under
TRITON_INTERPRET=1, which Triton reads when it is imported, the same kernel runs on CPU tensors; the tests use that.
"""

from __future__ import annotations

import math
import os
import shutil
import sysconfig
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from adabayes.random_bits import MASK, scatter
from adabayes.rates import share_of

__all__ = [
    "BY_DEFAULT",
    "OPTIONS",
    "PAIRS",
    "REGISTERS",
    "Launch",
    "constants",
    "counting",
    "is_interpreted",
    "options",
    "unavailable",
]

Scalar = float | Tensor

PAIRS = {  # of parameter and state; float64 uses foreach
    (param, state)
    for param in (torch.float32, torch.bfloat16, torch.float16)
    for state in (torch.float32, torch.bfloat16)
}
BLOCK, BITE = 1024, 256  # elements of a program; at a time, where they do not fill it or do not start at 16 bytes
COUNTED = 128  # step counts of a program
WIDTH = 6  # of the table: addresses of parameter and state, numel, index, address of the step count
NUMBERS = 10  # of a row: the step count and the numbers of the update
WARPS = 4  # of a program
LEAST_TRITON = (3, 6)  # earlier ones round subnormal numbers to zero, and do not compile all of this
OPTIONS = ("centred", "cautious", "memory")  # numbers of an update for which, if they are not 0, it has code of its own
# Of a thread: five programs then fit into a multiprocessor. Left alone, Nvidia's compiler keeps to 64 and spills some.
REGISTERS = 96

# Whether fused=None uses this kernel: not before there is a report of `adabayes doctor --gpu` from a GPU.
BY_DEFAULT = False

# Memory that captured graphs read at each replay, kept for as long as they may live: a few bytes for each tensor.
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
    from adabayes.kernels import update

    return update


@cache
def constants(
    function: str, param: torch.dtype, state: torch.dtype, round_params: bool, *chosen: bool
) -> dict[str, Any]:
    """Return the types and constants that a variant of the kernel is compiled for."""
    import triton.language as tl

    types = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.uint16}  # bf16 as its bits
    low = torch.bfloat16
    return {
        "FP": function == "adabayes_fp_step",
        **dict(zip(map(str.upper, OPTIONS), chosen)),
        "P": types[param],
        "S": types[state],
        "P_BF16": param == low,
        "S_BF16": state == low,
        "ROUND": round_params and param == low,
        "BLOCK": BLOCK,
        "BITE": BITE,
        "WIDTH": WIDTH,
    }


@cache
def counting(step: torch.dtype) -> dict[str, Any]:
    """Return the types and constants that the kernel that counts steps is compiled for."""
    import triton.language as tl

    return {"STEP": tl.float64 if step == torch.float64 else tl.float32, "BLOCK": COUNTED, "WIDTH": WIDTH}


def options(nvidia: bool) -> dict[str, Any]:
    """Return the options with which a kernel is compiled."""
    common = {"num_warps": WARPS, "enable_fp_fusion": False}
    return {**common, "maxnreg": REGISTERS} if nvidia else common


class Launch:
    """Tensors of one device and one kind: the tables that the kernel reads.

    Args:
        params: parameters of one dtype, on one device, without gaps; their state has the same layout.
        exp_avgs: first entries of state, of one dtype.
        second_states: second entries, of the same dtype.
        steps: step counts of one dtype, on the device or on the CPU; None if :meth:`run` is given one for all.
        indices: index of each tensor among all of the optimizer's, for the random bits.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        second_states: Sequence[Tensor],
        steps: Sequence[Tensor] | None,
        indices: Sequence[int],
    ) -> None:
        self.device = params[0].device
        if is_capturing(self.device):
            raise RuntimeError(
                "fused=True: a graph cannot capture the first step, nor the first with other parameters, state or "
                "missing gradients: take one before the capture (torch's docs: 'warmup' of CUDA graphs)."
            )
        self._dtypes = params[0].dtype, second_states[0].dtype
        self._step_dtype = torch.float32 if steps is None else steps[0].dtype
        self.counts_on_host = steps is not None and steps[0].device != self.device
        counts = [0] * len(params) if steps is None else map(Tensor.data_ptr, steps)
        columns = (params, exp_avgs, second_states)
        numels = tuple(map(Tensor.numel, params))
        addresses = (map(Tensor.data_ptr, column) for column in columns)
        table = array("q", [x for row in zip(*addresses, numels, indices, counts) for x in row])
        self.table = _sent(torch.frombuffer(table, dtype=torch.int64), self.device)
        self.pieces = _pieces(numels, self.device)
        self._count = len(params)
        self._sent_for: Any = None  # the gradients, and the stream
        self._grads = self.table
        self._rows: _Rows | None = None

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
        """Take a step.

        Args:
            function: name of the function of the CPU library that computes the same bits.
            grads: addresses of the gradients, which have the layout of the parameters.
            numbers: numbers as the library takes them; tensors on the device are not read here.
            steps: step counts, if they are on the host.
            t: one step count for all, if there are no tensors of them.
            found_inf: a number on the device; unless it is 0, nothing is changed.
            seed: seed of the stochastic rounding.
            round_params: whether bf16 parameters are rounded stochastically.
        """
        kernels = _kernels()
        capturing = is_capturing(self.device)
        base = scatter(seed & MASK) ^ (seed >> 32 & MASK)
        numbers = {name: self._here(x) if isinstance(x, Tensor) else x for name, x in numbers.items()}
        with _guard(self.device):
            if t is None and steps is None:
                found_inf = None if found_inf is None else self._here(found_inf).float()
                rows = self._counted(kernels, function, numbers, found_inf, capturing)
            else:
                if found_inf is not None and found_inf.item():  # where the counts are must be known
                    return
                rows, found_inf = self._from_host(function, numbers, steps, t), None
            chosen = (bool(numbers.get(option)) for option in OPTIONS)
            fixed = constants(function, *self._dtypes, round_params, *chosen)
            if len(self.pieces):
                kernels.fused_step[(len(self.pieces),)](
                    self.table,
                    self._gradients(grads, capturing),
                    self.pieces,
                    rows,
                    found_inf,
                    rows.shape[1],
                    base - (base >> 31 << 32),  # the same bits with a sign: always of 32 bits to Triton
                    **fixed,
                    **options(torch.version.hip is None),
                )

    def _here(self, t: Tensor) -> Tensor:
        return t.to(self.device, non_blocking=True)  # a group may have tensors on several devices

    def _gradients(self, addresses: Sequence[int], capturing: bool) -> Tensor:
        """Return the addresses of the gradients on the device; send them only if a gradient has moved."""
        if capturing:
            # Not from memory of the host, which a replay would read again: as arguments of kernels.
            _captured.extend((self.table, self.pieces))
            sent = torch.zeros(self._count, dtype=torch.int64, device=self.device)
            torch._foreach_add_(list(sent.unbind()), list(addresses))
            return sent
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        if self._sent_for != (stream, addresses):
            self._sent_for = stream, list(addresses)
            self._grads = _sent(torch.frombuffer(array("q", addresses), dtype=torch.int64), self.device)
        return self._grads

    def _counted(
        self,
        kernels: ModuleType,
        function: str,
        numbers: Mapping[str, Scalar],
        found_inf: Tensor | None,
        capturing: bool,
    ) -> Tensor:
        """Count the steps on the device, and compute a row of numbers for each tensor there."""
        rows = _Rows(self._count, self.device) if capturing or self._rows is None else self._rows
        self._rows = self._rows if capturing else rows
        kernels.count_steps[(-(-self._count // COUNTED),)](
            self.table,
            rows.counts,
            found_inf,
            self._count,
            **counting(self._step_dtype),
            **options(torch.version.hip is None),
        )
        rows.fill_(row(function, numbers, rows.counts))
        return rows.floats

    def _from_host(
        self, function: str, numbers: Mapping[str, Scalar], steps: Sequence[Tensor] | None, t: float | None
    ) -> Tensor:
        """Count the steps on the host; send one row for all tensors or, if counts differ, the columns of the rows."""
        counts = [t]
        if steps is not None:
            torch._foreach_add_(list(steps), 1)
            counts = [step.item() for step in steps]
        alike = len(set(counts)) == 1
        if alike and not any(isinstance(x, Tensor) for x in numbers.values()):
            step, *others = row(function, numbers, float(counts[0]))  # type: ignore[arg-type]
            packed = array("I", [int(step) & MASK]).tobytes() + array("f", others).tobytes()
            return _sent(torch.frombuffer(bytearray(packed), dtype=torch.float32), self.device).view(NUMBERS, 1)
        rows = _Rows(1 if alike else self._count, self.device)
        kept = torch.tensor(counts[:1] if alike else counts, dtype=torch.float64, device="cpu")
        rows.fill_(row(function, numbers, _sent(kept, self.device)))
        return rows.floats


class _Rows:
    """Numbers of a step, a column for each tensor, on the device; those that do not change are written once."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.floats = torch.empty((NUMBERS, count), dtype=torch.float32, device=device)
        self.counts = torch.empty(count, dtype=torch.float64, device=device)
        self._targets = [self.floats.view(torch.int32)[0], *self.floats[1:].unbind()]
        self._filled: list[float] = [math.nan] * NUMBERS

    def fill_(self, numbers: Sequence[Scalar]) -> None:
        for place, number in enumerate(numbers):
            if isinstance(number, Tensor):
                self._targets[place].copy_(number)
                self._filled[place] = math.nan
            elif number != self._filled[place]:
                self._targets[place].fill_(number)
                self._filled[place] = number


def row(function: str, c: Mapping[str, Any], t: Any) -> list[Any]:
    """Return the step count and the numbers of an update, as update.h derives them; in float64, of host or device."""
    unscale, beta1, beta2, rate = (c[name] for name in ("unscale", "beta1", "beta2", "rate"))
    first = 1 - beta1**t
    common = [t, (1 - beta1) * unscale, beta1, c["shrink"]]
    if function == "adabayes_fp_step":
        second = 1 - beta2**t
        root = second.sqrt() if isinstance(second, Tensor) else math.sqrt(second)
        outer = root * (c["eps"] / 2)
        weight2 = (1 - beta2) * unscale * unscale
        return [*common, rate * root / first, beta2, weight2, outer * outer, outer, 1 / unscale]
    information, half, slope = c["information"] * unscale * unscale, c["half"], c["slope"] * unscale
    if c["memory"]:
        share = share_of(t, c["memory"])
        return [*common, rate / first, (1 - share) / 2, share * half, share**0.5 * slope, half, slope]
    return [*common, rate / first, c["forget"], c["noise"], information, half, slope]


def is_capturing(device: torch.device) -> bool:
    """Tell whether launches on a device are being captured in a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _guard(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _sent(host: Tensor, device: torch.device) -> Tensor:
    """Send to the device without waiting; torch keeps pinned memory until the copy is done."""
    if device.type == "cpu":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=256)
def _pieces(numels: tuple[int, ...], device: torch.device) -> Tensor:
    """List the blocks of all tensors: the tensor's place in the upper half of a number, the block in the lower."""
    blocks = -(torch.tensor(numels, device="cpu").neg() // BLOCK)  # whatever torch's default device is
    tensors = torch.repeat_interleave(torch.arange(len(numels), device="cpu"), blocks)
    ends = blocks.cumsum(0)
    within = torch.arange(len(tensors), device="cpu") - (ends - blocks)[tensors]
    return ((tensors << 32) | within).to(device)  # once, so it may wait
