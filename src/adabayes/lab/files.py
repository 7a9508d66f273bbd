"""Data files: where they are from, whether they are whole, and how to read them without trusting them."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import sysconfig
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

__all__ = ["SOURCES", "DataError", "Source", "default_folder", "fetch", "find", "read_cifar", "read_idx", "verify"]

Progress = Callable[[str, int, int | None], None]  # what, bytes so far, bytes in all


class DataError(ValueError):
    """Data that is not there, or not what it should be. The message names the file and what to do."""


@dataclass(frozen=True)
class Archive:
    """A file to download. sha256 where it is known, else the md5 that the data set's authors publish."""

    url: str
    algorithm: str
    digest: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class Source:
    """A data set that comes in files."""

    folder: str  # that the files are in, below the data folder
    files: dict[str, str]  # name: md5
    archives: tuple[Archive, ...]  # to download: a tar of the folder, or the files themselves
    elsewhere: tuple[Path, ...] = ()  # where a system package may have put them
    repacked: dict[str, str] = field(default_factory=dict)  # md5 of the same, compressed anew by that package


_KRIZ = "https://www.cs.toronto.edu/~kriz/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"


def _idx(folder: str, site: str, files: dict[str, str], *more: Any) -> Source:
    return Source(folder, files, tuple(Archive(site + name, "md5", md5) for name, md5 in files.items()), *more)


SOURCES = {
    "cifar10": Source(
        "cifar-10-batches-py",
        {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
        },
        (
            Archive(
                _KRIZ + "cifar-10-python.tar.gz",
                "sha256",
                "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            ),
        ),
    ),
    "cifar100": Source(
        "cifar-100-python",
        {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        (
            Archive(
                _KRIZ + "cifar-100-python.tar.gz",
                "sha256",
                "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            ),
        ),
    ),
    "fashion-mnist": _idx(
        "fashion-mnist",
        _FASHION,
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        (Path("/usr/share/datasets/fashion-mnist"),),  # Debian's dataset-fashion-mnist
        {
            "train-images-idx3-ubyte.gz": "cf8536b0aa1a6ac5fa3f23001093305c",
            "train-labels-idx1-ubyte.gz": "10bea18fdb374794d4bb42e356e600c9",
            "t10k-images-idx3-ubyte.gz": "f78720b4224f21cce2f2ccf2d7a94c9a",
            "t10k-labels-idx1-ubyte.gz": "0d30e22e447f3c33dab9ed536400ac01",
        },
    ),
    "mnist": _idx(
        "mnist",
        _MNIST,
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
}


def default_folder() -> Path:
    """Where data sets are kept: $ADABAYES_DATA, or a folder in the user's cache."""
    if given := os.environ.get("ADABAYES_DATA"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adabayes"


def find(name: str, data: Path | None = None) -> Path:
    """The folder that holds a data set's files: below ``data``, ``data`` itself, or where a system package puts it."""
    source = SOURCES[name]
    root = data or default_folder()
    places = [root / source.folder, root] + ([] if data else list(source.elsewhere))
    for place in places:
        if all((place / file).exists() for file in source.files):
            return place
    missing = [file for file in source.files if not (places[0] / file).exists()]
    raise DataError(
        f"{name}: no {missing[0]} in {places[0]}. Get it with: adabayes data fetch {name}"
        + (f" --data {data}" if data else "")
        + f"; or give --data DIR, where DIR or DIR/{source.folder} holds {', '.join(source.files)}"
    )


def verify(name: str, folder: Path, progress: Progress | None = None) -> None:
    """Raise unless all files of a data set are there and have the checksums that its authors publish."""
    source = SOURCES[name]
    for file, md5 in source.files.items():
        path = folder / file
        if not path.exists():
            raise DataError(f"{path} is missing. Get it with: adabayes data fetch {name}")
        size = path.stat().st_size
        if progress:
            progress(f"checking {file}", size, size)
        found = _digest(path, "md5")
        if found not in (md5, source.repacked.get(file)):
            raise DataError(
                f"{path} is damaged or not the original: its md5 is {found}, not {md5} ({size:,} bytes). Delete it and "
                f"get it again: adabayes data fetch {name}"
            )


def fetch(name: str, data: Path | None = None, progress: Progress | None = None) -> Path:
    """Download what is missing, going on where an earlier try broke off; the folder that the files are in."""
    source = SOURCES[name]
    try:
        folder = find(name, data)
        verify(name, folder, progress)
        return folder
    except DataError:
        pass
    root = data or default_folder()
    folder = root / source.folder
    for archive in source.archives:
        is_tar = ".tar" in archive.name
        where = root if is_tar else folder
        where.mkdir(parents=True, exist_ok=True)
        target = where / archive.name
        if not target.exists() or _digest(target, archive.algorithm) != archive.digest:
            download(archive, target, progress)
        if is_tar:
            _unpack(target, source, root)
    verify(name, folder, progress)
    return folder


def download(archive: Archive, target: Path, progress: Progress | None = None) -> None:
    """Download to ``target``, which comes to be only when it is whole and has the right checksum."""
    part = target.with_name(target.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(archive.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            resumed = answer.status == 206
            have = have if resumed else 0
            length = answer.headers.get("Content-Length")
            total = have + int(length) if length else None
            with part.open("ab" if resumed else "wb") as file:
                while chunk := answer.read(1 << 18):
                    file.write(chunk)
                    have += len(chunk)
                    if progress:
                        progress(archive.name, have, total)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # there is nothing left to send: all of it is here, right or wrong
            raise _unreachable(archive, error, part) from error
    except (OSError, urllib.error.URLError) as error:
        raise _unreachable(archive, error, part) from error
    else:
        if total is not None and have < total:
            raise _unreachable(archive, OSError(f"it broke off after {have:,} of {total:,} bytes"), part)
    if _digest(part, archive.algorithm) != archive.digest:
        part.unlink()
        raise DataError(
            f"{archive.url}: what came has not the {archive.algorithm} {archive.digest} and was deleted unopened. "
            "Try again; if it stays so, the file was changed, or something on the way answers in its place."
        )
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(target)


def _unreachable(archive: Archive, error: Exception, part: Path) -> DataError:
    kept = (
        f" {part.stat().st_size:,} bytes are kept in {part}; the same command goes on from there."
        if part.exists()
        else ""
    )
    return DataError(
        f"{archive.url}: {error}.{kept} Without a network: put the file's contents where `adabayes data list` says, "
        "or give the folder with --data."
    )


def _unpack(archive: Path, source: Source, root: Path) -> None:
    """Take the files of the data set, and nothing else, out of a tar whose checksum is right."""
    folder = root / source.folder
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for file in source.files:
            member = tar.extractfile(f"{source.folder}/{file}")
            if member is None:
                raise DataError(f"{archive}: there is no {source.folder}/{file} in it")
            temporary = folder / (file + ".part")
            temporary.write_bytes(member.read())
            temporary.replace(folder / file)


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        digest = hashlib.new(algorithm, usedforsecurity=False)
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# Formats


class _ArraysOnly(pickle.Unpickler):
    """Admits what CIFAR's files are made of, arrays and plain containers, so that nothing in them can run."""

    _ALLOWED: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"): "numpy._core.multiarray",
        ("numpy._core.multiarray", "_reconstruct"): "numpy._core.multiarray",
        ("numpy", "ndarray"): "numpy",
        ("numpy", "dtype"): "numpy",
        ("_codecs", "encode"): "_codecs",  # how Python 3 writes bytes in the old protocols
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(self._ALLOWED[module, name], name)


def read_cifar(path: Path, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Images as (n, 32, 32, 3) and labels of a file of CIFAR-10 or CIFAR-100, in their python form."""
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="bytes").load()
        pixels = np.asarray(content[b"data"], dtype=np.uint8)
        found = np.asarray(content[labels.encode()], dtype=np.int64)
        images = pixels.reshape(len(found), 3, 32, 32).transpose(0, 2, 3, 1)
    except Exception as error:  # whatever a pickle that is not what it should be leads to
        raise DataError(
            f"{path} cannot be read as a file of CIFAR in its python form: {type(error).__name__}: {error}. "
            "Delete it and get it again: adabayes data fetch"
        ) from error
    return np.ascontiguousarray(images), found


def read_idx(path: Path) -> np.ndarray:
    """The array of bytes in an IDX file, gzipped or not."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            content = file.read()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}. Delete it and get it again: adabayes data fetch") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise DataError(f"{path} is not an IDX file of bytes: it begins with {content[:4].hex()}, not with 000008")
    shape = np.frombuffer(content, ">u4", count=content[3], offset=4).astype(int)
    expected = 4 + 4 * content[3] + int(shape.prod())
    if len(content) != expected:
        raise DataError(f"{path} has {len(content):,} bytes, not {expected:,} as it says: it is cut off or damaged")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape).copy()


def standard_library() -> Iterator[bytes]:
    """The source of Python's own library, module by module in order of name."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
        yield path.read_bytes()
