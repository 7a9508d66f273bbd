"""Shardings of state whose shape differs from that of its parameter."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

REPLICATED: Any = PartitionSpec()  # type: ignore[no-untyped-call]


def replicate_like(x: jax.Array, p: Any) -> jax.Array:
    """Replicate a new array over all devices of a parameter, which is where a jitted step would put it."""
    if isinstance(p, jax.core.Tracer) or not isinstance(p, jax.Array):
        return x
    sharding: Any = p.sharding if p.committed else None
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, REPLICATED)
    replicated: jax.Array = x if sharding is None else jax.device_put(x, sharding)
    return replicated


def unshard(x: jax.Array) -> jax.Array:
    """Gather an array whose sharding is part of its type, as on meshes with explicit axes.

    The compiler shards all other arrays; they stay unchanged.
    """
    sharding = _explicit_sharding(x)
    return x if sharding is None else _reshard(x, NamedSharding(sharding.mesh, REPLICATED))


def shard_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Shard an unsharded array like another one: the inverse of :func:`unshard`."""
    sharding = _explicit_sharding(like)
    return x if sharding is None else _reshard(x, sharding)


def _reshard(x: jax.Array, sharding: Any) -> jax.Array:
    resharded: jax.Array = jax.sharding.reshard(x, sharding)  # type: ignore[no-untyped-call]
    return resharded


def _explicit_sharding(x: jax.Array) -> Any:
    """Return the sharding that is part of an array's type. Return None if there is none, or if it splits no axis."""
    if not hasattr(jax, "typeof"):  # JAX before 0.6 has no explicit axes
        return None
    sharding = getattr(jax.typeof(x), "sharding", None)
    return sharding if sharding is not None and any(sharding.spec) else None
