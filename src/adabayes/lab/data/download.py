"""Files of data sets: downloading, finding and verifying them."""

from __future__ import annotations

import hashlib
import http.client
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adabayes.lab.data.formats import DataError, message_of

__all__ = ["SOURCES", "Source", "default_folder", "fetch", "find", "root_folder", "verify"]

Progress = Callable[[str, int, int | None], None]  # what, bytes so far, bytes in all


@dataclass(frozen=True)
class Archive:
    """A file to download, with its sha256 or, where that is not known, the md5 that its authors publish."""

    url: str
    size: int  # bytes
    algorithm: str
    digest: str
    saved_as: str | None = None  # where the last part of the address is not a telling name

    @property
    def name(self) -> str:
        return self.saved_as or self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class Source:
    """A data set that comes in files."""

    folder: str  # the files' folder, within the data folder
    files: dict[str, str]  # name: md5
    archives: tuple[Archive, ...]  # to download: a tar of the folder, or the files themselves
    elsewhere: tuple[Path, ...] = ()  # where a system package may have put them
    repacked: dict[str, str] = field(default_factory=dict)  # md5 of the same files, compressed again by that package


_KRIZ = "https://www.cs.toronto.edu/~kriz/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_CHAR_RNN = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"


def _idx(folder: str, site: str, files: dict[str, str], sizes: tuple[int, ...], *more: Any) -> Source:
    archives = (Archive(site + name, size, "md5", md5) for (name, md5), size in zip(files.items(), sizes))
    return Source(folder, files, tuple(archives), *more)


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
                170_498_071,
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
                169_001_437,
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
        (26_421_880, 29_515, 4_422_102, 5_148),
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
        (9_912_422, 28_881, 1_648_877, 4_542),
    ),
    "shakespeare": Source(
        "tinyshakespeare",
        {"tinyshakespeare.txt": "6fb458f1232090904fb40fe944165e91"},
        (
            Archive(
                _CHAR_RNN + "input.txt",
                1_115_394,
                "sha256",
                "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                saved_as="tinyshakespeare.txt",
            ),
        ),
    ),
}


_OTHER_FOLDER = "give another folder with --data DIR, or set ADABAYES_DATA to it"
_PATIENCE = 60.0  # seconds for a server to send something


def default_folder() -> Path:
    """Return the folder that data sets are kept in: $ADABAYES_DATA, or one in the user's cache."""
    if given := os.environ.get("ADABAYES_DATA"):
        return Path(given)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "adabayes"
    try:
        return Path.home() / ".cache" / "adabayes"
    except RuntimeError as error:  # no HOME, and no such user
        raise DataError(
            "there is no home folder to keep data sets in: set ADABAYES_DATA to a folder, or give one with --data DIR"
        ) from error


def root_folder(data: Path | None) -> Path:
    """Return the folder that contains the data sets' folders: ``data`` if it is given. It need not exist."""
    root = data or default_folder()
    if os.path.exists(root) and not os.path.isdir(root):
        raise DataError(f"{root} is not a folder, so it cannot contain data sets: {_OTHER_FOLDER}")
    return root


def find(name: str, data: Path | None = None) -> Path:
    """Find the folder of a data set's files: within ``data``, ``data`` itself, or where a system package puts them."""
    source = SOURCES[name]
    root = root_folder(data)
    places = [root / source.folder, root] + ([] if data else list(source.elsewhere))
    for place in places:
        if all(os.path.isfile(place / file) for file in source.files):
            return place
    missing = [file for file in source.files if not os.path.isfile(places[0] / file)]
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
        if not os.path.isfile(path):
            raise DataError(f"{path} is missing. Get it with: adabayes data fetch {name}")
        try:
            size = path.stat().st_size
            if progress:
                progress(f"checking {file}", size, size)
            found = _digest(path, "md5")
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {message_of(error)}. Repair that, or delete it and get it again: "
                f"adabayes data fetch {name}"
            ) from error
        if found not in (md5, source.repacked.get(file)):
            raise DataError(
                f"{path} is damaged or not the original: its md5 is {found}, not {md5} ({size:,} bytes). Delete it and "
                f"get it again: adabayes data fetch {name}"
            )


def fetch(name: str, data: Path | None = None, progress: Progress | None = None) -> Path:
    """Download what is missing, from where an earlier attempt broke off, and return the folder of the files."""
    source = SOURCES[name]
    try:
        folder = find(name, data)
        verify(name, folder, progress)
        return folder
    except DataError:
        pass
    root = root_folder(data)
    folder = root / source.folder
    try:
        for archive in source.archives:
            is_tar = ".tar" in archive.name
            where = root if is_tar else folder
            where.mkdir(parents=True, exist_ok=True)
            target = where / archive.name
            if not target.exists() or _digest(target, archive.algorithm) != archive.digest:
                download(archive, target, progress)
            if is_tar:
                _unpack(target, source, root)
    except OSError as error:
        raise DataError(
            f"{root} cannot take the files of {name}: {message_of(error)}. Repair that and run the same command again, "
            f"which resumes the download; or {_OTHER_FOLDER}"
        ) from error
    verify(name, folder, progress)
    return folder


def download(archive: Archive, target: Path, progress: Progress | None = None) -> None:
    """Download to ``target``, which is created only when the file is whole and its checksum is right."""
    part = target.with_name(target.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    if have > archive.size:
        part.unlink()
        have = 0
    for chunk in _chunks(archive, part, have) if have < archive.size else ():
        with part.open("ab") as file:
            file.write(chunk)
        have += len(chunk)
        if progress:
            progress(archive.name, have, archive.size)
    if _digest(part, archive.algorithm) != archive.digest:
        part.unlink()
        raise DataError(
            f"{archive.url}: the file received does not have the {archive.algorithm} {archive.digest} and was deleted "
            "unopened. Try again; if it happens again, the file was changed, or a server on the way answers instead."
        )
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(target)


def _chunks(archive: Archive, part: Path, have: int) -> Iterator[bytes]:
    """Yield the bytes of a file that come after the first ``have``, which are in ``part``."""
    request = urllib.request.Request(archive.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
            at = _start(answer, archive, have)
            # read1 returns what has arrived; read would lose a part of it where the connection breaks off.
            while at < archive.size and (chunk := answer.read1(1 << 18)):
                new = chunk[max(have - at, 0) : archive.size - at]
                at += len(chunk)
                if new:
                    yield new
        if at < archive.size:
            raise ConnectionError(f"it broke off after {at:,} of {archive.size:,} bytes")
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        kept = part.stat().st_size if part.exists() else 0
        raise DataError(
            f"{archive.url}: {message_of(error)}."
            + (f" {kept:,} bytes are kept in {part}; the same command resumes from there." if kept else "")
            + (" If that fails every time, delete it, to start again." if have else "")
            + " Without a network: put the file's contents where `adabayes data list` says, or name the folder with "
            "--data."
        ) from error


def _start(answer: Any, archive: Archive, have: int) -> int:
    """Return the offset in the file at which an answer begins; raise if the answer is not that file."""
    if not isinstance(answer, http.client.HTTPResponse):
        raise ConnectionError("the address is not that of a web server")
    start = 0
    if answer.status == 206:
        start = have
        if not have or not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise ConnectionError("the server answered with a part of the file that was not asked for")
    elif answer.status != 200:
        raise ConnectionError(f"the server answered with status {answer.status} instead of the file")
    if answer.headers.get_content_type() == "text/html":
        raise ConnectionError("a web page came instead of the file; perhaps this network wants you to sign in first")
    if answer.length is not None and start + answer.length != archive.size:
        raise ConnectionError(
            f"the server has a file of {start + answer.length:,} bytes, not of {archive.size:,}; it was changed, or "
            "a server on the way answers instead"
        )
    return start


def _unpack(archive: Path, source: Source, root: Path) -> None:
    """Extract the files of the data set, and nothing else, from a tar whose checksum is right."""
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
