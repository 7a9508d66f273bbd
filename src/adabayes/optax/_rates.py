"""The two learning rates that bound the gain: their settings and defaults, and their values in the state."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adabayes.optax._settings import Scalar, ScalarOrSchedule, check_range, is_known, to_python, value_at
from adabayes.rates import USUAL_LR, warn_if_closed, warn_if_swapped


class Rates(NamedTuple):
    """The two learning rates that bound the gain, at the last step of the filter."""

    lr: jax.Array
    lr_sgd: jax.Array

    @classmethod
    def from_scalars(cls, lr: Scalar, lr_sgd: Scalar) -> Rates:
        return cls(jnp.asarray(lr, float), jnp.asarray(lr_sgd, float))


class RateSettings:
    """The settings ``base_lr`` and ``lr_sgd``, each as given or by default.

    If the learning rate is a schedule or traced, the default of ``base_lr`` is its first value. ``init`` evaluates it,
    and the state stores it for later steps. So ``inject_hyperparams`` gives the same results as a Python number.
    """

    def __init__(
        self, learning_rate: ScalarOrSchedule, base_lr: Scalar | None, lr_sgd: Scalar | None, default_ratio: float
    ) -> None:
        self._lr, self._base_lr, self._lr_sgd = map(to_python, (learning_rate, base_lr, lr_sgd))
        self._default_ratio = default_ratio
        check_range("learning_rate", self._lr, 0, math.inf)
        check_range("base_lr", self._base_lr, 0, math.inf, open_low=True)
        check_range("lr_sgd", self._lr_sgd, 0, math.inf, open_low=True)
        if self._base_lr is None and is_known(self._lr):
            self._base_lr = float(self._lr) or USUAL_LR
        if is_known(self._base_lr) and is_known(self._lr_sgd):
            warn_if_swapped(self._base_lr, self._lr_sgd)

    def warn_if_closed(self, batch_size: Scalar | None) -> None:
        """Warn if AdaBayes is Adam-like for hardly any gradients. Traced settings are not checked."""
        if is_known(self._base_lr) and is_known(batch_size):
            base_lr, lr_sgd = self.resolve()
            if is_known(lr_sgd):
                warn_if_closed(base_lr, lr_sgd, batch_size)

    def resolve(self, stored_base_lr: Scalar | None = None) -> tuple[Scalar, Scalar]:
        """Return ``base_lr`` and ``lr_sgd``. ``stored_base_lr`` comes from the state; ``init`` has none yet."""
        base_lr = self._base_lr
        if base_lr is None:
            base_lr = self._first_lr() if stored_base_lr is None else stored_base_lr
        return base_lr, self._default_ratio * base_lr if self._lr_sgd is None else self._lr_sgd

    def ratio(self, stored_base_lr: Scalar) -> Scalar:
        """Return ``lr_sgd / base_lr``."""
        if self._lr_sgd is None:
            return self._default_ratio  # exactly, for any base_lr
        return self._lr_sgd / self.resolve(stored_base_lr)[0]

    def _first_lr(self) -> Scalar:
        """Return the first value of the learning rate, or the usual one if that is 0."""
        first = to_python(value_at(self._lr, jnp.zeros([], jnp.int32)))
        check_range("learning_rate", first, 0, math.inf)
        if is_known(first):
            return first or USUAL_LR
        first = jax.lax.stop_gradient(first)  # base_lr is a constant
        return jnp.where(first == 0, USUAL_LR, first)
