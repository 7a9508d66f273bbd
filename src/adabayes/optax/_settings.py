"""Settings of an optimizer, given as Python numbers, NumPy numbers or arrays that JAX traces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Scalar = Any  # float | jax.Array
ScalarOrSchedule = Any  # float | jax.Array | optax.Schedule


def is_known(value: Any) -> bool:
    """Tell whether a setting is a Python number. The value of a traced array is unknown."""
    return isinstance(value, int | float)


def to_python(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number. Return anything else unchanged."""
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value


def value_at(setting: ScalarOrSchedule, count: jax.Array) -> Scalar:
    """Return the value of a schedule after ``count`` updates, or the setting itself if it is constant."""
    return setting(count) if callable(setting) else setting


def check_range(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise if a known number is outside of ``[low, high)``, or of ``(low, high)`` if ``open_low`` is true."""
    if not is_known(value):
        return
    if not (low < value if open_low else low <= value) or not value < high:
        span = f"{'above' if open_low else 'at least'} {low:g}" + ("" if high == math.inf else f" and below {high:g}")
        raise ValueError(f"Invalid {name}: {value}. It must be {span}.")


def check_integer(name: str, value: Any, least: int = 1) -> int:
    """Return an integer of at least ``least``. Refuse traced arrays: the compiled program depends on the value."""
    value = to_python(value)
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} is traced, but it decides what is compiled. With optax.inject_hyperparams, leave it out or pass "
            f'static_args=("{name}",).'
        )
    if isinstance(value, bool) or not is_known(value) or value != value // 1 or value < least:
        raise ValueError(f"Invalid {name}: {value!r}. It must be an integer, at least {least}.")
    return int(value)


def cast_to(dtype: Any) -> Callable[[Scalar], Scalar]:
    """Return a function that converts traced scalars to a dtype.

    A traced float64 scalar would promote float32 arrays to float64. Python numbers promote nothing and stay unchanged.
    """
    return lambda value: value if is_known(value) else jnp.asarray(value, dtype)


def bias_correction(decay: Scalar, count: jax.Array) -> jax.Array:
    """Return ``1 - decay**count`` without cancellation, which would leave four correct digits of 1 - 0.999 in fp32."""
    if is_known(decay):
        logarithm: Scalar = math.log(decay) if decay else -math.inf
    else:
        logarithm = jnp.log(decay)
    return -jnp.expm1(count.astype(float) * logarithm)
