"""Data: files are not trusted, and batches equal those that are augmented image by image."""

from __future__ import annotations

import contextlib
import gc
import gzip
import hashlib
import http.server
import io
import os
import pickle
import resource
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adabayes import cli
from adabayes.lab import data
from adabayes.lab.data import DataError, Images, Text, download, formats
from adabayes.lab.data.download import Archive, Source
from tests.lab.conftest import adabayes, md5, write_cifar10

ROOT = Path(__file__).parents[2]
DTYPE_STATE = (3, "|", None, None, None, -1, -1, 0)  # that numpy gives bytes

# Files in CIFAR's form


@pytest.fixture
def cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a data set of 12 images in the format of CIFAR-10, with its own checksums."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 3072), dtype=np.uint8)
    monkeypatch.setitem(download.SOURCES, "cifar10", write_cifar10(tmp_path, pixels, np.tile([3, 9], 6)))
    return tmp_path


def test_cifar_is_read_from_its_folder_or_the_one_above(cifar10: Path) -> None:
    for folder in (cifar10, cifar10 / "cifar-10-batches-py"):
        found = data.load("cifar10", folder)
        assert isinstance(found, Images)
        assert found.count("train") == 10
        assert found.count("test") == 2
        assert found.train_x.dtype == torch.uint8
        content = pickle.loads((cifar10 / "cifar-10-batches-py" / "test_batch").read_bytes())
        pixels = content[b"data"].reshape(2, 3, 32, 32)
        np.testing.assert_array_equal(found.test_x.numpy(), pixels.transpose(0, 2, 3, 1))


def test_a_damaged_file_is_named_with_the_remedy_before_it_is_opened(cifar10: Path) -> None:
    path = cifar10 / "cifar-10-batches-py" / "data_batch_3"
    content = path.read_bytes()
    for damaged in (content[:-7], content.replace(b"labels", b"lapels"), b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"data_batch_3 is damaged.*md5.*adabayes data fetch cifar10"):
            data.load("cifar10", cifar10)
    path.unlink()
    with pytest.raises(DataError, match=r"no data_batch_3.*adabayes data fetch cifar10"):
        data.load("cifar10", cifar10)


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_nothing_that_a_pickle_asks_for_is_run(tmp_path: Path) -> None:
    mark, path = tmp_path / "was-here", tmp_path / "data_batch_1"
    for content in ({b"data": _Evil(mark)}, {b"data": np.zeros((1, 3072)), b"labels": [0], b"x": _Evil(mark)}):
        path.write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(DataError, match=r"data_batch_1 cannot be read.*asks for (posix|nt)\.system"):
            formats.read_cifar(path, "labels", 10, limit=20)
    path.write_bytes(b"cbuiltins\neval\n(S'open(\"" + str(mark).encode() + b'","w")\'\ntR.')
    with pytest.raises(DataError, match=r"asks for builtins\.eval"):
        formats.read_cifar(path, "labels", 10, limit=2)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x02}", pickle.dumps({b"data": [1, 2]}), pickle.dumps([1])])
def test_a_file_that_is_not_cifars_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train"
    path.write_bytes(content)
    with pytest.raises(DataError, match="train cannot be read as a file of CIFAR"):
        formats.read_cifar(path, "fine_labels", 100, limit=2)


def forged(dtype: str = "u1", state: Any = DTYPE_STATE, shape: Any = (2, 3072), labels: Any = (1, 2)) -> bytes:
    """Return a pickle of two images with false statements about its array."""

    def code(value: object) -> bytes:
        return pickle.dumps(value, protocol=2)[2:-1]

    return b"".join(
        (
            b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01",
            code(shape) + b"cnumpy\ndtype\n(" + code(dtype) + b"K\x00K\x01tR" + code(state),
            b"b\x89T" + (6144).to_bytes(4, "little") + bytes(6144) + b"tbU\x06labels" + code(list(labels)) + b"u.",
        )
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        # These three ended the process: numpy believes what a pickle says of fields and alignment.
        (forged("V1", (3, "|", None, ("a",), {"a": (1, 2)}, 1, 1, 0)), "it has the instruction SETITEM"),
        (forged("V1", (3, "|", None, ("a",), {}, 1, 1, 0)), "not an array of bytes"),
        (forged("V1", (3, "|", None, None, None, 1, 0, 0)), "not an array of bytes"),
        (forged("O"), "not an array of bytes"),
        (forged(shape=(6144,)), "not an array of bytes"),
        (forged(shape=(2, 3072, 1 << 30)), "not an array of bytes"),
        (forged(shape=(1 << 30, 3072)), "images, and 1 to 2 are possible"),
        (forged(shape=(-2, 3072)), "it has -2 images"),
        (forged(shape=(1, 3072), labels=[1]), "has 6,144 bytes of data"),
        (forged(labels=[1]), "labels are not 2 numbers from 0 to 9"),
        (forged(labels=[1, 10]), "labels are not 2 numbers from 0 to 9"),
        (forged(labels=[1, "x"]), "labels are not 2 numbers from 0 to 9"),
        (forged(labels=[-1, 1]), "labels are not 2 numbers from 0 to 9"),
        # An index that Python's own reader makes a table for, of 64 GB
        (b"\x80\x02}r\xff\xff\xff\xff" + forged()[3:].replace(b"data", b"dada"), "KeyError"),
        # A key whose hash takes 2**60 steps, and one that takes all of the stack
        (b"\x80\x02}(K\x00" + 60 * b"q\x00h\x00\x86" + b"K\x00u.", "a key is not text"),
        (b"\x80\x02}(K\x00" + 900 * b"\x85" + b"K\x00u.", "a key is not text"),
        (b"\x80\x02" + 2000 * b"}" + b".", "more than 1,016 instructions"),
        (b"\x80\x02" + 20_000 * b"}" + b".", "more than 10,496 bytes"),
        (b"\x80\x02cos\n\x1b[2J" + 300 * b"x" + b"\n.", r"asks for os\.\?\[2Jx{180,}\. Delete it"),
    ],
)
def test_a_forged_cifar_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(forged())
    assert formats.read_cifar(path, "labels", 10, limit=2)[1].tolist() == [1, 2]
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"data_batch_1 .*{message}"):
        formats.read_cifar(path, "labels", 10, limit=2)


FULL = "the full data set is not here; set ADABAYES_DATA to a folder with it (adabayes data fetch)"


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_the_real_cifar_has_its_published_checksums_and_statistics(name: str, classes: int) -> None:
    try:
        download.find(name)
    except DataError:
        pytest.skip(FULL)
    found = data.load(name)
    assert isinstance(found, Images)
    assert (found.count("train"), found.count("test")) == (50_000, 10_000)
    assert torch.equal(found.train_y.bincount(), torch.full((classes,), 50_000 // classes))
    pixels = found.train_x[:, 4:-4, 4:-4].double() / 255
    assert pixels.mean((0, 1, 2)).tolist() == pytest.approx(found.mean, abs=2e-3)


# Files in MNIST's form


def idx(array: np.ndarray) -> bytes:
    shape = np.array(array.shape, ">u4").tobytes()
    return b"\0\0\x08" + bytes([array.ndim]) + shape + array.tobytes()


def test_idx_files_are_read_zipped_or_not(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    plain, zipped = tmp_path / "x", tmp_path / "x.gz"
    plain.write_bytes(idx(array))
    zipped.write_bytes(gzip.compress(idx(array)))
    for path in (plain, zipped):
        np.testing.assert_array_equal(formats.read_idx(path, (5, 3, 4)), array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(np.zeros(9, np.uint8))[:-2], "has 15 bytes, not 17"),
        (idx(np.zeros(9, np.uint8)) + b"x", "has 18 bytes, not 17"),
        (idx(np.zeros(11, np.uint8)), "has more than 18 bytes, the most that are possible"),
        (idx(np.zeros(0, np.uint8)), r"says that its shape is \(0,\)"),
        (b"\0\0\x08\x01\xff\xff\xff\xff", r"says that its shape is \(4294967295,\), and at most \(10,\)"),
        (idx(np.zeros((3, 2), np.uint8)), "is not an IDX file of bytes in 1 dimensions"),
        (b"\0\0\x08\xff" + 12 * b"\xff", "is not an IDX file"),
        (b"\0\0\x08\x01\0\0", "is not an IDX file"),
        (b"\x89PNG....", "is not an IDX file"),
        (b"", "is not an IDX file"),
    ],
)
def test_a_file_that_is_not_idx_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"labels {message}.*adabayes data fetch"):
        formats.read_idx(path, (10,))
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(DataError, match=r"labels\.gz"):
        formats.read_idx(path, (10,))


def test_dimensions_whose_product_overflows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(b"\0\0\x08\x04" + 4 * (1 << 16).to_bytes(4, "big"))  # a product of 2**64, 0 in 64 bits
    with pytest.raises(DataError, match=r"images says that its shape is \(65536, 65536, 65536, 65536\)"):
        formats.read_idx(path, (2, 28, 28, 1))


def test_a_damaged_or_endless_gzip_stream_is_named(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    zipped = gzip.compress(idx(np.arange(9, dtype=np.uint8)))
    for damaged in (
        zipped[:10] + b"\xff" + zipped[11:],
        zipped[:-8] + bytes(8),
        zipped[:5],
        zipped + b"x",
        gzip.compress(bytes(1 << 20)),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"labels\.gz (cannot be read|has more than 17 bytes)"):
            formats.read_idx(path, (9,))


def test_fashion_mnist_is_found_where_debian_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "usr" / "share"
    folder.mkdir(parents=True)
    contents = {
        "images-idx3-ubyte.gz": np.zeros((3, 28, 28), np.uint8),
        "labels-idx1-ubyte.gz": np.arange(3, dtype=np.uint8),
    }
    for part in ("train", "t10k"):
        for name, array in contents.items():
            (folder / f"{part}-{name}").write_bytes(gzip.compress(idx(array)))
    repacked = {path.name: md5(path) for path in folder.iterdir()}
    source = replace(download.SOURCES["fashion-mnist"], elsewhere=(folder,), repacked=repacked)
    monkeypatch.setitem(download.SOURCES, "fashion-mnist", source)
    monkeypatch.setenv("ADABAYES_DATA", str(tmp_path / "empty"))
    found = data.load("fashion-mnist")
    assert found.count("train") == 3
    assert found.model_options() == {"classes": 10, "channels": 1}


def fuzz(folder: Path, cases: int, seed: int) -> None:
    command = [sys.executable, "-m", "tests.workers.fuzz_formats", str(folder), str(cases), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout} {done.stderr}"
    assert f"{cases} cases" in done.stdout


def test_damaged_and_forged_files_end_in_an_error_within_a_little_memory(tmp_path: Path) -> None:
    fuzz(tmp_path, cases=3000, seed=0)


@pytest.mark.long
def test_very_many_damaged_and_forged_files_end_in_an_error_within_a_little_memory(tmp_path: Path) -> None:
    fuzz(tmp_path, cases=100_000, seed=1)


def test_images_without_their_labels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = download.SOURCES["mnist"]
    for labels, message in (([1, 2], "3 images and 2 labels"), ([1, 2, 10], "labels up to 10")):
        for part in ("train", "t10k"):
            images = np.zeros((3, 28, 28), np.uint8)
            (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
            (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array(labels, np.uint8))))
        files = {name: md5(tmp_path / name) for name in source.files}
        monkeypatch.setitem(download.SOURCES, "mnist", replace(source, files=files))
        with pytest.raises(DataError, match=f"{message}.*adabayes data fetch"):
            data.load("mnist", tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"1,2\n", b"1,2,3\n" * 3, b"1,2,x\n", b"1,2,17\n", b"1,2,-1\n", b"1,2,1e1\n", b"1,,2\n", b"1" * 4000],
)
def test_a_file_that_is_not_a_table_of_small_numbers_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(gzip.compress(b"1,2,3\r\n4,5,16"))
    np.testing.assert_array_equal(formats.read_csv(path, (2, 3), highest=16), [[1, 2, 3], [4, 5, 16]])
    path.write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=r"digits\.csv\.gz (has|does not have) .*Install the package"):
        formats.read_csv(path, (2, 3), highest=16)


# Downloads, from a real server


class _Server(http.server.ThreadingHTTPServer):
    content = b""
    breaks_after: int | None = None
    raw: bytes | None = None  # an answer to the last bit, in place of a right one
    ranges: list[str | None]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        content, wanted = self.server.content, self.headers.get("Range")
        self.server.ranges.append(wanted)
        if (raw := self.server.raw) is not None:
            self.wfile.write(raw)
            if raw.endswith(STALL):
                self.rfile.read()  # until the other side gives up
            return
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if wanted and first >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(content) - first))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(content[first : self.server.breaks_after])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.ranges = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def remote(server: _Server, cifar10: Path, monkeypatch: pytest.MonkeyPatch) -> _Server:
    """Serve the small CIFAR-10 as a tar, which also has a file that does not belong to it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(cifar10 / "cifar-10-batches-py", "cifar-10-batches-py")
        tar.add(__file__, "../escaped.py")
    server.content = packed.getvalue()
    digest = hashlib.sha256(server.content).hexdigest()
    url = f"http://127.0.0.1:{server.server_port}/cifar-10-python.tar.gz"
    source = download.SOURCES["cifar10"]
    monkeypatch.setitem(
        download.SOURCES,
        "cifar10",
        Source(source.folder, source.files, (Archive(url, len(server.content), "sha256", digest),)),
    )
    return server


def test_a_download_that_breaks_off_is_resumed(remote: _Server, tmp_path: Path) -> None:
    target = tmp_path / "fetched"
    seen: list[tuple[str, int, int | None]] = []
    remote.breaks_after = 1000
    with pytest.raises(DataError, match=r"broke off after 1,000 of.*1,000 bytes are kept.*resumes from there"):
        download.fetch("cifar10", target, lambda *what: seen.append(what))
    assert (target / "cifar-10-python.tar.gz.part").stat().st_size == 1000
    remote.breaks_after = None
    folder = download.fetch("cifar10", target, lambda *what: seen.append(what))
    assert remote.ranges == [None, "bytes=1000-"]
    assert data.load("cifar10", target).count("train") == 10
    assert {path.name for path in folder.iterdir()} == set(download.SOURCES["cifar10"].files)
    assert not list(tmp_path.rglob("escaped.py"))
    assert ("cifar-10-python.tar.gz", len(remote.content), len(remote.content)) in seen
    download.fetch("cifar10", target)  # is there already
    assert len(remote.ranges) == 2


def test_a_wrong_download_is_deleted_unopened(remote: _Server, tmp_path: Path) -> None:
    remote.content = bytes(len(remote.content))
    with pytest.raises(DataError, match=r"does not have the sha256.*deleted unopened"):
        download.fetch("cifar10", tmp_path / "fetched")
    assert not list((tmp_path / "fetched").rglob("*cifar*"))


def test_a_part_that_is_whole_needs_no_more(remote: _Server, tmp_path: Path) -> None:
    target = tmp_path / "fetched"
    target.mkdir()
    part = target / "cifar-10-python.tar.gz.part"
    part.write_bytes(remote.content)
    download.fetch("cifar10", target)
    assert data.load("cifar10", target).count("test") == 2
    assert remote.ranges == []


def test_a_part_that_is_too_long_is_downloaded_again(remote: _Server, tmp_path: Path) -> None:
    target = tmp_path / "fetched"
    target.mkdir()
    (target / "cifar-10-python.tar.gz.part").write_bytes(remote.content + b"x")
    download.fetch("cifar10", target)
    assert remote.ranges == [None]


STALL = b"stall"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
# Answers of servers, and what is said of them. {port} is the server's own, {size} and {half} are of the right file.
MISBEHAVIOURS: dict[str, tuple[bytes, str]] = {
    "closes": (b"", "closed connection"),
    "stalls": (OK + b"Content-Length: {size}\r\n\r\n" + STALL, "timed out"),
    "stalls before its answer": (STALL, "timed out"),
    "garbage": (b"\x00\xff\xfe garbage\r\n\r\n", "garbage"),
    "other protocol": (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH"),
    "no such version": (b"HTTP/9.9 200 OK\r\n\r\n", "HTTP/9.9"),
    "status is no number": (b"HTTP/1.1 abc\r\n\r\n", "abc"),
    "status out of range": (b"HTTP/1.1 2000 OK\r\n\r\n", "2000"),
    "status 999": (b"HTTP/1.1 999 \x1b[2Jgone\r\n\r\n", r"999: \?\[2Jgone"),
    "long status line": (b"HTTP/1.1 200 " + b"x" * 70_000, "got more than 65536 bytes"),
    "long header": (OK + b"A: " + b"x" * 70_000 + b"\r\n\r\n", "got more than 65536 bytes"),
    "many headers": (OK + b"A: b\r\n" * 200 + b"\r\n", "more than 100 headers"),
    "no headers' end": (OK + b"Content-Length: {size}", "broke off after 0 of"),
    "no body": (OK + b"Content-Length: {size}\r\n\r\n", "broke off after 0 of"),
    "half a body": (OK + b"Content-Length: {size}\r\n\r\n{half}", "broke off after"),
    "half a body, no length": (OK + b"\r\n{half}", "broke off after"),
    "half a body, length garbage": (OK + b"Content-Length: 1e3\r\n\r\n{half}", "broke off after"),
    "half a body, length negative": (OK + b"Content-Length: -5\r\n\r\n{half}", "broke off after"),
    "other length": (OK + b"Content-Length: 12\r\n\r\nabcdefghijkl", "has a file of 12 bytes, not of"),
    "immense length": (OK + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", "has a file of 999,999,"),
    "chunk breaks off": (CHUNKED + b"ffff\r\n{half}", "IncompleteRead|broke off"),
    "between chunks": (CHUNKED + b"4\r\n{four}\r\n", "IncompleteRead"),
    "chunks end early": (CHUNKED + b"4\r\n{four}\r\n0\r\n\r\n", "broke off after 4 of"),
    "chunk size garbage": (CHUNKED + b"4\r\n{four}\r\nzz\r\nabc", "IncompleteRead"),
    "chunk size negative": (CHUNKED + b"4\r\n{four}\r\n-4\r\nabc\r\n", "IncompleteRead"),
    "chunk size immense": (CHUNKED + b"f" * 40 + b"\r\n{half}", "IncompleteRead|broke off"),
    "chunk size endless": (CHUNKED + b"0" * 70_000, "got more than 65536 bytes|IncompleteRead"),
    "web page": (OK + b"Content-Type: text/html\r\n\r\n<html>Sign in</html>", "a web page came"),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", "status 204"),
    "wrong part": (b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 3-9/10\r\n\r\nabcdef", "not asked for"),
    "part without range": (b"HTTP/1.1 206 Partial Content\r\n\r\nabcdef", "not asked for"),
    "not found": (b"HTTP/1.1 404 Not Found\r\n\r\n", "404: Not Found"),
    "not satisfiable": (b"HTTP/1.1 416 Range Not Satisfiable\r\n\r\n", "416"),
    "unavailable": (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "503"),
    "redirect to nowhere": (b"HTTP/1.1 302 Found\r\n\r\n", "302"),
    "redirect to itself": (b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n", "infinite loop"),
    "redirect to a file": (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", "not allowed"),
    "redirect to FTP": (b"HTTP/1.1 302 Found\r\nLocation: ftp://127.0.0.1:{port}/\r\n\r\n", "timed out"),
    "redirect to no address": (b"HTTP/1.1 302 Found\r\nLocation: http://[::1/x\r\n\r\n", "IPv6"),
    "redirect to no port": (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:x/\r\n\r\n", "nonnumeric port"),
    "redirect to no host": (b"HTTP/1.1 302 Found\r\nLocation: http:///x\r\n\r\n", "no host|infinite loop"),
    "redirect to a long name": (
        b"HTTP/1.1 302 Found\r\nLocation: http://" + b"a" * 70 + b".invalid/\r\n\r\n",
        "label|too long|[Nn]ame",
    ),
}


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("kept", [0, 1000])
@pytest.mark.parametrize("kind", MISBEHAVIOURS)
def test_whatever_a_server_answers_the_bytes_received_are_kept_and_the_next_try_resumes(
    kind: str, kept: int, remote: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, message = MISBEHAVIOURS[kind]
    if message == "timed out":
        monkeypatch.setattr(download, "_PATIENCE", 0.1)
    size = len(remote.content)
    for name, value in {
        b"{size}": str(size).encode(),
        b"{port}": str(remote.server_port).encode(),
        b"{half}": remote.content[: size // 2],
        b"{four}": remote.content[:4],
    }.items():
        raw = raw.replace(name, value)
    remote.raw = raw
    target = tmp_path / "fetched"
    part = target / "cifar-10-python.tar.gz.part"
    target.mkdir()
    if kept:
        part.write_bytes(remote.content[:kept])
    with pytest.raises(DataError, match=rf"http://127\.0\.0\.1:\d+/cifar.*(?:{message}).*--data") as caught:
        download.fetch("cifar10", target)
    there = part.read_bytes() if part.exists() else b""
    assert there[:kept] == remote.content[:kept]
    assert len(there) >= (size // 2 if "{half}" in MISBEHAVIOURS[kind][0].decode("latin-1") else kept)
    assert (f"{len(there):,} bytes are kept in {part}; the same command resumes" in str(caught.value)) == bool(there)
    if kind.startswith("redirect"):
        del caught
        gc.collect()  # urllib leaves the socket open where an address is none: see it go while that is ignored
    remote.raw = None
    monkeypatch.setattr(download, "_PATIENCE", 60.0)
    if there == remote.content[: len(there)]:
        download.fetch("cifar10", target)
        assert remote.ranges[-1] == (f"bytes={len(there)}-" if there else None)
    else:  # what is wrong is found out when all is there
        with pytest.raises(DataError, match="deleted unopened"):
            download.fetch("cifar10", target)
        download.fetch("cifar10", target)
    assert not part.exists()


def test_a_server_that_sends_all_or_too_much_does_no_harm(remote: _Server, tmp_path: Path) -> None:
    """It ignores ranges, states no length, and continues after the end."""
    remote.raw = OK + b"\r\n" + remote.content + b"x" * 5_000_000
    for kept in (0, 1000):
        target = tmp_path / f"kept-{kept}"
        target.mkdir()
        (target / "cifar-10-python.tar.gz.part").write_bytes(remote.content[:kept])
        download.fetch("cifar10", target)
        assert (target / "cifar-10-python.tar.gz").read_bytes() == remote.content


# Folders


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a user without HOME and without an entry among the system's users, as in many containers."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "XDG_CACHE_HOME", "ADABAYES_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


def listed(*arguments: str) -> str:
    """Return the output of ``adabayes data list``."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main(["data", "list", *arguments])
    return " ".join(printed.getvalue().split())


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_the_error_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for act in (data.load, download.find, download.fetch):
        with pytest.raises(DataError, match=r"no home folder.*ADABAYES_DATA.*--data DIR"):
            act("cifar10")
    assert "no home folder" in listed()
    assert "digits embedded" in listed()
    monkeypatch.setenv("ADABAYES_DATA", "")
    with pytest.raises(DataError, match="no home folder"):
        download.find("cifar10")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert download.default_folder() == tmp_path / "adabayes"


def test_a_file_in_place_of_the_folder_is_named(cifar10: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cifar10 / "c[/]file"  # rich's markup, if it is taken for that
    file.parent.mkdir()
    file.write_bytes(b"mine")
    monkeypatch.setenv("ADABAYES_DATA", str(file))
    for folder in (None, file):
        for act in (data.load, download.find, download.fetch):
            with pytest.raises(DataError, match=r"\]file is not a folder.*--data DIR, or set ADABAYES_DATA"):
                act("cifar10", folder)
    assert "c[/]file is not a folder" in listed().replace("[/ ]", "[/]")
    monkeypatch.setenv("ADABAYES_DATA", str(cifar10))
    source = download.SOURCES["cifar10"]
    (cifar10 / source.folder).rename(cifar10 / "away")
    (cifar10 / source.folder).write_bytes(b"mine")
    with pytest.raises(DataError, match="no data_batch_1 in"):
        download.find("cifar10")
    with pytest.raises(DataError, match=r"cannot take the files of cifar10.*--data DIR"):
        download.fetch("cifar10", cifar10 / source.folder / "below")
    assert file.read_bytes() == (cifar10 / source.folder).read_bytes() == b"mine"


def test_a_folder_in_place_of_a_file_is_named(cifar10: Path) -> None:
    folder = cifar10 / "cifar-10-batches-py"
    (folder / "test_batch").unlink()
    (folder / "test_batch").mkdir()
    with pytest.raises(DataError, match="no test_batch in"):
        data.load("cifar10", cifar10)
    with pytest.raises(DataError, match="test_batch is missing"):
        download.verify("cifar10", folder)


def test_a_folder_that_may_not_be_written_is_named(remote: _Server, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:  # where other users can get to, unlike tmp_path
        folder = Path(name) / "data"
        folder.mkdir(0o555)
        Path(name).chmod(0o755)
        me = os.geteuid()
        if me == 0:
            os.seteuid(65534)  # nobody
        try:
            with pytest.raises(
                DataError, match=r"data cannot take.*Permission denied.*--data DIR, or set ADABAYES_DATA"
            ):
                download.fetch("cifar10", folder)
        finally:
            os.seteuid(me)


def test_a_full_disk_keeps_what_came_and_says_what_to_do(remote: _Server, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"fetched cannot take the files of cifar10.*same command again"):
            download.fetch("cifar10", tmp_path / "fetched")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "fetched" / "cifar-10-python.tar.gz.part").stat().st_size == 2000
    download.fetch("cifar10", tmp_path / "fetched")
    assert remote.ranges == [None, "bytes=2000-"]


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = download.SOURCES["cifar10"]
    archive = Archive("http://127.0.0.1:9/cifar-10-python.tar.gz", 9, "sha256", "0")
    monkeypatch.setitem(download.SOURCES, "cifar10", replace(source, archives=(archive,)))
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9.*--data"):
        download.fetch("cifar10", tmp_path)


def test_the_command_lists_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = listed("--data", str(tmp_path))
    assert "digits embedded" in found
    assert "cifar10 missing" in found
    with pytest.raises(SystemExit, match="1"):
        cli.main(["data", "fetch", "imagenet"])
    assert "'imagenet' is not a data set with files; there are cifar10" in capsys.readouterr().err
    done = adabayes("data", "verify", "cifar10", "--data", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("adabayes: cifar10: no data_batch_1 in")
    assert "Traceback" not in done.stderr


# Augmentation


@given(seed=st.integers(0, 2**31), pad=st.integers(0, 4), flip=st.booleans(), channels=st.sampled_from([1, 3]))
@settings(max_examples=40, deadline=None)
def test_batches_are_what_padding_cropping_and_flipping_each_image_gives(
    seed: int, pad: int, flip: bool, channels: int
) -> None:
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (6, 5, 7, channels), dtype=np.uint8)
    labels = np.arange(6)
    mean, std = (0.4, 0.5, 0.6)[:channels], (0.2, 0.3, 0.1)[:channels]
    found = data._images((images, labels), (images, labels), 6, mean, std, pad, flip)
    indices = torch.tensor([4, 0, 4, 3])
    x, y = found.train_batch(indices, torch.Generator().manual_seed(seed))
    assert y.tolist() == [4, 0, 4, 3]
    assert x.is_contiguous(memory_format=torch.channels_last)
    for image, label in zip(x, y):
        padded = np.pad(images[label] / 255, ((pad, pad), (pad, pad), (0, 0)))
        crops = [padded[i : i + 5, j : j + 7] for i in range(2 * pad + 1) for j in range(2 * pad + 1)]
        crops += [crop[:, ::-1] for crop in crops] if flip else []
        expected = [(crop - mean) / std for crop in crops]
        assert any(np.allclose(image.permute(1, 2, 0), e, rtol=0, atol=1e-5) for e in expected)
    plain, _ = found.test_batch(indices)
    np.testing.assert_allclose(plain.permute(0, 2, 3, 1), (images[[4, 0, 4, 3]] / 255 - mean) / std, atol=1e-5)


def test_all_crops_and_both_flips_are_equally_likely() -> None:
    image = np.arange(1, 10, dtype=np.uint8).reshape(1, 3, 3, 1)
    found = data._images((image, np.zeros(1)), (image, np.zeros(1)), 1, (0.0,), (1 / 255,), pad=1, flip=True)
    x, _ = found.train_batch(torch.zeros(9000, dtype=torch.long), torch.Generator().manual_seed(0))
    kinds, counts = np.unique(x.flatten(1).round().numpy(), axis=0, return_counts=True)
    assert len(kinds) == 18
    # 500 each on average; the standard deviation is 22
    assert counts.min() > 390
    assert counts.max() < 610


def test_a_validation_split_is_of_training_images_and_always_the_same() -> None:
    found = data.load("digits")
    assert isinstance(found, Images)
    held = found.hold_out(0.25)
    assert held.count("train") + held.count("test") == found.count("train")
    pad = found.pad
    original = {bytes(x.numpy()) for x in found.train_x[:, pad:-pad, pad:-pad].contiguous()}
    assert all(bytes(x.numpy()) in original for x in held.test_x)
    together = torch.cat([held.train_x[:, pad:-pad, pad:-pad], held.test_x])
    assert sorted(bytes(x.numpy()) for x in together.contiguous()) == sorted(
        bytes(x.numpy()) for x in found.train_x[:, pad:-pad, pad:-pad].contiguous()
    )
    assert found.hold_out(0.25).fingerprint() == held.fingerprint()


# Text


def test_text_asks_for_each_next_character() -> None:
    text = data.load("stdlib")
    assert text.model_options() == {"classes": 128, "context": 128}
    everything = torch.arange(text.count("train"))
    generator = torch.Generator().manual_seed(0)
    for indices in (everything[:4], everything[-4:]):
        x, y = text.train_batch(indices, generator)
        assert x.shape == y.shape == (4, 128)
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert int(x.max()) < 128
    x, y = text.test_batch(torch.tensor([0, text.count("test") - 1]))
    assert torch.equal(x[:, 1:], y[:, :-1])
    held = text.hold_out(0.1)
    assert held.count("test") < 0.11 * text.count("train")


def test_shakespeare_is_split_as_by_nanogpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 40
    path = tmp_path / "tinyshakespeare.txt"
    path.write_text(text)
    source = replace(download.SOURCES["shakespeare"], files={path.name: md5(path)})
    monkeypatch.setitem(download.SOURCES, "shakespeare", source)
    found = data.load("shakespeare", tmp_path)
    assert isinstance(found, Text)
    alphabet = sorted(set(text))
    assert found.model_options() == {"classes": len(alphabet), "context": 64}
    cut = int(0.9 * len(text))
    for part, expected in ((found.train, text[:cut]), (found.test, text[cut:])):
        assert part.dtype == torch.uint8
        assert "".join(alphabet[place] for place in part.tolist()) == expected


def test_shakespeare_is_saved_under_its_own_name(
    server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.content = b"To be, or not to be" * 20
    source = download.SOURCES["shakespeare"]
    archive = source.archives[0]
    assert archive.url.endswith("/input.txt")
    monkeypatch.setitem(
        download.SOURCES,
        "shakespeare",
        replace(
            source,
            files={"tinyshakespeare.txt": hashlib.md5(server.content, usedforsecurity=False).hexdigest()},
            archives=(
                replace(
                    archive,
                    url=f"http://127.0.0.1:{server.server_port}/input.txt",
                    size=len(server.content),
                    digest=hashlib.sha256(server.content).hexdigest(),
                ),
            ),
        ),
    )
    assert download.fetch("shakespeare", tmp_path) == tmp_path / "tinyshakespeare"
    assert [path.name for path in (tmp_path / "tinyshakespeare").iterdir()] == ["tinyshakespeare.txt"]


def test_the_real_shakespeare_has_65_characters_and_their_split() -> None:
    try:
        download.find("shakespeare")
    except DataError:
        pytest.skip(FULL)
    found = data.load("shakespeare")
    assert isinstance(found, Text)
    assert found.classes == 65
    assert int(found.train.max()) == 64
    assert (len(found.train), len(found.test)) == (1_003_854, 111_540)


def test_text_and_digits_need_no_files_and_unknown_sets_are_named() -> None:
    assert data.load("digits").count("train") + data.load("digits").count("test") == 1797
    with pytest.raises(DataError, match="unknown data set 'imagenet'; there are digits, stdlib, cifar10"):
        data.load("imagenet")
