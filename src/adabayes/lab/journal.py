"""The journal of a search. It is Optuna's, and is repaired after a kill or a full disk."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from adabayes.lab.compatibility import remove_optuna_locks
from adabayes.lab.run.files import append, room_for, write_atomically

__all__ = ["JournalError", "mend", "read"]

_START = b'{"op_code":'  # of every record; it cannot occur within one, where quotation marks are escaped


class JournalError(ValueError):
    """A file that is not a journal, or cannot be read. It is not changed."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} is not a journal that tune can continue ({why}). It was not changed: move it away, or choose "
            "another --out. Without it, finished trials are found again by their folders in runs"
        )


class _Backend(JournalFileBackend):
    """Optuna's backend without its lock, which a kill would leave behind; the folder's lock takes its place."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        append(self._path, "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode())


def read(path: Path) -> JournalStorage:
    """Read a journal, or begin one."""
    try:
        with room_for(path):
            return JournalStorage(_Backend(path))
    except OSError:
        raise
    except Exception as error:  # Optuna raises various errors for inconsistent records
        raise JournalError(path, f"{type(error).__name__}: {error}") from error


def mend(path: Path, warn: Callable[[str], None]) -> None:
    """Remove records that were half-written when a process was killed, the disk was full or the power failed.

    All whole records stay. The caller must hold the folder's lock.
    """
    remove_optuna_locks(path)
    content = path.read_bytes() if path.exists() else b""
    records = list(_records(path, content))
    mended = b"".join(record + b"\n" for record in records)
    if mended != content:
        write_atomically(path, mended)
        warn(f"{path} was damaged, as by a full disk; its {len(records)} whole records are kept")


def _records(path: Path, content: bytes) -> Iterator[bytes]:
    """Yield the whole records. A line has several where one was appended to another that was cut off."""
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        before, *pieces = (piece.strip(b"\0\r") for piece in re.split(b"(?=%s)" % re.escape(_START), line))
        if not _START.startswith(before):
            raise JournalError(path, f"line {number} begins with {before[:20]!r}")
        whole = [piece for piece in pieces if _is_whole(piece)]
        if pieces and pieces[-1:] != whole[-1:] and number < len(lines):
            raise JournalError(path, f"line {number} is damaged")
        yield from whole


def _is_whole(piece: bytes) -> bool:
    try:
        json.loads(piece)
    except ValueError:
        return False
    return True
