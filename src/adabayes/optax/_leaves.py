"""Leaves of a tree of parameters: names, dtypes, and complex numbers as pairs of real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def is_none(leaf: Any) -> bool:
    """Tell whether a leaf is None, which JAX would otherwise treat as an empty tree."""
    return leaf is None


def is_weight(leaf: Any) -> bool:
    """Tell whether a leaf can be trained: real and complex numbers can, integers cannot."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def is_complex(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating))


def map_weights(function: Callable[..., Any], params: optax.Params, *trees: Any) -> optax.Updates:
    """Apply a function to each weight, and to the leaves of other trees. Mask leaves that are not weights."""
    return jax.tree.map(lambda p, *xs: function(p, *xs) if is_weight(p) else optax.MaskedNode(), params, *trees)


def name_of(path: Any) -> str:
    """Return the name of the leaf at a path, such as ``layers.0.kernel``."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return name.removesuffix(".value")  # Flax's nnx.Param adds it


def real_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of :func:`to_real`."""
    return (2, *jnp.shape(leaf)) if is_complex(leaf) else jnp.shape(leaf)


def to_real(x: jax.Array) -> jax.Array:
    """Stack real and imaginary parts, which are separate weights, along a new first axis. Keep real arrays."""
    return jnp.stack([x.real, x.imag]) if is_complex(x) else x


def to_complex(x: jax.Array) -> jax.Array:
    """Combine real and imaginary parts: the inverse of :func:`to_real` for complex numbers."""
    return jax.lax.complex(x[0], x[1])


def widen(dtype: Any) -> Any:
    """Return the dtype itself, or fp32 for real dtypes of lower precision."""
    return jnp.promote_types(dtype, jnp.float32)


def real_dtype(dtype: Any) -> Any:
    """Return the dtype in which to compute: that of the real and imaginary parts, and at least fp32."""
    return jnp.finfo(widen(dtype)).dtype  # type: ignore[no-untyped-call]


def smallest_normal(dtype: Any) -> float:
    """Return the smallest positive number of a dtype that has its full precision."""
    return float(jnp.finfo(dtype).tiny)  # type: ignore[no-untyped-call]


def check_dtype(name: str, dtype: Any, permitted: tuple[Any, ...] = ()) -> Any:
    """Return a dtype that was given as such, by name, or as the array into which ``inject_hyperparams`` converts it."""
    if dtype is None:
        return None
    try:
        checked = jnp.dtype(getattr(dtype, "dtype", dtype))
        if jnp.issubdtype(checked, jnp.inexact) and (not permitted or checked in map(jnp.dtype, permitted)):
            return checked
    except TypeError:
        pass
    names = ", ".join(jnp.dtype(p).name for p in permitted) or "a dtype of real or complex numbers"
    raise ValueError(f"Invalid {name}: {dtype!r}. It must be None (the parameters', fp32 at least) or {names}.")
