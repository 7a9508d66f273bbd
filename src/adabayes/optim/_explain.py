"""Errors for arguments that people bring along from other optimizers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")

_INSTEAD = {
    "betas": "It has beta1, the first of them; in place of the second, the filter has a memory of its own.",
    "beta2": "The filter has a memory of its own in its place.",
    "eps": "Its place is taken by lr / lr_sgd, the gradient at which SGD gives way to Adam.",
    "amsgrad": "There is no such variant of it; AdaBound has one, amsbound=True.",
    "momentum": "Give lr_sgd = lr / (1 - momentum) of SGD's; the average over past gradients is beta1 or betas[0].",
    "weight_drift": "Give weight_decay = weight_drift / lr.",
}


def explains_unknown(init: Callable[P, None]) -> Callable[P, None]:
    """Make a constructor say what takes the place of other optimizers' arguments, where Python only names them."""
    taken = inspect.signature(init).parameters

    @functools.wraps(init)
    def explained(*args: P.args, **given: P.kwargs) -> None:
        unknown = [name for name in given if name not in taken]
        if unknown:
            hints = " ".join(_INSTEAD[name] for name in unknown if name in _INSTEAD)
            raise TypeError(f"{type(args[0]).__name__} takes no {' and no '.join(unknown)}. {hints}".rstrip())
        init(*args, **given)

    return explained
