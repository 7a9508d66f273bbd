"""AdaBayes-FP: Algorithm 2 of the paper."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adabayes import filtering
from adabayes.optax._chain import chain
from adabayes.optax._leaves import Leaves
from adabayes.optax._numbers import Rate, Rates, Scalar, bias_correction, caster, check, plain, resolve_rates
from adabayes.rates import SETTLED_RATIO


class ScaleByAdaBayesFPState(NamedTuple):
    """State of :func:`scale_by_adabayes_fp`: averages of the gradient, ``mu``, and of its square, ``nu``."""

    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates
    nu: optax.Updates
    rates: Rates
    b2: jax.Array


def scale_by_adabayes_fp(
    learning_rate: Rate = 1e-3,
    lr_sgd: Scalar | None = None,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    *,
    base_lr: Scalar | None = None,
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Scale gradients by the fixed point of the gain, in units of the learning rate, which is to follow in the chain.

    Arguments are those of :func:`adabayes_fp`.
    """
    base_lr, lr_sgd = resolve_rates(learning_rate, base_lr, lr_sgd, SETTLED_RATIO)
    b1, b2 = plain(b1), plain(b2)
    check("b1", b1, 0, 1)
    check("b2", b2, 0, 1)
    leaves = Leaves(mu_dtype, state_dtype, seed)

    def settings() -> tuple[Rates, jax.Array]:
        return Rates.of(base_lr, lr_sgd), jnp.asarray(b2, jnp.float32)

    def init(params: optax.Params) -> ScaleByAdaBayesFPState:
        return ScaleByAdaBayesFPState(jnp.zeros([], jnp.int32), *leaves.zeros(params), *settings())

    def update(
        updates: optax.Updates, state: ScaleByAdaBayesFPState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdaBayesFPState]:
        count = optax.safe_increment(state.count)
        unbias, unbias_square = 1 / bias_correction(b1, count), 1 / bias_correction(b2, count)

        def leaf(g: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, ...]:
            number = caster(nu.dtype)
            mean = mu + (g - mu) * number(1 - b1)
            mean_square = number(b2) * nu + number(1 - b2) * (g * g)
            # In units of the learning rate, in which the two rates are 1 and their ratio.
            gain = filtering.fixed_point(mean_square * number(unbias_square), 1.0, number(lr_sgd / base_lr))  # Eq. 21
            return gain * mean * number(unbias), mean, mean_square

        directions, mu, nu = leaves.update(leaf, count, updates, params, state.mu, state.nu)
        return directions, ScaleByAdaBayesFPState(count, mu, nu, *settings())

    return optax.GradientTransformation(init, update)


def adabayes_fp(
    learning_rate: Rate = 1e-3,
    lr_sgd: Scalar | None = None,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    weight_decay: Scalar = 0.0,
    mask: Any = None,
    *,
    base_lr: Scalar | None = None,
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """AdaBayes-FP, Algorithm 2: the filter at its fixed point, AdamW whose epsilon is ``learning_rate / lr_sgd``.

    It gives the same numbers as :class:`adabayes.AdaBayesFP`. Arguments are those of :func:`adabayes`; ``b2`` is the
    decay of the averaged square. ``lr_sgd=None`` is 1e5 times the base, which is AdamW but for the smallest gradients.
    """
    directions = scale_by_adabayes_fp(
        learning_rate, lr_sgd, b1, b2, base_lr=base_lr, mu_dtype=mu_dtype, state_dtype=state_dtype, seed=seed
    )
    return chain(directions, learning_rate, base_lr, weight_decay, mask)
