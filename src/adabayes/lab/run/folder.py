"""The folder of a run: plain files that survive a kill at any instant, a full disk and a damaged checkpoint.

spec.json           what is run, in full; its hash is the run's identity and part of the folder's name
environment.json    one entry each time the run was started: versions, commit, machine, threads, data
rates.jsonl         of the AdaBayes pair: learning rates of a sample of weights, epoch by epoch
metrics.jsonl       appended to after each epoch; of an epoch that was run twice, the last line counts
curve.jsonl         tests within epochs, if there are any
checkpoint-N.*      the newest two: tensors in safetensors, or in a folder with the shards of each process of FSDP2;
                    in JSON the rest, and checksums of all
model.safetensors   the weights at the end
result.json         how it ended: done or diverged
failed.json         why it did not, until it is run again
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load, save
from torch import Tensor

from adabayes.lab import schema
from adabayes.lab.protocol import SPEC, Spec
from adabayes.lab.run import shards
from adabayes.lab.run.files import DiskFull, append, remove_leftovers, room_for, write_atomically
from adabayes.lab.schema import Kind, Misfit

__all__ = ["Busy", "DiskFull", "RunFolder", "exclusive", "folder_of", "read_json", "spec_from", "write_atomically"]

JSON = Any

# Entries that are read from these files; there may be more.
_COST = schema.number(0, 1e100)
_LAYERS = schema.listed(schema.NUMBERS)
_KINDS: dict[str, Kind] = {
    "spec.json": SPEC,
    "result.json": schema.table(
        {"status": schema.choice("done", "diverged", "pruned")},
        {"test_loss": schema.NUMBER, "test_error": schema.NUMBER},
        others=schema.ANYTHING,
    ),
    "failed.json": schema.table({"error": schema.TEXT}, others=schema.ANYTHING),
    "environment.json": schema.listed(
        schema.table(
            dict.fromkeys(("adabayes", "torch", "python", "system", "processor", "data"), schema.TEXT)
            | {"threads": schema.whole(1), "commit": schema.nothing_or(schema.TEXT)},
            others=schema.ANYTHING,
        )
    ),
    "curve.jsonl": schema.table(
        {"epoch": _COST, "seconds": _COST, "test_loss": schema.NUMBER, "test_error": schema.NUMBER},
        others=schema.ANYTHING,
    ),
    "metrics.jsonl": schema.table(
        {"epoch": schema.whole(0)} | dict.fromkeys(("steps", "state_bytes", "train_seconds", "test_seconds"), _COST),
        others=schema.nothing_or(schema.NUMBER),
    ),
    "rates.jsonl": schema.table(
        {
            "epoch": schema.whole(0),
            "lr": schema.FINITE,
            "lr_sgd": schema.FINITE,
            "layers": schema.listed(schema.TEXT),
            "adam": _LAYERS,
            "gain": _LAYERS,
        },
        others=schema.ANYTHING,
    ),
}
_RECORD = schema.table(
    {"rest": schema.TEXT, "content": schema.TEXT},
    {"tensors": schema.TEXT, "shards": schema.TEXT, "files": schema.table({}, others=schema.TEXT)},
)
_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]*)\.(json|safetensors|[0-9a-f]{8}\.shards)")


class Busy(OSError):
    """Another process is working on the run."""


class RunFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._damaged: set[int] = set()  # checkpoints

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out, and remove what a dead one has left unfinished. Dying releases the lock."""
        with room_for(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with exclusive(self.path / ".lock", f"another process is working on {self.path}; it was left alone"):
            remove_leftovers(self.path)
            self._keep_checkpoints(self.checkpoints())  # not those without their JSON
            yield

    def is_locked(self) -> bool:
        if not (self.path / ".lock").exists():
            return False
        try:
            with FileLock(self.path / ".lock", timeout=0):
                return False
        except Timeout:
            return True
        except OSError:  # a folder without permission to write
            return False

    # Small files

    def spec(self) -> Spec | None:
        entry = self.read("spec.json")
        return None if entry is None else Spec(**entry)

    def write(self, name: str, content: JSON) -> None:
        write_atomically(self.path / name, json.dumps(content, indent=1).encode())

    def read(self, name: str) -> JSON | None:
        """Return what a file holds, or None if there is none; one that is damaged is named in a warning."""
        return read_json(self.path / name, _KINDS[name])

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def status(self) -> str:
        """Return how far the run is: done, diverged, pruned, running, failed, interrupted or missing."""
        if result := self.read("result.json"):
            return str(result["status"])
        if self.is_locked():
            return "running"
        if (self.path / "failed.json").exists():
            return "failed"
        return "interrupted" if self.checkpoints() or self.metrics() else "missing"

    def fail(self, error: str, trace: str) -> None:
        """Note why the run has no result, if there is room on the disk."""
        with suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            self.write("failed.json", {"error": error, "traceback": trace, "time": time.time()})

    def tidy(self) -> None:
        """Remove what a kill has left beside the result of a finished run, unless another process has the run."""
        if any(path for pattern in ("checkpoint-*", "*.tmp", "failed.json") for path in self.path.glob(pattern)):
            with suppress(OSError), self.lock():
                self.remove("failed.json")
                self._keep_checkpoints([])

    # Metrics

    def log(self, row: dict[str, JSON], name: str = "metrics.jsonl") -> None:
        append(self.path / name, json.dumps(row).encode() + b"\n")

    def metrics(self, name: str = "metrics.jsonl") -> list[dict[str, JSON]]:
        """Return a row for each epoch, or test within one, in order; damaged lines are named in a warning."""
        path = self.path / name
        rows: dict[float, dict[str, JSON]] = {}
        for i, line in enumerate(path.read_bytes().split(b"\n") if path.exists() else ()):
            try:
                row = _loaded(line, _KINDS[name])
                rows[row["epoch"]] = row
            except ValueError as error:
                start = b'{"epoch": '
                if isinstance(error, Misfit) or line[: len(start)] != start[: len(line)]:
                    warnings.warn(f"{path}, line {i + 1} is damaged ({error}); it is left out", stacklevel=2)
                # Otherwise it was cut off, and its epoch was, or will be, run again.
        return [rows[epoch] for epoch in sorted(rows)]

    # Checkpoints

    def checkpoints(self) -> list[int]:
        """Return the numbers of those there are, newest first."""
        return sorted((number for path, number in self._checkpoint_files() if path.suffix == ".json"), reverse=True)

    def save(self, number: int, tree: JSON) -> None:
        """Write a checkpoint of plain data and tensors. It counts once its JSON is there, which is last."""
        tensors: dict[str, Tensor] = {}
        content = save_tree(tree, tensors)
        blob = _blob(tensors)
        write_atomically(self.path / f"checkpoint-{number}.safetensors", blob)
        self._record(number, content, {"tensors": hashlib.sha256(blob).hexdigest()})

    def new_shards(self, number: int) -> Path:
        """Return a folder for the shards of a checkpoint. It is a new one each time, so that no other is damaged."""
        return self.path / f"checkpoint-{number}.{secrets.token_hex(4)}.shards"

    def save_shards(self, number: int, content: JSON, path: Path, files: dict[str, str]) -> None:
        """Let a checkpoint count whose shards are written: files, by their names, with their checksums."""
        self._record(number, content, {"shards": path.name, "files": files})

    def load(self) -> JSON | None:
        """Return the newest checkpoint that is whole, or None. Damaged ones are named in a warning."""
        for number, record in self.records():
            try:
                return load_tree(json.loads(record["content"]), self.tensors(number, record))
            except (OSError, ValueError, KeyError, TypeError) as error:
                self.note_damage(number, error)
        return None

    def records(self) -> Iterator[tuple[int, JSON]]:
        """Yield the number of each checkpoint and what its JSON holds, newest first; their tensors are not read."""
        for number in self.checkpoints():
            try:
                record = _loaded((self.path / f"checkpoint-{number}.json").read_bytes(), _RECORD)
                if _sha256(record["content"]) != record["rest"]:
                    raise ValueError("its checksum is wrong")
            except (OSError, ValueError) as error:
                self.note_damage(number, error)
            else:
                yield number, record

    def tensors(self, number: int, record: JSON, wait: bool = False) -> dict[str, Tensor]:
        """Read the tensors of a checkpoint, whole; raise if they are damaged.

        With ``wait``, a network file system gets some time to show what another process has seen.
        """
        if "shards" in record:
            path = self.path / record["shards"]
            shards.check(path, record["files"], wait=wait)
            return shards.read_whole(path)
        path = self.path / f"checkpoint-{number}.safetensors"
        shards.check(self.path, {path.name: record["tensors"]}, wait=wait)
        return load(path.read_bytes())

    def note_damage(self, number: int, error: Exception) -> None:
        """Warn of a checkpoint that cannot be read, and do not count it among the newest."""
        path = self.path / f"checkpoint-{number}.json"
        warnings.warn(f"{path} is damaged ({error}); it is left out", stacklevel=3)
        self._damaged.add(number)

    def _record(self, number: int, content: JSON, tensors: JSON) -> None:
        body = json.dumps(content)
        record = {**tensors, "rest": _sha256(body), "content": body}
        write_atomically(self.path / f"checkpoint-{number}.json", json.dumps(record).encode())
        self._damaged.discard(number)
        self._keep_checkpoints([n for n in self.checkpoints() if n not in self._damaged][:2])

    def finish(self, weights: dict[str, Tensor], result: dict[str, JSON]) -> None:
        """Keep the weights and the result; checkpoints are of no more use."""
        write_atomically(self.path / "model.safetensors", _blob(weights))
        self.write("result.json", result)
        self._keep_checkpoints([])

    def _checkpoint_files(self) -> list[tuple[Path, int]]:
        """Return the files of checkpoints and their numbers, JSON first; none that others have named alike."""
        found = ((path, _CHECKPOINT.fullmatch(path.name)) for path in self.path.glob("checkpoint-*"))
        ours = [(path, int(name[1])) for path, name in found if name and path.is_dir() == (path.suffix == ".shards")]
        return sorted(ours, key=lambda file: (file[0].suffix != ".json", file[0].name))

    def _keep_checkpoints(self, numbers: Collection[int]) -> None:
        """Delete all others, and what these checkpoints were written to before."""
        kept = {number: self._tensors_of(number) for number in numbers}
        for path, number in self._checkpoint_files():
            if number not in kept or (path.suffix != ".json" and kept[number] not in (None, path.name)):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def _tensors_of(self, number: int) -> str | None:
        """Return where the tensors of a checkpoint are; None if its JSON does not tell."""
        try:
            record = _loaded((self.path / f"checkpoint-{number}.json").read_bytes(), _RECORD)
        except (OSError, ValueError):
            return None
        return str(record.get("shards", f"checkpoint-{number}.safetensors"))


def folder_of(spec: Spec, out: Path) -> RunFolder:
    return RunFolder(out / "runs" / spec.folder)


@contextmanager
def exclusive(path: Path, message: str, timeout: float = 1.0) -> Iterator[None]:
    """Hold a lock on a file, or raise if another process does. A process that dies releases it."""
    lock = FileLock(path)
    try:
        with room_for(path):
            lock.acquire(timeout=timeout)  # longer than a look at whether it is held takes
    except Timeout:
        raise Busy(message) from None
    try:
        yield
    finally:
        lock.release()


def read_json(path: Path, kind: Kind) -> JSON | None:
    """Return what a file holds, or None; one that is damaged is named in a warning."""
    try:
        return _loaded(path.read_bytes(), kind)
    except FileNotFoundError:
        return None
    except ValueError as error:
        _warn_of(path, error)
    return None


def _loaded(content: bytes, kind: Kind) -> JSON:
    try:
        found = json.loads(content.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    schema.check(kind, found)
    return found


def spec_from(entry: JSON, path: Path) -> Spec | None:
    """Return the run that an entry of a file describes, or None; a damaged one is named in a warning."""
    try:
        schema.check(SPEC, entry)
    except Misfit as error:
        _warn_of(path, error)
        return None
    return Spec(**entry)


def _warn_of(path: Path, error: ValueError) -> None:
    warnings.warn(f"{path} is damaged, or not of this version of adabayes ({error}); it is left out", stacklevel=3)


def save_tree(tree: JSON, tensors: dict[str, Tensor]) -> JSON:
    """Return plain data as JSON can hold it; tensors go to ``tensors``, with a reference in their place."""
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
    """Invert :func:`save_tree`, memory layouts included."""
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


def _blob(tensors: dict[str, Tensor]) -> bytes:
    # Copies, for tensors may share memory, which safetensors refuses.
    return save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
