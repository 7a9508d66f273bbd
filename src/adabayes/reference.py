r"""Algorithms 1 and 2 of the paper, to the letter: the slow twin that every fast form is tested against.

Conventions are the paper's, not torch's: ``gradient`` is that of the *summed* log-likelihood, the algorithms
*ascend* it, weight decay is :math:`\lambda` itself, and everything is float64 NumPy. Nothing is shared with the
rest of the package on purpose.

Both are generators: each iteration takes one step and yields ``(mu, s2_post)``.

>>> steps = adabayes(lambda mu, t: -mu, mu=[1.0], lr_adam=1e-3, lr_sgd=0.1, minibatch_size=1)
>>> mu, s2_post = next(steps)
>>> mu.round(6).tolist()
[0.909091]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

try:
    import numpy as np
except ImportError as error:
    raise ImportError("adabayes.reference needs NumPy: pip install '.[plot]' in the folder of AdaBayes") from error
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]
Gradient = Callable[[Float64, int], ArrayLike]  # gradient(mu, t), with t = 1, 2, ...
LearningRate = float | Callable[[int], float]  # constant, or a schedule of t


def adabayes(
    gradient: Gradient,
    mu: ArrayLike,
    *,
    lr_adam: LearningRate,
    lr_sgd: LearningRate,
    minibatch_size: float,
    beta1: float = 0.9,
    lam: float | Callable[[int], float] = 0.0,
) -> Iterator[tuple[Float64, Float64]]:
    """Algorithm 1, AdaBayes."""
    mu = np.array(mu, dtype=np.float64)
    m = np.zeros_like(mu)
    s2_post = np.full_like(mu, _at(lr_sgd, 1) / minibatch_size)
    t = 0
    while True:
        t += 1
        eta = _at(lr_adam, t)
        sigma2 = _at(lr_sgd, t) / minibatch_size
        g = np.asarray(gradient(mu, t), dtype=np.float64)
        m = beta1 * m + (1 - beta1) * g
        mean_g = m / (1 - beta1**t)
        s2_prior = (1 - eta**2 / (2 * sigma2)) ** 2 * s2_post + eta**2
        s2_post = 1 / (1 / s2_prior + g**2)
        mu = (1 - _at(lam, t)) * mu + s2_post * mean_g
        yield mu, s2_post


def adabayes_fp(
    gradient: Gradient,
    mu: ArrayLike,
    *,
    lr_adam: LearningRate,
    lr_sgd: LearningRate,
    minibatch_size: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    lam: float | Callable[[int], float] = 0.0,
) -> Iterator[tuple[Float64, Float64]]:
    """Algorithm 2, AdaBayes-FP. The paper assigns the right-hand side of line 11 to ``s2_post``; it is the inverse."""
    mu = np.array(mu, dtype=np.float64)
    m = np.zeros_like(mu)
    v = np.zeros_like(mu)
    t = 0
    while True:
        t += 1
        eta = _at(lr_adam, t)
        sigma2 = _at(lr_sgd, t) / minibatch_size
        g = np.asarray(gradient(mu, t), dtype=np.float64)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        mean_g = m / (1 - beta1**t)
        mean_g2 = v / (1 - beta2**t)
        s2_post = 1 / (1 / (2 * sigma2) + np.sqrt(1 / (4 * sigma2**2) + mean_g2 / eta**2))
        mu = (1 - _at(lam, t)) * mu + s2_post * mean_g
        yield mu, s2_post


def _at(value: Any, t: int) -> float:
    """The value of a constant or of a schedule at step t."""
    return float(value(t) if callable(value) else value)
