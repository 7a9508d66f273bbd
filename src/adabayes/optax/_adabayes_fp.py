"""AdaBayes-FP: Algorithm 2 of the paper."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adabayes import filtering
from adabayes.optax._chain import chain
from adabayes.optax._leaves import Leaves
from adabayes.optax._numbers import Rate, Rates, Scalar, TwoRates, bias_correction, caster, check, plain
from adabayes.rates import SETTLED_RATIO


class ScaleByAdaBayesFPState(NamedTuple):
    """State of :func:`scale_by_adabayes_fp`: averages of the gradient, ``mu``, and of its square, ``nu``."""

    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates
    nu: optax.Updates
    rates: Rates
    b2: jax.Array


class Settled(NamedTuple):
    """The numbers of one step of AdaBayes-FP."""

    b1: Scalar
    b2: Scalar
    ratio: Scalar  # lr_sgd / lr
    steps: jax.Array  # this one included
    cautious: bool
    centred: bool

    def step(self, g: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the direction, in units of the learning rate, and both averages."""
        number = caster(nu.dtype)
        unbias, unbias_square = (1 / bias_correction(b, self.steps) for b in (self.b1, self.b2))
        seen = g - mu if self.centred else g
        mean = mu + (g - mu) * number(1 - self.b1)
        mean_square = number(self.b2) * nu + number(1 - self.b2) * (seen * seen)
        # In units of the learning rate, in which the two rates are 1 and their ratio.
        gain = filtering.fixed_point(mean_square * number(unbias_square), 1.0, number(self.ratio))  # Eq. 21
        moving = jnp.where(mean * jnp.sign(g) <= 0, 0.0, mean) if self.cautious else mean
        return gain * moving * number(unbias), mean, mean_square


def scale_by_adabayes_fp(
    learning_rate: Rate = 1e-3,
    lr_sgd: Scalar | None = None,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    *,
    base_lr: Scalar | None = None,
    cautious: bool = False,
    centred: bool = False,
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Scale gradients by the fixed point of the gain, in units of the learning rate.

    The chain has to scale by the learning rate afterwards. Arguments are those of :func:`adabayes_fp`.
    """
    rates = TwoRates(learning_rate, base_lr, lr_sgd, SETTLED_RATIO)
    b1, b2 = plain(b1), plain(b2)
    check("b1", b1, 0, 1)
    check("b2", b2, 0, 1)
    leaves = Leaves(mu_dtype, state_dtype, seed)

    def init(params: optax.Params) -> ScaleByAdaBayesFPState:
        count, decay = jnp.zeros([], jnp.int32), jnp.asarray(b2, float)
        return ScaleByAdaBayesFPState(count, *leaves.zeros(params), rates.initial(), decay)

    def update(
        updates: optax.Updates, state: ScaleByAdaBayesFPState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdaBayesFPState]:
        count, base_lr = optax.safe_increment(state.count), state.rates.lr
        c = Settled(b1, b2, rates.ratio(base_lr), count, cautious, centred)
        directions, mu, nu = leaves.update(c.step, count, updates, params, state.mu, state.nu)
        now = Rates.of(*rates.of(base_lr)), jnp.asarray(b2, float)
        return directions, ScaleByAdaBayesFPState(count, mu, nu, *now)

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
    cautious: bool = False,
    centred: bool = False,
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """AdaBayes-FP, Algorithm 2: the filter at its fixed point, AdamW whose epsilon is ``learning_rate / lr_sgd``.

    It gives the same numbers as :class:`adabayes.AdaBayesFP`. Arguments are those of :func:`adabayes`; ``b2`` is the
    decay of the averaged square. ``lr_sgd=None`` is 1e5 times the base, whatever that is, which is AdamW except for the
    smallest gradients. ``cautious`` moves only weights whose averaged gradient has the sign of the newest one;
    ``centred`` averages the squares of what the average did not predict.
    """
    directions = scale_by_adabayes_fp(
        learning_rate,
        lr_sgd,
        b1,
        b2,
        base_lr=base_lr,
        cautious=cautious,
        centred=centred,
        mu_dtype=mu_dtype,
        state_dtype=state_dtype,
        seed=seed,
    )
    return chain(directions, learning_rate, base_lr, weight_decay, mask)
