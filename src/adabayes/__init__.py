"""Training a neural network as Bayesian filtering: optimizers that move by themselves between SGD and AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adabayes.optim import AdaBayes, AdaBayesFP, AdaBound

__all__ = ["AdaBayes", "AdaBayesFP", "AdaBound", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The optimizers, with torch, once they are asked for: ``adabayes.optax`` needs none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from adabayes import optim

    return globals().setdefault(name, getattr(optim, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
