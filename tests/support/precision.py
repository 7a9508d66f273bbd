"""Float64 in JAX, whose default is fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.experimental


def enable_x64(new_val: bool) -> AbstractContextManager[Any]:
    """Permit 64 bits, or not, within a with-block."""
    # On Python 3.10 the newest JAX has it in jax.experimental only.
    place: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    context: AbstractContextManager[Any] = place.enable_x64(new_val)
    return context
