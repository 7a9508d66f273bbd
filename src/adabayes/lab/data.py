"""Data sets, whole in memory as bytes; batches are cropped, flipped and normalised at once, not image by image."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from adabayes.lab import files

__all__ = ["NAMES", "Data", "Images", "Text", "load"]

Batch = tuple[Tensor, Tensor]  # inputs, targets


class Data(Protocol):
    """What training asks of a data set. Examples are numbered; a split is "train" or "test"."""

    @property
    def classes(self) -> int: ...

    def model_options(self) -> dict[str, int]:
        """What a network must know to take these inputs."""

    def count(self, split: str) -> int:
        """Examples in a split."""

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """Examples to train on, with the augmentation that ``generator`` draws."""

    def test_batch(self, indices: Tensor) -> Batch:
        """Examples as they are."""

    def hold_out(self, share: float) -> Data:
        """The same training data with a part of it, chosen once and for all, as the test split."""

    def to(self, device: torch.device) -> Data: ...

    def fingerprint(self) -> str:
        """Tells whether it is the same data as another time."""


@dataclass(frozen=True)
class Images:
    """Images of bytes, (n, height, width, channels).

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

    def model_options(self) -> dict[str, int]:
        return {"classes": self.classes, "channels": self.test_x.shape[3]}

    def count(self, split: str) -> int:
        return len(self.train_y if split == "train" else self.test_y)

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        # Crop, flip and the choice of images are one read from memory: each pixel says where it comes from.
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
        """As a network wants them: (n, channels, height, width), which here is the channels_last layout."""
        mean, std = (torch.tensor(values, device=pixels.device) for values in (self.mean, self.std))
        return pixels.float().mul_(1 / (255 * std)).sub_(mean / std).permute(0, 3, 1, 2)

    def hold_out(self, share: float) -> Images:
        kept, held = _split(len(self.train_y), share)
        margin = slice(self.pad, self.train_x.shape[1] - self.pad)
        return replace(
            self,
            train_x=self.train_x[kept],
            train_y=self.train_y[kept],
            test_x=self.train_x[held][:, margin, margin].contiguous(),
            test_y=self.train_y[held],
        )

    def to(self, device: torch.device) -> Images:
        moved = {name: getattr(self, name).to(device) for name in ("train_x", "train_y", "test_x", "test_y")}
        return replace(self, **moved)

    def fingerprint(self) -> str:
        return _fingerprint(self.train_x, self.train_y, self.test_x, self.test_y)


@dataclass(frozen=True)
class Text:
    """Characters as bytes, cut into windows of ``context``; where the cuts are, each training batch draws anew."""

    train: Tensor
    test: Tensor
    context: int
    classes: int = 128

    def model_options(self) -> dict[str, int]:
        return {"classes": self.classes, "context": self.context}

    def count(self, split: str) -> int:
        # One character more is needed, the last target; and for training one window less, to be able to shift.
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

    def to(self, device: torch.device) -> Text:
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def fingerprint(self) -> str:
        return _fingerprint(self.train, self.test)


def _split(count: int, share: float) -> tuple[Tensor, Tensor]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    held = round(count * share)
    return order[held:].sort().values, order[:held].sort().values


def _fingerprint(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(str(tuple(t.shape)).encode())
        digest.update(np.ascontiguousarray(t.cpu().numpy()).data)
    return digest.hexdigest()[:16]


# Where they come from


def _images(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    pad: int,
    flip: bool,
) -> Images:
    margin = ((0, 0), (pad, pad), (pad, pad), (0, 0))
    return Images(
        torch.from_numpy(np.pad(train[0], margin)),
        torch.from_numpy(train[1].astype(np.int64)),
        torch.from_numpy(np.ascontiguousarray(test[0])),
        torch.from_numpy(test[1].astype(np.int64)),
        classes,
        mean,
        std,
        pad,
        flip,
    )


def _cifar10(data: Path | None) -> Images:
    folder = _verified("cifar10", data)
    parts = [files.read_cifar(folder / f"data_batch_{i}", "labels") for i in range(1, 6)]
    train = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    test = files.read_cifar(folder / "test_batch", "labels")
    return _images(train, test, 10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), pad=4, flip=True)


def _cifar100(data: Path | None) -> Images:
    folder = _verified("cifar100", data)
    train, test = (files.read_cifar(folder / name, "fine_labels") for name in ("train", "test"))
    return _images(train, test, 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), pad=4, flip=True)


def _mnist(data: Path | None) -> Images:
    return _idx("mnist", data, (0.1307,), (0.3081,), pad=2, flip=False)


def _fashion_mnist(data: Path | None) -> Images:
    return _idx("fashion-mnist", data, (0.2860,), (0.3530,), pad=2, flip=True)


def _idx(name: str, data: Path | None, mean: tuple[float, ...], std: tuple[float, ...], pad: int, flip: bool) -> Images:
    folder = _verified(name, data)
    train, test = (
        (
            files.read_idx(folder / f"{part}-images-idx3-ubyte.gz")[..., None],
            files.read_idx(folder / f"{part}-labels-idx1-ubyte.gz"),
        )
        for part in ("train", "t10k")
    )
    return _images(train, test, 10, mean, std, pad, flip)


def _digits(data: Path | None) -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn: pip install '.[lab]' in the folder of AdaBayes"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    images = np.round(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    train, test = (part.numpy() for part in _split(len(images), 0.2))
    return _images(
        (images[train], labels[train]), (images[test], labels[test]), 10, (0.3053,), (0.3762,), pad=1, flip=False
    )


def _stdlib(data: Path | None) -> Text:
    """A million characters to train on, a hundred thousand of other modules to test."""
    characters = np.frombuffer(b"".join(files.standard_library()), np.uint8)
    text = torch.from_numpy(characters[characters < 128].copy())
    train, test = 1_000_000, 100_000
    if len(text) < train + test:
        raise files.DataError(
            f"stdlib: this Python has {len(text):,} characters of library source, and {train + test:,} are needed. "
            "Take a Python that was installed with its .py files."
        )
    return Text(text[:train], text[-test:], context=128)


def _verified(name: str, data: Path | None) -> Path:
    folder = files.find(name, data)
    files.verify(name, folder)
    return folder


_LOADERS: dict[str, Callable[[Path | None], Data]] = {
    "digits": _digits,
    "stdlib": _stdlib,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "fashion-mnist": _fashion_mnist,
    "mnist": _mnist,
}
NAMES = tuple(_LOADERS)


def load(name: str, data: Path | None = None) -> Data:
    """A data set by name, from the folder ``data`` where it comes in files. Checksums come first."""
    if name not in _LOADERS:
        raise files.DataError(f"unknown data set {name!r}; there are {', '.join(_LOADERS)}")
    return _LOADERS[name](data)
