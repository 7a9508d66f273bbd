"""Checks of the content of files: protocols, and the JSON of runs.

A kind is a function of a key and its value that raises :class:`Misfit` if the value is not permitted.
"""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

__all__ = [
    "ANYTHING", "FINITE", "FLAG", "INTEGER", "LINE", "NAME", "NUMBER", "NUMBERS", "PART", "PLAIN", "TEXT", "Kind",
    "Misfit",
    "check", "choice", "either", "is_number", "kind", "listed", "meeting", "nothing_or", "number", "pair", "record",
    "suggestion", "table", "tables", "whole",
]  # fmt: skip

Kind = Callable[[str, Any], None]

_DEPTH = 20  # of nested tables and lists
_LARGEST = 1e100  # number, so that sums and squares are finite too


class Misfit(ValueError):
    """A value that is not permitted. The message names its key and the values that are."""


def check(kind: Kind, value: Any) -> None:
    """Raise :class:`Misfit` if the content of a file is not of a kind."""
    try:
        kind("", value)
    except RecursionError:
        raise Misfit("its tables or lists are nested too deeply") from None


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return a question to end an error with, if one of the choices looks like the name that was meant.

    >>> suggestion("sgdd", ["sgd", "adam"])
    '. Did you mean sgd?'
    """
    by_small = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(name.lower()[:100], by_small, 1)
    return f". Did you mean {by_small[close[0]]}?" if close else ""


# Single values


def kind(permitted: str, admits: Callable[[Any], bool]) -> Kind:
    def check(key: str, value: Any) -> None:
        if not admits(value):
            raise Misfit(f"{key or 'it'} is {_shown(value)}; it must be {permitted}")

    return check


def whole(least: int, most: int | None = None) -> Kind:
    permitted = f"a whole number of at least {least}" + ("" if most is None else f" and at most {most}")
    return kind(permitted, lambda v: _is_integer(v) and least <= v and (most is None or v <= most))


def number(least: float, most: float) -> Kind:
    return kind(f"a number from {least:g} to {most:g}", lambda v: is_number(v) and least <= v <= most)


def choice(*names: str) -> Kind:
    return kind(f"one of {', '.join(names)}", lambda v: isinstance(v, str) and v in names)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_number(value: Any) -> bool:
    """Return whether a value is a number; it may be inf or nan."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= _LARGEST or (isinstance(value, float) and not math.isfinite(value))


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_NO_NAME = re.compile(
    r'[/\\:*?"<>|]|[. ]$|^(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\.|$)', re.IGNORECASE
)


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and not _CONTROL.search(value)


def _is_name(value: Any) -> bool:
    return _is_line(value) and not _NO_NAME.search(value) and 0 < len(value.encode()) <= 100


def _anything(key: str, value: Any) -> None:
    pass


def _plain(key: str, value: Any, depth: int = 0) -> None:
    """Check that a value is JSON that can be written: not too deep, and without numbers that are too large."""
    if depth > _DEPTH:
        raise Misfit(f"{key} is nested more than {_DEPTH} deep")
    if isinstance(value, dict):
        for name, entry in value.items():
            _plain(_below(key, name), entry, depth + 1)
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            _plain(f"{key}[{i}]", entry, depth + 1)
    elif not (value is None or isinstance(value, str | bool | float) or is_number(value)):
        raise Misfit(f"{key} is {_shown(value)}; it must be a number, a text, true or false, or a list of these")


ANYTHING: Kind = _anything
PLAIN: Kind = _plain
TEXT = kind("a text", lambda v: isinstance(v, str))
LINE = kind("a text of one line", _is_line)
PART = kind("a text of one line without / and \\", lambda v: _is_line(v) and "/" not in v and "\\" not in v)
INTEGER = kind("a whole number of at most 64 bits", _is_integer)
FLAG = kind("true or false", lambda v: isinstance(v, bool))
NUMBER = kind("a number", is_number)
FINITE = kind("a finite number", lambda v: is_number(v) and math.isfinite(v))
NAME = kind(
    "a name that a file can have on every system: at most 100 bytes, no control characters and none of "
    r'/ \ : * ? " < > |, no dot or space at the end, and none that Windows has taken, like con',
    _is_name,
)


# Values made of others


def either(permitted: str, *kinds: Kind) -> Kind:
    return kind(permitted, lambda v: any(_fits(one, v) for one in kinds))


def nothing_or(other: Kind) -> Kind:
    def check(key: str, value: Any) -> None:
        if value is not None:
            other(key, value)

    return check


def listed(item: Kind, permitted: str = "a list", most: int | None = None) -> Kind:
    is_list = kind(permitted, lambda v: isinstance(v, list | tuple) and (most is None or len(v) <= most))

    def check(key: str, value: Any) -> None:
        is_list(key, value)
        for i, entry in enumerate(value):
            item(f"{key}[{i}]", entry)

    return check


def _are_numbers(value: Any) -> bool:
    try:
        return isinstance(value, list) and len(array("d", value)) == len(value)  # fast also for a million
    except (TypeError, OverflowError):
        return False


NUMBERS = kind("a list of numbers", _are_numbers)


def pair(
    permitted: str, admits: Callable[[Any], bool], both: Callable[[Any, Any], bool] = lambda first, second: True
) -> Kind:
    """Return the kind of two values, each of which is admitted and, with ``both``, also the two together."""
    return kind(
        permitted, lambda v: isinstance(v, list | tuple) and len(v) == 2 and all(map(admits, v)) and both(v[0], v[1])
    )


def tables(entry: Kind, permitted: str = "a table", names: Kind = ANYTHING) -> Kind:
    """Return the kind of a table whose entries are of one kind, and also their ``names``."""
    is_table = kind(permitted, lambda v: isinstance(v, dict))

    def check(key: str, value: Any) -> None:
        is_table(key, value)
        for name, content in value.items():
            names(f"a name in {key}", name)
            entry(_below(key, name), content)

    return check


def table(
    required: Mapping[str, Kind],
    optional: Mapping[str, Kind] = {},
    others: Kind | None = None,
    permitted: str = "a table",
) -> Kind:
    """Return the kind of a table with required and optional entries and, if they have a kind, others."""
    is_table = kind(permitted, lambda v: isinstance(v, dict))
    known = {**required, **optional}

    def check(key: str, value: Any) -> None:
        is_table(key, value)
        where = f" in {key}" if key else ""
        for name, content in value.items():
            entry = known.get(name, others)
            if entry is None:
                permitted = f"there may be {', '.join(known)}{suggestion(name, known)}"
                raise Misfit(f"unknown entry {_shown(name)}{where}; {permitted}")
            entry(_below(key, name), content)
        if missing := [name for name in required if name not in value]:
            raise Misfit(f"there is no {missing[0]}{where}; there must be {', '.join(required)}")

    return check


def record(cls: Any, kinds: Mapping[str, Kind]) -> Kind:
    """Return the kind of a dataclass as a table. Fields that have a default are optional."""
    required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    optional = [f.name for f in fields(cls) if f.name not in required]
    return table({name: kinds[name] for name in required}, {name: kinds[name] for name in optional})


def meeting(names: Iterable[str]) -> tuple[str, str] | None:
    """Return two names, if there are any, that some systems take for one: they ignore case or forms of accents."""
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        if key in seen:
            return seen[key], name
        seen[key] = name
    return None


def _fits(kind: Kind, value: Any) -> bool:
    try:
        kind("", value)
    except Misfit:
        return False
    return True


def _below(key: str, name: Any) -> str:
    shown = name if isinstance(name, str) and re.fullmatch(r"[\w-]{1,80}", name) else _shown(name)
    return f"{key}.{shown}" if key else shown


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of nested lists
        return "too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."
