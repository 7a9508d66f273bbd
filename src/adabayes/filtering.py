r"""The mathematics of the paper: a scalar Kalman filter for the optimum of one weight.

Each function is one equation, element-wise and pure. It takes floats and arrays of NumPy, torch and JAX.

The functions work in two systems of units. The paper differentiates the *summed* loss of a minibatch: leave
``batch_size`` at 1, give :math:`\eta`, :math:`\sigma^2` and the gradient of the sum, and variances are the paper's
:math:`s^2`. Training code differentiates the *mean* loss: give the minibatch size ``B``, ``sigma2 = lr_sgd`` and the
gradient of the mean, and variances become ``gain = B * s2``, the learning rate that a weight actually gets. ``B``
appears in two functions only, :func:`drift` and :func:`curvature`.

Equations are numbered as in Aitchison (2020), "Bayesian filtering unifies adaptive and non-adaptive neural
network optimization methods"; labels in the text are the labels of its source.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

Array = Any  # float | numpy.ndarray | torch.Tensor | jax.Array: anything with arithmetic


class Dynamics(NamedTuple):
    """The change of the variance between two gradients: a fraction of it is forgotten, and noise is added."""

    forget: Array  # fraction of the variance that is lost; negative if it grows
    noise: Array


# The dynamics of the optimum


def drift(eta: Array, sigma2: Array, batch_size: Array = 1.0) -> Array:
    r"""Return the fraction of its value that the optimum loses in a step (Eq. 14, eq:def:dyn).

    .. math:: k = \frac{B \eta^2}{2 \sigma^2}

    ``1 / (2 k)`` is the filter's memory in steps: 781 at the paper's settings.

    >>> round(1 / (2 * drift(1e-3, 0.1, 128)))
    781
    """
    return batch_size * eta * eta / (2 * sigma2)


def euler(k: Array, sigma2: Array) -> Dynamics:
    r"""Return the paper's discretisation of the Ornstein-Uhlenbeck process (Eq. 17b, eq:def:Sprior).

    .. math:: f = 1 - (1 - k)^2, \qquad q = 2 k \sigma^2 \; (= \eta^2)

    It is unstable for ``k > 2``; the fixed point of its variance is ``sigma2 / (1 - k / 2)``.
    """
    return Dynamics(forget=k * (2 - k), noise=2 * k * sigma2)


def ornstein_uhlenbeck(k: Array, sigma2: Array) -> Dynamics:
    r"""Return the Ornstein-Uhlenbeck process itself, which :func:`euler` approximates to first order in ``k``.

    .. math:: f = 1 - e^{-2k}, \qquad q = \sigma^2 f

    It is stable for every ``k``; the fixed point of its variance is exactly ``sigma2``.
    """
    noise = -sigma2 * _function("expm1", -2 * k)
    return Dynamics(forget=noise / sigma2, noise=noise)


def fading_memory(lam: Array) -> Dynamics:
    r"""Return the dynamics of Ollivier's forgetting factor: noise in proportion to the variance (Eq. 28, eq:von).

    .. math:: \frac{1}{s^2_\text{prior}(t+1)} = \frac{1 - \lambda}{s^2_\text{post}(t)},
              \qquad f = \frac{-\lambda}{1 - \lambda}, \qquad q = 0

    The equivalent process noise is :math:`\frac{\lambda}{1 - \lambda} s^2_\text{post}` (the paper prints this as
    :math:`\eta`; it is :math:`\eta^2`).
    """
    return Dynamics(forget=-lam / (1 - lam), noise=0.0)


# The filter


def curvature(gradient: Array, batch_size: Array = 1.0) -> Array:
    r"""Return the Fisher information in one gradient, an estimate of the Hessian's diagonal (Appendix C).

    .. math:: H_{ii} \approx g^2 \; (= B \bar g^2 \text{ in units of the mean gradient})
    """
    return batch_size * gradient * gradient


def predict(variance: Array, dynamics: Dynamics) -> Array:
    r"""Return the prior variance of the optimum, one step later (Eq. 17b, eq:def:Sprior).

    .. math:: s^2_\text{prior}(t) = s^2_\text{post}(t-1) + \left( q - f s^2_\text{post}(t-1) \right)

    The change is computed first, so that small changes are kept: in fp32, ``1 - f`` is 1 for ``f`` below 3e-8.
    """
    return variance + (dynamics.noise - dynamics.forget * variance)


def update(prior: Array, curvature: Array) -> Array:
    r"""Return the posterior variance after a gradient (Eq. 18a, eq:def:Spost).

    .. math:: s^2_\text{post} = \frac{1}{1 / s^2_\text{prior} + H_{ii}}
    """
    return prior / (1 + prior * curvature)


def remember(variance: Array, gradient: Array, eta: Array, sigma2: Array, steps: Array) -> Array:
    r"""Return the posterior variance after a gradient, in a filter that remembers ``steps`` steps.

    If the batch size is unknown, each weight gets its own, :math:`B = s^2_\text{post} / (n \eta^2)`. The filter of a
    weight then remembers :math:`n` steps, whatever the size of its gradients. With this :math:`B`, and to first order
    in :math:`1/n`, :func:`predict` and :func:`update` are

    .. math:: \frac{1}{s^2_\text{prior}} = \frac{1}{s^2} - \frac{1}{n} \left( \frac{1}{s^2} - \frac{1}{\sigma^2}
              \right), \qquad \frac{1}{s^2_\text{post}} = \frac{1}{2 s^2_\text{prior}}
              + \sqrt{\frac{1}{4 s^4_\text{prior}} + \frac{g^2}{n \eta^2}}

    The fixed point is :func:`fixed_point`, whatever :math:`n` is; with :math:`n = 1`, one step reaches it. Near the
    fixed point, a step forgets :math:`2 / (n + 1)` of the past, as an exponential average with a span of :math:`n`
    steps does.

    >>> remember(0.1, gradient=0.5, eta=1e-3, sigma2=0.1, steps=1) == fixed_point(0.25, eta=1e-3, sigma2=0.1)
    True
    """
    half = (1 - (1 - variance / sigma2) / steps) / 2  # all in units of the variance, so that hardly anything overflows
    step = variance * (gradient / (eta * _function("sqrt", steps)))
    return variance / (half + _function("sqrt", half * half + step * step))


def move(mean: Array, variance: Array, gradient: Array) -> Array:
    r"""Return the posterior mean after a gradient of the log-likelihood (Eq. 18b, eq:def:mpost).

    .. math:: \mu_\text{post} = \mu_\text{prior} + s^2_\text{post} \, g

    The variance is the learning rate: that is the whole idea.
    """
    return mean + variance * gradient


# Where the filter starts


def is_unstarted(gain: Array, mean_gradient: Array) -> Array:
    """Tell whether a weight has had no gradient yet: its filter has not started, and all of its state is zero.

    A gain of zero alone is not enough: after a very large gradient it may be too small for its precision.
    """
    return (gain == 0) & (mean_gradient == 0)


# Fixed points of the filter


def fixed_point(mean_square: Array, eta: Array, sigma2: Array) -> Array:
    r"""Return the paper's fixed point of the variance for gradients of a given mean square (Eq. 21, eq:rms:spost).

    .. math:: \frac{1}{s^2_\text{post}} = \frac{1}{2 \sigma^2}
              + \sqrt{\frac{1}{4 \sigma^4} + \frac{\langle g^2 \rangle}{\eta^2}}

    The formula is the same in both systems of units: the batch size cancels. It is a soft minimum of the two learning
    rates, between their harmonic sum and their minimum:
    :math:`\max(1/\sigma^2, \sqrt{\langle g^2\rangle}/\eta) \le 1/s^2 \le 1/\sigma^2 + \sqrt{\langle g^2\rangle}/\eta`.

    >>> fixed_point(0.0, eta=1e-3, sigma2=0.1)
    0.1
    """
    half = 0.5 / sigma2
    return 1 / (half + _function("sqrt", half * half + mean_square * eta**-2))


def exact_fixed_point(curvature: Array, dynamics: Dynamics) -> Array:
    r"""Return the fixed point of :func:`predict` and :func:`update` for a constant curvature, without approximation.

    With :math:`\ell = 1/s^2_\text{post}` it solves :math:`q \ell^2 - (f + q H) \ell - (1 - f) H = 0`, of which
    Eq. 20 (eq:quad) drops the :math:`q H`. The term matters where one gradient outweighs the process noise, that is
    where :math:`\sqrt{\langle g^2\rangle} > 1 / (B \eta)` in mean units: there the variance falls as
    :math:`1/H`, faster than Adam's learning rate does.

    The dynamics must have noise: for :func:`fading_memory` see :func:`mean_square_fixed_point`.
    """
    forget, noise = dynamics
    b = forget + noise * curvature
    return 2 * noise / (b + _function("sqrt", b * b + 4 * noise * (1 - forget) * curvature))


def mean_square_fixed_point(mean_square: Array, lam: Array) -> Array:
    r"""Return the fixed point of :func:`fading_memory`: a mean-square normaliser (Eq. 31).

    .. math:: s^2_\text{post} = \frac{\lambda}{\langle g^2 \rangle}
    """
    return lam / mean_square


def _function(name: str, x: Array) -> Array:
    """Apply a mathematical function to a number or an array of any kind."""
    if isinstance(x, (int, float)):
        return getattr(math, name)(x)
    if hasattr(x, "__array_namespace__"):  # NumPy, JAX
        return getattr(x.__array_namespace__(), name)(x)
    return getattr(x, name)()  # torch
