"""Let a command die at its N-th file operation, for many N: ``python -m tests.workers.deaths FOLDER STEP COMMAND...``.

Everything is imported once; each command runs in a fork whose ``os`` is patched to count what it does to files. After
each death the command is given again, and has to end as if nothing had happened. Problems are told in lines of JSON; a
last line counts the deaths. STEP 1 takes every N twice: once killed, once with another kind of trouble.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adabayes import cli
from adabayes.lab.run.folder import RunFolder
from tests.lab.conftest import without_times

KILLED = "killed"  # before the operation, or in the midst of a write
FULL = "full"  # no room for this operation
STAYS_FULL = "stays full"  # nor for all that follow
TERMINATED = "SIGTERM"
INTERRUPTED = "Ctrl-C twice"
OTHERS = (FULL, STAYS_FULL, TERMINATED, INTERRUPTED)
STOPPED = "stopped; nothing is lost. Go on with: adabayes"
PROTOCOL = """
extends = 'quick'
compare = ['adabayes']
batch_size = 720
epochs = 2
seeds = 1
model_options = { width = 4 }
"""


class Faults:
    """Counts the file operations in a folder, and lets the one with number ``at`` fail."""

    def __init__(self, folder: Path, kind: str = "", at: int = 0) -> None:
        self.folder, self.kind, self.at = str(folder), kind, at
        self.count = 0
        self.descriptors: set[int] = set()

    def install(self) -> None:
        """Patch the functions with which the lab, filelock and Optuna write files."""
        for name in ("mkdir", "replace", "rename", "symlink", "unlink", "remove"):
            self._patch(os, name, self._on_path)
        self._patch(builtins, "open", self._on_builtin_open)
        self._patch(os, "open", self._on_open)
        self._patch(os, "close", self._on_close)
        self._patch(os, "write", self._on_write)
        self._patch(os, "fsync", self._on_fsync)

    def _patch(self, module: Any, name: str, call: Callable[..., Any]) -> None:
        real = getattr(module, name)
        setattr(module, name, lambda *args, **options: call(real, *args, **options))

    def _on_path(self, real: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        if self._is_ours(path):
            self._meet(path, takes_room=real.__name__ not in ("unlink", "remove"))
        return real(path, *args, **options)

    def _on_builtin_open(self, real: Callable[..., Any], path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if self._is_ours(path) and set(mode) & set("wax+"):
            self._meet(path)
        return real(path, mode, *args, **options)

    def _on_open(self, real: Callable[..., int], path: Any, flags: int, *args: Any, **options: Any) -> int:
        if not self._is_ours(path):
            return real(path, flags, *args, **options)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._meet(path)
        descriptor = real(path, flags, *args, **options)
        self.descriptors.add(descriptor)
        return descriptor

    def _on_close(self, real: Callable[..., None], descriptor: int) -> None:
        self.descriptors.discard(descriptor)
        real(descriptor)

    def _on_write(self, real: Callable[..., int], descriptor: int, content: Any) -> int:
        if descriptor in self.descriptors:
            self._meet(descriptor, halfway=lambda: real(descriptor, content[: len(content) // 2]))
        return real(descriptor, content)

    def _on_fsync(self, real: Callable[..., None], descriptor: int) -> None:
        if descriptor in self.descriptors:
            self._meet(descriptor)
        real(descriptor)

    def _is_ours(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)

    def _meet(self, what: Any, halfway: Callable[[], Any] = lambda: None, takes_room: bool = True) -> None:
        """Count an operation; when its turn has come, do half of it and let it fail."""
        self.count += 1
        if not (self.count == self.at or (self.kind == STAYS_FULL and self.count > self.at)):
            return
        if self.kind == KILLED:
            halfway()
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == TERMINATED:
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.kind == INTERRUPTED:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        elif takes_room:
            halfway()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(what))


def run(command: list[str], said: Path, faults: Faults) -> tuple[int, int]:
    """Run a command in a fork, and return its exit code and the number of operations."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            faults.install()
            cli.main(command)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 70
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(writer, str(faults.count).encode())
            os._exit(code)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as counted:
        return os.waitstatus_to_exitcode(status), int(counted.read() or 0)


def outcome(out: Path) -> dict[str, Any]:
    """Return everything in a folder that does not depend on the clock."""
    found: dict[str, Any] = {"files": sorted(str(path.relative_to(out)) for path in out.rglob("*"))}
    for path in sorted((out / "runs").iterdir()):
        folder = RunFolder(path)
        found[path.name] = {
            "metrics": without_times(folder.metrics()),
            "rates": folder.metrics("rates.jsonl"),
            "result": folder.read("result.json"),
            "model": (path / "model.safetensors").read_bytes().hex(),
        }
    tuned = out / "tuned.toml"
    return found | {"tuned": tuned.read_text() if tuned.exists() else None}


def ended_well(kind: str, code: int, said: str) -> bool:
    """Return whether a command that met an error ended correctly: with 0 if the error came too late to matter."""
    if kind == KILLED:
        return code == -signal.SIGKILL
    if "Traceback" in said:
        return False
    if kind == TERMINATED:
        return code == 0 or (code == 143 and STOPPED in said)
    if kind == INTERRUPTED:
        return code == 130 and STOPPED in said
    return code == 0 or (code == 1 and "No space left on device" in said)


def problems_after(kind: str, at: int, command: list[str], out: Path, said: Path, whole: dict[str, Any]) -> list[str]:
    """Let a command die, and run it again; return what is wrong then, and the output of both."""
    code, _ = run(command, said, Faults(out, kind, at))
    problems = [] if ended_well(kind, code, said.read_text()) else [f"ended with {code}"]
    if kind != KILLED:
        problems += [f"left {path}" for path in out.rglob("*.tmp")]
    first = said.read_text()
    code, _ = run(command, said, Faults(out))
    if code != 0:
        problems.append(f"does not go on: {code}")
    elif (found := outcome(out)) != whole:
        left = sorted(set(found["files"]) ^ set(whole["files"]))
        problems.append(f"ends otherwise: files {left}, {[key for key in whole if found.get(key) != whole[key]]}")
    return [*problems, first[-3000:], said.read_text()[-3000:]] if problems else []


def main(root: Path, step: int, command: list[str]) -> None:
    torch.set_num_threads(1)
    lab = [f"adabayes.lab.{name}" for name in ("commands", "report", "tuning")]
    for name in (*lab, "torch._dynamo", "scipy.stats.qmc", "plotly.offline"):
        importlib.import_module(name)
    protocol, out, said = root / "tiny.toml", root / "out", root / "said"
    protocol.write_text(PROTOCOL)
    command = [*command, "--protocol", str(protocol), "--checkpoint-every", "0", "--out", str(out)]
    code, operations = run(command, said, Faults(out))
    assert code == 0, said.read_text()
    whole = outcome(out)
    cases = [(at, kind) for at in range(1, operations + 1) for kind in (KILLED, OTHERS[at % len(OTHERS)])]
    for at, kind in cases[::step]:
        shutil.rmtree(out)
        if problems := problems_after(kind, at, command, out, said, whole):
            print(json.dumps({"at": at, "kind": kind, "problems": problems}), flush=True)
    print(json.dumps({"deaths": len(cases[::step])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
