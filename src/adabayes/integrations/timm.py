"""For timm: our optimizers under their names, ``adabayesk``, ``adabayesfp`` and ``adabayes``.

``timm.optim.create_optimizer_v2(model, "adabayesk", lr=3e-3, weight_decay=0.05)`` then works, and so do timm's
``--opt adabayesk`` and its decay by layers.
"""

from __future__ import annotations

import inspect

try:
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry
except ImportError as error:
    raise ImportError("this module needs timm 1.0.12 or later: pip install 'timm>=1.0.12'") from error

from adabayes.optim import TWO_RATE_OPTIMIZERS

__all__ = ["register"]


def register() -> None:
    """Add our optimizers to timm's registry; a second call is a no-op."""
    for cls in TWO_RATE_OPTIMIZERS:
        # No underscores: timm takes the word before one as the name of a wrapper, as in "lookahead_adam".
        name, description = cls.__name__.lower(), (cls.__doc__ or "").partition("\n")[0]
        if name not in default_registry.list_optimizers():
            betas = "betas" in inspect.signature(cls).parameters  # AdaBayes takes beta1 instead
            default_registry.register(OptimInfo(name, cls, description, has_eps=False, has_betas=betas))
