"""Stores the state of each weight: applies an update rule to every leaf, and converts between their dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adabayes.optax._leaves import (
    check_dtype,
    is_complex,
    is_none,
    map_weights,
    name_of,
    real_dtype,
    to_complex,
    to_real,
    widen,
)
from adabayes.optax._rounding import convert

Rule = Callable[..., tuple[Any, ...]]


class Storage:
    """Stores two numbers for each weight: ``mu``, the averaged gradient, and a second one, such as the gain.

    Both have the shape of their parameter, or that of its blocks. Those of complex parameters are complex, unless a
    real dtype was given: then real and imaginary parts are stacked along a new first axis.
    """

    def __init__(self, mu_dtype: Any, state_dtype: Any, seed: Any) -> None:
        self._dtype = check_dtype("state_dtype", state_dtype, (jnp.bfloat16, jnp.float32, jnp.float64))
        self._mu_dtype = check_dtype("mu_dtype", mu_dtype) or self._dtype
        self._seed = seed if isinstance(seed, int) else jnp.asarray(seed, jnp.uint32)

    def zeros(
        self, params: optax.Params, *trees: Any, create: Callable[..., jax.Array] | None = None
    ) -> tuple[optax.Updates, optax.Updates]:
        """Return both trees of state before the first step.

        Args:
            params: tree of parameters.
            trees: trees of further arguments of ``create``.
            create: ``create(parameter, dtype, *arguments)`` returns zeros. The default is :func:`create_zeros`.
        """

        def fill(dtype: Any, p: Any, *arguments: Any) -> jax.Array:
            return (create or create_zeros)(p, dtype or widen(jnp.result_type(p)), *arguments)

        mu, second = (map_weights(partial(fill, dtype), params, *trees) for dtype in (self._mu_dtype, self._dtype))
        return mu, second

    def update(
        self,
        rule: Rule,
        step: jax.Array,
        updates: optax.Updates,
        params: optax.Params | None,
        state: Sequence[Any],
        constants: Sequence[Any] = (),
        state_shape: Callable[..., tuple[int, ...] | None] = lambda *constants: None,
    ) -> list[optax.Updates]:
        """Apply an update rule to each leaf that has a gradient. Return the directions and the new state.

        Args:
            rule: ``rule(gradient, mu, second, *others, *constants)`` returns the direction and the new state of a leaf,
                ``mu, second, *others``. Gradient, direction, ``mu`` and ``second`` are real arrays of at least fp32.
            step: the number of this step, from 1.
            updates: tree of gradients.
            params: tree of parameters.
            state: the trees ``mu``, ``second`` and any others.
            constants: trees of further inputs of the rule.
            state_shape: ``state_shape(*constants)`` returns the shape of a leaf's ``second``, or None if it is that of
                the parameter.
        """
        tree: Any
        gradients, tree = jax.tree.flatten(updates, is_leaf=is_none)
        weights = gradients if params is None else tree.flatten_up_to(params)
        state_columns, constant_columns = (list(map(tree.flatten_up_to, trees)) for trees in (state, constants))
        results: list[list[Any]] = [[] for _ in range(1 + len(state_columns))]
        for index, (g, p) in enumerate(zip(gradients, weights)):
            old = [column[index] for column in state_columns]
            if isinstance(old[0], optax.MaskedNode):
                row = [_zero_update(g), *old]
            elif g is None:
                row = [None, *old]
            else:
                p = g if p is None else p
                constant = [column[index] for column in constant_columns]
                _check_shapes(updates, index, g, p, old[1], state_shape(*constant))
                row = self._update_leaf(rule, step, index, g, p, old, constant)
            for column, entry in zip(results, row):
                column.append(entry)
        return [tree.unflatten(column) for column in results]

    def _update_leaf(
        self, rule: Rule, step: jax.Array, index: int, g: Any, p: Any, state: list[Any], constants: list[Any]
    ) -> list[Any]:
        mu, second, *others = state
        dtype = jnp.promote_types(jnp.result_type(g), jnp.result_type(p))
        is_pair = jnp.issubdtype(dtype, jnp.complexfloating)  # complex weights are pairs of real ones
        compute_dtype = real_dtype(second.dtype)

        def load(x: Any, dtype: Any) -> jax.Array:
            x = jnp.asarray(x, dtype)
            return (to_real(x) if is_pair else x.real).astype(compute_dtype)

        def store(x: jax.Array, dtype: Any, stream: str) -> jax.Array:
            is_stored_complex = is_pair and jnp.issubdtype(dtype, jnp.complexfloating)
            return convert(to_complex(x) if is_stored_complex else x, dtype, self._seed, index, step, stream)

        direction, new_mu, new_second, *others = rule(
            load(g, dtype), load(mu, mu.dtype), load(second, second.dtype), *others, *constants
        )
        return [
            (to_complex(direction) if is_pair else direction).astype(dtype),
            store(new_mu, mu.dtype, "exp_avg"),
            store(new_second, second.dtype, "second"),
            *others,
        ]


def create_zeros(p: Any, dtype: Any) -> jax.Array:
    """Return zeros in the shape of a parameter. Stack the parts of a complex parameter if the dtype is real."""
    zeros = jnp.zeros_like(p, dtype)
    is_stacked = is_complex(p) and not is_complex(zeros)
    return jnp.stack([zeros, zeros]) if is_stacked else zeros


def _check_shapes(
    updates: optax.Updates, index: int, g: Any, p: Any, second: jax.Array, expected: tuple[int, ...] | None
) -> None:
    """Raise if a gradient would be broadcast. The message names the leaf as :func:`regimes` does."""
    is_stacked = expected is None and (is_complex(g) or is_complex(p)) and not is_complex(second)
    state_shape = second.shape[1:] if is_stacked else second.shape
    shape, weight_shape = jnp.shape(g), jnp.shape(p)
    if shape == weight_shape and state_shape == (shape if expected is None else expected):
        return
    path, _ = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_none)[index]
    if shape != weight_shape:
        other = f"parameter has shape {weight_shape}. Pass one number per element, as jax.grad returns them."
    else:
        blocks = "" if expected is None else f", not that of its blocks, {expected}"
        other = f"state has shape {state_shape}{blocks}. Pass gradients of the parameters that were passed to init()."
    raise ValueError(f"The gradient of {name_of(path) or 'the parameters'} has shape {shape}, but its {other}")


def _zero_update(gradient: Any) -> Any:
    """Return the update of a leaf that is not a weight. Integers have float0 gradients, which cannot be added."""
    if gradient is None:
        return None
    dtype = jnp.result_type(gradient)
    return jnp.zeros(jnp.shape(gradient), jnp.int32 if dtype == jax.dtypes.float0 else dtype)
