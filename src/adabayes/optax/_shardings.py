"""Shardings of state whose shape differs from that of its parameter."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

REPLICATED: Any = PartitionSpec()  # type: ignore[no-untyped-call]


def distribute_like(x: jax.Array, p: Any, axes: tuple[int, ...]) -> jax.Array:
    """Distribute a new array of state over the devices of a parameter.

    The mesh axes that split the parameter split the array, too: along the first of ``axes`` whose size their number of
    devices divides. If they divide none of these sizes, the array is replicated.
    """
    if isinstance(p, jax.core.Tracer):
        explicit = _explicit_sharding(p)
        return x if explicit is None else _reshard(x, _split(explicit, x.shape, axes))
    if not isinstance(p, jax.Array) or not p.committed:
        return x
    sharding: Any = p.sharding
    distributed: jax.Array = jax.device_put(
        x, _split(sharding, x.shape, axes) if isinstance(sharding, NamedSharding) else sharding
    )
    return distributed


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


def _split(sharding: NamedSharding, shape: tuple[int, ...], axes: tuple[int, ...]) -> NamedSharding:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec if entry is not None]
    names = tuple(name for entry in entries for name in entry)
    count = math.prod(sharding.mesh.shape[name] for name in names)
    axis = next((axis for axis in axes if shape[axis] % count == 0), None)
    spec = [names if names and i == axis else None for i in range(len(shape))]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]


def _reshard(x: jax.Array, sharding: Any) -> jax.Array:
    resharded: jax.Array = jax.sharding.reshard(x, sharding)  # type: ignore[no-untyped-call]
    return resharded


def _explicit_sharding(x: jax.Array) -> Any:
    """Return the sharding that is part of an array's type. Return None if there is none, or if it splits no axis."""
    if not hasattr(jax, "typeof"):  # JAX before 0.6 has no explicit axes
        return None
    sharding = getattr(jax.typeof(x), "sharding", None)
    return sharding if sharding is not None and any(sharding.spec) else None
