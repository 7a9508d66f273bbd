r"""Eigenbases of a matrix's gradients, computed from small factors.

The gradients of a weight matrix :math:`W` (m x n) have a covariance with mn x mn entries, the Fisher information
:math:`H`. We approximate it by a Kronecker product :math:`H \approx A \otimes C` of the covariances of its two sides,

.. math:: A = \langle G G^T \rangle, \qquad C = \langle G^T G \rangle,

whose eigenvectors are :math:`Q_A \otimes Q_C`. In this basis the matrix filter separates into scalar filters: see
:class:`adabayes.AdaBayesK`.

Each function is one equation and pure. It takes arrays of torch or JAX, with any leading axes: one call rotates all
blocks of a parameter.
"""

from __future__ import annotations

from typing import Any

from adabayes._util.arrays import namespace

__all__ = ["carry_over", "eigenvectors", "factor", "least_ratio", "limit", "refresh", "reorder", "rotate"]

RAMP = 1e-5  # difference between the ramp's entries on the diagonal, which makes the first eigenvectors unique
SHIFT = 1e-4  # multiple of the identity that is added to a factor when its basis is refreshed

Array = Any  # torch.Tensor | jax.Array
# One array for each side, left and right; None for a side that is not rotated
Sides = tuple[Array | None, Array | None]


def limit(gradient: Array) -> Array:
    """Limit finite entries, so that sums of them stay finite. Infinite ones stay: they show that training has diverged.

    The limit is the largest number to the power of 0.8, or 6.6e30 in fp32. The squares of such gradients overflow, so
    AdaBayes-FP does not move in their directions anyway.
    """
    library = namespace(gradient)
    largest = float(library.finfo(gradient.dtype).max) ** 0.8
    return library.where(abs(gradient) < float("inf"), library.clip(gradient, -largest, largest), gradient)


def factor(gradient: Array, side: int) -> Array:
    r"""Return the covariance of one side: :math:`G G^T` for the left side (0), :math:`G^T G` for the right one (1)."""
    return gradient.mT @ gradient if side else gradient @ gradient.mT


def rotate(x: Array, bases: Sides, back: bool = False) -> Array:
    r"""Rotate a matrix into the eigenbasis, :math:`X' = Q_A^T X Q_C`, or back, :math:`X = Q_A X' Q_C^T`."""
    left, right = bases
    if left is not None:
        x = (left if back else left.mT) @ x
    if right is not None:
        x = x @ (right.mT if back else right)
    return x


def eigenvectors(factor: Array) -> Array:
    """Return the eigenvectors of a factor as columns, sorted by eigenvalue, largest first.

    The factor is scaled to a largest entry of 1, and a small ramp is subtracted from its diagonal: 0, 1, 2, ... times
    ``RAMP``. Where the gradient has no component, the eigenvectors are then the weights' own axes, in order. Without
    the ramp, rounding would choose them, and LAPACK in fp32 might not converge if most rows of a factor are zero. The
    ramp turns the other eigenvectors a little; a step of orthogonal iteration turns them back.
    """
    library = namespace(factor)
    scaled = _scale(factor)
    # As with any optimizer, a gradient of nan makes the weights nan; it should not raise an error here.
    finite = library.where(scaled * 0 == 0, scaled, 0.0)
    basis = library.linalg.eigh(RAMP * _count_diagonal(factor) - finite)[1]  # negated: eigh sorts eigenvalues upwards
    return refresh(finite, basis)[0]


def refresh(factor: Array, basis: Array) -> tuple[Array, Array]:
    r"""Take one step of orthogonal iteration, :math:`Q \leftarrow \text{qr}(A Q + \delta Q)`; return basis and order.

    The factor is scaled to a largest entry of 1. The small shift :math:`\delta` does not change its eigenvectors. With
    it, directions without gradients keep their place; without it, rounding would choose new ones. The columns are first
    sorted by their Rayleigh quotients :math:`q^T A q`, largest first, because QR orthogonalises each column against
    those before it. The order maps new columns to old ones: :func:`reorder` applies it.
    """
    product = _scale(factor) @ basis
    library = namespace(factor)
    order = library.argsort(-(basis * product).sum(-2), stable=True)  # directions without gradients keep their order
    Q, R = library.linalg.qr(reorder(product + SHIFT * basis, order, 1))
    reversed_columns = library.diagonal(R, 0, -2, -1)[..., None, :] < 0  # LAPACK does not choose the sign of a column
    return library.where(reversed_columns, -Q, Q), order


def reorder(x: Array, order: Array, side: int) -> Array:
    """Reorder the rows (``side`` 0) or the columns (``side`` 1) of each matrix."""
    index = order[..., None, :] if side else order[..., :, None]
    library = namespace(x)
    if hasattr(library, "take_along_axis"):
        return library.take_along_axis(x, index, side - 2)
    return x.gather(side - 2, index.expand(x.shape))  # four times as fast as take_along_dim, which wraps indices


def carry_over(squares: Array, rotations: Sides) -> Array:
    r"""Carry averaged squares over to a basis rotated by :math:`R`, assuming uncorrelated components in the old one.

    .. math:: V'_{ij} = \sum_{kl} R_{ki}^2 V_{kl} R_{lj}^2
    """
    left, right = (None if rotation is None else rotation * rotation for rotation in rotations)
    return rotate(squares, (left, right))


def least_ratio(beta1: Any, beta2: Any) -> Any:
    r"""Return the lower bound on :math:`V / M^2`, where M averages a sequence with beta1, and V its squares with beta2.

    .. math:: V \ge \frac{(1 - \beta_2)(\beta_2 - \beta_1^2)}{(1 - \beta_1)^2 \beta_2} M^2

    This is the Cauchy-Schwarz inequality; there is no bound if :math:`\beta_2 \le \beta_1^2`. A refresh can violate it,
    for example by a rotation into directions without earlier gradients, because V then holds the squares of other
    directions. Without this bound, a step could be as large as ``lr_sgd`` permits.

    >>> round(least_ratio(0.9, 0.99), 3)
    0.182
    """
    margin = beta2 - beta1**2
    return (1 - beta2) / (1 - beta1) ** 2 * (margin * (margin > 0) / (beta2 + (beta2 == 0)))


def _scale(factor: Array) -> Array:
    """Divide each factor by its largest entry, so that products do not overflow."""
    largest = namespace(factor).amax(abs(factor), (-2, -1), keepdims=True)
    return factor / (largest + (largest == 0))


def _count_diagonal(factor: Array) -> Array:
    """Return a diagonal matrix with the entries 0, 1, 2, ..."""
    library = namespace(factor)
    device = {} if hasattr(factor, "__array_namespace__") else {"device": factor.device}  # JAX's tracers have none
    return library.diag(library.arange(factor.shape[-1], dtype=factor.dtype, **device))
