"""For timm: our optimizers under their names, ``adabayesk``, ``adabayesfp`` and ``adabayes``.

``timm.optim.create_optimizer_v2(model, "adabayesk", lr=3e-3, weight_decay=0.05)`` then works, and so do timm's
``--opt adabayesk`` and its decay by layers.
"""

from __future__ import annotations

try:
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry
except ImportError as error:
    raise ImportError("this module needs timm 1.0.12 or later: pip install 'timm>=1.0.12'") from error

from adabayes.optim import AdaBayes, AdaBayesFP, AdaBayesK

__all__ = ["register"]


def register() -> None:
    """Add our optimizers to timm's registry; a second call changes nothing."""
    # No underscores: timm takes what comes before one for a wrapper, as in "lookahead_adam".
    for name, cls, description in (
        ("adabayesk", AdaBayesK, "Bayesian filtering of whole matrices, in their eigenbasis"),
        ("adabayesfp", AdaBayesFP, "Bayesian filtering of each weight, at the filter's fixed point"),
        ("adabayes", AdaBayes, "Bayesian filtering of each weight"),
    ):
        if name not in default_registry.list_optimizers():
            betas = cls is not AdaBayes  # which takes beta1
            default_registry.register(OptimInfo(name, cls, description, has_eps=False, has_betas=betas))
