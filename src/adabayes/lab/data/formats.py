"""Readers of data files, which do not trust them.

Each reader knows how large its data set is, and takes no more memory than that, whatever a file says about itself.
"""

from __future__ import annotations

import gzip
import math
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from adabayes.lab.data import pickles

__all__ = ["DataError", "message_of", "read_bytes", "read_cifar", "read_csv", "read_idx", "standard_library"]


class DataError(ValueError):
    """Missing or wrong data. The message names the file and says what to do."""


def message_of(error: Exception) -> str:
    """Return an error's message as one short line of printable characters: it may quote a file or a server."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(str(error)[:200].split()))
    return line or type(error).__name__


_FETCH = "Delete it and get it again: adabayes data fetch"
_INSTALL = "Install the package that has it again"


def read_bytes(path: Path, limit: int, remedy: str = _FETCH) -> bytes:
    """Return the content of a file, unzipped if its name ends in .gz. It must have at most ``limit`` bytes."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            content: bytes = file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {message_of(error)}. {remedy}") from error
    if len(content) > limit:
        raise DataError(f"{path} has more than {limit:,} bytes, the most that are possible. {remedy}")
    return content


def read_cifar(path: Path, labels: str, classes: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images, (n, 32, 32, 3), and labels from a file of CIFAR-10 or CIFAR-100 in the Python format.

    Args:
        path: The file.
        labels: The key of the labels in the file.
        classes: Labels are below this number.
        limit: The largest number of images that it can have.
    """
    # An image takes 3072 bytes, a name that is shorter than 100, and four instructions.
    content = read_bytes(path, 4096 + limit * (3072 + 128))
    try:
        found = pickles.read(content, instructions=1000 + 8 * limit)
        match found["data"]:
            case (("array", _), (1, (int(count), 3072), (("dtype", ("u1", 0, 1)), _), False, str(pixels))):
                pass
            case _:
                raise ValueError("its data is not an array of bytes with rows of 3072")
        if not 0 < count <= limit:
            raise ValueError(f"it has {count} images, and 1 to {limit} are possible")
        images = np.frombuffer(pixels.encode("latin-1"), np.uint8)
        if len(images) != count * 3072:
            raise ValueError(f"it has {len(images):,} bytes of data, not {count} times 3072")
        numbers = found[labels]
        if len(numbers) != count or not all(isinstance(label, int) and 0 <= label < classes for label in numbers):
            raise ValueError(f"its {labels} are not {count} numbers from 0 to {classes - 1}")
    except Exception as error:  # whatever a damaged pickle leads to
        raise DataError(
            f"{path} cannot be read as a file of CIFAR in the Python format: {type(error).__name__}: "
            f"{message_of(error)}. {_FETCH}"
        ) from error
    return np.ascontiguousarray(images.reshape(count, 3, 32, 32).transpose(0, 2, 3, 1)), np.array(numbers, np.int64)


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array of bytes in an IDX file, gzipped or not.

    Its first dimension is at most that of ``shape``, and the others are the same.
    """
    start = 4 + 4 * len(shape)
    content = read_bytes(path, start + math.prod(shape))
    if content[:4] != bytes([0, 0, 8, len(shape)]) or len(content) < start:
        raise DataError(
            f"{path} is not an IDX file of bytes in {len(shape)} dimensions: it begins with {content[:4].hex()}, "
            f"not with 000008{len(shape):02x}. {_FETCH}"
        )
    found = tuple(np.frombuffer(content, ">u4", count=len(shape), offset=4).tolist())
    if not 0 < found[0] <= shape[0] or found[1:] != shape[1:]:
        raise DataError(f"{path} says that its shape is {found}, and at most {shape} is possible. {_FETCH}")
    expected = start + math.prod(found)
    if len(content) != expected:
        raise DataError(f"{path} has {len(content):,} bytes, not {expected:,} as it says. {_FETCH}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(found).copy()


def read_csv(path: Path, shape: tuple[int, int], highest: int) -> np.ndarray:
    """Return the whole numbers from 0 to ``highest`` < 256 in a CSV file of this shape, which has no header."""
    width = len(str(highest))
    content = read_bytes(path, math.prod(shape) * (width + 1) + 1024, _INSTALL)
    rows = [line.split(b",") for line in content.splitlines()]
    if len(rows) != shape[0] or any(len(row) != shape[1] for row in rows):
        raise DataError(f"{path} does not have {shape[0]} rows of {shape[1]} columns. {_INSTALL}")
    for row in rows:
        if not all(number.isdigit() and len(number) <= width and int(number) <= highest for number in row):
            raise DataError(f"{path} has entries that are not whole numbers from 0 to {highest}. {_INSTALL}")
    return np.array(rows).astype(np.uint8)


def standard_library() -> Iterator[bytes]:
    """Yield the source of Python's own library, module by module, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
        yield path.read_bytes()
