"""Packages an optimizer: chains its directions with decoupled weight decay and the learning rate."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax

from adabayes.optax._leaves import is_none, is_weight
from adabayes.optax._settings import Scalar, ScalarOrSchedule, cast_to, check_range, is_known, to_python
from adabayes.rates import warn_if_papers


def chain(
    directions: optax.GradientTransformation,
    learning_rate: ScalarOrSchedule,
    base_lr: Scalar | None,
    weight_decay: Scalar,
    mask: Any,
) -> optax.GradientTransformation:
    """Return an optimizer that moves along the given directions. Its state always has three entries."""
    learning_rate, base_lr, weight_decay = map(to_python, (learning_rate, base_lr, weight_decay))
    check_range("weight_decay", weight_decay, 0, math.inf)
    base = learning_rate if base_lr is None else base_lr
    if is_known(base) and is_known(weight_decay):
        warn_if_papers(base, weight_decay)
    decay = optax.stateless(lambda updates, params: _add_decay(updates, params, weight_decay))
    return optax.chain(
        directions,
        decay if mask is None else optax.masked(decay, mask),
        _restrict_to_weights(optax.scale_by_learning_rate(learning_rate)),
    )


def _add_decay(updates: optax.Updates, params: optax.Params | None, weight_decay: Scalar) -> optax.Updates:
    if is_known(weight_decay) and weight_decay == 0:
        return updates
    if params is None:
        raise ValueError("Weight decay needs the parameters. Call update(gradients, state, params).")

    def add(u: Any, p: Any) -> Any:
        return u if u is None or not is_weight(u) else u + cast_to(u.dtype)(weight_decay) * p

    return jax.tree.map(add, updates, params, is_leaf=is_none)


def _restrict_to_weights(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a transformation to weights only. Other updates, such as those of integers, stay unchanged."""

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[optax.Updates, Any]:
        transformed, state = inner.update(updates, state, params)

        def choose(before: Any, after: Any) -> Any:
            return after if before is None or is_weight(before) else before

        return jax.tree.map(choose, updates, transformed, is_leaf=is_none), state

    return optax.GradientTransformation(inner.init, update)
