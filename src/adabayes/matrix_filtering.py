r"""The filter for a weight matrix: a Kalman filter for the optimum of all of its weights together.

The weights are a vector :math:`w = \text{vec} W`, their uncertainty a covariance matrix :math:`P`, and the Fisher
information of a gradient a matrix :math:`H`. Between gradients nothing is new: :func:`adabayes.filtering.predict` takes
matrices, with :math:`q I` for its noise.

The optimum drifts in no preferred direction, so the fixed point of :math:`P` is a function of :math:`H`: the
eigenvectors stay, and each eigenvalue goes through a scalar equation of :mod:`adabayes.filtering`.

Each function is one equation and pure. It takes arrays of NumPy, torch and JAX. Matrices may have leading axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adabayes import filtering
from adabayes._util.arrays import namespace
from adabayes.filtering import Dynamics

Array = Any  # numpy.ndarray | torch.Tensor | jax.Array: symmetric matrices


def update(prior: Array, H: Array) -> Array:
    r"""Return the posterior covariance after a gradient, Eq. 18a for matrices.

    .. math:: P_\text{post} = (P_\text{prior}^{-1} + H)^{-1}
    """
    return _inverse(_inverse(prior) + H)


def fixed_point(H: Array, eta: Array, sigma2: Array) -> Array:
    r"""Return the paper's fixed point, Eq. 21 with a matrix root.

    .. math:: P^{-1} = \frac{I}{2 \sigma^2} + \left( \frac{I}{4 \sigma^4} + \frac{H}{\eta^2} \right)^{1/2}

    It solves :math:`\eta^2 L^2 - \frac{\eta^2}{\sigma^2} L - H = 0` for :math:`L = P^{-1}`.

    >>> import numpy as np
    >>> fixed_point(np.zeros((2, 2)), eta=1e-3, sigma2=0.1)
    array([[0.1, 0. ],
           [0. , 0.1]])
    """
    return of_eigenvalues(lambda h: filtering.fixed_point(h, eta, sigma2), H)


def exact_fixed_point(H: Array, dynamics: Dynamics) -> Array:
    r"""Return the fixed point of the filter for constant information, without approximation.

    .. math:: q L^2 - (f I + q H) L - (1 - f) H = 0, \qquad L = P^{-1}
    """
    return of_eigenvalues(lambda h: filtering.exact_fixed_point(h, dynamics), H)


def natural_gradient(H: Array, lam: Array) -> Array:
    r"""Return the fixed point of :func:`adabayes.filtering.fading_memory`: no root, as in the scalar filter (Eq. 31).

    .. math:: P = \lambda H^{-1}
    """
    return of_eigenvalues(lambda h: filtering.mean_square_fixed_point(h, lam), H)


def of_eigenvalues(function: Callable[[Array], Array], H: Array) -> Array:
    r"""Apply a function to a symmetric matrix without negative eigenvalues, through its eigenbasis.

    .. math:: f(H) = Q \, \text{diag}(f(h_1), f(h_2), \ldots) \, Q^T, \qquad H = Q \, \text{diag}(h) \, Q^T
    """
    Q = namespace(H).linalg.eigh(H)[1]
    h = (Q * (H @ Q)).sum(-2)
    h = h * (h > 0)  # eigenvalues of zero come out as small numbers of either sign
    return (Q * function(h)[..., None, :]) @ Q.mT


def _inverse(x: Array) -> Array:
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__().linalg.inv(x)
    return x.inverse()  # torch
