r"""Slow, readable twins of the optimizers, in float64 NumPy. Every fast form is tested against them.

:func:`adabayes` and :func:`adabayes_fp` are Algorithms 1 and 2 of the paper, to the letter, in its conventions:
``gradient`` is that of the *summed* log-likelihood, the algorithms *ascend* it, and weight decay is :math:`\lambda`
itself. :func:`adabayes_k`, which is not in the paper, follows training code: it *descends* the *mean* loss, and its
weight decay is AdamW's.

All three are generators that take one step per iteration. They import nothing from the rest of the package, so that no
error can hide in shared code.

>>> steps = adabayes(lambda mu, t: -mu, mu=[1.0], lr_adam=1e-3, lr_sgd=0.1, minibatch_size=1)
>>> mu, s2_post = next(steps)
>>> mu.round(6).tolist()
[0.909091]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

try:
    import numpy as np
except ImportError as error:
    raise ImportError("adabayes.reference needs NumPy: pip install '.[plot]' in the folder of AdaBayes") from error
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]
Gradient = Callable[[Float64, int], ArrayLike]  # gradient(weights, t), with t = 1, 2, ...
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
    """Iterate Algorithm 1, AdaBayes; yield the weights and their posterior variances after each step."""
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
    """Iterate Algorithm 2, AdaBayes-FP; yield the weights and their posterior variances after each step.

    The paper assigns the right-hand side of line 11 to ``s2_post``, but it is the inverse of ``s2_post``.
    """
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


def adabayes_k(
    gradient: Gradient,
    W: ArrayLike,
    *,
    lr: LearningRate,
    lr_sgd: LearningRate,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    matrix_scale: float = 4.0,
    learn_every: int = 2,
    refresh: int = 10,
    offset: int = 0,
    cautious: bool = True,
    centred: bool = False,
    sides: Collection[int] = (0, 1),
) -> Iterator[Float64]:
    r"""Train one matrix with AdaBayes-K, and yield :math:`W` after each step.

    The notation is that of :class:`adabayes.AdaBayesK`, which applies these equations to each block of a parameter. A
    prime, as in :math:`G'`, denotes a matrix in the eigenbasis; :math:`M` and :math:`V` always are.

    Args:
        gradient: returns the gradient :math:`G` of the mean loss at the weights ``W`` and step ``t``.
        W: the initial weights, a matrix.
        lr: the learning rate: a constant, or a schedule of ``t``.
        lr_sgd: the gain of a direction without gradients, before it is multiplied by ``matrix_scale``. A schedule must
            scale it together with ``lr``.
        betas: :math:`\beta_1` and :math:`\beta_2`.
        weight_decay: decoupled, in AdamW's convention.
        matrix_scale: factor of the steps, if any side is rotated.
        learn_every: steps between two updates of a factor; fewer at the beginning.
        refresh: steps between two refreshes of the bases; fewer at the beginning.
        offset: refresh the bases at the steps ``t`` for which ``t - offset`` is a multiple of the interval.
        cautious: move only in directions in which the averaged gradient and the newest one have the same sign.
        centred: average the squares of :math:`G' - M_{t-1}` in place of those of :math:`G'`.
        sides: the sides to rotate. 0 is the left side, with basis :math:`Q_A`, and 1 the right side, with basis
            :math:`Q_C`. The basis of any other side is the identity.

    The first step moves all directions equally far, whatever the size of their gradients:

    >>> steps = adabayes_k(lambda W, t: W, W=[[3.0, 0.0], [0.0, 1.0]], lr=0.1, lr_sgd=1e4, matrix_scale=4)
    >>> next(steps).round(4).tolist()
    [[2.6, 0.0], [0.0, 0.6]]
    """
    W = np.array(W, dtype=np.float64)
    beta1, beta2 = betas
    M, V = np.zeros_like(W), np.zeros_like(W)
    Q_A, Q_C = np.eye(W.shape[0]), np.eye(W.shape[1])
    A, C = np.zeros_like(Q_A), np.zeros_like(Q_C)
    scale = matrix_scale if sides else 1.0
    t = 0
    while True:
        t += 1
        eta = _at(lr, t)
        eps = eta / _at(lr_sgd, t)
        G = np.asarray(gradient(W, t), dtype=np.float64)

        # The factors average over every k-th gradient. A learns at the multiples of k, and C half an interval later.
        k = _interval(t, learn_every)
        if t % k == 0:
            A = beta2**k * A + (1 - beta2**k) * G @ G.T
        if t % k == k // 2:
            C = beta2**k * C + (1 - beta2**k) * G.T @ G

        # Both learn from the first gradient, which provides the first bases.
        if t == 1:
            Q_A = _eigenvectors(A) if 0 in sides else Q_A
            Q_C = _eigenvectors(C) if 1 in sides else Q_C

        # In the eigenbasis, each direction is a weight of AdaBayes-FP.
        G_prime = Q_A.T @ G @ Q_C
        V = beta2 * V + (1 - beta2) * (G_prime - M if centred else G_prime) ** 2
        M = beta1 * M + (1 - beta1) * G_prime
        U_prime = M / (1 - beta1**t) / (eps / 2 + np.sqrt(eps**2 / 4 + V / (1 - beta2**t)))
        if cautious:
            U_prime = np.where(np.sign(M) == np.sign(G_prime), U_prime, 0.0)
        W = (1 - eta * weight_decay) * W - scale * eta * Q_A @ U_prime @ Q_C.T

        # A refresh changes the bases, and M is rotated into the new ones. V is an average of squares, which cannot be
        # rotated: it is sorted as the bases are, and raised to the least value that is possible for the new M.
        if t > 1 and (t - offset) % _interval(t, refresh) == 0:
            mean_G = Q_A @ M @ Q_C.T
            if 0 in sides:
                Q_A, order = _refresh(A, Q_A)
                V = V[order, :]
            if 1 in sides:
                Q_C, order = _refresh(C, Q_C)
                V = V[:, order]
            M = Q_A.T @ mean_G @ Q_C
            if not centred:
                V = np.maximum(V, _least_ratio(beta1, beta2) * M**2)
        yield W


def _eigenvectors(A: Float64) -> Float64:
    """Return the eigenvectors of a factor as columns, sorted by eigenvalue, largest first.

    Where A has no component, a small decreasing diagonal selects the axes, in order. It turns the other eigenvectors a
    little, and a refresh turns them back.
    """
    Q = np.linalg.eigh(_scale(A) - 1e-5 * np.diag(np.arange(len(A)))).eigenvectors[:, ::-1]
    return _refresh(A, Q)[0]


def _refresh(A: Float64, Q: Float64) -> tuple[Float64, NDArray[np.intp]]:
    r"""Return :math:`\text{qr}(A Q)`, with columns sorted by :math:`q^T A q`, largest first, and their order.

    A small shift keeps the columns in the null space of A in place.
    """
    AQ = _scale(A) @ Q
    order = np.argsort(-np.sum(Q * AQ, axis=0), kind="stable")
    return np.linalg.qr((AQ + 1e-4 * Q)[:, order]).Q, order


def _scale(A: Float64) -> Float64:
    """Divide a factor by its largest entry."""
    return A / (np.abs(A).max() or 1.0)


def _interval(t: int, longest: int) -> int:
    """Return an eighth of the steps so far, rounded down to a power of two, but at least 1 and at most ``longest``."""
    power = 1
    while 2 * power <= t / 8:
        power *= 2
    return min(power, longest)


def _least_ratio(beta1: float, beta2: float) -> float:
    r"""Return the least possible :math:`V / M^2`, from the Cauchy-Schwarz inequality.

    .. math:: M^2 = (1 - \beta_1)^2 \left( \sum_k \beta_1^k g_k \right)^2
              \le (1 - \beta_1)^2 \sum_k \left( \frac{\beta_1^2}{\beta_2} \right)^k \sum_k \beta_2^k g_k^2
              = \frac{(1 - \beta_1)^2}{1 - \beta_1^2 / \beta_2} \, \frac{V}{1 - \beta_2}

    If :math:`\beta_2 \le \beta_1^2`, the first sum diverges, and there is no bound.
    """
    return (1 - beta2) * (1 - beta1**2 / beta2) / (1 - beta1) ** 2 if beta2 > beta1**2 else 0.0


def _at(value: Any, t: int) -> float:
    """Return the value of a constant or of a schedule at step t."""
    return float(value(t) if callable(value) else value)
