"""Measures how correlated the gradients of each matrix are, which AdaBayes-K uses."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from adabayes._blocks.blocks import check_block_size, cut, to_blocks
from adabayes._util.checks import check_integer, check_range
from adabayes._util.missing_extra import missing_extra
from adabayes._util.table import aligned, html, shortened
from adabayes._util.tensors import real_view
from adabayes.diagnostics._names import named
from adabayes.eigenbasis import factor

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes

__all__ = ["Correlation", "Correlations"]

_SIDES = ("left", "right")
_ENOUGH = 20  # number of gradients before a verdict


@dataclass(frozen=True)
class Correlation:
    """The fraction of the gradients' covariance that lies off the diagonal, for one matrix."""

    name: str
    shape: tuple[int, ...]
    shares: dict[str, float | None]  # the fraction of each side, "left" and "right"; None if larger than max_size
    total: float | None  # the fraction of both sides together; None if both are larger than max_size
    steps: int  # number of gradients seen

    @property
    def weights(self) -> int:
        """The number of weights of the matrix."""
        return math.prod(self.shape)


class Correlations:
    r"""Measures how much of the gradients' covariance lies off the diagonal: what AdaBayes-K uses and Adam ignores.

    Train as usual, with any optimizer, and call :meth:`see` when gradients are ready: after ``backward``, clipping and
    unscaling, and before the step. It changes neither gradients nor random generators.

    For a matrix with gradients :math:`G` (m x n), it follows the factors that AdaBayes-K would have,
    :math:`A = \langle G G^T \rangle` of the left side, a layer's outputs, and :math:`C = \langle G^T G \rangle` of the
    right side, its inputs. The fraction of a side that lies off the diagonal is

    .. math:: f(A) = 1 - \frac{\sum_i A_{ii}^2}{\sum_{ij} A_{ij}^2}

    and the fraction of the matrix is that of :math:`A \otimes C`, :math:`1 - (1 - f(A)) (1 - f(C))`. It is 0 if
    coordinates are uncorrelated: then AdaBayes-K is AdaBayes-FP. It is near 1 if a few directions, none of them a
    coordinate, have most of the gradient. It shows how much AdaBayes-K can use, not how much faster training will be.

    A few gradients seem correlated even if their entries are independent. So both sums run over pairs of *different*
    steps, :math:`\sum_{s \ne t} \sum_{ij} (G_s G_s^T)_{ij} (G_t G_t^T)_{ij}`, which removes this bias if each step has
    its own minibatch. Noise may make a fraction negative; it is then shown as 0.

    A matrix that AdaBayes-K would cut into blocks is cut here too, and sums run over its blocks: correlations between
    two blocks are ignored. Leading dimensions count matrices if the optimizer's groups say so with ``batch_dims``.

    A step computes the products :math:`G G^T` and :math:`G^T G` of each block, and stores m² + n² values. Call
    :meth:`see` every few steps if that is too much. Gradients that are not finite are skipped.

    Args:
        source: a model, or any optimizer of torch.
        block_size: as in AdaBayes-K; an integer or a pair.
        max_size: as in AdaBayes-K; a larger side is ignored, because AdaBayes-K would not rotate it.
        beta2: decay of the averages, as in AdaBayes-K.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> watch = Correlations(model)
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(8, 3)).sum().backward()  # each input has the same gradient, each output too
        ...     watch.see()
        ...     optimizer.step()
        >>> print(watch.table())
        layer   shape  left  right  total
        ---------------------------------
        weight  2 x 3   50%    67%    83%
        ---------------------------------
        83% of the covariance is off the diagonal, over 20 gradients. AdaBayes-K has
        much to use here: try it.
    """

    def __init__(
        self,
        source: nn.Module | torch.optim.Optimizer,
        block_size: int | tuple[int, int] = 128,
        max_size: int = 16384,
        beta2: float = 0.99,
    ) -> None:
        if not isinstance(source, nn.Module) and not hasattr(source, "param_groups"):
            raise TypeError(f"Correlations takes a model or an optimizer, not a {type(source).__name__}")
        check_range("max_size", max_size, least=1.0)
        check_range("beta2", beta2, below=1.0)
        self._source = source
        self._block_size, self._max_size = check_block_size(block_size, check_integer), max_size
        self._beta2 = beta2
        self._matrices: dict[str, _Matrix] = {}

    @torch.no_grad()
    def see(self) -> None:
        """Add the current gradients to the averages."""
        for name, p, batch_dims in self._params():
            if p.grad is None:
                continue
            if hasattr(p.grad, "to_local"):
                raise NotImplementedError(
                    f"{name} is sharded, a {type(p).__name__}, and its factors need full gradients. Look at a smaller "
                    "model of the same kind on one device, or at this one under DDP."
                )
            if p.grad.layout != torch.strided:
                raise RuntimeError(f"{name} has a sparse gradient, which AdaBayes-K does not take")
            grad = real_view(p.grad)
            if grad.dim() < 2 or grad.numel() == 0:
                continue
            if name not in self._matrices:
                self._matrices[name] = _Matrix(grad, self._block_size, self._max_size, batch_dims)
            self._matrices[name].see(grad, 1 - self._beta2)

    def _params(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yield the name of each parameter, the parameter, and its number of batch dimensions."""
        if isinstance(self._source, nn.Module):
            yield from ((name, p, 0) for name, p in self._source.named_parameters())
        else:
            yield from ((name, p, group.get("batch_dims", 0)) for name, p, group in named(self._source))

    def layers(self) -> list[Correlation]:
        """Return the correlations of each matrix that has had two gradients or more."""
        return [matrix.correlation(name) for name, matrix in self._matrices.items() if matrix.steps > 1]

    @property
    def total(self) -> float | None:
        """The fraction of all matrices, weighted by their number of weights; None if no matrix has one."""
        known = [(layer.weights, layer.total) for layer in self.layers() if layer.total is not None]
        return sum(weights * fraction for weights, fraction in known) / sum(n for n, _ in known) if known else None

    @property
    def verdict(self) -> str:
        """One or two sentences on whether AdaBayes-K is worth a try."""
        total, steps = self.total, max((layer.steps for layer in self.layers()), default=0)
        if steps < _ENOUGH:
            return f"Seen {steps} gradients. It takes {_ENOUGH} to tell."
        if total is None:
            return "All sides are larger than max_size: AdaBayes-K would be AdaBayes-FP here."
        summary = f"{_percent(total)} of the covariance is off the diagonal, over {steps} gradients."
        if total < 0.1:
            return f"{summary} AdaBayes-K would be much like AdaBayes-FP here, and slower."
        return f"{summary} AdaBayes-K has {'something' if total < 0.5 else 'much'} to use here: try it."

    def table(self) -> str:
        """Return a table of all layers, and the verdict."""
        header, *lines = aligned(self._cells())
        rule = "-" * len(header)
        wrapped = [line for note in self._notes() for line in textwrap.wrap(note, 80)]
        return "\n".join([header, rule, *lines, *([rule] if lines else []), *wrapped])

    def _repr_html_(self) -> str:
        return html(self._cells(), self._notes())

    def _cells(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("layer", "shape", *_SIDES, "total")]
        for layer in self.layers():
            shown = [_percent(layer.shares[side]) for side in _SIDES]
            shape = " x ".join(map(str, layer.shape))
            rows.append((shortened(layer.name, 28), shape, *shown, _percent(layer.total)))
        return rows

    def _notes(self) -> list[str]:
        large = any(fraction is None for layer in self.layers() for fraction in layer.shares.values())
        return [*([f"-: a side larger than {self._max_size}, not looked at."] if large else []), self.verdict]

    def plot(self, path: str | PathLike[str] | None = None, ax: Axes | None = None) -> Axes:
        """Draw the fractions of all layers and save the figure to ``path`` if given."""
        try:
            import matplotlib.pyplot as plt
            from matplotlib.ticker import PercentFormatter
        except ImportError as error:
            raise missing_extra("plotting needs matplotlib", "plot") from error
        layers = [layer for layer in self.layers() if layer.total is not None]
        if not layers:
            raise RuntimeError("nothing to draw: call see() with the gradients of two steps or more first")
        if ax is None:
            _, ax = plt.subplots(figsize=(6.5, 1.3 + 0.2 * len(layers)), layout="constrained")
        rows = range(len(layers))
        ax.barh(rows, [layer.total or 0.0 for layer in layers], height=0.6, color="0.88", label="total")
        for side, colour in zip(_SIDES, ("tab:orange", "tab:blue")):
            fractions = [(layer.shares[side], row) for row, layer in enumerate(layers)]
            if dots := [(fraction, row) for fraction, row in fractions if fraction is not None]:
                ax.plot(*zip(*dots), "o", color=colour, markersize=4, label=side, clip_on=False)
        ax.set(xlim=(0, 1), ylim=(len(layers) - 0.5, -0.5), xlabel="fraction of the covariance off the diagonal")
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        ax.set_yticks(rows, [shortened(layer.name, 28) for layer in layers], fontsize="small")
        ax.tick_params(axis="y", length=0)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
        if path is not None:
            ax.get_figure(root=True).savefig(path, dpi=150)  # type: ignore[union-attr]
        return ax


class _Matrix:
    """The factors of one matrix."""

    def __init__(self, grad: Tensor, block_size: int | tuple[int, int], max_size: int, batch_dims: int) -> None:
        self._shape = tuple(grad.shape)
        self._sides = self._shape[batch_dims : batch_dims + 1], self._shape[batch_dims + 1 :]
        self._blocks = cut(self._shape, block_size, max_size, batch_dims)
        self._wide = torch.promote_types(grad.dtype, torch.float32)
        self._factors = {side: _Factor() for side in (self._blocks.sides if self._blocks else ())}
        self.steps = 0

    def see(self, grad: Tensor, weight: float) -> None:
        x = to_blocks(grad.to(self._wide), self._blocks) if self._blocks else grad
        seen = {side: factor(x, side) for side in self._factors}
        sizes = {side: _squares(covariance) for side, covariance in seen.items()}
        if all(math.isfinite(total) for _, total in sizes.values()):
            for side, covariance in seen.items():
                self._factors[side].see(covariance, sizes[side], weight)
            self.steps += 1

    def correlation(self, name: str) -> Correlation:
        fractions = {label: self._fraction(side) for side, label in enumerate(_SIDES)}
        known = [fraction for fraction in fractions.values() if fraction is not None]
        total = 1 - math.prod(1 - fraction for fraction in known) if known else None
        return Correlation(name, self._shape, fractions, total, self.steps)

    def _fraction(self, side: int) -> float | None:
        if math.prod(self._sides[side]) == 1:
            return 0.0  # there is nothing off the diagonal
        return self._factors[side].fraction() if side in self._factors else None


class _Factor:
    """An averaged covariance, and the part of its sums of squares that comes from pairs of a step with itself."""

    def __init__(self) -> None:
        self._average: Tensor | None = None
        self._own = (0.0, 0.0)

    def see(self, covariance: Tensor, squares: tuple[float, float], weight: float) -> None:
        average = torch.zeros_like(covariance) if self._average is None else self._average
        self._average = average.lerp_(covariance, weight)
        diagonal, total = ((1 - weight) ** 2 * own + weight**2 * new for own, new in zip(self._own, squares))
        self._own = diagonal, total

    def fraction(self) -> float:
        """Return the fraction of the squares that lies off the diagonal, from pairs of different steps."""
        assert self._average is not None
        diagonal, total = (both - own for both, own in zip(_squares(self._average), self._own))
        return max(0.0, 1 - diagonal / total) if total > 0 else 0.0


def _percent(fraction: float | None) -> str:
    if fraction is None:
        return "-"
    return ">99%" if 0.995 <= fraction < 1 else f"{fraction:.0%}"


def _squares(covariance: Tensor) -> tuple[float, float]:
    """Return the sums of squares of the diagonal and of all entries."""
    diagonal, total = (
        torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2
        for x in (covariance.diagonal(dim1=-2, dim2=-1), covariance)
    )
    return diagonal, total
