"""Training a neural network as Bayesian filtering: optimizers that move by themselves between SGD and AdamW."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adabayes.optim import AdaBayes, AdaBayesFP, AdaBayesK, AdaBound
    from adabayes.optim.param_groups import param_groups

__all__ = ["AdaBayes", "AdaBayesFP", "AdaBayesK", "AdaBound", "__version__", "param_groups"]
__version__ = "0.2.0"


_MODULES = ("diagnostics", "filtering", "integrations", "optax", "optim", "reference")


def __getattr__(name: str) -> Any:
    """Import an optimizer, and with it torch, or a module on first access: ``adabayes.optax`` needs no torch."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(f"{__name__}.optim"), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
