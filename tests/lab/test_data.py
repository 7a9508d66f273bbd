"""Data: read without being trusted, and augmented as image by image."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import os
import pickle
import tarfile
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

from adabayes.lab import data, files
from adabayes.lab.data import Images
from adabayes.lab.files import Archive, DataError, Source
from tests.lab.conftest import adabayes, md5, write_cifar10

# Files in CIFAR's form


@pytest.fixture
def cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of 12 images in the form of CIFAR-10, with its own checksums."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 3072), dtype=np.uint8)
    monkeypatch.setitem(files.SOURCES, "cifar10", write_cifar10(tmp_path, pixels, np.tile([3, 9], 6)))
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
            files.read_cifar(path, "labels")
    path.write_bytes(b"cbuiltins\neval\n(S'open(\"" + str(mark).encode() + b'","w")\'\ntR.')
    with pytest.raises(DataError, match=r"asks for builtins\.eval"):
        files.read_cifar(path, "labels")
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x02}", pickle.dumps({b"data": [1, 2]}), pickle.dumps([1])])
def test_what_is_no_cifar_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train"
    path.write_bytes(content)
    with pytest.raises(DataError, match="train cannot be read as a file of CIFAR"):
        files.read_cifar(path, "fine_labels")


FULL = "the full data set is not here; set ADABAYES_DATA to a folder with it (adabayes data fetch)"


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_the_real_cifar_has_its_published_checksums_and_statistics(name: str, classes: int) -> None:
    try:
        files.find(name)
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
        np.testing.assert_array_equal(files.read_idx(path), array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(np.zeros(9, np.uint8))[:-2], "has 15 bytes, not 17"),
        (b"\x89PNG....", "is not an IDX file"),
        (b"", "is not an IDX file"),
    ],
)
def test_what_is_no_idx_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"labels {message}"):
        files.read_idx(path)
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(DataError, match=r"labels\.gz"):
        files.read_idx(path)


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
    source = replace(files.SOURCES["fashion-mnist"], elsewhere=(folder,), repacked=repacked)
    monkeypatch.setitem(files.SOURCES, "fashion-mnist", source)
    monkeypatch.setenv("ADABAYES_DATA", str(tmp_path / "empty"))
    found = data.load("fashion-mnist")
    assert found.count("train") == 3
    assert found.model_options() == {"classes": 10, "channels": 1}


# Downloads, from a real server


class _Server(http.server.ThreadingHTTPServer):
    content = b""
    breaks_after: int | None = None
    ranges: list[str | None]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        content, wanted = self.server.content, self.headers.get("Range")
        self.server.ranges.append(wanted)
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if wanted and first >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        self.wfile.write(content[first : self.server.breaks_after])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.ranges = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def remote(server: _Server, cifar10: Path, monkeypatch: pytest.MonkeyPatch) -> _Server:
    """The small CIFAR-10 as a tar on a server, with a file in it that nobody asked for."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(cifar10 / "cifar-10-batches-py", "cifar-10-batches-py")
        tar.add(__file__, "../escaped.py")
    server.content = packed.getvalue()
    digest = hashlib.sha256(server.content).hexdigest()
    url = f"http://127.0.0.1:{server.server_port}/cifar-10-python.tar.gz"
    source = files.SOURCES["cifar10"]
    monkeypatch.setitem(
        files.SOURCES, "cifar10", Source(source.folder, source.files, (Archive(url, "sha256", digest),))
    )
    return server


def test_a_download_that_breaks_off_goes_on_where_it_was(remote: _Server, tmp_path: Path) -> None:
    target = tmp_path / "fetched"
    seen: list[tuple[str, int, int | None]] = []
    remote.breaks_after = 1000
    with pytest.raises(DataError, match=r"broke off after 1,000 of.*1,000 bytes are kept.*goes on from there"):
        files.fetch("cifar10", target, lambda *what: seen.append(what))
    assert (target / "cifar-10-python.tar.gz.part").stat().st_size == 1000
    remote.breaks_after = None
    folder = files.fetch("cifar10", target, lambda *what: seen.append(what))
    assert remote.ranges == [None, "bytes=1000-"]
    assert data.load("cifar10", target).count("train") == 10
    assert {path.name for path in folder.iterdir()} == set(files.SOURCES["cifar10"].files)
    assert not list(tmp_path.rglob("escaped.py"))
    assert ("cifar-10-python.tar.gz", len(remote.content), len(remote.content)) in seen
    files.fetch("cifar10", target)  # is there already
    assert len(remote.ranges) == 2


def test_a_wrong_download_is_deleted_unopened(remote: _Server, tmp_path: Path) -> None:
    remote.content = b"<html>Sign in to continue</html>"
    with pytest.raises(DataError, match=r"has not the sha256.*deleted unopened"):
        files.fetch("cifar10", tmp_path / "fetched")
    assert not list((tmp_path / "fetched").rglob("*cifar*"))


def test_a_part_that_is_whole_needs_no_more(remote: _Server, tmp_path: Path) -> None:
    target = tmp_path / "fetched"
    target.mkdir()
    (target / "cifar-10-python.tar.gz.part").write_bytes(remote.content)
    files.fetch("cifar10", target)
    assert data.load("cifar10", target).count("test") == 2


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = files.SOURCES["cifar10"]
    archive = Archive("http://127.0.0.1:9/cifar-10-python.tar.gz", "sha256", "0")
    monkeypatch.setitem(files.SOURCES, "cifar10", replace(source, archives=(archive,)))
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9.*--data"):
        files.fetch("cifar10", tmp_path)


def test_the_command_lists_and_verifies(tmp_path: Path) -> None:
    done = adabayes("data", "list", "--data", tmp_path)
    assert done.returncode == 0
    assert "digits" in done.stdout
    assert "not there" in done.stdout
    done = adabayes("data", "verify", "cifar10", "--data", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("adabayes: cifar10: no data_batch_1 in")
    assert "Traceback" not in done.stderr
    done = adabayes("data", "fetch", "imagenet")
    assert "'imagenet' is not a data set that comes in files; there are cifar10" in done.stderr


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


def test_text_and_digits_need_no_files_and_unknown_sets_are_named() -> None:
    assert data.load("digits").count("train") + data.load("digits").count("test") == 1797
    with pytest.raises(DataError, match="unknown data set 'imagenet'; there are digits, stdlib, cifar10"):
        data.load("imagenet")
