"""Conditional and repeated updates of arrays that stay conditional under ``vmap`` and can be differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def apply_if(condition: jax.Array, function: Callable[..., Any], operand: Any, *arguments: Any) -> Any:
    """Return ``function(operand, *arguments)`` if the condition holds, and ``operand`` otherwise.

    This is a loop of at most one iteration: XLA on the CPU updates the operand of a loop in place, but copies that of a
    ``lax.cond``.
    """
    times = jnp.asarray(condition, jnp.int32)
    return apply_times(times, lambda x, i, *xs: function(x, *xs), operand, *arguments, max_times=1)


def apply_times(times: jax.Array, function: Callable[..., Any], operand: Any, *arguments: Any, max_times: int) -> Any:
    """Return the operand after ``operand = function(operand, i, *arguments)`` for ``i`` from 0 to ``times`` - 1.

    Zero times cost nothing. Under ``vmap``, models may differ in ``times``: the loop ends with the last of them.

    Args:
        times: an integer, at most ``max_times``.
        function: a function that returns arrays of the structure, shapes and dtypes of ``operand``.
        operand: a pytree of arrays.
        arguments: further pytrees of arrays.
        max_times: the number of iterations of the derivative, which needs a constant.
    """

    # LAPACK has matrices in column-major order. If matrices entered the loop, XLA might store them in this order, and
    # transpose them at each step. Flat arrays have only one order.
    def call(i: jax.Array, flat: Any, flat_arguments: Any) -> Any:
        return _flatten(function(_unflatten(flat, operand), i, *_unflatten(flat_arguments, arguments)))

    def loop(times: jax.Array, flat: Any, flat_arguments: Any) -> Any:
        def body(i: jax.Array, flat: Any) -> Any:
            # XLA moves what does not depend on i out of the loop, where it would be computed even if there are zero
            # iterations. Behind the barrier, everything depends on i.
            i, barred = jax.lax.optimization_barrier((i, flat_arguments))  # type: ignore[no-untyped-call]
            return call(i, flat, barred)

        return jax.lax.fori_loop(0, times, body, flat)

    # Loops of variable length do not support reverse-mode differentiation.
    def scan(times: jax.Array, flat: Any, flat_arguments: Any) -> Any:
        def body(flat: Any, i: jax.Array) -> Any:
            return jax.lax.cond(i < times, lambda: call(i, flat, flat_arguments), lambda: flat), None

        return jax.lax.scan(body, flat, jnp.arange(max_times))[0]

    differentiable = jax.custom_jvp(loop)
    differentiable.defjvp(lambda primals, tangents: jax.jvp(scan, primals, tangents))
    return _unflatten(differentiable(times, _flatten(operand), _flatten(arguments)), operand)


def _flatten(arrays: Any) -> Any:
    return jax.tree.map(jnp.ravel, arrays)


def _unflatten(flat: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: x.reshape(jnp.shape(y)), flat, like)
