"""Conditional and repeated updates of arrays that stay conditional under ``vmap`` and can be differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def apply_if(condition: jax.Array, function: Callable[..., Any], operand: Any, *arguments: Any) -> Any:
    """Return ``function(operand, *arguments)`` if the condition holds, and ``operand`` otherwise.

    ``vmap`` converts a ``lax.cond`` with a batched condition to a ``select``, which computes both branches. This
    function keeps a ``lax.cond``, on whether the condition holds for *any* model. Usually it holds for all or none of
    them, because they are at the same step.

    Args:
        condition: a boolean scalar.
        function: a function that returns arrays of the structure, shapes and dtypes of ``operand``.
        operand: a pytree of arrays.
        arguments: further pytrees of arrays.
    """

    def call_cond(condition: jax.Array, operand: Any, *arguments: Any) -> Any:
        # LAPACK returns matrices in column-major order. If matrices left the ``cond``, XLA would transpose those of the
        # other branch at each step. Flat arrays have only one order.
        return jax.lax.cond(
            condition, lambda x, *xs: _flatten(function(x, *xs)), lambda x, *_: _flatten(x), operand, *arguments
        )

    batchable = jax.custom_batching.custom_vmap(call_cond)

    @batchable.def_vmap
    def call_batched(size: int, batched: Any, condition: jax.Array, *inputs: Any) -> Any:
        operand, *arguments = jax.tree.map(
            lambda x, is_batched: x if is_batched else jnp.broadcast_to(x, (size, *x.shape)), inputs, tuple(batched[1:])
        )

        def apply_where(operand: Any, conditions: jax.Array, *arguments: Any) -> Any:
            def select(after: jax.Array, before: jax.Array) -> jax.Array:
                return jnp.where(conditions.reshape(-1, *[1] * (after.ndim - 1)), after, before)

            return jax.tree.map(select, jax.vmap(function)(operand, *arguments), operand)

        conditions = jnp.broadcast_to(condition, (size,))
        result = apply_if(condition.any(), apply_where, operand, conditions, *arguments)
        return jax.tree.map(lambda x: x.reshape(size, -1), result), jax.tree.map(lambda _: True, result)

    # ``custom_vmap`` does not support reverse-mode differentiation. The derivative is that of ``lax.cond``.
    differentiable = jax.custom_jvp(batchable)
    differentiable.defjvp(lambda primals, tangents: jax.jvp(call_cond, primals, tangents))
    flat = differentiable(condition, operand, *arguments)
    return _unflatten(flat, operand)


def apply_times(times: jax.Array, function: Callable[..., Any], operand: Any, *arguments: Any, max_times: int) -> Any:
    """Return the operand after ``operand = function(operand, i, *arguments)`` for ``i`` from 0 to ``times`` - 1.

    Zero times cost nothing.

    Args:
        times: an integer, at most ``max_times``.
        function: a function that returns arrays of the structure, shapes and dtypes of ``operand``.
        operand: a pytree of arrays.
        arguments: further pytrees of arrays.
        max_times: the number of iterations of the derivative, which needs a constant.
    """

    def call(i: jax.Array, flat: Any, *arguments: Any) -> Any:
        return _flatten(function(_unflatten(flat, operand), i, *arguments))

    def loop(times: jax.Array, flat: Any, *arguments: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda i, flat: call(i, flat, *arguments), flat)

    def scan(times: jax.Array, flat: Any, *arguments: Any) -> Any:
        def body(flat: Any, i: jax.Array) -> Any:
            return jax.lax.cond(i < times, lambda: call(i, flat, *arguments), lambda: flat), None

        return jax.lax.scan(body, flat, jnp.arange(max_times))[0]

    differentiable = jax.custom_jvp(loop)
    differentiable.defjvp(lambda primals, tangents: jax.jvp(scan, primals, tangents))
    return _unflatten(differentiable(times, _flatten(operand), *arguments), operand)


def _unflatten(flat: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: x.reshape(y.shape), flat, like)


def _flatten(arrays: Any) -> Any:
    return jax.tree.map(jnp.ravel, arrays)
