"""A conditional update of arrays that stays conditional under ``vmap`` and can be differentiated."""

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
    return jax.tree.map(lambda x, like: x.reshape(like.shape), flat, operand)


def _flatten(arrays: Any) -> Any:
    return jax.tree.map(jnp.ravel, arrays)
