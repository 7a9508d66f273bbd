"""Numbers that an optimizer is given: Python's, NumPy's, or arrays that JAX traces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adabayes.rates import base_lr_of, lr_sgd_of, warn_if_swapped

Scalar = Any  # float | jax.Array
Rate = Any  # float | jax.Array | optax.Schedule


class Rates(NamedTuple):
    """The two learning rates that bound the gain, as the filter has them now."""

    lr: jax.Array
    lr_sgd: jax.Array

    @classmethod
    def of(cls, lr: Scalar, lr_sgd: Scalar) -> Rates:
        return cls(jnp.asarray(lr, jnp.float32), jnp.asarray(lr_sgd, jnp.float32))


def resolve_rates(
    learning_rate: Rate, base_lr: Scalar | None, lr_sgd: Scalar | None, ratio: float
) -> tuple[Scalar, Scalar]:
    """Return ``base_lr`` and ``lr_sgd``, each as given or by default."""
    learning_rate, base_lr, lr_sgd = map(plain, (learning_rate, base_lr, lr_sgd))
    check("learning_rate", learning_rate, 0, math.inf)
    check("base_lr", base_lr, 0, math.inf, above=True)
    check("lr_sgd", lr_sgd, 0, math.inf, above=True)
    if base_lr is None:
        base_lr = base_lr_of(float(learning_rate) if is_known(learning_rate) else None, lr_sgd, ratio)
    if lr_sgd is None:
        lr_sgd = lr_sgd_of(base_lr, ratio=ratio)
    if is_known(base_lr) and is_known(lr_sgd):
        warn_if_swapped(base_lr, lr_sgd)
    return base_lr, lr_sgd


def is_known(value: Any) -> bool:
    """Tell whether this is a number of Python; the value of a traced one cannot be known."""
    return isinstance(value, int | float)


def plain(value: Any) -> Any:
    """Convert NumPy's numbers to Python's; return all else as it is."""
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value


def check(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    """Refuse a known number that is out of range."""
    if not is_known(value):
        return
    if not (low < value if above else low <= value) or not value < high:
        span = f"{'above' if above else 'at least'} {low:g}" + ("" if high == math.inf else f" and below {high:g}")
        raise ValueError(f"Invalid {name}: {value}. It must be {span}.")


def caster(dtype: Any) -> Callable[[Scalar], Scalar]:
    """Return a function that keeps numbers from widening arrays: Python's do not, traced ones would."""
    return lambda value: value if is_known(value) else jnp.asarray(value, dtype)


def bias_correction(decay: Scalar, count: jax.Array) -> jax.Array:
    """Return ``1 - decay**count``, without cancellation."""
    if is_known(decay):
        logarithm: Scalar = math.log(decay) if decay else -math.inf
    else:
        logarithm = jnp.log(decay)
    return -jnp.expm1(count.astype(float) * logarithm)
