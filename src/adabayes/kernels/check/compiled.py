"""Compiles the Triton kernel ahead of time, which needs no GPU, and inspects the code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adabayes.kernels.coefficients import RULES
from adabayes.kernels.triton import launch

__all__ = ["TARGETS", "Compiled", "Variant", "compile_counting", "compile_for", "variants"]

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
# Contracted, approximated or flushed: C computes something else. The mad and fma of integers do not round.
_FORBIDDEN = re.compile(r"\b(?:fma|mad)\.\w*\.?f\d+|\bfma\.|\.approx|\.ftz|\bdiv\.full")
_WIDE = re.compile(r"\b(?:ld|st)\.global\S*\.v(\d)\.b(\d+)")


class Variant(NamedTuple):
    """A variant of the kernel."""

    rule: str
    param: torch.dtype
    state: torch.dtype
    options: tuple[bool, ...]
    round_params: bool = False
    returns_step: bool = False
    found_inf: bool = False

    @property
    def bytes_per_weight(self) -> int:
        """Return the bytes that a step must read and write: the gradient once, parameter and state twice."""
        return (2 if self.returns_step else 3) * self.param.itemsize + 4 * self.state.itemsize

    def __str__(self) -> str:
        options = [name for name, on in zip(RULES[self.rule].options, self.options) if on]
        options += [name for name in ("round_params", "returns_step", "found_inf") if getattr(self, name)]
        types = f"{str(self.param).removeprefix('torch.')}/{str(self.state).removeprefix('torch.')}"
        return " ".join([self.rule, types, *options])


class Compiled(NamedTuple):
    """Code for a target, and its properties."""

    code: str  # PTX, or AMD's assembly
    registers: int
    spills: int  # bytes, or registers
    wide_bytes: float | None  # read and written per weight in vectors of 128 bits and more, if it is PTX

    @property
    def forbidden(self) -> list[str]:
        """Return the instructions that would not give the bits of the CPU; only PTX shows them."""
        return [] if self.wide_bytes is None else sorted(set(_FORBIDDEN.findall(self.code)))


def variants() -> Iterator[Variant]:
    """Yield every variant that a step can need."""
    either = False, True
    for rule in RULES.values():
        for options in product(either, repeat=len(rule.options)):
            for param, state in sorted(launch.PAIRS, key=str):
                for found_inf, round_params in product(either, either[: 1 + (param == torch.bfloat16)]):
                    yield Variant(rule.name, param, state, options, round_params, found_inf=found_inf)
                if param == state == torch.float32:
                    yield Variant(rule.name, param, state, options, returns_step=True)


def compile_for(target: str, variant: Variant) -> Compiled:
    """Compile a variant for a target, such as sm_90 or gfx942."""
    from adabayes.kernels.triton.kernel import fused_step

    pointers = {"table": "*i64", "grads": "*i64", "pieces": "*i64", "rows": "*fp32"}
    integers = {"stride": "i32", "seed": "i32"}
    asm = _asm(fused_step, pointers, integers, launch.constants(*variant[:-1]), variant.found_inf, target)
    if "ptx" not in asm:
        code = asm["amdgcn"]
        spills = sum(map(int, re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", code)))
        return Compiled(code, max(map(int, re.findall(r"\.vgpr_count:\s*(\d+)", code))), spills, None)
    elements = launch.BLOCK // (32 * launch.WARPS)  # of a thread
    wide = sum(int(n) * int(bits) // 8 for n, bits in _WIDE.findall(asm["ptx"]) if int(n) * int(bits) >= 128)
    used = _resources(asm["cubin"])
    return Compiled(asm["ptx"], used["REG"], used["STACK"] + used["LOCAL"], wide / elements)


def compile_counting(target: str, step: torch.dtype, found_inf: bool) -> str:
    """Compile the kernel that counts steps; return its PTX."""
    from adabayes.kernels.triton.kernel import count_steps

    pointers = {"table": "*i64", "counts": "*fp64"}
    code: str = _asm(count_steps, pointers, {"tensors": "i32"}, launch.counting_constants(step), found_inf, target)[
        "ptx"
    ]
    return code


def _asm(
    kernel: Any, pointers: dict[str, str], integers: dict[str, str], fixed: dict[str, Any], found_inf: bool, target: str
) -> Any:
    """Compile a kernel as a launch does, with tables aligned as torch aligns them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**pointers, "found_inf": "*fp32", **integers, **dict.fromkeys(fixed, "constexpr")}
    if not found_inf:
        signature["found_inf"] = "constexpr"
        fixed = {**fixed, "found_inf": None}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    nvidia = target.startswith("sm_")
    where = GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, 64)
    source = ASTSource(kernel, signature, fixed, aligned)
    return triton.compile(source, target=where, options=launch.compile_options(nvidia)).asm


def _resources(cubin: bytes) -> dict[str, int]:
    """Return registers, stack and local memory of a kernel, by the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(file)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", output)}
