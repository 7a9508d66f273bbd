"""Sharded checkpoints: a folder to which each process writes its shards, by torch's distributed checkpointing."""

from __future__ import annotations

import errno
import hashlib
import inspect
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adabayes.lab.run.files import room_for, sync_folder

# What takes half a second to import, and is needed for sharded checkpoints alone, is imported where it is used.

__all__ = ["check", "contents", "read", "read_whole", "write"]

_LAG = 30.0  # seconds after which a file that one process has seen is visible to all, on a network file system


def write(path: Path, tensors: dict[str, Tensor], rank: int) -> dict[str, str]:
    """Write the shards of this process, together with all others; return checksums of the files that it wrote."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with room_for(path), _plain_errors():
        path.mkdir(parents=True, exist_ok=True)
        save(dict(tensors), storage_writer=FileSystemWriter(path, single_file_per_rank=True))
        sync_folder(path)
    names = [file.name for file in path.glob(f"__{rank}_*")] + [".metadata"] * (rank == 0)
    return {name: _sha256(path / name) for name in names}


def check(path: Path, files: dict[str, str], names: Iterable[str] | None = None, wait: bool = False) -> None:
    """Raise if a file is not what it was when it was written: one of these names, or of all.

    Args:
        path: the folder.
        files: checksums.
        names: of the files to look at.
        wait: whether to give a network file system time to show what another process has seen.
    """
    end = time.monotonic() + (_LAG if wait else 0)
    while not all((path / name).exists() for name in files) and time.monotonic() < end:
        time.sleep(0.1)
    for name in files if names is None else names:
        if _sha256(path / name) != files[name]:
            raise ValueError(f"the checksum of {path.name}/{name} is wrong")


def read(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, together with all other processes: each reads the shards that it needs."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with _plain_errors():
        load(dict(tensors), checkpoint_id=str(path))


def can_be_read_alone() -> bool:
    """Tell whether one process of several can read shards by itself with this version of torch."""
    from torch.distributed.checkpoint.state_dict_loader import load

    return "no_dist" in inspect.signature(load).parameters


def read_whole(path: Path) -> dict[str, Tensor]:
    """Return all tensors, whole; for one process, or for one that does as if it were alone."""
    from torch.distributed.checkpoint.state_dict_loader import load

    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in contents(path).items()}
    with _plain_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(tensors), checkpoint_id=str(path), no_dist=True)
    return tensors


def contents(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shape and dtype of each tensor."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    entries: dict[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the error that one of the processes had, in place of one that nobody handles."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, OSError):
            raise cause from error
        if "inline_container" in str(cause):  # torch's writer, which does not say why it could not write
            raise OSError(errno.ENOSPC, "torch could not write all of a file") from error
        raise ValueError(f"{type(cause).__name__}: {cause}") from error


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()
