"""Apply the reference of AdaBayes-K to models: one generator per block, on problems whose bases are unique.

The reference rotates one matrix. The optimizers cut a parameter into blocks, pad the blocks at its edges with zeros,
and refresh the bases of different blocks at different steps. Here each block is a slice of the parameter, without
padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adabayes import reference
from adabayes._blocks.blocks import cut

__all__ = ["Problem", "draw_problem", "reference_path", "tolerance"]

Array = NDArray[np.float64]
Shape = tuple[int, ...]


class Problem(NamedTuple):
    """A model, and the gradients and learning rates of its training, with one entry per step."""

    start: list[Array]
    gradients: list[list[Array]]
    lrs: list[float]
    lr_sgd: float  # at the learning rate of the first step
    block_size: int
    max_size: int


def draw_problem(
    shapes: Sequence[Shape],
    *,
    steps: int,
    lr: float = 0.01,
    lr_sgd: float = 10.0,
    block_size: int = 4,
    max_size: int = 12,
    seed: int = 0,
) -> Problem:
    """Draw weights, gradients and a decaying schedule.

    The bases are unique up to signs, which do not change the weights. For this, the first gradient of each block has
    the singular values 1, 2, 3, ..., and the rotated sides of a block must differ by at most one: otherwise the longer
    side has several directions without a gradient, and rounding would choose a basis for them.
    """
    random = np.random.default_rng(seed)
    start = [np.asarray(random.standard_normal(shape)) for shape in shapes]
    gradients = [[np.asarray(random.standard_normal(shape)) for shape in shapes] for _ in range(steps)]
    for first in gradients[0]:
        for block in _slices(first.shape, block_size, max_size):
            _matrix(first)[block] = _with_distinct_singular_values(_matrix(first)[block].shape, random)
    lrs = [lr * (1 - t / (2 * steps)) for t in range(steps)]
    return Problem(start, gradients, lrs, lr_sgd, block_size, max_size)


def reference_path(problem: Problem, *, refresh: int = 10, **options: Any) -> list[list[Array]]:
    """Return the weights after each step, as the reference computes them. The options are those of the reference."""
    start, gradients, lrs, lr_sgd, block_size, max_size = problem
    path = [[np.empty_like(weights) for weights in start] for _ in gradients]
    grids = tuple(cut(weights.shape, block_size, max_size) for weights in start)
    for index, (weights, grid) in enumerate(zip(start, grids)):
        for number, block in enumerate(_slices(weights.shape, block_size, max_size)):
            steps = reference.adabayes_k(
                lambda _, t, index=index, block=block: _matrix(gradients[t - 1][index])[block],  # type: ignore[misc]
                _matrix(weights)[block],
                lr=lambda t: lrs[t - 1],
                lr_sgd=lambda t: lr_sgd * lrs[t - 1] / lrs[0],
                refresh=refresh,
                offset=number,
                sides=grid.sides if grid else (),
                **options,
            )
            for row, W in zip(path, steps):
                _matrix(row[index])[block] = W
    return path


def tolerance(problem: Problem) -> float:
    """Return the largest difference that rounding can make between two forms.

    In the basis of its singular vectors, the first gradient G is diagonal. Rounding makes its other entries about
    n u |G| instead of zero, with u = 1e-16, n = 4 and |G| = 4. Directions without gradients have the largest gain,
    ``lr_sgd``, so the weights differ by about 2e-15 ``lr_sgd``. Eigenvectors of factors with eigenvalues 1, 4, 9 and 16
    are exact to a few u, which adds as much. Later steps add less: orthogonal iteration forgets perturbations of its
    basis, and no gain is as large. In 120 problems the largest difference was 6e-15 ``lr_sgd``, at the first step. A
    factor of about 100 above that is a margin for other implementations of LAPACK.
    """
    return 1e-12 * max(problem.lr_sgd, 1.0)


def _matrix(x: Array) -> Array:
    """Return a view of a parameter as a matrix. Vectors and scalars have one row."""
    return x.reshape(x.shape[0] if x.ndim > 1 else 1, -1)


def _slices(shape: Shape, block_size: int, max_size: int) -> list[tuple[slice, slice]]:
    """Return the rows and the columns of each block. A parameter that is not rotated is one block."""
    grid = cut(shape, block_size, max_size)
    if grid is None:
        return [(slice(None), slice(None))]
    height, width = shape[0], math.prod(shape[1:])
    rows = [slice(i, min(i + grid.m, height)) for i in range(0, height, grid.m)]
    columns = [slice(j, min(j + grid.n, width)) for j in range(0, width, grid.n)]
    return [(row, column) for row in rows for column in columns]


def _with_distinct_singular_values(shape: Shape, random: np.random.Generator) -> Array:
    """Draw a matrix with the singular values 1, 2, 3, ..."""
    left, _, right = np.linalg.svd(random.standard_normal(shape), full_matrices=False)
    return np.asarray(left * np.arange(1, 1 + min(shape)) @ right)
