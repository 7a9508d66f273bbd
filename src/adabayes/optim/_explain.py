"""Errors for arguments that people bring along from other optimizers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec

P = ParamSpec("P")

_INSTEAD = {
    "betas": "It has beta1, the first of them; in place of the second, the filter has a memory of its own.",
    "beta2": "The filter has a memory of its own in its place.",
    "eps": "Its place is taken by lr / lr_sgd, the gradient at which SGD gives way to Adam.",
    "amsgrad": "There is no such variant of it; AdaBound has one, amsbound=True.",
    "momentum": "Give lr_sgd = lr / (1 - momentum) of SGD's; the average over past gradients is beta1 or betas[0].",
    "learning_rate": "It is lr.",
    "weight_drift": "Give weight_decay = weight_drift / lr.",
}


def explain(cls: type, unknown: Sequence[str]) -> None:
    """Raise for arguments that are known from elsewhere, saying what takes their place."""
    if known := [name for name in unknown if name in _INSTEAD]:
        hints = " ".join(_INSTEAD[name] for name in known)
        raise TypeError(f"{cls.__name__} takes no {' and no '.join(known)}. {hints}")


def explains_unknown(init: Callable[P, None]) -> Callable[P, None]:
    """Let a constructor do so, where Python would only name them."""
    taken = inspect.signature(init).parameters

    @functools.wraps(init)
    def explained(*args: P.args, **given: P.kwargs) -> None:
        explain(type(args[0]), [name for name in given if name not in taken])
        init(*args, **given)

    return explained
