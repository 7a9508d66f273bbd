"""Kinds of data sets, held in memory. A batch is made at once, not example by example."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from adabayes.lab.tasks import Classification, Poisson, Task

__all__ = ["Batch", "Data", "Images", "Points", "Text", "Vectors", "split"]

Batch = tuple[Tensor, Tensor]  # inputs, targets


class Data(Protocol):
    """The interface of a data set for training. Examples are numbered; a split is "train" or "test"."""

    @property
    def task(self) -> Task:
        """The loss and the error."""

    def model_options(self) -> dict[str, int]:
        """Return the options that a network needs for these inputs."""

    def count(self, split: str) -> int:
        """Count the examples of a split."""

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """Return examples to train on, with the augmentation that ``generator`` draws."""

    def test_batch(self, indices: Tensor) -> Batch:
        """Return examples as they are."""

    def hold_out(self, share: float) -> Data:
        """Return the training data with a fixed part of it as the test split."""

    def limited(self, examples: int) -> Data:
        """Return the data with a fixed choice of so many training examples."""

    def plain(self) -> Data:
        """Return the data without augmentation."""

    def to(self, device: torch.device) -> Data: ...

    def fingerprint(self) -> str:
        """Return a hash of the data, to recognise it by."""


@dataclass(frozen=True)
class Images:
    """Images of bytes, (n, height, width, channels), and their classes.

    Training images have a black margin of ``pad`` pixels already, so that a random crop only chooses where to read.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    mean: tuple[float, ...]  # of each channel, as a share of 255
    std: tuple[float, ...]
    pad: int
    flip: bool
    task: Task = Classification()  # noqa: RUF009  (frozen)

    def model_options(self) -> dict[str, int]:
        return {"classes": self.classes, "channels": self.test_x.shape[3]}

    def count(self, split: str) -> int:
        return len(self.train_y if split == "train" else self.test_y)

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        # Crop, flip and the choice of images are one read from memory: an index for each pixel.
        height, width = self.test_x.shape[1:3]
        n = len(indices)
        device = self.train_x.device
        top, left = torch.randint(2 * self.pad + 1, (2, n), generator=generator)
        mirrored = torch.rand(n, generator=generator) < (0.5 if self.flip else 0.0)
        rows = top[:, None] + torch.arange(height)
        columns = left[:, None] + torch.where(mirrored[:, None], width - 1 - torch.arange(width), torch.arange(width))
        side = self.train_x.shape[2]
        places = (indices[:, None] * (self.train_x.shape[1] * side) + rows * side)[:, :, None] + columns[:, None, :]
        pixels = self.train_x.view(-1, self.train_x.shape[3]).index_select(0, places.flatten().to(device))
        return self._normalised(pixels.view(n, height, width, -1)), self.train_y[indices.to(device)]

    def test_batch(self, indices: Tensor) -> Batch:
        at = indices.to(self.test_x.device)
        return self._normalised(self.test_x[at]), self.test_y[at]

    def _normalised(self, pixels: Tensor) -> Tensor:
        """Return what a network takes: (n, channels, height, width), which here is the channels_last layout."""
        mean, std = (torch.tensor(values, device=pixels.device) for values in (self.mean, self.std))
        return pixels.float().mul_(1 / (255 * std)).sub_(mean / std).permute(0, 3, 1, 2)

    def hold_out(self, share: float) -> Images:
        kept, held = split(len(self.train_y), share)
        margin = slice(self.pad, self.train_x.shape[1] - self.pad)
        return replace(
            self,
            train_x=self.train_x[kept],
            train_y=self.train_y[kept],
            test_x=self.train_x[held][:, margin, margin].contiguous(),
            test_y=self.train_y[held],
        )

    def limited(self, examples: int) -> Images:
        chosen = _chosen(len(self.train_y), examples)
        return replace(self, train_x=self.train_x[chosen], train_y=self.train_y[chosen])

    def plain(self) -> Images:
        margin = slice(self.pad, self.train_x.shape[1] - self.pad)
        return replace(self, train_x=self.train_x[:, margin, margin].contiguous(), pad=0, flip=False)

    def to(self, device: torch.device) -> Images:
        moved = {name: getattr(self, name).to(device) for name in ("train_x", "train_y", "test_x", "test_y")}
        return replace(self, **moved)

    def fingerprint(self) -> str:
        return _fingerprint(self.train_x, self.train_y, self.test_x, self.test_y)


@dataclass(frozen=True)
class Text:
    """Characters as bytes, cut into windows of ``context``. Each training batch shifts its windows at random."""

    train: Tensor
    test: Tensor
    context: int
    classes: int = 128
    task: Task = Classification()  # noqa: RUF009  (frozen)

    def model_options(self) -> dict[str, int]:
        return {"classes": self.classes, "context": self.context}

    def count(self, split: str) -> int:
        # The last target needs one more character; training has one window less, so that windows can be shifted.
        text = self.train if split == "train" else self.test
        return (len(text) - 1) // self.context - (split == "train")

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        shifts = torch.randint(self.context, (len(indices),), generator=generator)
        return self._windows(self.train, indices * self.context + shifts)

    def test_batch(self, indices: Tensor) -> Batch:
        return self._windows(self.test, indices * self.context)

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[(starts[:, None] + torch.arange(self.context + 1)).to(text.device)].long()
        return windows[:, :-1], windows[:, 1:]

    def hold_out(self, share: float) -> Text:
        cut = round(len(self.train) * (1 - share))
        return replace(self, train=self.train[:cut], test=self.train[cut:])

    def limited(self, examples: int) -> Text:
        if not 1 <= examples <= self.count("train"):
            raise _too_many(examples, self.count("train"))
        return replace(self, train=self.train[: (examples + 1) * self.context + 1])

    def plain(self) -> Text:
        return self

    def to(self, device: torch.device) -> Text:
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def fingerprint(self) -> str:
        return _fingerprint(self.train, self.test)


@dataclass(frozen=True)
class Vectors:
    """Rows of numbers, each with a target. Without targets, the rows themselves are the targets.

    Bytes stand for numbers from 0 to 1.
    """

    train_x: Tensor
    train_y: Tensor | None
    test_x: Tensor
    test_y: Tensor | None
    task: Task

    def model_options(self) -> dict[str, int]:
        inputs = self.train_x.shape[1]
        return {"inputs": inputs, "outputs": inputs if self.train_y is None else 1}

    def count(self, split: str) -> int:
        return len(self.train_x if split == "train" else self.test_x)

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        return self._batch(self.train_x, self.train_y, indices)

    def test_batch(self, indices: Tensor) -> Batch:
        return self._batch(self.test_x, self.test_y, indices)

    def _batch(self, x: Tensor, y: Tensor | None, indices: Tensor) -> Batch:
        at = indices.to(x.device)
        rows = x[at].float().div_(255) if x.dtype == torch.uint8 else x[at]
        return rows, rows if y is None else y[at]

    def hold_out(self, share: float) -> Vectors:
        kept, held = split(len(self.train_x), share)
        y = self.train_y
        return replace(
            self,
            train_x=self.train_x[kept],
            train_y=None if y is None else y[kept],
            test_x=self.train_x[held],
            test_y=None if y is None else y[held],
        )

    def limited(self, examples: int) -> Vectors:
        chosen = _chosen(len(self.train_x), examples)
        y = self.train_y
        return replace(self, train_x=self.train_x[chosen], train_y=None if y is None else y[chosen])

    def plain(self) -> Vectors:
        return self

    def to(self, device: torch.device) -> Vectors:
        moved: dict[str, Any] = {
            name: None if (part := getattr(self, name)) is None else part.to(device)
            for name in ("train_x", "train_y", "test_x", "test_y")
        }
        return replace(self, **moved)

    def fingerprint(self) -> str:
        return _fingerprint(*(t for t in (self.train_x, self.train_y, self.test_x, self.test_y) if t is not None))


@dataclass(frozen=True)
class Points:
    r"""Points of the unit square at which Poisson's equation has to hold, drawn at random for each batch.

    The solution is :math:`u = \sum_k a_k \sin(\pi k x) \sin(\pi k y)`. One point in five is on the boundary. Targets
    are u, f and whether the point is on the boundary. Tests are on a grid; validation is on another.

    Args:
        waves: (k, a_k) of each term.
        size: number of training points in an epoch.
        grid: number of test points along a side.
        offset: of the grid, as a share of its spacing.
    """

    waves: tuple[tuple[int, float], ...] = ((1, 1.0), (4, 0.2))
    size: int = 25_600
    grid: int = 64
    offset: float = 0.5
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (immutable)

    @property
    def task(self) -> Task:
        return Poisson(scale=sum((2 * (math.pi * k) ** 2 * a) ** 2 for k, a in self.waves) / 4)

    def model_options(self) -> dict[str, int]:
        return {"inputs": 2, "outputs": 1}

    def count(self, split: str) -> int:
        return self.size if split == "train" else self.grid**2

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        n = len(indices)
        points = torch.rand(n, 2, generator=generator)
        at_edge = torch.arange(n) % 5 == 0
        side = torch.randint(4, (n,), generator=generator)
        on_it = points.clone()
        on_it[torch.arange(n), side // 2] = (side % 2).float()
        return self._targets(torch.where(at_edge[:, None], on_it, points), at_edge)

    def test_batch(self, indices: Tensor) -> Batch:
        places = torch.stack([indices // self.grid, indices % self.grid], 1)
        return self._targets((places + self.offset) / self.grid, torch.zeros(len(indices), dtype=torch.bool))

    def _targets(self, points: Tensor, at_edge: Tensor) -> Batch:
        u = torch.zeros(len(points))
        f = torch.zeros(len(points))
        for k, a in self.waves:
            term = a * torch.sin(torch.pi * k * points).prod(1)
            u += term
            f += 2 * (torch.pi * k) ** 2 * term
        return points.to(self.device), torch.stack([u, f, at_edge.float()], 1).to(self.device)

    def hold_out(self, share: float) -> Points:
        return replace(self, grid=max(1, round(self.grid * share**0.5)), offset=0.25)

    def limited(self, examples: int) -> Points:
        if examples < 1:
            raise ValueError(f"examples is {examples}; there must be at least one")
        return replace(self, size=examples)

    def plain(self) -> Points:
        return self

    def to(self, device: torch.device) -> Points:
        return replace(self, device=device)

    def fingerprint(self) -> str:
        told = repr((self.waves, self.size, self.grid, self.offset, self.task))
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def split(count: int, share: float) -> tuple[Tensor, Tensor]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    held = round(count * share)
    return order[held:].sort().values, order[:held].sort().values


def _chosen(count: int, examples: int) -> Tensor:
    if not 1 <= examples <= count:
        raise _too_many(examples, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return order[:examples].sort().values


def _too_many(examples: int, count: int) -> ValueError:
    return ValueError(f"examples is {examples}; there are {count:,} training examples, so it must be from 1 to {count}")


def _fingerprint(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(str(tuple(t.shape)).encode())
        digest.update(np.ascontiguousarray(t.cpu().numpy()).data)
    return digest.hexdigest()[:16]
