"""Writes files that stay whole if the machine stops, and reports a full disk clearly."""

from __future__ import annotations

import errno
import glob
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

__all__ = ["DiskFull", "append", "remove_leftovers", "room_for", "sync_folder", "write_atomically"]

_TEMPORARY = re.compile(r".+\.[0-9a-f]+\.tmp")  # a random token; in older versions, a process ID
_BINARY = getattr(os, "O_BINARY", 0)


class DiskFull(OSError):
    """The disk is full. Nothing that was written before is lost."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that, if the machine stops at any moment, it is either complete or as it was before."""
    remove_leftovers(path.parent, path.name)
    with room_for(path):
        while not _replace(path, content):
            pass  # another process took the temporary file for a dead one's, just before it was locked
        sync_folder(path.parent)


def append(path: Path, lines: bytes) -> None:
    """Append lines to a file, all or none; a last line that was cut off is ended first."""
    with room_for(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _BINARY, 0o666)
        try:
            size = os.lseek(descriptor, 0, os.SEEK_END)
            if size:
                os.lseek(descriptor, size - 1, os.SEEK_SET)
                if os.read(descriptor, 1) != b"\n":
                    lines = b"\n" + lines
            try:
                _write_all(descriptor, lines)
            except BaseException:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary files that dead processes have left: those of one file, or of all in a folder."""
    if sys.platform != "win32":
        for path in folder.glob("*.tmp" if name is None else f"{glob.escape(name)}.*.tmp"):
            if _TEMPORARY.fullmatch(path.name):
                with suppress(OSError):
                    _remove_if_dead(path)


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Turn the error of a full disk into one that says what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DiskFull) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DiskFull(
            error.errno,
            f"no room to write {path} ({error.strerror}). Nothing is lost: make room and give the same command, and "
            "the run goes on from its last checkpoint",
        ) from error


# A temporary file is locked while it is written. So the files of dead processes can be told from those of live ones, on
# this machine and on others that share the folder.


def _replace(path: Path, content: bytes) -> bool:
    """Write a temporary file and rename it; return whether it was still there."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
    try:
        try:
            if sys.platform != "win32":
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(descriptor, content)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except FileNotFoundError:
        return False
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return True


def _remove_if_dead(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        if sys.platform != "win32":
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its writer is alive
            os.unlink(path)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to the disk, so that renamed files survive a loss of power."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
