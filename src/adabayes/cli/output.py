"""Standard output and standard error that do not make a command fail after its work is done.

Characters that the encoding lacks are replaced. Output to a closed pipe, as after ``| head -1``, is discarded.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["forgiving"]


@contextmanager
def forgiving() -> Iterator[None]:
    """Replace standard output and standard error by forgiving streams."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = mine = _forgiving(sys.stdout), _forgiving(sys.stderr)
    try:
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            for stream in filter(None, mine):
                stream.flush()
    except _Unwritable as error:
        sys.exit(f"adabayes: {error}")


class _Unwritable(OSError):
    """Raised if output cannot be written, as on a full disk."""


class _File(io.FileIO):
    """A file that discards output after a write error; a closed pipe is not an error."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if not isinstance(error, BrokenPipeError):
                raise _Unwritable(f"cannot write the output: {error}") from error
            return memoryview(data).nbytes


def _forgiving(stream: TextIO) -> TextIO:
    """Return a forgiving stream to the same file; return None, or a stream without a file, unchanged."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        file = _File(stream.fileno(), "wb", closefd=False)
    except OSError:
        return stream
    stream.flush()
    return io.TextIOWrapper(
        file if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(file),  # the first under python -u
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors == "backslashreplace" else "replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
