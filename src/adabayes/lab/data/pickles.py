"""A reader of pickles that does not run them.

A pickle is a program, which Python's own readers execute. This one executes only the instructions that CIFAR's files
consist of, on plain values: nothing is imported or called, and numpy never sees what a file says about its arrays.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Iterator
from typing import Any

__all__ = ["read"]

_GLOBALS = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",  # how Python 3 writes bytes in the old protocols
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NUMBERS_AND_TEXT = ("BININT", "BININT1", "BININT2", "BINSTRING", "BINUNICODE", "SHORT_BINSTRING")


def read(content: bytes, instructions: int) -> Any:
    """Return the content of a pickle of at most ``instructions``: numbers, text, tuples, lists and dicts.

    Bytes become text in latin-1. A call is not made, but returned as ``(name, arguments)``; if the pickle then sets the
    state of the result, that is ``((name, arguments), state)``. The number of instructions bounds the memory that the
    values take.

    Raises:
        pickle.UnpicklingError: The pickle has other instructions, or too many.
        ValueError, LookupError, TypeError: The pickle is damaged.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    steps: Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]] = pickletools.genops(content)
    for count, (opcode, argument, _) in enumerate(steps):
        name = opcode.name
        if count >= instructions:
            raise pickle.UnpicklingError(f"it has more than {instructions:,} instructions")
        if name in _NUMBERS_AND_TEXT:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(pop_to_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else pop_to_mark()
            stack[-1].extend(items)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "SETITEMS":
            items = pop_to_mark()
            _set_items(stack[-1], items[::2], items[1::2])
        elif name == "GLOBAL":
            if argument not in _GLOBALS:
                raise pickle.UnpicklingError(f"it asks for {argument.replace(' ', '.')}")
            stack.append(_GLOBALS[argument])
        elif name == "REDUCE":
            arguments = stack.pop()
            stack[-1] = arguments[0] if stack[-1] == "encode" else (stack[-1], arguments)
        elif name == "BUILD":
            state = stack.pop()
            stack[-1] = (stack[-1], state)
        elif name not in ("PROTO", "STOP"):
            raise pickle.UnpicklingError(f"it has the instruction {name}")
    return stack.pop()


def _set_items(target: dict[str, Any], keys: list[Any], values: list[Any]) -> None:
    # Only text: the hash of deeply nested tuples can take for ever, or exhaust the C stack.
    if not all(isinstance(key, str) for key in keys):
        raise pickle.UnpicklingError("a key is not text")
    target.update(zip(keys, values))
