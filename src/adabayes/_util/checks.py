"""Checks of arguments, whose errors name the value and the permitted ones."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from adabayes._util.tensors import as_float

__all__ = ["check_choice", "check_integer", "check_range"]


def check_range(name: str, value: Any, least: float = 0.0, below: float = float("inf"), hint: str = "") -> None:
    """Raise unless ``least <= value < below``."""
    if not isinstance(value, (Real, Tensor)):
        raise TypeError(f"Invalid {name}: {value!r} is not a number but a {type(value).__name__}.{hint}")
    number = as_float(value)
    if not least <= number < below:
        upper = "finite" if below == float("inf") else f"below {below:g}"
        shown = number if isinstance(value, Tensor) else value  # as torch shows it
        raise ValueError(f"Invalid {name}: {shown}. It must be at least {least:g} and {upper}.{hint}")


def check_integer(name: str, value: Any, least: int = 1, hint: str = "") -> int:
    """Return the value as an int; raise unless it is an integer of at least ``least``."""
    check_range(name, value, least=least, hint=hint)
    if as_float(value) % 1:
        raise ValueError(f"Invalid {name}: {as_float(value)}. It must be an integer.{hint}")
    return int(value)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"Invalid {name}: {value!r}. It must be one of {', '.join(map(repr, choices))}.")
