"""The numbers given to an optimizer: Python's, NumPy's, or arrays that JAX traces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adabayes.rates import USUAL_LR, warn_if_closed, warn_if_swapped

Scalar = Any  # float | jax.Array
Rate = Any  # float | jax.Array | optax.Schedule


class Rates(NamedTuple):
    """The two learning rates that bound the gain, as the filter has them now."""

    lr: jax.Array
    lr_sgd: jax.Array

    @classmethod
    def of(cls, lr: Scalar, lr_sgd: Scalar) -> Rates:
        return cls(jnp.asarray(lr, float), jnp.asarray(lr_sgd, float))


class TwoRates:
    """``base_lr`` and ``lr_sgd``, each as given or by default.

    The base of a learning rate that is a schedule or traced is its first value. Only ``init`` knows it, so the state
    keeps it; thus ``inject_hyperparams`` gives the same result as a plain number.
    """

    def __init__(self, learning_rate: Rate, base_lr: Scalar | None, lr_sgd: Scalar | None, ratio: float) -> None:
        self._lr, self._base_lr, self._lr_sgd = map(plain, (learning_rate, base_lr, lr_sgd))
        self._ratio = ratio
        check("learning_rate", self._lr, 0, math.inf)
        check("base_lr", self._base_lr, 0, math.inf, above=True)
        check("lr_sgd", self._lr_sgd, 0, math.inf, above=True)
        if self._base_lr is None and is_known(self._lr):
            self._base_lr = float(self._lr) or USUAL_LR
        if is_known(self._base_lr) and is_known(self._lr_sgd):
            warn_if_swapped(self._base_lr, self._lr_sgd)

    def warn_if_closed(self, batch_size: Scalar | None) -> None:
        """Warn if AdaBayes is Adam-like for hardly any gradients, as far as that is known."""
        if is_known(self._base_lr) and is_known(batch_size):
            base_lr, lr_sgd = self.of(None)
            if is_known(lr_sgd):
                warn_if_closed(base_lr, lr_sgd, batch_size)

    def initial(self) -> Rates:
        """Return the rates of a new state."""
        return Rates.of(*self.of(None))

    def of(self, kept: Scalar | None) -> tuple[Scalar, Scalar]:
        """Return ``base_lr`` and ``lr_sgd``; ``kept`` is the base that the state has, None before there is one."""
        base_lr = self._base_lr
        if base_lr is None:
            base_lr = self._first() if kept is None else kept
        return base_lr, self._ratio * base_lr if self._lr_sgd is None else self._lr_sgd

    def ratio(self, kept: Scalar | None) -> Scalar:
        """Return ``lr_sgd / base_lr``."""
        if self._lr_sgd is None:
            return self._ratio  # whatever the base
        return self._lr_sgd / self.of(kept)[0]

    def _first(self) -> Scalar:
        first = plain(self._lr(jnp.zeros([], jnp.int32)) if callable(self._lr) else self._lr)
        check("learning_rate", first, 0, math.inf)
        if is_known(first):
            return first or USUAL_LR
        first = jax.lax.stop_gradient(first)  # a base is a constant
        return jnp.where(first == 0, USUAL_LR, first)


def is_known(value: Any) -> bool:
    """Tell whether this is a Python number; the value of a traced one is not known."""
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


def check_whole(name: str, value: Any) -> int:
    """Check a number that the compiled program depends on, and that so cannot be traced: whole, and at least 1."""
    value = plain(value)
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} is traced, but decides what is compiled. With optax.inject_hyperparams, leave it out or say "
            f'static_args=("{name}",).'
        )
    if isinstance(value, bool) or not is_known(value) or value != value // 1 or value < 1:
        raise ValueError(f"Invalid {name}: {value!r}. It must be a whole number, at least 1.")
    return int(value)


def caster(dtype: Any) -> Callable[[Scalar], Scalar]:
    """Return a function that keeps numbers from widening arrays, as traced numbers would and Python's do not."""
    return lambda value: value if is_known(value) else jnp.asarray(value, dtype)


def bias_correction(decay: Scalar, count: jax.Array) -> jax.Array:
    """Return ``1 - decay**count``, without cancellation."""
    if is_known(decay):
        logarithm: Scalar = math.log(decay) if decay else -math.inf
    else:
        logarithm = jnp.log(decay)
    return -jnp.expm1(count.astype(float) * logarithm)
