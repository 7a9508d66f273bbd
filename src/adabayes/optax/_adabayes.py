"""AdaBayes: Algorithm 1 of the paper."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adabayes import filtering
from adabayes.optax._chain import chain
from adabayes.optax._compatibility import stored_base_lr
from adabayes.optax._leaves import smallest_normal
from adabayes.optax._rates import Rates, RateSettings
from adabayes.optax._settings import (
    Scalar,
    ScalarOrSchedule,
    bias_correction,
    cast_to,
    check_range,
    to_python,
    value_at,
)
from adabayes.optax._storage import Storage
from adabayes.rates import LEAST_GAIN, batch_size_of, memory_of, ratio_of


class FilterRule(NamedTuple):
    """The update rule of AdaBayes, with its coefficients at one step."""

    dynamics: Literal["exact", "paper"]
    b1: Scalar
    base_lr: Scalar
    lr_sgd: Scalar
    batch_size: Scalar
    k: Scalar  # fraction of its value that the optimum loses in a step
    memory: int | None  # steps that the filter remembers; None if that follows from batch_size
    lr_factor: Scalar  # learning rate / base_lr under dynamics="paper"; otherwise 1
    paused: Any  # whether lr_factor is 0, where the paper's dynamics would divide by zero: nothing happens
    t: jax.Array  # steps so far, without pauses
    scale: Scalar  # debiases mu, and converts the gain to units of the learning rate

    def update(self, g: jax.Array, mu: jax.Array, gain: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        r"""Return the direction :math:`u_t`, in units of the learning rate, the new average and the new gain.

        .. math:: \mu_t = \beta_1 \mu_{t-1} + (1 - \beta_1) g_t, \qquad
                  u_t = \frac{\text{gain}_t}{\text{lr}} \frac{\mu_t}{1 - \beta_1^t}

        The functions of :mod:`adabayes.filtering` update the gain.
        """
        cast = cast_to(gain.dtype)
        new_mu = jnp.where(self.paused, mu, mu + (g - mu) * cast(1 - self.b1))
        if self.memory is not None:
            new_gain = self._remember(g, gain, self.memory)
            used_gain = jnp.where(new_gain <= smallest_normal(gain.dtype), 0, new_gain)
            return used_gain * new_mu * cast(self.scale), new_mu, new_gain
        # A proxy that is 0 where mu is 0. If the gain read mu itself, XLA could not update mu in place on a CPU.
        mu_proxy = jnp.where(new_mu == g * cast(1 - self.b1), 0, new_mu)
        unstarted = filtering.is_unstarted(gain, mu_proxy)
        update_gain = self._update_gain_exactly if self.dynamics == "exact" else self._update_gain_as_in_paper
        new_gain = update_gain(g, gain, unstarted)
        return new_gain * new_mu * cast(self.scale), new_mu, new_gain

    def _remember(self, g: jax.Array, gain: jax.Array, memory: int) -> jax.Array:
        """Return :func:`adabayes.filtering.remember`, with one root and one division for each weight.

        Without earlier gradients, the gain is 0, and the filter starts at the fixed point of the first one: that is
        where a filter with a variance of ``lr_sgd`` and a memory of one step gets to. Later, the gain is at least the
        smallest normal number, so that the gain alone tells whether the filter has started. Reading ``mu`` as well
        would take as long as a tenth of the step.
        """
        cast = cast_to(gain.dtype)
        n = jnp.minimum(self.t, memory).astype(float)
        unstarted = gain == 0
        variance = jnp.where(unstarted, cast(self.lr_sgd), jnp.maximum(gain, LEAST_GAIN))
        half = cast(0.5 - 0.5 / n) + variance * cast(0.5 / (n * self.lr_sgd))
        step = variance * (g * jnp.where(unstarted, cast(1 / self.base_lr), cast(1 / (self.base_lr * jnp.sqrt(n)))))
        posterior = variance / (half + jnp.sqrt(half * half + step * step))
        return jnp.where(unstarted & (g == 0), 0, jnp.maximum(posterior, smallest_normal(gain.dtype)))

    def _update_gain_exactly(self, g: jax.Array, gain: jax.Array, unstarted: jax.Array) -> jax.Array:
        """Start at the fixed point of the first gradient. Until then, the gain is 0."""
        cast = cast_to(gain.dtype)
        lr, lr_sgd = cast(self.base_lr), cast(self.lr_sgd)
        started = jnp.where(unstarted, filtering.fixed_point(g * g, lr, lr_sgd), gain)
        prior = filtering.predict(started, filtering.ornstein_uhlenbeck(cast(self.k), lr_sgd))
        posterior = filtering.update(prior, filtering.curvature(g, cast(self.batch_size)))
        return jnp.where(unstarted & (g == 0), 0, posterior)

    def _update_gain_as_in_paper(self, g: jax.Array, gain: jax.Array, unstarted: jax.Array) -> jax.Array:
        """Start at ``lr_sgd``. The schedule of the learning rate scales ``lr_sgd`` and ``k``."""
        cast = cast_to(gain.dtype)
        lr_sgd = cast(self.lr_sgd * self.lr_factor)
        started = jnp.where(unstarted, lr_sgd, gain)
        prior = filtering.predict(started, filtering.euler(cast(self.k * self.lr_factor), lr_sgd))  # Eq. 17b
        posterior = filtering.update(prior, filtering.curvature(g, cast(self.batch_size)))  # Eq. 18a
        return jnp.where(self.paused, gain, posterior)


class ScaleByAdaBayesState(NamedTuple):
    """State of :func:`scale_by_adabayes`: averages of the gradient, ``mu``, and gains.

    Both are 0 for a weight that has had no gradient yet: its filter has not started.
    """

    count: jax.Array  # type: ignore[assignment]  # updates so far
    steps: jax.Array  # updates so far, except for pauses: under dynamics="paper", those at a learning rate of 0
    mu: optax.Updates
    gain: optax.Updates
    rates: Rates
    base_lr: jax.Array | None = None  # None in states of version 0.1


def scale_by_adabayes(
    learning_rate: ScalarOrSchedule = 1e-3,
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

    Later transformations of the chain must scale by the learning rate. The arguments are those of :func:`adabayes`.
    """
    rates = RateSettings(learning_rate, base_lr, lr_sgd, ratio_of(batch_size, dynamics))
    learning_rate, batch_size, b1 = map(to_python, (learning_rate, batch_size, b1))
    check_range("batch_size", batch_size, 1, math.inf)
    check_range("b1", b1, 0, 1)
    if dynamics not in ("exact", "paper"):
        raise ValueError(f"Invalid dynamics: {dynamics!r}. It must be 'exact' or 'paper'.")
    rates.warn_if_closed(batch_size)
    storage = Storage(mu_dtype, state_dtype, seed)

    def init(params: optax.Params) -> ScaleByAdaBayesState:
        counts = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)  # two buffers, so that both can be donated
        initial = Rates.from_scalars(*rates.resolve())
        return ScaleByAdaBayesState(*counts, *storage.zeros(params), initial, jnp.copy(initial.lr))

    def update(
        updates: optax.Updates, state: ScaleByAdaBayesState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdaBayesState]:
        base_lr, lr_sgd = rates.resolve(stored_base_lr(state))
        lr_factor = value_at(learning_rate, state.count) / base_lr if dynamics == "paper" else 1.0
        paused = lr_factor == 0
        steps = jnp.where(paused, state.steps, optax.safe_increment(state.steps))
        examples = batch_size_of(batch_size, base_lr)
        rule = FilterRule(
            dynamics=dynamics,
            b1=b1,
            base_lr=base_lr,
            lr_sgd=lr_sgd,
            batch_size=examples,
            k=filtering.drift(base_lr, lr_sgd, examples),
            memory=memory_of(batch_size, dynamics),
            lr_factor=lr_factor,
            paused=paused,
            t=steps,
            # In a pause, any finite number will do.
            scale=1 / (bias_correction(b1, jnp.maximum(steps, 1)) * base_lr * jnp.where(paused, 1.0, lr_factor)),
        )
        directions, mu, gain = storage.update(rule.update, steps, updates, params, (state.mu, state.gain))
        new_rates = Rates.from_scalars(base_lr * lr_factor, lr_sgd * lr_factor)
        new_rates = jax.tree.map(lambda old, new: jnp.where(paused, old, new), state.rates, new_rates)
        count, new_base_lr = optax.safe_increment(state.count), jnp.asarray(base_lr, float)
        return directions, ScaleByAdaBayesState(count, steps, mu, gain, new_rates, new_base_lr)

    return optax.GradientTransformation(init, update)


def adabayes(
    learning_rate: ScalarOrSchedule = 1e-3,
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
    """Create an AdaBayes optimizer (Aitchison, 2020): Algorithm 1 of the paper.

    Each weight moves by itself between SGD and AdamW. The optimizer computes the same numbers as
    :class:`adabayes.AdaBayes`, whose documentation explains the method.

    Args:
        learning_rate: Adam's learning rate: a number, a schedule or a traced array. A schedule scales ``lr_sgd``
            with it.
        lr_sgd: learning rate for weights with small gradients, while ``learning_rate`` is at its base. It multiplies
            the averaged gradient. ``optax.sgd(lr, momentum)`` sums gradients instead, and corresponds to
            ``lr / (1 - momentum)``. The default, None, is 1e5 times the base; with a ``batch_size``, it is 100 times
            the base, as in the paper.
        batch_size: number of examples in a step, over all devices and accumulated gradients. It sets the upper end of
            the Adam-like window, ``1 / (batch_size * learning_rate)``. Larger gradients get less than Adam's learning
            rate. Use None if it is unknown: the filter of each weight then remembers the last 100 steps, whatever the
            size of its gradients. With ``dynamics="paper"``, None stands for ``0.01 / base_lr``.
        b1: decay of the averaged gradient (momentum).
        weight_decay: decoupled weight decay, as in ``optax.adamw``: each step multiplies weights by
            ``1 - learning_rate * weight_decay``.
        mask: weights to decay, as in ``optax.adamw``.
        base_lr: ``learning_rate`` without its schedule, usually its peak. The filter runs at this rate and
            ``lr_sgd``. The default, None, is the first value of ``learning_rate``, whether that is a number, a schedule
            or traced (as by ``inject_hyperparams``), or 1e-3 if that value is 0. So pass ``base_lr`` with a warm-up.
            With the default ``lr_sgd``, it does not influence the fixed point of the gain.
        dynamics: ``"exact"`` or ``"paper"``, as for :class:`adabayes.AdaBayes`.
        mu_dtype: dtype of the averaged gradient, real or complex. None: that of the rest of the state.
        state_dtype: dtype of the state. None: that of the parameters, but at least fp32. State in bfloat16 is rounded
            stochastically, because the filter's changes are smaller than half its precision. The random bits are the
            same as in torch.
        seed: seed of the stochastic rounding.

    Returns:
        The optimizer, an ``optax.GradientTransformation``.
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
