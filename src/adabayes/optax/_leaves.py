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
    """Tell whether a leaf is to be trained: real and complex numbers are, integers are not."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def is_complex(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating))


def real_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of an array of weights; the two parts of a complex number are separate weights."""
    return (2, *jnp.shape(leaf)) if is_complex(leaf) else jnp.shape(leaf)


def wide_real(dtype: Any) -> Any:
    """Return the precision in which to compute: that of the parts of complex numbers, and at least fp32."""
    return jnp.finfo(_wide(dtype)).dtype  # type: ignore[no-untyped-call]


def real_view(x: jax.Array) -> jax.Array:
    """Return the parts of complex numbers along a first axis, and real ones as they are."""
    return jnp.stack([x.real, x.imag]) if is_complex(x) else x


def name_of(path: Any) -> str:
    """Return the name of the leaf at a path, such as ``layers.0.kernel``."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return name.removesuffix(".value")  # of Flax's nnx.Param


class Leaves:
    """State of each weight: ``mu``, the averaged gradient, a second number, and what else an optimizer has for a leaf.

    ``mu`` and the second number have the shape of their parameter. Those of a complex one are complex, too, unless a
    real dtype was asked for: then its parts are along a first axis.
    """

    def __init__(self, mu_dtype: Any, state_dtype: Any, seed: Any) -> None:
        self._dtype = _float_dtype("state_dtype", state_dtype, (jnp.bfloat16, jnp.float32, jnp.float64))
        self._mu_dtype = _float_dtype("mu_dtype", mu_dtype) or self._dtype
        self._seed = seed if isinstance(seed, int) else jnp.asarray(seed, jnp.uint32)

    def zeros(self, params: optax.Params) -> tuple[optax.Updates, optax.Updates]:
        """Return the state before the first step."""

        def of(dtype: Any) -> optax.Updates:
            def leaf(p: Any) -> jax.Array:
                kind = _wide(jnp.result_type(p)) if dtype is None else dtype
                zeros = jnp.zeros_like(p, kind)
                if is_complex(p) and not jnp.issubdtype(kind, jnp.complexfloating):
                    zeros = jnp.stack([zeros, zeros])
                return zeros

            return self.of_weights(leaf, params)

        return of(self._mu_dtype), of(self._dtype)

    @staticmethod
    def of_weights(leaf: Callable[[Any], Any], params: optax.Params) -> optax.Updates:
        """Return a result for each leaf; a masked node for one that is not a weight."""
        return jax.tree.map(lambda p: leaf(p) if is_weight(p) else optax.MaskedNode(), params)

    def update(
        self,
        leaf: Callable[..., tuple[Any, ...]],
        step: jax.Array,
        updates: optax.Updates,
        params: optax.Params | None,
        mu: optax.Updates,
        second: optax.Updates,
        *others: Any,
    ) -> list[optax.Updates]:
        """Return directions and new state: those of ``leaf(gradient, mu, second, *others)`` where there is a gradient.

        ``leaf`` works with real numbers, of fp32 at least.
        """
        tree: Any
        gradients, tree = jax.tree.flatten(updates, is_leaf=lambda x: x is None)
        weights = gradients if params is None else tree.flatten_up_to(params)
        columns: tuple[list[Any], ...] = tuple([] for _ in range(3 + len(others)))
        rows = zip(weights, gradients, *map(tree.flatten_up_to, (mu, second, *others)))
        for i, (p, *row) in enumerate(rows):
            g, m, s, *rest = row
            if isinstance(m, optax.MaskedNode):
                row = [_zero(g), m, s, *rest]
            elif g is not None:
                row = self._updated(leaf, step, updates, i, g if p is None else p, row)
            for column, entry in zip(columns, row):
                column.append(entry)
        return [tree.unflatten(column) for column in columns]

    def _updated(
        self, leaf: Callable[..., tuple[Any, ...]], step: jax.Array, updates: Any, i: int, p: Any, row: list[Any]
    ) -> list[Any]:
        g, m, s, *rest = row
        dtype = jnp.promote_types(jnp.result_type(g), jnp.result_type(p))
        parts = jnp.issubdtype(dtype, jnp.complexfloating)
        shape = s.shape[1:] if parts and not is_complex(s) else s.shape
        if not jnp.shape(g) == jnp.shape(p) == shape:
            raise ValueError(_misshapen(updates, i, jnp.shape(p), shape))
        wide = wide_real(s.dtype)

        def taken(x: Any, kind: Any) -> jax.Array:
            """Convert numbers to the form in which ``leaf`` works."""
            x = jnp.asarray(x, kind)
            return (real_view(x) if parts else x.real).astype(wide)

        direction, mean, new, *rest = leaf(taken(g, dtype), taken(m, m.dtype), taken(s, s.dtype), *rest)
        return [
            (_complex_view(direction) if parts else direction).astype(dtype),
            self._rounded(mean, m.dtype, parts, step, i, "exp_avg"),
            self._rounded(new, s.dtype, parts, step, i, "second"),
            *rest,
        ]

    def _rounded(
        self, values: jax.Array, dtype: Any, parts: bool, step: jax.Array, index: int, stream: str
    ) -> jax.Array:
        if parts and jnp.issubdtype(dtype, jnp.complexfloating):
            values = _complex_view(values)
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
        if jnp.issubdtype(found, jnp.inexact) and (not permitted or found in map(jnp.dtype, permitted)):
            return found
    except TypeError:
        pass
    names = ", ".join(jnp.dtype(p).name for p in permitted) or "a dtype of real or complex numbers"
    raise ValueError(f"Invalid {name}: {dtype!r}. It must be None (the parameters', fp32 at least) or {names}.")


def _complex_view(x: jax.Array) -> jax.Array:
    return jax.lax.complex(x[0], x[1])


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _zero(gradient: Any) -> Any:
    """Return the update of a leaf that is not a weight. float0, the gradient of an integer, permits no addition."""
    if gradient is None:
        return None
    dtype = jnp.result_type(gradient)
    return jnp.zeros(jnp.shape(gradient), jnp.int32 if dtype == jax.dtypes.float0 else dtype)
