r"""Eigenbases of a matrix's gradients, found from small factors.

The gradients of a weight matrix :math:`W` (m x n) have a covariance of mn x mn numbers, the Fisher information
:math:`H`. It is taken as a Kronecker product :math:`H \approx A \otimes C` of the covariances of its sides,

.. math:: A = \langle G G^T \rangle, \qquad C = \langle G^T G \rangle,

whose eigenvectors are :math:`Q_A \otimes Q_C`. In that basis the matrix filter falls apart into scalar ones: see
:class:`adabayes.AdaBayesK`.

A large matrix is cut into blocks, each with factors and bases of its own, so that the cost of a weight is bounded.

Each function is one equation, pure, over torch and JAX arrays alike. Arrays may have leading axes: all blocks are
rotated by one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = [
    "Blocks",
    "basis_of",
    "carried",
    "cut",
    "factor",
    "from_blocks",
    "interval",
    "learns",
    "least_share",
    "refreshed",
    "rotate",
    "sorted_by",
    "spread",
    "to_blocks",
]

Array = Any  # torch.Tensor | jax.Array
Bases = tuple[Array | None, Array | None]  # of both sides: an eigenvector in each column; None where it is not rotated


# The blocks that a parameter is cut into


class Blocks(NamedTuple):
    """``rows`` x ``columns`` blocks, each of m x n; the last ones are filled up with zeros."""

    rows: int
    columns: int
    m: int
    n: int
    sides: tuple[int, ...]  # that are rotated: 0 is the left one, 1 the right one

    @property
    def number(self) -> int:
        return self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of all blocks, one after the other."""
        return self.number, self.m, self.n

    @property
    def cost(self) -> int:
        """That of refreshing a block's bases, in proportion."""
        return sum(self.size(side) ** 3 for side in self.sides)

    def size(self, side: int) -> int:
        """Return how long a side of a block is."""
        return (self.m, self.n)[side]


@lru_cache(maxsize=4096, typed=True)
def cut(shape: tuple[int, ...], block_size: int, max_size: int) -> Blocks | None:
    """Return the blocks of a parameter of this shape; None if nothing of it is rotated, as of vectors and numbers.

    A convolution is a matrix, out x (in * height * width). Sides above ``block_size`` are cut into equal parts. A side
    above ``max_size``, a vocabulary, is neither cut nor rotated.

    >>> cut((512, 128), block_size=128, max_size=2048)
    Blocks(rows=4, columns=1, m=128, n=128, sides=(0, 1))
    >>> cut((50257, 768), block_size=128, max_size=2048)
    Blocks(rows=1, columns=6, m=50257, n=128, sides=(1,))
    >>> cut((64, 32, 3, 3), block_size=128, max_size=2048)
    Blocks(rows=1, columns=3, m=64, n=96, sides=(0, 1))
    """
    if len(shape) < 2 or 0 in shape:
        return None
    matrix = shape[0], math.prod(shape[1:])
    rows, columns = (1 if size > max_size else -(-size // block_size) for size in matrix)
    m, n = -(-matrix[0] // rows), -(-matrix[1] // columns)
    sides = tuple(side for side, size in enumerate((m, n)) if 1 < size <= max_size)
    return Blocks(rows, columns, m, n, sides) if sides else None


def to_blocks(x: Array, blocks: Blocks) -> Array:
    """Cut a parameter, or its gradient, into blocks: an array of number x m x n."""
    rows, columns, m, n, _ = blocks
    x = _padded(x.reshape(x.shape[0], -1), rows * m, columns * n)
    return x.reshape(rows, m, columns, n).swapaxes(1, 2).reshape(blocks.shape)


def from_blocks(x: Array, blocks: Blocks, shape: Sequence[int]) -> Array:
    """Put blocks together again, to an array of this shape."""
    rows, columns, m, n, _ = blocks
    x = x.reshape(rows, columns, m, n).swapaxes(1, 2).reshape(rows * m, columns * n)
    return x[: shape[0], : math.prod(shape[1:])].reshape(tuple(shape))


def _padded(x: Array, rows: int, columns: int) -> Array:
    below, right = rows - x.shape[0], columns - x.shape[1]
    if not below and not right:
        return x
    library = _namespace(x)
    if hasattr(library, "pad"):
        return library.pad(x, ((0, below), (0, right)))
    return library.nn.functional.pad(x, (0, right, 0, below))


# The eigenbasis


def factor(gradient: Array, side: int) -> Array:
    r"""The covariance of a side: :math:`G G^T` of the left one, :math:`G^T G` of the right one."""
    return gradient.mT @ gradient if side else gradient @ gradient.mT


def rotate(x: Array, bases: Bases, back: bool = False) -> Array:
    r"""Turn a matrix into the eigenbasis, :math:`X' = Q_A^T X Q_C`, or back, :math:`X = Q_A X' Q_C^T`."""
    left, right = bases
    if left is not None:
        x = (left if back else left.mT) @ x
    if right is not None:
        x = x @ (right.mT if back else right)
    return x


def basis_of(factor: Array) -> Array:
    """The eigenvectors of a factor, those of the largest eigenvalues first."""
    library = _namespace(factor)
    scaled = _scaled(factor)
    # A gradient of nan makes the weights nan, as with any optimizer; it is not to be an error here.
    finite = library.where(scaled * 0 == 0, -scaled, 0.0)
    # LAPACK in fp32 may not converge where most rows are zero; a multiple of the identity does not change eigenvectors.
    return library.linalg.eigh(finite - 1e-6 * _identity(factor))[1]


def refreshed(factor: Array, basis: Array) -> tuple[Array, Array]:
    r"""One step of orthogonal iteration, :math:`Q \leftarrow \text{qr}(A Q)`, and the order in which columns are taken.

    Columns are sorted by their Rayleigh quotients :math:`q^T A q`, largest first: so the iteration converges to
    eigenvectors, not only to the spaces that they span.
    """
    product = _scaled(factor) @ basis
    order = (-(basis * product).sum(-2)).argsort(-1)
    return _namespace(factor).linalg.qr(sorted_by(product, order, 1))[0], order


def _identity(factor: Array) -> Array:
    place = {} if hasattr(factor, "__array_namespace__") else {"device": factor.device}  # of JAX's tracers, not known
    return _namespace(factor).eye(factor.shape[-1], dtype=factor.dtype, **place)


def _scaled(factor: Array) -> Array:
    """Divide each factor by its largest entry, so that nothing that is computed with it overflows."""
    largest = _namespace(factor).amax(abs(factor), (-2, -1), keepdims=True)
    return factor / (largest + (largest == 0))


def sorted_by(x: Array, order: Array, side: int) -> Array:
    """Put the rows (``side`` 0) or the columns (1) of each matrix into an order of their own."""
    index = order[..., None, :] if side else order[..., :, None]
    library = _namespace(x)
    if hasattr(library, "take_along_axis"):
        return library.take_along_axis(x, index, side - 2)
    return x.gather(side - 2, index.expand(x.shape))  # a quarter of the time of take_along_dim, which wraps indices


def carried(squares: Array, turns: Bases) -> Array:
    r"""Averaged squares in a basis that has turned by :math:`R`, of components that were uncorrelated in the old one.

    .. math:: V'_{ij} = \sum_{kl} R_{ki}^2 V_{kl} R_{lj}^2
    """
    left, right = (None if turn is None else turn * turn for turn in turns)
    return rotate(squares, (left, right))


def least_share(beta1: Any, beta2: Any) -> Any:
    r"""The least that an average of squares can be, as a share of the squared average of the same numbers.

    .. math:: V \ge \frac{(1 - \beta_2)(\beta_2 - \beta_1^2)}{(1 - \beta_1)^2 \beta_2} M^2

    That is Cauchy and Schwarz's inequality. A basis that turns far, as in directions that were not seen before, breaks
    it: there, the squares are those of other directions. Steps would then be as large as ``lr_sgd`` permits.

    >>> round(least_share(0.9, 0.99), 3)
    0.182
    """
    room = beta2 - beta1**2
    return (1 - beta2) * room * (room > 0) / ((1 - beta1) ** 2 * (beta2 + (beta2 == 0)))


# The schedule


def interval(t: Any, longest: int) -> Any:
    """Return the steps from one update to the next at step t: an eighth of the steps so far, at most ``longest``.

    An average over few gradients changes with each of them, and with it its eigenvectors; later, it changes slowly. The
    eighth is rounded down to a power of two, so that each interval lasts for eight of them, and all have their turn.

    >>> [interval(t, longest=10) for t in (1, 8, 16, 31, 32, 64, 128, 1000)]
    [1, 1, 2, 2, 4, 8, 10, 10]
    """
    eighth = t // 8 | 1
    for places in (1, 2, 4, 8, 16):  # all bits below the highest one
        eighth = eighth | eighth >> places
    power = (eighth + 1) // 2
    return min(power, longest) if isinstance(t, int) else _namespace(t).minimum(power, longest)


def learns(side: int, t: Any, every: Any) -> Any:
    """Tell whether a side's factor learns from the gradient of step t: at every so-many-th, the sides in turn.

    >>> [[t for t in range(1, 9) if learns(side, t, every=4)] for side in (0, 1)]
    [[4, 8], [2, 6]]
    """
    return t % every == side * every // 2


def spread(costs: Sequence[int], numbers: Sequence[int], refresh: int) -> list[int]:
    """Return at which step, modulo ``refresh``, the first block of each parameter is refreshed; the others follow it.

    A parameter's blocks are refreshed one at each step; if it has more than ``refresh``, every ``refresh``-th of them
    at the same step. The costliest parameters choose first, so that steps take about equally long.

    Args:
        costs: of a block of each parameter.
        numbers: of blocks that each parameter has.
        refresh: steps from one refresh of a block to the next.

    >>> spread([8, 1, 8, 1], [2, 1, 1, 1], refresh=3)
    [0, 0, 2, 1]
    """
    loads = [0] * refresh
    first = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        first[index] = loads.index(min(loads))
        for place in range(numbers[index]):
            loads[(first[index] + place) % refresh] += costs[index]
    return first


def _namespace(x: Array) -> Any:
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    import torch

    return torch
