"""Small protocols and the command line, for the lab's tests."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from adabayes.lab import data, protocol
from adabayes.lab.data import Data, download
from adabayes.lab.data.download import Source
from adabayes.lab.protocol import Spec

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def digits() -> Data:
    return data.load("digits")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium: install Debian's package chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore pytest's signal handlers, which a command in this process replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def write_cifar10(root: Path, pixels: np.ndarray, labels: np.ndarray) -> Source:
    """Write images, rows of 3072 bytes, in CIFAR-10's format: six equal files, of which the last is for testing."""
    source = download.SOURCES["cifar10"]
    folder = root / source.folder
    folder.mkdir()
    for name, x, y in zip(source.files, np.split(pixels, 6), np.split(labels, 6)):
        (folder / name).write_bytes(pickle.dumps({b"data": x, b"labels": y.tolist()}, protocol=2))
    return replace(source, files={name: md5(folder / name) for name in source.files})


def spec_of(optimizer: str = "adabayes", **options: Any) -> Spec:
    """Return a run of the quick protocol, made even shorter."""
    quick = protocol.load("quick").narrowed(optimizers=[optimizer], seeds=1, epochs=2)
    return replace(quick.runs()[0], **{"model_options": {"width": 4}, "batch_size": 128, **options})


def adabayes(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would."""
    command = [sys.executable, "-m", "adabayes", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "adabayes", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ}, **options)


def start_and_wait(out: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start a command that writes to ``out``, and wait for its first checkpoint."""
    process = start(*arguments, "--out", out)
    while not list(out.rglob("checkpoint-*.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    return process


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return metrics without those that depend on the clock."""
    return [{key: value for key, value in row.items() if not key.endswith("seconds")} for row in rows]
