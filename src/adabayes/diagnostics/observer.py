"""Follows a sample of weights, and draws the paper's learning-rate figure from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adabayes._util.missing_extra import missing_extra
from adabayes._util.tensors import local, real_view
from adabayes.diagnostics._names import named_with_state
from adabayes.filtering import drift, fixed_point
from adabayes.optim.extend import unwrap
from adabayes.rates import batch_size_of, memory_of

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes
    from typing_extensions import Self

__all__ = ["Observer", "Points", "draw_rates"]


@dataclass(frozen=True)
class Points:
    """Sampled weights of one tensor in the paper's learning-rate figure."""

    name: str
    adam_lr: Tensor  # x: lr / sqrt(<g^2>), the learning rate that Adam would give each weight
    effective_lr: Tensor  # y: the learning rate that each weight gets
    lr: float  # including matrix_scale, if AdaBayes-K rotates the tensor
    lr_sgd: float  # likewise


class Observer:
    r"""Follows the gradients of a sample of weights, for the paper's learning-rate figure.

    After each step of the optimizer, it updates :math:`\langle g^2 \rangle` of a few weights of each tensor. It changes
    neither gradients nor state nor the global random generator.

    Args:
        optimizer: one with two learning rates, such as :class:`~adabayes.AdaBayesK`, for which the points are
            eigendirections, from its own averages.
        per_tensor: number of weights to follow in each parameter tensor.
        beta2: decay of the mean square. The default is that of the optimizer, or follows from the filter of AdaBayes.
        seed: seed for the choice of weights.
        model: gives the parameters' names. Not needed if the optimizer was created with ``named_parameters()``.

    Examples:
        >>> from adabayes import AdaBayes
        >>> w = torch.zeros(1000)
        >>> optimizer = AdaBayes([("w", w)], lr=1e-3, lr_sgd=0.1)
        >>> with Observer(optimizer, per_tensor=10) as observer:
        ...     for _ in range(3):
        ...         w.grad = torch.full((1000,), 2.0)
        ...         optimizer.step()
        >>> [points.adam_lr.numel() for points in observer.points()]
        [10]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        per_tensor: int = 100,
        beta2: float | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
    ) -> None:
        if per_tensor < 1:
            raise ValueError(f"Invalid per_tensor: {per_tensor}. It must be at least 1.")
        if beta2 is not None and not 0 <= beta2 < 1:
            raise ValueError(f"Invalid beta2: {beta2}. It must be at least 0 and below 1.")
        self._optimizer = unwrap(optimizer)
        self._model = model
        self._per_tensor = per_tensor
        self._beta2 = beta2
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._tracked: dict[Tensor, _Tracked] = {}
        self._hook = self._optimizer.register_step_post_hook(self._observe)

    def close(self) -> None:
        """Stop following the gradients; the sample does not change any more."""
        self._hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @torch.no_grad()
    def _observe(self, *_: object) -> None:
        if self._optimizer.ROTATES:  # learning rates belong to directions, and the optimizer keeps their averages
            return
        for group in self._optimizer.param_groups:
            factor = self._optimizer.mean_factor(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = real_view(local(p.grad))
                if grad.numel() == 0:
                    continue
                if p not in self._tracked:
                    beta2 = _memory(group) if self._beta2 is None else self._beta2
                    self._tracked[p] = _Tracked.choose(grad, self._per_tensor, beta2, self._generator)
                self._tracked[p].see(grad, factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the sample as plain data and tensors, for a checkpoint."""
        order = {p: i for i, p in enumerate(self._params())}
        return {"tracked": {order[p]: tracked.state() for p, tracked in self._tracked.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of :meth:`state_dict`."""
        params = list(self._params())
        self._tracked = {params[i]: _Tracked.of(tracked) for i, tracked in state["tracked"].items()}

    def _params(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def points(self) -> list[Points]:
        """Return the current sample, one entry per tensor."""
        points = []
        for name, p, group in named_with_state(self._optimizer, self._model):
            lr, lr_sgd = self._optimizer.current_rates(group, p)
            if self._optimizer.ROTATES:
                points.append(self._directions(name, p, lr, lr_sgd))
            elif p in self._tracked:
                tracked = self._tracked[p]
                adam_lr = lr / tracked.mean_square().sqrt()
                gain = tracked.take(local(self._optimizer.relative_gain(p)))
                points.append(Points(name, adam_lr, gain.double() * lr_sgd, lr, lr_sgd))
        return points

    def _directions(self, name: str, p: Tensor, lr: float, lr_sgd: float) -> Points:
        """Return the points of an optimizer with a learning rate for each direction, from its own averages."""
        gain, square = self._optimizer.relative_gain(p).flatten(), self._optimizer.mean_square(p)
        assert square is not None
        # Entries at regular intervals might all be in one column, which has one eigenvalue.
        sample = torch.randperm(gain.numel(), generator=torch.Generator().manual_seed(self._seed))[: self._per_tensor]
        sample = sample.sort().values.to(gain.device)
        adam_lr = lr / square.flatten()[sample].double().sqrt()
        return Points(name, adam_lr, gain[sample].double() * lr_sgd, lr, lr_sgd)

    def plot(self, path: str | PathLike[str] | None = None, ax: Axes | None = None) -> Axes:
        """Draw the paper's learning-rate figure (its Fig. 3) and save it to ``path`` if given."""
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise missing_extra("plotting needs matplotlib", "plot") from error
        points = [p for p in self.points() if p.lr > 0]
        if not points:
            raise RuntimeError("nothing to draw: take steps with gradients, at a learning rate above 0, first")
        if ax is None:
            _, ax = plt.subplots(figsize=(5.5, 4), layout="constrained")
        draw_rates(points, ax)
        ax.set(xlabel="Adam's learning rate, lr / rms(g)", ylabel="effective learning rate")
        ax.legend(frameon=False)
        if path is not None:
            ax.get_figure(root=True).savefig(path, dpi=150)  # type: ignore[union-attr]
        return ax


def draw_rates(points: Sequence[Points], ax: Axes) -> None:
    """Draw points of the paper's learning-rate figure, with both limits, the fixed point and the crossover."""
    for p in points:
        (dots,) = ax.plot(p.adam_lr, p.effective_lr, ".", color="0.25", alpha=0.35, markersize=4, markeredgewidth=0)
        dots.set(zorder=3, rasterized=True)
    rates = {(p.lr, p.lr_sgd) for p in points}
    # Weights with almost no gradient are far to the right, at the same height: three decades are enough for them.
    slowest = min((lr for p in points for lr in p.adam_lr.tolist() if lr > 0), default=math.inf)
    left = min(slowest, *(p.lr_sgd / 30 for p in points)) / 2
    right = 1000 * max(p.lr_sgd for p in points)
    x = torch.logspace(math.log10(left), math.log10(right), 300, dtype=torch.float64)
    for i, (lr, lr_sgd) in enumerate(sorted(rates)):
        adam, sgd = x[x < 3 * lr_sgd], x[x > lr_sgd / 3]
        curves = (
            ("Adam, lr / rms(g)", adam, adam, "tab:blue", "-"),
            ("SGD, lr_sgd", sgd, torch.full_like(sgd, lr_sgd), "tab:orange", "-"),
            ("fixed point", x, fixed_point((lr / x) ** 2, lr, lr_sgd), "tab:green", "-"),
            ("crossover", [lr_sgd] * 2, [left, 3 * lr_sgd], "tab:purple", ":"),
        )
        for label, xs, ys, colour, style in curves:
            ax.plot(xs, ys, style, color=colour, label=label if i == 0 else None)
    ax.plot([], [], ".", color="0.25", label="weights")
    ax.set(xscale="log", yscale="log", xlim=(left, right))


class _Tracked:
    """A few weights of one tensor."""

    def __init__(self, where: tuple[Tensor, ...], beta2: float) -> None:
        self._where = where
        self._beta2 = beta2
        self._average: Tensor | None = None
        self._steps = 0

    @classmethod
    def choose(cls, like: Tensor, count: int, beta2: float, generator: torch.Generator) -> _Tracked:
        if like.numel() > count:
            flat = torch.randint(like.numel(), (count,), generator=generator)
        else:
            flat = torch.arange(like.numel())
        return cls(torch.unravel_index(flat.to(like.device), like.shape) if like.dim() else (), beta2)

    @classmethod
    def of(cls, state: dict[str, Any]) -> _Tracked:
        tracked = cls(state["where"], state["beta2"])
        tracked._average, tracked._steps = state["average"], state["steps"]
        return tracked

    def state(self) -> dict[str, Any]:
        return {"where": self._where, "beta2": self._beta2, "average": self._average, "steps": self._steps}

    def take(self, values: Tensor) -> Tensor:
        """Return the sampled entries without copying the others, whatever the strides."""
        return values[self._where].reshape(-1)

    def see(self, grad: Tensor, factor: float) -> None:
        square = (self.take(grad).double() * factor).square()
        average = torch.zeros_like(square) if self._average is None else self._average
        self._average = average.lerp(square, 1 - self._beta2)
        self._steps += 1

    def mean_square(self) -> Tensor:
        assert self._average is not None
        return self._average / (1 - self._beta2**self._steps)


def _memory(group: dict[str, Any]) -> float:
    """Return the decay of an average that remembers squared gradients for as long as the optimizer does."""
    if "dynamics" not in group:
        return float(group["betas"][1])
    if steps := memory_of(group["batch_size"], group["dynamics"]):
        return (steps - 1) / (steps + 1)
    base_lr = group["base_lr"]
    return math.exp(-2 * drift(base_lr, group["lr_sgd"], batch_size_of(group["batch_size"], base_lr)))
