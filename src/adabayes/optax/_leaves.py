"""State of each leaf of a tree: which leaves are weights, in which precision state is kept, and how it is rounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adabayes.random_bits import carry_of, key_of


def is_weight(leaf: Any) -> bool:
    """Tell whether a leaf is to be trained: real numbers are, integers are not, complex ones are refused."""
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            "parameters are complex: give their parts a learning rate each, with "
            "optax.contrib.split_real_and_imaginary(...) around the optimizer"
        )
    return bool(jnp.issubdtype(dtype, jnp.floating))


def name_of(path: Any) -> str:
    """Return the name of the leaf at a path, such as ``layers.0.kernel``."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return name.removesuffix(".value")  # of Flax's nnx.Param


class Leaves:
    """Two arrays of state for each weight: ``mu``, the averaged gradient, and a second one."""

    def __init__(self, mu_dtype: Any, state_dtype: Any, seed: Any) -> None:
        self._dtype = _float_dtype("state_dtype", state_dtype, (jnp.bfloat16, jnp.float32, jnp.float64))
        self._mu_dtype = _float_dtype("mu_dtype", mu_dtype) or self._dtype
        self._seed = seed if isinstance(seed, int) else jnp.asarray(seed, jnp.uint32)

    def zeros(self, params: optax.Params) -> tuple[optax.Updates, optax.Updates]:
        """Return the state before the first step; a masked node for each leaf that is no weight."""

        def of(dtype: Any) -> optax.Updates:
            def leaf(p: Any) -> Any:
                if not is_weight(p):
                    return optax.MaskedNode()
                return jnp.zeros_like(p, _wide(jnp.result_type(p)) if dtype is None else dtype)

            return jax.tree.map(leaf, params)

        return of(self._mu_dtype), of(self._dtype)

    def update(
        self,
        leaf: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]],
        step: jax.Array,
        updates: optax.Updates,
        params: optax.Params | None,
        mu: optax.Updates,
        second: optax.Updates,
    ) -> list[optax.Updates]:
        """Return directions and new state: those of ``leaf(gradient, mu, second)`` where there is a gradient."""
        tree: Any
        gradients, tree = jax.tree.flatten(updates, is_leaf=lambda x: x is None)
        weights = gradients if params is None else tree.flatten_up_to(params)
        columns: tuple[list[Any], ...] = ([], [], [])
        rows = zip(gradients, tree.flatten_up_to(mu), tree.flatten_up_to(second), weights)
        for i, (g, m, s, p) in enumerate(rows):
            row = g, m, s
            if isinstance(m, optax.MaskedNode):
                row = _zero(g), m, s
            elif g is not None:
                p = g if p is None else p
                if not jnp.shape(g) == jnp.shape(p) == jnp.shape(s):
                    raise ValueError(_misshapen(updates, i, jnp.shape(p), jnp.shape(s)))
                wide = _wide(s.dtype)
                direction, mean, new = leaf(*(jnp.asarray(x, wide) for x in row))
                row = (
                    direction.astype(jnp.promote_types(jnp.result_type(g), jnp.result_type(p))),
                    self._rounded(mean, m.dtype, step, i, "exp_avg"),
                    self._rounded(new, s.dtype, step, i, "second"),
                )
            for column, entry in zip(columns, row):
                column.append(entry)
        return [tree.unflatten(column) for column in columns]

    def _rounded(self, values: jax.Array, dtype: Any, step: jax.Array, index: int, stream: str) -> jax.Array:
        if dtype != jnp.bfloat16:
            return values.astype(dtype)
        # bfloat16 is the upper half of float32; adding random bits to the lower rounds up as often as it should.
        values = values.astype(jnp.float32)
        strides = (math.prod(values.shape[axis + 1 :]) for axis in range(values.ndim))
        places = (jax.lax.broadcasted_iota(jnp.uint32, values.shape, axis) * s for axis, s in enumerate(strides))
        carry = carry_of(sum(places, jnp.uint32(0)), key_of(self._seed, index, step.astype(jnp.uint32)), stream)
        bits = (jax.lax.bitcast_convert_type(values, jnp.uint32) + carry) & jnp.uint32(0xFFFF0000)
        return jnp.where(jnp.isnan(values), values, jax.lax.bitcast_convert_type(bits, jnp.float32)).astype(dtype)


def _misshapen(updates: optax.Updates, index: int, of_parameter: tuple[int, ...], of_state: tuple[int, ...]) -> str:
    """Return the message for a gradient that would be broadcast, with the name that :func:`regimes` gives it."""
    path, gradient = jax.tree_util.tree_leaves_with_path(updates, is_leaf=lambda x: x is None)[index]
    shape = jnp.shape(gradient)
    if shape != of_parameter:
        other, remedy = f"its parameter {of_parameter}", "Give the gradient by each element, as jax.grad does."
    else:
        other, remedy = f"its state {of_state}", "Give gradients of the parameters that init() was given."
    return f"the gradient of {name_of(path) or 'the parameters'} has shape {shape}, {other}. {remedy}"


def _float_dtype(name: str, dtype: Any, permitted: tuple[Any, ...] = ()) -> Any:
    """Return a dtype, given as such, by name, or as the array that ``inject_hyperparams`` makes of it."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(getattr(dtype, "dtype", dtype))
        if jnp.issubdtype(found, jnp.floating) and (not permitted or found in map(jnp.dtype, permitted)):
            return found
    except TypeError:
        pass
    names = ", ".join(jnp.dtype(p).name for p in permitted) or "a floating-point dtype"
    raise ValueError(f"Invalid {name}: {dtype!r}. It must be None (the parameters', fp32 at least) or {names}.")


def _wide(dtype: Any) -> Any:
    """Return the precision in which to calculate."""
    return jnp.promote_types(dtype, jnp.float32)


def _zero(gradient: Any) -> Any:
    """Return the update of a leaf that is no weight. Nothing can be added to float0, the gradient of an integer."""
    if gradient is None:
        return None
    dtype = jnp.result_type(gradient)
    return jnp.zeros(jnp.shape(gradient), jnp.int32 if dtype == jax.dtypes.float0 else dtype)
