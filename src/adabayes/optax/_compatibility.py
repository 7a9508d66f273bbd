"""Loads states that were pickled by versions 0.1 and 0.2.

A pickle names the module of each class. Version 0.1 defined all classes in ``adabayes.optax`` itself. Version 0.2
defined :class:`Rates` in ``adabayes.optax._numbers``. Both modules still provide it, from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from adabayes.optax._rates import Rates as Rates

if TYPE_CHECKING:
    from adabayes.optax._adabayes import ScaleByAdaBayesState


def stored_base_lr(state: ScaleByAdaBayesState) -> jax.Array:
    """Return the base learning rate that a state stores. Version 0.1 stored none, but its filter ran at that rate."""
    return state.rates.lr if state.base_lr is None else state.base_lr
