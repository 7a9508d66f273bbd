r"""Eigenbases of a matrix's gradients, found from small factors.

The gradients of a weight matrix :math:`W` (m x n) have a covariance of mn x mn numbers, the Fisher information
:math:`H`. It is taken as a Kronecker product :math:`H \approx A \otimes C` of the covariances of its sides,

.. math:: A = \langle G G^T \rangle, \qquad C = \langle G^T G \rangle,

whose eigenvectors are :math:`Q_A \otimes Q_C`. In that basis the matrix filter falls apart into scalar ones: see
:class:`adabayes.AdaBayesK`.

Each function is one equation, pure, over torch and JAX arrays alike. Arrays may have leading axes: many matrices of one
shape are rotated by one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

__all__ = [
    "basis_of",
    "carried",
    "factor",
    "from_modes",
    "modes",
    "refreshed",
    "rotate",
    "rows",
    "sides",
    "spread",
    "to_modes",
]

Array = Any  # torch.Tensor | jax.Array
Bases = Sequence[Array | None]  # of each mode: orthonormal, an eigenvector in each column; None where it is not rotated


# The shape in which a parameter is rotated


@lru_cache(maxsize=4096)
def modes(shape: tuple[int, ...], max_size: int) -> tuple[int, ...]:
    """Return the shape in which a parameter is rotated; that of vectors and numbers is their own.

    A convolution is a matrix, out x (in * height * width), as long as that has at most ``max_size`` columns, and else
    has three modes: out x (height * width) x in.

    >>> modes((64, 32, 3, 3), max_size=2048), modes((64, 512, 3, 3), max_size=2048), modes((10,), max_size=2048)
    ((64, 288), (64, 9, 512), (10,))
    """
    if len(shape) <= 2:
        return shape
    rest = math.prod(shape[1:])
    return (shape[0], rest) if rest <= max_size else (shape[0], math.prod(shape[2:]), shape[1])


@lru_cache(maxsize=4096)
def sides(shape: tuple[int, ...], max_size: int) -> tuple[int, ...]:
    """Return which modes are rotated: those of at most ``max_size``. A larger one, a vocabulary, keeps its own basis.

    >>> sides((50257, 768), max_size=2048), sides((768, 1), max_size=2048), sides((768,), max_size=2048)
    ((1,), (0,), ())
    """
    if len(shape) < 2 or 0 in shape:
        return ()
    return tuple(side for side, size in enumerate(modes(shape, max_size)) if 1 < size <= max_size)


def to_modes(x: Array, max_size: int) -> Array:
    """Put a parameter's gradient into the shape in which it is rotated."""
    shape = modes(tuple(x.shape), max_size)
    return x.reshape(shape) if len(shape) < 3 else x.reshape(shape[0], shape[2], shape[1]).mT


def from_modes(x: Array, shape: Sequence[int]) -> Array:
    """Put it back into the shape of the parameter."""
    return (x if x.ndim < 3 else x.mT).reshape(tuple(shape))


# The eigenbasis


def rows(gradient: Array, side: int, rank: int) -> Array:
    """Return a gradient as a matrix whose rows are those of one of its last ``rank`` axes."""
    lead, size = gradient.shape[:-rank], gradient.shape[side - rank]
    rest = math.prod(gradient.shape[-rank:]) // size
    if side == rank - 1:
        return gradient.reshape(*lead, rest, size).mT
    return (gradient if side == 0 else gradient.swapaxes(-3, -2)).reshape(*lead, size, rest)


def factor(gradient: Array, side: int, rank: int) -> Array:
    r"""The covariance of one of the last ``rank`` axes: :math:`G G^T` of the left, :math:`G^T G` of the right."""
    x = rows(gradient, side, rank)
    return x @ x.mT


def rotate(x: Array, bases: Bases, back: bool = False) -> Array:
    r"""Turn a matrix into the eigenbasis, :math:`X' = Q_A^T X Q_C`, or back, :math:`X = Q_A X' Q_C^T`."""
    rank, shape = len(bases), x.shape
    lead = shape[:-rank]
    for side, basis in enumerate(bases):
        if basis is None:
            continue
        q = basis.mT if back else basis
        if side == rank - 1:
            x = x.reshape(*lead, math.prod(shape[-rank:-1]), shape[-1]) @ q
        elif side == 0:
            x = q.mT @ x.reshape(*lead, shape[-rank], math.prod(shape[1 - rank :]))
        else:  # the middle one of three
            x = q.mT[..., None, :, :] @ x
        x = x.reshape(shape)
    return x


def basis_of(factor: Array) -> Array:
    """The eigenvectors of a factor, those of the largest eigenvalues first."""
    size = (factor * factor).sum((-2, -1), keepdims=True) ** 0.5
    scaled = factor / (size + (size == 0))
    # A gradient of nan makes the weights nan, as with any optimizer; it is not to be an error here.
    library = _namespace(factor)
    return library.linalg.eigh(library.where(scaled * 0 == 0, -scaled, 0.0))[1]


def refreshed(factor: Array, basis: Array) -> tuple[Array, Array]:
    r"""One step of orthogonal iteration, :math:`Q \leftarrow \text{qr}(A Q)`, and the order in which columns are taken.

    Columns are sorted by their Rayleigh quotients :math:`q^T A q`, largest first: so the iteration converges to
    eigenvectors, not only to the spaces that they span.
    """
    product = factor @ basis
    order = (-(basis * product).sum(0)).argsort()
    return _namespace(factor).linalg.qr(product[:, order])[0], order


def carried(squares: Array, turns: Bases) -> Array:
    r"""Averaged squares in a basis that has turned by :math:`R`, of components that were uncorrelated in the old one.

    .. math:: V'_{ij} = \sum_{kl} R_{ki}^2 V_{kl} R_{lj}^2
    """
    return rotate(squares, [None if turn is None else turn * turn for turn in turns])


# The schedule


def spread(costs: Sequence[int], refresh: int) -> list[int]:
    """Return at which step, modulo ``refresh``, the bases of each parameter are refreshed.

    They are shared out by cost, the largest first, so that steps take about equally long.

    >>> spread([1, 8, 1, 1], refresh=2)
    [1, 0, 1, 1]
    """
    loads = [0] * refresh
    slots = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        slots[index] = loads.index(min(loads))
        loads[slots[index]] += costs[index]
    return slots


def _namespace(x: Array) -> Any:
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    import torch

    return torch
