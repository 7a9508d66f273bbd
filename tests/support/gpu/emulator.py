"""Executes PTX on the CPU: each thread of each block is a lane of numpy arrays, in the memory of this process.

The emulator supports only the instructions that our kernels need. It refuses all others, and arithmetic that IEEE 754
does not define (``fma`` of floats, ``approx``, ``ftz``). Memory must be declared. An access outside of it, a load from
memory that is not readable, or an access that is not aligned as a GPU requires, raises a :class:`Fault`. After a
branch, lanes that are further ahead in the code wait for the others.
"""

from __future__ import annotations

import ctypes
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]  # the bits of a register in all lanes

TYPES: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    **{f"{kind}{n}": np.dtype(f"{'i' if kind == 's' else 'u'}{n // 8}") for kind in "sub" for n in (8, 16, 32, 64)},
}
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
COMPARISONS |= {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
SHARED = 1 << 15  # bytes that the threads of a block share


class Fault(Exception):
    """An error for which a GPU would abort the kernel, or a kernel that does not end."""


class Instruction(NamedTuple):
    """One instruction: an optional guard, the parts of its name, its operands."""

    guard: str | None
    negated: bool
    parts: tuple[str, ...]
    operands: tuple[str, ...]


class Region(NamedTuple):
    """Declared memory, which a kernel may write; and read, unless it is not readable."""

    start: int
    size: int
    readable: bool = True


class Program:
    """A parsed kernel."""

    def __init__(self, ptx: str) -> None:
        text = re.sub(r"//[^\n]*|/\*.*?\*/|^\s*\.loc\b[^\n]*", "", ptx, flags=re.DOTALL | re.MULTILINE)
        match = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)^\{(.*?)^\}", text, re.DOTALL | re.MULTILINE)
        assert match, "no kernel in this PTX"
        self.params = re.findall(r"(\w+)\s*(?:,|$)", match[2].strip(), re.MULTILINE)
        self.threads = int(re.findall(r"\.reqntid\s+(\d+)", match[3])[0])
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        for statement in re.split(r";|(?<=:)\s*\n", match[4]):
            line = " ".join(statement.split())
            while label := re.match(r"(\$?\w+):\s*", line):
                self.labels[label[1]] = len(self.code)
                line = line[label.end() :]
            if line and not line.startswith("."):
                self.code.append(_instruction(line))

    def launch(self, blocks: int, arguments: Sequence[int], memory: Sequence[Region], limit: int = 100_000) -> None:
        """Execute all blocks. Arguments are integers, including addresses."""
        with np.errstate(all="ignore"):
            _Launch(self, blocks, arguments, memory).execute_all(limit)


def _instruction(line: str) -> Instruction:
    match = re.fullmatch(r"(?:@(!?)(%\w+) )?([\w.:]+) ?(.*)", line)
    if not match:
        raise NotImplementedError(line)
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", match[4])
    return Instruction(match[2], match[1] == "!", tuple(match[3].split(".")), tuple(x.strip() for x in operands))


class _Launch:
    """All lanes of one launch."""

    def __init__(self, program: Program, blocks: int, arguments: Sequence[int], memory: Sequence[Region]) -> None:
        self.program = program
        self.lanes = blocks * program.threads
        lane = np.arange(self.lanes, dtype=np.uint64)
        self.registers: dict[str, Bits] = {
            "%tid.x": lane % np.uint64(program.threads),
            "%ctaid.x": lane // np.uint64(program.threads),
        }
        self.arguments: Mapping[str, int] = dict(zip(program.params, arguments))
        self.memory = sorted(set(memory))
        self.starts = np.array([region.start for region in self.memory], dtype=np.uint64)
        self.views = [
            np.ctypeslib.as_array((ctypes.c_uint8 * region.size).from_address(region.start)) for region in self.memory
        ]
        self.shared = np.zeros(blocks * SHARED, dtype=np.uint8)
        self.at = np.zeros(self.lanes, dtype=np.int64)
        self.active = np.ones(self.lanes, dtype=bool)

    def execute_all(self, limit: int) -> None:
        end = len(self.program.code)
        for _ in range(limit):
            now = int(self.at.min())
            if now >= end:
                return
            instruction = self.program.code[now]
            here = self.at == now
            self.active = here
            if instruction.guard:
                self.active = here & (self.predicate(instruction.guard) ^ instruction.negated)
            self.at[here] += 1
            if self.active.any():
                self.execute(instruction)
        raise Fault("does not end")

    # Registers

    def bits(self, operand: str) -> Bits:
        if operand.startswith("%"):
            if operand not in self.registers:
                raise Fault(f"{operand} is read before it is written")
            return self.registers[operand]
        if operand == "global_smem":
            value = 0
        elif re.fullmatch(r"0[fFdD][0-9a-fA-F]+", operand):
            value = int(operand[2:], 16)
        else:
            value = int(operand.rstrip("U"), 0)
        return np.full(self.lanes, value & (1 << 64) - 1, dtype=np.uint64)

    def value(self, operand: str, kind: str) -> NDArray[Any]:
        dtype = TYPES[kind]
        return self.bits(operand).astype(f"u{dtype.itemsize}").view(dtype)

    def predicate(self, operand: str) -> NDArray[np.bool_]:
        return np.not_equal(self.bits(operand), 0)

    def put(self, operand: str, value: Any) -> None:
        value = np.ascontiguousarray(value)
        raw = value if value.dtype == bool else value.view(f"u{value.dtype.itemsize}")
        before = self.registers.get(operand, np.zeros(self.lanes, dtype=np.uint64))
        self.registers[operand] = np.where(self.active, raw.astype(np.uint64), before)

    # Memory

    def bytes_at(self, operand: str, size: int, shared: bool, reads: bool) -> list[tuple[NDArray[np.uint8], Any, Any]]:
        """Return the memory of an access: for each region, its bytes, the lanes that access it, and their indices."""
        match = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        assert match, operand
        lanes = np.flatnonzero(self.active)
        addresses = self.bits(match[1])[lanes] + np.uint64(int(match[2] or "0", 0) & (1 << 64) - 1)
        if (addresses % np.uint64(size)).any():
            raise Fault(f"an access of {size} bytes is not aligned")
        if shared:
            if (addresses + np.uint64(size) > SHARED).any():
                raise Fault("an access outside of shared memory")
            offsets = (addresses + self.registers["%ctaid.x"][lanes] * np.uint64(SHARED)).astype(np.int64)
            return [(self.shared, lanes, offsets[:, None] + np.arange(size))]
        indices = np.searchsorted(self.starts, addresses, side="right") - 1
        accesses = []
        for index in np.unique(indices):
            chosen = indices == index
            region = self.memory[index]
            offsets = (addresses[chosen] - np.uint64(region.start)).astype(np.int64)
            if index < 0 or (offsets + size > region.size).any():
                raise Fault(f"an access of {size} bytes outside of all memory")
            if reads and not region.readable:
                raise Fault("a load from memory that is not readable")
            accesses.append((self.views[index], lanes[chosen], offsets[:, None] + np.arange(size)))
        return accesses

    def load(self, target: str, operand: str, kind: str, shared: bool) -> None:
        names = [name.strip() for name in target.strip("{}").split(",")]
        itemsize = TYPES[kind].itemsize
        data = np.zeros((self.lanes, len(names) * itemsize), dtype=np.uint8)
        for memory, lanes, where in self.bytes_at(operand, data.shape[1], shared, reads=True):
            data[lanes] = memory[where]
        values = data.view(f"u{itemsize}")
        for i, name in enumerate(names):
            self.put(name, values[:, i])

    def store(self, operand: str, source: str, kind: str, shared: bool) -> None:
        columns = [self.value(name.strip(), kind) for name in source.strip("{}").split(",")]
        data = np.stack(columns, axis=1).view(np.uint8)
        for memory, lanes, where in self.bytes_at(operand, data.shape[1], shared, reads=False):
            memory[where] = data[lanes]

    def check_barrier(self) -> None:
        """Raise unless all threads of a block are at the barrier. Lanes that were behind have caught up by now."""
        running = self.at < len(self.program.code)
        waiting = np.unique(self.registers["%ctaid.x"][self.active])
        if (running & np.isin(self.registers["%ctaid.x"], waiting) & ~self.active).any():
            raise Fault("a barrier that not all threads of a block reach")

    # Instructions

    def execute(self, instruction: Instruction) -> None:
        _, _, (name, *options), x = instruction
        kind = options[-1] if options else ""
        if {"approx", "ftz", "full"} & set(options) or (name in ("fma", "mad") and kind.startswith("f")):
            raise NotImplementedError(f"not exact: {'.'.join(instruction.parts)}")
        match name:
            case "bra":
                self.at[self.active] = self.program.labels[x[-1]]
            case "ret":
                self.at[self.active] = len(self.program.code)
            case "ld" if options[0] == "param":
                given = self.arguments[x[1].strip("[] ")]
                self.put(x[0], np.full(self.lanes, given & (1 << 64) - 1, np.uint64).astype(TYPES[kind]))
            case "ld":
                self.load(x[0], x[1], kind, "shared" in options)
            case "st":
                self.store(x[0], x[1], kind, "shared" in options)
            case "bar" if options == ["sync"]:
                self.check_barrier()
            case "mov" if x[0].startswith("{"):
                half = f"b{int(kind[1:]) // 2}"
                low, high = (name.strip() for name in x[0].strip("{}").split(","))
                both = self.value(x[1], kind)
                self.put(low, both.astype(TYPES[half]))
                self.put(high, (both >> both.dtype.type(int(half[1:]))).astype(TYPES[half]))
            case "mov" if x[1].startswith("{"):
                size = int(kind[1:]) // 2
                first, second = (self.value(name.strip(), f"b{size}") for name in x[1].strip("{}").split(","))
                wide = TYPES[kind].type
                self.put(x[0], first.astype(wide) | second.astype(wide) << wide(size))
            case "mov":
                self.put(x[0], self.value(x[1], kind))
            case "setp" if kind == "f16x2":
                a, b = (self.value(y, "b32") for y in x[1:])
                for target, shift in zip(x[0].split("|"), (0, 16)):
                    halves = ((y >> np.uint32(shift)).astype(np.uint16).view(np.float16) for y in (a, b))
                    self.put(target, self.compare(options[0], *halves))
            case "setp":
                self.put(x[0], self.compare(options[0], self.value(x[1], kind), self.value(x[2], kind)))
            case "selp":
                self.put(x[0], np.where(self.predicate(x[3]), self.value(x[1], kind), self.value(x[2], kind)))
            case "and" | "or" | "xor" | "not" if kind == "pred":
                values = [self.predicate(y) for y in x[1:]]
                self.put(x[0], ~values[0] if name == "not" else ARITHMETIC[name](*values))
            case "not":
                self.put(x[0], ~self.value(x[1], kind))
            case "shl" | "shr":
                self.shift(name, x, kind)
            case "bfe" if kind[0] == "u":
                value, start, length = (self.value(y, kind if i == 0 else "u32") for i, y in enumerate(x[1:]))
                self.put(x[0], (value >> start) & ((value.dtype.type(1) << length) - value.dtype.type(1)))
            case "mul" | "mad" if "wide" in options or "lo" in options:
                self.multiply(name, x, kind, "wide" in options)
            case "cvt":
                self.convert(x, options)
            case "sqrt" if options[0] == "rn":
                self.put(x[0], np.sqrt(self.value(x[1], kind)))
            case "rcp" if options[0] == "rn":
                self.put(x[0], np.divide(TYPES[kind].type(1), self.value(x[1], kind)))
            case "neg" | "abs":
                self.put(x[0], {"neg": np.negative, "abs": np.abs}[name](self.value(x[1], kind)))
            case _ if name in ARITHMETIC and (kind[0] != "f" or options[0] == "rn"):
                if name == "div" and kind[0] != "f":
                    raise NotImplementedError(".".join(instruction.parts))
                self.put(x[0], ARITHMETIC[name](self.value(x[1], kind), self.value(x[2], kind)))
            case _:
                raise NotImplementedError(".".join(instruction.parts))

    def compare(self, how: str, a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
        nan = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(self.lanes, bool)
        if how in ("nan", "num"):
            return nan if how == "nan" else ~nan
        if a.dtype.kind == "f" and how.endswith("u") and how not in COMPARISONS:  # unordered: true if an operand is nan
            return np.asarray(nan | COMPARISONS[how[:-1]](a, b))
        return np.asarray(~nan & COMPARISONS[how](a, b))

    def shift(self, name: str, x: Sequence[str], kind: str) -> None:
        value, count = self.value(x[1], kind), self.value(x[2], "u32")
        size = value.dtype.itemsize * 8
        most = np.minimum(count, size - 1).astype(value.dtype)
        if name == "shl":
            self.put(x[0], np.where(count < size, value << most, 0).astype(value.dtype))
        else:
            self.put(x[0], np.where((count < size) | (kind[0] == "s"), value >> most, 0).astype(value.dtype))

    def multiply(self, name: str, x: Sequence[str], kind: str, wide: bool) -> None:
        out = f"{kind[0]}{2 * int(kind[1:])}" if wide else kind
        result = self.value(x[1], kind).astype(TYPES[out]) * self.value(x[2], kind).astype(TYPES[out])
        self.put(x[0], result + self.value(x[3], out) if name == "mad" else result)

    def convert(self, x: Sequence[str], options: Sequence[str]) -> None:
        rounding, (to, kind) = options[:-2], options[-2:]
        if to == "f16x2":
            high, low = (self.value(y, kind).astype(np.float16).view(np.uint16).astype(np.uint32) for y in x[1:])
            self.put(x[0], low | high << np.uint32(16))
            return
        value = self.value(x[1], kind)
        if to[0] != "f" and kind[0] == "f":
            if rounding != ["rzi"]:
                raise NotImplementedError(f"cvt.{'.'.join(options)}")
            value = np.trunc(value)
        self.put(x[0], value.astype(TYPES[to]))
