"""AdaBayes: Algorithm 1 of the paper."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adabayes import filtering
from adabayes.optax._chain import chain
from adabayes.optax._leaves import Leaves
from adabayes.optax._numbers import Rate, Rates, Scalar, TwoRates, bias_correction, caster, check, plain
from adabayes.rates import LEAST_GAIN, batch_size_of, memory_of, ratio_of


class ScaleByAdaBayesState(NamedTuple):
    """State of :func:`scale_by_adabayes`: averages of the gradient, ``mu``, and gains.

    Both are 0 for a weight that has had no gradient yet, so that its filter has not started.
    """

    count: jax.Array  # type: ignore[assignment]  # updates so far
    steps: jax.Array  # updates that counted: under dynamics="paper", not those at a learning rate of 0
    mu: optax.Updates
    gain: optax.Updates
    rates: Rates
    base_lr: jax.Array | None = None  # which version 0.1 did not keep


def scale_by_adabayes(
    learning_rate: Rate = 1e-3,
    lr_sgd: Scalar | None = None,
    batch_size: Scalar | None = None,
    b1: Scalar = 0.9,
    *,
    base_lr: Scalar | None = None,
    dynamics: Literal["exact", "paper"] = "exact",
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Scale gradients by the filter's gain, in units of the learning rate.

    The chain has to scale by the learning rate afterwards. Arguments are those of :func:`adabayes`.
    """
    rates = TwoRates(learning_rate, base_lr, lr_sgd, ratio_of(batch_size, dynamics))
    learning_rate, batch_size, b1 = map(plain, (learning_rate, batch_size, b1))
    check("batch_size", batch_size, 1, math.inf)
    check("b1", b1, 0, 1)
    if dynamics not in ("exact", "paper"):
        raise ValueError(f"Invalid dynamics: {dynamics!r}. It must be 'exact' or 'paper'.")
    rates.warn_if_closed(batch_size)
    leaves = Leaves(mu_dtype, state_dtype, seed)
    exact, memory = dynamics == "exact", memory_of(batch_size, dynamics)

    def init(params: optax.Params) -> ScaleByAdaBayesState:
        counts = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)  # two buffers, so that both can be donated
        initial = rates.initial()
        return ScaleByAdaBayesState(*counts, *leaves.zeros(params), initial, jnp.copy(initial.lr))

    def update(
        updates: optax.Updates, state: ScaleByAdaBayesState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdaBayesState]:
        base_lr, lr_sgd = rates.of(state.rates.lr if state.base_lr is None else state.base_lr)
        examples = batch_size_of(batch_size, base_lr)
        k = filtering.drift(base_lr, lr_sgd, examples)
        schedule: Scalar = 1.0
        if not exact:
            schedule = (learning_rate(state.count) if callable(learning_rate) else learning_rate) / base_lr
        paused = schedule == 0  # where the paper divides by zero, nothing happens
        steps = jnp.where(paused, state.steps, optax.safe_increment(state.steps))
        # In units of the learning rate, which comes later; during a pause, any finite number will do.
        scale = 1 / (bias_correction(b1, jnp.maximum(steps, 1)) * base_lr * jnp.where(paused, 1.0, schedule))

        def leaf(g: jax.Array, mu: jax.Array, gain: jax.Array) -> tuple[jax.Array, ...]:
            number = caster(gain.dtype)
            mean = jnp.where(paused, mu, mu + (g - mu) * number(1 - b1))
            # mu, as far as the rule asks. If the gain read mu itself, XLA could not work in place on a CPU.
            before = jnp.where(mean == g * number(1 - b1), 0, mean)
            unstarted = filtering.is_unstarted(gain, before)
            if exact:
                start, waits = filtering.fixed_point(g * g, number(base_lr), number(lr_sgd)), unstarted & (g == 0)
                flow = filtering.ornstein_uhlenbeck(number(k), number(lr_sgd))
            else:
                start, waits = number(lr_sgd * schedule), paused
                flow = filtering.euler(number(k * schedule), number(lr_sgd * schedule))
            begun = jnp.where(unstarted, start, gain)
            if memory is not None:
                alive, last = jnp.maximum(begun, LEAST_GAIN), number(jnp.minimum(steps, memory))
                posterior = filtering.remember(alive, g, number(base_lr), number(lr_sgd), last)
            else:
                prior = filtering.predict(begun, flow)  # Eq. 17b
                posterior = filtering.update(prior, filtering.curvature(g, number(examples)))  # Eq. 18a
            posterior = jnp.where(waits, 0 if exact else gain, posterior)  # as it was; a 0 is faster
            return posterior * mean * number(scale), mean, posterior

        directions, mu, gain = leaves.update(leaf, steps, updates, params, state.mu, state.gain)
        now = Rates.of(base_lr * schedule, lr_sgd * schedule)
        now = jax.tree.map(lambda old, new: jnp.where(paused, old, new), state.rates, now)
        count, base = optax.safe_increment(state.count), jnp.asarray(base_lr, float)
        return directions, ScaleByAdaBayesState(count, steps, mu, gain, now, base)

    return optax.GradientTransformation(init, update)


def adabayes(
    learning_rate: Rate = 1e-3,
    lr_sgd: Scalar | None = None,
    batch_size: Scalar | None = None,
    b1: Scalar = 0.9,
    weight_decay: Scalar = 0.0,
    mask: Any = None,
    *,
    base_lr: Scalar | None = None,
    dynamics: Literal["exact", "paper"] = "exact",
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """AdaBayes (Aitchison, 2020), Algorithm 1: moves by itself between SGD and AdamW, weight by weight.

    It gives the same numbers as :class:`adabayes.AdaBayes`, whose documentation says more about the method.

    Args:
        learning_rate: Adam's learning rate: a number, a schedule or a traced array. A schedule scales ``lr_sgd``
            with it.
        lr_sgd: learning rate for weights with small gradients, while ``learning_rate`` is at its base, in units of the
            averaged gradient. Coming from ``optax.sgd(lr, momentum)``, which sums instead, give
            ``lr / (1 - momentum)``. None: 1e5 times the base; with a ``batch_size``, the paper's 100 times.
        batch_size: number of examples in a whole step, over all devices and accumulated gradients. It sets the upper
            end of the Adam-like window, ``1 / (batch_size * learning_rate)``; larger gradients get less than Adam's
            learning rate. None: unknown. The filter of each weight then remembers the last 100 steps, whatever the size
            of its gradients; with ``dynamics="paper"``, it is taken as ``0.01 / base_lr``.
        b1: decay of the averaged gradient (momentum).
        weight_decay: decoupled, as in ``optax.adamw``: each step multiplies weights by
            ``1 - learning_rate * weight_decay``.
        mask: weights to decay, as in ``optax.adamw``.
        base_lr: ``learning_rate`` without its schedule, usually its peak. The filter runs at this rate and
            ``lr_sgd``. None: the first value of ``learning_rate``, whether a number, a schedule or traced (as by
            ``inject_hyperparams``); if that is 0, it is 1e-3. So give it with a warm-up. With the default ``lr_sgd``,
            it does not influence where the gain settles.
        dynamics: ``"exact"`` or ``"paper"``, as for :class:`adabayes.AdaBayes`.
        mu_dtype: dtype of the averaged gradient, real or complex. None: that of the rest of the state.
        state_dtype: dtype of the state. None: the parameters', and fp32 for those of less precision. bfloat16 is
            rounded stochastically, because the filter's changes are smaller than half its precision, with the same
            random bits as in torch.
        seed: seed of that rounding.
    """
    directions = scale_by_adabayes(
        learning_rate,
        lr_sgd,
        batch_size,
        b1,
        base_lr=base_lr,
        dynamics=dynamics,
        mu_dtype=mu_dtype,
        state_dtype=state_dtype,
        seed=seed,
    )
    return chain(directions, learning_rate, base_lr, weight_decay, mask)
