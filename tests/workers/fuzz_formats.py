"""Read many damaged and forged data files, in a process that has little memory.

    python -m tests.workers.fuzz_formats FOLDER CASES SEED

Each must be read, within the bounds of its data set, or end in a DataError. What is found is printed with the number of
the case, and the file is left in FOLDER.
"""

from __future__ import annotations

import gzip
import pickle
import pickletools
import random
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from adabayes.lab.data import DataError, formats

IMAGES = 3  # that a file can have
SPARE = 64 << 20  # bytes of memory beyond what the process has when it begins
SECONDS = 10  # for one case
NUMBERS = [0, 1, 2, 3, 10, 127, 128, 255, 256, 3072, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def cifar_files() -> list[bytes]:
    """Return valid files, as Python 2 and Python 3 write them."""
    pixels = np.arange(IMAGES * 3072, dtype=np.uint8).reshape(IMAGES, 3072)
    labels = list(range(IMAGES))
    old = b"".join(
        (
            b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x00K\x01K\x02eU\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\n",
            b"q\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07(K\x01K\x03M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1",
            b"K\x00K\x01\x87Rq\x09(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T",
            struct.pack("<i", pixels.size) + pixels.tobytes() + b"tbU\x09filenamesr\xff\x00\x00\x00]r\x00\x01\x00\x00",
            b"(U\x05a.pngU\x05b.pngU\x05c.pngeu.",
        )
    )
    return [old, pickle.dumps({b"data": pixels, b"labels": labels}, protocol=2)]


def idx_files() -> list[bytes]:
    array = np.arange(IMAGES * 28 * 28, dtype=np.uint8)
    return [b"\0\0\x08\x03" + struct.pack(">3I", IMAGES, 28, 28) + array.tobytes()]


def csv_files() -> list[bytes]:
    rows = np.arange(IMAGES * 65).reshape(IMAGES, 65) % 17
    return ["\n".join(",".join(map(str, row)) for row in rows).encode()]


def program(draw: random.Random) -> bytes:
    """Return a pickle of random instructions, whose arguments fit about half of the time."""
    pieces = [b"\x80\x02"]
    for opcode in draw.choices(pickletools.opcodes, k=draw.randrange(1, 60)):
        argument = b""
        if opcode.arg is not None and opcode.arg.n > 0:
            argument = draw.choice(NUMBERS).to_bytes(8, "little")[: opcode.arg.n]
        elif opcode.name in ("GLOBAL", "INST"):
            argument = draw.choice([b"numpy\ndtype\n", b"numpy.core.multiarray\n_reconstruct\n", b"os\nsystem\n"])
        elif opcode.arg is not None and opcode.arg.n == pickletools.UP_TO_NEWLINE:
            argument = draw.choice([b"1", b"'data'", b"-", b"9" * 5000]) + b"\n"
        elif opcode.arg is not None:  # a length of 1, 4 or 8 bytes, and so many bytes
            width = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT8U: 8}.get(opcode.arg.n, 4)
            text = draw.choice([b"", b"u1", b"data", b"labels", b"x" * 99])
            length = len(text) if draw.random() < 0.9 else draw.choice(NUMBERS)
            argument = length.to_bytes(8, "little")[:width] + text
        pieces.append(opcode.code.encode("latin-1") + argument)
    return b"".join(pieces) + b"."


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Return the content with one to four changes, mostly near the beginning or the end, where the structure is."""
    found = bytearray(content)
    for _ in range(draw.randrange(1, 5)):
        near = draw.randrange(400)
        at = min(draw.choice([near, near, near, max(len(found) - near, 0), draw.randrange(len(found) + 1)]), len(found))
        length = draw.choice([1, 1, 2, 4, 8, 100])
        kind = draw.randrange(7)
        if kind == 0:
            found[at : at + 1] = draw.randbytes(1)
        elif kind == 1:
            found[at : at + 4] = struct.pack(draw.choice("<>") + "I", draw.choice(NUMBERS))
        elif kind == 2:
            del found[at : at + length]
        elif kind == 3:
            found[at:at] = draw.randbytes(length)
        elif kind == 4:
            found[at:at] = found[at : at + length] * draw.choice([1, 2, 50])
        elif kind == 5:
            found[at : at + 1] = draw.choice(pickletools.opcodes).code.encode("latin-1")
        else:
            del found[at:]
    return bytes(found)


def zipped(content: bytes, draw: random.Random) -> bytes:
    """Return a gzip file of damaged content, a damaged gzip file, or one that grows when it is unzipped."""
    kind = draw.randrange(20)
    if kind == 0:
        return gzip.compress(content) + BOMB
    if kind < 10:
        return damaged(gzip.compress(content, compresslevel=draw.choice([1, 9])), draw)
    return gzip.compress(damaged(content, draw), compresslevel=1)


BOMB = 3 * (SPARE >> 20) * gzip.compress(bytes(1 << 20))
CIFAR, IDX, CSV = cifar_files(), idx_files(), csv_files()


def read_cifar(folder: Path, draw: random.Random) -> None:
    path = folder / "data_batch_1"
    path.write_bytes(program(draw) if draw.random() < 0.3 else damaged(draw.choice(CIFAR), draw))
    images, labels = formats.read_cifar(path, "labels", classes=10, limit=IMAGES)
    assert images.shape == (len(labels), 32, 32, 3), images.shape
    assert images.dtype == np.uint8
    assert 0 < len(labels) <= IMAGES
    assert 0 <= labels.min() <= labels.max() < 10, labels


def read_idx(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice(["images", "images.gz"])
    content = draw.choice(IDX)
    path.write_bytes(zipped(content, draw) if path.suffix else damaged(content, draw))
    images = formats.read_idx(path, (IMAGES, 28, 28))
    assert 0 < len(images) <= IMAGES
    assert images.shape[1:] == (28, 28), images.shape


def read_csv(folder: Path, draw: random.Random) -> None:
    path = folder / "digits.csv.gz"
    path.write_bytes(zipped(draw.choice(CSV), draw))
    table = formats.read_csv(path, (IMAGES, 65), highest=16)
    assert table.shape == (IMAGES, 65), table.shape
    assert table.max() <= 16


READERS: list[Callable[[Path, random.Random], None]] = [read_cifar, read_cifar, read_idx, read_csv]


def main(folder: Path, cases: int, seed: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + SPARE
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    refused = 0
    for case in range(cases):
        seconds = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        draw = random.Random(f"{seed} {case}")
        read = draw.choice(READERS)
        try:
            read(folder, draw)
        except DataError as error:
            refused += 1
            if isinstance(error.__cause__, MemoryError):
                sys.exit(f"case {case}, {read.__name__}: it takes more than {SPARE:,} bytes")
        except BaseException as error:
            sys.exit(f"case {case}, {read.__name__}: {type(error).__name__}: {error}")
    print(f"{cases} cases, {refused} refused")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
