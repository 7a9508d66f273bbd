"""Arrays over several devices: the place of state that has another shape than its parameter."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

WHOLE: Any = PartitionSpec()  # type: ignore[no-untyped-call]


def beside(p: Any, x: jax.Array) -> jax.Array:
    """Put a new array on all devices of a parameter, which is where a jitted step leaves it."""
    if isinstance(p, jax.core.Tracer) or not isinstance(p, jax.Array):
        return x
    place: Any = p.sharding if p.committed else None
    if isinstance(place, NamedSharding):
        place = NamedSharding(place.mesh, WHOLE)
    moved: jax.Array = x if place is None else jax.device_put(x, place)
    return moved


def whole(x: jax.Array) -> jax.Array:
    """Gather an array whose sharding is part of its type, as on meshes with explicit axes.

    All others are left to the compiler.
    """
    sharding = _explicit(x)
    return x if sharding is None else _resharded(x, NamedSharding(sharding.mesh, WHOLE))


def split_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Do the opposite of :func:`whole`."""
    sharding = _explicit(like)
    return x if sharding is None else _resharded(x, sharding)


def _resharded(x: jax.Array, sharding: Any) -> jax.Array:
    moved: jax.Array = jax.sharding.reshard(x, sharding)  # type: ignore[no-untyped-call]
    return moved


def _explicit(x: jax.Array) -> Any:
    """Return the sharding that is part of the type of an array, if it is split at all."""
    if not hasattr(jax, "typeof"):  # before JAX 0.6, there are none
        return None
    sharding = getattr(jax.typeof(x), "sharding", None)
    return sharding if sharding is not None and any(sharding.spec) else None
