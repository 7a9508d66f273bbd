"""AdaBayes-FP: Algorithm 2 of the paper."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adabayes import filtering
from adabayes.optax._chain import chain
from adabayes.optax._rates import Rates, RateSettings
from adabayes.optax._settings import Scalar, ScalarOrSchedule, bias_correction, cast_to, check_range, to_python
from adabayes.optax._storage import Storage
from adabayes.rates import FIXED_POINT_RATIO


class FixedPointRule(NamedTuple):
    """The update rule of AdaBayes-FP, with its coefficients at one step."""

    b1: Scalar
    b2: Scalar
    ratio: Scalar  # lr_sgd / lr
    t: jax.Array  # steps so far, including this one
    cautious: bool
    centred: bool

    def update(self, g: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        r"""Return the direction :math:`u_t`, in units of the learning rate, and both new averages.

        .. math::
            \begin{aligned}
            \mu_t &= \beta_1 \mu_{t-1} + (1 - \beta_1) g_t, \qquad
                \nu_t = \beta_2 \nu_{t-1} + (1 - \beta_2) g_t^2 \\
            u_t &= \frac{\mu_t / (1 - \beta_1^t)}{\epsilon/2 + \sqrt{\epsilon^2/4 + \nu_t / (1 - \beta_2^t)}}, \qquad
                \epsilon = \text{lr} / \text{lr_sgd}
            \end{aligned}

        If ``centred``, :math:`g_t - \mu_{t-1}` replaces :math:`g_t` in :math:`\nu_t`. If ``cautious``, :math:`u_t` is 0
        unless :math:`\mu_t` has the sign of :math:`g_t`.
        """
        cast = cast_to(nu.dtype)
        debias_mu, debias_nu = (1 / bias_correction(decay, self.t) for decay in (self.b1, self.b2))
        deviation = g - mu if self.centred else g
        mu = mu + (g - mu) * cast(1 - self.b1)
        nu = cast(self.b2) * nu + cast(1 - self.b2) * (deviation * deviation)
        # Eq. 21, in units of the learning rate: the two rates are 1 and their ratio.
        gain = filtering.fixed_point(nu * cast(debias_nu), 1.0, cast(self.ratio))
        moving = jnp.where(mu * jnp.sign(g) <= 0, 0.0, mu) if self.cautious else mu
        return gain * moving * cast(debias_mu), mu, nu


class ScaleByAdaBayesFPState(NamedTuple):
    """State of :func:`scale_by_adabayes_fp`: averages of the gradient, ``mu``, and of its square, ``nu``."""

    count: jax.Array  # type: ignore[assignment]  # updates so far
    mu: optax.Updates
    nu: optax.Updates
    rates: Rates
    b2: jax.Array


def scale_by_adabayes_fp(
    learning_rate: ScalarOrSchedule = 1e-3,
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

    Later transformations of the chain must scale by the learning rate. The arguments are those of :func:`adabayes_fp`.
    """
    rates = RateSettings(learning_rate, base_lr, lr_sgd, FIXED_POINT_RATIO)
    b1, b2 = to_python(b1), to_python(b2)
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    storage = Storage(mu_dtype, state_dtype, seed)

    def init(params: optax.Params) -> ScaleByAdaBayesFPState:
        count, mu_nu = jnp.zeros([], jnp.int32), storage.zeros(params)
        return ScaleByAdaBayesFPState(count, *mu_nu, Rates.from_scalars(*rates.resolve()), jnp.asarray(b2, float))

    def update(
        updates: optax.Updates, state: ScaleByAdaBayesFPState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdaBayesFPState]:
        count, base_lr = optax.safe_increment(state.count), state.rates.lr
        rule = FixedPointRule(b1, b2, rates.ratio(base_lr), count, cautious, centred)
        directions, mu, nu = storage.update(rule.update, count, updates, params, (state.mu, state.nu))
        new_rates = Rates.from_scalars(*rates.resolve(base_lr))
        return directions, ScaleByAdaBayesFPState(count, mu, nu, new_rates, jnp.asarray(b2, float))

    return optax.GradientTransformation(init, update)


def adabayes_fp(
    learning_rate: ScalarOrSchedule = 1e-3,
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
    r"""Create an AdaBayes-FP optimizer: Algorithm 2 of the paper, the filter at its fixed point.

    It is AdamW with an epsilon of ``learning_rate / lr_sgd``, in the form of Eq. 21,

    .. math:: \text{gain} = \frac{\text{lr}}{\epsilon/2 + \sqrt{\epsilon^2/4 + \langle g^2 \rangle}}, \qquad
              \epsilon = \text{lr} / \text{lr_sgd}

    and computes the same numbers as :class:`adabayes.AdaBayesFP`.

    Args:
        learning_rate: Adam's learning rate: a number, a schedule or a traced array. A schedule scales ``lr_sgd``
            with it.
        lr_sgd: learning rate for weights with small gradients, as for :func:`adabayes`. The default, None, is 1e5 times
            the base, whatever that is. This is AdamW except for the smallest gradients.
        b1: decay of the averaged gradient (momentum).
        b2: decay of the averaged square of the gradient.
        weight_decay: decoupled weight decay, as in ``optax.adamw``.
        mask: weights to decay, as in ``optax.adamw``.
        base_lr: ``learning_rate`` without its schedule, as for :func:`adabayes`. It matters only with ``lr_sgd``.
        cautious: move only weights whose averaged gradient has the sign of the newest gradient.
        centred: average the squares of the deviations of gradients from their average, instead of the squares of
            gradients.
        mu_dtype: dtype of the averaged gradient, real or complex. None: that of the averaged square.
        state_dtype: dtype of the state, as for :func:`adabayes`.
        seed: seed of the stochastic rounding to bfloat16.

    Returns:
        The optimizer, an ``optax.GradientTransformation``.
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
