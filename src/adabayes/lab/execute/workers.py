"""Processes that do runs one after the other and keep their data, so that it is loaded once for all of them.

A run that kills its process takes no other with it: the next run gets a new process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typing_extensions import Self

from adabayes.lab.execute.sweep import Options

__all__ = ["Worker", "Workers"]

_PATIENCE = 10.0  # seconds for a process to end


class Worker:
    """A process of :mod:`adabayes.lab.execute.worker`."""

    def __init__(self) -> None:
        # In a session of its own, so that Ctrl-C reaches it once, through us.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "adabayes.lab.execute.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.is_idle = True
        self._errors: list[str] = []  # of the present run
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def ask(self, folder: Path, options: Options, share: int) -> Iterator[dict[str, Any]]:
        """Ask for the run of a folder, and yield what it reports; the last is its status, unless the process dies."""
        self._errors.clear()
        self.is_idle = False
        request = {"folder": str(folder), "share": share, "options": asdict(options)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request, default=str) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it is dead, and so reports nothing
            return
        for line in self.process.stdout:
            told = json.loads(line)
            self.is_idle = "status" in told
            yield told
            if self.is_idle:
                return

    def death(self) -> tuple[str, str]:
        """Wait for the end of the process, and return the reason and what it wrote to standard error."""
        code = self.process.wait()
        self._reader.join()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        said = f": {self._errors[-1].strip()}" if self._errors else ""
        return f"its process {how}{said}", "".join(self._errors)

    def close(self) -> None:
        """End the process, by closing its input."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:  # a thread of an optimizer may keep it alive
            self.process.kill()
        self._reader.join()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def _read_errors(self) -> None:
        for line in self.process.stderr or ():
            self._errors.append(line)


class Workers:
    """A pool of processes, which grows when all of them are busy.

    A context manager, which can be entered again within itself. The processes end when the outermost is left.
    """

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._lock = threading.Lock()
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        while not self._depth and self._idle:
            self._idle.pop().close()

    @contextmanager
    def one(self) -> Iterator[Worker]:
        """Lend a process. One that has died, or is left in the middle of a run, is not lent again."""
        with self._lock:
            worker = self._idle_one() or Worker()
            self._busy.add(worker)
        try:
            yield worker
        finally:
            with self._lock:
                self._busy.discard(worker)
            if worker.is_idle:
                self._idle.append(worker)
            else:
                worker.process.kill()
                worker.close()

    def _idle_one(self) -> Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            worker.close()  # it was killed meanwhile
        return None

    def terminate(self) -> None:
        """Ask those that are busy to stop at the next step."""
        for worker in list(self._busy):
            worker.process.terminate()

    def kill(self) -> None:
        for worker in list(self._busy):
            worker.process.kill()
