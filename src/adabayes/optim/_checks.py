"""Checks of arguments, with errors that say which value was wrong, what is permitted and what to do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, ParamSpec

from torch import Tensor

from adabayes.optim._tensors import as_float

__all__ = ["check_choice", "check_range", "check_whole", "explain", "explains_unknown"]

P = ParamSpec("P")

_INSTEAD = {
    "betas": "It has beta1, the first of them; in place of the second, the filter has a memory of its own.",
    "beta2": "The filter has a memory of its own in its place.",
    "eps": "Its place is taken by lr / lr_sgd, the gradient at which SGD gives way to Adam.",
    "amsgrad": "There is no such variant of it; AdaBound has one, amsbound=True.",
    "momentum": "Give lr_sgd = lr / (1 - momentum) of SGD's; the average over past gradients is beta1 or betas[0].",
    "learning_rate": "It is lr.",
    "capturable": "A graph cannot capture when its bases are refreshed; AdaBayesFP has it.",
    "differentiable": "Autograd cannot follow its bases; AdaBayesFP has it.",
    "weight_drift": "Give weight_decay = weight_drift / lr.",
}


def check_range(name: str, value: Any, least: float = 0.0, below: float = float("inf"), hint: str = "") -> None:
    """Raise unless ``least <= value < below``."""
    if not isinstance(value, (Real, Tensor)):
        raise TypeError(f"Invalid {name}: {value!r} is not a number but a {type(value).__name__}.{hint}")
    number = as_float(value)
    if not least <= number < below:
        upper = "finite" if below == float("inf") else f"below {below:g}"
        shown = number if isinstance(value, Tensor) else value  # as torch shows it
        raise ValueError(f"Invalid {name}: {shown}. It must be at least {least:g} and {upper}.{hint}")


def check_whole(name: str, value: Any) -> int:
    """Return a whole number of at least 1; raise if it is none."""
    check_range(name, value, least=1.0)
    if as_float(value) % 1:
        raise ValueError(f"Invalid {name}: {value}. It must be a whole number.")
    return int(value)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"Invalid {name}: {value!r}. It must be one of {', '.join(map(repr, choices))}.")


def explain(cls: type, unknown: Sequence[str]) -> None:
    """Raise for arguments that are known from other optimizers, and say what takes their place here."""
    if known := [name for name in unknown if name in _INSTEAD]:
        hints = " ".join(_INSTEAD[name] for name in known)
        raise TypeError(f"{cls.__name__} takes no {' and no '.join(known)}. {hints}")


def explains_unknown(init: Callable[P, None]) -> Callable[P, None]:
    """Let a constructor explain unknown arguments, where Python would only name them."""
    taken = inspect.signature(init).parameters

    @functools.wraps(init)
    def explained(*args: P.args, **given: P.kwargs) -> None:
        explain(type(args[0]), [name for name in given if name not in taken])
        init(*args, **given)

    return explained
