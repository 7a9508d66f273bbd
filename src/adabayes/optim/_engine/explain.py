"""Errors for arguments that users know from other optimizers, which say what replaces them here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec

__all__ = ["explain", "explains_unknown"]

P = ParamSpec("P")

_INSTEAD = {
    "betas": "It takes beta1, the first of them. The memory of the filter replaces the second.",
    "beta2": "The memory of the filter replaces it.",
    "eps": "lr / lr_sgd, the gradient at which SGD gives way to Adam, replaces it.",
    "amsgrad": "It has no such variant; AdaBound has one, amsbound=True.",
    "momentum": "Give lr_sgd = lr / (1 - momentum), with SGD's lr; beta1 or betas[0] averages past gradients.",
    "learning_rate": "It is lr.",
    "capturable": "A graph cannot capture the refreshes of its bases; use AdaBayesFP.",
    "differentiable": "Autograd cannot follow its bases; use AdaBayesFP.",
    "weight_drift": "Give weight_decay = weight_drift / lr.",
}


def explain(cls: type, unknown: Sequence[str]) -> None:
    """Raise for arguments that exist in other optimizers, and say what replaces them here."""
    if known := [name for name in unknown if name in _INSTEAD]:
        hints = " ".join(_INSTEAD[name] for name in known)
        raise TypeError(f"{cls.__name__} takes no {' and no '.join(known)}. {hints}")


def explains_unknown(init: Callable[P, None]) -> Callable[P, None]:
    """Make a constructor explain unknown arguments, which Python would only name."""
    taken = inspect.signature(init).parameters

    @functools.wraps(init)
    def explained(*args: P.args, **given: P.kwargs) -> None:
        explain(type(args[0]), [name for name in given if name not in taken])
        init(*args, **given)

    return explained
