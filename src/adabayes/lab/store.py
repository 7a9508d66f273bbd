"""The folder of a run: plain files that survive a kill at any instant, a full disk and a damaged checkpoint.

spec.json           what is run, in full; its hash is the run's identity and part of the folder's name
environment.json    one entry each time the run was started: versions, commit, machine, threads, data
rates.jsonl         of the AdaBayes pair: learning rates of a sample of weights, epoch by epoch
metrics.jsonl       appended to after each epoch; of an epoch that was run twice, the last line counts
checkpoint-N.*      the newest two: tensors in safetensors; in JSON the rest, and checksums of both
model.safetensors   the weights at the end
result.json         how it ended: done or diverged
failed.json         why it did not, until it is run again
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load, save
from torch import Tensor

from adabayes.lab.protocol import Spec

__all__ = ["Busy", "DiskFull", "RunFolder"]

JSON = Any


class Busy(OSError):
    """Another process is working on the run."""


class DiskFull(OSError):
    """There is no room. Nothing that was there is lost."""


class RunFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep others out; a process that dies lets go."""
        with _room_for(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with exclusive(self.path / ".lock", f"another process is working on {self.path}; it was left alone"):
            yield

    def is_locked(self) -> bool:
        if not (self.path / ".lock").exists():
            return False
        try:
            with FileLock(self.path / ".lock", timeout=0):
                return False
        except Timeout:
            return True
        except OSError:  # a folder that one may not write to
            return False

    # Small files

    def spec(self) -> Spec | None:
        return spec_from(self.read("spec.json"), self.path / "spec.json")

    def write(self, name: str, content: JSON) -> None:
        write_atomically(self.path / name, json.dumps(content, indent=1).encode())

    def read(self, name: str) -> JSON | None:
        """What a file holds, or None where there is none, or none that can be read."""
        return read_json(self.path / name)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def status(self) -> str:
        """done, diverged, running, failed, interrupted or missing."""
        if result := self.read("result.json"):
            return str(result["status"])
        if self.is_locked():
            return "running"
        if (self.path / "failed.json").exists():
            return "failed"
        return "interrupted" if self.checkpoints() or self.metrics() else "missing"

    def fail(self, error: str, trace: str) -> None:
        """Note why the run has no result, where there is room for that."""
        with suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            self.write("failed.json", {"error": error, "traceback": trace, "time": time.time()})

    # Metrics

    def log(self, row: dict[str, JSON], name: str = "metrics.jsonl") -> None:
        path = self.path / name
        with _room_for(path), path.open("ab+") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the end of a line that a kill, or a full disk, cut off
                    file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self, name: str = "metrics.jsonl") -> list[dict[str, JSON]]:
        """A row for each epoch, in order."""
        path = self.path / name
        rows: dict[int, dict[str, JSON]] = {}
        for line in path.read_bytes().split(b"\n") if path.exists() else ():
            try:
                row = json.loads(line)
                rows[row["epoch"]] = row
            except (ValueError, KeyError, TypeError):
                continue  # a line that was cut off; its epoch was, or will be, run again
        return [rows[epoch] for epoch in sorted(rows)]

    # Checkpoints

    def checkpoints(self) -> list[int]:
        """The numbers of those there are, newest first."""
        return sorted((int(path.stem.split("-")[1]) for path in self.path.glob("checkpoint-*.json")), reverse=True)

    def save(self, number: int, tree: JSON) -> None:
        """Write a checkpoint of plain data and tensors. It counts once its JSON is there, which is last."""
        tensors: dict[str, Tensor] = {}
        content = save_tree(tree, tensors)
        blob = _blob(tensors)
        body = json.dumps(content)
        record = {"tensors": hashlib.sha256(blob).hexdigest(), "rest": _sha256(body), "content": body}
        write_atomically(self.path / f"checkpoint-{number}.safetensors", blob)
        write_atomically(self.path / f"checkpoint-{number}.json", json.dumps(record).encode())
        for old in self.checkpoints()[2:]:
            self._delete(old)

    def load(self) -> JSON | None:
        """The newest checkpoint that is whole, or None. Damaged ones are named in a warning."""
        for number in self.checkpoints():
            path = self.path / f"checkpoint-{number}.json"
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                blob = path.with_suffix(".safetensors").read_bytes()
                if (
                    hashlib.sha256(blob).hexdigest() != record["tensors"]
                    or _sha256(record["content"]) != record["rest"]
                ):
                    raise ValueError("its checksum is wrong")
                return load_tree(json.loads(record["content"]), load(blob))
            except (OSError, ValueError, KeyError, TypeError) as error:
                warnings.warn(f"{path} is damaged ({error}); it is left out", stacklevel=2)
        return None

    def finish(self, weights: dict[str, Tensor], result: dict[str, JSON]) -> None:
        """Keep the weights and the result; checkpoints are of no more use."""
        write_atomically(self.path / "model.safetensors", _blob(weights))
        self.write("result.json", result)
        for number in self.checkpoints():
            self._delete(number)

    def _delete(self, number: int) -> None:
        self.remove(f"checkpoint-{number}.json")
        self.remove(f"checkpoint-{number}.safetensors")


def folder_of(spec: Spec, out: Path) -> RunFolder:
    return RunFolder(out / "runs" / spec.folder)


@contextmanager
def exclusive(path: Path, message: str, timeout: float = 1.0) -> Iterator[None]:
    """Hold a lock on a file, or say that another process does. One that dies lets go."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout)  # longer than it takes to look whether it is held
    except Timeout:
        raise Busy(message) from None
    try:
        yield
    finally:
        lock.release()


def read_json(path: Path) -> JSON | None:
    """What a file holds, or None; one that is damaged is named in a warning."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        warnings.warn(f"{path} is damaged ({error}); it is left out", stacklevel=2)
        return None


def spec_from(entry: JSON, path: Path) -> Spec | None:
    if entry is None:
        return None
    try:
        return Spec(**entry)
    except TypeError as error:
        warnings.warn(f"{path} is not of this version of adabayes ({error}); it is left out", stacklevel=2)
        return None


def save_tree(tree: JSON, tensors: dict[str, Tensor]) -> JSON:
    """Plain data as JSON can hold it; tensors go to ``tensors``, with a reference in their place."""
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = tree
        return {"tensor": name} if tree.is_contiguous() else {"tensor": name, "stride": list(tree.stride())}
    if isinstance(tree, dict):
        return {"dict": [[save_tree(k, tensors), save_tree(v, tensors)] for k, v in tree.items()]}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [save_tree(item, tensors) for item in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"cannot save a {type(tree).__name__} in a checkpoint: {tree!r}")


def load_tree(tree: JSON, tensors: dict[str, Tensor]) -> JSON:
    """The inverse of :func:`save_tree`, memory layouts included."""
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        t = tensors[tree["tensor"]]
        if "stride" not in tree:
            return t
        return torch.empty_strided(t.shape, tree["stride"], dtype=t.dtype).copy_(t)
    if "dict" in tree:
        return {load_tree(k, tensors): load_tree(v, tensors) for k, v in tree["dict"]}
    ((kind, items),) = tree.items()
    return (tuple if kind == "tuple" else list)(load_tree(item, tensors) for item in items)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that, whenever the machine stops, it is there whole or as it was before."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with _room_for(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _room_for(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DiskFull(
            error.errno,
            f"no room to write {path} ({error.strerror}). Nothing is lost: make room and give the same command, and "
            "the run goes on from its last checkpoint",
        ) from error


def _blob(tensors: dict[str, Tensor]) -> bytes:
    # Copies, for tensors may share memory, which safetensors refuses.
    return save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
