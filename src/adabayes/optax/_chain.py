"""Packages an optimizer: its directions, then decoupled weight decay, then the learning rate."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax

from adabayes.optax._leaves import is_weight
from adabayes.optax._numbers import Rate, Scalar, caster, check, is_known, plain
from adabayes.rates import warn_if_papers


def chain(
    directions: optax.GradientTransformation,
    learning_rate: Rate,
    base_lr: Scalar | None,
    weight_decay: Scalar,
    mask: Any,
) -> optax.GradientTransformation:
    """Return the whole optimizer."""
    learning_rate, base_lr, weight_decay = map(plain, (learning_rate, base_lr, weight_decay))
    check("weight_decay", weight_decay, 0, math.inf)
    base = learning_rate if base_lr is None else base_lr
    if is_known(base) and is_known(weight_decay):
        warn_if_papers(base, weight_decay)
    decay = optax.stateless(lambda updates, params: _decayed(updates, params, weight_decay))
    return optax.chain(
        directions,
        decay if mask is None else optax.masked(decay, mask),
        _of_weights(optax.scale_by_learning_rate(learning_rate)),
    )


def _decayed(updates: optax.Updates, params: optax.Params | None, weight_decay: Scalar) -> optax.Updates:
    if is_known(weight_decay) and weight_decay == 0:
        return updates
    if params is None:
        raise ValueError("weight decay needs the parameters: update(gradients, state, params)")

    def leaf(u: Any, p: Any) -> Any:
        return u if u is None or not is_weight(u) else u + caster(u.dtype)(weight_decay) * p

    return jax.tree.map(leaf, updates, params, is_leaf=lambda x: x is None)


def _of_weights(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Restrict a transformation to weights: other updates stay as they are."""

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[optax.Updates, Any]:
        changed, state = inner.update(updates, state, params)

        def leaf(before: Any, after: Any) -> Any:
            return after if before is None or is_weight(before) else before

        return jax.tree.map(leaf, updates, changed, is_leaf=lambda x: x is None), state

    return optax.GradientTransformation(inner.init, update)
