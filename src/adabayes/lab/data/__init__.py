"""Data sets by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adabayes._util.missing_extra import missing_extra
from adabayes.lab.data import download, formats
from adabayes.lab.data.examples import Data, Images, Points, Text, Vectors, split
from adabayes.lab.data.formats import DataError
from adabayes.lab.tasks import Reconstruction

__all__ = [
    "NAMES",
    "Data",
    "DataError",
    "Images",
    "Points",
    "Text",
    "Vectors",
    "digits_of",
    "error_of",
    "load",
    "source",
]


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
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    *parts, test = (formats.read_cifar(folder / name, "labels", classes=10, limit=10_000) for name in names)
    train = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return _images(train, test, 10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), pad=4, flip=True)


def _cifar100(data: Path | None) -> Images:
    folder = _verified("cifar100", data)
    train, test = (
        formats.read_cifar(folder / name, "fine_labels", classes=100, limit=limit)
        for name, limit in (("train", 50_000), ("test", 10_000))
    )
    return _images(train, test, 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), pad=4, flip=True)


def _mnist(data: Path | None) -> Images:
    return _idx("mnist", data, (0.1307,), (0.3081,), pad=2, flip=False)


def _fashion_mnist(data: Path | None) -> Images:
    return _idx("fashion-mnist", data, (0.2860,), (0.3530,), pad=2, flip=True)


def _idx(name: str, data: Path | None, mean: tuple[float, ...], std: tuple[float, ...], pad: int, flip: bool) -> Images:
    folder = _verified(name, data)
    train, test = (_idx_part(folder, part, limit) for part, limit in (("train", 60_000), ("t10k", 10_000)))
    return _images(train, test, 10, mean, std, pad, flip)


def _idx_part(folder: Path, part: str, limit: int) -> tuple[np.ndarray, np.ndarray]:
    images = formats.read_idx(folder / f"{part}-images-idx3-ubyte.gz", (limit, 28, 28))[..., None]
    labels = formats.read_idx(folder / f"{part}-labels-idx1-ubyte.gz", (limit,))
    if len(images) != len(labels) or labels.max() > 9:
        raise DataError(
            f"{folder}: {part} has {len(images)} images and {len(labels)} labels up to {labels.max()}; there must "
            "be as many labels as images, and up to 9. Delete both files and get them again: adabayes data fetch"
        )
    return images, labels


def _digits(data: Path | None) -> Images:
    # The file comes with scikit-learn, which is not imported: that takes a second.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise missing_extra("the digits come with scikit-learn", "lab")
    path = Path(package.origin).parent / "datasets/data/digits.csv.gz"
    table = formats.read_csv(path, (1797, 65), highest=16)
    pixels, labels = table[:, :-1], table[:, -1]
    if labels.max() > 9:
        raise DataError(f"{path} has the label {labels.max()}, and they go up to 9. Install scikit-learn again")
    images = np.round(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    train, test = (part.numpy() for part in split(len(images), 0.2))
    return _images(
        (images[train], labels[train]), (images[test], labels[test]), 10, (0.3053,), (0.3762,), pad=1, flip=False
    )


def _stdlib(data: Path | None) -> Text:
    """Load the standard library: a million characters to train on, and a hundred thousand of other modules to test."""
    characters = np.frombuffer(b"".join(formats.standard_library()), np.uint8)
    text = torch.from_numpy(characters[characters < 128].copy())
    train, test = 1_000_000, 100_000
    if len(text) < train + test:
        raise DataError(
            f"stdlib: this Python has {len(text):,} characters of library source, and {train + test:,} are needed. "
            "Use a Python that was installed with its .py files."
        )
    return Text(text[:train], text[-test:], context=128)


def _fashion_pixels(data: Path | None) -> Vectors:
    """Load Fashion-MNIST for reconstruction: pixels in a row, without classes."""
    folder = _verified("fashion-mnist", data)
    train, test = (
        torch.from_numpy(formats.read_idx(folder / f"{part}-images-idx3-ubyte.gz", (limit, 28, 28))).flatten(1)
        for part, limit in (("train", 60_000), ("t10k", 10_000))
    )
    return Vectors(train, None, test, None, Reconstruction())


def _flights(data: Path | None) -> Vectors:
    from adabayes.lab.data import flights

    return flights.load()


def _poisson(data: Path | None) -> Points:
    return Points()


def _shakespeare(data: Path | None) -> Text:
    """Load a million characters of plays, split as in nanoGPT: the first 90 % to train on, the rest to test."""
    content = formats.read_bytes(_verified("shakespeare", data) / "tinyshakespeare.txt", limit=1_115_394)
    alphabet, places = np.unique(np.frombuffer(content, np.uint8), return_inverse=True)
    text = torch.from_numpy(places.astype(np.uint8))
    cut = int(0.9 * len(text))
    return Text(text[:cut], text[cut:], context=64, classes=len(alphabet))


def _verified(name: str, data: Path | None) -> Path:
    folder = download.find(name, data)
    download.verify(name, folder)
    return folder


_LOADERS: dict[str, Callable[[Path | None], Data]] = {
    "digits": _digits,
    "stdlib": _stdlib,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "fashion-mnist": _fashion_mnist,
    "mnist": _mnist,
    "fashion-pixels": _fashion_pixels,
    "flights": _flights,
    "poisson": _poisson,
    "shakespeare": _shakespeare,
}
NAMES = tuple(_LOADERS)
_FILES_OF = {"fashion-pixels": "fashion-mnist"}  # data sets that are made from the files of another


_ERRORS = {"fashion-pixels": "RMSE", "flights": "RMSE, minutes", "poisson": "relative L2 error %"}


def error_of(name: str) -> str:
    """Return the name of a data set's error, with its unit. It equals that of the task, and needs no files."""
    return _ERRORS.get(name, "error %")


def digits_of(error: str) -> int:
    """Return how many decimals of an error to show, given its name."""
    return 2 if "%" in error else 4


def source(name: str) -> str | None:
    """Return the key of a data set's files in :data:`~adabayes.lab.data.download.SOURCES`, or None if it has none."""
    files = _FILES_OF.get(name, name)
    return files if files in download.SOURCES else None


def load(name: str, data: Path | None = None, options: Mapping[str, Any] | None = None) -> Data:
    """Load a data set by name, from the folder ``data`` if it has files, whose checksums are verified first.

    Options are ``examples``, the number of training examples to take, and ``augment``, whether to augment them.
    """
    if name not in _LOADERS:
        raise DataError(f"unknown data set {name!r}; there are {', '.join(_LOADERS)}")
    options = options or {}
    if unknown := set(options) - {"augment", "examples"}:
        raise DataError(f"unknown option {min(unknown)!r} of data set {name}; there are augment and examples")
    found = _LOADERS[name](data)
    if "examples" in options:
        try:
            found = found.limited(options["examples"])
        except ValueError as error:
            raise DataError(f"data set {name}: {error}") from error
    return found if options.get("augment", True) else found.plain()
