"""Deaths at file operations, full disks and signals: nothing is lost, half-written or left behind."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from adabayes import cli
from adabayes.lab.data import Data, download
from adabayes.lab.execute import sweep
from adabayes.lab.report import figures
from adabayes.lab.run.files import DiskFull, append, remove_leftovers, write_atomically
from adabayes.lab.run.folder import RunFolder
from adabayes.lab.run.training import Watch, train
from tests.lab.conftest import spec_of, start
from tests.workers import deaths

ROOT = Path(__file__).parents[2]


# Deaths


def die(folder: Path, step: int, *command: str) -> int:
    """Let a command die at some or all of its file operations, and return how often it did."""
    worker = [sys.executable, "-m", "tests.workers.deaths", str(folder), str(step), *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(worker, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    *problems, counted = map(json.loads, done.stdout.splitlines())
    assert not problems, json.dumps(problems, indent=1)
    return int(counted["deaths"])


def test_a_comparison_that_dies_at_a_file_operation_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    assert die(tmp_path, 27, "reproduce") >= 8


@pytest.mark.long
@pytest.mark.parametrize("command", [("reproduce",), ("tune", "--budget", "2")], ids=lambda command: command[0])
def test_whatever_dies_at_any_file_operation_ends_as_if_nothing_had_happened(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    assert die(tmp_path, 1, *command) >= 200


# What deaths leave


@pytest.mark.parametrize("name", ["spec.json.4242.tmp", "checkpoint-24.safetensors.1f00beef.tmp"])
def test_temporary_files_of_the_dead_are_removed_by_the_next_start(digits: Data, tmp_path: Path, name: str) -> None:
    left, stray = tmp_path / name, tmp_path / "notes.tmp"
    for path in (left, stray):
        path.write_bytes(b"half")
    train(spec_of(epochs=1), RunFolder(tmp_path), digits)
    assert not left.exists()
    assert stray.exists()  # which is not ours


def test_temporary_files_of_a_comparison_are_removed_too_but_no_others(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    names = ("sweep.json", "results.csv", "results.json", "index.html", "tuned.toml", "tune.png", "figures/a.svg")
    for name in names:
        (tmp_path / f"{name}.4242.tmp").write_bytes(b"half")
    (tmp_path / "mine.json.4242.tmp").write_bytes(b"of another program, for --out may be any folder")
    sweep.prepare([spec_of()], tmp_path, tensorboard=False)
    assert [path.name for path in tmp_path.rglob("*.tmp")] == ["mine.json.4242.tmp"]


def test_a_temporary_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.csv.1f00beef.tmp"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as its writer does, on whatever machine
        remove_leftovers(tmp_path)
        assert path.exists()
    remove_leftovers(tmp_path)
    assert not path.exists()


def test_who_removes_leftovers_and_who_writes_do_not_get_into_each_others_way(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        while True:
            remove_leftovers(tmp_path)
    try:
        until = time.monotonic() + 1
        count = 0
        while time.monotonic() < until:
            write_atomically(tmp_path / "results.csv", b"%d" % count)
            assert (tmp_path / "results.csv").read_bytes() == b"%d" % count
            count += 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def test_checkpoints_that_a_kill_has_left_beside_the_result_are_removed(digits: Data, tmp_path: Path) -> None:
    spec, folder = spec_of(epochs=1), RunFolder(tmp_path)
    train(spec, folder, digits)
    folder.save(12, {})
    (tmp_path / "checkpoint-9.safetensors").write_bytes(b"whose JSON was deleted first")
    outcome = sweep.attempt(spec, folder, lambda: digits, Watch(), sweep.Options())
    assert (outcome.status, outcome.is_new) == ("done", False)
    assert not list(tmp_path.glob("checkpoint-*"))


# Full disks


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Refuse to write beyond a size, as a full disk would."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_lines_that_do_not_fit_are_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, b"one\n")
    with file_size_limit(8), pytest.raises(DiskFull, match=r"no room to write .*metrics\.jsonl"):
        append(path, b"another that is longer\n")
    assert path.read_bytes() == b"one\n"
    append(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_figures_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    figure = Figure()
    figure.add_subplot().plot([1, 2])
    with file_size_limit(1000), pytest.raises(DiskFull, match="no room to write"):
        figures.save(figure, tmp_path / "curves")
    assert not list(tmp_path.iterdir())


def exit_code(*command: str | Path) -> int | str | None:
    """Run a command in this process, and return its exit code."""
    try:
        cli.main([*map(str, command)])
    except SystemExit as end:
        return end.code
    return 0


def test_pages_and_tables_are_written_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    reproduce = ("reproduce", "--optimizers", "sgd", "--seeds", "1", "--epochs", "1", "--out", out)
    assert exit_code(*reproduce) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for command in (("report", out), reproduce):
        capsys.readouterr()
        with file_size_limit(1000):
            assert exit_code(*command) == 1
        errors = capsys.readouterr().err
        assert "no room to write" in errors
        assert "Traceback" not in errors
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.filterwarnings("ignore:batch_size=720:UserWarning")  # too large for a learning rate that is tried
def test_a_search_on_a_disk_that_is_full_loses_nothing(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    protocol = tmp_path / "tiny.toml"
    protocol.write_text(deaths.PROTOCOL)
    command = ("tune", "--protocol", protocol, "--budget", "2", "--out")
    codes = []
    for size in (64, 200, 50_000):
        subprocess.run(["mount", "-o", f"remount,size={size}k", small_disk], check=True)
        codes.append(exit_code(*command, small_disk))
        errors = capsys.readouterr().err
        assert codes[-1] == 0 or "no room to write" in errors
        assert "Traceback" not in errors
    assert codes[0] == 1
    assert codes[-1] == 0
    assert exit_code(*command, tmp_path / "whole") == 0
    assert (small_disk / "tuned.toml").read_text() == (tmp_path / "whole" / "tuned.toml").read_text()


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_modules_are_imported_is_one_line(number: signal.Signals, tmp_path: Path) -> None:
    process = start("reproduce", "--out", tmp_path)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert errors == f"stopped; nothing is lost. Go on with: adabayes reproduce --out {tmp_path}\n"
    assert process.returncode == 128 + number


def test_sigterm_stops_a_command_that_has_no_checkpoints_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(SystemExit) as end:
        cli.main(["theory", "--out", str(tmp_path)])
    timer.join()
    assert end.value.code == 143
    assert capsys.readouterr().err == "stopped\n"
    assert not list(tmp_path.glob("*.tmp"))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_download_that_is_stopped_keeps_what_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n" + bytes(1 << 20))
                part = tmp_path / "some.tar.gz.part"
                while not part.exists() or part.stat().st_size < 1 << 18:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGTERM)
                with suppress(OSError):
                    connection.recv(1)  # until it is closed

        thread = threading.Thread(target=answer)
        thread.start()
        archive = download.Archive(f"http://127.0.0.1:{server.getsockname()[1]}/some.tar.gz", 10_000_000, "md5", "")
        source = replace(download.SOURCES["cifar10"], archives=(archive,))
        monkeypatch.setitem(download.SOURCES, "cifar10", source)
        with pytest.raises(SystemExit) as end:
            cli.main(["data", "fetch", "cifar10", "--data", str(tmp_path)])
        thread.join()
    assert end.value.code == 143
    assert "nothing is lost. Go on with: adabayes data fetch cifar10" in capsys.readouterr().err
    assert (tmp_path / "some.tar.gz.part").stat().st_size >= 1 << 18


@pytest.mark.long
def test_the_second_ctrl_c_stops_several_processes_at_once(tmp_path: Path) -> None:
    process = start("reproduce", "--optimizers", "sgd,adam", "--jobs", "2", "--out", tmp_path)
    while len(list(tmp_path.rglob("spec.json"))) < 2:  # their processes are importing torch, and know of no signals yet
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not any(RunFolder(path.parent).is_locked() for path in tmp_path.glob("runs/*/spec.json"))
